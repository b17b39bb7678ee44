"""Storing the rows of many calls at once, each if its fence is open and its key is new.

Every call is answered with whether it was stored. What stands in the way of the others (a closed fence, the same key, a
parent that is gone, an exclusive lock) is for `txn.settling` to find out, one by one.

PostgreSQL takes one statement, a transaction by itself. SQLite takes one with its conditions for all rows too, though
it has no round trips to save: a loop of plain statements in one transaction stores 0.94 (1 writer), 0.78 (16) and 0.90
(64) times as many calls of 2,500 tokens a second.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection

from tokencustody.database.dialects import DURABLE_COMMIT, LANE_PATIENCE, lock_number
from tokencustody.database.multirow import (
    ValueAdapter,
    execute_in_pieces,
    from_arrays,
    from_parameters,
    type_names,
)
from tokencustody.database.transactions import SharedWrite
from tokencustody.schema.tables import entries, staged_calls
from tokencustody.states import FailureKind, FenceState, VersionEvent
from tokencustody.txn.fence import RolloutKey
from tokencustody.txn.kinds import ENTRIES, INTENTS, STAGED_CALLS, Key, Kind, NewCall

if TYPE_CHECKING:
    from tokencustody.database.postgresql import Statement

_KEY = ("run", "rollout_id", "model_call_id")
_MOST_SEEN = 10_000
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
# PostgreSQL's statements, by whether the rows are fenced. Their comments are for people.
_STATEMENTS = {
    fenced: re.sub("--.*\n *", "", files(__package__).joinpath(name).read_text("utf-8"))
    for fenced, name in ((True, "insert_fenced.sql"), (False, "insert_unfenced.sql"))
}
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
    """Inserts the rows of one kind, as many calls as come together in one transaction: see `shared`."""

    def __init__(self, kind: Kind) -> None:
        table = kind.table
        self._table = table
        self._columns = tuple(column.name for column in table.columns)
        self._written_at = kind.written_at
        self._fenced = kind.is_fenced
        self._known_by = (
            *_KEY,
            *(("written_by", kind.written_at) if kind.is_fenced else ()),
            *kind.identity,
        )
        # Only complete records leave out what another call holds.
        self._condition = _BASE_IS_THERE if table is entries else "true"
        # A call that was staged with attachments is another one than that without.
        self._known_if = _HAS_NO_ATTACHMENTS if table is staged_calls else "true"
        self._adapter = ValueAdapter(table)
        self.shared: SharedWrite[NewCall, bool] = SharedWrite(
            self._on_sqlite, self._in_one_statement, self._answers
        )

    def _on_sqlite(self, connection: Connection, calls: Sequence[NewCall]) -> list[bool]:
        first = _first_of_each_key(calls)
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
        return _STATEMENTS[self._fenced].format(
            asked=source(names, types),
            table=self._table.name,
            columns=", ".join(self._columns),
            written_at=self._written_at,
            condition=self._condition,
            patience=f"{round(1000 * LANE_PATIENCE)}ms",
            durable_commit=DURABLE_COMMIT,
        )

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


# How the calls of each kind that come at the same time are inserted together.
TOGETHER = {kind: CallInsert(kind).shared for kind in (ENTRIES, INTENTS, STAGED_CALLS)}


def _first_of_each_key(calls: Sequence[NewCall]) -> dict[Key, NewCall]:
    first: dict[Key, NewCall] = {}
    for call in calls:
        first.setdefault(call.key, call)
    return first
