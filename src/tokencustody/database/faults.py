"""What a failure of the driver means, in one table for each database: start over, reconnect, give up, or damage."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from enum import Enum, StrEnum
from typing import NamedTuple

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from tokencustody.database.remedies import remedy
from tokencustody.database.tls import is_of_asyncpg, refusal
from tokencustody.database.url import DatabaseUrl
from tokencustody.errors import AccessDeniedError, CorruptEntryError, StoreUnavailableError

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
    DAMAGE = "what is stored, or the tables that hold it, are not what this library writes"
    OURS = "the statement is wrong, whatever is stored"


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
    INTERRUPTED = "interrupted"

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
    Cause.INTERRUPTED: "Tries after a statement was interrupted, or its plan was out of date.",
}


class Failure(NamedTuple):
    """What a failure means, and its cause where the transaction is tried again."""

    fault: Fault
    cause: Cause | None = None


_UNAVAILABLE = Failure(Fault.UNAVAILABLE)
_DAMAGE = Failure(Fault.DAMAGE)
_OURS = Failure(Fault.OURS)

# The longest matching prefix of a SQLSTATE decides. Every class of PostgreSQL is here; what another server makes up is
# taken for a refusal.
SQLSTATES = {
    "": _UNAVAILABLE,
    "01": _OURS,  # a warning
    "02": _OURS,
    "03": _OURS,
    "08": Failure(Fault.LOST, Cause.CONNECTION),
    "09": _UNAVAILABLE,  # somebody's trigger
    "0A": _UNAVAILABLE,  # not supported by this server
    "0B": _OURS,
    "0F": _OURS,
    "0L": _UNAVAILABLE,  # a grantor
    "0P": _UNAVAILABLE,  # no such role, as in the options of a URL
    "0Z": _OURS,
    "10": _OURS,
    "20": _OURS,
    "21": _OURS,
    "22": _OURS,  # values are checked before they are sent
    "22021": _UNAVAILABLE,  # a character that the database's encoding does not have
    "22023": _UNAVAILABLE,  # a value that a setting cannot have, as in the options of a URL
    "22P05": _UNAVAILABLE,  # a character that the database's encoding does not have
    "23": _DAMAGE,  # a constraint refuses what follows from the rows
    "24": _OURS,
    "25": _OURS,
    "25006": Failure(Fault.LOST, Cause.READ_ONLY),  # read-only transaction: a standby, as during a failover
    "25P03": Failure(Fault.LOST, Cause.SHUTDOWN),  # idle in transaction for longer than a deadline
    "25P04": Failure(Fault.LOST, Cause.SHUTDOWN),  # in one transaction for longer than a deadline
    "26": _UNAVAILABLE,  # no such prepared statement, as behind a pooler
    "27": _UNAVAILABLE,  # somebody's trigger
    "28": _UNAVAILABLE,  # wrong user or password
    "2B": _OURS,
    "2D": _OURS,
    "2F": _OURS,
    "34": _UNAVAILABLE,  # no such cursor, as behind a pooler
    "38": _UNAVAILABLE,  # somebody's function
    "39": _UNAVAILABLE,  # somebody's function or trigger
    "3B": _OURS,
    "3D": _UNAVAILABLE,  # no such database
    "3F": _UNAVAILABLE,  # no such schema, as in the options of a URL
    "40": Failure(Fault.RETRY, Cause.SERIALIZATION),
    "40001": Failure(Fault.RETRY, Cause.SERIALIZATION),  # also raised by COMMIT
    "40002": _DAMAGE,  # a constraint, asked at COMMIT
    "40003": Failure(Fault.LOST, Cause.CONNECTION),  # nobody knows whether it was committed
    "40P01": Failure(Fault.RETRY, Cause.DEADLOCK),
    "42": _OURS,
    "42501": _UNAVAILABLE,  # insufficient privilege
    "42703": _DAMAGE,  # no such column
    "42704": _UNAVAILABLE,  # no such setting, as for an unknown parameter of the URL
    "42804": _DAMAGE,  # a column of another type
    "42883": _DAMAGE,  # no such function
    "42P01": _DAMAGE,  # no such table
    "42P05": _UNAVAILABLE,  # a prepared statement of that name, as behind a pooler
    "44": _UNAVAILABLE,  # somebody's view
    "53": _UNAVAILABLE,  # out of disk, memory or configured limits
    "53300": Failure(Fault.LOST, Cause.TOO_MANY_CONNECTIONS),
    "54": _UNAVAILABLE,  # larger than the server is built for
    "55": _UNAVAILABLE,  # not in the state for this, or a setting that needs a restart
    "55006": Failure(Fault.RETRY, Cause.LOCK),  # in use by another session
    "55P03": Failure(Fault.RETRY, Cause.LOCK),
    "57": _UNAVAILABLE,  # 57014 is a statement timeout, or a cancel by an administrator
    "57P01": Failure(Fault.LOST, Cause.SHUTDOWN),  # admin shutdown
    "57P02": Failure(Fault.LOST, Cause.SHUTDOWN),  # crash shutdown
    "57P03": Failure(Fault.LOST, Cause.SHUTDOWN),  # cannot connect now: starting up or shutting down
    "57P04": _UNAVAILABLE,  # the database was dropped
    "57P05": Failure(Fault.LOST, Cause.SHUTDOWN),  # idle for longer than a deadline
    "58": _UNAVAILABLE,  # system error outside the database
    "72": Failure(Fault.RETRY, Cause.SERIALIZATION),  # the snapshot is too old
    "F0": _UNAVAILABLE,  # the server's configuration
    "HV": _UNAVAILABLE,  # a foreign table
    "P0": _UNAVAILABLE,  # somebody's function or trigger
    "XX": _UNAVAILABLE,  # an error inside the server
    "XX001": _DAMAGE,  # a damaged page
    "XX002": _DAMAGE,  # a damaged index
}

# An extended code that is not here means what its primary code means, which is its low byte.
SQLITE_CODES = {
    sqlite3.SQLITE_ERROR: _DAMAGE,  # no such table, column or function
    sqlite3.SQLITE_ERROR_RETRY: Failure(Fault.RETRY, Cause.INTERRUPTED),
    sqlite3.SQLITE_ERROR_SNAPSHOT: Failure(Fault.RETRY, Cause.LOCK),
    sqlite3.SQLITE_INTERNAL: _UNAVAILABLE,
    sqlite3.SQLITE_PERM: _UNAVAILABLE,
    sqlite3.SQLITE_ABORT: Failure(Fault.RETRY, Cause.INTERRUPTED),
    sqlite3.SQLITE_BUSY: Failure(Fault.RETRY, Cause.LOCK),
    sqlite3.SQLITE_LOCKED: Failure(Fault.RETRY, Cause.LOCK),
    sqlite3.SQLITE_NOMEM: _UNAVAILABLE,
    sqlite3.SQLITE_READONLY: _UNAVAILABLE,
    sqlite3.SQLITE_INTERRUPT: Failure(Fault.RETRY, Cause.INTERRUPTED),
    sqlite3.SQLITE_IOERR: _UNAVAILABLE,
    sqlite3.SQLITE_IOERR_DATA: _DAMAGE,
    sqlite3.SQLITE_IOERR_CORRUPTFS: _DAMAGE,
    sqlite3.SQLITE_CORRUPT: _DAMAGE,
    sqlite3.SQLITE_NOTFOUND: _OURS,
    sqlite3.SQLITE_FULL: _UNAVAILABLE,
    sqlite3.SQLITE_CANTOPEN: _UNAVAILABLE,
    # Locks of the log's index that stay taken: a race that is lost many times, or a file system without true locks.
    sqlite3.SQLITE_PROTOCOL: Failure(Fault.RETRY, Cause.LOCK),
    sqlite3.SQLITE_EMPTY: _OURS,  # never returned
    sqlite3.SQLITE_SCHEMA: Failure(Fault.RETRY, Cause.INTERRUPTED),
    sqlite3.SQLITE_TOOBIG: _UNAVAILABLE,
    sqlite3.SQLITE_CONSTRAINT: _DAMAGE,  # a constraint refuses what follows from the rows
    sqlite3.SQLITE_CONSTRAINT_TRIGGER: _UNAVAILABLE,  # somebody's trigger
    sqlite3.SQLITE_MISMATCH: _DAMAGE,
    sqlite3.SQLITE_MISUSE: _OURS,
    sqlite3.SQLITE_NOLFS: _UNAVAILABLE,  # larger than the file system can hold
    sqlite3.SQLITE_AUTH: _UNAVAILABLE,
    sqlite3.SQLITE_FORMAT: _OURS,  # never returned
    sqlite3.SQLITE_RANGE: _OURS,
    sqlite3.SQLITE_NOTADB: _UNAVAILABLE,  # most often the path of something else
    sqlite3.SQLITE_NOTICE: _OURS,
    sqlite3.SQLITE_WARNING: _OURS,
}


def classify(exc: BaseException) -> Failure | None:
    """Return what `exc` means for the transaction it ended, or None when trying, connecting or waiting is no answer."""
    if isinstance(exc, StoreUnavailableError):
        return None
    # Connecting raises the driver's error bare; SQLAlchemy wraps those of statements, asyncpg's twice.
    cause: BaseException | None = exc.orig if isinstance(exc, DBAPIError) else exc
    if cause is not None and refusal(cause) is not None:
        return _UNAVAILABLE
    failure = meaning(cause)
    if failure is not None:
        return None if failure in (_DAMAGE, _OURS) else failure
    if isinstance(cause, PermissionError):
        return _UNAVAILABLE  # a socket or a certificate of somebody else
    if isinstance(cause, TimeoutError | PoolTimeoutError):
        return Failure(Fault.LOST, Cause.TIMEOUT)
    is_invalidated = isinstance(exc, DBAPIError) and exc.connection_invalidated
    if isinstance(cause, OSError) or is_invalidated or is_at_its_end(cause):
        return Failure(Fault.LOST, Cause.CONNECTION)
    return None


def meaning(cause: BaseException | None) -> Failure | None:
    """Return what the tables say of a driver's error, or None when it has no code."""
    sqlstate = getattr(cause, "sqlstate", None)
    if isinstance(sqlstate, str):
        if _is_outdated(cause):
            return Failure(Fault.RETRY, Cause.INTERRUPTED)
        return next(
            SQLSTATES[sqlstate[:length]] for length in range(5, -1, -1) if sqlstate[:length] in SQLSTATES
        )
    code = getattr(cause, "sqlite_errorcode", None)
    if isinstance(code, int):
        return SQLITE_CODES.get(code) or SQLITE_CODES.get(code & 0xFF, _UNAVAILABLE)
    return None


