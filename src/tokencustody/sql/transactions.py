"""The doors to the database. Nothing else in this library begins or commits a transaction.

`read` runs on a snapshot and cannot write. `write` is for a call's own rows. `exclusive` is for what changes a
rollout's verdict or the order of its ledger: it first locks the fence exclusively and then reads what the fence covers.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from tokencustody.errors import InvalidRecordError, StoreClosedError, StoreUnavailableError
from tokencustody.sql import engine as engines_module
from tokencustody.sql import migrate
from tokencustody.sql.engine import DEFAULT_DEADLINE, DEFAULT_POOL_SIZE, EngineKey, Engines
from tokencustody.sql.faults import Fault, classify, unavailable
from tokencustody.sql.url import DatabaseUrl

Result = TypeVar("Result")
Work = Callable[[AsyncConnection], Awaitable[Result]]

# Tests put faults here, by the name of the point: an awaitable function that raises, waits or kills the process.
FAULT_POINTS: dict[str, Callable[[], Awaitable[None]]] = {}

_FIRST_PAUSE = 0.002
_LONGEST_PAUSE = 0.25


class Database:
    """One store's way to its database: lazy, per process and event loop, bounded by a deadline in seconds.

    A transaction function may run several times, so it does nothing but read and write through its connection, and
    finding its own rows already there counts as success: that is how a commit whose answer was lost is settled.
    With `creates=False` a SQLite file that does not exist is an error instead of a new database.
    """

    def __init__(
        self,
        url: DatabaseUrl,
        *,
        deadline: float = DEFAULT_DEADLINE,
        pool_size: int = DEFAULT_POOL_SIZE,
        creates: bool = True,
    ) -> None:
        if type(pool_size) is not int or pool_size < 1:
            raise InvalidRecordError(f"pool_size must be an integer of at least 1, not {pool_size!r}")
        if not isinstance(deadline, int | float) or not deadline > 0:
            raise InvalidRecordError(f"deadline must be a positive number of seconds, not {deadline!r}")
        self.url = url
        self._creates = creates
        self._key = EngineKey(url, pool_size, deadline)
        self._held: dict[tuple[int, asyncio.AbstractEventLoop], Engines] = {}
        self._closed = False

    async def read(self, work: Work[Result]) -> Result:
        """Run `work` on one consistent snapshot."""
        return await self._run(work, engines_module.READ_ISOLATION, writes=False)

    async def write(self, work: Work[Result]) -> Result:
        """Run `work` in a serializable transaction and return once it is durable."""
        return await self._run(work, engines_module.WRITE_ISOLATION)

    async def exclusive(self, work: Work[Result]) -> Result:
        """Run `work`, which begins by locking a fence exclusively, and return once it is durable.

        On PostgreSQL at READ COMMITTED: a serializable snapshot is taken before the lock is granted, so it would miss
        the writer that committed while this transaction waited, or be aborted for it. With the fence locked, a
        snapshot per statement sees every call that the fence covers, and nobody can add one.
        """
        return await self._run(work, "READ COMMITTED")

    async def close(self) -> None:
        """Release this store's engines, in whichever running loop it was used. Idempotent."""
        self._closed = True
        held, self._held = self._held, {}
        for (pid, loop), engines in held.items():
            # What another process opened, or a loop that runs no more, is out of reach.
            if pid == os.getpid() and loop.is_running():
                releasing = engines_module.release(self._key, engines)
                if loop is asyncio.get_running_loop():
                    await releasing
                else:
                    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(releasing, loop))

    def _engines(self) -> Engines:
        if self._closed:
            raise StoreClosedError(f"the store on {self.url.display} is closed")
        here = (os.getpid(), asyncio.get_running_loop())
        if here not in self._held:
            self._held = {at: held for at, held in self._held.items() if not at[1].is_closed()}
            self._held[here] = engines_module.acquire(self._key)
        return self._held[here]

    async def _run(self, work: Work[Result], isolation: str, *, writes: bool = True) -> Result:
        engines = self._engines()
        with engines.in_use():
            return await self._retrying(engines, work, isolation, writes)

    async def _retrying(self, engines: Engines, work: Work[Result], isolation: str, writes: bool) -> Result:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._key.deadline
        pause = _FIRST_PAUSE
        tries = 0
        cause: Exception | None = None
        while True:
            tries += 1
            started = False
            try:
                async with asyncio.timeout_at(give_up):
                    await self._check_schema(engines)
                    async with self._transaction(engines, isolation, writes) as connection:
                        started = True
                        result = await work(connection)
                        await _reach("before commit")
                    await _reach("after commit, before acknowledgement")
                    return result
            except Exception as exc:
                fault = classify(exc)
                if fault is None:
                    raise
                # The deadline itself says less than the failure that was being retried when it passed.
                cause = cause if cause is not None and isinstance(exc, TimeoutError) else exc
                if fault is Fault.UNAVAILABLE or loop.time() + pause >= give_up:
                    raise unavailable(self.url, cause, tries=tries, started=started) from cause
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311 - jitter, not a secret
            pause = min(2 * pause, _LONGEST_PAUSE)

    @asynccontextmanager
    async def _transaction(
        self, engines: Engines, isolation: str, writes: bool
    ) -> AsyncIterator[AsyncConnection]:
        async with (engines.writer if writes else engines.reader).connect() as connection:
            if not self.url.is_sqlite:
                await connection.execution_options(isolation_level=isolation, postgresql_readonly=not writes)
            async with connection.begin():
                yield connection

    async def _check_schema(self, engines: Engines) -> None:
        if engines.checked:
            return
        async with engines.checking:
            if engines.checked:
                return
            if self.url.is_sqlite and await migrate.is_new_sqlite(self.url):
                if not self._creates:
                    raise StoreUnavailableError(f"{self.url.display} does not exist or has no tables")
                await migrate.create_sqlite(self.url)
            async with self._transaction(engines, engines_module.READ_ISOLATION, False) as connection:
                await migrate.ensure_current(connection, self.url.display)
            engines.checked = True


async def _reach(point: str) -> None:
    if (fault := FAULT_POINTS.get(point)) is not None:
        await fault()
