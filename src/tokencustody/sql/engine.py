"""Engines: one per database, process and event loop, shared by the stores that use it and closed with the last.

SQLite gets one writer connection, whose transactions begin IMMEDIATE, and a few readers that cannot write.
PostgreSQL gets one pool. Nothing is opened before the first transaction.
"""

from __future__ import annotations

import asyncio
import os
import weakref
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


# Keyed by loop first, so that engines are forgotten with the loop that their connections belong to.
_shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[EngineKey, Engines]] = weakref.WeakKeyDictionary()
_shared_pid = os.getpid()


def acquire(key: EngineKey) -> Engines:
    """Return the engines of this process and loop for `key`, made now if need be. Pair with `release`."""
    global _shared, _shared_pid
    if _shared_pid != os.getpid():
        # Forked: the parent's sockets and file handles are the parent's to use and to close.
        _shared, _shared_pid = weakref.WeakKeyDictionary(), os.getpid()
    of_loop = _shared.setdefault(asyncio.get_running_loop(), {})
    engines = of_loop.get(key)
    if engines is None:
        engines = of_loop[key] = _make(key)
    engines.users += 1
    return engines


async def release(key: EngineKey, engines: Engines) -> None:
    """Give engines back; the last user closes them."""
    engines.users -= 1
    if engines.users == 0:
        of_loop = _shared.get(asyncio.get_running_loop(), {})
        if of_loop.get(key) is engines:
            del of_loop[key]
        await engines.dispose()


def open_engines() -> list[Engines]:
    """Return every engine pair of this process that is open now, in any loop."""
    return [engines for of_loop in _shared.values() for engines in of_loop.values()]


def migration_engine(url: DatabaseUrl) -> AsyncEngine:
    """Return an engine without a pool whose every transaction may write, for migrations."""
    if url.is_sqlite:
        return _sqlite_engine(url, DEFAULT_DEADLINE, begin="BEGIN IMMEDIATE", poolclass=NullPool)
    return _postgresql_engine(url, DEFAULT_DEADLINE, poolclass=NullPool)


def _make(key: EngineKey) -> Engines:
    url, deadline = key.url, key.deadline
    pool = {"max_overflow": 0, "pool_timeout": deadline}
    if url.is_sqlite:
        return Engines(
            writer=_sqlite_engine(url, deadline, begin="BEGIN IMMEDIATE", pool_size=1, **pool),
            reader=_sqlite_engine(url, deadline, begin="BEGIN", pool_size=key.pool_size, **pool),
        )
    engine = _postgresql_engine(url, deadline, isolation_level="SERIALIZABLE", pool_size=key.pool_size, **pool)
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
        cursor.execute("PRAGMA foreign_keys = ON")
        if writes:
            cursor.execute("PRAGMA journal_mode = WAL")
            # FULL syncs the log at every commit: what was acknowledged survives a power cut.
            cursor.execute("PRAGMA synchronous = FULL")
        else:
            cursor.execute("PRAGMA query_only = ON")
        cursor.close()

    # The driver's own BEGIN is deferred, so a write transaction could fail after its first read.
    @event.listens_for(engine.sync_engine, "begin")
    def begin_transaction(connection: Any) -> None:
        connection.exec_driver_sql(begin)

    return engine


def _postgresql_engine(url: DatabaseUrl, deadline: float, **options: Any) -> AsyncEngine:
    cache = {} if url.statement_cache_size is None else {"statement_cache_size": url.statement_cache_size}
    prepared = {} if url.statement_cache_size is None else {"prepared_statement_cache_size": url.statement_cache_size}

    connect: Callable[..., Any] = asyncpg.connect

    async def connect_to_dsn() -> Any:
        return await connect(
            url.dsn,
            timeout=min(deadline, url.connect_timeout or deadline),
            command_timeout=deadline,
            server_settings={"application_name": "tokencustody"} if "application_name=" not in url.dsn else None,
            **cache,
        )

    return create_async_engine(
        "postgresql+asyncpg://", connect_args={"async_creator_fn": connect_to_dsn, **prepared}, **options
    )