def _is_outdated(cause: BaseException | None) -> bool:
    # The tables were altered since it was prepared. Its SQLSTATE is that of what the server does not support.
    while cause is not None and not is_of_asyncpg(cause, "InvalidCachedStatementError"):
        cause = cause.__cause__
    return cause is not None


def is_at_its_end(exc: BaseException | None) -> bool:
    """Return whether asyncpg says, itself or by SQLAlchemy, that the connection can be used no more.

    It is closed, or it has got, while it lay idle, what a pooler or a server says before closing it.
    """
    while exc is not None and not is_of_asyncpg(exc, "InterfaceError", "InternalClientError"):
        exc = exc.__cause__
    # A wrong argument is an InterfaceError too.
    return exc is not None and (is_of_asyncpg(exc, "InternalClientError") or " is closed" in str(exc))


def is_held(exc: BaseException) -> bool:
    """Return whether PostgreSQL ended the statement because another transaction keeps what it would lock."""
    cause = exc.orig if isinstance(exc, DBAPIError) else exc
    return getattr(cause, "sqlstate", None) == "55P03"


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
        return AccessDeniedError(f"{url.display} denies this to its user: {said}")
    error = StoreUnavailableError(
        f"{url.display} is not available{after}: {type(cause).__name__}: {said}{remedy(url, cause)}{hint}"
    )
    failure = classify(exc)
    error.is_refusal = started and failure is not None and failure.fault is Fault.UNAVAILABLE
    return error


def damage(url: DatabaseUrl, exc: BaseException) -> CorruptEntryError | None:
    """Return the error for what a transaction could not make sense of, though its arguments had been checked before.

    It does not repeat what `exc` says, which may quote values. Errors of this library are not meant.
    """
    cause = exc.orig if isinstance(exc, DBAPIError) else exc
    failure = meaning(cause)
    if failure is not None:
        is_damage = failure.fault is Fault.DAMAGE
    elif isinstance(exc, DBAPIError | sqlite3.Error):
        # What the driver could not read has no code, like text that is not UTF-8.
        is_damage = isinstance(cause, sqlite3.OperationalError | sqlite3.DataError)
    else:
        is_damage = isinstance(exc, ValueError | TypeError | LookupError) and not is_ours(exc)
    if not is_damage:
        return None
    kind = type(cause).__name__
    return CorruptEntryError(
        f"{url.display} holds what this library does not write ({kind}): `tokencustody db check --url {url.display}` "
        "tells what is wrong with its tables; if they are right, restore it from a backup"
    )


def is_ours(exc: BaseException) -> bool:
    """Return whether `exc` is an error of this library, which shows no token data."""
    return type(exc).__module__ == CorruptEntryError.__module__


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
