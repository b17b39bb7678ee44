"""One connection to PostgreSQL: made, judged and set up before anything is sent through it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import asyncpg

from tokencustody.database.pgpass import password_for
from tokencustody.database.tcp import tune
from tokencustody.database.tls import check_files
from tokencustody.database.url import DatabaseUrl
from tokencustody.errors import DurabilityError, SchemaMismatchError

# In seconds. A server that answers has ended the transaction by then.
_LONGEST_FAREWELL = 0.5
# Where nothing is heard for so long of a connection that lay idle, or for this share of the deadline, another is made.
_LONGEST_SILENCE = 10.0
_SHARE_OF_SILENCE = 1 / 3

# By COPY, which takes no prepared statement: behind a pooler, that of another client might answer.
# What is set for this session alone does not count: behind a pooler somebody else may have left it.
_QUESTIONS = """
SELECT pg_backend_pid(), current_setting('server_encoding'), current_setting('client_encoding'),
    (SELECT reset_val FROM pg_settings WHERE name = 'synchronous_commit'), current_setting('fsync'),
    current_setting('synchronous_standby_names') <> '', current_setting('idle_in_transaction_session_timeout')
"""


class _Session(NamedTuple):
    """What a session says of itself, each as text."""

    pid: str
    server_encoding: str
    client_encoding: str
    synchronous_commit: str
    fsync: str
    names_standby: str
    idle_timeout: str


class Driver(asyncpg.Connection):
    """A connection of the driver.

    `behind_pooler`: its session may be another one for each transaction. `rested_since` is when it came to lie idle,
    by the monotonic clock, until the server has answered again; None for a new one. `waited_in_vain`: a commit was
    answered though no synchronous standby has it.
    """

    behind_pooler = False
    rested_since: float | None = None
    longest_silence = _LONGEST_SILENCE
    waited_in_vain = False

    def patience(self) -> float | None:
        """Return for how many seconds to wait for the next answer, or None where only the deadline bounds it.

        A connection that lay idle may have been forgotten on the way. Then there must be time for a new one.
        """
        return None if self.rested_since is None else self.longest_silence

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:
        # The driver begins its transactions by this, and a server that is there answers at once.
        status: str = await super().execute(query, *args, timeout=timeout or self.patience())
        self.rested_since = None
        return status

    def check_replicated(self) -> None:
        """Raise ConnectionResetError if the last commit was said to have succeeded though no standby has it.

        That is what a commit answers whose wait for a synchronous standby is cancelled. The next try waits again.
        """
        if self.waited_in_vain:
            self.terminate()
            raise ConnectionResetError("the wait for a synchronous standby was cancelled")

    async def close(self, *, timeout: float | None = None) -> None:
        # SQLAlchemy sets a time, of two seconds, only for a connection that it gives up. One that lay idle may have
        # been forgotten on the way, where nobody hears a farewell.
        try:
            await super().close(timeout=_LONGEST_FAREWELL if timeout else self.patience())
        except TimeoutError:
            if timeout:
                raise


def _hear(connection: Any, message: asyncpg.PostgresLogMessage) -> None:
    # No method of the connection, which would keep it alive. The notice's words depend on the server's language.
    if getattr(message, "server_source_filename", "") == "syncrep.c":
        connection.waited_in_vain = True


async def connect(url: DatabaseUrl, deadline: float, *, command_timeout: float | None = None) -> Driver:
    """Return a connection of the driver; close it. `deadline`, in seconds, is for connecting alone.

    Its commits are durable, and wait for a synchronous standby if one is named: it sets that for its session, and
    behind a pooler, where no setting stays, `DURABLE_COMMIT` is for each transaction to evaluate. A pooler is known by
    the number of the session, which is not the one that it gave its client; then no statement stays prepared either.

    Raises DurabilityError and SchemaMismatchError where the server is set up so that this library cannot keep its
    promises.
    """
    check_files(url)
    async with asyncio.timeout(min(deadline, url.connect_timeout or deadline)):
        connection, session = await _opened(url, url.statement_cache_size, command_timeout)
        is_behind_pooler = int(session.pid) != connection.get_server_pid()
        if is_behind_pooler and url.statement_cache_size != 0:
            await connection.close(timeout=_LONGEST_FAREWELL)
            connection, session = await _opened(url, 0, command_timeout)
        try:
            connection.behind_pooler = is_behind_pooler or url.statement_cache_size == 0
            connection.longest_silence = min(_LONGEST_SILENCE, deadline * _SHARE_OF_SILENCE)
            connection.add_log_listener(_hear)
            transport: asyncio.BaseTransport = connection._transport  # type: ignore[attr-defined]
            tune(transport, url.tcp, connection.longest_silence)
            _judge(url, session)
            if not connection.behind_pooler:
                await _set_up(connection, session, deadline)
        except BaseException:
            connection.terminate()
            raise
    return connection


async def _opened(
    url: DatabaseUrl, cache_size: int | None, command_timeout: float | None
) -> tuple[Driver, _Session]:
    connecting: Callable[..., Any] = asyncpg.connect
    connection: Driver = await connecting(
        url.dsn,
        password=password_for(url),
        connection_class=Driver,
        timeout=None,
        command_timeout=command_timeout,
        server_settings={"application_name": "tokencustody"} if "application_name=" not in url.dsn else None,
        **({} if cache_size is None else {"statement_cache_size": cache_size}),
    )
    answer = bytearray()

    async def take(data: bytes) -> None:
        answer.extend(data)

    try:
        await connection.copy_from_query(_QUESTIONS, output=take)
    except BaseException:
        connection.terminate()
        raise
    return connection, _Session(*answer.decode().rstrip("\n").split("\t"))


def _judge(url: DatabaseUrl, session: _Session) -> None:
    # For each connection, because a role or database may have been altered since the last.
    if session.server_encoding != "UTF8":
        raise SchemaMismatchError(
            f"{url.display} has the encoding {session.server_encoding}, which cannot hold every text; make another "
            "database with `createdb -E UTF8 -T template0`, and move the rows of this one with pg_dump, if it has any"
        )
    if session.client_encoding != "UTF8":
        raise SchemaMismatchError(
            f"the URL of {url.display} asks for the client_encoding {session.client_encoding}: leave it out"
        )
    for name, setting in (("synchronous_commit", session.synchronous_commit), ("fsync", session.fsync)):
        if setting == "off":
            raise DurabilityError(not_durable(url, name))
    if session.synchronous_commit in ("local", "remote_write") and session.names_standby == "t":
        raise DurabilityError(
            f"{url.display} has synchronous_commit={session.synchronous_commit} though synchronous_standby_names names "
            "a standby, so a failover loses acknowledged calls; set synchronous_commit to on or remote_apply"
        )


def not_durable(url: DatabaseUrl, name: str) -> str:
    """Return what to say of a setting that is off."""
    return f"{url.display} has {name}=off, so a crash loses acknowledged calls; set it to on"


async def _set_up(connection: Driver, session: _Session, deadline: float) -> None:
    """Let commits be durable, and let the server end a transaction whose client fell silent.

    Such a client, stopped or behind a cut network, would hold its rollout's fence until TCP gives up, after hours.
    """
    is_more = session.synchronous_commit == "remote_apply"
    settings = [f"SET synchronous_commit = {'remote_apply' if is_more else 'on'}"]
    if session.idle_timeout == "0":
        milliseconds = max(1, math.ceil(1000 * deadline))
        settings.append(f"SET idle_in_transaction_session_timeout = {milliseconds}")
    await connection.execute(";".join(settings))
