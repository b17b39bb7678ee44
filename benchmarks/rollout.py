"""One rollout whose prompts grow: before each call its parent is resolved, as a serving process does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.calls import GrowingRollout, Request, growing_rollout
from benchmarks.stores import GYM, STORES, bytes_on_disk, native, opened, payload_bytes
from benchmarks.timing import PeakMemory, in_new_process, settle, timed
from benchmarks.workload import Bench, Workload

_EDGE = 20  # calls at the beginning and at the end that are compared
_REPEATS = 20


@dataclass(frozen=True)
class Reading:
    """What the first resolve and the first freeze of a process that never saw the rollout took."""

    resolve: float
    freeze: float
    freeze_megabytes: float


class Rollout(Workload):
    """One rollout of `calls` calls: how put, resolve, freeze and the bytes on disk go with its length."""

    stores = STORES

    def __init__(self, *, calls: int, rounds: int) -> None:
        self.name = f"rollout-{calls}"
        self.rounds = rounds
        self.calls = calls
        self._rollout = GrowingRollout([], [])
        self._in_gyms_type: list[Any] = []

    def prepare(self, bench: Bench) -> None:
        bench.results.note(
            "on disk: the sizes of Gym's files, of SQLite's file after a checkpoint, and of PostgreSQL's tables with "
            "their indexes and out-of-line values, each without what an empty one takes"
        )
        self._rollout = growing_rollout(self.calls)
        self._in_gyms_type = [native(GYM, entry) for entry in self._rollout.entries]

    def measure(self, bench: Bench, store: str, turn: int) -> None:
        with bench.arena.fresh(store) as place:
            empty = bytes_on_disk(store, place)
            asyncio.run(self._write(bench, store, place))
            bench.results.add(self.name, store, disk=(bytes_on_disk(store, place) - empty) / 1e6)
            if store != GYM:
                bench.results.add(self.name, store, payload=payload_bytes(store, place) / 1e6)
            settle()
            last = (self._rollout.entries[-1].rollout_id, self._rollout.requests[-1])
            reading = in_new_process(read_anew, store, place, dict(bench.arena.options), self.calls, *last)
        bench.results.add(
            self.name,
            store,
            resolve_cold=reading.resolve,
            freeze=reading.freeze,
            freeze_memory=reading.freeze_megabytes,
        )

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
                resolution, milliseconds = await timed(capture.lineage.resolve(rollout_id, request))
                if (resolution.match and resolution.match.model_call_id) != entry.parent_call_id:
                    raise RuntimeError(
                        f"{store}: {entry.model_call_id} got another parent: {resolution.reason}"
                    )
                resolves.append(milliseconds)
                _, milliseconds = await timed(capture.sink.put(entry))
                puts.append(milliseconds)
            # The first is the last call's; the others find what they found before.
            await capture.lineage.resolve(rollout_id, requests[-1])
            for _ in range(_REPEATS):
                _, milliseconds = await timed(capture.lineage.resolve(rollout_id, requests[-1]))
                again.append(milliseconds)
        bench.results.add(
            self.name,
            store,
            put_early=median(puts[:_EDGE]),
            put_late=median(puts[-_EDGE:]),
            resolve_turn=median(resolves[-_EDGE:]),
            resolve_again=median(again),
        )
        bench.results.add_curve(self.name, store, "put", puts)
        bench.results.add_curve(self.name, store, "resolve", resolves)


def read_anew(
    store: str, place: str, options: Mapping[str, Any], calls: int, rollout_id: str, request: Request
) -> Reading:
    """Resolve and freeze the rollout, with connections open but nothing of it seen."""

    async def read() -> Reading:
        async with opened(store, place, options) as capture:
            resolution, resolve = await timed(capture.lineage.resolve(rollout_id, request))
        # Another store: what resolving has cached must not help the freeze, nor count as its memory.
        async with opened(store, place, options) as capture:
            with PeakMemory() as memory:
                snapshot, freeze = await timed(capture.source.freeze(rollout_id))
        if snapshot.incomplete or len(snapshot.entries) != calls:
            raise RuntimeError(f"{store}: the snapshot has {len(snapshot.entries)} of {calls} calls")
        last = max(snapshot.entries, key=lambda entry: len(entry.prompt_token_ids))
        if tuple(last.prompt_token_ids + last.generation_token_ids) != resolution.match.cumulative_token_ids:
            raise RuntimeError(f"{store}: the snapshot and the resolver disagree")
        return Reading(resolve, freeze, memory.megabytes)

    return asyncio.run(read())
