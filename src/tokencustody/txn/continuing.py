"""A record whose prompt is given only from its parent's sequence on, made whole before it is stored."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokencustody.codec.id_columns import big_endian, digest_of_big_endian
from tokencustody.columns import narrowest, uint64s, widened
from tokencustody.errors import InvalidRecordError, LineageError
from tokencustody.lineage import check_recorded
from tokencustody.records import ParentResolutionStatus, TokenEntry
from tokencustody.txn.sequences import KnownSequence

if TYPE_CHECKING:
    from typing_extensions import Buffer


class ParentReplacedError(LineageError):
    """The parent in the database has another sequence than the one with which a prompt was made whole."""


def checked_suffix(entry: TokenEntry, prompt_suffix: Sequence[int] | Buffer) -> array[int]:
    """Return the ids of a prompt after its parent's sequence. Raises InvalidRecordError where they cannot be that."""
    if len(entry.prompt_token_ids):
        raise InvalidRecordError("prompt_token_ids must be empty beside prompt_suffix, which takes its place")
    if entry.prompt_is_delta:
        raise InvalidRecordError("prompt_suffix makes a whole prompt, so prompt_is_delta must be False")
    if entry.parent_resolution != ParentResolutionStatus.RESOLVED:
        raise InvalidRecordError("prompt_suffix needs a resolved parent_call_id, whose sequence it follows")
    try:
        return narrowest(uint64s(prompt_suffix, "prompt_suffix"))
    except ValueError as exc:
        raise InvalidRecordError(str(exc)) from None


def continued(entry: TokenEntry, parent: KnownSequence | None, suffix: array[int]) -> TokenEntry:
    """Return a copy of a checked record with the whole prompt, its length and its digest.

    Raises LineageError where there is no sequence to follow, and where the record has another length or digest.
    """
    if parent is None or not parent.ids:
        raise LineageError(no_parent(entry))
    width = max(parent.ids.width, suffix.itemsize)
    prompt = widened(parent.ids.column(), width) + widened(suffix, width)
    try:
        whole = widened(prompt, 8) + uint64s(entry.generation_token_ids, "generation_token_ids")
    except ValueError as exc:
        raise InvalidRecordError(str(exc)) from None
    digest = digest_of_big_endian(big_endian(whole))
    check_recorded(entry, whole, lambda _: digest)
    made = {"prompt_token_ids": prompt, "cum_len": len(whole), "digest": digest}
    return entry.model_copy(update=made)


def no_parent(entry: TokenEntry) -> str:
    """Return what an error says of a record without a parent whose sequence its prompt could follow."""
    return (
        f"model call {entry.model_call_id} of rollout {entry.rollout_id}: its parent {entry.parent_call_id} is not "
        "stored with one sequence that prompt_suffix could follow; put the call with its whole prompt"
    )
