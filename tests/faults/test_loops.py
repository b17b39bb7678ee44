"""Event loops in threads, one store for all of them or one for each; closing beside everything else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.entries import make_entry
from tests.support.staged import stage
from tokencustody import CaptureStore, SqlStagingStore, SqlTokenSink, open_store
from tokencustody.database.engine import Engines
from tokencustody.database.faults import FAULT_POINTS
from tokencustody.database.registry import open_engines
from tokencustody.database.url import parse_url
from tokencustody.errors import StoreClosedError
from tokencustody.schema.opening import CaptureDatabase
from tokencustody.spill.marks import Spill
from tokencustody.spill.replaying import Replayer

Points = dict[str, Callable[[], Awaitable[None]]]
THREADS = 8
PUTS = 5


@pytest.fixture
def faults() -> Iterator[Points]:
    """The table of fault points, empty again afterwards."""
    yield FAULT_POINTS
    FAULT_POINTS.clear()


class LoopThread:
    """An event loop that runs in a thread until the context ends."""

    def __enter__(self) -> LoopThread:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)


def frozen_calls(url: str) -> set[str]:
    async def read() -> set[str]:
        async with open_store(url) as store:
            return {entry.model_call_id for entry in (await store.source.freeze("rollout-1")).entries}

    return asyncio.run(read())


@pytest.mark.parametrize("shared", [True, False], ids=["one store", "a store for each loop"])
def test_loops_in_several_threads_put_at_once_and_lose_nothing(store_url: str, shared: bool) -> None:
    one = SqlTokenSink(store_url)
    together = threading.Barrier(THREADS)

    async def put(thread: int) -> None:
        sink = one if shared else SqlTokenSink(store_url)
        await asyncio.to_thread(together.wait)
        for number in range(PUTS):
            await sink.put(make_entry(model_call_id=f"call-{thread}-{number}"))
        if not shared:
            await sink.close()
        else:
            await asyncio.to_thread(together.wait)
            # Every loop closes it, at once with all others.
            await sink.close()

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda thread: asyncio.run(put(thread)), range(THREADS)))
    assert open_engines() == []
    assert len(frozen_calls(store_url)) == THREADS * PUTS


def test_a_store_whose_loops_come_and_go_in_other_threads_keeps_serving_and_closes(store_url: str) -> None:
    sink = SqlTokenSink(store_url)
    with LoopThread() as staying:
        staying.run(sink.put(make_entry(model_call_id="first")))
        with LoopThread() as leaving:
            leaving.run(sink.put(make_entry(model_call_id="leaving")))
            # In its own loop: connections cannot be closed without it.
            (engines,) = [
                held for (_, loop), held in sink._database._held._held.items() if loop is leaving.loop
            ]
            leaving.run(engines.dispose())
        with LoopThread() as last:
            last.run(sink.put(make_entry(model_call_id="last")))
            staying.run(sink.put(make_entry(model_call_id="staying")))
            assert len(open_engines()) == 2
            last.run(sink.close())
            assert open_engines() == []
            for each in (staying, last):
                with pytest.raises(StoreClosedError):
                    each.run(sink.put(make_entry()))
    assert frozen_calls(store_url) == {"first", "leaving", "last", "staying"}


def test_a_close_from_another_loop_waits_for_the_calls_in_flight_and_refuses_later_ones(
    store_url: str, faults: Points
) -> None:
    store = open_store(store_url)
    with LoopThread() as working, LoopThread() as closing:
        working.run(store.sink.put(make_entry(model_call_id="first")))
        inside, go_on = threading.Event(), threading.Event()

        async def hold() -> None:
            faults.clear()
            inside.set()
            await asyncio.to_thread(go_on.wait, 30)

        faults["before commit"] = hold
        running = asyncio.run_coroutine_threadsafe(store.sink.put(make_entry()), working.loop)
        assert inside.wait(30)
        closes = [
            asyncio.run_coroutine_threadsafe(store.close(), loop.loop) for loop in (closing, closing, working)
        ]
        while not store.sink._database._held._closed:
            pass
        with pytest.raises(StoreClosedError):
            working.run(store.sink.put(make_entry(model_call_id="late")))
        assert not running.done()
        go_on.set()
        running.result(30)
        for each in closes:
            each.result(30)
        assert open_engines() == []
    assert frozen_calls(store_url) == {"first", "call-1"}


def test_a_close_waits_for_another_thread_that_closes_what_its_own_loop_opened(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else the loop may end, and cancel the closing of its connections half way.
    sink = SqlTokenSink(store_url)
    closing, go_on = threading.Event(), threading.Event()
    dispose = Engines.dispose

    async def slow(engines: Engines) -> None:
        closing.set()
        await asyncio.to_thread(go_on.wait, 30)
        await dispose(engines)

    monkeypatch.setattr(Engines, "dispose", slow)
    with LoopThread() as own, LoopThread() as other:
        own.run(sink.put(make_entry()))
        from_outside = asyncio.run_coroutine_threadsafe(sink.close(), other.loop)
        assert closing.wait(30)
        from_inside = asyncio.run_coroutine_threadsafe(sink.close(), own.loop)
        for _ in range(20):
            own.run(asyncio.sleep(0))
        assert not from_inside.done()
        go_on.set()
        from_inside.result(30)
        assert open_engines() == []
        from_outside.result(30)


def test_a_close_after_a_first_use_that_came_too_late_ends(store_url: str) -> None:
    sink = SqlTokenSink(store_url)
    closing, taken = threading.Event(), threading.Event()
    with LoopThread() as own, LoopThread() as other:

        class Held(dict[Any, Any]):
            """Lets the close of another thread come between what this store opens and what it makes of it."""

            def __setitem__(self, key: Any, value: Any) -> None:
                super().__setitem__(key, value)
                self.close = asyncio.run_coroutine_threadsafe(sink._database.close(), other.loop)
                assert closing.wait(30)

            def pop(self, key: Any, default: Any = None) -> Any:
                if threading.current_thread() is other.thread:
                    closing.set()
                    assert taken.wait(30)
                    return super().pop(key, default)
                found = super().pop(key, default)
                taken.set()
                return found

        held = sink._database._held._held = Held()
        with pytest.raises(StoreClosedError):
            own.run(sink.put(make_entry()))
        own.run(sink.close())
        held.close.result(30)
        assert open_engines() == []


def test_a_first_use_at_the_moment_of_the_close_is_served_or_refused_and_leaves_nothing_open(
    store_url: str,
) -> None:
    outcomes = set()
    with LoopThread() as using, LoopThread() as closing:
        for number in range(30):
            sink = SqlTokenSink(store_url)
            closing.run(sink.put(make_entry(model_call_id=f"warm-{number}")))
            put = asyncio.run_coroutine_threadsafe(
                sink.put(make_entry(model_call_id=f"call-{number}")), using.loop
            )
            closing.run(sink.close())
            error = put.exception(30)
            assert error is None or isinstance(error, StoreClosedError)
            outcomes.add(type(error))
            closing.run(sink.close())
            assert open_engines() == []


def test_a_close_does_not_wait_for_a_loop_that_stops_while_it_closes(store_url: str) -> None:
    sink = SqlTokenSink(store_url)
    with LoopThread() as stopping, LoopThread() as closing:
        stopping.run(sink.put(make_entry()))
        blocked, go_on = threading.Event(), threading.Event()

        def block_and_stop() -> None:
            blocked.set()
            go_on.wait(30)
            stopping.loop.stop()

        # The loop is running when it is asked, and stops before it does what it was asked for.
        stopping.loop.call_soon_threadsafe(block_and_stop)
        assert blocked.wait(30)
        closed = asyncio.run_coroutine_threadsafe(sink.close(), closing.loop)
        while sink._database._held._held:
            pass
        go_on.set()
        closed.result(30)
        stopping.thread.join()
        # What it was asked for happens when it runs again.
        stopping.loop.run_until_complete(everything_else())
    assert open_engines() == []


def test_what_a_loop_that_does_not_run_holds_is_released_by_a_close_in_it(store_url: str) -> None:
    loop = asyncio.new_event_loop()
    store = open_store(store_url)
    loop.run_until_complete(store.sink.put(make_entry()))
    asyncio.run(store.close())
    assert open_engines()
    loop.run_until_complete(asyncio.wait_for(store.close(), 60))
    assert not open_engines()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


async def everything_else() -> None:
    await asyncio.sleep(0)
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))


def test_staging_calls_in_flight_end_before_their_store_closes_from_two_threads_at_once(
    store_url: str, faults: Points
) -> None:
    staging = SqlStagingStore(store_url)
    staging.fetch([])
    inside, go_on = threading.Event(), threading.Event()

    async def hold() -> None:
        faults.clear()
        inside.set()
        await asyncio.to_thread(go_on.wait, 30)

    faults["before commit"] = hold
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(staging.stage, stage("call-1").snapshot)
        assert inside.wait(30)
        closes = [pool.submit(staging.close) for _ in range(2)]
        while not staging._background._closed:
            pass
        with pytest.raises(StoreClosedError):
            staging.fetch([])
        go_on.set()
        assert running.result(30).ok
        for each in closes:
            each.result(30)
    assert open_engines() == []
    with SqlStagingStore(store_url) as after:
        assert len(after.fetch(["r/call-1"])) == 1


async def test_two_closes_at_once_both_return_when_everything_is_closed(store_url: str) -> None:
    store: CaptureStore = open_store(store_url)
    await store.source.freeze("another")
    store.staging.fetch([])
    puts = [asyncio.create_task(store.sink.put(make_entry(model_call_id=f"call-{n}"))) for n in range(4)]
    await asyncio.sleep(0)
    await asyncio.gather(store.close(), store.close())
    assert open_engines() == []
    await asyncio.gather(*puts)
    for refused in (store.sink.put(make_entry()), store.source.freeze("r"), store.lineage.manifest("r")):
        with pytest.raises(StoreClosedError):
            await refused
    with pytest.raises(StoreClosedError):
        store.staging.fetch([])


def test_a_replayer_is_stopped_though_a_loop_of_its_own_stops_before_it_answers(tmp_path: Path) -> None:
    url = parse_url(tmp_path / "captures.db")
    replayer = Replayer(CaptureDatabase(url), Spill(tmp_path / "spill", url))
    looked, go_on, busy = threading.Event(), threading.Event(), threading.Event()

    async def look() -> None:
        replayer.look_once()

    def hold() -> None:
        busy.set()
        go_on.wait()

    def never_ends() -> bool:
        looked.set()
        go_on.wait()
        return True

    replayer.spill.is_empty = never_ends  # type: ignore[method-assign]
    with LoopThread() as leaving, LoopThread() as staying:
        leaving.run(look())
        looked.wait()
        leaving.loop.call_soon_threadsafe(hold)
        busy.wait()
        stopping = asyncio.run_coroutine_threadsafe(replayer.stop(), staying.loop)
        # It has asked the other loop by now, which stops before it can answer.
        staying.run(asyncio.sleep(0))
        leaving.loop.call_soon_threadsafe(leaving.loop.stop)
        go_on.set()
        leaving.thread.join()
        stopping.result(60)
