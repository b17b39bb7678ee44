"""Staging from many threads and processes: nothing is lost or stored twice, and a conflict has one winner."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.database.test_transactions import Points
from tests.support.rows import rows_of
from tests.support.staged import stage
from tokencustody import SqlStagingStore
from tokencustody.database.registry import open_engines
from tokencustody.errors import StoreClosedError
from tokencustody.schema import tables
from tokencustody.staging.records import StageResult

THREADS = 16
CALLS = 50


def stage_calls(staging: SqlStagingStore, barrier: threading.Barrier, thread: int) -> list[str | None]:
    """Stage this thread's calls, and every tenth again with what all threads stage; return the acknowledged keys."""
    barrier.wait()
    acknowledged = []
    for number in range(CALLS):
        call = stage(f"{thread}-{number}", added=[thread], sampled=[number], extras={"thread": thread})
        result = staging.stage(call.snapshot, attachments={"number": number})
        assert result.ok, result.error
        acknowledged.append(result.staging_key)
        if number % 10 == 0:
            assert staging.stage(stage(f"shared-{number}").snapshot, attachments={"n": number}).ok
    return acknowledged


@pytest.mark.serializable
async def test_sixteen_threads_lose_and_duplicate_nothing(store_url: str) -> None:
    with SqlStagingStore(store_url) as staging, ThreadPoolExecutor(THREADS) as pool:
        barrier = threading.Barrier(THREADS)
        keys = [
            key
            for acknowledged in pool.map(partial(stage_calls, staging, barrier), range(THREADS))
            for key in acknowledged
        ]
        assert sorted(keys) == sorted(f"r/{t}-{n}" for t in range(THREADS) for n in range(CALLS))
        for key, call in zip(keys, staging.fetch(keys), strict=True):
            thread, number = map(int, key.removeprefix("r/").split("-"))
            assert (call.staging_key, call.token_ids_delta) == (key, [thread, number])
        shared = [f"r/shared-{number}" for number in range(0, CALLS, 10)]
        assert len(staging.fetch(shared)) == len(shared)
        assert [staging.fetch_attachments(key)["n"] for key in shared] == list(range(0, CALLS, 10))
    total = THREADS * CALLS + len(shared)
    assert len(await rows_of(store_url, tables.staged_calls)) == total
    assert len(await rows_of(store_url, tables.staged_attachments)) == total


@pytest.mark.serializable
@pytest.mark.parametrize("stores", [1, 2])
async def test_of_two_conflicting_calls_at_once_exactly_one_is_staged(store_url: str, stores: int) -> None:
    opened = [SqlStagingStore(store_url) for _ in range(stores)]
    barrier = threading.Barrier(2)

    def contend(number: int, contender: int) -> StageResult:
        call = stage(f"call-{number}", weight_version=contender)
        barrier.wait()
        return opened[contender % stores].stage(call.snapshot, attachments={"contender": contender})

    with ThreadPoolExecutor(2) as pool:
        for number in range(20):
            results = list(pool.map(partial(contend, number), range(2)))
            winners = [contender for contender, result in enumerate(results) if result.ok]
            assert len(winners) == 1
            assert "differing: weight_version, attachment contender" in (results[1 - winners[0]].error or "")
            (held,) = opened[0].fetch([f"r/call-{number}"])
            assert held.weight_version == winners[0]
            assert opened[0].fetch_attachments(held.staging_key) == {"contender": winners[0]}
    for staging in opened:
        staging.close()


@pytest.mark.serializable
async def test_deleting_and_staging_the_same_call_at_once_leaves_it_whole_or_gone(store_url: str) -> None:
    with SqlStagingStore(store_url) as staging, ThreadPoolExecutor(4) as pool:
        call = stage("call-1").snapshot

        def work(number: int) -> bool:
            if number % 2:
                staging.delete(["r/call-1"])
                return True
            return staging.stage(call, attachments={"a": b"x", "b": b"y"}).ok

        assert all(pool.map(work, range(80)))
        calls = await rows_of(store_url, tables.staged_calls)
        assert len(await rows_of(store_url, tables.staged_attachments)) == 2 * len(calls)


STAGE_AND_WAIT = """
import sys, time
from tests.support.staged import stage
from tokencustody import SqlStagingStore
staging = SqlStagingStore(sys.argv[1])
print(staging.stage(stage("call-1").snapshot, attachments={"a": b"x"}).ok, flush=True)
sys.stdin.read()
"""


