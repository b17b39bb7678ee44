"""Several answers to one prompt, of which the agent received one: which one it was, where the record proves it.

A client that gave up waiting asks again, and both answers are stored. A call is *continued* when another one names it
as its parent: then its answer is in what the agent said later, so the agent received it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from tokencustody.audit.export.reading import FrozenRollout
from tokencustody.audit.export.report import Why
from tokencustody.records import ParentResolutionStatus, TokenEntry

# The parent of a call of which none is known.
_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Settled:
    """Why calls are dropped, and for a dropped call the one with the same tokens that stands for it, if there is."""

    dropped: dict[str, Why] = field(default_factory=dict)
    stands_for: dict[str, str] = field(default_factory=dict)


def settle(rollout: FrozenRollout) -> Settled:
    """Decide between the calls that answer the same prompt, id by id, below the same parent.

    If exactly one answer was continued, it is the one. Answers of the same tokens are one answer, for which the call
    stands that has a known parent, then the one that was continued, then the one with the smallest id. A call that
    sampled nothing and was not continued is passed over. Where nothing decides, every answer is ambiguous.
    """
    return _Settling(rollout).settle()


class _Settling:
    def __init__(self, rollout: FrozenRollout) -> None:
        self._rollout = rollout
        self._by_id = {entry.model_call_id: entry for entry in rollout.entries}
        self._continued: set[str] = set()
        self._surely_continued: set[str] = set()
        for entry in rollout.entries:
            if entry.parent_call_id not in (None, entry.model_call_id):
                self._continued.add(str(entry.parent_call_id))
                if not self._is_conflicting(entry):
                    self._surely_continued.add(str(entry.parent_call_id))
        self._lengths = self._prompt_lengths()
        self._sequences: dict[str, bytes] = {}
        self._settled = Settled()

    def settle(self) -> Settled:
        for group, doubted in self._groups():
            self._settle_group(group, doubted)
        return self._settled

    def _settle_group(self, group: Sequence[TokenEntry], doubted: Collection[str]) -> None:
        answers: defaultdict[Hashable, list[TokenEntry]] = defaultdict(list)
        silent = []
        for entry in group:
            if not entry.generation_token_ids and entry.model_call_id not in self._continued:
                silent.append(entry)
            else:
                # Of the two payloads of a conflicting call, nobody knows which was answered.
                alone = entry.model_call_id if self._is_conflicting(entry) else ""
                answers[alone, tuple(entry.generation_token_ids)].append(entry)
        self._drop(silent if answers else silent[1:], Why.NO_GENERATED_TOKENS)
        kept = self._received(list(answers.values()))
        if kept is not None and all(
            call.model_call_id in doubted and call.model_call_id not in self._continued for call in kept
        ):
            kept = None
        for calls in answers.values():
            if kept is None:
                self._drop(calls, Why.AMBIGUOUS_RETRY)
            elif calls is not kept:
                self._drop(calls, Why.SUPERSEDED_RETRY)
        if kept is not None:
            first, *others = sorted(kept, key=self._standing)
            self._drop(others, Why.SUPERSEDED_RETRY)
            for other in others:
                self._settled.stands_for[other.model_call_id] = first.model_call_id

    def _received(self, answers: Sequence[list[TokenEntry]]) -> list[TokenEntry] | None:
        """Return the calls of the answer that the agent is proven to have received, if one is."""
        if len(answers) == 1:
            return answers[0]
        # A link from a conflicting call proves nothing, and still leaves room for doubt.
        continued = [
            calls for calls in answers if any(call.model_call_id in self._continued for call in calls)
        ]
        if len(continued) == 1 and any(call.model_call_id in self._surely_continued for call in continued[0]):
            return continued[0]
        return None

    def _standing(self, call: TokenEntry) -> tuple[bool, bool, str]:
        name = call.model_call_id
        return self._parent_key(call) == _UNKNOWN, name not in self._continued, name

    def _drop(self, calls: Sequence[TokenEntry], why: Why) -> None:
        for call in calls:
            self._settled.dropped[call.model_call_id] = why

    def _groups(self) -> Iterator[tuple[list[TokenEntry], Collection[str]]]:
        """Yield the calls that answer one prompt, in commit order, where they are several.

        With them those of which nobody knows whether they answer it beside another call that the agent went on from.
        """
        for prompt in self._same_prompt():
            by_parent: defaultdict[Hashable, list[TokenEntry]] = defaultdict(list)
            for entry in prompt:
                by_parent[self._parent_key(entry)].append(entry)
            if _UNKNOWN not in by_parent:
                yield from ((group, ()) for group in by_parent.values() if len(group) > 1)
                continue
            # The unknown parent may be that of any other; but what sampled nothing and was asked again is the parent of
            # the next answer, and no sibling of that.
            parents = {entry.parent_call_id for entry in prompt}
            group = [
                entry for entry in prompt if entry.generation_token_ids or entry.model_call_id not in parents
            ]
            asked_again = len(group) < len(prompt)
            yield group, {entry.model_call_id for entry in by_parent[_UNKNOWN] if asked_again}

    def _same_prompt(self) -> Iterator[list[TokenEntry]]:
        by_length: defaultdict[int, list[TokenEntry]] = defaultdict(list)
        for entry in self._rollout.entries:
            length = self._lengths[entry.model_call_id]
            if length is not None:
                by_length[length].append(entry)
        for same_length in by_length.values():
            if len(same_length) == 1:
                continue
            by_prompt: defaultdict[bytes, list[TokenEntry]] = defaultdict(list)
            for entry in same_length:
                by_prompt[_hash(self._prompt(entry))].append(entry)
            yield from (prompt for prompt in by_prompt.values() if len(prompt) > 1)

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


def _hash(ids: list[int]) -> bytes:
    return hashlib.sha256(array("Q", ids).tobytes()).digest()
