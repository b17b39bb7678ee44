"""Settling one call by plain statements on its rollout alone, whatever stands in its way.

It is the way of each call that the fast statement of `txn.inserting` did not store or cannot (one that leans on a
delta, has attachments, or meets another write of its rollout), and of all calls of a PostgreSQL that is distributed by
rollout or asked for serializable transactions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from sqlalchemy import Connection, Row

from tokencustody.database.dialects import insert_if_absent
from tokencustody.states import FenceState
from tokencustody.txn.fence import Fence, RolloutKey, Stamp, find_fence_txn, happened_txn, lock_fence_txn
from tokencustody.txn.kinds import INTENTS, Kind, NewCall


class Settled(StrEnum):
    """What became of a call: it was stored, by this try or an earlier one whose answer was lost; the same call was
    stored before; or it came after the fence, and nothing changed.
    """

    STORED = "stored"
    SAME = "same"
    FROZEN = FenceState.FROZEN
    RETIRED = FenceState.RETIRED


@dataclass(frozen=True, slots=True)
class Differing:
    """Another call with the same id was stored before, and stays; it differs in these fields."""

    fields: Sequence[str]


@dataclass(frozen=True)
class Call:
    """A call on its way into its table: its row, and what its kind does otherwise than a plain row."""

    kind: ClassVar[Kind]
    new: NewCall

    def row_txn(self, connection: Connection) -> dict[str, Any]:
        """Return the row as it can be stored now that the fence is locked."""
        return self.new.row

    def added_txn(self, connection: Connection, fence: Fence | None) -> None:
        """Write what belongs to the row, which has just been stored."""

    def is_same(self, held: Row[Any]) -> bool:
        """Return whether what `kind.held` found is certainly this call."""
        return tuple(held[2:]) == tuple(self.new.row[name] for name in self.kind.identity)

    def differing_txn(self, connection: Connection) -> list[str]:
        """Return the fields in which the stored call differs, if it is not the same."""
        return []

    def conflict_txn(self, connection: Connection, fence: Fence, fields: Sequence[str]) -> None:
        """Keep the evidence that it differs in these fields."""


@dataclass(frozen=True)
class Intent(Call):
    """The announcement of a call. A second one says nothing else than the first."""

    kind: ClassVar[Kind] = INTENTS


def new_intent(key: RolloutKey, model_call_id: str, stamp: Stamp) -> NewCall:
    """Return the row that announces a call."""
    row = {
        **key.columns(),
        "model_call_id": model_call_id,
        "refusal_code": None,
        "begun_at": stamp.at,
        "refused_at": None,
        "written_by": stamp.by,
    }
    return NewCall(row, stamp)


def settle_txn(connection: Connection, call: Call) -> Settled | Differing:
    """Store a call, unless its fence is closed or its id is taken. The evidence of a conflict is kept."""
    new, kind = call.new, call.kind
    # Exclusively from the start: to upgrade a shared lock would deadlock two conflicting writers.
    if kind.is_fenced:
        fence: Fence | None = lock_fence_txn(connection, new.rollout, new.stamp)
    else:
        fence = find_fence_txn(connection, new.rollout)
    refused = _refusal(fence) if kind.is_fenced else None
    held: Row[Any] | None = None
    # Again where it was removed between the two statements, as it can be without a fence.
    while held is None:
        if refused is None and _insert_txn(connection, call, fence):
            return Settled.STORED
        held = connection.execute(kind.held, new.rollout.named(new.key[2])).one_or_none()
        if held is None and refused is not None:
            return refused
    is_own = tuple(held[:2]) == (new.row[kind.written_at], new.row["written_by"])
    is_same = call.is_same(held)
    is_recorded = kind.is_fenced and not is_same and happened_txn(connection, new.rollout, new.stamp)
    if refused is not None and not (is_own and is_same) and not is_recorded:
        return refused
    fields = [] if is_same else call.differing_txn(connection)
    if not fields:
        return Settled.STORED if is_own else Settled.SAME
    if fence is not None and not is_recorded:
        call.conflict_txn(connection, fence, fields)
    return Differing(fields)


def _refusal(fence: Fence | None) -> Settled | None:
    return None if fence is None or fence.state is FenceState.OPEN else Settled(fence.state)


def _insert_txn(connection: Connection, call: Call, fence: Fence | None) -> bool:
    added = connection.execute(insert_if_absent(connection, call.kind.table), call.row_txn(connection))
    if added.rowcount:
        call.added_txn(connection, fence)
    return bool(added.rowcount)
