"""The way from synchronous code into asyncio: one event loop in a background thread of each process."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from tokencustody.errors import StoreClosedError

Result = TypeVar("Result")
Work = Callable[[], Coroutine[Any, Any, Result]]


class BackgroundLoop:
    """Runs coroutines for callers in any thread, whether or not a loop runs there.

    The thread starts with the first call, and again with the first call in a forked process; a fork waits for the calls
    that are running. `at_end` runs in the loop when it is closed; `name` is for the error of a call that comes later.
    """

    def __init__(self, name: str, at_end: Work[None]) -> None:
        self._name = name
        self._at_end = at_end
        self._closed = False
        # By process: a fork inherits no thread, and locks as they were.
        self._workers: dict[int, _Worker] = {}
        self._locks: dict[int, threading.Lock] = {}
        with _forking:
            _all_loops.add(self)

    def run(self, work: Work[Result]) -> Result:
        """Return the result of `work()`. Raises what it raises, and StoreClosedError after `close`."""
        pid = os.getpid()
        is_wanted = True
        future: Future[Result] | None = None

        async def wanted() -> Result:
            if not is_wanted:  # the caller was interrupted before it began
                raise asyncio.CancelledError
            return await work()

        try:
            with self._lock(pid):
                if self._closed:
                    raise StoreClosedError(f"{self._name} is closed")
                if pid not in self._workers:
                    self._workers[pid] = _Worker()
                future = self._workers[pid].start(wanted)
            return future.result()
        except BaseException:
            is_wanted = False
            if future is not None:
                future.cancel()  # does something only when the caller was interrupted
            raise
        finally:
            future = None  # an error's traceback holds this frame

    def close(self) -> None:
        """Let the calls that are running finish, then end the thread. Idempotent."""
        pid = os.getpid()
        with self._lock(pid):
            self._closed = True
            worker = self._workers.pop(pid, None)
        if worker is not None:
            worker.end(self._at_end)

    def pause(self) -> threading.Lock:
        """Let the calls that are running finish and start no other one until the returned lock is released.

        A wait that is interrupted, as by Ctrl-C, holds nothing.
        """
        pid = os.getpid()
        lock = self._lock(pid)
        with ExitStack() as on_error:
            on_error.enter_context(lock)
            if pid in self._workers:
                self._workers[pid].finish()
            on_error.pop_all()
        return lock

    def _lock(self, pid: int) -> threading.Lock:
        return self._locks.setdefault(pid, threading.Lock())


class _Worker:
    """One process's loop and thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._running: set[asyncio.Task[Any]] = set()
        # A daemon, so that a process which forgets to close its store still ends.
        self._thread = threading.Thread(target=self._serve, name="tokencustody", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._loop.close()
            raise

    def start(self, work: Work[Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(self._run(work), self._loop)

    async def _run(self, work: Work[Result]) -> Result:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - this is a coroutine of the loop
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await work()

    def finish(self, at_end: Work[None] | None = None) -> None:
        """Let every call that was started before finish, then run `at_end`."""

        async def wait() -> None:
            if others := self._running.copy():
                await asyncio.wait(others)
            if at_end is not None:
                await at_end()

        asyncio.run_coroutine_threadsafe(wait(), self._loop).result()

    def end(self, at_end: Work[None]) -> None:
        try:
            self.finish(at_end)
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
            _wait_until_gone(self._thread)

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stop.wait())


def _wait_until_gone(joined: threading.Thread) -> None:
    """Wait until the system has ended a thread that Python has joined.

    In between OpenSSL cleans up after it, with a lock that a fork would leave taken in the child for ever.
    """
    # Elsewhere than on Linux there is no such file, and no wait.
    while Path(f"/proc/self/task/{joined.native_id}").exists():
        os.sched_yield()


_all_loops: weakref.WeakSet[BackgroundLoop] = weakref.WeakSet()
_forking = threading.Lock()
_paused: list[threading.Lock] = []


def _before_fork() -> None:
    # What runs in another thread would leave SQLite's own locks taken in the child for ever. The transactions of its
    # engine see to that themselves; the making of a new file does not.
    _forking.acquire()
    _paused.extend(loop.pause() for loop in list(_all_loops))


def _after_fork() -> None:
    while _paused:
        _paused.pop().release()
    _forking.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
