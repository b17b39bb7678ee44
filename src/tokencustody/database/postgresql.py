"""PostgreSQL: one pool of asyncpg connections.

Writes run at READ COMMITTED, where the lock of the fence, which each takes first and keeps until it commits, makes
them serializable: whatever a write reads belongs to the rollout it has locked. SERIALIZABLE, for whoever asks for it,
adds the word of the server and aborts: its predicate locks cover whole index pages, so that distinct rollouts collide.
Its snapshot would be older than a lock that was waited for within the transaction: see `database.turns`.
"""

from __future__ import annotations

import asyncio
import math
import time
from asyncio import Semaphore
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
from sqlalchemy import Connection, event, text
from sqlalchemy.dialects import postgresql  # noqa: F401 - else the first call would import it
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError, DisconnectionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool
from sqlalchemy.util import await_only

from tokencustody.database.connecting import Driver, connect, not_durable
from tokencustody.database.dialects import DURABLE_COMMIT, PATIENCE, TURNS, TurnMissingError
from tokencustody.database.engine import (
    DEFAULT_DEADLINE,
    LOGGING_NAME,
    Attempt,
    EngineKey,
    Engines,
    HeldError,
    Result,
    Work,
    forget_error,
)
from tokencustody.database.faults import Fault, classify, is_at_its_end, is_held, reach
from tokencustody.database.turns import ensure_session, turns_of
from tokencustody.database.url import DatabaseUrl
from tokencustody.errors import DurabilityError
from tokencustody.states import Isolation

# Seconds after which a server that was found to sync its commits is asked again.
_ASK_AGAIN = 5.0
_PREPARED_STATEMENTS = 100

# For how many seconds a transaction waits for a rollout: the least that a server takes, long enough for most that come
# before it, and without end.
_NO_PATIENCE, _SHORT_PATIENCE, _ALL_PATIENCE = 0.001, 0.1, 0.0

# The same for a server, its standbys and every pooler before them.
_IDENTITY = text(
    "SELECT system_identifier || '/' || current_database() || '/' || current_schema() FROM pg_control_system()"
)

# The text and the parameters of a statement as the driver takes them.
Statement = tuple[str, Sequence[Any]]


