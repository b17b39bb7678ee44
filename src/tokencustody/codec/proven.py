"""Calls as they were read and proven, whose tokens stay columns: no Python number is made for any of them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, Self

from tokencustody.codec.calls import StoredCall, construct, fields_of
from tokencustody.codec.id_columns import float64s, wide_ids
from tokencustody.records import TOKEN_FIELDS, TokenEntry


@dataclass(frozen=True, slots=True)
class ProvenCall:
    """One call with the ids that it holds itself: columns of 64 bits, the log probabilities float64.

    `record` has everything else; its token fields are not set. Before `prompt` stands the whole sequence of the parent
    call where that was stored only there: the first `shared_len` ids of the prompt that was written. Before the prompt
    of a delta it stands too, but its writer left it out.
    """

    record: TokenEntry
    shared_len: int
    prompt: array[int]
    generation: array[int]
    log_probs: array[float]

    @classmethod
    def of(cls, call: StoredCall) -> Self:
        """Return the call of a stored payload."""
        ids = wide_ids(call.own_ids(), call.token_width)
        return cls(
            construct(TokenEntry, call.fields),
            call.shared_len or 0,
            ids[: call.own_prompt_len],
            ids[call.own_prompt_len :],
            float64s(call.packed_log_probs()),
        )

    @property
    def begins_in_parent(self) -> bool:
        """Whether the whole prompt begins with ids that only the parent call holds."""
        return self.shared_len > 0 or self.record.prompt_is_delta

    def entry(self, prompt: array[int]) -> TokenEntry:
        """Return the record with its lists, given the prompt as it was written."""
        columns: tuple[array[Any], ...] = (prompt, self.generation, self.log_probs)
        lists = {name: column.tolist() for name, column in zip(TOKEN_FIELDS, columns, strict=True)}
        return construct(TokenEntry, {**fields_of(self.record), **lists})
