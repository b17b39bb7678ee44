"""Many writers of one database in several processes, as the model servers of a node."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter, process_time
from typing import Any

from benchmarks.bare import Batches, write_like_ours
from benchmarks.calls import CALLS, independent_rollouts, rollout_name
from benchmarks.put import add_floor
from benchmarks.results import percentile
from benchmarks.stores import COMPARED, DATABASES, native, opened
from benchmarks.timing import settle, write_all
from benchmarks.workload import Bench, Workload

PROCESSES = 4
_WRITERS = 16  # tasks of each process
_TEMPLATES = 4  # rollouts whose tokens the others share


@dataclass(frozen=True)
class Written:
    """What one process did, on the clock that all processes of a machine share."""

    began: float
    ended: float
    cpu_seconds: float
    milliseconds: list[float]
    commits: int
    retries: int


class Processes(Workload):
    """`rollouts` rollouts of ten calls of 2,000 and 500 tokens, from four processes of sixteen tasks each."""

    name = "processes"
    stores = COMPARED

    def __init__(self, *, rollouts: int, rounds: int) -> None:
        self.rounds = rounds
        self._rollouts = rollouts

    def measure(self, bench: Bench, store: str, turn: int) -> None:
        with bench.arena.fresh(store) as place:
            settle()
            written = self._write(store, place, dict(bench.arena.options))
            self._add(bench, store, written)
            if store in DATABASES:
                self._add_bare(bench, store, place, sum(each.commits for each in written))

    def _add(self, bench: Bench, store: str, written: list[Written]) -> None:
        calls = CALLS * self._rollouts
        seconds = max(each.ended for each in written) - min(each.began for each in written)
        milliseconds = [time for each in written for time in each.milliseconds]
        bench.results.add(
            self.name,
            store,
            put_rate=calls / seconds,
            put_p50=median(milliseconds),
            put_p99=percentile(milliseconds, 0.99),
            client_cpu=1000 * sum(each.cpu_seconds for each in written) / calls,
        )
        if store in DATABASES:
            bench.results.add(
                self.name,
                store,
                rows_per_commit=calls / sum(each.commits for each in written),
                retries=100 * sum(each.retries for each in written) / calls,
            )

    def _add_bare(self, bench: Bench, store: str, place: str, commits: int) -> None:
        calls = CALLS * self._rollouts
        batches = Batches.like(calls, commits, PROCESSES * _WRITERS)
        with bench.arena.fresh(store) as bare:
            watch = asyncio.run(write_like_ours(store, place, bare, batches))
        add_floor(bench.results, self.name, store, calls, commits, watch)

    def _write(self, store: str, place: str, options: Mapping[str, Any]) -> list[Written]:
        spawn = multiprocessing.get_context("spawn")
        start = spawn.Barrier(PROCESSES)
        answers = spawn.SimpleQueue()
        children = [
            spawn.Process(
                target=write_part,
                args=(store, place, options, range(self._rollouts)[part::PROCESSES], start, answers),
            )
            for part in range(PROCESSES)
        ]
        for child in children:
            child.start()
        # A child that fails breaks the barrier, so that each of them answers.
        written = [answers.get() for _ in children]
        for child in children:
            child.join()
        for each in written:
            if not isinstance(each, Written):
                raise RuntimeError(f"{store}: a writer process failed: {each}")
        return written


def write_part(
    store: str, place: str, options: Mapping[str, Any], numbers: range, start: Any, answers: Any
) -> None:
    """Write this process's rollouts once every process is ready, and answer with what that took, or why not."""
    try:
        answers.put(asyncio.run(_write_part(store, place, options, numbers, start)))
    except Exception as exc:
        start.abort()
        answers.put(f"{type(exc).__name__}: {exc}")


async def _write_part(
    store: str, place: str, options: Mapping[str, Any], numbers: range, start: Any
) -> Written:
    templates = independent_rollouts(_TEMPLATES, 2_000, 500)
    rollouts = [
        [
            native(store, entry.model_copy(update={"rollout_id": rollout_name(number)}))
            for entry in templates[number % _TEMPLATES]
        ]
        for number in numbers
    ]
    async with opened(store, place, options) as capture:
        before = capture.counters()
        await asyncio.to_thread(start.wait, 300)
        began, cpu = perf_counter(), process_time()
        milliseconds = await write_all(rollouts, _WRITERS, capture.sink.put)
        ended, cpu = perf_counter(), process_time() - cpu
        counted = capture.counters() - before
    return Written(began, ended, cpu, milliseconds, counted.transactions, counted.retries)
