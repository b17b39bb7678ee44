"""What comes to the ledger of a frozen rollout is acknowledged, so nothing that was frozen before takes it along."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.database.test_transactions import Points, connection_lost, failing
from tests.support.audited import ask
from tests.support.entries import make_entry
from tests.support.ledger import make_commit
from tests.support.rows import rows_of, run_sql
from tests.support.staged import stage
from tokencustody import TokenCaptureSnapshot, open_store
from tokencustody.errors import CorruptEntryError, PayloadConflictError, StagedCallMissingError
from tokencustody.export import ExportOptions, export
from tokencustody.retention.retention import Retention, Settled
from tokencustody.schema import tables
from tokencustody.staging.records import StagedCallRecord
from tokencustody.store import CaptureStore
from tokencustody.store.base import now
from tokencustody.txn.seal import Held, seal_of
from tokencustody.txn.selection import RolloutFilter
from tokencustody.verify import verify

Write = Callable[[CaptureStore], Awaitable[None]]


async def record(store: CaptureStore) -> None:
    await store.lineage.record(make_commit(model_call_id="late"))


async def record_failure(store: CaptureStore) -> None:
    await store.lineage.record_failure("rollout-1", "late", "worker_capture_failed")


async def import_rows(store: CaptureStore) -> None:
    failed = {"rollout_id": "rollout-1", "model_call_id": "late", "reason": "worker_capture_failed"}
    await store.lineage.import_rows("rollout-1", [failed])


STAGED = stage("late", rollout="rollout-1")


@pytest.mark.parametrize("attachments", [None, {"a": b"1"}])
@pytest.mark.parametrize("coalesce", ["process", "rollout", "off"])
async def test_a_call_that_is_staged_behind_a_freeze_makes_a_version_and_is_nobodys_leftover_until_it_retires(
    store_url: str, faults: Points, attachments: dict[str, Any] | None, coalesce: str
) -> None:
    async with open_store(store_url, run="run-1", coalesce=coalesce) as store:
        early = stage("leftover", rollout="rollout-1").snapshot

        def put(record: StagedCallRecord) -> bool:
            return store.staging.stage(record, attachments=attachments).ok

        assert await asyncio.to_thread(put, early)
        before = await frozen(store)
        faults["after commit, before acknowledgement"] = failing(1, connection_lost)
        for record in (STAGED.snapshot, STAGED.snapshot, early):
            assert await asyncio.to_thread(put, record)
        assert (await events(store_url))[-1] == (before.version + 1, "late_stage", "late")
        assert not await store.source.drop("rollout-1", before.snapshot_id, before.version)
        after = await store.source.freeze("rollout-1")
        assert (after.snapshot_id, after.version) == (before.snapshot_id, before.version + 1)

        assert await orphans_of(store, store_url) == ["rollout-1/leftover"]
        await collect(store_url)
        assert len(await asyncio.to_thread(store.staging.fetch, ["rollout-1/late"])) == 1
        assert await store.source.drop("rollout-1", after.snapshot_id, after.version)
        assert await orphans_of(store, store_url) == ["rollout-1/late"]
        await collect(store_url)
        with pytest.raises(StagedCallMissingError):
            await asyncio.to_thread(store.staging.fetch, ["rollout-1/late"])
        assert await asyncio.to_thread(put, STAGED.snapshot)  # no fence keeps a worker from staging


async def orphans_of(store: CaptureStore, url: str) -> list[str]:
    """Return the calls of which the store, the view and `gc` agree that nobody will read them."""
    orphans = await asyncio.to_thread(store.staging.orphans)
    view = "SELECT rollout_id || '/' || model_call_id AS key FROM audit_staging WHERE is_orphan ORDER BY 1"
    assert [row["key"] for row in ask(url, view)] == orphans
    async with Retention(url) as retention:
        assert await retention.orphans(now(), "run-1") == len(orphans)
    return orphans


async def collect(url: str) -> None:
    async with Retention(url) as retention:
        await retention.collect(now(), lambda _: None, "run-1")


WRITES = {write.__name__: write for write in (record, record_failure, import_rows)}


@pytest.fixture(params=WRITES)
def write(request: pytest.FixtureRequest) -> Write:
    """A way to add to the ledger of rollout-1."""
    return WRITES[request.param]


async def frozen(store: CaptureStore) -> TokenCaptureSnapshot:
    await store.sink.put(make_entry())
    await store.lineage.record(make_commit(model_call_id="early"))
    return await store.source.freeze("rollout-1")


async def events(url: str) -> list[tuple[Any, ...]]:
    names = ("version", "event", "model_call_id")
    found = await rows_of(url, tables.snapshot_versions)
    return sorted(tuple(row[name] for name in names) for row in found)


@pytest.mark.serializable
async def test_a_late_row_makes_a_version_so_that_no_drop_of_the_snapshot_before_removes_it(
    store: CaptureStore, store_url: str, write: Write
) -> None:
    before = await frozen(store)
    await write(store)
    held = await store.lineage.export_rows("rollout-1")
    assert not await store.source.drop("rollout-1", before.snapshot_id, before.version)
    assert await store.lineage.export_rows("rollout-1") == held
    after = await store.source.freeze("rollout-1")
    assert (after.snapshot_id, after.version) == (before.snapshot_id, before.version + 1)
    assert (after.entries, after.incomplete) == (before.entries, before.incomplete)
    assert (await events(store_url))[-1] == (after.version, "late_ledger", "late")
    assert await store.source.drop("rollout-1", after.snapshot_id, after.version)


async def test_a_repeat_makes_no_version(store: CaptureStore, write: Write) -> None:
    before = await frozen(store)
    for _ in range(3):
        await write(store)
    assert (await store.source.freeze("rollout-1")).version == before.version + 1
    await store.lineage.record(make_commit(model_call_id="early"))  # of before the freeze
    await store.lineage.import_rows("rollout-1", await store.lineage.export_rows("rollout-1"))
    await store.lineage.import_rows("rollout-1", [])
    with pytest.raises(PayloadConflictError):
        await store.lineage.record(make_commit(model_call_id="early", text="other"))
    assert (await store.source.freeze("rollout-1")).version == before.version + 1


@pytest.mark.serializable
async def test_a_lost_answer_makes_no_second_version(
    store: CaptureStore, write: Write, faults: Points
) -> None:
    before = await frozen(store)
    faults["after commit, before acknowledgement"] = failing(1, connection_lost)
    await write(store)
    assert (await store.source.freeze("rollout-1")).version == before.version + 1


async def test_rows_of_an_open_rollout_make_no_version(store: CaptureStore, write: Write) -> None:
    await write(store)
    assert (await store.source.freeze("rollout-1")).version == 1


async def test_an_export_does_not_retire_what_it_does_not_hold(
    store: CaptureStore, store_url: str, tmp_path: Path, write: Write
) -> None:
    await store.sink.put(make_entry())
    await store.source.freeze("rollout-1")
    options = ExportOptions(run="run-1", format="calls", include_incomplete=True)
    await export(store_url, tmp_path / "out", options, mark=True)
    await write(store)
    held = await store.lineage.export_rows("rollout-1")
    settled: list[Settled] = []
    async with Retention(store_url) as retention:
        await retention.retire(RolloutFilter(run="run-1", exported=True), settled.append)
    assert settled == []
    report = await export(store_url, tmp_path / "out", options, retire=True)
    assert (report.retired, [kept.why for kept in report.kept]) == (0, ["changed_since"])
    assert await store.lineage.export_rows("rollout-1") == held


CHANGES = {
    "a call was removed": "DELETE FROM ledger_calls WHERE model_call_id = 'early'",
    "a late call was removed": "DELETE FROM ledger_calls WHERE model_call_id = 'late'",
    "a failure was removed": "DELETE FROM ledger_failures",
    "a failure was renamed": "UPDATE ledger_failures SET model_call_id = 'other', row_sha256 = NULL",
    "a call was changed": "UPDATE ledger_calls SET weight_version = 9, row_sha256 = NULL WHERE model_call_id = 'late'",
    "a call lost what its record said": (
        "UPDATE ledger_calls SET recorded_fingerprint_version = NULL, recorded_fingerprint = NULL, row_sha256 = NULL"
        " WHERE model_call_id = 'early'"
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_the_seal_covers_the_ledger_and_what_came_late_to_it(
    store: CaptureStore, store_url: str, tmp_path: Path, change: str
) -> None:
    await store.lineage.record_failure("rollout-1", "failed", "worker_capture_failed")
    await frozen(store)
    await record(store)
    await store.source.freeze("rollout-1")
    await run_sql(store_url, change)
    with pytest.raises(CorruptEntryError, match="rollout-1 of run run-1"):
        await store.source.freeze("rollout-1")
    report = await export(store_url, tmp_path / "out")
    assert (report.rollouts, report.left_out["corrupt"]) == (0, 1)


async def test_a_late_row_does_not_hide_what_is_gone_since_the_freeze(
    store: CaptureStore, store_url: str, write: Write
) -> None:
    await frozen(store)
    await run_sql(store_url, "DELETE FROM entries")
    await write(store)
    with pytest.raises(CorruptEntryError, match="rollout-1 of run run-1"):
        await store.source.freeze("rollout-1")


async def test_a_rollout_that_was_sealed_before_the_ledger_was_is_checked_as_it_was_then(
    store_url: str, tmp_path: Path
) -> None:
    # The hash of revision 0004 of one call, `call-1`, and no intent.
    async with open_store(store_url) as store:
        await store.sink.put(make_entry())
        await store.lineage.record(make_commit(model_call_id="early"))
        snapshot = await store.source.freeze("rollout-1")
        (row,) = await rows_of(store_url, tables.entries)
        held = Held([SimpleNamespace(**row)], [], [], [])
        await run_sql(
            store_url,
            f"UPDATE snapshot_versions SET seal_version = NULL, sealed_sha256 = '{seal_of(held, None)}'"
            " WHERE version = 1",
        )
        assert await store.source.freeze("rollout-1") == snapshot
        await run_sql(store_url, "DELETE FROM ledger_calls")
        assert await store.source.freeze("rollout-1") == snapshot
        await record(store)
        await store.source.freeze("rollout-1")
        await run_sql(store_url, "DELETE FROM ledger_calls")
        with pytest.raises(CorruptEntryError):
            await store.source.freeze("rollout-1")


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM staged_attachments WHERE name = 'a'",
        "DELETE FROM staged_attachments",
        "UPDATE staged_attachments SET name = 'c', row_sha256 = NULL WHERE name = 'a'",
        "INSERT INTO staged_attachments (run, rollout_id, model_call_id, name, kind, data, data_sha256)"
        " SELECT run, rollout_id, model_call_id, 'c', kind, data, data_sha256 FROM staged_attachments WHERE name = 'a'",
    ],
)
async def test_attachments_that_are_gone_new_or_renamed_behind_a_freeze_are_noticed(
    store_url: str, change: str
) -> None:
    async with open_store(store_url, run="run-1") as store:
        for call in ("early", "without"):
            record = stage(call, rollout="rollout-1").snapshot
            attachments = {"a": b"1", "b": "2"} if call == "early" else None
            assert (await asyncio.to_thread(store.staging.stage, record, attachments=attachments)).ok
        before = await frozen(store)
        assert await store.source.freeze("rollout-1") == before
        await run_sql(store_url, change)
        with pytest.raises(CorruptEntryError, match="early of rollout rollout-1 of run run-1"):
            await store.source.freeze("rollout-1")
        with pytest.raises(CorruptEntryError, match="early"):
            await asyncio.to_thread(store.staging.fetch_attachments, "rollout-1/early")
        assert await asyncio.to_thread(store.staging.fetch_attachments, "rollout-1/without") == {}
    findings = (await asyncio.to_thread(verify, store_url)).findings
    assert ("attachment", "early") in {(found.rule, found.model_call_id) for found in findings}
    async with open_store(store_url, run="run-1") as store:
        # Its framework may delete what it has read, with all that is attached.
        await asyncio.to_thread(store.staging.delete, ["rollout-1/early"])
        assert await store.source.freeze("rollout-1") == before