class PostgresqlEngines(Engines):
    """One pool for reads and writes."""

    def __init__(self, key: EngineKey) -> None:
        super().__init__()
        self._url = key.url
        self._deadline = key.deadline
        self._is_serializable = key.isolation is Isolation.SERIALIZABLE
        self._writes_at = "SERIALIZABLE" if self._is_serializable else "READ COMMITTED"
        # One snapshot is all that a reader needs, and predicate locks of readers would abort writers.
        self._reads_at = "SERIALIZABLE" if self._is_serializable else "REPEATABLE READ"
        self._connecting = _Connecting(self._connect)
        self._pool = _engine(
            key.url, self._connecting, pool_size=key.pool_size, max_overflow=0, pool_timeout=key.deadline
        )
        # One connection is left for the lanes, and one for what need not wait for a rollout that somebody holds.
        self._beside_lanes = Semaphore(max(1, key.pool_size - 1))
        self._waiting = Semaphore(max(0, key.pool_size - 2))
        self._patience = _NO_PATIENCE if key.pool_size > 2 else _SHORT_PATIENCE

        # By the monotonic clock: when a connection that lay idle was found dead, and when fsync was found to be on.
        self._fell_silent = -math.inf
        self._synced_at = -math.inf

        @event.listens_for(self._pool.sync_engine, "checkout")
        def take_another_if_closed(connection: Any, _record: object, _proxy: object) -> None:
            # Nothing was sent through it since, so nothing failed. What lay idle while another went dead, is dead too.
            driver: Driver = connection.driver_connection
            if driver.rested_since is not None and driver.rested_since <= self._fell_silent:
                driver.terminate()
            if driver.is_closed():
                raise DisconnectionError

        @event.listens_for(self._pool.sync_engine, "checkin")
        def rest(connection: Any, _record: object) -> None:
            if connection is not None:
                connection.driver_connection.rested_since = time.monotonic()

    async def _connect(self) -> Driver:
        driver = await connect(self._url, self._deadline, command_timeout=self._deadline)
        if self._is_serializable:
            try:
                await ensure_session(self._url, driver)
            except BaseException:
                driver.terminate()
                raise
        self._synced_at = time.monotonic()
        return driver

    async def read(self, work: Work[Result]) -> Result:
        async with (
            self._beside_lanes,
            self._connection(self._reads_at, read_only=True) as (connection, _),
            connection.begin(),
        ):
            return await connection.run_sync(work)

    async def write(self, attempt: Attempt[Connection, Result]) -> Result:
        if self._waiting.locked():
            # Tried again and again, it needs no place among those that wait.
            async with self._beside_lanes:
                return await self._write(attempt, self._patience)
        # In the queue of the server a freeze keeps its place before the writes that come after it.
        async with self._waiting, self._beside_lanes:
            return await self._write(attempt, _ALL_PATIENCE)

    async def _write(self, attempt: Attempt[Connection, Result], patience: float) -> Result:
        async with self._connection(self._writes_at) as (connection, driver):
            await self._ask_for_fsync(driver)
            await connection.execution_options(**{PATIENCE: patience})
            if not self._is_serializable:
                return await _transact(connection, driver, attempt)
            async with turns_of(driver, patience) as turns:
                await connection.execution_options(**{TURNS: turns.numbers})
                while True:
                    try:
                        return await _transact(connection, driver, attempt)
                    except TurnMissingError as missing:
                        await turns.take(missing.number)

    async def write_statement(self, attempt: Attempt[None, Statement]) -> Sequence[Any]:
        """Run one statement of the driver, a transaction by itself, in one round trip; return its rows.

        It evaluates `DURABLE_COMMIT`. Raises HeldError when it limits its waiting for locks and waited so long.
        """
        async with self._connection("AUTOCOMMIT") as (connection, driver):
            await self._ask_for_fsync(driver)
            sql, parameters = attempt(None)
            await reach("before commit")
            attempt.committing = True
            try:
                # Not through SQLAlchemy, which takes longer for it than the driver takes for everything.
                rows: Sequence[Any] = await driver.fetch(sql, *parameters, timeout=driver.patience())
                driver.rested_since = None
                driver.check_replicated()
                return rows
            except BaseException as exc:
                if isinstance(exc, asyncpg.PostgresError):
                    exc.detail = None  # it quotes the row, token ids included
                if is_held(exc):
                    raise HeldError from exc
                if driver.is_closed() or not isinstance(exc, asyncpg.PostgresError):
                    await connection.invalidate()
                if isinstance(exc, asyncpg.InterfaceError | asyncpg.InternalClientError):
                    raise ConnectionResetError(f"the connection was closed: {exc}") from exc
                raise

    @asynccontextmanager
    async def _connection(
        self, isolation: str, *, read_only: bool = False
    ) -> AsyncIterator[tuple[AsyncConnection, Driver]]:
        async with self._pool.connect() as connection:
            await connection.execution_options(isolation_level=isolation, postgresql_readonly=read_only)
            driver: Any = (await connection.get_raw_connection()).driver_connection
            try:
                yield connection, driver
            except TimeoutError:
                if driver.rested_since is not None:
                    self._fell_silent = time.monotonic()
                    driver.terminate()
                raise
            except Exception as exc:
                if is_at_its_end(exc):
                    await connection.invalidate()
                raise

    async def _ask_for_fsync(self, driver: Driver) -> None:
        """Raise DurabilityError if the server has been told to sync no more. Asks now and then."""
        if time.monotonic() < self._synced_at + _ASK_AGAIN:
            return
        fsync = await driver.fetchval("SHOW fsync", timeout=driver.patience())
        driver.rested_since = None
        if fsync == "off":
            raise DurabilityError(not_durable(self._url, "fsync"))
        self._synced_at = time.monotonic()

    async def identify(self) -> str | None:
        try:
            identity: str | None = await self.read(lambda connection: connection.scalar(_IDENTITY))
            return identity
        except DBAPIError as exc:
            failure = classify(exc)
            if failure is None or failure.fault is Fault.UNAVAILABLE:
                return None  # no PostgreSQL, or one that does not tell this role
            raise

    def checked_out(self) -> int:
        checked_out: int = self._pool.pool.checkedout()  # type: ignore[attr-defined]
        return checked_out

    async def close_connections(self) -> None:
        await self._connecting.close()
        await self._pool.dispose()


