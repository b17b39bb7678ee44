"""What a database holds, asked through the drivers alone, and processes that act on one at the same time."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from tests.support import postgres

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

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def tell(self, url: str) -> None:
        """Let every process begin to act on `url`."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{url}\n")
            process.stdin.flush()

    def reports(self) -> list[str]:
        """Wait for every process and return what each reports."""
        return [process.stdout.readline().strip() for process in self._processes if process.stdout]

    def act_on(self, url: str) -> list[str]:
        """Let every process act on `url` at the same time and return what each reports."""
        self.tell(url)
        return self.reports()


@contextmanager
def workers(count: int, setup: str, action: str) -> Iterator[Workers]:
    """Start processes that run `setup` once, then evaluate `action` for each `url` and report its value."""
    program = (
        f"import sys\n{setup}\nprint('ready', flush=True)\n"
        "for line in sys.stdin:\n"
        "    url = line.strip()\n"
        "    try:\n"
        f"        report = {action}\n"
        "    except BaseException as exc:\n"
        "        report = f'{type(exc).__name__}: {exc}'\n"
        "    print(str(report).replace('\\n', ' '), flush=True)\n"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    try:
        assert [process.stdout.readline() for process in started if process.stdout] == ["ready\n"] * count
        yield Workers(started)
    finally:
        for process in started:
            # Closes both pipes; the loop over stdin ends, and with it the process.
            process.communicate()
