"""The token-free ledger: recording calls and reading the manifest of a rollout."""

from __future__ import annotations

import asyncio
from statistics import median

from benchmarks.calls import ledger_line
from benchmarks.stores import DATABASES, opened
from benchmarks.timing import settle, timed
from benchmarks.workload import Bench, Workload
from tokencustody.staging.records import CaptureLedgerCommit

_READS = 30


class Ledger(Workload):
    """Ledgers of ten and of two hundred calls."""

    name = "manifest"
    stores = DATABASES

    def __init__(self, *, rounds: int) -> None:
        self.rounds = rounds
        self._ledgers: dict[int, list[CaptureLedgerCommit]] = {}

    def prepare(self, bench: Bench) -> None:
        self._ledgers = {calls: list(ledger_line(calls, f"ledger-{calls}")) for calls in (10, 200)}

    def measure(self, bench: Bench, store: str, turn: int) -> None:
        with bench.arena.fresh(store) as place:
            asyncio.run(self._record_and_read(bench, store, place))

    async def _record_and_read(self, bench: Bench, store: str, place: str) -> None:
        async with opened(store, place, bench.arena.options) as capture:
            for calls, commits in self._ledgers.items():
                settle()
                records = [(await timed(capture.lineage.record(commit)))[1] for commit in commits]
                reads = []
                for _ in range(_READS):
                    manifest, milliseconds = await timed(capture.lineage.manifest(f"ledger-{calls}"))
                    if len(manifest["records"]) != calls:
                        raise RuntimeError(f"{store}: the manifest has {len(manifest['records'])} calls")
                    reads.append(milliseconds)
                bench.results.add(
                    f"manifest, {calls} calls", store, record=median(records), manifest=median(reads)
                )
