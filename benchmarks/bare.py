"""The floor: the drivers alone, writing the rows that our store wrote, with its durability and rows per commit.

The rows are read back from our database, so they are the same in every column and byte. The driver inserts them into a
database with the same tables, constraints and indexes, in which their fences already stand; it checks nothing, answers
nobody and retries nothing.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import asyncpg
from sqlalchemy import Table
from sqlalchemy.dialects import postgresql

from benchmarks.results import shares
from benchmarks.stores import POSTGRESQL, RUN, WARM_UP, sqlite_path
from benchmarks.timing import Stopwatch, settle
from tokencustody.database.engine import DEFAULT_POOL_SIZE
from tokencustody.schema.tables import entries, fences


@dataclass(frozen=True)
class Rows:
    """The fences and entries of one run, as the driver gives and takes them."""

    fences: Sequence[Sequence[Any]]
    entries: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Batches:
    """How our store grouped its calls."""

    commits: int
    connections: int

    @classmethod
    def like(cls, calls: int, commits: int, writers: int) -> Batches:
        """Return as many commits, on as many connections as `writers` that wait for them can fill."""
        at_once = round(writers * commits / calls)
        return cls(commits, min(max(at_once, 1), DEFAULT_POOL_SIZE))


async def write_like_ours(store: str, ours: str, bare: str, batches: Batches) -> Stopwatch:
    """Write the rows of RUN in our database at `ours` into the one at `bare`, and return what that took."""
    if store == POSTGRESQL:
        return await _with_asyncpg(await _postgresql_rows(ours), bare, batches)
    return _with_sqlite3(_sqlite_rows(ours), bare, batches)


def _sqlite_rows(url: str) -> Rows:
    with closing(sqlite3.connect(sqlite_path(url))) as connection:
        return Rows(
            *(connection.execute(_select(table, "?"), (RUN,)).fetchall() for table in (fences, entries))
        )


def _with_sqlite3(rows: Rows, url: str, batches: Batches) -> Stopwatch:
    with closing(sqlite3.connect(sqlite_path(url), isolation_level=None)) as connection:
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}")
        connection.executemany(_insert(fences, "?"), rows.fences)
        statement = _insert(entries, "?")
        pieces = [rows.entries[piece] for piece in shares(len(rows.entries), batches.commits)]
        settle()
        with Stopwatch() as watch:
            for piece in pieces:
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany(statement, piece)
                connection.execute("COMMIT")
        return watch


async def _postgresql_rows(url: str) -> Rows:
    connection = await asyncpg.connect(url)
    try:
        return Rows(
            *[
                [tuple(row) for row in await connection.fetch(_select(table, "$1"), RUN)]
                for table in (fences, entries)
            ]
        )
    finally:
        await connection.close()


async def _with_asyncpg(rows: Rows, url: str, batches: Batches) -> Stopwatch:
    pieces = [rows.entries[piece] for piece in shares(len(rows.entries), batches.commits)]
    # Of the ways that asyncpg offers, the fastest: a plain INSERT for one row, arrays of columns for several.
    one, several = _insert(entries, "$"), _insert_arrays(entries)
    statements = iter(
        [
            (one, piece[0])
            if len(piece) == 1
            else (several, [list(column) for column in zip(*piece, strict=True)])
            for piece in pieces
        ]
    )

    async def write(connection: Any) -> None:
        for statement, arguments in statements:
            # One transaction in one round trip.
            await connection.execute(statement, *arguments)

    async with asyncpg.create_pool(url, min_size=batches.connections, max_size=batches.connections) as pool:
        await pool.executemany(_insert(fences, "$"), rows.fences)
        connections = [await pool.acquire() for _ in range(batches.connections)]
        try:
            for connection in connections:
                await connection.execute("SET synchronous_commit = on")
                for statement in (one, several):
                    await connection.prepare(statement)
            settle()
            with Stopwatch() as watch:
                await asyncio.gather(*map(write, connections))
        finally:
            # Else the pool waits for them, and says nothing of what failed.
            for connection in connections:
                await pool.release(connection)
    return watch


def _select(table: Table, parameter: str) -> str:
    order = " ORDER BY committed_at" if table is entries else ""
    measured = f"run = {parameter} AND rollout_id NOT LIKE '{WARM_UP}%'"
    return f"SELECT {', '.join(table.c.keys())} FROM {table.name} WHERE {measured}{order}"


def _insert(table: Table, style: str) -> str:
    names = table.c.keys()
    places = [style if style == "?" else f"{style}{number}" for number in range(1, len(names) + 1)]
    return f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({', '.join(places)})"


def _insert_arrays(table: Table) -> str:
    types = [column.type.compile(dialect=postgresql.dialect()) for column in table.c]  # type: ignore[no-untyped-call]
    arrays = ", ".join(f"${number}::{type_}[]" for number, type_ in enumerate(types, 1))
    return f"INSERT INTO {table.name} ({', '.join(table.c.keys())}) SELECT * FROM unnest({arrays})"
