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
from tokencustody.records import ParentResolutionStatus, TokenEntry

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
        self._by_id = {entry.model_call_id: entry for entry in rollout.entries}
        self._children: defaultdict[str, list[TokenEntry]] = defaultdict(list)
        for entry in rollout.entries:
            if entry.parent_call_id is not None:
                self._children[entry.parent_call_id].append(entry)
        self._lengths = self._prompt_lengths()
        self._prompts: dict[str, Hashable] = {}
        self._sequences: dict[str, bytes] = {}
        self._settled = Settled()

    def settle(self) -> Settled:
        for group in self._groups():
            self._settle_group(group)
        return self._settled

    def _settle_group(self, calls: Sequence[TokenEntry]) -> None:
        members = {call.model_call_id for call in calls}
        # What sampled nothing and was asked again is the parent of the next answer, and no sibling of that.
        parents = {call.parent_call_id for call in calls}
        group = [call for call in calls if call.generation_token_ids or call.model_call_id not in parents]
        doubted: set[str] = set()
        if len(group) < len(calls):
            # Nobody knows whether these answer beside the empty one, from which the agent went on.
            doubted.update(call.model_call_id for call in group if self._parent_key(call) == _UNKNOWN)
        # A link from a call that answers the same question proves nothing: the answer is not in its request.
        later = {
            call.model_call_id: [
                child for child in self._children[call.model_call_id] if child.model_call_id not in members
            ]
            for call in group
        }
        continued = {name for name, children in later.items() if children}
        # A link from a conflicting call proves nothing, and still leaves room for doubt.
        surely = {name for name in continued if not all(map(self._is_conflicting, later[name]))}
        answers: defaultdict[Hashable, list[TokenEntry]] = defaultdict(list)
        silent = []
        for entry in group:
            if not entry.generation_token_ids and entry.model_call_id not in continued:
                silent.append(entry)
            else:
                # Of the two payloads of a conflicting call, nobody knows which was answered.
                alone = entry.model_call_id if self._is_conflicting(entry) else ""
                answers[alone, self._prompt_key(entry), tuple(entry.generation_token_ids)].append(entry)
        self._drop(silent if answers else silent[1:], Why.NO_GENERATED_TOKENS)
        kept = _received(list(answers.values()), continued, surely)
        if kept is not None and all(call.model_call_id in doubted - continued for call in kept):
            kept = None
        for answer in answers.values():
            if kept is None:
                self._drop(answer, Why.AMBIGUOUS_RETRY)
            elif answer is not kept:
                self._drop(answer, Why.SUPERSEDED_RETRY)
        if kept is not None:
            first, *others = sorted(kept, key=lambda call: self._standing(call, members, continued))
            self._drop(others, Why.SUPERSEDED_RETRY)
            for other in others:
                self._settled.stands_for[other.model_call_id] = first.model_call_id

    def _standing(
        self, call: TokenEntry, members: Collection[str], continued: Collection[str]
    ) -> tuple[bool, bool, bool, str]:
        name = call.model_call_id
        # One that stood for its own parent would be its own ancestor.
        below = call.parent_call_id in members
        return below, self._parent_key(call) == _UNKNOWN, name not in continued, name

    def _drop(self, calls: Sequence[TokenEntry], why: Why) -> None:
        for call in calls:
            self._settled.dropped[call.model_call_id] = why

    def _groups(self) -> Iterator[list[TokenEntry]]:
        """Yield the calls that answer one question, in commit order, where they are several."""
        question = {name: name for name in self._by_id}

        def find(name: str) -> str:
            while question[name] != name:
                question[name] = question[question[name]]
                name = question[name]
            return name

        for same in (*self._same_prompt(), *self._same_request()):
            for call in same[1:]:
                question[find(call.model_call_id)] = find(same[0].model_call_id)
        groups: defaultdict[str, list[TokenEntry]] = defaultdict(list)
        for entry in self._rollout.entries:
            groups[find(entry.model_call_id)].append(entry)
        yield from (group for group in groups.values() if len(group) > 1)

    def _same_request(self) -> Iterator[list[TokenEntry]]:
        by_request: defaultdict[Hashable, list[TokenEntry]] = defaultdict(list)
        for entry in self._rollout.entries:
            # An empty request asks nothing by which it could be told from others.
            if entry.continuation_context_digest and entry.continuation_context_len > 0:
                request = (
                    entry.continuation_context_len,
                    entry.continuation_context_digest,
                    entry.fingerprint_version,
                )
                by_request[request].append(entry)
        yield from by_request.values()

    def _same_prompt(self) -> Iterator[list[TokenEntry]]:
        by_length: defaultdict[int, list[TokenEntry]] = defaultdict(list)
        for entry in self._rollout.entries:
            length = self._lengths[entry.model_call_id]
            if length is not None:
                by_length[length].append(entry)
        for same_length in by_length.values():
            if len(same_length) == 1:
                continue
            by_prompt: defaultdict[Hashable, list[TokenEntry]] = defaultdict(list)
            for entry in same_length:
                by_prompt[self._prompt_key(entry)].append(entry)
            for prompt in by_prompt.values():
                if len(prompt) == 1:
                    continue
                by_parent: defaultdict[Hashable, list[TokenEntry]] = defaultdict(list)
                for entry in prompt:
                    by_parent[self._parent_key(entry)].append(entry)
                # The unknown parent may be that of any other.
                yield from [prompt] if _UNKNOWN in by_parent else by_parent.values()

    def _prompt_lengths(self) -> dict[str, int | None]:
        """Return the lengths of whole prompts, None for a delta whose beginning is not there."""
        lengths: dict[str, int | None] = {}
        for entry in self._rollout.entries:
            deltas: dict[str, TokenEntry] = {}
            call: TokenEntry | None = entry
            while call is not None and call.prompt_is_delta and call.model_call_id not in lengths:
                if call.model_call_id in deltas:
                    call = None  # they go in a circle
                    break
                deltas[call.model_call_id] = call
                call = self._by_id.get(str(call.parent_call_id))
            length = None
            if call is not None:
                length = lengths.setdefault(call.model_call_id, len(call.prompt_token_ids))
            for below in reversed(deltas.values()):
                if call is not None and length is not None:
                    length += len(call.generation_token_ids) + len(below.prompt_token_ids)
                lengths[below.model_call_id] = length
                call = below
        return lengths

    def _prompt(self, entry: TokenEntry) -> list[int]:
        if not entry.prompt_is_delta:
            return entry.prompt_token_ids
        parts = [entry.prompt_token_ids]
        while entry.prompt_is_delta:
            entry = self._by_id[str(entry.parent_call_id)]
            parts += [entry.generation_token_ids, entry.prompt_token_ids]
        return [token for part in reversed(parts) for token in part]

    def _prompt_key(self, entry: TokenEntry) -> Hashable:
        """Return what tells the whole prompt from others; one whose beginning is not there is like no other."""
        name = entry.model_call_id
        if name not in self._prompts:
            known = self._lengths[name] is not None
            self._prompts[name] = _hash(self._prompt(entry)) if known else ("call", name)
        return self._prompts[name]

    def _parent_key(self, entry: TokenEntry) -> Hashable:
        """Return what tells the parent from others: parents of one sequence are one."""
        match entry.parent_resolution:
            case ParentResolutionStatus.ROOT:
                return None
            case ParentResolutionStatus.RESOLVED:
                parent = self._by_id.get(str(entry.parent_call_id))
                if parent is None or self._lengths[parent.model_call_id] is None:
                    return ("call", entry.parent_call_id)
                if parent.model_call_id not in self._sequences:
                    sequence = self._prompt(parent) + parent.generation_token_ids
                    self._sequences[parent.model_call_id] = _hash(sequence)
                return self._sequences[parent.model_call_id]
            case _:
                return _UNKNOWN

    def _is_conflicting(self, entry: TokenEntry) -> bool:
        return self._rollout.calls[entry.model_call_id].is_conflicting


def _received(
    answers: Sequence[list[TokenEntry]], continued: Collection[str], surely: Collection[str]
) -> list[TokenEntry] | None:
    """Return the calls of the answer that the agent is proven to have received, if one is."""
    if len(answers) == 1:
        return answers[0]
    found = [calls for calls in answers if any(call.model_call_id in continued for call in calls)]
    if len(found) == 1 and any(call.model_call_id in surely for call in found[0]):
        return found[0]
    return None


def _hash(ids: list[int]) -> bytes:
    return hashlib.sha256(array("Q", ids).tobytes()).digest()
