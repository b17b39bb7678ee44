"""Turns that a session of PostgreSQL takes before its transaction begins, and gives back after its end.

Where all statements of a transaction show one snapshot, it must not be older than the lock of the rollout: what others
committed while that was waited for would be missing from it. Between transactions that are serializable the server
notices; a commit of another level would go unseen, as would the call that it had acknowledged.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from tokencustody.database.connecting import Driver
from tokencustody.database.url import DatabaseUrl
from tokencustody.errors import StoreUnavailableError

# A session that fell silent between its lock and its transaction would keep the lock until TCP gives up, after hours.
_TAKE = "SELECT pg_try_advisory_lock($1), set_config('idle_session_timeout', $2, false)"
_WAIT = "SELECT pg_advisory_lock($1) WHERE set_config('lock_timeout', $2, true) IS NOT NULL"
_GIVE_BACK = "SELECT pg_advisory_unlock_all(); RESET idle_session_timeout"


class Turns:
    """The advisory locks of one session, by their `numbers`."""

    def __init__(self, driver: Driver, patience: float) -> None:
        self._driver = driver
        self._patience = patience
        self.numbers: set[int] = set()
        # Whether the server was asked for any: it may have given one though its answer was lost.
        self._asked = False

    async def take(self, number: int) -> None:
        """Take an advisory lock exclusively. Waits for it as long as the transaction waits for its locks."""
        self._asked = True
        # By then this side has given the connection up, and waits for the lock on another one.
        idle = f"{max(1, math.ceil(1000 * self._driver.longest_silence))}ms"
        # A server that is there answers this at once, however long the lock is held.
        is_taken = await self._driver.fetchval(_TAKE, number, idle, timeout=self._driver.patience())
        self._driver.rested_since = None
        if not is_taken:
            await self._driver.fetchval(_WAIT, number, f"{round(1000 * self._patience)}ms")
        self.numbers.add(number)

    async def give_back(self) -> None:
        """Let go of all locks. Where the server does not answer, they end with the session, which is ended."""
        if not self._asked or self._driver.is_closed():
            return
        try:
            await self._driver.execute(_GIVE_BACK, timeout=self._driver.longest_silence)
        except Exception:
            # What was committed is so.
            self._driver.terminate()
        except BaseException:
            self._driver.terminate()
            raise


async def ensure_session(url: DatabaseUrl, driver: Driver) -> None:
    """Raise what tells, for a new connection, that its session cannot take turns, or no transaction be serializable."""
    if driver.behind_pooler:
        raise StoreUnavailableError(
            f"{url.display} is behind a pooler, where a store has no session of its own to keep a rollout's lock, as "
            'isolation="serializable" needs: name the server itself, or use isolation="read committed"'
        )
    if await driver.fetchval("SELECT pg_is_in_recovery()"):
        # Else it would be told that a standby does not support this, as if it would never be promoted.
        raise asyncpg.ReadOnlySQLTransactionError("no transaction of a standby is serializable")


@asynccontextmanager
async def turns_of(driver: Driver, patience: float) -> AsyncIterator[Turns]:
    """Yield the turns of a session; whatever it took, or may have taken, is given back. `patience` is in seconds."""
    turns = Turns(driver, patience)
    try:
        yield turns
    finally:
        await turns.give_back()
