"""The segments of a rollout: trees of calls in which each prompt begins with the whole sequence of the call above it.

A call continues its parent when it was resolved and its prompt begins with the parent's whole sequence, id by id. Where
it does not, it begins a segment of its own: its tokens were sampled after exactly its prompt, whatever lies before. A
length or digest that a call records must be that of its sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from tokencustody.chains.reading import FrozenRollout
from tokencustody.chains.reasons import LeftOut, Why
from tokencustody.chains.retries import Settled, settle
from tokencustody.chains.rules import RowRules
from tokencustody.circles import circles
from tokencustody.codec.id_columns import digest_of_ids
from tokencustody.errors import LineageError
from tokencustody.lineage import check_recorded
from tokencustody.records import ParentResolutionStatus, TokenEntry
from tokencustody.states import OnBreak, Siblings

_MAX_INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Placed:
    """A call that a row may hold: the one above it in its segment, and where its tokens begin and end.

    `top` is the call with which the segment begins.
    """

    entry: TokenEntry
    parent: str | None
    top: str
    start: int
    end: int
    digest: str


class Segments:
    """The segments of a rollout. `left_out` says why the other calls are in none.

    `placed` has the calls by id, `breaks` the first call of each segment, in commit order, and why it does not continue
    another one; None for a root.
    """

    def __init__(self, rollout: FrozenRollout, rules: RowRules) -> None:
        self._rollout = rollout
        self._cuts = rules.on_break is OnBreak.FIRST
        self._settled = settle(rollout) if rules.siblings is Siblings.SETTLE else Settled()
        self._children: dict[str, list[TokenEntry]] = {}
        self._tops: deque[tuple[TokenEntry, Why | None]] = deque()
        self._why_out: dict[str, tuple[Why, str]] = {}
        self._breaks: dict[str, Why | None] = {}
        self.placed: dict[str, Placed] = {}
        self._sort_by_parent()
        while self._tops:
            self._grow(*self._tops.popleft())
        self.breaks: Mapping[str, Why | None] = {
            entry.model_call_id: self._breaks[entry.model_call_id]
            for entry in rollout.entries
            if entry.model_call_id in self._breaks
        }

    @property
    def left_out(self) -> list[LeftOut]:
        """The calls that are in no segment, in commit order."""
        return [
            LeftOut.of(self._rollout.key, why, entry.model_call_id, detail)
            for entry in self._rollout.entries
            for why, detail in [self._why_out.get(entry.model_call_id, (None, ""))]
            if why is not None
        ]

    def _sort_by_parent(self) -> None:
        parents = {
            entry.model_call_id: self._settled.stands_for.get(entry.parent_call_id, entry.parent_call_id)
            for entry in self._rollout.entries
            if entry.parent_call_id is not None
        }
        present = {entry.model_call_id for entry in self._rollout.entries}
        in_circle = {call for circle in circles(parents) for call in circle}
        out: dict[str, Why] = dict(self._settled.dropped)
        for call, facts in self._rollout.calls.items():
            if facts.is_conflicting:
                out[call] = Why.CONFLICTING_CALL
        tops = []
        for entry in self._rollout.entries:
            call = entry.model_call_id
            parent = parents.get(call)
            why = _why_apart(entry, parent, present, in_circle)
            if parent is not None and why is None:
                self._children.setdefault(parent, []).append(entry)
            else:
                tops.append((entry, why))
        self._why_out = {call: (why, "") for call, why in out.items()}
        # First what was not decided, for that goes all the way down.
        for call in sorted(out, key=lambda call: out[call] is not Why.AMBIGUOUS_RETRY):
            self._strand(call, undecided=out[call] is Why.AMBIGUOUS_RETRY)
        for entry, why in tops:
            self._begin(entry, why)

    def _begin(self, entry: TokenEntry, why: Why | None) -> None:
        """Let a segment begin with the call, if it can and may."""
        if entry.model_call_id in self._why_out:
            return
        if why is not None and (entry.prompt_is_delta or self._cuts):
            self._leave_out(entry.model_call_id, why)
        else:
            self._tops.append((entry, why))

    def _leave_out(self, model_call_id: str, why: Why, detail: str = "") -> None:
        self._why_out[model_call_id] = why, detail
        self._strand(model_call_id)

    def _strand(self, model_call_id: str, *, undecided: bool = False) -> None:
        """Let what continues a call that is left out stand alone; where it was not decided, nothing below it can."""
        waiting = [model_call_id]
        while waiting:
            for child in self._children.pop(waiting.pop(), ()):
                if undecided or child.prompt_is_delta or self._cuts:
                    self._why_out.setdefault(child.model_call_id, (Why.PARENT_LEFT_OUT, ""))
                    waiting.append(child.model_call_id)
                else:
                    self._begin(child, Why.PARENT_LEFT_OUT)

    def _grow(self, top: TokenEntry, why: Why | None) -> None:
        # Depth first, so that a single list holds the sequence of the parent at hand: below a call it only grows.
        ids: list[int] = []
        waiting: list[tuple[TokenEntry, str | None, int]] = [(top, None, 0)]
        while waiting:
            entry, parent, start = waiting.pop()
            call = entry.model_call_id
            del ids[start:]
            if not entry.prompt_is_delta and entry.prompt_token_ids[:start] != ids:
                self._begin(entry, Why.NOT_A_CONTINUATION)
                continue
            ids += entry.prompt_token_ids[0 if entry.prompt_is_delta else start :]
            ids += entry.generation_token_ids
            problem = _problem(entry, ids, start)
            if problem is not None:
                self._leave_out(call, *problem)
                continue
            if parent is None:
                self._breaks[call] = why
            digest = entry.digest or digest_of_ids(ids)
            self.placed[call] = Placed(entry, parent, top.model_call_id, start, len(ids), digest)
            waiting += [
                (child, call, len(ids))
                for child in self._children.pop(call, ())
                if child.model_call_id not in self._why_out
            ]


def _why_apart(entry: TokenEntry, parent: str | None, present: set[str], in_circle: set[str]) -> Why | None:
    """Return why the record of a call gives it no parent that is there, or None for a root or where it does."""
    if entry.parent_resolution is None:
        return Why.PARENT_NOT_RECORDED
    if entry.parent_resolution == ParentResolutionStatus.UNRESOLVED:
        return Why.UNRESOLVED_PARENT
    if parent is not None and parent not in present:
        return Why.PARENT_MISSING
    return Why.PARENT_CYCLE if entry.model_call_id in in_circle else None


def _problem(entry: TokenEntry, ids: list[int], start: int) -> tuple[Why, str] | None:
    try:
        check_recorded(entry, ids, digest_of_ids)
    except LineageError as exc:
        return Why.NOT_PROVEN, str(exc)
    if max(ids[start:], default=0) > _MAX_INT64:
        return Why.BEYOND_INT64, ""
    return None
