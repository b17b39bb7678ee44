"""Storing the rows of many calls at once, each if its fence is open and its key is new.

Every call is answered with whether it was stored. What stands in the way of the others (a closed fence, the same key, a
parent that is gone, an exclusive lock) is for the caller to find out, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sqlalchemy import Connection, Row, Table, select

from tokencustody.database.connecting import DURABLE_COMMIT
from tokencustody.database.dialects import (
    LANE_PATIENCE,
    insert_if_absent,
    is_postgresql,
    limit_waiting,
    lock_number,
)
from tokencustody.database.multirow import (
    ValueAdapter,
    execute_in_pieces,
    from_arrays,
    from_parameters,
    type_names,
)
from tokencustody.database.postgresql import Statement
from tokencustody.database.transactions import SharedWrite
from tokencustody.schema.tables import entries, staged_calls
from tokencustody.states import FailureKind, FenceState, VersionEvent
from tokencustody.txn.fence import RolloutKey, Stamp, find_fence_txn, lock_fence_txn, of_call, try_turn_txn
from tokencustody.txn.reading import IS_CONFLICTING

_KEY = ("run", "rollout_id", "model_call_id")
Key = tuple[str, str, str]
_MOST_SEEN = 10_000


@dataclass(frozen=True, slots=True)
class NewCall:
    """One row to be stored, and the stamp with which it is written.

    `base_sha256` is the payload hash that the call named by the row's `parent_call_id` must have, when the row leaves
    out a prefix that is that call's sequence.
    """

    row: dict[str, Any]
    stamp: Stamp
    base_sha256: str | None = None

    @property
    def key(self) -> Key:
        """The primary key of the row."""
        return self.row["run"], self.row["rollout_id"], self.row["model_call_id"]

    @property
    def rollout(self) -> RolloutKey:
        """The rollout of the row."""
        return RolloutKey(self.row["run"], self.row["rollout_id"])


_STATE = "(SELECT f.state FROM fences AS f WHERE f.run = asked.run AND f.rollout_id = asked.rollout_id)"
_FENCE_IS_OPEN = f"{_STATE} = '{FenceState.OPEN}'"
_BASE_IS_THERE = f"""(asked.base_sha256 IS NULL OR (
    (SELECT base.payload_sha256 FROM entries AS base WHERE base.run = asked.run
        AND base.rollout_id = asked.rollout_id AND base.model_call_id = asked.parent_call_id) = asked.base_sha256
    AND (SELECT 1 FROM failures AS f WHERE f.run = asked.run AND f.rollout_id = asked.rollout_id
        AND f.kind = '{FailureKind.CONFLICT}' AND f.model_call_id = asked.parent_call_id LIMIT 1) IS NULL))"""
# What is staged behind a freeze makes a version, which takes an exclusive lock.
_FENCE_IS_NOT_FROZEN = f"coalesce({_STATE}, '') <> '{FenceState.FROZEN}'"
_HAS_NO_ATTACHMENTS = (
    "(SELECT 1 FROM staged_attachments AS a WHERE a.run = stored.run AND a.rollout_id = stored.rollout_id"
    " AND a.model_call_id = stored.model_call_id LIMIT 1) IS NULL"
)
# One that has no fence yet, and gets and freezes it while this statement runs, began before that freeze had returned.
_NOT_FROZEN = f"""writable AS (
            SELECT run, rollout_id FROM locked WHERE state <> '{FenceState.FROZEN}'
            UNION ALL SELECT run, rollout_id FROM turns r
            WHERE taken AND (SELECT 1 FROM fences f WHERE f.run = r.run AND f.rollout_id = r.rollout_id) IS NULL),"""
_IMPATIENT = f"(SELECT set_config('lock_timeout', '{round(1000 * LANE_PATIENCE)}ms', true)) IS NOT NULL"
_OPEN_FENCES = (
    "WITH {asked} INSERT INTO fences (run, rollout_id, state, version, incomplete, opened_at)"
    f" SELECT run, rollout_id, '{FenceState.OPEN}', 0, false, at FROM asked WHERE true ON CONFLICT DO NOTHING"
)
_OPEN_VERSIONS = (
    "WITH {asked} INSERT INTO snapshot_versions"
    " (run, rollout_id, version, event, event_id, model_call_id, recorded_at, written_by)"
    f" SELECT run, rollout_id, 0, '{VersionEvent.OPEN}', opening_id, '', at, written_by FROM asked WHERE true"
    " ON CONFLICT DO NOTHING"
)


class CallInsert:
    """Inserts rows into `table`, whose time of writing stands in `written_at`.

    Rows that are not `fenced` go in wherever no freeze has come before, whether or not there is a fence, and open none.
    A row is known again by its `identity` columns, and where a fence may have closed since by that time and its writer
    too: that is how a write whose answer was lost is found to have succeeded.
    """

    def __init__(self, table: Table, written_at: str, *identity: str, fenced: bool = True) -> None:
        self._table = table
        self._columns = tuple(column.name for column in table.columns)
        self._written_at = written_at
        self._known_by = (*_KEY, *(("written_by", written_at) if fenced else ()), *identity)
        self._fenced = fenced
        # Only complete records leave out what another call holds.
        self._condition = _BASE_IS_THERE if table is entries else "true"
        # A call that was staged with attachments is another one than that without.
        self._known_if = _HAS_NO_ATTACHMENTS if table is staged_calls else "true"
        self._adapter = ValueAdapter(table)
        self.shared: SharedWrite[NewCall, bool] = SharedWrite(
            self._in_transaction, self._in_one_statement, self._answers
        )

    def _in_transaction(self, connection: Connection, calls: Sequence[NewCall]) -> list[bool]:
        first = _first_of_each_key(calls)
        if is_postgresql(connection):
            # In one order, so that two writers of the same calls do not deadlock.
            stored = self._insert_rollout(connection, [first[key] for key in sorted(first)])
        else:
            stored = self._insert_on_sqlite(connection, first)
        return [call.key in stored and call is first[call.key] for call in calls]

    def _in_one_statement(self, calls: Sequence[NewCall]) -> Statement:
        rows = [self._parameters(call) for call in _first_of_each_key(calls).values()]
        if len(rows) == 1:
            return self._statement_for_one, rows[0]
        return self._statement_for_many, list(map(list, zip(*rows, strict=True)))

    def _parameters(self, call: NewCall) -> list[Any]:
        values = [call.row[name] for name in self._columns]
        values.append(lock_number(call.rollout.lock_name))
        if self._fenced:
            values += [call.stamp.opening_id, call.base_sha256]
        return values

    def _answers(self, calls: Sequence[NewCall], rows: Sequence[Any]) -> list[bool]:
        first = _first_of_each_key(calls)
        stored = {tuple(row) for row in rows}
        return [call.key in stored and call is first[call.key] for call in calls]

    @cached_property
    def _statement_for_one(self) -> str:
        return self._statement(from_parameters)

    @cached_property
    def _statement_for_many(self) -> str:
        return self._statement(from_arrays)

    def _statement(self, source: Callable[[Sequence[str], Sequence[str]], str]) -> str:
        names, types = list(self._columns), type_names(self._table)
        names.append("lock_number")
        types.append("bigint")
        if self._fenced:
            names += ["opening_id", "base_sha256"]
            types += ["text", "text"]
        key = ", ".join(_KEY)
        return (
            f"WITH {source(names, types)}, {self._locking} stored AS ("
            f" INSERT INTO {self._table.name} ({', '.join(self._columns)})"
            f" SELECT {', '.join(self._columns)} FROM asked"
            f" JOIN writable USING (run, rollout_id) WHERE {self._condition}"
            f" ORDER BY {key} ON CONFLICT DO NOTHING RETURNING {key}),"
            f" durable AS MATERIALIZED (SELECT {DURABLE_COMMIT}) SELECT stored.* FROM durable CROSS JOIN stored"
        )

    @property
    def _locking(self) -> str:
        # What another transaction holds exclusively is passed over: no call waits for another rollout's freeze.
        # Scalar subqueries, since without statistics a planner would turn EXISTS into a scan of the table.
        opening = ", opening_id" if self._fenced else ""
        return f"""
        rollouts AS MATERIALIZED (
            SELECT DISTINCT ON (run, rollout_id)
                run, rollout_id, lock_number{opening}, {self._written_at} AS at, written_by
            FROM asked ORDER BY run, rollout_id),
        turns AS MATERIALIZED (
            SELECT *, pg_try_advisory_xact_lock_shared(lock_number) AS taken FROM rollouts WHERE {_IMPATIENT}),
        locked AS MATERIALIZED (
            SELECT r.run, r.rollout_id, fence.state
            FROM turns r
            CROSS JOIN LATERAL (
                SELECT state FROM fences f
                WHERE r.taken AND f.run = r.run AND f.rollout_id = r.rollout_id
                FOR SHARE SKIP LOCKED) fence),
        {self._opening if self._fenced else _NOT_FROZEN}"""

    @property
    def _opening(self) -> str:
        return f"""opened AS (
            INSERT INTO fences (run, rollout_id, state, version, incomplete, opened_at)
            SELECT run, rollout_id, '{FenceState.OPEN}', 0, false, at FROM turns r
            WHERE taken AND (SELECT 1 FROM fences f WHERE f.run = r.run AND f.rollout_id = r.rollout_id) IS NULL
            ORDER BY run, rollout_id ON CONFLICT DO NOTHING RETURNING run, rollout_id),
        opening AS (
            INSERT INTO snapshot_versions
                (run, rollout_id, version, event, event_id, model_call_id, recorded_at, written_by)
            SELECT run, rollout_id, 0, '{VersionEvent.OPEN}', opening_id, '', at, written_by
            FROM opened JOIN rollouts USING (run, rollout_id)),
        writable AS (
            SELECT run, rollout_id FROM locked WHERE state = '{FenceState.OPEN}'
            UNION ALL SELECT run, rollout_id FROM opened),"""

    def _insert_rollout(self, connection: Connection, calls: list[NewCall]) -> set[Key]:
        """Insert calls of one rollout on PostgreSQL by plain statements, which a distributed one accepts too."""
        key = calls[0].rollout
        if not try_turn_txn(connection, key):
            return set()
        if not self._fenced:
            limit_waiting(connection)
            found = find_fence_txn(connection, key, exclusive=False)
            if found is not None and found.state is FenceState.FROZEN:
                return set()
        else:
            fence = lock_fence_txn(connection, key, calls[0].stamp, exclusive=False)
            if fence.state is not FenceState.OPEN:
                return set()
            calls = [call for call in calls if base_is_there_txn(connection, call)]
        if not calls:
            return set()
        keys = [self._table.c[name] for name in _KEY]
        stored = connection.execute(
            insert_if_absent(connection, self._table).returning(*keys), [call.row for call in calls]
        )
        return {_key_of(row) for row in stored}

    def _insert_on_sqlite(self, connection: Connection, calls: dict[Key, NewCall]) -> set[Key]:
        rows = [self._values(connection, call) for call in calls.values()]
        if self._fenced:
            # Fences that this connection has seen are most likely there still.
            seen: set[RolloutKey] = connection.info.setdefault("fences", set())
            if len(seen) > _MOST_SEEN:
                seen.clear()
            self._open_fences(connection, calls, rows, seen)
        if self._insert_values(connection, rows) == len(rows):
            return set(calls)
        if self._fenced:
            self._open_fences(connection, calls, rows, set())
            self._insert_values(connection, rows)
        return self._known_again(connection, rows)

    def _insert_values(self, connection: Connection, rows: list[list[Any]]) -> int:
        columns = (*self._columns, "base_sha256") if self._fenced else self._columns
        results = execute_in_pieces(connection, self._insert_on_condition, columns, rows)
        return sum(result.rowcount for result in results)

    @cached_property
    def _insert_on_condition(self) -> str:
        names = ", ".join(self._columns)
        condition = f"{_FENCE_IS_OPEN} AND {self._condition}" if self._fenced else _FENCE_IS_NOT_FROZEN
        # The driver counts the rows of statements that begin with INSERT.
        return (
            f"INSERT INTO {self._table.name} ({names}) WITH {{asked}} SELECT {names} FROM asked WHERE {condition}"
            " ON CONFLICT DO NOTHING"
        )

    def _open_fences(
        self, connection: Connection, calls: dict[Key, NewCall], rows: list[list[Any]], seen: set[RolloutKey]
    ) -> None:
        at = self._columns.index(self._written_at)
        opened = {
            call.rollout: (*call.key[:2], row[at], call.stamp.by, call.stamp.opening_id)
            for call, row in zip(calls.values(), rows, strict=True)
            if call.rollout not in seen
        }
        seen.update(opened)
        for statement in (_OPEN_FENCES, _OPEN_VERSIONS):
            for _ in execute_in_pieces(
                connection,
                statement,
                ("run", "rollout_id", "at", "written_by", "opening_id"),
                list(opened.values()),
            ):
                pass

    def _known_again(self, connection: Connection, rows: list[list[Any]]) -> set[Key]:
        indexes = [self._columns.index(name) for name in self._known_by]
        known = [[row[index] for index in indexes] for row in rows]
        results = execute_in_pieces(connection, self._select_known, self._known_by, known)
        return {(run, rollout_id, call) for result in results for run, rollout_id, call in result}

    @cached_property
    def _select_known(self) -> str:
        same = " AND ".join(f"stored.{name} = asked.{name}" for name in self._known_by)
        key = ", ".join(f"stored.{name}" for name in _KEY)
        return (
            f"WITH {{asked}} SELECT {key} FROM asked JOIN {self._table.name} AS stored ON {same}"
            f" WHERE {self._known_if}"
        )

    def _values(self, connection: Connection, call: NewCall) -> list[Any]:
        values = self._adapter.adapt(connection, [call.row[name] for name in self._columns])
        return [*values, call.base_sha256] if self._fenced else values


_BASE = select(entries.c.payload_sha256).where(of_call(entries), ~IS_CONFLICTING)


def base_is_there_txn(connection: Connection, call: NewCall) -> bool:
    """Return whether a call whose fence is locked can lean on its base, or needs none."""
    if call.base_sha256 is None:
        return True
    held = connection.scalar(_BASE, call.rollout.named(call.row["parent_call_id"]))
    return held == call.base_sha256


def _first_of_each_key(calls: Sequence[NewCall]) -> dict[Key, NewCall]:
    first: dict[Key, NewCall] = {}
    for call in calls:
        first.setdefault(call.key, call)
    return first


def _key_of(row: Row[Any]) -> Key:
    return row.run, row.rollout_id, row.model_call_id
