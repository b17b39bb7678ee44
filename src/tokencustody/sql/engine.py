"""Engines: one per database, process and event loop, shared by the stores that use it and closed with the last.

SQLite gets one writer connection, whose transactions begin IMMEDIATE, and a few readers that cannot write.
PostgreSQL gets one pool. Nothing is opened before the first transaction.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncpg
from sqlalchemy import URL, event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from tokencustody.errors import DurabilityError
from tokencustody.sql.url import DatabaseUrl

DEFAULT_POOL_SIZE = 4
DEFAULT_DEADLINE = 30.0
# Longer waits are retried, so that a cancelled write leaves within this many seconds.
_LONGEST_BUSY_WAIT = 1.0
# PostgreSQL's isolation of the writes of calls. Row locks and keys hold the fence at any level.
WRITE_ISOLATION = "SERIALIZABLE"
# One snapshot is all that a reader needs, and its predicate locks would abort writers.
READ_ISOLATION = "REPEATABLE READ"


@dataclass
class Engines:
    """The engines of one database in one process and loop. On PostgreSQL writer and reader are the same.

    `running` counts transactions; the last user waits for them before it closes the connections they use.
    """

    writer: AsyncEngine
    reader: AsyncEngine
    users: int = 0
    running: int = 0
    checked: bool = False
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Count a transaction while it runs."""
        self.running += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()

    async def dispose(self) -> None:
        """Let the transactions that are running finish, then close every connection."""
        while self.running:
            await self.idle.wait()
        await self.writer.dispose()
        if self.reader is not self.writer:
            await self.reader.dispose()


@dataclass(frozen=True)
class EngineKey:
    """What stores must have in common to share engines."""

    url: DatabaseUrl
    pool_size: int
    deadline: float


class _Registry:
    """The engines of this process, by loop, because a connection belongs to the loop that opened it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.of_loop: dict[asyncio.AbstractEventLoop, dict[EngineKey, Engines]] = {}


_registry = _Registry()
# A child process must neither use nor close what it inherits: the sockets and file locks are the parent's.
_inherited: list[object] = []


def _start_anew() -> None:
    global _registry
    _inherited.append(_registry)
    _registry = _Registry()


os.register_at_fork(after_in_child=_start_anew)


def acquire(key: EngineKey) -> Engines:
    """Return the engines of this process and loop for `key`, made now if need be. Pair with `release`."""
    loop = asyncio.get_running_loop()
    with _registry.lock:
        ended = [each for each in _registry.of_loop if each.is_closed()]
        for each in ended:
            del _registry.of_loop[each]
        of_loop = _registry.of_loop.setdefault(loop, {})
        if key not in of_loop:
            of_loop[key] = _make(key)
        engines = of_loop[key]
        engines.users += 1
    if ended:
        # Their connections cannot be closed without their loop. Waiting for chance to collect them can exhaust a
        # server's connections.
        gc.collect()
    return engines


async def release(key: EngineKey, engines: Engines) -> None:
    """Give engines back in the loop that acquired them; the last user closes them."""
    loop = asyncio.get_running_loop()
    with _registry.lock:
        engines.users -= 1
        if engines.users:
            return
        of_loop = _registry.of_loop[loop]
        del of_loop[key]
        if not of_loop:
            del _registry.of_loop[loop]
    await engines.dispose()


def open_engines() -> list[Engines]:
    """Return the engines of this process that are open now, in any loop that has not ended."""
    with _registry.lock:
        return [
            engines
            for loop, of_loop in _registry.of_loop.items()
            if not loop.is_closed()
            for engines in of_loop.values()
        ]


def migration_engine(url: DatabaseUrl) -> AsyncEngine:
    """Return an engine without a pool for the migrations of a PostgreSQL database."""
    # A migration may wait for another one, and may take its time with a large table.
    return _postgresql_engine(url, DEFAULT_DEADLINE, command_timeout=None, poolclass=NullPool)


class _RollingBack(sqlite3.Connection):
    """Ends its transaction when it is closed.

    SQLite keeps a closed connection, and the lock of its transaction, for as long as a cursor is unread. A write that
    is cancelled in the middle would lock every other writer out.
    """

    def close(self) -> None:
        if self.in_transaction:
            self.rollback()
        super().close()


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
        connect_args={
            "isolation_level": None,
            "timeout": min(deadline, _LONGEST_BUSY_WAIT),
            "factory": _RollingBack,
        },
        hide_parameters=True,
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
                mode = cursor.fetchone()[0]
                if mode != "wal":
                    raise DurabilityError(
                        f"{url.display} cannot use a write-ahead log (its journal mode is {mode}): custody needs a "
                        "local file system"
                    )
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
        connection = await connect(
            url.dsn,
            timeout=min(deadline, url.connect_timeout or deadline),
            command_timeout=command_timeout,
            server_settings={"application_name": "tokencustody"}
            if "application_name=" not in url.dsn
            else None,
            **cache,
        )
        try:
            await _check_durability(connection, url)
        except BaseException:
            connection.terminate()
            raise
        return connection

    return create_async_engine(
        "postgresql+asyncpg://",
        connect_args={"async_creator_fn": connect_to_dsn, **prepared},
        hide_parameters=True,
        **options,
    )


async def _check_durability(connection: Any, url: DatabaseUrl) -> None:
    # For each connection, because a role or database may have been altered since the last.
    settings = await connection.fetch(
        "SELECT name, setting FROM pg_settings WHERE name IN ('synchronous_commit', 'fsync')"
    )
    for name, setting in settings:
        if setting == "off":
            raise DurabilityError(
                f"{url.display} has {name}=off, so a crash loses acknowledged calls; set it to on"
            )
