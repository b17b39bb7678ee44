"""The capture ledger: the token-free rows of calls whose token data inference workers staged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection, func, insert, select, union_all

from tokencustody.codec.calls import call_name
from tokencustody.codec.row_hash import HASH_COLUMN, is_proven, row_sha256
from tokencustody.database.transactions import SharedWrite
from tokencustody.errors import (
    CorruptEntryError,
    InvalidRecordError,
    PayloadConflictError,
    RolloutRetiredError,
)
from tokencustody.ids import check_call_id, check_rollout_id, check_text
from tokencustody.schema.tables import fences, ledger_calls, ledger_failures
from tokencustody.staging.records import CaptureLedgerCommit
from tokencustody.states import FenceState
from tokencustody.store.base import now
from tokencustody.store.lineage import SqlLineageResolver
from tokencustody.store.removal import RolloutRemover
from tokencustody.txn.fence import RolloutKey, Stamp, lock_fence_txn, of_call, of_rollout
from tokencustody.txn.ledger_rows import (
    exported_call,
    exported_failure,
    is_same_call,
    manifest_of,
    row_of_commit,
    row_of_export,
)
from tokencustody.txn.seal import LateRows

LOGGER = logging.getLogger(__name__)

Result = TypeVar("Result")

# About what a row takes on its way.
_ROW_SIZE = 2048

_TABLES = (ledger_calls, ledger_failures)
_HELD_CALL = select(ledger_calls).where(of_call(ledger_calls))
_HELD_REASONS = (
    select(ledger_failures.c.reason).where(of_call(ledger_failures)).order_by(ledger_failures.c.position)
)
_ROWS = {table: select(table).where(of_rollout(table)).order_by(table.c.position) for table in _TABLES}
_ADD = {table: insert(table) for table in _TABLES}
_POSITIONS = union_all(
    *(select(func.max(table.c.position).label("position")).where(of_rollout(table)) for table in _TABLES)
).subquery()
# MAX rather than EXISTS, for which a planner with old statistics reads the table until a row turns up.
_LAST_POSITION = select(func.max(_POSITIONS.c.position))
_STATE = select(fences.c.state).where(of_rollout(fences))


class SqlLineageStore(SqlLineageResolver, RolloutRemover):
    """A `CaptureLedger`, and the `LineageResolver` over complete records and ledger rows.

    Every method returns once its row is durable and visible to every process, and raises StoreUnavailableError when
    the deadline passes first.
    """

    async def record(self, commit: CaptureLedgerCommit) -> None:
        """Publish a staged call, so that the next request on any worker can resolve to it.

        The same commit again is a no-op, where conversations are the same if they have the same hashes, whatever ids a
        server gave to their items. Other data under the call id, or a call that was recorded as failed, raises
        PayloadConflictError (a ValueError). A frozen rollout takes the commit and gets a new version, so that no drop
        of an earlier snapshot removes it. A retired rollout discards it with a warning that names its staging key.
        Raises InvalidRecordError for a malformed commit.
        """
        row = row_of_commit(commit)
        key = RolloutKey(self.run, commit.rollout_id)
        if not await self._add(key, ledger_calls, row):
            LOGGER.warning(
                "rollout %s of run %s is retired: call %s is discarded; its tokens stay staged under %s",
                key.rollout_id,
                key.run,
                row["model_call_id"],
                row["staging_key"],
            )

    async def record_failure(self, rollout_id: str, model_call_id: str, reason: str) -> None:
        """Record that a call's token capture did not complete. It never becomes a parent.

        The same reason again is a no-op, another one is a second row. Frozen and retired rollouts as for `record`.
        """
        key = RolloutKey(self.run, check_rollout_id(rollout_id))
        check_call_id(model_call_id)
        if not check_text(reason, "reason"):
            raise InvalidRecordError("reason must not be empty")
        if not await self._add(key, ledger_failures, {"model_call_id": model_call_id, "reason": reason}):
            LOGGER.warning(
                "rollout %s of run %s is retired: the failure of call %s (%s) is discarded",
                rollout_id,
                self.run,
                model_call_id,
                reason,
            )

    async def manifest(self, rollout_id: str) -> dict[str, Any]:
        """Return the rollout's ledger, in commit order, as plain data that validates as `RolloutManifest`.

        A row without a response id or chain hash stands under `failures`. Raises RolloutRetiredError for a retired
        rollout; one that is unknown has an empty manifest.
        """
        return await self._read(rollout_id, partial(manifest_of, rollout_id))

    async def has_rows(self, rollout_id: str) -> bool:
        """Return whether the ledger has any row, committed or failed. Raises RolloutRetiredError when retired."""
        key = RolloutKey(self.run, check_rollout_id(rollout_id))

        def look(connection: Connection) -> bool:
            _refuse_if_retired_txn(connection, key)
            return connection.scalar(_LAST_POSITION, key.named()) is not None

        return await self._database.read(look)

    async def export_rows(self, rollout_id: str) -> list[dict[str, Any]]:
        """Return every row of the ledger in commit order, as plain JSON-compatible data for `import_rows`.

        Raises RolloutRetiredError for a retired rollout.
        """
        return await self._read(rollout_id, partial(_export, rollout_id))

    async def import_rows(self, rollout_id: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add exported rows to a rollout, all or none, in their order.

        Rows that another rollout exported keep that rollout's id in `capture_key`, under which their tokens are
        staged. A row that is there already is skipped. A frozen rollout gets a new version. Takes rows whose record's
        fields stand beside the others too. Raises PayloadConflictError for other data under a call id,
        InvalidRecordError that names a malformed row, RolloutRetiredError for a retired rollout.
        """
        key = RolloutKey(self.run, check_rollout_id(rollout_id))
        checked = []
        for number, row in enumerate(rows):
            try:
                checked.append(row_of_export(rollout_id, row))
            except InvalidRecordError as exc:
                raise InvalidRecordError(f"rows[{number}]: {exc}") from None
        stamp = Stamp.make(now(), self.written_by)

        def add_all(connection: Connection) -> None:
            if not _add_rows_txn(connection, key, checked, stamp):
                raise _retired(key)

        with self._database.doors() as doors:
            await doors.write(add_all, rollout=key)

    async def _add(self, key: RolloutKey, table: Any, row: dict[str, Any]) -> bool:
        """Add a row, and return whether the rollout took it."""
        new = _NewRow(key, table, row, Stamp.make(now(), self.written_by))
        with self._database.doors() as doors:
            # PostgreSQL itself lets the commits of several connections share a flush.
            if doors.is_sqlite and not doors.has_turn(key):
                answer = await doors.write_together(_TOGETHER, new, size=_ROW_SIZE)
                if isinstance(answer, PayloadConflictError):
                    raise answer
                is_taken = answer
            else:
                is_taken = await doors.write(new.add_txn, rollout=key)
            if not is_taken:
                doors.count("late_writes_refused")
            return is_taken

    async def _read(self, rollout_id: str, make: Callable[[Sequence[Any], Sequence[Any]], Result]) -> Result:
        """Return what `make` makes of the rows of calls and failures. Rows that make no sense are corrupt."""
        key = RolloutKey(self.run, check_rollout_id(rollout_id))

        def read(connection: Connection) -> Result:
            _refuse_if_retired_txn(connection, key)
            return make(*ledger_rows_txn(connection, key))

        return await self._database.read(read)


