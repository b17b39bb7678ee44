"""The doors to the database. Nothing else in this library begins or commits a transaction.

`read` runs on a snapshot and cannot write. `write` first locks the fence of its rollout and keeps the lock until it has
committed. `write_together` lets concurrent calls of one kind share a transaction.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from weakref import WeakValueDictionary

from sqlalchemy import Connection

from tokencustody.database import registry, telemetry
from tokencustody.database.coalescing import MOST_CALLS, Coalesce, Gatherer
from tokencustody.database.engine import (
    DEFAULT_DEADLINE,
    DEFAULT_POOL_SIZE,
    Attempt,
    EngineKey,
    Engines,
    HeldError,
    Result,
    Work,
    forget_error,
)
from tokencustody.database.faults import Fault, classify, damage, reach, reach_beside, unavailable
from tokencustody.database.held import HeldEngines
from tokencustody.database.sqlite_files import gone
from tokencustody.database.url import DatabaseUrl
from tokencustody.errors import (
    InvalidRecordError,
    PayloadConflictError,
    TokenCaptureFrozenError,
)
from tokencustody.states import Isolation
from tokencustody.waits import waiting

if TYPE_CHECKING:
    from tokencustody.database.postgresql import PostgresqlEngines, Statement

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Thing = TypeVar("Thing")
Using = TypeVar("Using")
Made = TypeVar("Made")

_FIRST_PAUSE = 0.002
_LONGEST_PAUSE = 0.25
# More transactions at once than this gain nothing and make smaller batches.
_LANES = 2

# What is imported or made for the first time on the way of a call, a fork in another thread would leave locked in the
# child. So it is done when a store is made, and a fork waits for that.
_making = threading.RLock()
os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release)


@dataclass(frozen=True, eq=False)
class SharedWrite(Generic[Item, Answer]):
    """How calls of one kind share a transaction, whose answers are in the order of the items.

    On SQLite `transaction` runs several statements. On PostgreSQL `statement` is just one, which is a transaction by
    itself and takes one round trip; `answers` reads its rows. No rows: nothing was written. Without these two, calls
    share on SQLite only.
    """

    transaction: Callable[[Connection, Sequence[Item]], Sequence[Answer]]
    statement: Callable[[Sequence[Item]], Statement] | None = None
    answers: Callable[[Sequence[Item], Sequence[Any]], Sequence[Answer]] | None = None


class Database:
    """One store's way to its database: lazy, per process and event loop, bounded by a deadline in seconds.

    A transaction function may run several times, so it does nothing but read and write through its connection, and
    finding its own rows already there counts as success: that is how a commit whose answer was lost is settled.
    With `creates=False` a SQLite file that does not exist is an error instead of a new database; with `read_only`
    nothing is written at all, not even what the log of a SQLite file holds into that file.
    """

    def __init__(
        self,
        url: DatabaseUrl,
        *,
        deadline: float = DEFAULT_DEADLINE,
        pool_size: int = DEFAULT_POOL_SIZE,
        coalesce: str = Coalesce.PROCESS,
        isolation: str = Isolation.READ_COMMITTED,
        creates: bool = True,
        read_only: bool = False,
    ) -> None:
        if type(pool_size) is not int or pool_size < 1:
            raise InvalidRecordError(f"pool_size must be an integer of at least 1, not {pool_size!r}")
        if not isinstance(deadline, int | float) or not deadline > 0:
            raise InvalidRecordError(f"deadline must be a positive number of seconds, not {deadline!r}")
        if coalesce not in list(Coalesce):
            raise InvalidRecordError(f"coalesce must be one of {', '.join(Coalesce)}, not {coalesce!r}")
        if isolation not in list(Isolation):
            raise InvalidRecordError(f"isolation must be one of {', '.join(Isolation)}, not {isolation!r}")
        self.url = url
        self._creates = creates and not read_only
        with _making:
            telemetry.publish()
            registry.engines_class(url)
            self._make_ready()
        self._coalesce = Coalesce(coalesce)
        self._key = EngineKey(url, pool_size, deadline, read_only, Isolation(isolation))
        # The SQLite file that this store has used, in whatever loop or process.
        self._file: Hashable = None
        self._held = HeldEngines(self._key)

    def _make_ready(self) -> None:
        """Import or make what the first call would: see `_making`."""

    async def _find_tables(self, engines: Engines) -> None:
        """Find the tables there before the first transaction. Raises what a caller is to meet who has none."""

    @contextmanager
    def doors(self) -> Iterator[Doors]:
        """Open the doors for one call of a store, however many transactions it takes; `close` waits for it."""
        engines = self._held.take()
        with engines.in_use():
            try:
                yield Doors(self, engines)
            except PayloadConflictError:
                engines.stats["conflicts"] += 1
                raise
            except TokenCaptureFrozenError:
                engines.stats["late_writes_refused"] += 1
                raise

    async def read(self, work: Work[Result]) -> Result:
        """Run `work` on one consistent snapshot."""
        with self.doors() as doors:
            return await doors.read(work)

    async def write(self, work: Work[Result]) -> Result:
        """Run `work`, which begins by locking a fence, in one transaction; return once it is durable."""
        with self.doors() as doors:
            return await doors.write(work)

    def stats(self) -> dict[str, int]:
        """Return what was counted in this process by every store on this database: see `database.stats`."""
        return registry.stats_of(self.url)

    async def close(self) -> None:
        """Release this store's engines, in whichever running loop it was used. Idempotent."""
        await self._held.close()

    @property
    def gathers(self) -> bool:
        """Whether calls share transactions, or at least statements that are transactions by themselves."""
        if self.url.is_sqlite:
            return True
        return self._coalesce is not Coalesce.ROLLOUT and self._key.isolation is not Isolation.SERIALIZABLE

    def end_of_patience(self) -> float:
        """Return when, by the clock of the running loop, a call that begins now gives up."""
        return asyncio.get_running_loop().time() + self._key.deadline

    async def retrying(
        self,
        engines: Engines,
        transact: Callable[[Attempt[Using, Made]], Awaitable[Result]],
        work: Callable[[Using], Made],
        give_up: float,
    ) -> Result:
        """Run a transaction until it succeeds, fails for a reason that repeating cannot help, or time is up."""
        with waiting(self.url, give_up - asyncio.get_running_loop().time()) as wait:
            return await self._trying(engines, transact, wait.until(work), give_up)

    async def _trying(
        self,
        engines: Engines,
        transact: Callable[[Attempt[Using, Made]], Awaitable[Result]],
        work: Callable[[Using], Made],
        give_up: float,
    ) -> Result:
        loop = asyncio.get_running_loop()
        pause = _FIRST_PAUSE
        tries = 0
        unknown = 0
        cause: Exception | None = None
        while True:
            tries += 1
            attempt = Attempt(work)
            try:
                async with asyncio.timeout_at(give_up):
                    if not engines.checked:
                        await self._check_schema(engines, give_up)
                    if engines.file != self._file:
                        self._keep_to_file(engines)
                    result = await transact(attempt)
                    if attempt.committing:
                        await reach("after commit, before acknowledgement")
                engines.stats["transactions"] += 1
                engines.stats["unknown_commits_settled"] += unknown
                return result
            except Exception as exc:
                failure = classify(exc)
                if failure is None:
                    engines.stats["unknown_commits_settled"] += unknown
                    # Else it may come of connecting, or on SQLite of the check of the schema.
                    damaged = damage(self.url, exc) if attempt.started or self.url.is_sqlite else None
                    if damaged is not None:
                        raise damaged from exc
                    raise
                if attempt.committing and failure.fault is Fault.LOST:
                    engines.stats["unknown_commits"] += 1
                    unknown += 1
                # The deadline itself says less than the failure that was being retried when it passed.
                cause = cause if cause is not None and isinstance(exc, TimeoutError) else exc
                if failure.fault is Fault.UNAVAILABLE or loop.time() + pause >= give_up:
                    engines.stats["unavailable"] += 1
                    raise unavailable(
                        self.url, cause, tries=tries, started=attempt.started, unknown=bool(unknown)
                    ) from cause
                engines.stats["retries"] += 1
                engines.stats[f"retries_{failure.cause}"] += 1
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311 - jitter, not a secret
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _keep_to_file(self, engines: Engines) -> None:
        # What this store has written and read before is not in another file, which only a new store may use.
        if self._file is not None:
            raise gone(self.url)
        self._file = engines.file

    def gatherer(self, engines: Engines, write: SharedWrite[Item, Answer]) -> Gatherer[Item, Answer]:
        """Return the gatherer of one kind of calls, made now if need be."""
        gatherer = engines.kept.get((write, self._coalesce))
        if gatherer is None:
            lanes = 1 if self.url.is_sqlite else min(_LANES, self._key.pool_size)
            most = 1 if self._coalesce is Coalesce.OFF else MOST_CALLS
            gatherer = Gatherer(partial(self._write_shared, engines, write), lanes, most)
            engines.kept[write, self._coalesce] = gatherer
        found: Gatherer[Item, Answer] = gatherer
        return found

    async def _write_shared(
        self, engines: Engines, write: SharedWrite[Item, Answer], items: Sequence[Item], give_up: float
    ) -> Sequence[Answer]:
        engines.stats["shared_calls"] += len(items)
        engines.stats["shared_transactions"] += 1
        loop = asyncio.get_running_loop()

        def transaction(connection: Connection) -> Sequence[Answer]:
            answers = write.transaction(connection, items)
            if len(items) > 1:
                # On SQLite this is the writer's thread.
                loop.call_soon_threadsafe(reach_beside, "inside a coalesced batch")
            return answers

        if self.url.is_sqlite:
            return await self.retrying(engines, engines.write, transaction, give_up)
        make, read = write.statement, write.answers
        assert make is not None and read is not None  # noqa: S101, PT018 - else it is not written together

        def statement(_: None) -> Statement:
            if len(items) > 1:
                reach_beside("inside a coalesced batch")
            return make(items)

        try:
            rows = await self.retrying(
                engines, cast("PostgresqlEngines", engines).write_statement, statement, give_up
            )
        except HeldError:
            if len(items) > 1:
                raise  # so that each is tried alone
            rows = []
        return read(items, rows)

    async def _check_schema(self, engines: Engines, give_up: float) -> None:
        # In a task that outlives a caller who is cancelled: else callers with less patience than it takes would never
        # come to anything.
        check = engines.checking.get(self._creates)
        if check is None or check.done():
            check = asyncio.create_task(self._checked(engines, give_up))
            check.add_done_callback(forget_error)
            engines.checking[self._creates] = check
        await asyncio.shield(check)

    async def _checked(self, engines: Engines, give_up: float) -> None:
        async with asyncio.timeout_at(give_up):
            await self._find_tables(engines)
            registry.remember(self.url, await engines.identify())
            engines.checked = True


