"""The way into the background loop: each caller gets its own answer, and none waits for a loop that has ended."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.store.test_staging_concurrency import in_a_fork
from tokencustody.database import portal
from tokencustody.database.portal import BackgroundLoop
from tokencustody.errors import StoreClosedError


async def nothing() -> None:
    """End at once."""


@pytest.fixture
def background() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop("the loop", nothing)
    yield loop
    loop.close()


def test_each_of_many_callers_gets_its_own_answer_or_error(background: BackgroundLoop) -> None:
    async def answer(number: int) -> int:
        for _ in range(number % 5):
            await asyncio.sleep(0)
        if number % 3 == 0:
            raise ValueError(str(number))
        return number

    def ask(number: int) -> int:
        try:
            return background.run(lambda: answer(number))
        except ValueError as exc:
            return -int(str(exc))

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(1, 2000)))
    assert answers == [number if number % 3 else -number for number in range(1, 2000)]


class InterruptionError(Exception):
    """What a signal handler raises in the caller's thread."""


@contextmanager
def interrupting() -> Iterator[None]:
    """Let the first of any number of signals raise."""
    interruptions = [InterruptionError()]

    def interrupt(*_: object) -> None:
        if interruptions:
            raise interruptions.pop()

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_call_whose_caller_is_interrupted_is_cancelled_and_the_next_one_runs(
    background: BackgroundLoop,
) -> None:
    cancelled = threading.Event()
    caller = threading.get_ident()

    async def interrupt_and_wait() -> None:
        try:
            while True:
                # Again and again: one that comes just before the thread waits does not wake it.
                signal.pthread_kill(caller, signal.SIGUSR1)
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def number() -> int:
        return 7

    with interrupting():
        with pytest.raises(InterruptionError):
            background.run(interrupt_and_wait)
        assert cancelled.wait(30)
    assert background.run(number) == 7


def test_a_call_whose_caller_is_interrupted_before_the_loop_begins_it_does_not_run(
    background: BackgroundLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, given, interrupted, ran = (threading.Event() for _ in range(4))
    caller = threading.get_ident()
    hand_over = asyncio.run_coroutine_threadsafe

    def handed_over(coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Future[Any]:
        future = hand_over(coroutine, loop)
        if threading.get_ident() == caller:
            given.set()
        return future

    async def block() -> None:
        inside.set()
        given.wait()
        while not interrupted.is_set():
            signal.pthread_kill(caller, signal.SIGUSR1)

    async def run() -> None:
        ran.set()

    with interrupting(), ThreadPoolExecutor(1) as pool:
        blocking = pool.submit(background.run, block)
        assert inside.wait(30)
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", handed_over)
        with pytest.raises(InterruptionError):
            background.run(run)
        interrupted.set()
        blocking.result(30)
    background.run(nothing)
    assert not ran.is_set()


def test_closing_lets_what_runs_finish_before_it_runs_the_end_and_refuses_what_comes_later() -> None:
    order: list[str] = []
    inside, may_go_on = threading.Event(), threading.Event()

    async def slow() -> None:
        inside.set()
        await asyncio.to_thread(may_go_on.wait)
        order.append("call")

    async def end() -> None:
        order.append("end")

    background = BackgroundLoop("the loop", end)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(background.run, slow)
        assert inside.wait(30)
        closing = pool.submit(background.close)
        while not background._closed:
            pass
        with pytest.raises(StoreClosedError, match="the loop is closed"):
            background.run(nothing)
        may_go_on.set()
        running.result(30)
        closing.result(30)
    background.close()
    assert order == ["call", "end"]


def test_an_end_that_fails_is_the_closers_error_and_leaves_no_thread() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    background = BackgroundLoop("the loop", fail)
    background.run(nothing)
    with pytest.raises(ZeroDivisionError):
        background.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "tokencustody"]


def test_a_fork_waits_for_the_calls_that_are_running(background: BackgroundLoop) -> None:
    order: list[str] = []
    inside, may_go_on = threading.Event(), threading.Event()

    async def slow() -> None:
        inside.set()
        await asyncio.to_thread(may_go_on.wait)
        order.append("call")

    def let_go_on_once_a_fork_waits() -> None:
        while not portal._forking.locked():
            pass
        order.append("fork begins")
        may_go_on.set()

    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(background.run, slow)
        assert inside.wait(30)
        watching = pool.submit(let_go_on_once_a_fork_waits)
        assert in_a_fork(lambda: background.run(nothing)) == 0
        order.append("fork ends")
        watching.result(30)
        running.result(30)
    assert order == ["fork begins", "call", "fork ends"]
