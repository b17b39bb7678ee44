"""The capture ledger: the token-free rows of calls whose token data inference workers staged."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError
from sqlalchemy import Connection, func, insert, select, union_all

from tokencustody.errors import (
    CorruptEntryError,
    InvalidRecordError,
    PayloadConflictError,
    RolloutRetiredError,
)
from tokencustody.fingerprint import conversation_digest
from tokencustody.sql.codec import first_problem, where
from tokencustody.sql.row_hash import HASH_COLUMN, is_proven, row_sha256
from tokencustody.sql.tables import FenceState, fences, ledger_calls, ledger_failures
from tokencustody.staging.records import (
    LEDGER_ROW_MISSING_CHAIN_HASH_REASON,
    LEDGER_ROW_MISSING_RESPONSE_ID_REASON,
    CallRecord,
    CaptureLedgerCommit,
    ManifestFailure,
    RolloutManifest,
)
from tokencustody.store.base import now
from tokencustody.store.fence import RolloutKey, Stamp, lock_fence_txn, of_call, of_rollout
from tokencustody.store.ids import check_call_id, check_rollout_id, check_text
from tokencustody.store.lineage import SqlLineageResolver
from tokencustody.store.removal import RolloutRemover

LOGGER = logging.getLogger(__name__)

Result = TypeVar("Result")

# The columns of a call that are fields of its manifest row.
_RECORD_COLUMNS = tuple(name for name in CallRecord.model_fields if name in ledger_calls.c)
_MAX_COLUMN_INT = 2**63 - 1


_IDENTITY = {ledger_calls: ledger_calls.c.payload_sha256, ledger_failures: ledger_failures.c.reason}
_HELD = {table: select(identity).where(of_call(table)) for table, identity in _IDENTITY.items()}
_ROWS = {table: select(table).where(of_rollout(table)).order_by(table.c.position) for table in _IDENTITY}
_ADD = {table: insert(table) for table in _IDENTITY}
_POSITIONS = union_all(
    *(select(func.max(table.c.position).label("position")).where(of_rollout(table)) for table in _IDENTITY)
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

        The same commit again is a no-op; other data under the call id, or a call that was recorded as failed, raises
        PayloadConflictError (a ValueError). A retired rollout discards the commit with a warning that names its staging
        key. Raises InvalidRecordError for a malformed commit.
        """
        row = _row_of_commit(commit)
        key = RolloutKey(self.run, commit.rollout_id)
        outcome = await self._add(key, ledger_calls, row)
        if outcome == _RETIRED:
            LOGGER.warning(
                "rollout %s of run %s is retired: call %s is discarded; its tokens stay staged under %s",
                key.rollout_id,
                key.run,
                row["model_call_id"],
                row["staging_key"],
            )

    async def record_failure(self, rollout_id: str, model_call_id: str, reason: str) -> None:
        """Record that a call's token capture did not complete. It never becomes a parent.

        The same reason again is a no-op, another one raises PayloadConflictError (a ValueError). A retired rollout
        discards the failure with a warning.
        """
        key = RolloutKey(self.run, check_rollout_id(rollout_id))
        check_call_id(model_call_id)
        if not check_text(reason, "reason"):
            raise InvalidRecordError("reason must not be empty")
        outcome = await self._add(key, ledger_failures, {"model_call_id": model_call_id, "reason": reason})
        if outcome == _RETIRED:
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
        staged. A row that is there already is skipped. Raises PayloadConflictError for other data under a call id,
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
            if _lock_txn(connection, key, stamp) == _RETIRED:
                raise _retired(key)
            for table, row in checked:
                add_row_txn(connection, key, table, row, stamp)

        with self._database.doors() as doors:
            await doors.write(add_all, rollout=key)

    async def _add(self, key: RolloutKey, table: Any, row: dict[str, Any]) -> str:
        stamp = Stamp.make(now(), self.written_by)

        def add(connection: Connection) -> str:
            if _lock_txn(connection, key, stamp) == _RETIRED:
                return _RETIRED
            add_row_txn(connection, key, table, row, stamp)
            return "stored"

        # Exclusive, because commit order is a position that is counted per rollout.
        with self._database.doors() as doors:
            outcome = await doors.write(add, rollout=key)
            if outcome == _RETIRED:
                doors.count("late_writes_refused")
            return outcome

    async def _read(self, rollout_id: str, make: Callable[[Sequence[Any], Sequence[Any]], Result]) -> Result:
        """Return what `make` makes of the rows of calls and failures. Rows that make no sense are corrupt."""
        key = RolloutKey(self.run, check_rollout_id(rollout_id))

        def read(connection: Connection) -> Result:
            _refuse_if_retired_txn(connection, key)
            return make(*ledger_rows_txn(connection, key))

        return await self._database.read(read)


