"""SQLite: one writer connection in a thread of its own, and a few readers in others.

A transaction runs from its first statement to its commit in one thread, with one hop of the event loop there and one
back. Its write transactions begin IMMEDIATE, so none can fail after its first read.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event

from tokencustody.errors import DurabilityError
from tokencustody.sql.engine import EngineKey, Engines, Result, Work
from tokencustody.sql.faults import reach_from_thread
from tokencustody.sql.url import DatabaseUrl

# Longer waits are retried, so that a cancelled write leaves within this many seconds.
_LONGEST_BUSY_WAIT = 1.0


class SqliteEngines(Engines):
    """The writer and the readers, each with its threads."""

    def __init__(self, key: EngineKey) -> None:
        super().__init__()
        options = {"max_overflow": 0, "pool_timeout": key.deadline}
        self._writer = _Threads(
            _engine(key.url, key.deadline, begin="BEGIN IMMEDIATE", pool_size=1, **options), 1
        )
        self._readers = _Threads(
            _engine(key.url, key.deadline, begin="BEGIN", pool_size=key.pool_size, **options), key.pool_size
        )

    async def read(self, work: Work[Result]) -> Result:
        return await self._readers.run(work)

    async def write(self, work: Work[Result]) -> Result:
        loop = asyncio.get_running_loop()
        return await self._writer.run(work, lambda: reach_from_thread("before commit", loop))

    def checked_out(self) -> int:
        return self._writer.checked_out() + self._readers.checked_out()

    async def close_connections(self) -> None:
        for threads in (self._writer, self._readers):
            # Waits for the end of the threads, which a fork of another thread may be holding up.
            await asyncio.to_thread(threads.close)


class _Threads:
    """An engine and the threads in which its transactions run. A fork waits for those that are running."""

    def __init__(self, engine: Engine, size: int) -> None:
        self._engine = engine
        self._executor = ThreadPoolExecutor(size, thread_name_prefix="tokencustody")
        self._size = size
        self._turns = threading.Semaphore(size)
        with _forking:
            _all_threads.add(self)

    async def run(self, work: Work[Result], before_commit: Callable[[], None] | None = None) -> Result:
        """Run `work` in a transaction. Once that has begun, a cancelled caller leaves when it is over."""
        transaction = self._executor.submit(self._transact, work, before_commit)
        running = asyncio.wrap_future(transaction)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if not transaction.cancel():
                await _over(running)
            raise

    def _transact(self, work: Work[Result], before_commit: Callable[[], None] | None) -> Result:
        with self._turns, self._engine.connect() as connection, connection.begin():
            result = work(connection)
            if before_commit is not None:
                before_commit()
            return result

    def checked_out(self) -> int:
        checked_out: int = self._engine.pool.checkedout()  # type: ignore[attr-defined]
        return checked_out

    def close(self) -> None:
        self._executor.shutdown()
        self._engine.dispose()

    def pause(self) -> None:
        for _ in range(self._size):
            self._turns.acquire()

    def resume(self) -> None:
        self._turns.release(self._size)


async def _over(running: asyncio.Future[Any]) -> None:
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            continue
    if not running.cancelled():
        running.exception()


_all_threads: weakref.WeakSet[_Threads] = weakref.WeakSet()
_forking = threading.Lock()
_paused: list[_Threads] = []


def _before_fork() -> None:
    # A transaction that runs in another thread would leave SQLite's own locks taken in the child for ever.
    _forking.acquire()
    for threads in list(_all_threads):
        threads.pause()
        _paused.append(threads)


def _after_fork() -> None:
    while _paused:
        _paused.pop().resume()
    _forking.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


class _RollingBack(sqlite3.Connection):
    """Ends its transaction when it is closed.

    SQLite keeps a closed connection, and the lock of its transaction, for as long as a cursor is unread.
    """

    def close(self) -> None:
        if self.in_transaction:
            self.rollback()
        super().close()


def _engine(url: DatabaseUrl, deadline: float, *, begin: str, **options: Any) -> Engine:
    engine = create_engine(
        URL.create("sqlite", database=url.dsn),
        connect_args={
            "isolation_level": None,
            "timeout": min(deadline, _LONGEST_BUSY_WAIT),
            "factory": _RollingBack,
        },
        hide_parameters=True,
        **options,
    )
    writes = begin != "BEGIN"

    @event.listens_for(engine, "connect")
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
            # The pool forgets a connection that fails here.
            connection.close()
            raise

    # The driver's own BEGIN is deferred, so a write transaction could fail after its first read.
    @event.listens_for(engine, "begin")
    def begin_transaction(connection: Any) -> None:
        connection.exec_driver_sql(begin)

    return engine
