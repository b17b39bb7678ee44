"""Several answers to one question, of which the agent received one: which one it was, where the record proves it.

A client that gave up waiting asks again, and both answers are stored. The question is the same where the request is, or
the whole prompt below the same parent. A call is *continued* when one that answers another question names it as its
parent: then its answer is in what the agent said later, so the agent received it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from tokencustody.chains.reading import FrozenRollout
from tokencustody.chains.reasons import Why
from tokencustody.codec.proven import ProvenCall
from tokencustody.records import ParentResolutionStatus

# The parent of a call of which none is known.
_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Settled:
    """Why calls are dropped, and for a dropped call the one with the same tokens that stands for it, if there is."""

    dropped: dict[str, Why] = field(default_factory=dict)
    stands_for: dict[str, str] = field(default_factory=dict)


def settle(rollout: FrozenRollout) -> Settled:
    """Decide between the calls that answer one question.

    They do when their prompts are the same, id by id, below the same parent, and when they are stamped with the same
    request (length, digest and fingerprint version of its context), whatever their prompts and parents: a template with
    a clock, or a history that is tokenised again, gives one request several prompts, and a request tells its whole
    history. So do two calls of which each answers one question with a third.

    If exactly one answer was continued, it is the one. Answers of the same prompt and tokens are one answer, for which
    the call stands that has a known parent, then the one that was continued, then the one with the smallest id. A call
    that sampled nothing and was not continued is passed over. Where nothing decides, every answer is ambiguous.
    """
    return _Settling(rollout).settle()


class _Settling:
    def __init__(self, rollout: FrozenRollout) -> None:
        self._rollout = rollout
        self._calls = rollout.entries
        self._children: defaultdict[str, list[str]] = defaultdict(list)
        for name, call in self._calls.items():
            if call.record.parent_call_id is not None:
                self._children[call.record.parent_call_id].append(name)
        self._lengths = self._prompt_lengths()
        self._prompts: dict[str, Hashable] = {}
        self._sequences: dict[str, bytes] = {}
        self._settled = Settled()

    def settle(self) -> Settled:
        for group in self._groups():
            self._settle_group(group)
        return self._settled

    def _settle_group(self, members: Sequence[str]) -> None:
        # What sampled nothing and was asked again is the parent of the next answer, and no sibling of that.
        parents = {self._calls[name].record.parent_call_id for name in members}
        group = [name for name in members if self._calls[name].generation or name not in parents]
        doubted: set[str] = set()
        if len(group) < len(members):
            # Nobody knows whether these answer beside the empty one, from which the agent went on.
            doubted.update(name for name in group if self._parent_key(name) == _UNKNOWN)
        # A link from a call that answers the same question proves nothing: the answer is not in its request.
        among = set(members)
        later = {name: [child for child in self._children[name] if child not in among] for name in group}
        continued = {name for name, children in later.items() if children}
        # A link from a conflicting call proves nothing, and still leaves room for doubt.
        surely = {name for name in continued if not all(map(self._is_conflicting, later[name]))}
        answers: defaultdict[Hashable, list[str]] = defaultdict(list)
        silent = []
        for name in group:
            generation = self._calls[name].generation
            if not generation and name not in continued:
                silent.append(name)
            else:
                # Of the two payloads of a conflicting call, nobody knows which was answered.
                alone = name if self._is_conflicting(name) else ""
                answers[alone, self._prompt_key(name), generation.tobytes()].append(name)
        self._drop(silent if answers else silent[1:], Why.NO_GENERATED_TOKENS)
        kept = _received(list(answers.values()), continued, surely)
        if kept is not None and all(name in doubted - continued for name in kept):
            kept = None
        for answer in answers.values():
            if kept is None:
                self._drop(answer, Why.AMBIGUOUS_RETRY)
            elif answer is not kept:
                self._drop(answer, Why.SUPERSEDED_RETRY)
        if kept is not None:
            first, *others = sorted(kept, key=lambda name: self._standing(name, among, continued))
            self._drop(others, Why.SUPERSEDED_RETRY)
            for other in others:
                self._settled.stands_for[other] = first

    def _standing(
        self, name: str, among: Collection[str], continued: Collection[str]
    ) -> tuple[bool, bool, bool, str]:
        # One that stood for its own parent would be its own ancestor.
        below = self._calls[name].record.parent_call_id in among
        return below, self._parent_key(name) == _UNKNOWN, name not in continued, name

    def _drop(self, names: Sequence[str], why: Why) -> None:
        for name in names:
            self._settled.dropped[name] = why

    def _groups(self) -> Iterator[list[str]]:
        """Yield the calls that answer one question, in commit order, where they are several."""
        question = {name: name for name in self._calls}

        def find(name: str) -> str:
            while question[name] != name:
                question[name] = question[question[name]]
                name = question[name]
            return name

        for same in (*self._same_prompt(), *self._same_request()):
            for name in same[1:]:
                question[find(name)] = find(same[0])
        groups: defaultdict[str, list[str]] = defaultdict(list)
        for name in self._calls:
            groups[find(name)].append(name)
        yield from (group for group in groups.values() if len(group) > 1)

    def _same_request(self) -> Iterator[list[str]]:
        by_request: defaultdict[Hashable, list[str]] = defaultdict(list)
        for name, call in self._calls.items():
            record = call.record
            # An empty request asks nothing by which it could be told from others.
            if record.continuation_context_digest and record.continuation_context_len > 0:
                request = (
                    record.continuation_context_len,
                    record.continuation_context_digest,
                    record.fingerprint_version,
                )
                by_request[request].append(name)
        yield from by_request.values()

    def _same_prompt(self) -> Iterator[list[str]]:
        by_length: defaultdict[int, list[str]] = defaultdict(list)
        for name in self._calls:
            length = self._lengths[name]
            if length is not None:
                by_length[length].append(name)
        for same_length in by_length.values():
            if len(same_length) == 1:
                continue
            by_prompt: defaultdict[Hashable, list[str]] = defaultdict(list)
            for name in same_length:
                by_prompt[self._prompt_key(name)].append(name)
            for prompt in by_prompt.values():
                if len(prompt) == 1:
                    continue
                by_parent: defaultdict[Hashable, list[str]] = defaultdict(list)
                for name in prompt:
                    by_parent[self._parent_key(name)].append(name)
                # The unknown parent may be that of any other.
                yield from [prompt] if _UNKNOWN in by_parent else by_parent.values()

    def _prompt_lengths(self) -> dict[str, int | None]:
        """Return the lengths of whole prompts, None for a delta whose beginning is not there."""
        lengths: dict[str, int | None] = {}
        for first in self._calls:
            deltas: dict[str, ProvenCall] = {}
            name = first
            call: ProvenCall | None = self._calls[name]
            while call is not None and call.record.prompt_is_delta and name not in lengths:
                if name in deltas:
                    call = None  # they go in a circle
                    break
                deltas[name] = call
                name = str(call.record.parent_call_id)
                call = self._calls.get(name)
            length = None
            if call is not None:
                length = lengths.setdefault(name, call.shared_len + len(call.prompt))
            for name, below in reversed(deltas.items()):
                if call is not None and length is not None:
                    length += len(call.generation) + len(below.prompt)
                lengths[name] = length
                call = below
        return lengths

    def _prompt_key(self, name: str) -> Hashable:
        """Return what tells the whole prompt from others; one whose beginning is not there is like no other."""
        if name not in self._prompts:
            known = self._lengths[name] is not None
            self._prompts[name] = _hash(self._rollout.prompt(self._calls[name])) if known else ("call", name)
        return self._prompts[name]

    def _parent_key(self, name: str) -> Hashable:
        """Return what tells the parent from others: parents of one sequence are one."""
        record = self._calls[name].record
        match record.parent_resolution:
            case ParentResolutionStatus.ROOT:
                return None
            case ParentResolutionStatus.RESOLVED:
                parent = str(record.parent_call_id)
                if self._lengths.get(parent) is None:
                    return ("call", parent)
                if parent not in self._sequences:
                    call = self._calls[parent]
                    self._sequences[parent] = _hash(self._rollout.prompt(call) + call.generation)
                return self._sequences[parent]
            case _:
                return _UNKNOWN

    def _is_conflicting(self, name: str) -> bool:
        return self._rollout.calls[name].is_conflicting


def _received(
    answers: Sequence[list[str]], continued: Collection[str], surely: Collection[str]
) -> list[str] | None:
    """Return the calls of the answer that the agent is proven to have received, if one is."""
    if len(answers) == 1:
        return answers[0]
    found = [calls for calls in answers if any(call in continued for call in calls)]
    if len(found) == 1 and any(call in surely for call in found[0]):
        return found[0]
    return None


def _hash(ids: array[int]) -> bytes:
    return hashlib.sha256(ids).digest()
