"""The fence of a rollout: one row that every write locks, and the versions it goes through.

PostgreSQL's fast statement (`txn.inserting`) locks the row in share mode and never changes it, so that calls which go
that way do not queue behind each other; everything else locks it exclusively, by the functions here. On SQLite, where
writes are one at a time, the transaction is the lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from secrets import token_hex
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Text,
    and_,
    bindparam,
    insert,
    select,
    update,
)

from tokencustody.database.dialects import (
    built_once,
    ensure_turn,
    insert_if_absent,
    lock_number,
    locking,
    patience,
)
from tokencustody.errors import TokenCaptureFrozenError, TokenCaptureRetiredError
from tokencustody.schema.tables import failures, fences, snapshot_versions
from tokencustody.states import FailureKind, FenceState, VersionEvent

# A statement names the rollout and the call by parameters, so that it is built only once.
_RUN = bindparam("in_run", type_=Text())
_ROLLOUT = bindparam("in_rollout", type_=Text())
_CALL = bindparam("call", type_=Text())


def of_rollout(table: Any) -> ColumnElement[bool]:
    """Return the condition that a row of `table` belongs to the rollout of `RolloutKey.named`."""
    return and_(table.c.run == _RUN, table.c.rollout_id == _ROLLOUT)


def of_call(table: Any) -> ColumnElement[bool]:
    """Return the condition that a row of `table` is that of the call of `RolloutKey.named`."""
    return and_(of_rollout(table), table.c.model_call_id == _CALL)


@dataclass(frozen=True, slots=True)
class RolloutKey:
    """The first two columns of every primary key."""

    run: str
    rollout_id: str

    def columns(self) -> dict[str, str]:
        """Return the key as column values."""
        return {"run": self.run, "rollout_id": self.rollout_id}

    def named(self, model_call_id: str | None = None, **others: Any) -> dict[str, Any]:
        """Return the parameters of a statement on this rollout, or on one call of it, with its other ones."""
        call = {} if model_call_id is None else {"call": model_call_id}
        return {"in_run": self.run, "in_rollout": self.rollout_id, **call, **others}

    @property
    def lock_name(self) -> str:
        """The name of the rollout's advisory lock."""
        return f"{self.run}/{self.rollout_id}"


@dataclass(frozen=True, slots=True)
class Stamp:
    """When, by whom and under which unique id something happens, fixed before a transaction may repeat it."""

    at: datetime
    by: str
    event_id: str

    @property
    def opening_id(self) -> str:
        """The event id of a fence that opens on the way to the event, which has its row too."""
        return f"{self.event_id}-open"

    @classmethod
    def make(cls, at: datetime, by: str) -> Stamp:
        """Return a stamp with a new event id."""
        return cls(at, by, token_hex(16))


@dataclass(frozen=True, slots=True)
class Fence:
    """A rollout's fence as a transaction locked it."""

    state: FenceState
    version: int
    snapshot_id: str | None
    incomplete: bool


_FENCE = select(fences.c.state, fences.c.version, fences.c.snapshot_id, fences.c.incomplete).where(
    of_rollout(fences)
)
_LOCKING = built_once(lambda connection: locking(connection, _FENCE))
_HAPPENED = select(snapshot_versions.c.version).where(
    of_rollout(snapshot_versions), snapshot_versions.c.event_id == bindparam("event_id")
)
# What a seal covers: see `txn.seal`.
SEAL_VERSION = 2
_ADVANCE = update(fences).where(of_rollout(fences))
_ADD_VERSION = insert(snapshot_versions)
_ADD_FAILURE = insert(failures)


def find_fence_txn(connection: Connection, key: RolloutKey) -> Fence | None:
    """Lock exclusively and return the fence, or return None when the rollout has none."""
    number = lock_number(key.lock_name)
    ensure_turn(connection, number)
    turn = key.named(lock_number=number, lock_timeout=patience(connection))
    row = connection.execute(_LOCKING(connection), turn).one_or_none()
    return None if row is None else Fence(FenceState(row.state), row.version, row.snapshot_id, row.incomplete)


