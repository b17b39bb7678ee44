"""The pure parent matcher: which committed call does a request continue?

A request continues a call when the model-authored part of its history is the call's own history plus output (the
continuation fingerprint), the call's recorded request still opens it (the context digest), and an answer follows
there. Fewer or more than one such call is never decided by a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from tokencustody.bodies import ENVELOPE_ROLE
from tokencustody.columns import with_lists
from tokencustody.errors import InvalidRecordError, LineageError, LoneSurrogateError
from tokencustody.fingerprint import (
    FINGERPRINT_VERSION,
    assistant_fingerprint,
    conversation_digest,
    echoed_fingerprint,
    prefix_digests,
)
from tokencustody.fingerprint_v3 import (
    FINGERPRINT_VERSION_3,
    assistant_fingerprint_v3,
    hashes_noise,
    is_authored,
    is_input,
    left_out,
    plain,
    prefix_digests_v3,
    without_thinking,
)
from tokencustody.protocols import LineageMatch, LineageResolution
from tokencustody.records import ParentResolutionStatus, TokenEntry, compute_digest, own_tokens

# A list, or a column that its digest reads.
Ids = TypeVar("Ids", bound=Sized)

NO_MATCH = "no_match"
AMBIGUOUS = "ambiguous"
UNHASHED_ITEMS = "unhashed_items"

# By which calls can be stamped, so that requests resolve to them.
FINGERPRINT_VERSIONS = (FINGERPRINT_VERSION, FINGERPRINT_VERSION_3)
MOST_FINGERPRINTS = 5


@dataclass(frozen=True, slots=True)
class Continuation:
    """By what a later request is known to continue a call: both hashes, and the version that made them."""

    fingerprint: str
    context_len: int
    context_digest: str
    version: int


def continuation_of(
    request_items: Sequence[dict[str, Any]],
    response_items: Sequence[dict[str, Any]],
    *,
    response_name: str = "response_items",
) -> Continuation:
    """Return by what a request is known that continues a call: `request_items` answered with `response_items`.

    The hashes are of version 2, which Gym reads too, unless that leaves out content of the context or of what the
    model wrote (docs/lineage.md). Raises InvalidRecordError (a ValueError) that names the item and the field for
    items that cannot be hashed; it calls the answer `response_name`.
    """
    length = len(request_items)
    digest = _naming("request_items", request_items, conversation_digest)
    _naming(response_name, response_items, assistant_fingerprint_v3)
    whole = [*request_items, *response_items]
    answer = [item for item in response_items if is_authored(item)]
    if any(map(left_out, request_items)) or any(map(left_out, answer)) or hashes_noise(request_items):
        digest = prefix_digests_v3(request_items, {length})[length]
        return Continuation(assistant_fingerprint_v3(whole), length, digest, FINGERPRINT_VERSION_3)
    return Continuation(assistant_fingerprint(whole), length, digest, FINGERPRINT_VERSION)


def stamp_continuation(entry: TokenEntry, request_items: list[dict[str, Any]]) -> TokenEntry:
    """Fill the continuation fields of `entry` in place from its request and its output items, and return it.

    `request_items` should be those that `resolve` was asked with, such as `request_items` of the request's body.
    Entries without these fields are invisible to resolution. Raises InvalidRecordError (a ValueError) that names the
    item and the field for items that cannot be hashed.
    """
    made = continuation_of(request_items, entry.output_items, response_name="output_items")
    entry.continuation_fingerprint = made.fingerprint
    entry.continuation_context_len = made.context_len
    entry.continuation_context_digest = made.context_digest
    entry.fingerprint_version = made.version
    return entry


def _naming(name: str, items: Sequence[dict[str, Any]], hashing: Callable[[Any], str]) -> str:
    try:
        return hashing(items)
    except InvalidRecordError as exc:
        raise type(exc)(str(exc).replace("items", name, 1)) from None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A committed call as the matcher sees it: no tokens, only what proves that a request continues it.

    Where `is_parent` is false it is never named, and still makes a choice ambiguous. A call whose sequence is not
    known (it has several) has no `digest`.
    """

    model_call_id: str
    context_len: int
    context_digest: str
    digest: str | None
    cum_len: int | None
    fingerprint: str
    version: int | None
    is_parent: bool = True


_DIGESTS = (
    ((None, FINGERPRINT_VERSION), prefix_digests),
    ((FINGERPRINT_VERSION_3,), prefix_digests_v3),
)


