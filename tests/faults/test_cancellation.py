"""A call that is cancelled, wherever it waits: whole or absent, nothing left open, and the store goes on.

Each call is stepped by hand: it is cancelled when it waits for the n-th time, for n = 1, 2, … until it ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.entries import REQUEST, continuation, make_entry
from tests.support.ledger import make_commit
from tests.support.staged import stage
from tokencustody import CaptureStore, SqlStagingStore, TokenCaptureRetiredError, open_store
from tokencustody.database.coalescing import Coalesce
from tokencustody.database.faults import FAULT_POINTS
from tokencustody.database.registry import open_engines
from tokencustody.database.url import parse_url
from tokencustody.errors import PayloadConflictError
from tokencustody.schema import migrate, tables
from tokencustody.staging.records import StageResult

Points = dict[str, Callable[[], Awaitable[None]]]

ROLLOUTS = ("rollout-1", "rollout-2")
# No call here takes more than milliseconds: what is left behind locked shows as an error soon.
DEADLINE = 10.0


@pytest.fixture
def faults() -> Iterator[Points]:
    """The table of fault points, empty again afterwards."""
    yield FAULT_POINTS
    FAULT_POINTS.clear()


# Stepping.


class Stepped:
    """Awaits a coroutine, and calls `at` when it waits for the n-th time."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], nth: int, at: Callable[[], object]) -> None:
        self.coroutine = coroutine
        self.nth = nth
        self.at = at
        self.waits = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[Any], Any] = self.coroutine.send
        value: Any = None
        while True:
            try:
                waited_for = step(value)
            except StopIteration as ended:
                return ended.value
            self.waits += 1
            if self.waits == self.nth:
                self.at()
            try:
                step, value = self.coroutine.send, (yield waited_for)
            except BaseException as exc:
                step, value = self.coroutine.throw, exc


def after_turns(turns: int, call: Callable[[], object]) -> None:
    """Call when the running loop has turned so many times."""
    loop = asyncio.get_running_loop()
    if turns:
        loop.call_soon(after_turns, turns - 1, call)
    else:
        loop.call_soon(call)


async def cancelled_at(
    coroutine: Coroutine[Any, Any, object], nth: int, turns: int = 0, again: int | None = None
) -> bool:
    """Run a coroutine and cancel it some turns after it waits for the n-th time; return whether it was cancelled.

    `again` cancels it once more, so many turns later.
    """
    delivered = False

    def cancel() -> None:
        nonlocal delivered
        delivered = task.cancel() or delivered
        if again is not None:
            after_turns(again, task.cancel)

    async def stepped() -> object:
        return await Stepped(coroutine, nth, lambda: after_turns(turns, cancel))

    task = asyncio.create_task(stepped())
    await asyncio.wait([task])
    if not task.cancelled():
        assert not delivered, "the cancellation was swallowed"
        with contextlib.suppress(PayloadConflictError):
            task.result()
    return delivered


# Looking from outside.

Rows = dict[str, list[tuple[Any, ...]]]
COLUMNS = {
    table.name: [
        column.name
        for column in table.c
        if not column.name.endswith("_at")
        and column.name not in ("event_id", "snapshot_id", "row_sha256", "sealed_sha256")
    ]
    for table in tables.metadata.sorted_tables
    if "rollout_id" in table.c
}


