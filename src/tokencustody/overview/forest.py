"""The calls of a rollout as trees, by the parent that each one names. Whatever they name, no call is lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokencustody.circles import circles
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
    loops = []
    position = {call.model_call_id: index for index, call in enumerate(calls)}
    for circle in circles({call.model_call_id: call.parent_call_id for call in calls}):
        top = by_id[min(circle, key=position.__getitem__)]
        children[str(top.parent_call_id)].remove(top)
        loops.append(top)
    return CallForest(
        roots, dict(orphans), loops, {parent: below for parent, below in children.items() if below}
    )
