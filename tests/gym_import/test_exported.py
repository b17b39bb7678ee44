"""What `tokencustody export` wrote in Gym's layout, imported into another database, is what was exported."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from tests.gym_import.gym_folders import found, import_folder
from tests.support.entries import make_entry
from tests.support.ledger import make_commit
from tests.support.rich import fill_richly, rows
from tokencustody import open_store
from tokencustody.codec.calls import differing_fields
from tokencustody.errors import PayloadConflictError
from tokencustody.export import ExportOptions, Format, export
from tokencustody.gym_import import FindingKind, ImportOutcome


async def test_an_export_in_gyms_layout_comes_back_with_equal_calls_snapshots_and_ledgers(
    store_url: str, tmp_path: Path
) -> None:
    await fill_richly(store_url)
    # What strict JSON can carry; the others say why they were left out.
    odd = make_entry("plain", "call é\u2028", log_probs=[-0.0, 5e-324, -1 / 3], model="a\0b", zz=2**64 - 1)
    async with open_store(store_url, run="run-1") as store:
        await store.sink.put(odd)
        await store.source.freeze("plain")
    options = ExportOptions(format=Format.GYM, run="run-1", include_incomplete=True)
    await export(store_url, tmp_path / "gym", options)
    target = f"sqlite:///{tmp_path / 'imported.db'}"
    report = await import_folder(target, tmp_path / "gym", run="run-1")
    assert report.is_clean, report
    assert {each.outcome for each in report.rollouts} == {ImportOutcome.IMPORTED}
    assert [finding.kind for finding in report.strangers] == [FindingKind.NOTE]  # the manifest
    names = [each.rollout_id for each in report.rollouts]
    assert {"deltas", "marked", "plain"} <= set(names), [found(each) for each in report.rollouts]
    async with open_store(store_url, run="run-1") as ours, open_store(target, run="run-1") as theirs:
        for name in names:
            before, after = await ours.source.freeze(name), await theirs.source.freeze(name)
            for first, second in zip(before.entries, after.entries, strict=True):
                # Every bit but the order of keys, which Gym's files do not keep.
                assert differing_fields(first, second) == []
            assert (after.snapshot_id, after.incomplete) == (before.snapshot_id, before.incomplete)
            # Each freeze of the same snapshot may be dropped by what either database says of it.
            assert after.version == before.version
            assert await theirs.lineage.manifest(name) == await ours.lineage.manifest(name)


async def fill_incomplete(url: str) -> None:
    """Add frozen rollouts, each incomplete for another reason, or with another ledger."""
    named = [{"role": "user", "content": "hi", "name": "bob"}]
    async with open_store(url, run="run-1") as store:
        await store.sink.put(make_entry("conflict"))
        with contextlib.suppress(PayloadConflictError):
            await store.sink.put(make_entry("conflict", model="another"))
        await store.sink.put(make_entry("dangling"))
        await store.sink.begin_call("dangling", "never-came")
        await store.sink.put(make_entry("marked"))
        await store.sink.mark_incomplete("marked", "")
        await store.sink.mark_incomplete("marked", "lost")
        await store.sink.put(make_entry("refused"))
        await store.sink.begin_call("refused", "too-long")
        await store.sink.refuse_call("refused", model_call_id="too-long", code=None)
        await store.lineage.record(make_commit("ledger"))
        await store.lineage.record(make_commit("claimed", continuation_fingerprint="f" * 64))
        await store.lineage.record(make_commit("unversioned", fingerprint_version=0))
        await store.lineage.record(make_commit("named", request=named))
        await store.lineage.import_rows("moved", await store.lineage.export_rows("ledger"))
        await store.lineage.record(make_commit("failed"))
        for reason in ("first", "second"):
            await store.lineage.record_failure("failed", "call-1", reason)
            await store.lineage.record_failure("failed", "call-2", reason)
        for name in INCOMPLETE:
            await store.source.freeze(name)


INCOMPLETE = (
    *("conflict", "dangling", "marked", "refused"),
    *("ledger", "claimed", "unversioned", "named", "moved", "failed"),
)


async def test_an_export_in_gyms_layout_changes_nothing_where_it_came_from_nor_where_it_was_imported(
    store_url: str, tmp_path: Path
) -> None:
    await fill_incomplete(store_url)
    options = ExportOptions(format=Format.GYM, run="run-1", include_incomplete=True)
    await export(store_url, tmp_path / "gym", options, mark=False)
    target = f"sqlite:///{tmp_path / 'imported.db'}"
    assert len((await import_folder(target, tmp_path / "gym", run="run-1")).rollouts) == len(INCOMPLETE)
    for url in (store_url, target):
        before = await rows(url)
        again = await import_folder(url, tmp_path / "gym", run="run-1")
        assert {each.rollout_id: each.outcome for each in again.rollouts} == dict.fromkeys(
            INCOMPLETE, ImportOutcome.ALREADY_THERE
        ), [found(each) for each in again.rollouts]
        assert await rows(url) == before


async def test_a_ledger_row_that_was_altered_in_the_files_is_a_conflict(
    store_url: str, tmp_path: Path
) -> None:
    await fill_incomplete(store_url)
    options = ExportOptions(format=Format.GYM, run="run-1", include_incomplete=True)
    await export(store_url, tmp_path / "gym", options, mark=False)
    before = await rows(store_url)
    file = tmp_path / "gym" / "ledger.lineage.jsonl"
    line = json.loads(file.read_bytes())
    for field, value in {"weight_version": 99, "fingerprint": "0" * 64, "fingerprint_version": 1}.items():
        file.write_text(json.dumps(line | {field: value}) + "\n")
        report = await import_folder(store_url, tmp_path / "gym", run="run-1")
        conflicting = [each.rollout_id for each in report.rollouts if each.outcome is ImportOutcome.CONFLICT]
        assert conflicting == ["ledger"], field
        assert await rows(store_url) == before