class Watcher:
    """A connection of the test's own."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def __aenter__(self) -> Watcher:
        if self.url.startswith("sqlite"):
            self.file = sqlite3.connect(parse_url(self.url).dsn, timeout=0, isolation_level=None)
        else:
            self.server = await asyncpg.connect(self.url)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.url.startswith("sqlite"):
            self.file.close()
        else:
            await self.server.close()

    async def fetch(self, sql: str) -> list[tuple[Any, ...]]:
        if self.url.startswith("sqlite"):
            return self.file.execute(sql).fetchall()
        return [tuple(row) for row in await self.server.fetch(sql)]

    async def empty(self) -> None:
        """Delete every row of the rollouts in one transaction."""
        script = ";".join(["BEGIN", *(f"DELETE FROM {name}" for name in reversed(COLUMNS)), "COMMIT"])
        if self.url.startswith("sqlite"):
            self.file.executescript(script)
        else:
            await self.server.execute(script)

    async def nothing_is_open(self) -> None:
        """Fail when a connection is in use or a transaction goes on that nobody runs."""
        for engines in open_engines():
            # What was begun goes on for the next caller.
            checks = [check for check in engines.checking.values() if not check.done()]
            await asyncio.gather(*checks, return_exceptions=True)
            assert engines.running == engines.checked_out() == 0
        if self.url.startswith("sqlite"):
            self.file.execute("BEGIN IMMEDIATE")
            self.file.execute("ROLLBACK")
            return
        # The server may take a moment to see that the client of a session is gone.
        async with asyncio.timeout(DEADLINE):
            while busy := await self.fetch(
                "SELECT state, query FROM pg_stat_activity WHERE datname = current_database()"
                " AND pid <> pg_backend_pid() AND backend_type = 'client backend' AND state <> 'idle'"
            ):
                assert busy

    async def rows(self) -> Rows:
        """Return what the tables hold of the rollouts, without moments, ids and hashes, which differ each time.

        Fails when a row stands without those that are written with it.
        """
        held = {
            table: sorted(await self.fetch(f"SELECT {', '.join(names)} FROM {table}"), key=repr)
            for table, names in COLUMNS.items()
        }
        fences = {fence[1]: fence[COLUMNS["fences"].index("version")] for fence in held["fences"]}
        versions = {(row[1], row[2]) for row in held["snapshot_versions"]}
        expected = {(rollout, version) for rollout, last in fences.items() for version in range(last + 1)}
        assert versions == expected
        for table, rows in held.items():
            assert table.startswith("staged_") or {row[1] for row in rows} <= set(fences), table
        return held


# The calls.


@dataclass(frozen=True)
class Case:
    """A call, what is there before it, and the calls that are made at the same time."""

    operation: Callable[[CaptureStore], Coroutine[Any, Any, object]]
    before: Callable[[CaptureStore], Coroutine[Any, Any, object]] | None = None
    beside: Callable[[CaptureStore], list[Coroutine[Any, Any, object]]] = lambda _: []


def call(number: int, rollout: str = "rollout-1", **fields: Any) -> Any:
    return make_entry(rollout, f"call-{number}", **fields)


def others(store: CaptureStore) -> list[Coroutine[Any, Any, object]]:
    return [store.sink.put(call(number)) for number in range(10, 15)]


CHILD = call(
    2,
    prompt=[10, 11, 12, 13, 30, 31, 32, 5],
    parent="call-1",
    request=continuation(REQUEST, "Paris.", "And?"),
)
CONTINUED = [*REQUEST, {"role": "assistant", "content": "Paris."}]


async def put_one(store: CaptureStore) -> None:
    await store.sink.put(call(1))


async def one_of_each(store: CaptureStore) -> None:
    for rollout in ROLLOUTS:
        await store.sink.put(call(1, rollout))
    await store.lineage.record(make_commit())


async def frozen(store: CaptureStore) -> None:
    await one_of_each(store)
    await store.source.freeze("rollout-1")


async def freeze_and_drop(store: CaptureStore) -> None:
    # A frozen rollout gives the same snapshot again.
    snapshot = await store.source.freeze("rollout-1")
    assert await store.source.drop("rollout-1", snapshot.snapshot_id, snapshot.version)


EXPORTED = [
    {"rollout_id": "rollout-1", "model_call_id": f"call-{number}", "reason": "lost"} for number in range(3)
]

CASES = {
    "put": Case(lambda s: s.sink.put(call(1))),
    "put of a child": Case(lambda s: s.sink.put(CHILD), put_one),
    "put in a batch": Case(lambda s: s.sink.put(call(1)), put_one, others),
    "put in a batch of new calls": Case(lambda s: s.sink.put(call(2)), put_one, others),
    "conflicting put": Case(lambda s: s.sink.put(call(1, model="other")), put_one),
    "conflicting put in a batch": Case(lambda s: s.sink.put(call(1, model="other")), put_one, others),
    "conflicting put beside others": Case(
        lambda s: s.sink.put(call(1, model="other")),
        put_one,
        lambda s: [s.sink.put(call(1, model="other")) for _ in range(2)],
    ),
    "begin_call": Case(lambda s: s.sink.begin_call("rollout-1", "call-3")),
    "refuse_call": Case(lambda s: s.sink.refuse_call("rollout-1", model_call_id="call-4", code="busy")),
    "mark_incomplete": Case(lambda s: s.sink.mark_incomplete("rollout-1")),
    "freeze": Case(lambda s: s.source.freeze("rollout-1"), one_of_each),
    "freeze and drop": Case(freeze_and_drop, frozen),
    "retire": Case(lambda s: s.source.retire(["rollout-1"]), one_of_each),
    "delete": Case(lambda s: s.source.delete(["rollout-1"]), one_of_each),
    "resolve": Case(lambda s: s.lineage.resolve("rollout-1", CONTINUED), one_of_each),
    "record": Case(lambda s: s.lineage.record(make_commit()), put_one),
    "record_failure": Case(lambda s: s.lineage.record_failure("rollout-1", "call-1", "lost")),
    "manifest": Case(lambda s: s.lineage.manifest("rollout-1"), one_of_each),
    "has_rows": Case(lambda s: s.lineage.has_rows("rollout-1"), one_of_each),
    "export_rows": Case(lambda s: s.lineage.export_rows("rollout-1"), one_of_each),
    "import_rows": Case(lambda s: s.lineage.import_rows("rollout-1", EXPORTED), put_one),
}


class Bench:
    """Stores of each mode on one database, and what each case changes when nothing disturbs it."""

    def __init__(self, url: str, watcher: Watcher) -> None:
        self.watcher = watcher
        self.stores = {
            mode: open_store(url, coalesce=mode, writer="test-writer", deadline=DEADLINE) for mode in Coalesce
        }
        self.effects: dict[str, list[Rows]] = {}
        self.cancelled = 0

    async def close(self) -> None:
        for store in self.stores.values():
            await store.close()

    async def begin(self, name: str, store: CaptureStore) -> list[asyncio.Task[object]]:
        case = CASES[name]
        await self.watcher.empty()
        if case.before is not None:
            await case.before(store)
        return [asyncio.create_task(_as_task(other)) for other in case.beside(store)]

    async def effect(self, name: str) -> list[Rows]:
        """Return the rows without the call and with it."""
        if name not in self.effects:
            store = self.stores[Coalesce.PROCESS]
            await asyncio.gather(*await self.begin(name, store))
            without = await self.watcher.rows()
            with contextlib.suppress(PayloadConflictError):
                await CASES[name].operation(store)
            self.effects[name] = [without, await self.watcher.rows()]
        return self.effects[name]

    async def try_at(
        self, name: str, mode: Coalesce, nth: int, turns: int = 0, again: int | None = None, slow: int = 0
    ) -> bool:
        """Run a case that is cancelled, and check everything; return whether it was cancelled.

        Each commit waits for `slow` turns of the loop.
        """
        effect = await self.effect(name)
        store = self.stores[mode]
        beside = await self.begin(name, store)
        if beside:
            await asyncio.sleep(0)
        FAULT_POINTS["before commit"] = partial(_turn, slow)
        try:
            was_cancelled = await cancelled_at(CASES[name].operation(store), nth, turns, again)
        finally:
            FAULT_POINTS.clear()
        self.cancelled += was_cancelled
        await asyncio.gather(*beside)
        await self.watcher.nothing_is_open()
        assert await self.watcher.rows() in effect
        with contextlib.suppress(PayloadConflictError, TokenCaptureRetiredError):
            await CASES[name].operation(store)
        await self.watcher.rows()
        return was_cancelled


async def _turn(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


async def _as_task(coroutine: Coroutine[Any, Any, object]) -> object:
    with contextlib.suppress(PayloadConflictError):
        return await coroutine


@contextlib.contextmanager
def bench_on(url: str) -> Iterator[tuple[asyncio.Runner, Bench]]:
    with asyncio.Runner() as runner:
        watcher = Watcher(url)
        runner.run(watcher.__aenter__())
        bench = Bench(url, watcher)
        try:
            yield runner, bench
        finally:
            runner.run(bench.close())
            runner.run(watcher.__aexit__())


def test_a_call_that_is_cancelled_at_any_await_is_whole_or_absent_and_leaves_nothing_open(
    store_url: str,
) -> None:
    with bench_on(store_url) as (runner, bench):
        for name in CASES:
            nth = 1
            while runner.run(bench.try_at(name, Coalesce.PROCESS, nth)):
                nth += 1
            assert nth > 1, name


def test_wherever_however_often_and_in_whichever_mode_a_call_is_cancelled_it_is_whole_or_absent(
    store_url: str,
) -> None:
    with bench_on(store_url) as (runner, bench):

        @settings(
            max_examples=60,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(
            name=st.sampled_from(list(CASES)),
            mode=st.sampled_from(list(Coalesce)),
            nth=st.integers(1, 3) | st.integers(1, 12),
            turns=st.integers(0, 12),
            again=st.none() | st.integers(0, 4),
            slow=st.sampled_from((0, 20)),
        )
        def cancel(name: str, mode: Coalesce, nth: int, turns: int, again: int | None, slow: int) -> None:
            runner.run(bench.try_at(name, mode, nth, turns, again, slow))

        cancel()
        assert bench.cancelled > 20


@pytest.mark.quick("Nothing is left behind")
@pytest.mark.parametrize(
    "point", ["before commit", "inside a coalesced batch", "after commit, before acknowledgement"]
)
async def test_of_a_batch_whose_callers_are_all_cancelled_at_its_commit_nothing_is_left_open(
    store_url: str, faults: Points, point: str
) -> None:
    async with Watcher(store_url) as watcher, open_store(store_url, deadline=DEADLINE) as store:
        await store.sink.put(call(1))

        async def cancel_all() -> None:
            stats = store.stats()
            # A transaction of several calls has begun.
            if stats["shared_calls"] > stats["shared_transactions"]:
                faults.clear()
                for caller in callers:
                    caller.cancel()

        # The first ones take the lanes, so that the others share a transaction.
        callers = [asyncio.create_task(store.sink.put(call(number))) for number in range(10, 15)]
        faults[point] = cancel_all
        answers = await asyncio.gather(*callers, return_exceptions=True)
        assert sum(isinstance(answer, asyncio.CancelledError) for answer in answers) >= 3
        await watcher.nothing_is_open()
        await watcher.rows()
        for number in range(10, 15):
            await store.sink.put(call(number))


@pytest.mark.parametrize("again", [None, 0, 3])
async def test_a_first_use_that_is_cancelled_leaves_a_file_that_is_whole_or_new(
    tmp_path: Path, again: int | None
) -> None:
    was_cancelled, nth = True, 0
    while was_cancelled:
        nth += 1
        url = f"sqlite:///{tmp_path / f'{nth}.db'}"
        async with open_store(url, deadline=DEADLINE) as store:
            was_cancelled = await cancelled_at(store.sink.put(call(1)), nth, again=again)
            if await asyncio.to_thread(Path(parse_url(url).dsn).exists):
                async with Watcher(url) as watcher:
                    await watcher.nothing_is_open()
                assert await asyncio.to_thread(migrate.current, url) in (None, migrate.HEAD)
            await store.sink.put(call(1))
            assert len((await store.source.freeze("rollout-1")).entries) == 1
    assert nth > 2


async def test_a_first_use_of_a_server_that_is_cancelled_leaves_no_session_behind(postgres_url: str) -> None:
    async with Watcher(postgres_url) as watcher:
        was_cancelled, nth = True, 0
        while was_cancelled:
            nth += 1
            async with open_store(postgres_url, deadline=DEADLINE) as store:
                was_cancelled = await cancelled_at(store.sink.put(call(1)), nth)
                await watcher.nothing_is_open()
                await watcher.rows()
                await store.sink.put(call(1))
            await watcher.empty()
    assert nth > 3


async def nobody_is_connected(watcher: Watcher) -> None:
    """Wait until only the watcher has the database open."""
    async with asyncio.timeout(DEADLINE):
        # Nothing tells when a thread has ended.
        while any(  # noqa: ASYNC110
            thread.name.startswith("tokencustody") for thread in threading.enumerate()
        ):
            await asyncio.sleep(0)
        while watcher.url.startswith("postgresql") and (
            await watcher.fetch(
                "SELECT 1 FROM pg_stat_activity WHERE application_name = 'tokencustody'"
                " AND datname = current_database()"
            )
        ):
            pass


@pytest.mark.quick("Nothing is left behind")
async def test_a_close_that_is_cancelled_still_closes_every_connection(
    store_url: str, faults: Points
) -> None:
    async with Watcher(store_url) as watcher:
        was_cancelled, nth = True, 0
        while was_cancelled:
            nth += 1
            store = open_store(store_url, deadline=DEADLINE)
            await store.source.freeze("another")
            inside, go_on = asyncio.Event(), asyncio.Event()

            async def hold(inside: asyncio.Event = inside, go_on: asyncio.Event = go_on) -> None:
                inside.set()
                await go_on.wait()

            faults["before commit"] = hold
            running = asyncio.create_task(store.sink.put(call(nth)))
            await inside.wait()
            closing = asyncio.create_task(cancelled_at(store.close(), nth))
            await asyncio.sleep(0)
            go_on.set()
            was_cancelled = await closing
            await running
            faults.clear()
            await store.close()
            await nobody_is_connected(watcher)
            assert open_engines() == []
    assert nth > 1


# Calls of the staging store, whose callers are threads: they are not cancelled but interrupted, as by Ctrl-C.

STAGED = stage("call-1").snapshot
STAGING: dict[str, tuple[Callable[[SqlStagingStore], object], str]] = {
    "stage": (lambda s: s.stage(STAGED), "before commit"),
    "stage, once committed": (lambda s: s.stage(STAGED), "after commit, before acknowledgement"),
    "stage with attachments": (lambda s: s.stage(STAGED, attachments={"a": b"x"}), "before commit"),
    "delete": (lambda s: s.delete(["r/call-0"]), "before commit"),
    "delete, once committed": (lambda s: s.delete(["r/call-0"]), "after commit, before acknowledgement"),
}


@contextmanager
def interrupted_once() -> Iterator[Callable[[], Awaitable[None]]]:
    """Yield what interrupts this thread from another one, until it has noticed; it does so once."""
    caller, interrupted = threading.get_ident(), False

    def notice(*_: object) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    async def interrupt() -> None:
        # Again and again: one that comes just before the thread waits does not wake it.
        while not interrupted:
            signal.pthread_kill(caller, signal.SIGINT)
            await asyncio.sleep(0)

    before = signal.signal(signal.SIGINT, notice)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("operation", "point"), STAGING.values(), ids=STAGING)
def test_a_staging_call_that_is_interrupted_is_whole_or_absent_and_holds_nothing(
    store_url: str, faults: Points, operation: Callable[[SqlStagingStore], object], point: str
) -> None:
    with SqlStagingStore(store_url, deadline=DEADLINE) as staging:
        assert staging.stage(stage("call-0").snapshot).ok
        with interrupted_once() as interrupt_until_cancelled:
            faults[point] = interrupt_until_cancelled
            with pytest.raises(KeyboardInterrupt):
                operation(staging)
            faults.clear()
            staging._background.pause().release()  # waits for what was interrupted
        asyncio.run(look_from_outside(store_url))
        repeated = operation(staging)
        assert (
            repeated == [] or repeated == ["r/call-0"] or (isinstance(repeated, StageResult) and repeated.ok)
        )
        asyncio.run(look_from_outside(store_url))


def test_a_fork_whose_wait_for_running_calls_is_interrupted_leaves_no_lock_held(
    store_url: str, faults: Points
) -> None:
    with SqlStagingStore(store_url, deadline=DEADLINE) as staging, interrupted_once() as interrupt:
        lock = staging._background._lock(os.getpid())
        inside, forking = threading.Event(), threading.Event()

        async def interrupt_the_wait() -> None:
            inside.set()
            while not (forking.is_set() and lock.locked()):  # noqa: ASYNC110 - no lock tells of itself
                await asyncio.sleep(0)
            await interrupt()

        faults["before commit"] = interrupt_the_wait
        answers: list[StageResult] = []
        running = threading.Thread(target=lambda: answers.append(staging.stage(STAGED)))
        running.start()
        inside.wait()
        forking.set()
        with pytest.raises(KeyboardInterrupt):
            staging._background.pause()
        if is_held := lock.locked():
            lock.release()  # else nothing closes the store
        assert not is_held
        running.join()
        assert [answer.ok for answer in answers] == [True]


async def look_from_outside(url: str) -> None:
    async with Watcher(url) as watcher:
        await watcher.nothing_is_open()
        await watcher.rows()
