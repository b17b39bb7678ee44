"""The pure parent matcher: which committed call does a request continue?

A request continues a call when the model-authored part of its history is the call's own history plus output (the
continuation fingerprint) and the call's recorded request still opens it (the context digest). Fewer or more than
one such call is never decided by a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokencustody.errors import LineageError
from tokencustody.fingerprint import (
    FINGERPRINT_VERSION,
    assistant_fingerprint,
    conversation_digest,
    prefix_digests,
)
from tokencustody.protocols import LineageMatch, LineageResolution
from tokencustody.records import ParentResolutionStatus, TokenEntry, compute_digest

NO_MATCH = "no_match"
AMBIGUOUS = "ambiguous"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A committed call as the matcher sees it: no tokens, only what proves that a request continues it."""

    model_call_id: str
    context_len: int
    context_digest: str
    digest: str | None
    cum_len: int | None


@dataclass(frozen=True, slots=True)
class Continuation:
    """By what a later request is known to continue a call: both hashes, and the version that made them."""

    fingerprint: str
    context_len: int
    context_digest: str
    version: int


def continuation_of(
    request_items: Sequence[dict[str, Any]], response_items: Sequence[dict[str, Any]]
) -> Continuation:
    """Return by what a request is known that continues a call: `request_items` answered with `response_items`.

    Raises ValueError for items that cannot be hashed.
    """
    return Continuation(
        assistant_fingerprint([*request_items, *response_items]),
        len(request_items),
        conversation_digest(request_items),
        FINGERPRINT_VERSION,
    )


def stamp_continuation(entry: TokenEntry, request_items: list[dict[str, Any]]) -> TokenEntry:
    """Fill the continuation fields of `entry` in place from its request and its output items, and return it.

    Entries without them are invisible to resolution. Raises ValueError for items that cannot be hashed.
    """
    made = continuation_of(request_items, entry.output_items)
    entry.continuation_fingerprint = made.fingerprint
    entry.continuation_context_len = made.context_len
    entry.continuation_context_digest = made.context_digest
    entry.fingerprint_version = made.version
    return entry


def choose_parent(
    candidates: Iterable[Candidate], request_items: Sequence[dict[str, Any]]
) -> Candidate | str:
    """Return the one call that `request_items` continue, or the reason why there is none.

    `candidates` all carry the request's fingerprint. Calls with the same non-empty digest and length hold the same
    sequence, so the smallest call id stands for them all.
    """
    known = [c for c in candidates if 0 <= c.context_len <= len(request_items)]
    digests = prefix_digests(request_items, {c.context_len for c in known})
    matching = sorted(
        (c for c in known if c.context_digest == digests[c.context_len]), key=lambda c: c.model_call_id
    )
    if not matching:
        return NO_MATCH
    first = matching[0]
    if len(matching) > 1:
        sequences = {(c.digest, c.cum_len) for c in matching}
        if len(sequences) > 1 or not first.digest or first.cum_len is None:
            return AMBIGUOUS
    return first


def join_chain(chain: Sequence[TokenEntry]) -> tuple[int, ...]:
    """Return the whole sequence of the last entry of `chain`, which runs from a full prompt down to that entry.

    Every entry after the first is a delta on the one before it. Raises LineageError when a link is missing, when a
    delta records no digest to prove its chain, or when a digest or length does not agree with the tokens.
    """
    tokens: list[int] = []
    previous: TokenEntry | None = None
    for entry in chain:
        expected = None if previous is None else previous.model_call_id
        if entry.prompt_is_delta != (previous is not None) or (
            previous is not None and entry.parent_call_id != expected
        ):
            raise LineageError(
                f"model call {entry.model_call_id} of rollout {entry.rollout_id}: its parent chain is broken"
            )
        tokens += entry.prompt_token_ids
        tokens += entry.generation_token_ids
        previous = entry
    assert previous is not None  # noqa: S101 - a chain ends with the entry that was asked for
    check_recorded(previous, tokens, compute_digest)
    return tuple(tokens)


def check_recorded(call: Any, sequence: list[int], digest_of: Callable[[list[int]], str]) -> None:
    """Raise LineageError unless a call's whole sequence has the length and the digest that it records.

    A delta must record a digest, for nothing else proves what it continues.
    """
    where = f"model call {call.model_call_id} of rollout {call.rollout_id}"
    if call.cum_len is not None and call.cum_len != len(sequence):
        raise LineageError(
            f"{where} records a sequence of {call.cum_len} tokens, but its chain has {len(sequence)}"
        )
    if call.prompt_is_delta and not call.digest:
        raise LineageError(f"{where} has a delta prompt and no digest, so its sequence cannot be proven")
    if call.digest and call.digest != digest_of(sequence):
        raise LineageError(f"{where}: its chain has another digest")


def resolved(model_call_id: str, digest: str, tokens: tuple[int, ...]) -> LineageResolution:
    """Return the decision that names a call, whose whole sequence is `tokens`, as the parent."""
    match = LineageMatch(
        model_call_id=model_call_id, cumulative_token_ids=tokens, digest=digest, prev_len=len(tokens)
    )
    return LineageResolution(ParentResolutionStatus.RESOLVED, match)


ROOT = LineageResolution(ParentResolutionStatus.ROOT)


def unresolved(reason: str) -> LineageResolution:
    """Return the decision that no single parent could be proven."""
    return LineageResolution(ParentResolutionStatus.UNRESOLVED, reason=reason)


@dataclass
class RolloutLineage:
    """The matcher over one rollout's complete records, held in memory.

    Not thread-safe. A call id that arrives with two payloads stops being a candidate.
    """

    entries: dict[str, TokenEntry] = field(default_factory=dict)
    conflicting: set[str] = field(default_factory=set)

    def add_entry(self, entry: TokenEntry) -> None:
        """Add a committed record. The same record again is a no-op."""
        known = self.entries.setdefault(entry.model_call_id, entry)
        # By text: two NaN are never equal, and 0.0 equals -0.0.
        if known is not entry and repr(known) != repr(entry):
            self.conflicting.add(entry.model_call_id)

    def resolve(self, request_items: Sequence[dict[str, Any]]) -> LineageResolution:
        """Return whether the request is a root, resolved to one parent, or unresolved and why.

        Raises ValueError for items that cannot be hashed, LineageError for a parent whose delta chain does not
        check out.
        """
        fingerprint = assistant_fingerprint(request_items)
        if not fingerprint:
            return ROOT
        choice = choose_parent(
            (
                Candidate(
                    e.model_call_id,
                    e.continuation_context_len,
                    e.continuation_context_digest,
                    e.digest,
                    e.cum_len,
                )
                for e in self.entries.values()
                if e.continuation_fingerprint == fingerprint
                and e.fingerprint_version in (None, FINGERPRINT_VERSION)
                and e.model_call_id not in self.conflicting
            ),
            request_items,
        )
        if isinstance(choice, str):
            return unresolved(choice)
        chain = [self.entries[choice.model_call_id]]
        seen = {choice.model_call_id}
        while chain[-1].prompt_is_delta:
            parent = self.entries.get(chain[-1].parent_call_id or "")
            if parent is None or parent.model_call_id in seen | self.conflicting:
                break
            seen.add(parent.model_call_id)
            chain.append(parent)
        tokens = join_chain(chain[::-1])
        return resolved(chain[0].model_call_id, chain[0].digest or compute_digest(tokens), tokens)
