"""The table of runs counts what is there, each thing once."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, event

from tests.support.entries import make_entry
from tests.support.ledger import make_commit
from tests.support.rollouts import linear_rollout
from tests.support.rows import rows_of, run_sql
from tests.support.staged import stage
from tokencustody import CaptureStore, open_store
from tokencustody.database.url import parse_url
from tokencustody.overview.runs import RunSummary, summarize_runs, total
from tokencustody.schema import tables
from tokencustody.schema.opening import CaptureDatabase


async def summaries(url: str, run: str | None = None) -> list[RunSummary]:
    database = CaptureDatabase(parse_url(url), creates=False)
    try:
        return await summarize_runs(database, run)
    finally:
        await database.close()


async def fill(store: CaptureStore, url: str) -> None:
    for turn in linear_rollout(3, rollout_id="frozen", deltas=[2]):
        await store.sink.put(turn.entry)
    frozen = await store.source.freeze("frozen")
    for rollout in ("open", "marked", "gone"):
        await store.sink.put(make_entry(rollout))
    await store.sink.mark_incomplete("marked", "lost")
    await store.source.retire(["gone"])
    mark = (
        "INSERT INTO exports (run, rollout_id, export_id, snapshot_id, version, destination, manifest_sha256,"
        " exported_at, written_by) VALUES (:run, :rollout, :export, :snapshot, 1, 'out',"
        f" '{'0' * 64}', '2026-01-01 00:00:00.000000', 'me')"
    )
    # Twice at its snapshot, which counts once, and once at another, which does not.
    for rollout, export, snapshot in (
        ("frozen", "e1", frozen.snapshot_id),
        ("frozen", "e2", frozen.snapshot_id),
        ("gone", "e1", "another"),
    ):
        await run_sql(url, mark, run=store.sink.run, rollout=rollout, export=export, snapshot=snapshot)
    for rollout, call in (("open", "a"), ("open", "b"), ("gone", "a"), ("only-staged", "a")):
        staged = stage(call, rollout=rollout, extras={"number": 1}).snapshot
        assert (await asyncio.to_thread(store.staging.stage, staged, attachments={"raw": b"12345"})).ok
    await store.lineage.record(make_commit("open", "a"))


async def test_a_run_is_summed_up_from_all_of_its_rows(store_url: str) -> None:
    async with open_store(store_url, run="run-1") as store:
        await fill(store, store_url)
    async with open_store(store_url, run="another") as store:
        await store.sink.put(make_entry())
    async with open_store(store_url, run="staged-only") as store:
        assert (await asyncio.to_thread(store.staging.stage, stage("a").snapshot)).ok
    entries = [row for row in await rows_of(store_url, tables.entries) if row["run"] == "run-1"]
    staged = [row for row in await rows_of(store_url, tables.staged_calls) if row["run"] == "run-1"]
    found = await summaries(store_url)
    assert [run.run for run in found] == ["another", "run-1", "staged-only"]
    summary = found[1]
    opened, active = summary.first_opened, summary.last_activity
    assert isinstance(opened, datetime)
    assert isinstance(active, datetime)
    assert opened < active
    assert active == (await newest_ledger_row(store_url))
    stored = sum(len(row["payload"]) for row in entries)
    stored += sum(len(row["payload"]) + len(row["extras"]) + 5 for row in staged)
    assert summary == RunSummary(
        run="run-1",
        rollouts=4,
        open=2,
        frozen=1,
        retired=1,
        incomplete=1,
        exported=1,
        partly_exported=1,
        calls=5,
        prompt_tokens=sum(row["prompt_len"] for row in entries),
        generated_tokens=sum(row["generation_len"] for row in entries),
        stored_bytes=stored,
        ledger_calls=1,
        staged_calls=4,
        orphans=2,
        first_opened=opened,
        last_activity=active,
    )
    assert await summaries(store_url, "run-1") == [summary]
    assert await summaries(store_url, "nobody") == []
    assert (found[2].rollouts, found[2].staged_calls, found[2].orphans) == (0, 1, 1)
    assert found[2].first_opened is None
    assert found[2].last_activity is not None


async def newest_ledger_row(url: str) -> datetime:
    (row,) = await rows_of(url, tables.ledger_calls)
    moment: datetime = row["committed_at"]
    return moment


async def test_orphans_are_those_that_the_staging_store_lists(store_url: str) -> None:
    async with open_store(store_url, run="run-1") as store:
        await fill(store, store_url)
        # Behind a freeze: whoever froze is yet to look again.
        await store.source.freeze("behind")
        assert (await asyncio.to_thread(store.staging.stage, stage("late", rollout="behind").snapshot)).ok
        # A ledger of the run names what was staged for another rollout.
        await store.lineage.record(make_commit("open", "c", staging_key="gone/a"))
        orphans = await asyncio.to_thread(store.staging.orphans)
    assert [run.orphans for run in await summaries(store_url)] == [len(orphans)] == [1]


def test_the_total_adds_up_every_run() -> None:
    early, late = datetime.fromisoformat("2026-01-01T00:00Z"), datetime.fromisoformat("2026-02-01T00:00Z")
    runs = [
        RunSummary("a", rollouts=2, open=2, stored_bytes=5, first_opened=late, last_activity=late),
        RunSummary("b", rollouts=1, frozen=1, stored_bytes=7, first_opened=early, last_activity=early),
        RunSummary("c", staged_calls=3, last_activity=early),
    ]
    assert total(runs) == RunSummary(
        "", 3, open=2, frozen=1, stored_bytes=12, staged_calls=3, first_opened=early, last_activity=late
    )
    assert total([]) == RunSummary("")
    assert total([RunSummary("a", stored_bytes=None)]).stored_bytes is None


async def test_the_number_of_statements_does_not_depend_on_the_number_of_runs(store_url: str) -> None:
    async def statements(runs: int) -> int:
        for number in range(runs):
            async with open_store(store_url, run=f"run-{number}") as store:
                await store.sink.put(make_entry())
        counted: list[str] = []

        def count(_c: Any, _k: Any, text: str, *_: Any) -> None:
            counted.append(text)

        event.listen(Engine, "before_cursor_execute", count)
        try:
            assert len(await summaries(store_url)) == runs
        finally:
            event.remove(Engine, "before_cursor_execute", count)
        return len(counted)

    assert await statements(1) == await statements(5) < 20
