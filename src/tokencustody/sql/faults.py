"""What a failure of the driver means, in one table: start over, reconnect, or give up."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from enum import Enum

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from tokencustody.errors import StoreUnavailableError
from tokencustody.sql.url import DatabaseUrl

# Tests put faults here, by the name of the point: an awaitable function that raises, waits or kills the process.
FAULT_POINTS: dict[str, Callable[[], Awaitable[None]]] = {}


class Fault(Enum):
    """How a transaction failed."""

    RETRY = "nothing happened; run the transaction again from its start"
    LOST = "the connection is gone and a commit may have happened; look again on a fresh connection"
    UNAVAILABLE = "the database refuses, and asking again will not help"


# The longest matching prefix of a SQLSTATE decides.
SQLSTATES = {
    "40001": Fault.RETRY,  # serialization failure, also raised by COMMIT
    "40P01": Fault.RETRY,  # deadlock detected
    "55P03": Fault.RETRY,  # lock not available
    "08": Fault.LOST,  # connection exceptions
    "57P01": Fault.LOST,  # admin shutdown
    "57P02": Fault.LOST,  # crash shutdown
    "57P03": Fault.LOST,  # cannot connect now: starting up or shutting down
    "25006": Fault.LOST,  # read-only transaction: a standby, as during a failover
    "53300": Fault.LOST,  # too many connections
    "53": Fault.UNAVAILABLE,  # out of disk, memory or configured limits
    "58": Fault.UNAVAILABLE,  # system error outside the database
    "28": Fault.UNAVAILABLE,  # wrong user or password
    "3D000": Fault.UNAVAILABLE,  # no such database
    "42501": Fault.UNAVAILABLE,  # insufficient privilege
    "42704": Fault.UNAVAILABLE,  # no such setting, as for an unknown parameter of the URL
    "57014": Fault.UNAVAILABLE,  # statement timeout or cancel by an administrator
}

SQLITE_CODES = {
    sqlite3.SQLITE_BUSY: Fault.RETRY,
    sqlite3.SQLITE_LOCKED: Fault.RETRY,
    sqlite3.SQLITE_PERM: Fault.UNAVAILABLE,
    sqlite3.SQLITE_READONLY: Fault.UNAVAILABLE,
    sqlite3.SQLITE_IOERR: Fault.UNAVAILABLE,
    sqlite3.SQLITE_CORRUPT: Fault.UNAVAILABLE,
    sqlite3.SQLITE_FULL: Fault.UNAVAILABLE,
    sqlite3.SQLITE_CANTOPEN: Fault.UNAVAILABLE,
    sqlite3.SQLITE_NOTADB: Fault.UNAVAILABLE,
}


def classify(exc: BaseException) -> Fault | None:
    """Return what `exc` means for the transaction it ended, or None when it is no fault of the database."""
    if isinstance(exc, StoreUnavailableError):
        return None
    # Connecting raises the driver's error bare; SQLAlchemy wraps those of statements, asyncpg's twice.
    cause: BaseException | None = exc.orig if isinstance(exc, DBAPIError) else exc
    sqlstate = getattr(cause, "sqlstate", None)
    if isinstance(sqlstate, str):
        for length in range(5, 1, -1):
            if (fault := SQLSTATES.get(sqlstate[:length])) is not None:
                return fault
    code = getattr(cause, "sqlite_errorcode", None)
    if isinstance(code, int):
        return SQLITE_CODES.get(code & 0xFF)  # the low byte is the primary code, BUSY for BUSY_SNAPSHOT
    if isinstance(exc, DBAPIError) and exc.connection_invalidated:
        return Fault.LOST
    if isinstance(cause, OSError | TimeoutError | PoolTimeoutError):
        return Fault.LOST
    return None


def unavailable(
    url: DatabaseUrl, exc: BaseException, *, tries: int = 1, started: bool = True
) -> StoreUnavailableError:
    """Return the error for a database that could not be used, naming host, port and database, never the password.

    `started` tells whether the last try had got a connection.
    """
    after = f" after {tries} tries" if tries > 1 else ""
    if isinstance(exc, TimeoutError):
        waited = "no answer" if started else "no connection: the server does not answer or the pool is busy"
        return StoreUnavailableError(f"{url.display} is not available{after}: {waited} before the deadline")
    # The wrapped error's own text repeats the statement and its parameters, which hold token data.
    wrapped = getattr(exc, "orig", None) or exc
    cause = wrapped.__cause__ or wrapped
    said = (str(cause).strip().splitlines() or [""])[0]
    return StoreUnavailableError(f"{url.display} is not available{after}: {type(cause).__name__}: {said}")


async def reach(point: str) -> None:
    """Let the fault that stands at `point`, if any, happen."""
    if (fault := FAULT_POINTS.get(point)) is not None:
        await fault()


def reach_from_thread(point: str, loop: asyncio.AbstractEventLoop) -> None:
    """Let the fault at `point` happen in `loop`, and wait for it."""
    if point in FAULT_POINTS:
        asyncio.run_coroutine_threadsafe(reach(point), loop).result()
