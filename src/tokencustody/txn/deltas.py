"""Deltas that nobody can ever read whole: their parents never came, or are in a circle.

A freeze marks the rollout for each, because no later write can mend it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection

from tokencustody.circles import circles
from tokencustody.states import FailureKind, VersionEvent
from tokencustody.txn.fence import Fence, RolloutKey, Stamp, fail_txn

PARENT_MISSING = "parent_missing"
PARENT_CYCLE = "parent_cycle"


def mark_broken_txn(
    connection: Connection, key: RolloutKey, fence: Fence, calls: Sequence[Any], stamp: Stamp
) -> Fence:
    """Mark an exclusively locked rollout for each of its calls whose sequence cannot be read; return the fence."""
    for number, (call, why) in enumerate(broken_deltas(calls)):
        fail_txn(
            connection,
            key,
            fence,
            VersionEvent.MARK,
            FailureKind.MARK,
            replace(stamp, event_id=f"{stamp.event_id}-delta-{number}"),
            model_call_id=call,
            differing=why,
        )
        fence = replace(fence, version=fence.version + 1, incomplete=True)
    return fence


def broken_deltas(calls: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Yield each delta that breaks a chain, and how: its parent is missing, or it is in a circle of deltas.

    `calls` are all rows of a rollout, as `all_calls_txn` returns them. Those below a broken one are not named.
    """
    present = {row.model_call_id for row in calls}
    parents = {row.model_call_id: row.parent_call_id for row in calls if row.prompt_is_delta}
    for delta, parent in parents.items():
        if parent not in present:
            yield delta, PARENT_MISSING
    for circle in circles(parents):
        for delta in circle:
            yield delta, PARENT_CYCLE
