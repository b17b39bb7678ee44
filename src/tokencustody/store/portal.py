"""The way from synchronous code into asyncio: one event loop in a background thread of each process."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from tokencustody.errors import StoreClosedError

Result = TypeVar("Result")


class BackgroundLoop:
    """Runs coroutines for callers in any thread, whether or not a loop runs there.

    The thread starts with the first call, and again with the first call in a forked process; a fork waits for the calls
    that are running. `at_end` runs in the loop when it is closed; `name` is for the error of a call that comes later.
    """

    def __init__(self, name: str, at_end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._name = name
        self._at_end = at_end
        self._closed = False
        # By process: a fork inherits no thread, and locks as they were.
        self._workers: dict[int, _Worker] = {}
        self._locks: dict[int, threading.Lock] = {}
        with _forking:
            _all_loops.add(self)

    def run(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Return the result of `work()`. Raises what it raises, and StoreClosedError after `close`."""
        pid = os.getpid()
        with self._lock(pid):
            if self._closed:
                raise StoreClosedError(f"{self._name} is closed")
            if pid not in self._workers:
                self._workers[pid] = _Worker()
            call = self._workers[pid].submit(work())
        try:
            return call.result()
        except BaseException:
            call.cancel()  # does something only when the caller was interrupted
            raise

    def close(self) -> None:
        """Let the calls that are running finish, then end the thread. Idempotent."""
        pid = os.getpid()
        with self._lock(pid):
            self._closed = True
            worker = self._workers.pop(pid, None)
        if worker is not None:
            worker.finish_calls()
            worker.end(self._at_end)

    def pause(self) -> threading.Lock:
        """Let the calls that are running finish and start no other one until the returned lock is released."""
        pid = os.getpid()
        lock = self._lock(pid)
        lock.acquire()
        if pid in self._workers:
            self._workers[pid].finish_calls()
        return lock

    def _lock(self, pid: int) -> threading.Lock:
        return self._locks.setdefault(pid, threading.Lock())


class _Worker:
    """One process's loop and thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._calls: set[Future[Any]] = set()
        # A daemon, so that a process which forgets to close its store still ends.
        self._thread = threading.Thread(target=self._serve, name="tokencustody", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._loop.close()
            raise

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        call = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    def finish_calls(self) -> None:
        wait(list(self._calls))

    def end(self, at_end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            asyncio.run_coroutine_threadsafe(at_end(), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stop.wait())


_all_loops: weakref.WeakSet[BackgroundLoop] = weakref.WeakSet()
_forking = threading.Lock()
_paused: list[threading.Lock] = []


def _before_fork() -> None:
    # A transaction that runs in another thread would leave SQLite's own locks taken in the child for ever.
    _forking.acquire()
    _paused.extend(loop.pause() for loop in list(_all_loops))


def _after_fork() -> None:
    while _paused:
        _paused.pop().release()
    _forking.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
