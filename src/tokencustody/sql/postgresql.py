"""PostgreSQL: one pool of asyncpg connections.

Writes run at READ COMMITTED, where the lock of the fence, which each takes first and keeps until it commits, makes
them serializable: whatever a write reads belongs to the rollout it has locked. SERIALIZABLE would add nothing but
aborts: its predicate locks cover whole index pages, so that distinct rollouts collide, and its snapshot is older than
a lock that was waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import asyncpg
from sqlalchemy import Connection, event, text
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError, DisconnectionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from tokencustody.errors import DurabilityError
from tokencustody.sql.engine import DEFAULT_DEADLINE, LOGGING_NAME, Attempt, EngineKey, Engines, Result, Work
from tokencustody.sql.faults import Fault, classify, reach
from tokencustody.sql.tls import check_files
from tokencustody.sql.url import DatabaseUrl

# In seconds. A server that answers has ended the transaction by then.
_LONGEST_FAREWELL = 0.5

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
        self._pool = _engine(
            key.url,
            key.deadline,
            command_timeout=key.deadline,
            pool_size=key.pool_size,
            max_overflow=0,
            pool_timeout=key.deadline,
        )

    async def read(self, work: Work[Result]) -> Result:
        # One snapshot is all that a reader needs, and predicate locks of readers would abort writers.
        async with self._pool.connect() as connection:
            await _set(connection, "REPEATABLE READ", read_only=True)
            async with connection.begin():
                return await connection.run_sync(work)

    async def write(self, attempt: Attempt[Connection, Result]) -> Result:
        async with self._pool.connect() as connection:
            await _set(connection, "READ COMMITTED")
            async with connection.begin():
                result = await connection.run_sync(attempt)
                await reach("before commit")
                attempt.committing = True
            return result

    async def write_statement(self, attempt: Attempt[None, Statement]) -> Sequence[Any]:
        """Run one statement of the driver, a transaction by itself, in one round trip; return its rows."""
        async with self._pool.connect() as connection:
            await _set(connection, "AUTOCOMMIT")
            driver: Any = (await connection.get_raw_connection()).driver_connection
            sql, parameters = attempt(None)
            await reach("before commit")
            attempt.committing = True
            try:
                # Not through SQLAlchemy, which takes longer for it than the driver takes for everything.
                rows: Sequence[Any] = await driver.fetch(sql, *parameters)
                return rows
            except BaseException as exc:
                if isinstance(exc, asyncpg.PostgresError):
                    exc.detail = None  # it quotes the row, token ids included
                if driver.is_closed() or not isinstance(exc, asyncpg.PostgresError):
                    await connection.invalidate()
                if isinstance(exc, asyncpg.InterfaceError | asyncpg.InternalClientError):
                    raise ConnectionResetError(f"the connection was closed: {exc}") from exc
                raise

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
        await self._pool.dispose()


async def _set(connection: AsyncConnection, isolation: str, *, read_only: bool = False) -> None:
    await connection.execution_options(isolation_level=isolation, postgresql_readonly=read_only)


def migration_engine(url: DatabaseUrl) -> AsyncEngine:
    """Return an engine without a pool for the migrations of a PostgreSQL database."""
    # A migration may wait for another one, and may take its time with a large table.
    return _engine(url, DEFAULT_DEADLINE, command_timeout=None, poolclass=NullPool)


async def connect(url: DatabaseUrl, deadline: float, *, command_timeout: float | None = None) -> Any:
    """Return a connection of the driver; close it. `deadline`, in seconds, is for connecting alone."""
    connecting: Callable[..., Any] = asyncpg.connect
    cache = {} if url.statement_cache_size is None else {"statement_cache_size": url.statement_cache_size}
    check_files(url)
    connection = await connecting(
        url.dsn,
        connection_class=_Driver,
        timeout=min(deadline, url.connect_timeout or deadline),
        command_timeout=command_timeout,
        server_settings={"application_name": "tokencustody"} if "application_name=" not in url.dsn else None,
        **cache,
    )
    try:
        await _prepare(connection, url, deadline)
    except BaseException:
        connection.terminate()
        raise
    return connection


def _engine(
    url: DatabaseUrl, deadline: float, *, command_timeout: float | None, **options: Any
) -> AsyncEngine:
    prepared = (
        {}
        if url.statement_cache_size is None
        else {"prepared_statement_cache_size": url.statement_cache_size}
    )

    async def connect_to_dsn() -> Any:
        return await connect(url, deadline, command_timeout=command_timeout)

    engine = create_async_engine(
        "postgresql+asyncpg://",
        connect_args={"async_creator_fn": connect_to_dsn, **prepared},
        hide_parameters=True,
        logging_name=LOGGING_NAME,
        **options,
    )

    @event.listens_for(engine.sync_engine, "checkout")
    def take_another_if_closed(connection: Any, _record: object, _proxy: object) -> None:
        # The server ended the session while the connection was idle: nothing was sent, so nothing failed.
        if connection.driver_connection.is_closed():
            raise DisconnectionError

    @event.listens_for(engine.sync_engine, "handle_error")
    def forget_row(context: ExceptionContext) -> None:
        for exc in (context.original_exception, context.original_exception.__cause__):
            if exc is not None and hasattr(exc, "detail"):
                exc.detail = None  # it quotes the row, token ids included

    return engine


class _Driver(asyncpg.Connection):
    """Waits only briefly for the farewell of a server, which may not be there any more."""

    async def close(self, *, timeout: float | None = None) -> None:
        # SQLAlchemy sets a time, of two seconds, only for a connection that it gives up.
        await super().close(timeout=timeout and _LONGEST_FAREWELL)


async def _prepare(connection: Any, url: DatabaseUrl, deadline: float) -> None:
    """Check that commits are durable, and let the server end a transaction whose client fell silent.

    Such a client, stopped or behind a cut network, would hold its rollout's fence until TCP gives up, after hours.
    """
    # For each connection, because a role or database may have been altered since the last.
    settings = await connection.fetch(
        "SELECT name, setting FROM pg_settings"
        " WHERE name IN ('synchronous_commit', 'fsync', 'idle_in_transaction_session_timeout')"
    )
    for name, setting in settings:
        if setting == "off":
            raise DurabilityError(
                f"{url.display} has {name}=off, so a crash loses acknowledged calls; set it to on"
            )
        # A pooler in transaction mode would hand the setting to others.
        if (
            name == "idle_in_transaction_session_timeout"
            and setting == "0"
            and url.statement_cache_size is None
        ):
            await connection.execute(f"SET {name} = {max(1, math.ceil(1000 * deadline))}")
