"""Driving writers, and what it took: seconds, CPU and memory."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import resource
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, ParamSpec, TypeVar

Item = TypeVar("Item")
Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


class Stopwatch:
    """Takes the seconds, and the CPU seconds of this process, that its `with` block takes."""

    seconds = cpu_seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self._began, self._cpu_began = perf_counter(), process_time()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.seconds, self.cpu_seconds = perf_counter() - self._began, process_time() - self._cpu_began


def settle() -> None:
    """Leave nothing of what came before for the timed part to pay: neither dirty pages nor garbage."""
    os.sync()
    gc.unfreeze()
    gc.collect()
    # The collector need not look at the calls that were made for measuring: a server does not hold them.
    gc.freeze()


async def write_all(
    groups: Iterable[Iterable[Item]], writers: int, act: Callable[[Item], Awaitable[object]]
) -> list[float]:
    """Let `writers` tasks take one group after the other, `act` on its items in order, and return each one's
    milliseconds."""
    waiting = iter(groups)
    milliseconds: list[float] = []

    async def write() -> None:
        for group in waiting:
            for item in group:
                began = perf_counter()
                await act(item)
                milliseconds.append(1000 * (perf_counter() - began))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(writers):
            tasks.create_task(write())
    return milliseconds


async def timed(act: Awaitable[Returned]) -> tuple[Returned, float]:
    """Return what `act` returns and its milliseconds."""
    began = perf_counter()
    returned = await act
    return returned, 1000 * (perf_counter() - began)


def in_new_process(
    function: Callable[Arguments, Returned], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Returned:
    """Return the result of `function` in a process that shares nothing with this one."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()


class PeakMemory:
    """Takes the megabytes by which the resident memory of this process rises at most in its `with` block."""

    megabytes = 0.0

    def __enter__(self) -> PeakMemory:
        gc.collect()
        reset = Path("/proc/self/clear_refs")
        if reset.exists():
            reset.write_text("5")  # the peak is now what is resident now
        self._before = _peak_kilobytes()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.megabytes = (_peak_kilobytes() - self._before) / 1000


def _peak_kilobytes() -> float:
    status = Path("/proc/self/status")
    if status.exists():
        line: Any = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return float(line.split()[1]) * 1.024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000  # macOS counts bytes
