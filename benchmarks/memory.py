"""How much memory a writing process takes beyond the calls that it was given."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from benchmarks.calls import growing_rollout, independent_rollouts
from benchmarks.stores import STORES, native, opened
from benchmarks.timing import PeakMemory, in_new_process, write_all
from benchmarks.workload import Bench, Workload


class Memory(Workload):
    """The peak while 64 writers put calls of 2,500 tokens, and while one puts a growing rollout of `calls` calls."""

    name = "memory"
    stores = STORES
    rounds = 1

    def __init__(self, *, calls: int) -> None:
        self._calls = calls

    def prepare(self, bench: Bench) -> None:
        bench.results.note(
            "peak memory: by how much the resident memory of the client's process rises, over the calls it holds; a "
            "PostgreSQL server takes its own"
        )

    def measure(self, bench: Bench, store: str, turn: int) -> None:
        shapes = {"memory, 64 writers": (64, 0), f"memory, {self._calls}-call rollout": (1, self._calls)}
        for workload, (writers, calls) in shapes.items():
            with bench.arena.fresh(store) as place:
                megabytes = in_new_process(
                    peak_of_writing, store, place, dict(bench.arena.options), writers, calls
                )
            bench.results.add(workload, store, writer_memory=megabytes)


def peak_of_writing(
    store: str, place: str, options: Mapping[str, Any], writers: int, calls_of_one_rollout: int
) -> float:
    """Return the megabytes by which memory rises while the calls are put."""
    rollouts = (
        [growing_rollout(calls_of_one_rollout).entries]
        if calls_of_one_rollout
        else independent_rollouts(writers, 2_000, 500)
    )
    mine = [[native(store, entry) for entry in calls] for calls in rollouts]
    del rollouts

    async def write() -> float:
        async with opened(store, place, options) as capture:
            with PeakMemory() as memory:
                await write_all(mine, writers, capture.sink.put)
        return memory.megabytes

    return asyncio.run(write())
