"""What it costs to let PostgreSQL itself say that each transaction is serializable."""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.calls import CALLS, independent_rollouts
from benchmarks.results import in_turn
from benchmarks.stores import POSTGRESQL, opened
from benchmarks.timing import Stopwatch, settle, write_all
from benchmarks.workload import Bench, Workload
from tokencustody import TokenEntry
from tokencustody.database.coalescing import Coalesce
from tokencustody.states import Isolation

# Each call in a transaction of plain statements tells which part of the price is not the level's.
_OPTIONS: dict[str, dict[str, Any]] = {
    "committed_rate": {},
    "alone_rate": {"coalesce": Coalesce.ROLLOUT},
    "serializable_rate": {"isolation": Isolation.SERIALIZABLE},
}


class Levels(Workload):
    """`writers` tasks put calls of 2,000 and 500 tokens at both levels, one after the other within each round."""

    stores = (POSTGRESQL,)

    def __init__(self, name: str, *, writers: int, rollouts: int, rounds: int) -> None:
        self.name = name
        self.rounds = rounds
        self._writers = writers
        self._count = rollouts
        self._rollouts: list[list[TokenEntry]] = []

    def prepare(self, bench: Bench) -> None:
        self._rollouts = independent_rollouts(self._count, 2_000, 500)

    def measure(self, bench: Bench, store: str, turn: int) -> None:
        rates = {}
        for key in in_turn(list(_OPTIONS), turn):
            with bench.arena.fresh(store) as place:
                rates[key], retries = asyncio.run(self._put(store, place, _OPTIONS[key]))
            if key == "serializable_rate":
                bench.results.add(self.name, store, retries=100 * retries / (CALLS * self._count))
        share = rates["serializable_rate"] / rates["committed_rate"]
        bench.results.add(self.name, store, **rates, serializable_share=share)

    def finish(self) -> None:
        self._rollouts = []

    async def _put(self, store: str, place: str, options: dict[str, Any]) -> tuple[float, int]:
        """Return the puts a second, and how many tries were repeated."""
        async with opened(store, place, options) as capture:
            before = capture.counters()
            settle()
            with Stopwatch() as watch:
                await write_all(self._rollouts, self._writers, capture.sink.put)
            return CALLS * self._count / watch.seconds, (capture.counters() - before).retries
