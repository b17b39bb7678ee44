"""What a database holds, asked through the drivers alone, and processes that act on one at the same time."""

from __future__ import annotations

import re
import sqlite3
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from tests.support import forked, postgres

_POSTGRESQL_CATALOGUE = """
SELECT 'column ' || table_name || '.' || column_name || ' ' || data_type || ' ' || is_nullable || ' '
       || coalesce(column_default, 'no default')
  FROM information_schema.columns JOIN information_schema.tables USING (table_schema, table_name)
 WHERE table_schema = 'public' AND table_type = 'BASE TABLE'
UNION ALL
SELECT 'constraint ' || conrelid::regclass || ' ' || conname || ' ' || pg_get_constraintdef(oid)
  FROM pg_constraint WHERE connamespace = 'public'::regnamespace
UNION ALL
SELECT 'index ' || indexdef FROM pg_indexes WHERE schemaname = 'public'
"""

_POSTGRESQL_ROUTINES = """
SELECT 'view ' || relname || ' ' || pg_get_viewdef(oid) || obj_description(oid)
  FROM pg_class WHERE relkind = 'v' AND relnamespace = 'public'::regnamespace
UNION ALL SELECT pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = 'public'::regnamespace
"""

_POSTGRESQL_OBJECTS = """
SELECT relname::text FROM pg_class WHERE relnamespace = 'public'::regnamespace
UNION ALL SELECT typname FROM pg_type WHERE typnamespace = 'public'::regnamespace
UNION ALL SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace
"""


def rows(url: str, statement: str) -> list[tuple[Any, ...]]:
    """Run one statement in autocommit and return its rows."""
    if not url.startswith("sqlite"):
        return [tuple(row) for row in postgres.fetch(url, statement)]
    with closing(sqlite3.connect(path_of(url), isolation_level=None)) as connection:
        return list(connection.execute(statement))


def run_script(url: str, script: str) -> None:
    """Run statements separated by semicolons."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(path_of(url), isolation_level=None)) as connection:
            connection.executescript(script)
    else:
        for statement in filter(str.strip, script.split(";")):
            postgres.fetch(url, statement)


def path_of(url: str) -> str:
    """Return the path of a SQLite URL."""
    return url.removeprefix("sqlite:///")


def catalogue(url: str) -> list[str]:
    """Return every column, constraint and index with its whole definition, in the database's own words."""
    if not url.startswith("sqlite"):
        lines = [line for (line,) in rows(url, _POSTGRESQL_CATALOGUE)]
        return sorted(line for line in lines if "alembic_version" not in line)
    found = rows(
        url,
        "SELECT sql FROM sqlite_master"
        " WHERE sql IS NOT NULL AND type <> 'view' AND tbl_name <> 'alembic_version'",
    )
    return sorted(line for (statement,) in found for line in _parts(re.sub(r"\s+", " ", statement)))


def _parts(creation: str) -> list[str]:
    """Return each column and constraint of a CREATE statement, whose order SQLite's ALTER TABLE decides."""
    head, _, body = creation.partition("(")
    parts, depth = [""], 0
    # What was added by ALTER TABLE has its constraint behind the column instead of in the list.
    for char in re.sub(r"(?<! ,)(?<!,) CONSTRAINT", ", CONSTRAINT", body.rpartition(")")[0]):
        depth += (char == "(") - (char == ")")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [f"{head.strip()}: {part.strip()}" for part in parts]


def routines(url: str) -> list[str]:
    """Return every view and function with its whole definition, in the database's own words."""
    statement = (
        "SELECT sql FROM sqlite_master WHERE type = 'view'"
        if url.startswith("sqlite")
        else _POSTGRESQL_ROUTINES
    )
    return sorted(line for (line,) in rows(url, statement))


def objects(url: str) -> list[str]:
    """Return the names of everything in the database's schema."""
    statement = "SELECT name FROM sqlite_master" if url.startswith("sqlite") else _POSTGRESQL_OBJECTS
    return sorted(name for (name,) in rows(url, statement))


class Workers:
    """Processes that are up and imported before they are told, all at once, what to act on."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    def tell(self, url: str) -> None:
        """Let every process begin to act on `url`."""
        for connection in self._connections:
            connection.send(url)

    def reports(self) -> list[str]:
        """Wait for every process and return what each reports."""
        return [connection.recv() for connection in self._connections]

    def act_on(self, url: str) -> list[str]:
        """Let every process act on `url` at the same time and return what each reports."""
        self.tell(url)
        return self.reports()


@contextmanager
def workers(count: int, action: Callable[[str], object]) -> Iterator[Workers]:
    """Start processes that call `action` with each URL that they are told and report what it returns."""
    connections, processes = [], []
    for _ in range(count):
        here, there = forked.CONTEXT.Pipe()
        process = forked.process(_act, there, action)
        process.start()
        there.close()
        connections.append(here)
        processes.append(process)
    try:
        assert [connection.recv() for connection in connections] == ["ready"] * count
        yield Workers(connections)
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.join()


def _act(told: Connection, action: Callable[[str], object]) -> None:
    warnings.simplefilter("error")
    told.send("ready")
    # The other end is closed when there is no more to do.
    with suppress(EOFError):
        while url := told.recv():
            try:
                report = action(url)
            except BaseException as exc:
                report = f"{type(exc).__name__}: {exc}"
            told.send(str(report))