@dataclass(frozen=True, slots=True)
class _NewRow:
    """A row of the ledger on its way, and the stamp with which it is written."""

    key: RolloutKey
    table: Any
    row: dict[str, Any]
    stamp: Stamp

    def add_txn(self, connection: Connection) -> bool:
        """Add it, and return whether its rollout takes it. Raises PayloadConflictError."""
        return _add_rows_txn(connection, self.key, [(self.table, self.row)], self.stamp)


def _add_together_txn(connection: Connection, rows: Sequence[_NewRow]) -> list[bool | PayloadConflictError]:
    """Add the rows of several rollouts, each for itself."""
    answers: list[bool | PayloadConflictError] = []
    for new in rows:
        try:
            with connection.begin_nested():
                answers.append(new.add_txn(connection))
        except PayloadConflictError as exc:
            answers.append(exc)
    return answers


_TOGETHER: SharedWrite[_NewRow, bool | PayloadConflictError] = SharedWrite(_add_together_txn)


def _add_rows_txn(
    connection: Connection, key: RolloutKey, rows: Sequence[tuple[Any, dict[str, Any]]], stamp: Stamp
) -> bool:
    """Add those of the rows that are not there, and return whether the rollout takes any: a retired one does not."""
    # Exclusive, because commit order is a position that is counted per rollout.
    fence = lock_fence_txn(connection, key, stamp)
    if fence.state is FenceState.RETIRED:
        return False
    late = LateRows(connection, key, fence, stamp) if fence.state is FenceState.FROZEN else None
    # What an earlier try added, whose answer was lost, is there, and made its version.
    added = [row["model_call_id"] for table, row in rows if add_row_txn(connection, key, table, row, stamp)]
    if late is not None and added:
        late.advance_txn(added[0] if len(added) == 1 else "")
    return True


