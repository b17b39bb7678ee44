"""Running a person's own SQL on either database, so that nothing it says can write."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Protocol

import asyncpg
from sqlalchemy.util import await_only, greenlet_spawn

from tokencustody.database.connecting import connect
from tokencustody.database.engine import DEFAULT_DEADLINE
from tokencustody.database.faults import classify, unavailable
from tokencustody.database.url import DatabaseUrl
from tokencustody.schema import migrate
from tokencustody.sql_prompt import functions, splitting
from tokencustody.waits import waiting

Rows = Iterator[Sequence[Any]]
# Takes the names of the columns and the rows, which are read from the database as they are taken.
Consume = Callable[[Sequence[str], Rows], None]

# How many rows of a PostgreSQL query are read at a time.
_FETCHED = 500
# Steps of SQLite's machine after which Python may see a signal.
_STEPS = 10_000
# What PostgreSQL is asked. A read-only transaction alone would let COPY write files on the server.
_QUESTIONS = ("SELECT", "WITH", "VALUES", "TABLE", "EXPLAIN", "SHOW")


_SQLITE_NAMES = """
SELECT name FROM sqlite_master WHERE type IN ('table', 'view') UNION SELECT name FROM sqlite_temp_master
UNION SELECT c.name FROM sqlite_master AS m JOIN pragma_table_info(m.name) AS c WHERE m.type IN ('table', 'view')
UNION SELECT name FROM pragma_function_list WHERE name GLOB '[a-z]*'"""
_POSTGRESQL_NAMES = """
SELECT c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = current_schema() AND c.relkind IN ('r', 'p', 'v')
UNION SELECT a.attname FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = current_schema() AND c.relkind IN ('r', 'p', 'v') AND a.attnum > 0 AND NOT a.attisdropped
UNION SELECT p.proname FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
WHERE n.nspname = current_schema() AND p.prokind <> 'p'"""
# What a person may be allowed that reaches beyond the transaction, and the question which of it is.
_TOO_MUCH = (
    "is a superuser",
    "may write files on the server",
    "may read files on the server",
    "may run programs on the server",
    "may end sessions of others",
    "may call functions that run with the rights of others or connect elsewhere",
)
_MAY_DO = """
SELECT u.rolsuper, pg_has_role('pg_write_server_files', 'USAGE'), pg_has_role('pg_read_server_files', 'USAGE'),
    pg_has_role('pg_execute_server_program', 'USAGE'), pg_has_role('pg_signal_backend', 'USAGE'),
    EXISTS (SELECT 1 FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
        WHERE (p.prosecdef OR p.proname LIKE 'dblink%') AND n.nspname NOT IN ('pg_catalog', 'information_schema')
            AND has_schema_privilege(n.oid, 'USAGE') AND has_function_privilege(p.oid, 'EXECUTE'))
FROM pg_roles AS u WHERE u.rolname = current_user"""


class QueryError(ValueError):
    """A statement is wrong or would not only read. The message is the database's own, or says so."""


class Queries(Protocol):
    """A database that is asked one statement at a time."""

    # Lists the tables and views, and the columns of the one that is put in as {}.
    listing: str
    describing: str

    def statements(self, text: str) -> tuple[list[str], str]:
        """Return the statements of `text` that end in a semicolon, and what follows the last of them."""

    def run(self, statement: str, consume: Consume) -> None:
        """Run one statement and give what it returns to `consume`, which is not called for nothing.

        Raises QueryError, KeyboardInterrupt when SIGINT cancelled it, and StoreUnavailableError.
        """

    def names(self) -> set[str]:
        """Return the names of tables, views, columns and functions, as far as they can be read."""

    def warning(self) -> str | None:
        """Return why a statement could do more than read after all, if the database lets this user do too much."""

    def close(self) -> None:
        """Let go of the database."""


def open_queries(url: DatabaseUrl) -> Queries:
    """Return a database to be asked. Raises SchemaMismatchError unless this library works with it."""
    migrate.require_current(url)
    return SqliteQueries(url) if url.is_sqlite else PostgresqlQueries(url)


