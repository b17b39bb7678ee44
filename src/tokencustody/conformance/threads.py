"""Calls of synchronous clients, from threads that no check waits for longer than its timeout."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any


async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a call returns in a thread of its own, or raise what it raises."""
    future: Future[Any] = Future()
    # Running from the start, so that a timeout leaves it open for a thread that comes back late.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as exc:
            future.set_exception(exc)

    # A daemon, not a worker of an executor: one that hangs would keep the event loop from closing.
    threading.Thread(target=run, name="conformance", daemon=True).start()
    return await asyncio.wrap_future(future)


async def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run each call in a thread of its own, all released together, and return their results or errors in order."""
    barrier = threading.Barrier(len(calls))

    def released(call: Callable[[], Any]) -> Any:
        barrier.wait()
        return call()

    return await asyncio.gather(*(in_thread(released, call) for call in calls), return_exceptions=True)
