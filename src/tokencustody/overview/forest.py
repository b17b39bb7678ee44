"""The calls of a rollout as trees, by the parent that each one names. Whatever they name, no call is lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tokencustody.overview.summaries import CallSummary


@dataclass(frozen=True, slots=True)
class CallForest:
    """Trees that hold every call exactly once, as a top or below its parent. Siblings keep their order.

    `roots` name no parent. `orphans` are grouped by the parent that they name and the rollout does not have.
    `loops` are the first calls of cycles of parents, whose other calls lie below them. `children` is keyed by
    call id.
    """

    roots: Sequence[CallSummary]
    orphans: Mapping[str, Sequence[CallSummary]]
    loops: Sequence[CallSummary]
    children: Mapping[str, Sequence[CallSummary]]


def call_forest(calls: Sequence[CallSummary]) -> CallForest:
    """Return the trees of `calls`, whose ids are unique."""
    by_id = {call.model_call_id: call for call in calls}
    roots: list[CallSummary] = []
    orphans: defaultdict[str, list[CallSummary]] = defaultdict(list)
    children: defaultdict[str, list[CallSummary]] = defaultdict(list)
    for call in calls:
        if call.parent_call_id is None:
            roots.append(call)
        else:
            (children if call.parent_call_id in by_id else orphans)[call.parent_call_id].append(call)
    placed: set[str] = set()
    _place(roots, children, placed)
    for group in orphans.values():
        _place(group, children, placed)
    loops = []
    position = {call.model_call_id: index for index, call in enumerate(calls)}
    for call in calls:
        if call.model_call_id not in placed:
            top = by_id[min(_cycle_above(call.model_call_id, by_id), key=position.__getitem__)]
            children[str(top.parent_call_id)].remove(top)
            loops.append(top)
            _place([top], children, placed)
    return CallForest(
        roots, dict(orphans), loops, {parent: below for parent, below in children.items() if below}
    )


def _place(
    tops: Iterable[CallSummary], children: Mapping[str, Sequence[CallSummary]], placed: set[str]
) -> None:
    waiting = [call.model_call_id for call in tops]
    while waiting:
        call_id = waiting.pop()
        placed.add(call_id)
        waiting.extend(child.model_call_id for child in children.get(call_id, ()))


def _cycle_above(call_id: str, by_id: Mapping[str, CallSummary]) -> list[str]:
    """Return the cycle that the parents of `call_id`, a call below no top, lead into."""
    path: dict[str, None] = {}
    while call_id not in path:
        path[call_id] = None
        call_id = str(by_id[call_id].parent_call_id)
    above = list(path)
    return above[above.index(call_id) :]