def lock_fence_txn(connection: Connection, key: RolloutKey, stamp: Stamp) -> Fence:
    """Lock exclusively and return the fence, opened at version 0 when the rollout has none."""
    while True:
        fence = find_fence_txn(connection, key)
        if fence is not None:
            return fence
        opened = connection.execute(
            insert_if_absent(connection, fences),
            {
                **key.columns(),
                "state": FenceState.OPEN,
                "version": 0,
                "incomplete": False,
                "opened_at": stamp.at,
            },
        )
        if opened.rowcount:
            _add_version_txn(connection, key, 0, VersionEvent.OPEN, stamp.by, stamp.at, stamp.opening_id)


_TOO_LATE = "came too late and changes nothing: discard it, and neither drop nor mark the rollout for it"


def refuse_if_frozen(fence: Fence, key: RolloutKey, what: str) -> None:
    """Raise TokenCaptureFrozenError or TokenCaptureRetiredError unless the fence is open."""
    if fence.state is not FenceState.OPEN:
        raise refusal(fence.state, key, what)


def refuse_if_retired(fence: Fence, key: RolloutKey, what: str) -> None:
    """Raise TokenCaptureRetiredError when the rollout is retired."""
    if fence.state is FenceState.RETIRED:
        raise refusal(fence.state, key, what)


def refusal(state: FenceState, key: RolloutKey, what: str) -> TokenCaptureFrozenError:
    """Return the error for what comes after a fence, which is in this state."""
    error = TokenCaptureRetiredError if state is FenceState.RETIRED else TokenCaptureFrozenError
    return error(f"rollout {key.rollout_id} of run {key.run} is {state}: {what} {_TOO_LATE}")


def happened_txn(connection: Connection, key: RolloutKey, stamp: Stamp) -> bool:
    """Return whether an earlier try of the stamped event was committed after all."""
    return connection.execute(_HAPPENED, key.named(event_id=stamp.event_id)).first() is not None


def advance_txn(
    connection: Connection,
    key: RolloutKey,
    fence: Fence,
    event: VersionEvent,
    stamp: Stamp,
    *,
    model_call_id: str = "",
    seal: str | None = None,
    **changes: Any,
) -> int:
    """Give an exclusively locked fence its next version, with `changes` to its columns. Returns that version.

    `seal` is the hash of what the rollout holds behind its fence.
    """
    version = fence.version + 1
    connection.execute(_ADVANCE, key.named(version=version, **changes))
    snapshot_id = changes.get("snapshot_id", fence.snapshot_id)
    _add_version_txn(
        connection, key, version, event, stamp.by, stamp.at, stamp.event_id, snapshot_id, model_call_id, seal
    )
    return version


def fail_txn(
    connection: Connection,
    key: RolloutKey,
    fence: Fence,
    event: VersionEvent,
    kind: FailureKind,
    stamp: Stamp,
    *,
    model_call_id: str,
    first: str | None = None,
    second: str | None = None,
    differing: str = "",
    **second_payload: Any,
) -> None:
    """Mark an exclusively locked rollout incomplete, with the evidence in `failures`.

    `second_payload` fills the columns that say how the second payload of a conflict is continued.
    """
    version = advance_txn(connection, key, fence, event, stamp, model_call_id=model_call_id, incomplete=True)
    connection.execute(
        _ADD_FAILURE,
        {
            **key.columns(),
            "version": version,
            "kind": kind,
            "model_call_id": model_call_id,
            "first_payload_sha256": first,
            "second_payload_sha256": second,
            "differing_fields": differing,
            "recorded_at": stamp.at,
            "written_by": stamp.by,
        }
        | second_payload,
    )


def _add_version_txn(
    connection: Connection,
    key: RolloutKey,
    version: int,
    event: VersionEvent,
    by: str,
    at: datetime,
    event_id: str,
    snapshot_id: str | None = None,
    model_call_id: str = "",
    seal: str | None = None,
) -> None:
    connection.execute(
        _ADD_VERSION,
        {
            **key.columns(),
            "version": version,
            "event": event,
            "event_id": event_id,
            "model_call_id": model_call_id,
            "snapshot_id": snapshot_id,
            "recorded_at": at,
            "written_by": by,
            "sealed_sha256": seal,
            "seal_version": None if seal is None else SEAL_VERSION,
        },
    )