def add_row_txn(
    connection: Connection, key: RolloutKey, table: Any, row: dict[str, Any], stamp: Stamp
) -> bool:
    """Add a row at the rollout's next position, and return whether it was new. Other data is a conflict."""
    call = row["model_call_id"]
    reasons = connection.scalars(_HELD_REASONS, key.named(call)).all()
    if table is ledger_failures:
        if row["reason"] in reasons:
            return False
    else:
        held = connection.execute(_HELD_CALL, key.named(call)).one_or_none()
        if held is not None and is_same_call(held, row):
            return False
        if held is not None or reasons:
            said = (
                f"it was recorded as failed ({reasons[0]})"
                if reasons
                else "it was recorded before with other data"
            )
            raise PayloadConflictError(
                f"conflicting ledger record for model call {call} of rollout {key.rollout_id}: {said}; that stays"
            )
    last = connection.scalar(_LAST_POSITION, key.named())
    signed = {"committed_at" if table is ledger_calls else "recorded_at": stamp.at, "written_by": stamp.by}
    whole = {**key.columns(), **row, "position": (last or 0) + 1, **signed}
    connection.execute(_ADD[table], whole | {HASH_COLUMN: row_sha256(table, whole)})
    return True


def ledger_rows_txn(connection: Connection, key: RolloutKey) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the rows of calls and of failures, each in commit order.

    Raises CorruptEntryError that names the first call whose row is not the one that was written.
    """
    found = []
    for table, statement in _ROWS.items():
        rows = connection.execute(statement, key.named()).all()
        for row in rows:
            if not is_proven(table, row):
                raise CorruptEntryError(
                    f"{call_name(key.rollout_id, row.model_call_id)}: its row in the ledger is not the one that was "
                    "written; restore it from a backup"
                )
        found.append(rows)
    calls, failures = found
    return calls, failures


def _export(rollout_id: str, calls: Sequence[Any], failures: Sequence[Any]) -> list[dict[str, Any]]:
    rows = [(row.position, exported_call(rollout_id, row)) for row in calls]
    rows += [(row.position, exported_failure(rollout_id, row)) for row in failures]
    return [exported for _, exported in sorted(rows, key=lambda row: row[0])]


def _refuse_if_retired_txn(connection: Connection, key: RolloutKey) -> None:
    state = connection.scalar(_STATE, key.named())
    if state == FenceState.RETIRED:
        raise _retired(key)


def _retired(key: RolloutKey) -> RolloutRetiredError:
    return RolloutRetiredError(
        f"rollout {key.rollout_id} of run {key.run} is retired and its ledger is gone; delete it to use the id again"
    )
