"""Where the CPU of a put goes: a profile by function, over all threads."""

from __future__ import annotations

import asyncio
import cProfile
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import thread_time
from typing import Any

from benchmarks.calls import independent_rollouts
from benchmarks.results import ProfiledFunction
from benchmarks.stores import DATABASES, opened
from benchmarks.timing import settle, write_all
from benchmarks.workload import Bench, Workload
from tokencustody import TokenEntry

_WRITERS = 64
_LINES = 15


class Profile(Workload):
    """64 writers put calls of 2,000 and 500 tokens under Python's profiler, which makes them slower."""

    name = "profile"
    stores = DATABASES
    rounds = 1

    def __init__(self, *, rollouts: int) -> None:
        self._count = rollouts
        self._rollouts: list[list[TokenEntry]] = []

    def prepare(self, bench: Bench) -> None:
        self._rollouts = independent_rollouts(self._count, 2_000, 500)
        if sys.version_info >= (3, 12):
            bench.results.note(
                "profile: from Python 3.12 on all threads share one profile, which mixes functions that run at the "
                "same time"
            )

    def measure(self, bench: Bench, store: str, turn: int) -> None:
        with bench.arena.fresh(store) as place:
            bench.results.profiles[store] = asyncio.run(self._put(bench, store, place))

    def finish(self) -> None:
        self._rollouts = []

    async def _put(self, bench: Bench, store: str, place: str) -> list[ProfiledFunction]:
        settle()
        profiles: list[cProfile.Profile] = []
        # The store's threads start with its first call, so the profile begins before it is opened.
        with _profiling_new_threads(profiles):
            async with opened(store, place, bench.arena.options) as capture:
                own = cProfile.Profile(thread_time)
                own.enable()
                await write_all(self._rollouts, _WRITERS, capture.sink.put)
                own.disable()
        return top_functions([own, *profiles], _LINES)


@contextmanager
def _profiling_new_threads(profiles: list[cProfile.Profile]) -> Iterator[None]:
    def begin(*_event: Any) -> None:
        profile = cProfile.Profile(thread_time)
        profiles.append(profile)
        profile.enable()  # and replaces this function in its thread

    if sys.version_info < (3, 12):
        threading.setprofile(begin)
    try:
        yield
    finally:
        threading.setprofile(None)


def top_functions(profiles: list[cProfile.Profile], count: int) -> list[ProfiledFunction]:
    """Return the functions that took the most CPU of their own, over all the profiles."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for profile in profiles:
        # Not `create_stats`: it would end the calls that still run, by the clock of this thread instead of their own.
        profile.snapshot_stats()
        for place, (_, calls, own, _, _) in profile.stats.items():
            held = sums[_name(*place)]
            held[0] += calls
            held[1] += own
    total = sum(own for _, own in sums.values())
    found = [ProfiledFunction(name, int(calls), own, own / total) for name, (calls, own) in sums.items()]
    return sorted(found, key=lambda function: -function.own_seconds)[:count]


def _name(file: str, line: int, function: str) -> str:
    if file == "~":
        return function
    path = Path(file)
    parts = path.parts
    # From the package on; a name of the standard library needs no folder.
    start = next(
        (at + 1 for at, part in enumerate(parts) if part in ("site-packages", "src")), len(parts) - 1
    )
    return f"{'/'.join(parts[start:])}:{line} {function}"