_RETIRED = "retired"


def _lock_txn(connection: Connection, key: RolloutKey, stamp: Stamp) -> str:
    fence = lock_fence_txn(connection, key, stamp, exclusive=True)
    return _RETIRED if fence.state is FenceState.RETIRED else "writable"


def add_row_txn(
    connection: Connection, key: RolloutKey, table: Any, row: dict[str, Any], stamp: Stamp
) -> None:
    """Add a row at the rollout's next position. The same row again is a no-op; other data is a conflict."""
    call = row["model_call_id"]
    identity = _IDENTITY[table]
    held = connection.scalar(_HELD[table], key.named(call))
    if held is not None and held == row[identity.name]:
        return
    failed = table is ledger_calls and connection.scalar(_HELD[ledger_failures], key.named(call))
    if held is not None or failed:
        said = f"it was recorded as failed ({failed})" if failed else "it was recorded before with other data"
        raise PayloadConflictError(
            f"conflicting ledger record for model call {call} of rollout {key.rollout_id}: {said}; that stays"
        )
    last = connection.scalar(_LAST_POSITION, key.named())
    signed = {"committed_at" if table is ledger_calls else "recorded_at": stamp.at, "written_by": stamp.by}
    whole = {**key.columns(), **row, "position": (last or 0) + 1, **signed}
    connection.execute(_ADD[table], whole | {HASH_COLUMN: row_sha256(table, whole)})


def _row_of_commit(commit: CaptureLedgerCommit) -> dict[str, Any]:
    if not isinstance(commit, CaptureLedgerCommit):
        raise InvalidRecordError(f"commit must be a CaptureLedgerCommit, not {type(commit).__name__}")
    data = commit.model_dump()
    try:
        checked = CaptureLedgerCommit.model_validate(data)
    except ValidationError as exc:
        raise InvalidRecordError(first_problem(exc)) from None
    check_rollout_id(checked.rollout_id)
    try:
        context_digest = conversation_digest(checked.request_items)
        identity = json.dumps(data, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
    except (ValueError, TypeError, RecursionError) as exc:
        raise InvalidRecordError(f"request_items or response_items of the commit: {exc}") from None
    return _call_row(
        checked.record.model_dump(),
        staging_chain=checked.staging_chain,
        context_len=len(checked.request_items),
        context_digest=context_digest,
        sha256=hashlib.sha256(identity).hexdigest(),
    )


def _call_row(
    record: Mapping[str, Any],
    *,
    staging_chain: Iterable[str],
    context_len: int,
    context_digest: str,
    sha256: str,
) -> dict[str, Any]:
    row = {name: record.get(name) for name in _RECORD_COLUMNS}
    check_call_id(record["model_call_id"])
    for name, value in row.items():
        if isinstance(value, str):
            check_text(value, f"record.{name}")
        elif isinstance(value, int) and value > _MAX_COLUMN_INT:
            raise InvalidRecordError(f"record.{name}: {value} does not lie between 0 and 2^63-1")
    chain = [check_text(key, f"staging_chain[{index}]") for index, key in enumerate(staging_chain)]
    return row | {
        "staging_chain": json.dumps(chain, ensure_ascii=False),
        "continuation_context_len": context_len,
        "continuation_context_digest": context_digest,
        "payload_sha256": sha256,
    }


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
                    f"{where(key.rollout_id, row.model_call_id)}: its row in the ledger is not the one that was "
                    "written; restore it from a backup"
                )
        found.append(rows)
    calls, failures = found
    return calls, failures


