"""What a failure of the driver means, in one table: start over, reconnect, or give up."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from enum import Enum, StrEnum
from typing import NamedTuple

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from tokencustody.errors import AccessDeniedError, CorruptEntryError, StoreUnavailableError
from tokencustody.sql.tls import refusal
from tokencustody.sql.url import DatabaseUrl

# Tests and campaigns put faults here, by the name of the point: an awaitable function that raises, waits or kills the
# process. The points are "before commit", "after commit, before acknowledgement" and, beside a transaction of several
# calls that is running, "inside a coalesced batch".
FAULT_POINTS: dict[str, Callable[[], Awaitable[None]]] = {}
_running: set[asyncio.Future[None]] = set()


class Fault(Enum):
    """How a transaction failed."""

    RETRY = "nothing happened; run the transaction again from its start"
    LOST = "the connection is gone and a commit may have happened; look again on a fresh connection"
    UNAVAILABLE = "the database refuses, and asking again will not help"


class Cause(StrEnum):
    """Why a transaction is tried again."""

    SERIALIZATION = "serialization"
    DEADLOCK = "deadlock"
    LOCK = "lock"
    CONNECTION = "connection"
    SHUTDOWN = "shutdown"
    READ_ONLY = "read_only"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    TIMEOUT = "timeout"

    @property
    def text(self) -> str:
        """A sentence for people."""
        return _CAUSES[self]


_CAUSES = {
    Cause.SERIALIZATION: "Tries after a serialization failure.",
    Cause.DEADLOCK: "Tries after a deadlock.",
    Cause.LOCK: "Tries after a lock, of a row or of the SQLite file, was not to be had.",
    Cause.CONNECTION: "Tries after a connection was refused or lost.",
    Cause.SHUTDOWN: "Tries after the server shut down, was starting up or ended the session.",
    Cause.READ_ONLY: "Tries after the server was found to be read-only, as during a failover.",
    Cause.TOO_MANY_CONNECTIONS: "Tries after the server had no connection left.",
    Cause.TIMEOUT: "Tries after a time-out of the driver or the pool.",
}


class Failure(NamedTuple):
    """What a failure means, and its cause where the transaction is tried again."""

    fault: Fault
    cause: Cause | None = None


_UNAVAILABLE = Failure(Fault.UNAVAILABLE)

# The longest matching prefix of a SQLSTATE decides.
SQLSTATES = {
    "40001": Failure(Fault.RETRY, Cause.SERIALIZATION),  # also raised by COMMIT
    "40P01": Failure(Fault.RETRY, Cause.DEADLOCK),
    "55P03": Failure(Fault.RETRY, Cause.LOCK),
    "08": Failure(Fault.LOST, Cause.CONNECTION),
    "57P01": Failure(Fault.LOST, Cause.SHUTDOWN),  # admin shutdown
    "57P02": Failure(Fault.LOST, Cause.SHUTDOWN),  # crash shutdown
    "57P03": Failure(Fault.LOST, Cause.SHUTDOWN),  # cannot connect now: starting up or shutting down
    "25P03": Failure(Fault.LOST, Cause.SHUTDOWN),  # idle in transaction for longer than a deadline
    "25006": Failure(Fault.LOST, Cause.READ_ONLY),  # read-only transaction: a standby, as during a failover
    "53300": Failure(Fault.LOST, Cause.TOO_MANY_CONNECTIONS),
    "53": _UNAVAILABLE,  # out of disk, memory or configured limits
    "58": _UNAVAILABLE,  # system error outside the database
    "XX001": _UNAVAILABLE,  # a damaged page
    "XX002": _UNAVAILABLE,  # a damaged index
    "28": _UNAVAILABLE,  # wrong user or password
    "3D000": _UNAVAILABLE,  # no such database
    "42501": _UNAVAILABLE,  # insufficient privilege
    "42704": _UNAVAILABLE,  # no such setting, as for an unknown parameter of the URL
    "26000": _UNAVAILABLE,  # no such prepared statement, as behind a pooler
    "42P05": _UNAVAILABLE,  # a prepared statement of that name, as behind a pooler
    "57014": _UNAVAILABLE,  # statement timeout or cancel by an administrator
}

SQLITE_CODES = {
    sqlite3.SQLITE_BUSY: Failure(Fault.RETRY, Cause.LOCK),
    sqlite3.SQLITE_LOCKED: Failure(Fault.RETRY, Cause.LOCK),
    sqlite3.SQLITE_PERM: _UNAVAILABLE,
    sqlite3.SQLITE_READONLY: _UNAVAILABLE,
    sqlite3.SQLITE_IOERR: _UNAVAILABLE,
    sqlite3.SQLITE_CORRUPT: _UNAVAILABLE,
    sqlite3.SQLITE_FULL: _UNAVAILABLE,
    sqlite3.SQLITE_CANTOPEN: _UNAVAILABLE,
    sqlite3.SQLITE_NOTADB: _UNAVAILABLE,
}


def classify(exc: BaseException) -> Failure | None:
    """Return what `exc` means for the transaction it ended, or None when it is no fault of the database."""
    if isinstance(exc, StoreUnavailableError):
        return None
    # Connecting raises the driver's error bare; SQLAlchemy wraps those of statements, asyncpg's twice.
    cause: BaseException | None = exc.orig if isinstance(exc, DBAPIError) else exc
    if cause is not None and refusal(cause) is not None:
        return _UNAVAILABLE
    sqlstate = getattr(cause, "sqlstate", None)
    if isinstance(sqlstate, str):
        for length in range(5, 1, -1):
            if (failure := SQLSTATES.get(sqlstate[:length])) is not None:
                return failure
    code = getattr(cause, "sqlite_errorcode", None)
    if isinstance(code, int):
        return SQLITE_CODES.get(code & 0xFF)  # the low byte is the primary code, BUSY for BUSY_SNAPSHOT
    if isinstance(cause, PermissionError):
        return _UNAVAILABLE  # a socket or a certificate of somebody else
    if isinstance(cause, TimeoutError | PoolTimeoutError):
        return Failure(Fault.LOST, Cause.TIMEOUT)
    if isinstance(cause, OSError) or (isinstance(exc, DBAPIError) and exc.connection_invalidated):
        return Failure(Fault.LOST, Cause.CONNECTION)
    return None


def unavailable(
    url: DatabaseUrl, exc: BaseException, *, tries: int = 1, started: bool = True, unknown: bool = False
) -> StoreUnavailableError:
    """Return the error for a database that could not be used, naming host, port and database, never the password.

    `started` tells whether the last try had got a connection; `unknown`, whether a try may have been committed.
    """
    after = f" after {tries} tries" if tries > 1 else ""
    hint = "; a commit may have happened, so repeat the call, which stores nothing twice" if unknown else ""
    if isinstance(exc, TimeoutError):
        busy = (
            "no turn: the file is locked, or other calls come first"
            if url.is_sqlite
            else "no connection: the server does not answer or the pool is busy"
        )
        waited = "no answer" if started else busy
        return StoreUnavailableError(
            f"{url.display} is not available{after}: {waited} before the deadline{hint}"
        )
    # The wrapped error's own text repeats the statement and its parameters, which hold token data.
    wrapped = getattr(exc, "orig", None) or exc
    cause = refusal(wrapped) or wrapped.__cause__ or wrapped
    said = (str(cause).strip().splitlines() or [""])[0]
    if getattr(cause, "sqlstate", None) == "42501":
        return AccessDeniedError(
            f"{url.display} denies this to its user: {said}; a worker writes and resolves within the runs it was "
            "granted, a trainer freezes, reads and retires, an auditor reads all but token data, the owner deletes: "
            "see `tokencustody db roles`"
        )
    if getattr(cause, "sqlstate", None) in ("26000", "42P05"):
        said += "; add statement_cache_size=0 to the URL, for a pooler in transaction mode keeps no prepared statements"
    return StoreUnavailableError(
        f"{url.display} is not available{after}: {type(cause).__name__}: {said}{hint}"
    )


# A violated constraint; a table, a column or a function that is not there.
_DAMAGE = ("23", "42P01", "42703", "42883")


def damage(url: DatabaseUrl, exc: BaseException) -> CorruptEntryError | None:
    """Return the error for what a transaction could not make sense of, though its arguments had been checked before.

    It does not repeat what `exc` says, which may quote values. Errors of this library are not meant, and of those of
    PostgreSQL only a missing table, column or function, or a constraint that refused what follows from the rows.
    """
    is_ours = type(exc).__module__ == CorruptEntryError.__module__
    is_nonsense = isinstance(exc, ValueError | TypeError | LookupError) and not is_ours
    cause = exc.orig if isinstance(exc, DBAPIError) else exc
    if url.is_sqlite and isinstance(exc, DBAPIError | sqlite3.Error):
        is_nonsense = True
    if not is_nonsense and not str(getattr(cause, "sqlstate", "")).startswith(_DAMAGE):
        return None
    kind = type(cause).__name__
    return CorruptEntryError(
        f"{url.display} holds what this library does not write ({kind}): `tokencustody db check --url {url.display}` "
        "tells what is wrong with its tables; if they are right, restore it from a backup"
    )


async def reach(point: str) -> None:
    """Let the fault that stands at `point`, if any, happen."""
    if (fault := FAULT_POINTS.get(point)) is not None:
        await fault()


def reach_from_thread(point: str, loop: asyncio.AbstractEventLoop) -> None:
    """Let the fault at `point` happen in `loop`, and wait for it."""
    if point in FAULT_POINTS:
        asyncio.run_coroutine_threadsafe(reach(point), loop).result()


def reach_beside(point: str) -> None:
    """Let the fault at `point` happen while the caller waits for the database."""
    if (fault := FAULT_POINTS.get(point)) is not None:
        reached = asyncio.ensure_future(fault())
        _running.add(reached)
        reached.add_done_callback(_running.discard)
