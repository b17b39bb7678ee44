"""How the databases would reach the rows of the statements that a store executes: captured, explained, judged."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
from sqlalchemy import Connection, Engine, event

from tests.support.filling import TABLES
from tokencustody.database import multirow
from tokencustody.database.postgresql import PostgresqlEngines
from tokencustody.database.url import parse_url
from tokencustody.schema.tables import metadata

_LEADING = ("run", "rollout_id")
_INDEXES = {
    str(named.name): table.name
    for table in metadata.tables.values()
    for named in (*table.constraints, *table.indexes)
}
_NAMES = "|".join(TABLES)
# What PostgreSQL adds to the cost of a plan that it makes anew for each relation: 1000 times cpu_operator_cost.
_PLANNING_COST = 2.5


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement as its driver got it, with the name of the call that executed it."""

    call: str
    text: str
    parameters: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Access:
    """How a plan reaches the rows of a table: without an index it reads all of them.

    `left_over` is what is compared in each row that was read instead of in the index, and `repeated` what is compared
    in all of them once more for each row of another table; SQLite's plans do not tell either.
    """

    table: str
    index: str = ""
    condition: str = ""
    left_over: str = ""
    repeated: str = ""

    def is_keyed(self) -> bool:
        """Return whether an index of ours gives the rows of single rollouts alone."""
        return self.index in _INDEXES and all(
            re.search(rf"\b{column} ?= ?", self.condition) for column in _LEADING
        )


class Recorder:
    """Statements that any engine of this process executes, by the call that was named before."""

    def __init__(self) -> None:
        self.call = ""
        self.statements: dict[tuple[str, str], Statement] = {}

    def record(
        self, _connection: Any, _cursor: Any, text: str, parameters: Any, _context: Any, executemany: bool
    ) -> None:
        """Take a statement from SQLAlchemy's event. Of those with the same text, the last is kept."""
        if re.match(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\b", text):
            # A statement for many rows has the values of all, one after the other.
            first = parameters[0] if executemany and isinstance(parameters, list) else parameters
            self.statements[self.call, text] = Statement(self.call, text, tuple(first))


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Record the statements of every engine while this lasts."""
    recorder = Recorder()
    write_statement = PostgresqlEngines.write_statement

    async def recording(engines: PostgresqlEngines, make: Callable[[None], tuple[str, Any]]) -> Any:
        def noting(nothing: None) -> tuple[str, Any]:
            text, parameters = make(nothing)
            recorder.record(None, None, text, parameters, None, False)
            return text, parameters

        return await write_statement(engines, noting)

    execute = multirow._execute

    def noted(connection: Connection, text: str, values: tuple[Any, ...]) -> sqlite3.Cursor:
        recorder.record(None, None, text, values, None, False)
        return execute(connection, text, values)

    event.listen(Engine, "before_cursor_execute", recorder.record)
    PostgresqlEngines.write_statement = recording  # type: ignore[method-assign]
    multirow._execute = noted
    try:
        yield recorder
    finally:
        PostgresqlEngines.write_statement = write_statement  # type: ignore[method-assign]
        multirow._execute = execute
        event.remove(Engine, "before_cursor_execute", recorder.record)


class SqlitePlans:
    """Plans of a SQLite database."""

    def __init__(self, url: str) -> None:
        self._connection = sqlite3.connect(parse_url(url).dsn)
        listed = self._connection.execute("SELECT name, tbl_name FROM sqlite_master WHERE type = 'index'")
        self._indexes = dict(listed.fetchall())

    async def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    async def explain(self, statement: Statement) -> list[Access]:
        """Return every access to a table of rollouts."""
        with closing(
            self._connection.execute(f"EXPLAIN QUERY PLAN {statement.text}", statement.parameters)
        ) as plan:
            steps = [detail for *_, detail in plan]
        return [access for step in steps if (access := self._access(step, statement.text)) is not None]

    def _access(self, step: str, text: str) -> Access | None:
        found = re.match(
            r"(SCAN|SEARCH) (?:TABLE )?(\S+)(?: USING (?:COVERING )?INDEX (\S+)(?: \((.*)\))?)?", step
        )
        if found is None:
            return None
        _, name, index, condition = found.groups()
        table = self._indexes.get(index) or _table_behind(name, text)
        if table not in TABLES:
            return None
        return Access(table, _declared_name(table, index), condition or "")


class PostgresqlPlans:
    """Plans of a PostgreSQL database."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    @classmethod
    async def connect(cls, url: str) -> PostgresqlPlans:
        """Return the plans of a database."""
        return cls(await asyncpg.connect(url))

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    async def explain(self, statement: Statement) -> list[Access]:
        """Return every access to a table of rollouts, of the plan for these parameters and of the generic one, if a
        pooled connection would come to use that: after five executions, when it costs no more."""
        own = await self._plan(statement.text, *statement.parameters)
        await self._connection.execute(f"PREPARE hot AS {statement.text}")
        arguments = ", ".join(["NULL"] * len(statement.parameters))
        try:
            async with self._connection.transaction():
                await self._connection.execute("SET LOCAL plan_cache_mode = force_generic_plan")
                generic = await self._plan(f"EXECUTE hot{f'({arguments})' if arguments else ''}")
        finally:
            await self._connection.execute("DEALLOCATE hot")
        own_accesses, generic_accesses = list(_walk(own)), list(_walk(generic))
        planning = _PLANNING_COST * (1 + len(own_accesses))
        if generic["Total Cost"] > own["Total Cost"] + planning:
            return own_accesses
        return own_accesses + generic_accesses

    async def _plan(self, text: str, *parameters: Any) -> dict[str, Any]:
        plan = await self._connection.fetchval(f"EXPLAIN (FORMAT JSON) {text}", *parameters)
        top: dict[str, Any] = json.loads(plan)[0]["Plan"]
        return top


async def of(url: str) -> SqlitePlans | PostgresqlPlans:
    """Return the plans of a database; close them."""
    return SqlitePlans(url) if url.startswith("sqlite") else await PostgresqlPlans.connect(url)


def _walk(node: dict[str, Any], repeated: str = "") -> Iterator[Access]:
    kind, table, index = node["Node Type"], node.get("Relation Name"), node.get("Index Name", "")
    if kind == "Bitmap Index Scan":
        table = _INDEXES.get(index, "an unknown table")
    # A heap scan gets its rows from the index scans below it; what changes a table gets them from its source.
    if kind not in ("Bitmap Heap Scan", "ModifyTable") and table in (*TABLES, "an unknown table"):
        yield Access(table, index, node.get("Index Cond", ""), node.get("Filter", ""), repeated)
    for below in node.get("Plans", ()):
        is_inner = kind == "Nested Loop" and below.get("Parent Relationship") == "Inner"
        yield from _walk(below, node.get("Join Filter", "") if is_inner else repeated)


def _table_behind(name: str, text: str) -> str:
    """Return the table that a statement calls `name`, or the name itself."""
    found = re.search(rf'\b({_NAMES})"?\s+(?:AS\s+)?"?{re.escape(name)}\b', text, re.IGNORECASE)
    return found[1] if found else name


def _declared_name(table: str, index: str | None) -> str:
    """Return our name of an index: SQLite numbers those of a table's keys, the primary key first."""
    number = re.fullmatch(r"sqlite_autoindex_\w+_(\d+)", index or "")
    if number is None:
        return index or ""
    keys = [f"pk_{table}", *(name for name in _INDEXES if name.startswith(f"uq_{table}_"))]
    return keys[int(number[1]) - 1]