def manifest_of(rollout_id: str, calls: Sequence[Any], failures: Sequence[Any]) -> dict[str, Any]:
    """Return the manifest that those rows make, as `SqlLineageStore.manifest` does."""
    problems: list[tuple[int, ManifestFailure]] = [
        (row.position, ManifestFailure(model_call_id=row.model_call_id, reason=row.reason))
        for row in failures
    ]
    records = []
    for row in calls:
        reason = _why_incomplete(row)
        if reason is None:
            records.append(CallRecord(**_record_fields(row)))
        else:
            problems.append((row.position, ManifestFailure(model_call_id=row.model_call_id, reason=reason)))
    manifest = RolloutManifest(
        rollout_id=rollout_id,
        records=records,
        failures=[failure for _, failure in sorted(problems, key=lambda problem: problem[0])],
    )
    wire = manifest.model_dump(mode="json")
    for record in wire["records"]:
        # Readers of the release before this field refuse a record that has it.
        if record["capture_key"] is None:
            del record["capture_key"]
    return wire


def _export(rollout_id: str, calls: Sequence[Any], failures: Sequence[Any]) -> list[dict[str, Any]]:
    rows = [(row.position, _exported(rollout_id, row)) for row in calls]
    rows += [
        (
            row.position,
            {"rollout_id": rollout_id, "model_call_id": row.model_call_id, "reason": row.reason},
        )
        for row in failures
    ]
    return [exported for _, exported in sorted(rows, key=lambda row: row[0])]


def _record_fields(row: Any) -> dict[str, Any]:
    return {name: getattr(row, name) for name in _RECORD_COLUMNS}


def _why_incomplete(row: Any) -> str | None:
    if not row.response_id:
        return LEDGER_ROW_MISSING_RESPONSE_ID_REASON
    return None if row.chain_hash else LEDGER_ROW_MISSING_CHAIN_HASH_REASON


def _exported(rollout_id: str, row: Any) -> dict[str, Any]:
    return {
        "rollout_id": rollout_id,
        "model_call_id": row.model_call_id,
        "record": _record_fields(row),
        "staging_chain": json.loads(row.staging_chain),
        "continuation_context_len": row.continuation_context_len,
        "continuation_context_digest": row.continuation_context_digest,
        "payload_sha256": row.payload_sha256,
    }


def row_of_export(rollout_id: str, row: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the table and the columns of an exported row. Raises InvalidRecordError."""
    try:
        source = check_rollout_id(row["rollout_id"])
        if "reason" in row:
            check_call_id(row["model_call_id"])
            failure = ManifestFailure(model_call_id=row["model_call_id"], reason=row["reason"])
            return ledger_failures, {
                "model_call_id": failure.model_call_id,
                "reason": check_text(failure.reason, "reason"),
            }
        record = dict(row["record"])
        # A row that lacks one of these is kept and stands under the manifest's failures; the rest must be right.
        CallRecord.model_validate(
            record
            | {
                "response_id": record.get("response_id") or "-",
                "chain_hash": record.get("chain_hash") or "0" * 64,
            }
        )
        if source != rollout_id:
            record["capture_key"] = record.get("capture_key") or source
        return ledger_calls, _call_row(
            record,
            staging_chain=row["staging_chain"],
            context_len=row["continuation_context_len"],
            context_digest=check_text(row["continuation_context_digest"], "continuation_context_digest"),
            sha256=check_text(row["payload_sha256"], "payload_sha256"),
        )
    except ValidationError as exc:
        raise InvalidRecordError(first_problem(exc)) from None
    except KeyError as exc:
        raise InvalidRecordError(f"{exc.args[0]} is missing") from None
    except (ValueError, TypeError) as exc:
        raise InvalidRecordError(str(exc)) from None


def _refuse_if_retired_txn(connection: Connection, key: RolloutKey) -> None:
    state = connection.scalar(_STATE, key.named())
    if state == FenceState.RETIRED:
        raise _retired(key)


def _retired(key: RolloutKey) -> RolloutRetiredError:
    return RolloutRetiredError(
        f"rollout {key.rollout_id} of run {key.run} is retired and its ledger is gone; delete it to use the id again"
    )
