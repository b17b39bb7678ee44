"""What people write who take no store: JSON lines that are synced, and one table with JSON columns.

Both are durable when `put` returns, and no more: they check nothing, absorb no retry, know no parent, and their
`freeze` only reads the calls back; no fence keeps later ones out.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import JSON, Column, Integer, MetaData, String, Table, create_engine, event, insert, select
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from tokencustody import TokenEntry

TABLE = "plain_calls"
_JSON_COLUMNS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "fields")
_metadata = MetaData()
_calls = Table(
    TABLE,
    _metadata,
    Column("id", Integer, primary_key=True),
    Column("rollout_id", String(255), index=True, nullable=False),
    *(Column(name, JSON, nullable=False) for name in _JSON_COLUMNS),
)


@dataclass(frozen=True)
class Held:
    """The calls of a rollout, in the order of their puts."""

    entries: Sequence[TokenEntry]
    incomplete: bool = False


class JsonLines:
    """A file for each rollout, a line for each call, an fsync before each return."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    async def put(self, entry: TokenEntry) -> None:
        """Append a call to its rollout's file."""
        await asyncio.to_thread(self._append, entry)

    async def freeze(self, rollout_id: str) -> Held:
        """Read a rollout's file."""
        return await asyncio.to_thread(self._read, rollout_id)

    async def close(self) -> None:
        """Do nothing: no file is open."""

    def _append(self, entry: TokenEntry) -> None:
        line = json.dumps(dict(entry)).encode() + b"\n"
        with self._path(entry.rollout_id).open("ab", buffering=0) as file:
            file.write(line)
            os.fsync(file.fileno())

    def _read(self, rollout_id: str) -> Held:
        with self._path(rollout_id).open("rb") as file:
            return Held([TokenEntry.model_validate_json(line) for line in file])

    def _path(self, rollout_id: str) -> Path:
        return self._folder / f"{rollout_id}.jsonl"


class SqliteTable:
    """One table of a SQLite file by SQLAlchemy in threads, an INSERT in a transaction for each call."""

    def __init__(self, url: str) -> None:
        self._engine = create_engine(url, connect_args={"timeout": 30})
        event.listen(self._engine, "connect", _make_durable)

    async def create(self) -> None:
        """Create the table."""
        await asyncio.to_thread(_metadata.create_all, self._engine)

    async def put(self, entry: TokenEntry) -> None:
        """Insert a call."""
        await asyncio.to_thread(self._insert, entry)

    async def freeze(self, rollout_id: str) -> Held:
        """Select a rollout's calls."""
        return await asyncio.to_thread(self._select, rollout_id)

    async def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def _insert(self, entry: TokenEntry) -> None:
        with self._engine.begin() as connection:
            connection.execute(insert(_calls), _row(entry))

    def _select(self, rollout_id: str) -> Held:
        with self._engine.connect() as connection:
            return _held(connection.execute(_of_rollout(rollout_id)).all())


class PostgresqlTable:
    """One table of a PostgreSQL database by SQLAlchemy and asyncpg, an INSERT in a transaction for each call."""

    def __init__(self, url: str) -> None:
        self._engine = create_async_engine(make_url(url).set(drivername="postgresql+asyncpg"))

    async def create(self) -> None:
        """Create the table."""
        async with self._engine.begin() as connection:
            await connection.run_sync(_metadata.create_all)

    async def put(self, entry: TokenEntry) -> None:
        """Insert a call."""
        async with self._engine.begin() as connection:
            await connection.execute(insert(_calls), _row(entry))

    async def freeze(self, rollout_id: str) -> Held:
        """Select a rollout's calls."""
        async with self._engine.connect() as connection:
            return _held((await connection.execute(_of_rollout(rollout_id))).all())

    async def close(self) -> None:
        """Close the connections."""
        await self._engine.dispose()


def plain_table(url: str) -> SqliteTable | PostgresqlTable:
    """Return the plain table of a database, which `create` makes once."""
    return PostgresqlTable(url) if url.startswith("postgres") else SqliteTable(url)


async def create_plain_table(url: str) -> None:
    """Create the plain table of a database, and close it."""
    table = plain_table(url)
    await table.create()
    await table.close()


def _make_durable(connection: sqlite3.Connection, _record: object) -> None:
    # The log keeps readers and the writer apart, and FULL syncs it at each commit.
    for pragma in ("journal_mode = WAL", "synchronous = FULL"):
        connection.execute(f"PRAGMA {pragma}")


def _row(entry: TokenEntry) -> dict[str, Any]:
    fields = dict(entry)
    columns = {name: fields.pop(name) for name in (*_JSON_COLUMNS[:-1], "rollout_id")}
    return {**columns, "fields": fields}


def _of_rollout(rollout_id: str) -> Any:
    return select(_calls).where(_calls.c.rollout_id == rollout_id).order_by(_calls.c.id)


def _held(rows: Sequence[Any]) -> Held:
    entries = []
    for row in rows:
        columns = row._asdict()
        del columns["id"]
        entries.append(TokenEntry.model_validate({**columns.pop("fields"), **columns}))
    return Held(entries)
