"""One rollout whose prompts grow: before each call its parent is resolved, as a serving process does.

What resolves no parents only puts and reads.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.bare import Batches, write_like_ours
from benchmarks.calls import GrowingRollout, Request, growing_rollout
from benchmarks.put import add_floor
from benchmarks.stores import (
    COMPARED,
    DATABASES,
    GYM,
    RUN,
    STORES,
    WARM_UP,
    bytes_on_disk,
    native,
    opened,
    payload_bytes,
)
from benchmarks.timing import PeakMemory, in_new_process, settle, timed
from benchmarks.workload import Bench, Workload
from tokencustody import TokenEntry
from tokencustody.training import TrainingSource

_EDGE = 20  # calls at the beginning and at the end that are compared
_REPEATS = 20


@dataclass(frozen=True)
class Reading:
    """What the first resolve and the first freeze of a process that never saw the rollout took."""

    resolve: float | None
    freeze: float
    freeze_megabytes: float


class Rollout(Workload):
    """One rollout of `calls` calls: how put, resolve, freeze and the bytes on disk go with its length.

    With `arrays` each call is given with arrays in place of its lists, which only ours take. Without `others` what
    people write instead is left out.
    """

    def __init__(self, *, calls: int, rounds: int, arrays: bool = False, others: bool = True) -> None:
        self.name = f"rollout-{calls}-arrays" if arrays else f"rollout-{calls}"
        self.stores = DATABASES if arrays else COMPARED if others else STORES
        self.rounds = rounds
        self.calls = calls
        self._arrays = arrays
        self._rollout = GrowingRollout([], [])
        self._in_gyms_type: list[Any] = []

    def prepare(self, bench: Bench) -> None:
        bench.results.note(
            "on disk: the sizes of files, of SQLite's file after a checkpoint, and of PostgreSQL's tables with "
            "their indexes and out-of-line values, each without what an empty one takes"
        )
        made = growing_rollout(self.calls)
        self._in_gyms_type = [native(GYM, entry) for entry in made.entries] if GYM in self.stores else []
        entries = [in_arrays(entry) for entry in made.entries] if self._arrays else made.entries
        self._rollout = GrowingRollout(entries, made.requests)

    def measure(self, bench: Bench, store: str, turn: int) -> None:
        with bench.arena.fresh(store) as place:
            empty = bytes_on_disk(store, place)
            asyncio.run(self._write(bench, store, place))
            bench.results.add(self.name, store, disk=(bytes_on_disk(store, place) - empty) / 1e6)
            if store in DATABASES:
                bench.results.add(self.name, store, payload=payload_bytes(store, place) / 1e6)
                with bench.arena.fresh(store) as bare:
                    batches = Batches(self.calls, 1)
                    watch = asyncio.run(write_like_ours(store, place, bare, batches))
                add_floor(bench.results, self.name, store, self.calls, self.calls, watch)
            settle()
            last = (self._rollout.entries[-1].rollout_id, self._rollout.requests[-1])
            options = dict(bench.arena.options)
            if store in DATABASES:
                # A copy, for a rollout is frozen once.
                with bench.arena.copied(store, place) as copy:
                    arrays = in_new_process(read_arrays, copy, options, self._rollout.entries[-1])
                bench.results.add(self.name, store, freeze_arrays=arrays)
            reading = in_new_process(read_anew, store, place, options, self.calls, *last)
        bench.results.add(self.name, store, freeze=reading.freeze, freeze_memory=reading.freeze_megabytes)
        if reading.resolve is not None:
            bench.results.add(self.name, store, resolve_cold=reading.resolve)

    def finish(self) -> None:
        self._rollout, self._in_gyms_type = GrowingRollout([], []), []

    async def _write(self, bench: Bench, store: str, place: str) -> None:
        entries = self._in_gyms_type if store == GYM else self._rollout.entries
        requests = self._rollout.requests
        rollout_id = entries[0].rollout_id
        resolves, puts, again = [], [], []
        async with opened(store, place, bench.arena.options) as capture:
            settle()
            for entry, request in zip(entries, requests[:-1], strict=True):
                if capture.lineage is not None:
                    resolution, milliseconds = await timed(capture.lineage.resolve(rollout_id, request))
                    if (resolution.match and resolution.match.model_call_id) != entry.parent_call_id:
                        raise RuntimeError(
                            f"{store}: {entry.model_call_id} got another parent: {resolution.reason}"
                        )
                    resolves.append(milliseconds)
                _, milliseconds = await timed(capture.sink.put(entry))
                puts.append(milliseconds)
            if capture.lineage is not None:
                # The first is the last call's; the others find what they found before.
                await capture.lineage.resolve(rollout_id, requests[-1])
                for _ in range(_REPEATS):
                    _, milliseconds = await timed(capture.lineage.resolve(rollout_id, requests[-1]))
                    again.append(milliseconds)
        self._add(bench, store, puts, resolves, again)

    def _add(
        self, bench: Bench, store: str, puts: list[float], resolves: list[float], again: list[float]
    ) -> None:
        bench.results.add(
            self.name,
            store,
            put_rate=1000 * len(puts) / sum(puts),
            put_all=sum(puts) / 1000,
            put_early=median(puts[:_EDGE]),
            put_late=median(puts[-_EDGE:]),
        )
        bench.results.add_curve(self.name, store, "put", puts)
        if resolves:
            bench.results.add(
                self.name, store, resolve_turn=median(resolves[-_EDGE:]), resolve_again=median(again)
            )
            bench.results.add_curve(self.name, store, "resolve", resolves)


def in_arrays(entry: TokenEntry) -> TokenEntry:
    """Return an entry with arrays in place of its lists, as an engine has them."""
    columns = {
        "prompt_token_ids": array("I", entry.prompt_token_ids),
        "generation_token_ids": array("I", entry.generation_token_ids),
        "generation_log_probs": array("d", entry.generation_log_probs),
    }
    return TokenEntry(**{**dict(entry), **columns})


def read_anew(
    store: str, place: str, options: Mapping[str, Any], calls: int, rollout_id: str, request: Request
) -> Reading:
    """Resolve and freeze the rollout, with connections open but nothing of it seen."""

    async def read() -> Reading:
        resolve = None
        async with opened(store, place, options) as capture:
            if capture.lineage is not None:
                resolution, resolve = await timed(capture.lineage.resolve(rollout_id, request))
        # Another store: what resolving has cached must not help the freeze, nor count as its memory.
        async with opened(store, place, options) as capture:
            with PeakMemory() as memory:
                snapshot, freeze = await timed(capture.source.freeze(rollout_id))
        if snapshot.incomplete or len(snapshot.entries) != calls:
            raise RuntimeError(f"{store}: the snapshot has {len(snapshot.entries)} of {calls} calls")
        last = max(snapshot.entries, key=lambda entry: len(entry.prompt_token_ids))
        whole = (*last.prompt_token_ids, *last.generation_token_ids)
        if resolve is not None and whole != resolution.match.cumulative_token_ids:
            raise RuntimeError(f"{store}: the snapshot and the resolver disagree")
        return Reading(resolve, freeze, memory.megabytes)

    return asyncio.run(read())


def read_arrays(place: str, options: Mapping[str, Any], last: TokenEntry) -> float:
    """Return the milliseconds of freezing and reading the rollout of `last` as a trainer's arrays, with connections
    open but nothing of it seen."""

    async def read() -> float:
        async with TrainingSource(place, run=RUN, **options) as source:
            async for _ in source.read([f"{WARM_UP}-arrays"]):
                pass
            began = perf_counter()
            rollouts = [rollout async for rollout in source.read([last.rollout_id])]
            milliseconds = 1000 * (perf_counter() - began)
        [row] = rollouts[0].rows
        if row.token_ids.tolist() != [*last.prompt_token_ids, *last.generation_token_ids]:
            raise RuntimeError("the row of the rollout is not its whole sequence")
        return milliseconds

    return asyncio.run(read())