@dataclass(frozen=True, slots=True)
class Doors:
    """The doors as one call of a store uses them."""

    _database: Database
    _engines: Engines

    async def read(self, work: Work[Result]) -> Result:
        """Run `work` on one consistent snapshot."""
        return await self._database.retrying(
            self._engines, self._engines.read, work, self._database.end_of_patience()
        )

    async def write(self, work: Work[Result], *, rollout: Hashable = None) -> Result:
        """Run `work`, which begins by locking a fence, in one transaction; return once it is durable.

        Writes of the same `rollout`, unless that is None, take turns: each would wait for the other with a connection.
        """
        give_up = self._database.end_of_patience()
        async with self._turn(rollout, give_up):
            return await self._database.retrying(self._engines, self._engines.write, work, give_up)

    @property
    def gathers(self) -> bool:
        """Whether calls are to be written together; where not, each in a transaction on its rollout alone."""
        return self._database.gathers

    @property
    def is_sqlite(self) -> bool:
        """Whether calls that are written together share a transaction of any statements."""
        return self._database.url.is_sqlite

    async def write_together(self, write: SharedWrite[Item, Answer], item: Item, *, size: int) -> Answer:
        """Write `item`, of `size` bytes, with what else waits to be written; return its answer once that is durable."""
        gatherer = self._database.gatherer(self._engines, write)
        try:
            return await gatherer.submit(item, size=size, give_up=self._database.end_of_patience())
        except TimeoutError as exc:
            raise unavailable(self._database.url, exc, started=False) from exc

    @asynccontextmanager
    async def _turn(self, rollout: Hashable, give_up: float) -> AsyncIterator[None]:
        if rollout is None:
            yield
            return
        lock = self._turns.setdefault(rollout, asyncio.Lock())
        try:
            async with asyncio.timeout_at(give_up):
                await lock.acquire()
        except TimeoutError as exc:
            raise unavailable(self._database.url, exc, started=False) from exc
        try:
            yield
        finally:
            lock.release()

    def has_turn(self, rollout: Hashable) -> bool:
        """Return whether a `write` of this rollout is on its way, which no later call should overtake."""
        return rollout in self._turns

    @property
    def _turns(self) -> WeakValueDictionary[Hashable, asyncio.Lock]:
        turns: WeakValueDictionary[Hashable, asyncio.Lock] = self.kept(WeakValueDictionary)
        return turns

    async def reached(self) -> None:
        """Return once the database was reached in this process and loop."""
        if not self._engines.checked:
            await self.read(lambda _: None)

    def count(self, name: str, number: int = 1) -> None:
        """Add to one of the figures of `database.stats`."""
        self._engines.stats[name] += number

    def kept(self, make: Callable[[], Thing]) -> Thing:
        """Return the one thing of this kind that the stores on these engines share."""
        if make not in self._engines.kept:
            self._engines.kept[make] = make()
        thing: Thing = self._engines.kept[make]
        return thing