def test_what_was_acknowledged_survives_the_death_of_its_process(store_url: str) -> None:
    command = [sys.executable, "-c", STAGE_AND_WAIT, store_url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
    with SqlStagingStore(store_url) as staging:
        assert staging.fetch(["r/call-1"])[0].token_ids_delta == [1, 2, 3]
        assert staging.fetch_attachments("r/call-1") == {"a": b"x"}


FORGET_TO_CLOSE = """
import sys
from tests.support.staged import stage
from tokencustody import SqlStagingStore
staging = SqlStagingStore(sys.argv[1])
print(staging.stage(stage("call-1").snapshot).ok)
"""


def test_a_process_that_forgets_to_close_its_store_ends_quietly(store_url: str) -> None:
    command = [sys.executable, "-W", "ignore::ResourceWarning", "-c", FORGET_TO_CLOSE, store_url]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", "")


def in_a_fork(child: Callable[[], None]) -> int | None:
    """Run `child` in a forked process and return its exit code."""
    with warnings.catch_warnings():
        # Python warns of forking with threads; that is just what is tried here.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
    process.join(60)
    return process.exitcode


def test_a_fork_after_use_and_one_before_it_stage_through_loops_of_their_own(store_url: str) -> None:
    with SqlStagingStore(store_url) as staging:

        def child(call: str) -> None:
            assert staging.stage(stage(call).snapshot).ok
            staging.close()

        if store_url.startswith("sqlite"):  # the first use of a file creates its tables
            with SqlStagingStore(store_url) as first:
                first.fetch([])
        assert in_a_fork(partial(child, "before")) == 0
        assert staging.stage(stage("parent-1").snapshot).ok
        assert in_a_fork(partial(child, "after")) == 0
        assert staging.stage(stage("parent-2").snapshot).ok
        assert len(staging.fetch(["r/before", "r/after", "r/parent-1", "r/parent-2"])) == 4


def test_a_fork_while_other_threads_stage_inherits_none_of_their_locks(store_url: str) -> None:
    with SqlStagingStore(store_url) as staging, ThreadPoolExecutor(4) as pool:
        staging.fetch([])

        def child() -> None:
            assert staging.stage(stage("child").snapshot).ok
            staging.close()

        staged = [pool.submit(staging.stage, stage(f"call-{number}").snapshot) for number in range(100)]
        assert in_a_fork(child) == 0
        assert all(done.result().ok for done in staged)
        assert len(staging.fetch(["r/child", *(f"r/call-{number}" for number in range(100))])) == 101


def stage_in_a_spawned_process(make: Callable[[], SqlStagingStore]) -> None:
    with make() as staging:
        assert staging.stage(stage("child").snapshot).ok


def test_a_spawned_process_makes_the_store_from_its_arguments(store_url: str) -> None:
    with SqlStagingStore(store_url) as staging:
        staging.stage(stage("parent").snapshot)
        process = multiprocessing.get_context("spawn").Process(
            target=stage_in_a_spawned_process, args=(partial(SqlStagingStore, url=store_url),)
        )
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert len(staging.fetch(["r/parent", "r/child"])) == 2


async def test_a_thread_whose_own_loop_is_running_may_stage(store_url: str) -> None:
    with SqlStagingStore(store_url) as staging:
        assert asyncio.get_running_loop().is_running()
        assert staging.stage(stage("call-1").snapshot).ok
        assert await asyncio.to_thread(lambda: staging.stage(stage("call-2").snapshot).ok)
        assert len(open_engines()) == 1


def test_closing_waits_for_the_calls_that_are_running_and_refuses_later_ones(
    store_url: str, faults: Points
) -> None:
    staging = SqlStagingStore(store_url)
    staging.fetch([])
    inside, may_go_on = threading.Event(), threading.Event()

    async def hold() -> None:
        inside.set()
        await asyncio.to_thread(may_go_on.wait)

    faults["before commit"] = hold
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(staging.stage, stage("call-1").snapshot)
        assert inside.wait(30)
        closing = pool.submit(staging.close)
        while not staging._background._closed:
            pass
        with pytest.raises(StoreClosedError):
            staging.stage(stage("call-2").snapshot)
        assert not closing.done()
        may_go_on.set()
        assert running.result(30).ok
        closing.result(30)
    faults.clear()
    with SqlStagingStore(store_url) as after:
        assert len(after.fetch(["r/call-1"])) == 1


def test_a_closed_store_leaves_no_thread(store_url: str) -> None:
    before = threading.active_count()
    for _ in range(3):
        with SqlStagingStore(store_url) as staging:
            staging.stage(stage("call-1").snapshot)
    assert threading.active_count() == before
