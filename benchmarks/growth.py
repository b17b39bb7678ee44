"""Putting into a database that already holds many calls, beside an empty one."""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack
from uuid import uuid4

from benchmarks.calls import CALLS, independent_rollouts
from benchmarks.stores import DATABASES, POSTGRESQL, RUN, bytes_on_disk, opened
from benchmarks.timing import Stopwatch, settle, write_all
from benchmarks.workload import Bench, Workload
from tests.support import filling
from tests.support.postgres import fetch
from tokencustody import TokenEntry

_WRITERS = 16


class Growth(Workload):
    """Sixteen writers put calls of 2,000 and 500 tokens into an empty database and into one of `held` small calls,
    among whose rollouts the new ones lie."""

    name = "growth"
    stores = DATABASES

    def __init__(self, *, held: int, rollouts: int, rounds: int) -> None:
        self.rounds = rounds
        self.held = held
        self._count = rollouts
        self._stack = ExitStack()
        self._full: dict[str, str] = {}
        self._rollouts: list[list[TokenEntry]] = []
        self._random = random.Random(0)

    def prepare(self, bench: Bench) -> None:
        bench.results.note(
            f"growth: the full database holds {self.held:,} calls in {self.held // CALLS:,} rollouts"
        )
        self._rollouts = independent_rollouts(self._count, 2_000, 500)
        for store in self.stores:
            self._full[store] = self._stack.enter_context(bench.arena.fresh(store))
            self._fill(store)

    def measure(self, bench: Bench, store: str, turn: int) -> None:
        # Names that neither database has, each between two of the full one's.
        names = [f"filled-{self._random.randrange(self.held // CALLS)}-{uuid4().hex}" for _ in self._rollouts]
        for full in (False, True) if turn % 2 == 0 else (True, False):
            if full:
                bench.results.add(
                    self.name, store, full_rate=asyncio.run(self._put(bench, store, self._full[store], names))
                )
            else:
                with bench.arena.fresh(store) as place:
                    rate = asyncio.run(self._put(bench, store, place, names))
                bench.results.add(self.name, store, empty_rate=rate)

    def finish(self) -> None:
        self._stack.close()
        self._rollouts = []

    async def _put(self, bench: Bench, store: str, place: str, names: list[str]) -> float:
        rollouts = [
            [entry.model_copy(update={"rollout_id": name}) for entry in calls]
            for name, calls in zip(names, self._rollouts, strict=True)
        ]
        async with opened(store, place, bench.arena.options) as capture:
            settle()
            with Stopwatch() as watch:
                await write_all(rollouts, _WRITERS, capture.sink.put)
        return CALLS * len(rollouts) / watch.seconds

    def _fill(self, store: str) -> None:
        url = self._full[store]
        filling.fill(url, self.held, run=RUN, tables=("fences", "snapshot_versions", "entries"))
        # What a database does sooner or later after so many rows, it should not do while it is measured.
        if store == POSTGRESQL:
            for statement in ("VACUUM (ANALYZE)", "CHECKPOINT"):
                fetch(url, statement)
        else:
            bytes_on_disk(store, url)
