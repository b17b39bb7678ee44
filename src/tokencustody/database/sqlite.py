"""SQLite: one writer connection in a thread of its own, and a few readers in others.

A transaction runs from its first statement to its commit in one thread, with one hop of the event loop there and one
back. Its write transactions begin IMMEDIATE, so none can fail after its first read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError

from tokencustody.database.engine import LOGGING_NAME, Attempt, EngineKey, Engines, Result, Work
from tokencustody.database.faults import reach_from_thread
from tokencustody.database.sqlite_files import (
    File,
    OpenedConnection,
    OpenedFile,
    archive_stamp,
    has_journal,
    opened_file,
)
from tokencustody.database.url import DatabaseUrl
from tokencustody.errors import DurabilityError, StoreUnavailableError

# Longer waits are retried, so that a cancelled write leaves within this many seconds.
LONGEST_BUSY_WAIT = 1.0
# SQLite itself asks for a lock ever more rarely, up to a tenth of a second: whoever waited longest would go last. So a
# writer asks, this often, in seconds.
_TURN = 0.001
# A log that a long read, or many that overlap, let grow beyond this many bytes is made small again.
LARGEST_LOG = 16 * 2**20
# How often that is tried, in seconds, and for how many milliseconds it may hold up writers each time.
_SHRINKING_PAUSE = 1.0
_SHRINKING_PATIENCE = 50


class SqliteEngines(Engines):
    """The writer and the readers, each with its threads."""

    def __init__(self, key: EngineKey) -> None:
        super().__init__()
        _close_what_the_parent_left()
        self._url = key.url
        self._archive = archive_stamp(key.url) if key.read_only else None
        self._opened = opened_file(key.url, self)
        patience = min(key.deadline, LONGEST_BUSY_WAIT)
        options = {"max_overflow": 0, "pool_timeout": key.deadline}
        writer = _engine(key.url, patience, begin="BEGIN IMMEDIATE", pool_size=1, **options)
        readers = _engine(
            key.url, patience, begin="BEGIN", read_only=key.read_only, pool_size=key.pool_size, **options
        )
        self._writer = _Threads(writer, 1, self._opened)
        self._readers = _Threads(readers, key.pool_size, self._opened)

    @property
    def file(self) -> File | None:
        """The file by device and inode, as `Engines` says."""
        return self._opened.file

    async def read(self, work: Work[Result]) -> Result:
        result = await self._readers.run(work)
        if self._archive is not None and archive_stamp(self._url) != self._archive:
            raise StoreUnavailableError(
                f"{self._url.display} was changed while it was read as an archive, without locks; start again"
            )
        return result

    async def write(self, attempt: Attempt[Connection, Result]) -> Result:
        loop = asyncio.get_running_loop()

        def before_commit() -> None:
            reach_from_thread("before commit", loop)
            attempt.committing = True

        return await self._writer.run(attempt, before_commit)

    def checked_out(self) -> int:
        return self._writer.checked_out() + self._readers.checked_out()

    async def close_connections(self) -> None:
        # It waits for the end of the threads, which a fork of another thread may be holding up.
        await in_thread(self._close)

    def _close(self) -> None:
        for threads in (self._writer, self._readers):
            threads.close()
        self._opened.users.discard(self)


class _Threads:
    """An engine and the threads in which its transactions run, each with a connection that it keeps.

    A fork waits for the transactions that are running.
    """

    def __init__(self, engine: Engine, size: int, opened: OpenedFile) -> None:
        self._engine = engine
        self._opened = opened
        self._executor = ThreadPoolExecutor(size, thread_name_prefix="tokencustody")
        self._size = size
        self._turns = threading.Semaphore(size)
        # Lists, because they grow and shrink in one step whatever threads do.
        self._busy: list[None] = []
        self._idle: list[Connection] = []
        self._shrinking_from = 0.0
        with _forking:
            _all_threads.add(self)

    async def run(self, work: Work[Result], before_commit: Callable[[], None] | None = None) -> Result:
        """Run `work` in a transaction. Once that has begun, a cancelled caller leaves when it is over."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        transaction = self._executor.submit(self._transact, work, before_commit)
        # Less than half the turns of the loop that asyncio.wrap_future takes.
        transaction.add_done_callback(lambda _: _in_loop(loop, ended))
        try:
            await ended
        except asyncio.CancelledError:
            if not transaction.cancel():
                await _over(asyncio.wrap_future(transaction))
            raise
        return transaction.result()

    def _transact(self, work: Work[Result], before_commit: Callable[[], None] | None) -> Result:
        with self._turns:
            self._busy.append(None)
            try:
                connection = self._connection()
                driver: Any = connection.connection.dbapi_connection
                try:
                    if not driver.keeps_log:
                        # It has not looked into the file yet, and would delete the log of an empty one.
                        self._opened.look()
                    with connection.begin():
                        if before_commit is None:
                            result = work(connection)
                            self._opened.check(driver)
                        else:
                            self._opened.check(driver)
                            result = work(connection)
                            before_commit()
                    if before_commit is not None:
                        self._opened.check(driver)
                except BaseException as exc:
                    # It may be what is broken.
                    connection.close()
                    if isinstance(exc, DBAPIError) and (gone := self._opened.loss()) is not None:
                        raise gone from exc
                    raise
                self._idle.append(connection)
                if before_commit is not None and self._opened.log_size > LARGEST_LOG:
                    self._shrink_soon()
                return result
            finally:
                self._busy.pop()

    def _shrink_soon(self) -> None:
        # After this transaction was answered, and before the next one.
        if time.monotonic() >= self._shrinking_from:
            self._shrinking_from = time.monotonic() + _SHRINKING_PAUSE
            with contextlib.suppress(RuntimeError):  # it is being closed, which makes the log small
                self._executor.submit(self._shrink)

    def _shrink(self) -> None:
        # SQLite moves the log into the file by itself, but begins it anew only when nobody reads from it just then.
        with self._turns, contextlib.suppress(DBAPIError, sqlite3.Error, IndexError):
            connection = self._idle.pop()
            try:
                driver: Any = connection.connection.dbapi_connection
                driver.execute(f"PRAGMA busy_timeout = {_SHRINKING_PATIENCE}").close()
                driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
                driver.execute("PRAGMA busy_timeout = 0").close()
            except BaseException:
                connection.close()
                raise
            self._idle.append(connection)

    def _connection(self) -> Connection:
        try:
            return self._idle.pop()
        except IndexError:
            before = self._opened.look()
            connection = self._engine.connect()
            try:
                self._opened.opened(before)
            except BaseException:
                connection.invalidate()
                connection.close()
                raise
            return connection

    def checked_out(self) -> int:
        return len(self._busy)

    def close(self) -> None:
        self._executor.shutdown()
        self.disconnect()

    def disconnect(self) -> None:
        while self._idle:
            self._idle.pop().close()
        self._engine.dispose()

    def pause(self) -> None:
        for _ in range(self._size):
            self._turns.acquire()

    def resume(self) -> None:
        self._turns.release(self._size)


