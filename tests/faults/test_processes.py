"""Processes that share a file or a server: forked at any moment, spawned, killed, or two hundred at once."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import asyncpg
import pytest

from tests.database.test_transactions import put_in_a_spawned_process
from tests.faults.test_loops import LoopThread
from tests.store.test_staging_concurrency import in_a_fork
from tests.support.entries import make_entry
from tests.support.rows import rows_of
from tokencustody import CaptureStore, SqlTokenSink, open_store
from tokencustody.database import portal, registry, sqlite
from tokencustody.database.faults import FAULT_POINTS
from tokencustody.errors import StoreUnavailableError
from tokencustody.schema import revisions, tables

Points = dict[str, Callable[[], Awaitable[None]]]


@pytest.fixture
def faults() -> Iterator[Points]:
    """The table of fault points, empty again afterwards."""
    yield FAULT_POINTS
    FAULT_POINTS.clear()


async def calls_of(store: CaptureStore) -> set[str]:
    return {entry.model_call_id for entry in (await store.source.freeze("rollout-1")).entries}


def put_and_close(store: CaptureStore, call: str) -> None:
    """Put a call through an inherited store, in a loop of this process."""

    async def put() -> None:
        async with store:
            await store.sink.put(make_entry(model_call_id=call))

    asyncio.run(put())


# Forks.


def fork_in_a_thread(child: Callable[[], None]) -> asyncio.Future[int | None]:
    """Fork in a thread of its own, not in one of a pool, which the end of the child would wait for."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int | None] = loop.create_future()

    def fork() -> None:
        loop.call_soon_threadsafe(ended.set_result, in_a_fork(child))

    threading.Thread(target=fork).start()
    return ended


async def test_a_fork_in_the_loops_own_thread_while_calls_are_in_flight_gives_both_a_store_that_works(
    store_url: str,
) -> None:
    async with open_store(store_url) as store:
        await store.sink.put(make_entry(model_call_id="first"))
        puts = [
            asyncio.create_task(store.sink.put(make_entry(model_call_id=f"call-{number}")))
            for number in range(8)
        ]
        for number in range(3):
            await asyncio.sleep(0)
            assert in_a_fork(partial(put_and_close, store, f"child-{number}")) == 0
        await asyncio.gather(*puts)
        await store.sink.put(make_entry(model_call_id="last"))
        children = {f"child-{number}" for number in range(3)}
        assert (
            await calls_of(store) == {"first", "last", *(f"call-{number}" for number in range(8))} | children
        )


async def test_a_fork_of_another_thread_waits_for_the_transaction_of_a_file_and_inherits_no_lock(
    sqlite_url: str, faults: Points
) -> None:
    async with open_store(sqlite_url) as store:
        await store.sink.put(make_entry(model_call_id="first"))
        order: list[str] = []
        inside, go_on = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            faults.clear()
            inside.set()
            await go_on.wait()

        faults["before commit"] = hold
        put = asyncio.create_task(store.sink.put(make_entry()))
        await inside.wait()
        forking = fork_in_a_thread(partial(put_and_close, store, "child"))
        while not sqlite._forking.locked():  # noqa: ASYNC110 - the thread that forks tells nobody
            await asyncio.sleep(0)
        order.append("fork begins")
        put.add_done_callback(lambda _: order.append("put ends"))
        go_on.set()
        await put
        assert await forking == 0
        assert order == ["fork begins", "put ends"]
        assert await calls_of(store) == {"first", "call-1", "child"}


async def test_a_fork_while_a_transaction_of_a_server_goes_on_disturbs_neither(
    postgres_url: str, faults: Points
) -> None:
    async with open_store(postgres_url) as store:
        await store.sink.put(make_entry(model_call_id="first"))
        inside, go_on = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            faults.clear()
            inside.set()
            await go_on.wait()

        faults["before commit"] = hold
        put = asyncio.create_task(store.sink.put(make_entry()))
        await inside.wait()
        forked = await fork_in_a_thread(partial(put_and_close, store, "child"))
        assert forked == 0
        assert not put.done()
        go_on.set()
        await put
        assert await calls_of(store) == {"first", "call-1", "child"}


