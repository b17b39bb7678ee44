"""What is to be done with a rollout, given what two databases hold of it.

The history of a fence tells whose rollout is newer: one is an earlier state of the other if its versions, by their
event ids, are the first ones of the other's. Calls do not make versions, and are compared by themselves.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum

from tokencustody.copying.rows import STAGED, Image, RowKey
from tokencustody.schema.tables import OF_ROLLOUTS, exports, fences, intents, snapshot_versions
from tokencustody.states import FenceState

# What no row may be missing from, or be too many in, when a fence moves on.
_RECORDS = tuple(table for table in OF_ROLLOUTS if table not in (*STAGED, exports, fences, snapshot_versions))


class CopyOutcome(StrEnum):
    """What becomes of a rollout. `updated`: the target held an earlier state of it."""

    COPIED = "copied"
    UPDATED = "updated"
    ALREADY_THERE = "already_there"
    CONFLICT = "conflict"
    LEFT_OUT = "left_out"
    FAILED = "failed"


@dataclass(frozen=True)
class Decision:
    """What to do: the rows to add, and whether the fence moves on, and with it intents that were refused since."""

    outcome: CopyOutcome
    reason: str = ""
    add: Set[RowKey] = frozenset()
    moves_fence: bool = False
    refuse: Set[RowKey] = frozenset()


def decide(source: Image, target: Image) -> Decision:
    """Return what to do so that the target holds all that the source holds, and loses and overwrites nothing."""
    if not target.rows:
        return Decision(CopyOutcome.COPIED, add=source.rows.keys())
    missing = source.rows.keys() - target.rows.keys()
    differing = {key for key, digest in source.rows.items() if target.rows.get(key, digest) != digest}
    is_behind = target.versions.items() <= source.versions.items()
    is_ahead = source.versions.items() <= target.versions.items()
    if not is_behind and not is_ahead:
        return Decision(CopyOutcome.CONFLICT, "the target's history of the rollout is another one")
    may_differ = set()
    if is_behind != is_ahead:
        may_differ = differing & (source.of(fences).keys() | source.of(intents).keys())
    if changed := differing - may_differ:
        return Decision(CopyOutcome.CONFLICT, f"the target holds other data in {_listed(changed)}")
    staged = missing & source.of(*STAGED).keys()
    handed_over = missing & source.of(exports).keys()
    records = missing - staged
    if FenceState.RETIRED in (source.state, target.state) and target.state is not None:
        # Its records are gone on one side, as they were meant to, and no removal is copied.
        return _adding(staged | handed_over)
    if not is_behind:
        if lacking := records - handed_over:
            return Decision(
                CopyOutcome.CONFLICT,
                f"the rollout went on in the target, without {_listed(lacking)} of the source",
            )
        return _adding(staged | handed_over)
    grows = bool(records & source.of(*_RECORDS).keys()) or not is_ahead
    if grows and (extra := target.of(*_RECORDS).keys() - source.rows.keys()):
        return Decision(CopyOutcome.CONFLICT, f"the target holds {_listed(extra)} that the source lacks")
    if not missing and is_ahead:
        return Decision(CopyOutcome.ALREADY_THERE)
    moves = not is_ahead and target.state is not None
    refused = may_differ & source.of(intents).keys() if moves else set()
    return Decision(CopyOutcome.UPDATED, add=missing, moves_fence=moves, refuse=refused)


def _adding(missing: Set[RowKey]) -> Decision:
    return Decision(CopyOutcome.UPDATED if missing else CopyOutcome.ALREADY_THERE, add=missing)


def _listed(keys: Set[RowKey]) -> str:
    first = min(keys, key=repr)
    named = ", ".join(str(part) for part in first[1:])
    more = f" and {len(keys) - 1:,} more" if len(keys) > 1 else ""
    return f"{first[0]} ({named}){more}" if named else f"{first[0]}{more}"
