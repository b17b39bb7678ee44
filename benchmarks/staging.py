"""Staging by the threads of an inference worker."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

from benchmarks.calls import CALLS, staged_rollout
from benchmarks.results import percentile
from benchmarks.stores import DATABASES, RUN
from benchmarks.timing import Stopwatch, settle
from benchmarks.workload import Bench, Workload
from tokencustody.staging.records import StagedCallRecord
from tokencustody.store import SqlStagingStore

THREADS = (1, 16)


class Staging(Workload):
    """One and sixteen threads stage calls of 500 tokens, ten to a rollout, each thread its own rollouts."""

    name = "staging"
    stores = DATABASES

    def __init__(self, *, rollouts: int, rounds: int) -> None:
        self.rounds = rounds
        # The same work for one thread as for all.
        self._count = rollouts
        self._rollouts: list[list[StagedCallRecord]] = []

    def prepare(self, bench: Bench) -> None:
        self._rollouts = [staged_rollout(f"rollout-{number}") for number in range(self._count)]

    def measure(self, bench: Bench, store: str, turn: int) -> None:
        for threads in THREADS if turn % 2 == 0 else THREADS[::-1]:
            with (
                bench.arena.fresh(store) as place,
                SqlStagingStore(place, run=RUN, **bench.arena.options) as staging,
            ):
                self._stage(bench, store, staging, threads)

    def _stage(self, bench: Bench, store: str, staging: SqlStagingStore, threads: int) -> None:
        staging.stage(staged_rollout("warm-up")[0])
        milliseconds: list[float] = []

        def stage(rollouts: Sequence[list[StagedCallRecord]]) -> None:
            for records in rollouts:
                for record in records:
                    began = perf_counter()
                    result = staging.stage(record)
                    milliseconds.append(1000 * (perf_counter() - began))
                    if not result.ok:
                        raise RuntimeError(f"{store}: {result.error}")

        parts = [self._rollouts[thread::threads] for thread in range(threads)]
        settle()
        with ThreadPoolExecutor(threads) as pool, Stopwatch() as watch:
            for done in [pool.submit(stage, part) for part in parts]:
                done.result()
        bench.results.add(
            staging_workload(threads),
            store,
            stage_rate=CALLS * len(self._rollouts) / watch.seconds,
            stage_p99=percentile(milliseconds, 0.99),
            client_cpu=1000 * watch.cpu_seconds / len(milliseconds),
        )


def staging_workload(threads: int) -> str:
    """Return the name under which the results of so many threads stand."""
    return f"staging, {threads} thread{'s' if threads > 1 else ''}"