async def test_a_fork_while_a_file_is_created_waits_until_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go_on = threading.Event(), threading.Event()
    look = revisions.stored

    def look_and_wait(*arguments: object) -> object:
        monkeypatch.undo()
        inside.set()
        go_on.wait(30)
        return look(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(revisions, "stored", look_and_wait)
    async with open_store(tmp_path / "parent.db") as store, open_store(tmp_path / "child.db") as other:
        put = asyncio.create_task(store.sink.put(make_entry()))
        assert await asyncio.to_thread(inside.wait, 30)

        def in_the_child() -> None:
            put_and_close(other, "child")
            put_and_close(store, "child")

        forking = fork_in_a_thread(in_the_child)
        while not portal._forking.locked():  # noqa: ASYNC110 - the thread that forks tells nobody
            await asyncio.sleep(0)
        go_on.set()
        assert await forking == 0
        await put
        assert await calls_of(store) == {"call-1", "child"}
        assert await calls_of(other) == {"child"}


def test_a_fork_while_a_thread_holds_the_list_of_engines_inherits_no_lock_of_it(store_url: str) -> None:
    with registry._registry.lock:
        assert in_a_fork(lambda: put_and_close(open_store(store_url), "child")) == 0


FORK_AND_END = """
import os, sys
from tests.support.staged import stage
from tokencustody import SqlStagingStore

staging = SqlStagingStore(sys.argv[1])
assert staging.stage(stage("first").snapshot).ok
child = os.fork()
if not child:
    sys.exit(0)  # with every finalizer of the interpreter
assert os.waitpid(child, 0)[1] == 0
assert staging.stage(stage("last").snapshot).ok
assert len(staging.fetch(["r/first", "r/last"])) == 2
staging.close()
"""


def test_a_forked_process_that_ends_without_using_the_store_takes_nothing_from_its_parent(
    unused_store_url: str,
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK_AND_END, unused_store_url]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


FORK_WHILE_A_THREAD_MAKES_THE_FIRST_STORE = """
import os, signal, sys, threading, warnings
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from tests.faults.test_processes import put_and_close
from tokencustody import open_store

warnings.simplefilter("ignore", DeprecationWarning)
inside, forking, forked = threading.Event(), threading.Event(), threading.Event()


class HeldOnce(MeterProvider):
    lock = threading.Lock()

    def get_meter(self, *arguments, **more):
        with self.lock:
            inside.set()
            forking.wait(20)
            forked.wait(0.5)  # ends at once only where a fork does not wait for this
            return super().get_meter(*arguments, **more)


metrics.set_meter_provider(HeldOnce())
os.register_at_fork(before=forking.set, after_in_parent=forked.set)
made = []
thread = threading.Thread(target=lambda: made.append(open_store(sys.argv[1])))
thread.start()
assert inside.wait(20)
child = os.fork()
if not child:
    signal.alarm(30)  # a child that waits for ever is killed
    put_and_close(open_store(sys.argv[1]), "child")
    os._exit(0)
thread.join()
assert os.waitpid(child, 0)[1] == 0
put_and_close(*made, "parent")
"""


async def test_a_fork_while_a_thread_makes_the_first_store_of_its_process_leaves_no_lock_held(
    store_url: str,
) -> None:
    command = [sys.executable, "-c", FORK_WHILE_A_THREAD_MAKES_THE_FIRST_STORE, store_url]
    ended = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    async with open_store(store_url) as store:
        assert await calls_of(store) == {"child", "parent"}


async def test_a_fork_server_makes_the_store_from_its_arguments(store_url: str) -> None:
    async with open_store(store_url) as store:
        await store.sink.put(make_entry(model_call_id="parent"))
        context = multiprocessing.get_context("forkserver")
        process = context.Process(
            target=put_in_a_spawned_process, args=(partial(SqlTokenSink, url=store_url),)
        )
        process.start()
        await asyncio.to_thread(process.join, 60)
        assert process.exitcode == 0
        assert await calls_of(store) == {"parent", "child"}


# Deaths.


@pytest.mark.quick("Durable before return")
async def test_a_process_that_is_killed_while_it_holds_the_writer_blocks_nobody_and_leaves_no_row(
    store_url: str, faults: Points
) -> None:
    async with open_store(store_url, deadline=10) as store:
        await store.sink.put(make_entry(model_call_id="first"))

        async def die() -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def child() -> None:
            faults["before commit"] = die
            put_and_close(store, "killed")

        assert in_a_fork(child) == -signal.SIGKILL
        await store.sink.put(make_entry(model_call_id="last"))
        assert await calls_of(store) == {"first", "last"}


# Many.


async def test_two_hundred_processes_at_once_all_put_their_call(unused_store_url: str) -> None:
    """On SQLite into a file that none of them finds there; on PostgreSQL through half as many connections."""
    command = [sys.executable, "-m", "tests.faults.many_processes", unused_store_url, "200"]
    ended = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=240, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("200 ok, 200 ended"), ended.stdout
    assert len(await rows_of(unused_store_url, tables.entries)) == 200


async def test_a_server_without_a_free_connection_is_unavailable_at_the_deadline_and_says_so(
    postgres_url: str,
) -> None:
    admin = await asyncpg.connect(postgres_url)
    role = f"limited_{os.getpid()}"
    await admin.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'secret' CONNECTION LIMIT 1")
    await admin.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
    limited = f"postgresql://{role}:secret@{postgres_url.partition('@')[2]}"
    holder = await asyncpg.connect(limited)
    try:
        async with open_store(limited, deadline=0.5) as store:
            with pytest.raises(StoreUnavailableError, match="too many connections"):
                await store.sink.put(make_entry())
            assert store.stats()["retries_too_many_connections"] > 0
        # A new store, for the other one waits no longer than half a second for what a slow machine may take.
        async with open_store(limited) as store:
            waiting = asyncio.create_task(store.sink.put(make_entry()))
            while not store.stats()["retries_too_many_connections"]:  # noqa: ASYNC110 - it counts, and wakes nobody
                await asyncio.sleep(0)
            await holder.close()
            await waiting
            assert await calls_of(store) == {"call-1"}
    finally:
        await holder.close()
        await admin.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
        await admin.close()


@pytest.mark.parametrize("first_use", ["before", "after"])
def test_what_a_forked_process_was_acknowledged_outlives_the_close_of_its_parent(
    store_url: str, first_use: str
) -> None:
    store = open_store(store_url)
    closed, told = os.pipe()
    used, tell = os.pipe()

    async def child() -> None:
        if first_use == "before":
            await store.sink.put(make_entry(model_call_id="before"))
        os.write(tell, b"x")
        await asyncio.to_thread(os.read, closed, 1)
        await store.sink.put(make_entry(model_call_id="after"))
        await store.close()

    def in_the_child() -> None:
        asyncio.run(child())

    with LoopThread() as one:
        one.run(store.sink.put(make_entry()))
        ended: list[int | None] = []
        forking = threading.Thread(target=lambda: ended.append(in_a_fork(in_the_child)))
        forking.start()
        os.read(used, 1)
        # The last of all to close a SQLite file deletes its log.
        one.run(store.close())
        os.write(told, b"x")
        forking.join()
        assert ended == [0]
        for end in (closed, told, used, tell):
            os.close(end)
        again = open_store(store_url)
        calls = one.run(calls_of(again))
        one.run(again.close())
    assert calls == {"call-1", "after", *(["before"] if first_use == "before" else [])}
