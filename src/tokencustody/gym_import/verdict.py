"""The fence of an imported rollout: what is written beside its calls, while this transaction alone may."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, insert

from tokencustody.gym_import.files import State
from tokencustody.schema.tables import intents
from tokencustody.states import FailureKind, FenceState, VersionEvent
from tokencustody.store.ledger import add_row_txn
from tokencustody.txn.fence import (
    Fence,
    RolloutKey,
    Stamp,
    advance_txn,
    fail_txn,
    happened_txn,
    lock_fence_txn,
)
from tokencustody.txn.seal import LateRows, seal_txn


class Verdict:
    """Writes a rollout's ledger, intents, marks, conflicts and fence, each event with an id below `stamp`'s."""

    def __init__(self, key: RolloutKey, stamp: Stamp) -> None:
        self._key = key
        self._stamp = stamp
        self._events = 0

    def lock_txn(self, connection: Connection) -> bool:
        """Lock the fence, and return whether this import opened it. Everything else comes after."""
        self._fence = lock_fence_txn(connection, self._key, self._stamp)
        self._late: LateRows | None = None
        if self._fence.state is FenceState.FROZEN:
            self._late = LateRows(connection, self._key, self._fence, self._next_stamp())
        opening = replace(self._stamp, event_id=self._stamp.opening_id)
        return happened_txn(connection, self._key, opening)

    def record_txn(self, connection: Connection, rows: Sequence[tuple[Any, dict[str, Any]]]) -> None:
        """Add rows to the ledger, of which it has none. Behind a freeze they make a version."""
        for table, row in rows:
            add_row_txn(connection, self._key, table, row, self._stamp)
        if self._late is not None and rows:
            self._fence = replace(self._fence, version=self._late.advance_txn(""))

    def announce_txn(self, connection: Connection, calls: Sequence[str]) -> None:
        """Add intents that are not there."""
        common = {**self._key.columns(), "begun_at": self._stamp.at, "written_by": self._stamp.by}
        rows = [common | {"model_call_id": call, "refusal_code": None, "refused_at": None} for call in calls]
        if rows:
            connection.execute(insert(intents), rows)

    def mark_txn(self, connection: Connection, call: str) -> None:
        """Mark the rollout incomplete."""
        self._fail(connection, VersionEvent.MARK, FailureKind.MARK, model_call_id=call)

    def conflict_txn(self, connection: Connection, call: str, evidence: dict[str, Any]) -> None:
        """Keep the evidence of two contents of a call, which `conflict_evidence` made."""
        self._fail(connection, VersionEvent.CONFLICT, FailureKind.CONFLICT, model_call_id=call, **evidence)

    def freeze_txn(self, connection: Connection, state: State, version: int, *, incomplete: bool) -> None:
        """Raise the fence as Gym raised it: the same snapshot id, and `version` if that is the next one or later."""
        version = max(version, self._fence.version + 1)
        self._advance(
            connection,
            VersionEvent.FREEZE,
            version,
            seal=seal_txn(connection, self._key),
            state=FenceState.FROZEN,
            snapshot_id=state.snapshot_id,
            incomplete=incomplete,
            frozen_at=self._stamp.at,
        )
        if state.retired:
            self._advance(
                connection,
                VersionEvent.DROP,
                version + 1,
                state=FenceState.RETIRED,
                retired_at=self._stamp.at,
            )

    def _advance(self, connection: Connection, event: VersionEvent, version: int, **changes: Any) -> None:
        before = replace(self._fence, version=version - 1)
        advance_txn(connection, self._key, before, event, self._next_stamp(), **changes)
        kept = {name: changes[name] for name in Fence.__dataclass_fields__ if name in changes}
        self._fence = replace(before, version=version, **kept)

    def _fail(self, connection: Connection, event: VersionEvent, kind: FailureKind, **evidence: Any) -> None:
        fail_txn(connection, self._key, self._fence, event, kind, self._next_stamp(), **evidence)
        self._fence = replace(self._fence, version=self._fence.version + 1, incomplete=True)

    def _next_stamp(self) -> Stamp:
        self._events += 1
        return replace(self._stamp, event_id=f"{self._stamp.event_id}-{self._events}")