class Request:
    """The items of a request, and the hashes by which its parent is found.

    Raises InvalidRecordError that names the item for items that cannot be hashed.
    """

    def __init__(self, items: Sequence[dict[str, Any]]) -> None:
        self.items = items
        self._v2, self._v3 = assistant_fingerprint(items), assistant_fingerprint_v3(items)

    @property
    def is_root(self) -> bool:
        """Whether there is nothing in it that a model wrote."""
        return not self._v3

    @property
    def fingerprints(self) -> list[str]:
        """The continuation fingerprints that a candidate may have, at most `MOST_FINGERPRINTS`."""
        versions = FINGERPRINT_VERSIONS
        return list(dict.fromkeys(each for version in versions for each in self._asked(version)))

    def matching(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Return the candidates that it may continue, by call id.

        Those whose hashes are its own come first; where there are none, those that it echoes in another form: with
        cache marks, with thinking in its last answer, or as another dialect writes it.
        """
        known = [c for c in candidates if 0 <= c.context_len < len(self.items)]
        opened = self._opened(known, self.items)
        found = [c for c in opened if c.fingerprint == self._asked(c.version)[0]]
        if not found:
            opened += [c for c in self._opened(known, self._plain) if c not in opened]
            found = [c for c in opened if c.fingerprint in self._asked(c.version)]
        return sorted(found, key=lambda c: c.model_call_id)

    def _asked(self, version: int | None) -> tuple[str, ...]:
        """Return the fingerprints of a version, its own first."""
        *v2, v3 = self._echoed
        return (self._v3, v3) if version == FINGERPRINT_VERSION_3 else (self._v2, *v2)

    @staticmethod
    def _opened(candidates: Sequence[Candidate], items: Sequence[Any]) -> list[Candidate]:
        """Return the candidates whose context opens `items`."""
        opened = []
        for versions, digests_of in _DIGESTS:
            stamped = [c for c in candidates if c.version in versions]
            digests = digests_of(items, {c.context_len for c in stamped})
            opened += [c for c in stamped if c.context_digest == digests[c.context_len]]
        return opened

    def covers(self, candidate: Candidate) -> bool:
        """Return whether the hashes of a candidate that matches say all that the request says of it."""
        return candidate.version == FINGERPRINT_VERSION_3 or candidate.context_len <= self._covered

    def answers(self, candidate: Candidate) -> bool:
        """Return whether an answer follows the context of a candidate, and that says what was asked.

        An empty answer has no hash, so a request that leaves it out would continue it. A context of no items, or of the
        envelope alone, is that of a request that held its question in another way.
        """
        context_len = candidate.context_len
        is_known = context_len > 1 or (context_len == 1 and self.items[0].get("role") != ENVELOPE_ROLE)
        return is_known and not is_input(self.items[context_len])

    @cached_property
    def _plain(self) -> list[Any]:
        return [plain(item) for item in self.items]

    @cached_property
    def _echoed(self) -> tuple[str, str, str]:
        """The fingerprints with the last answer without thinking: of version 2, so without empty arguments, of 3."""
        end = len(self.items)
        while end and is_input(self.items[end - 1]):
            end -= 1
        start = end
        while start and not is_input(self.items[start - 1]):
            start -= 1
        context, answer = self._plain[:start], list(map(without_thinking, self._plain[start:end]))
        whole = [*context, *answer]
        v2, v3 = self._v2, self._v3
        if whole != list(self.items[:end]):
            v2, v3 = assistant_fingerprint(whole), assistant_fingerprint_v3(whole)
        if echoed_fingerprint([], answer) == assistant_fingerprint(answer):
            return v2, v2, v3
        return v2, echoed_fingerprint(context, answer), v3

    @cached_property
    def _covered(self) -> int:
        """How many items version 2 covers from the start; -1, if it leaves out something that a model wrote."""
        uncovered = [number for number, item in enumerate(self.items) if left_out(item)]
        if any(is_authored(self.items[number]) for number in uncovered):
            return -1
        return min(uncovered, default=len(self.items))


def choose_parent(candidates: Iterable[Candidate], request: Request) -> Candidate | str:
    """Return the one call that `request` continues, or the reason why there is none.

    Calls with the same non-empty digest and length hold the same sequence, so the smallest call id stands for them
    all.
    """
    matching = request.matching(candidates)
    parents = [c for c in matching if c.is_parent and request.answers(c)]
    covered = [c for c in parents if request.covers(c)]
    if parents and not covered:
        return UNHASHED_ITEMS
    if len({c.model_call_id for c in matching}) > 1:
        sequences = {(c.digest, c.cum_len) for c in matching}
        if len(sequences) > 1 or not matching[0].digest or matching[0].cum_len is None:
            return AMBIGUOUS
    return covered[0] if covered else NO_MATCH


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
        tokens += own_tokens(entry)
        previous = entry
    assert previous is not None  # noqa: S101 - a chain ends with the entry that was asked for
    check_recorded(previous, tokens, compute_digest)
    return tuple(tokens)


def check_recorded(call: Any, sequence: Ids, digest_of: Callable[[Ids], str]) -> None:
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

    Not thread-safe. A call id that arrives with two payloads is no parent any more, and leaves none of its payloads'
    twins as the only one.
    """

    entries: dict[str, TokenEntry] = field(default_factory=dict)
    conflicting: set[str] = field(default_factory=set)
    _others: dict[str, TokenEntry] = field(default_factory=dict, init=False, repr=False)

    def add_entry(self, entry: TokenEntry) -> None:
        """Add a committed record. The same record again is a no-op."""
        known = self.entries.setdefault(entry.model_call_id, entry)
        if known is entry:
            return
        # By text: two NaN are never equal, and 0.0 equals -0.0.
        text = repr(with_lists(entry))
        if repr(with_lists(known)) != text:
            self.conflicting.add(entry.model_call_id)
            self._others[text] = entry

    def resolve(self, request_items: Sequence[dict[str, Any]]) -> LineageResolution:
        """Return whether the request is a root, resolved to one parent, or unresolved and why.

        Raises InvalidRecordError (a ValueError) that names the item for items that cannot be hashed, LineageError for
        a parent whose delta chain does not check out.
        """
        try:
            request = Request(request_items)
            if request.is_root:
                return ROOT
            choice = choose_parent(self._candidates(request.fingerprints), request)
        except LoneSurrogateError:
            choice = UNHASHED_ITEMS
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

    def _candidates(self, fingerprints: Sequence[str]) -> Iterator[Candidate]:
        for entry in (*self.entries.values(), *self._others.values()):
            if entry.continuation_fingerprint in fingerprints:
                is_parent = entry.model_call_id not in self.conflicting
                yield Candidate(
                    entry.model_call_id,
                    entry.continuation_context_len,
                    entry.continuation_context_digest,
                    entry.digest if is_parent else None,
                    entry.cum_len,
                    entry.continuation_fingerprint,
                    entry.fingerprint_version,
                    is_parent,
                )
