"""What `tokencustody export` wrote in Gym's layout, imported into another database, is what was exported."""

from __future__ import annotations

from pathlib import Path

from tests.audit.gym_folders import found, import_folder
from tests.audit.rich import fill_richly
from tests.support.entries import make_entry
from tokencustody import open_store
from tokencustody.audit.export import ExportOptions, Format, export
from tokencustody.audit.gym_import import FindingKind, Outcome
from tokencustody.sql.codec import differing_fields


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
    assert {each.outcome for each in report.rollouts} == {Outcome.IMPORTED}
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
