"""Engines: one per database, process and event loop, shared by the stores that use it and closed with the last.

SQLite gets one writer connection, whose transactions begin IMMEDIATE, and a few readers that cannot write.
PostgreSQL gets one pool. Nothing is opened before the first transaction.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import asyncpg
from sqlalchemy import URL, event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from tokencustody.sql.url import DatabaseUrl

DEFAULT_POOL_SIZE = 4
DEFAULT_DEADLINE = 30.0
# PostgreSQL's isolation of the writes of calls. Row locks and keys hold the fence at any level.
WRITE_ISOLATION = "SERIALIZABLE"
# One snapshot is all that a reader needs, and its predicate locks would abort writers.
READ_ISOLATION = "REPEATABLE READ"


@dataclass
class Engines:
    """The engines of one database in one process and loop. On PostgreSQL writer and reader are the same."""

    writer: AsyncEngine
    reader: AsyncEngine
    users: int = 0
    checked: bool = False
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def dispose(self) -> None:
        """Close every pooled connection."""
        await self.writer.dispose()
        if self.reader is not self.writer:
            await self.reader.dispose()


@dataclass(frozen=True)
class EngineKey:
    """What stores must have in common to share engines."""

    url: DatabaseUrl
    pool_size: int
    deadline: float


# Keyed by loop first, because a connection belongs to the loop that opened it.
_shared: dict[asyncio.AbstractEventLoop, dict[EngineKey, Engines]] = {}
_owner = os.getpid()
# A child process must neither use nor close what it inherits: the sockets and file locks are the parent's.
_inherited: list[object] = []


def acquire(key: EngineKey) -> Engines:
    """Return the engines of this process and loop for `key`, made now if need be. Pair with `release`."""
    global _shared, _owner
    if _owner != os.getpid():
        _inherited.append(_shared)
        _shared, _owner = {}, os.getpid()
    for ended in [loop for loop in _shared if loop.is_closed()]:
        del _shared[ended]
    of_loop = _shared.setdefault(asyncio.get_running_loop(), {})
    engines = of_loop.get(key)
    if engines is None:
        engines = of_loop[key] = _make(key)
    engines.users += 1
    return engines


async def release(key: EngineKey, engines: Engines) -> None:
    """Give engines back in the loop that acquired them; the last user closes them."""
    engines.users -= 1
    if engines.users == 0:
        of_loop = _shared[asyncio.get_running_loop()]
        del of_loop[key]
        if not of_loop:
            del _shared[asyncio.get_running_loop()]
        await engines.dispose()


def open_engines() -> list[Engines]:
    """Return the engines of this process that are open now, in any loop that still runs."""
    return [
        engines for loop, of_loop in _shared.items() if not loop.is_closed() for engines in of_loop.values()
    ]


def migration_engine(url: DatabaseUrl) -> AsyncEngine:
    """Return an engine without a pool for the migrations of a PostgreSQL database."""
    # A migration may wait for another one, and may take its time with a large table.
    return _postgresql_engine(url, DEFAULT_DEADLINE, command_timeout=None, poolclass=NullPool)


def _make(key: EngineKey) -> Engines:
    url, deadline = key.url, key.deadline
    pool = {"max_overflow": 0, "pool_timeout": deadline}
    if url.is_sqlite:
        return Engines(
            writer=_sqlite_engine(url, deadline, begin="BEGIN IMMEDIATE", pool_size=1, **pool),
            reader=_sqlite_engine(url, deadline, begin="BEGIN", pool_size=key.pool_size, **pool),
        )
    engine = _postgresql_engine(url, deadline, command_timeout=deadline, pool_size=key.pool_size, **pool)
    return Engines(writer=engine, reader=engine)


def _sqlite_engine(url: DatabaseUrl, deadline: float, *, begin: str, **options: Any) -> AsyncEngine:
    engine = create_async_engine(
        URL.create("sqlite+aiosqlite", database=url.dsn),
        connect_args={"isolation_level": None, "timeout": deadline},
        **options,
    )
    writes = begin != "BEGIN"

    @event.listens_for(engine.sync_engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        try:
            cursor.execute("PRAGMA foreign_keys = ON")
            if writes:
                cursor.execute("PRAGMA journal_mode = WAL")
                # FULL syncs the log at every commit: what was acknowledged survives a power cut.
                cursor.execute("PRAGMA synchronous = FULL")
            else:
                cursor.execute("PRAGMA query_only = ON")
            cursor.close()
        except BaseException:
            # The pool forgets a connection that fails here, and its thread would stay.
            connection.close()
            raise

    # The driver's own BEGIN is deferred, so a write transaction could fail after its first read.
    @event.listens_for(engine.sync_engine, "begin")
    def begin_transaction(connection: Any) -> None:
        connection.exec_driver_sql(begin)

    return engine


def _postgresql_engine(
    url: DatabaseUrl, deadline: float, *, command_timeout: float | None, **options: Any
) -> AsyncEngine:
    cache = {} if url.statement_cache_size is None else {"statement_cache_size": url.statement_cache_size}
    prepared = (
        {}
        if url.statement_cache_size is None
        else {"prepared_statement_cache_size": url.statement_cache_size}
    )

    connect: Callable[..., Any] = asyncpg.connect

    async def connect_to_dsn() -> Any:
        return await connect(
            url.dsn,
            timeout=min(deadline, url.connect_timeout or deadline),
            command_timeout=command_timeout,
            server_settings={"application_name": "tokencustody"}
            if "application_name=" not in url.dsn
            else None,
            **cache,
        )

    return create_async_engine(
        "postgresql+asyncpg://", connect_args={"async_creator_fn": connect_to_dsn, **prepared}, **options
    )
