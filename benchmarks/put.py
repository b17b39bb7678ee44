"""Putting and freezing: writers with rollouts of their own, ten calls each, every call with its own tokens."""

from __future__ import annotations

import asyncio
from statistics import median
from typing import Any

from benchmarks.bare import Batches, write_like_ours
from benchmarks.calls import CALLS, independent_rollouts
from benchmarks.machine import ServerWatch
from benchmarks.results import FIGURES, Figure, Results, percentile
from benchmarks.stores import (
    BARE,
    COMPARED,
    DATABASES,
    GYM,
    POSTGRESQL,
    Capture,
    Counters,
    native,
    opened,
)
from benchmarks.timing import Stopwatch, settle, write_all
from benchmarks.workload import Bench, Workload
from tokencustody.codec.calls import pack_entry, validated


class Put(Workload):
    """`writers` tasks put the calls of `rollouts` rollouts, then freeze them, as many at a time.

    Beside each database stands its bare driver with the same rows.
    """

    stores = COMPARED

    def __init__(
        self,
        name: str,
        *,
        writers: int,
        rollouts: int,
        rounds: int,
        prompt: int = 2_000,
        generated: int = 500,
    ) -> None:
        self.name = name
        self.rounds = rounds
        self.writers = writers
        self._make = (rollouts, prompt, generated)
        self._rollouts: dict[str, list[list[Any]]] = {}

    def prepare(self, bench: Bench) -> None:
        bench.results.note(
            "bare drivers: they insert the rows that our store wrote in the same round, packed before, with its number "
            "of commits, on tables with the same constraints and indexes whose fences already stand"
        )
        bench.results.note(
            "JSON lines (an fsync for each call) and plain tables (a transaction for each) check nothing and have no "
            "fence: their freeze only reads the calls back"
        )
        rollouts = independent_rollouts(*self._make)
        in_gyms_type = [[native(GYM, entry) for entry in calls] for calls in rollouts]
        self._rollouts = {store: in_gyms_type if store == GYM else rollouts for store in self.stores}

    def measure(self, bench: Bench, store: str, turn: int) -> None:
        with bench.arena.fresh(store) as place:
            counted = asyncio.run(self._put_and_freeze(bench, store, place))
            if counted is not None:
                with bench.arena.fresh(store) as bare:
                    asyncio.run(self._put_bare(bench, store, place, bare, counted))

    def finish(self) -> None:
        self._rollouts = {}

    async def _put_and_freeze(self, bench: Bench, store: str, place: str) -> Counters | None:
        rollouts = self._rollouts[store]
        calls = CALLS * len(rollouts)
        async with opened(store, place, bench.arena.options) as capture:
            before = capture.counters()
            settle()
            with ServerWatch(bench.server_cpu) as server, Stopwatch() as watch:
                milliseconds = await write_all(rollouts, self.writers, capture.sink.put)
            counted = capture.counters() - before
            with Stopwatch() as freezing:
                await self._freeze(store, capture)
        bench.results.add(
            self.name,
            store,
            put_rate=calls / watch.seconds,
            put_p50=median(milliseconds),
            put_p99=percentile(milliseconds, 0.99),
            client_cpu=1000 * watch.cpu_seconds / calls,
            freeze_rate=len(rollouts) / freezing.seconds,
        )
        if store not in DATABASES:
            return None
        if store == POSTGRESQL and server.seconds is not None:
            bench.results.add(self.name, store, server_cpu=1000 * server.seconds / calls)
        bench.results.add(
            self.name,
            store,
            rows_per_commit=calls / counted.transactions,
            retries=100 * counted.retries / calls,
        )
        return counted

    async def _freeze(self, store: str, capture: Capture) -> None:
        async def freeze(rollout_id: str) -> None:
            snapshot = await capture.source.freeze(rollout_id)
            if snapshot.incomplete or len(snapshot.entries) != CALLS:
                raise RuntimeError(f"{store}: {rollout_id} has {len(snapshot.entries)} of {CALLS} calls")

        await write_all([[calls[0].rollout_id] for calls in self._rollouts[store]], self.writers, freeze)

    async def _put_bare(self, bench: Bench, store: str, place: str, bare: str, counted: Counters) -> None:
        calls = CALLS * len(self._rollouts[store])
        watch = await write_like_ours(
            store, place, bare, Batches.like(calls, counted.transactions, self.writers)
        )
        # What stands between the two and needs no database: one thread checks and packs what it was given.
        with Stopwatch() as packing:
            for entries in self._rollouts[store]:
                for entry in entries:
                    pack_entry(validated(entry))
        bench.results.add(self.name, store, pack_rate=calls / packing.seconds)
        add_floor(bench.results, self.name, store, calls, counted.transactions, watch)


def add_floor(
    results: Results, workload: str, store: str, calls: int, commits: int, watch: Stopwatch
) -> None:
    """Add what the driver under `store` took for `calls` calls, and the share of it that the store's puts of this round
    reached, which were added before."""
    floor = calls / watch.seconds
    results.add(
        workload,
        BARE[store],
        put_rate=floor,
        rows_per_commit=calls / commits,
        client_cpu=1000 * watch.cpu_seconds / calls,
    )
    reached = results.figures[Figure(workload, store, FIGURES["put_rate"])][-1]
    results.add(workload, store, floor_share=100 * reached / floor)
