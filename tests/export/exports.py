"""Rollouts to export, and what was exported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Executable

from tests.support.entries import make_entry
from tests.support.rollouts import linear_rollout
from tests.support.staged import Staged
from tokencustody import open_store
from tokencustody.database.url import parse_url
from tokencustody.export import ExportReport
from tokencustody.records import TokenEntry
from tokencustody.schema.opening import CaptureDatabase
from tokencustody.staging.records import CaptureLedgerCommit, StagedCallRecord, staging_key
from tokencustody.store import CaptureStore
from tokencustody.store.staging import SqlStagingStore

RUN = "run-1"


async def put_rollout(
    url: str, entries: Sequence[TokenEntry], *, run: str = RUN, freeze: bool = True
) -> None:
    """Store the calls of one rollout in their order, one transaction each, and freeze it."""
    async with open_store(url, run=run) as store:
        await _put(store, entries, freeze=freeze)


async def _put(store: CaptureStore, entries: Sequence[TokenEntry], *, freeze: bool) -> None:
    for entry in entries:
        await store.sink.put(entry)
    if freeze:
        await store.source.freeze(entries[0].rollout_id)


async def put_linear(url: str, number: int, *, turns: int = 3, run: str = RUN) -> None:
    """Store and freeze `number` rollouts, named rollout-000 and so on."""
    async with open_store(url, run=run) as store:
        for index in range(number):
            rollout = linear_rollout(turns, rollout_id=f"rollout-{index:03}", deltas=[1] if index % 2 else [])
            await _put(store, [turn.entry for turn in rollout], freeze=True)


def branching() -> list[TokenEntry]:
    """Return a root, a chain of two below it, and a later branch; every id tells which call sampled it."""
    return [
        make_entry(model_call_id="root", prompt=[1, 2, 3], generation=[10, 11]),
        make_entry(model_call_id="left", prompt=[1, 2, 3, 10, 11, 4], generation=[20], parent="root"),
        make_entry(model_call_id="leaf", prompt=[1, 2, 3, 10, 11, 4, 20], generation=[30], parent="left"),
        make_entry(model_call_id="right", prompt=[1, 2, 3, 10, 11, 5, 6], generation=[40, 41], parent="root"),
    ]


async def put_staged(
    url: str,
    calls: Sequence[Staged],
    *,
    rollout_id: str = "r",
    staged: Sequence[Staged] | None = None,
    failures: Sequence[tuple[str, str]] = (),
    freeze: bool = True,
) -> None:
    """Stage calls (or only `staged` of them), record them in the ledger, with failures (call, reason), and freeze."""
    with SqlStagingStore(url, run=RUN) as staging:
        for call in calls if staged is None else staged:
            result = staging.stage(StagedCallRecord(**call.snapshot.model_dump()))
            assert result.ok, result.error
    async with open_store(url, run=RUN) as store:
        for call in calls:
            commit = CaptureLedgerCommit(
                rollout_id=rollout_id,
                record=call.record,
                staging_chain=(staging_key(rollout_id, call.record.model_call_id),),
                request_items=[{"role": "user", "content": call.record.model_call_id}],
                response_items=[{"role": "assistant", "content": "ok"}],
            )
            await store.lineage.record(commit)
        for call_id, reason in failures:
            await store.lineage.record_failure(rollout_id, call_id, reason)
        if freeze:
            await store.source.freeze(rollout_id)


async def run_sql(url: str, *statements: Executable) -> list[list[Any]]:
    """Run statements in one transaction, and return the rows of each."""

    def work(connection: Connection) -> list[list[Any]]:
        results = [connection.execute(statement) for statement in statements]
        return [list(result) if result.returns_rows else [] for result in results]

    database = CaptureDatabase(parse_url(url))
    try:
        return await database.write(work)
    finally:
        await database.close()


def parquet_rows(out: Path) -> list[dict[str, Any]]:
    """Return the rows of all files, in their order."""
    import pyarrow.parquet as pq

    return [row for path in sorted(out.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def json_lines(out: Path) -> list[dict[str, Any]]:
    """Return the lines of all files, in their order."""
    return [
        json.loads(line) for path in sorted(out.glob("*.jsonl")) for line in path.read_bytes().splitlines()
    ]


def manifest(out: Path) -> dict[str, Any]:
    """Return the manifest."""
    found: dict[str, Any] = json.loads((out / "_manifest.json").read_bytes())
    return found


def listed(report: ExportReport) -> list[tuple[str, str, str]]:
    """Return (rollout, call, reason) of what an export that left everything out, and no folder, says of it."""
    assert (report.all_left_out, report.export_id, report.destination.exists()) == (True, "", False)
    assert not report.ok
    return [(each.rollout_id, each.model_call_id, each.reason) for each in report.listed]


def left_out(out: Path) -> list[tuple[str, str, str]]:
    """Return (rollout, call, reason) of what the manifest lists as left out."""
    return [(each["rollout_id"], each["model_call_id"], each["reason"]) for each in manifest(out)["left_out"]]