class SqliteQueries:
    """Queries of a SQLite file, with the functions of `sql_prompt.functions`."""

    listing = "SELECT name, type FROM sqlite_master WHERE type IN ('table', 'view') ORDER BY type DESC, name"
    describing = "SELECT name AS column_name, type FROM pragma_table_info({}) ORDER BY cid"

    def __init__(self, url: DatabaseUrl) -> None:
        self._connection, self._functions = functions.connect(url)

    def statements(self, text: str) -> tuple[list[str], str]:
        """Return the statements of `text`, as `Queries` says."""
        found, start = [], 0
        for place, char in enumerate(text):
            if char == ";" and sqlite3.complete_statement(text[start : place + 1]):
                found.append(text[start : place + 1].strip())
                start = place + 1
        return found, text[start:].strip()

    def run(self, statement: str, consume: Consume) -> None:
        """Run one statement, as `Queries` says."""
        with _interrupting() as interrupts:
            self._functions.error = None
            # Python runs its handlers of signals only between its own steps. And what is interrupted before it runs
            # would run all the same.
            self._connection.set_progress_handler(lambda: bool(interrupts), _STEPS)
            try:
                cursor = self._connection.execute(statement)
                if cursor.description is not None:
                    consume([name for name, *_ in cursor.description], cursor)
            except (sqlite3.Error, sqlite3.Warning) as exc:
                if interrupts:
                    raise KeyboardInterrupt from None
                if self._functions.error is not None:
                    raise QueryError(str(self._functions.error)) from None
                refused = "authorized" in str(exc) or "readonly" in str(exc)
                raise QueryError(f"{exc}{': only reading is allowed here' if refused else ''}") from None
        if interrupts:  # between the last row and here
            raise KeyboardInterrupt

    def names(self) -> set[str]:
        """Return the names of what there is, as `Queries` says."""
        with suppress(sqlite3.Error):
            return {name for (name,) in self._connection.execute(_SQLITE_NAMES)}
        return set()

    def warning(self) -> str | None:
        """Return None: what is denied here, SQLite denies to everybody."""
        return None

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


@contextmanager
def _interrupting() -> Iterator[list[int]]:
    """Let SIGINT raise nothing; yields the signals that came."""
    came: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


class PostgresqlQueries:
    """Queries of a PostgreSQL database, each in a read-only transaction that ends with a connection of its own.

    No setting outlives a statement, and the protocol takes one at a time, so none can end the transaction and write.
    """

    listing = (
        "SELECT c.relname AS name, CASE c.relkind WHEN 'v' THEN 'view' ELSE 'table' END AS type"
        " FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace"
        " WHERE n.nspname = current_schema() AND c.relkind IN ('r', 'p', 'v') ORDER BY 2 DESC, 1"
    )
    describing = (
        "SELECT attname AS column_name, format_type(atttypid, atttypmod) AS type FROM pg_attribute"
        " WHERE attrelid = to_regclass({}) AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
    )

    def __init__(self, url: DatabaseUrl) -> None:
        self._url = url

    def statements(self, text: str) -> tuple[list[str], str]:
        """Return the statements of `text`, as `Queries` says."""
        return splitting.split(text)

    def run(self, statement: str, consume: Consume) -> None:
        """Run one statement, as `Queries` says."""
        if splitting.first_word(statement) not in _QUESTIONS:
            raise QueryError(f"only reading is allowed here: a statement begins with {', '.join(_QUESTIONS)}")
        asyncio.run(self._run(statement, consume))

    async def _run(self, statement: str, consume: Consume) -> None:
        try:
            with waiting(self._url, DEFAULT_DEADLINE):
                connection = await connect(self._url, DEFAULT_DEADLINE)
        except Exception as exc:
            if classify(exc) is not None:
                raise unavailable(self._url, exc) from exc
            raise
        try:
            # Never committed: a read-only transaction lets large objects be made.
            await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            prepared = await connection.prepare(statement)
            columns = [attribute.name for attribute in prepared.get_attributes()]
            cursor = await prepared.cursor()
            if columns:
                await greenlet_spawn(consume, columns, _fetched(cursor))
            else:
                await cursor.fetch(1)
        except asyncpg.PostgresError as exc:
            raise QueryError(str(exc).splitlines()[0]) from None
        finally:
            # After a Ctrl-C this waits until the server has been told to stop.
            await connection.close(timeout=DEFAULT_DEADLINE)

    def names(self) -> set[str]:
        """Return the names of what there is, as `Queries` says."""
        return {name for (name,) in self._answer(_POSTGRESQL_NAMES)}

    def warning(self) -> str | None:
        """Return what this user may do that a read-only transaction does not hold."""
        allowed = [what for what, may in zip(_TOO_MUCH, *self._answer(_MAY_DO), strict=True) if may]
        if not allowed:
            return None
        return (
            f"this user {', '.join(allowed)}, so a function that is called here may do more than read; ask as an "
            "auditor: `tokencustody db grant --role auditor USER`"
        )

    def _answer(self, question: str) -> list[Sequence[Any]]:
        answer: list[Sequence[Any]] = []
        self.run(question, lambda _, rows: answer.extend(rows))
        return answer

    def close(self) -> None:
        """Nothing is kept open."""


def _fetched(cursor: Any) -> Rows:
    while rows := await_only(cursor.fetch(_FETCHED)):
        yield from rows