async def _transact(
    connection: AsyncConnection, driver: Driver, attempt: Attempt[Connection, Result]
) -> Result:
    async with connection.begin():
        result = await connection.run_sync(attempt)
        await reach("before commit")
        attempt.committing = True
    driver.check_replicated()
    return result


class _Connecting:
    """Makes connections, each in a task of its own: when its caller is cancelled, the next one takes what it makes.

    Else callers with less patience than a connection takes would never have one.
    """

    def __init__(self, make: Callable[[], Coroutine[Any, Any, Driver]]) -> None:
        self._make = make
        self._left: list[asyncio.Task[Driver]] = []

    async def __call__(self) -> Driver:
        while True:
            making = self._left.pop() if self._left else asyncio.create_task(self._make())
            was_left = making.done()
            try:
                driver = await asyncio.shield(making)
            except asyncio.CancelledError:
                if not making.cancelled():
                    self._left.append(making)
                    making.add_done_callback(forget_error)
                raise
            except Exception:
                if was_left:
                    continue  # it failed while nobody waited
                raise
            if not was_left:
                return driver
            if not driver.is_closed():
                driver.rested_since = time.monotonic()
                return driver

    async def close(self) -> None:
        """Give up what is being made for nobody."""
        left, self._left = self._left, []
        for making in left:
            making.cancel()
        for made in await asyncio.gather(*left, return_exceptions=True):
            if isinstance(made, Driver):
                await made.close(timeout=1)


def migration_engine(url: DatabaseUrl) -> AsyncEngine:
    """Return an engine without a pool for the migrations of a PostgreSQL database."""
    # A migration may wait for another one, and may take its time with a large table.
    return _engine(url, lambda: connect(url, DEFAULT_DEADLINE), poolclass=NullPool)


def _engine(url: DatabaseUrl, make: Callable[[], Awaitable[Driver]], **options: Any) -> AsyncEngine:
    engine = create_async_engine(
        "postgresql+asyncpg://", hide_parameters=True, logging_name=LOGGING_NAME, **options
    )

    @event.listens_for(engine.sync_engine, "do_connect")
    def connect_as_the_server_is(dialect: Any, _record: object, _args: object, _options: object) -> Any:
        driver = await_only(make())

        async def made() -> Driver:
            return driver

        asked = _PREPARED_STATEMENTS if url.statement_cache_size is None else url.statement_cache_size
        return dialect.loaded_dbapi.connect(
            async_creator_fn=made, prepared_statement_cache_size=0 if driver.behind_pooler else asked
        )

    @event.listens_for(engine.sync_engine, "commit")
    def commit_durably(connection: Connection) -> None:
        driver: Any = connection.connection.driver_connection
        if driver.behind_pooler and not connection.get_execution_options().get("postgresql_readonly"):
            await_only(driver.execute(f"SELECT {DURABLE_COMMIT}"))

    @event.listens_for(engine.sync_engine, "handle_error")
    def forget_row(context: ExceptionContext) -> None:
        for exc in (context.original_exception, context.original_exception.__cause__):
            if exc is not None and hasattr(exc, "detail"):
                exc.detail = None  # it quotes the row, token ids included

    return engine