def _in_loop(loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
    # A loop that was closed meanwhile has nobody left who waits.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(_set_done, ended)


def _set_done(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


async def in_thread(work: Callable[[], Result]) -> Result:
    """Return `work()`, run in a thread. Once that has begun, a cancelled caller leaves when it is over."""
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        await asyncio.wait([running])
    except asyncio.CancelledError:
        await _over(running)
        raise
    return running.result()


async def _over(running: asyncio.Future[Any]) -> None:
    while not running.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([running])
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


def _after_fork_in_child() -> None:
    _left_by_parent.extend(_paused)
    _after_fork()
    _all_threads.clear()


def _close_what_the_parent_left() -> None:
    # SQLite believes of a file that is open that this process has its locks, which are the parent's: it would take
    # none of its own, and the parent, as the last one by its locks, would delete the log that the child writes.
    while _left_by_parent:
        _left_by_parent.pop().disconnect()


_left_by_parent: list[_Threads] = []
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


def file_engine(
    url: DatabaseUrl, timeout: float, *, begin: str, read_only: bool = False, **options: Any
) -> Engine:
    """Return an engine for a file that exists, whose transactions start with `begin`.

    A connection waits `timeout` seconds for a lock, and never creates the file: that would be empty, and readable by
    whoever the umask lets. With `read_only` the file stays as it is: the last of other connections would move what a
    log holds into it. Only what a transaction that did not end left in the file goes, without which none can read it.
    """
    query = {"mode": "ro" if read_only and not has_journal(url) else "rw", "uri": "true"}
    if read_only and archive_stamp(url) is not None:
        query["immutable"] = "1"
    engine = create_engine(
        URL.create("sqlite", database="file://" + quote(os.fsencode(url.dsn)), query=query),
        connect_args={"isolation_level": None, "timeout": timeout, "factory": OpenedConnection},
        hide_parameters=True,
        logging_name=LOGGING_NAME,
        **options,
    )

    @event.listens_for(engine, "connect")
    def sync(connection: Any, _record: object) -> None:
        # FULL syncs the log at every commit, so that what was acknowledged survives a power cut. EXTRA does the same
        # with a write-ahead log; with a rollback journal, as of a new file, it also syncs the folder that this leaves.
        connection.execute("PRAGMA synchronous = EXTRA").close()

    # The driver's own BEGIN is deferred, so a write transaction could fail after its first read.
    @event.listens_for(engine, "begin")
    def begin_transaction(connection: Any) -> None:
        _begin(connection.connection.dbapi_connection, begin, timeout)

    return engine


def _begin(driver: Any, begin: str, patience: float) -> None:
    """Begin a transaction, as soon as another process lets go of the lock that it takes."""
    give_up = time.monotonic() + patience
    while True:
        try:
            driver.execute(begin).close()
            return
        except sqlite3.OperationalError as exc:
            # Of its extended codes too.
            is_busy = exc.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy or time.monotonic() >= give_up:
                raise
        time.sleep(_TURN)


def _engine(url: DatabaseUrl, patience: float, *, begin: str, **options: Any) -> Engine:
    engine = file_engine(url, patience, begin=begin, **options)
    writes = begin != "BEGIN"

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        try:
            connection.execute("PRAGMA foreign_keys = ON").close()
            if writes:
                (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
                if mode != "wal":
                    raise DurabilityError(
                        f"{url.display} cannot use a write-ahead log (its journal mode is {mode}): custody needs a "
                        "local file system"
                    )
                connection.execute(f"PRAGMA journal_size_limit = {LARGEST_LOG}").close()
                # From now on, see _TURN; what comes before it meets locks that are held for a moment.
                connection.execute("PRAGMA busy_timeout = 0").close()
            else:
                connection.execute("PRAGMA query_only = ON").close()
        except BaseException:
            # The pool forgets a connection that fails here.
            connection.close()
            raise

    return engine
