"""Folders that nemo-gym's own file store wrote, imported: a trainer then freezes what Gym's own source gives."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from nemo_gym.token_id_capture import (
    CaptureLedgerCommit,
    FileLineageStore,
    TokenCaptureSnapshot,
    TokenCaptureStore,
    TokenEntry,
    trajectories_from_source,
)
from nemo_gym.token_id_capture.staging.records import RolloutManifest

from tests.interop.test_nemo_gym_capture import comparable, serve_rollout
from tests.support.entries import REQUEST, continuation
from tests.support.ledger import make_commit
from tokencustody import open_store
from tokencustody.export import ExportOptions, export
from tokencustody.gym_import import GymImporter, ImportOutcome, ImportReport
from tokencustody.integrations.nemo_gym import SqlLineageStore, SqlTokenSource

RUN = "imported"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "gym-files"


@pytest.fixture
async def gym_ledger(folder: Path) -> AsyncIterator[FileLineageStore]:
    store = FileLineageStore(folder)
    yield store
    await store.close()


async def import_folder(url: str, folder: Path, **options: Any) -> ImportReport:
    async with GymImporter(url, run=RUN) as importer:
        return await importer.import_folder(folder, **options)


@asynccontextmanager
async def source_of(url: str) -> AsyncIterator[SqlTokenSource]:
    async with SqlTokenSource(url, run=RUN) as source:
        yield source


def content(snapshot: TokenCaptureSnapshot) -> Any:
    """Return what a snapshot holds; a repr tells NaN, -0.0 and the order of keys apart."""
    entries = sorted(repr(entry) for entry in snapshot.entries)
    return snapshot.rollout_id, entries, snapshot.incomplete


def random_entry(rng: random.Random, rollout_id: str, call: int, parent: TokenEntry | None) -> TokenEntry:
    """Return a record with what JSON makes hard: floats of every size, wide ids, odd text, unknown fields."""
    prompt = [rng.randrange(2 ** rng.choice((8, 16, 31, 63))) for _ in range(rng.randrange(5))]
    if parent is not None:
        prompt = [*parent.prompt_token_ids, *parent.generation_token_ids, *prompt]
    count = rng.randrange(4)
    extras = {
        "zz_unknown": {
            "b": rng.randrange(2**64),
            "a": [-0.0, rng.random() * 10.0 ** rng.randrange(-300, 300), None],
        },
        "cls": "\0é\u2028\U0001f600",
        "unknown": -(2**63),
    }
    return TokenEntry(
        rollout_id=rollout_id,
        model_call_id=f"call {call} é",
        model=rng.choice(["", "policy", "a\0b"]),
        prompt_token_ids=prompt,
        generation_token_ids=[rng.randrange(200_000) for _ in range(count)],
        generation_log_probs=[
            rng.choice([-0.0, 5e-324, -1 / 3, -1.7976931348623157e308]) for _ in range(count)
        ],
        created_at=rng.random() * 2e9,
        parent_call_id=parent.model_call_id if parent else None,
        parent_resolution="resolved" if parent else "root",
        **extras,
    )


@pytest.mark.parametrize("delta_records", [False, True], ids=["full-prompts", "delta-prompts"])
@pytest.mark.parametrize("lost_turn", [None, 0, 2], ids=["complete", "first-call-lost", "last-call-lost"])
async def test_gym_builds_the_same_trajectories_from_an_imported_rollout_as_from_its_own_files(
    store_url: str,
    folder: Path,
    gym_files: TokenCaptureStore,
    gym_ledger: FileLineageStore,
    delta_records: bool,
    lost_turn: int | None,
) -> None:
    await serve_rollout("rollout-1", gym_files, gym_ledger, delta_records=delta_records, lost_turn=lost_turn)
    report = await import_folder(store_url, folder)
    assert [each.outcome for each in report.rollouts] == [ImportOutcome.IMPORTED]
    async with source_of(store_url) as source:
        imported = comparable(await trajectories_from_source("rollout-1", source))
    assert imported == comparable(await trajectories_from_source("rollout-1", gym_files))
    assert imported["mask_sample"] is (lost_turn is not None)


async def test_every_bit_of_a_record_survives_the_way_through_gyms_file(
    store_url: str, folder: Path, gym_files: TokenCaptureStore
) -> None:
    rng = random.Random(7)
    for rollout in range(5):
        parent = None
        for call in range(6):
            entry = random_entry(rng, f"rollout-{rollout}", call, parent)
            await gym_files.put(entry)
            parent = entry if rng.random() < 0.8 else None
    report = await import_folder(store_url, folder)
    assert report.is_clean
    assert sum(each.added for each in report.rollouts) == 30
    async with source_of(store_url) as source:
        for rollout in range(5):
            theirs, ours = (
                await gym_files.freeze(f"rollout-{rollout}"),
                await source.freeze(f"rollout-{rollout}"),
            )
            assert content(ours) == content(theirs)


async def _frozen(store: TokenCaptureStore) -> None:
    await store.freeze("rollout-1")


async def _marked_before(store: TokenCaptureStore) -> None:
    await store.mark_incomplete("rollout-1", "lost")
    await store.freeze("rollout-1")


async def _marked_after(store: TokenCaptureStore) -> None:
    await store.freeze("rollout-1")
    await store.mark_incomplete("rollout-1")


async def _dangling(store: TokenCaptureStore) -> None:
    await store.begin_call("rollout-1", "never-came")
    await store.freeze("rollout-1")


async def _conflicting(store: TokenCaptureStore) -> None:
    (entry, *_) = store.read_entries("rollout-1")
    with pytest.raises(ValueError, match="different payload"):
        await store.put(entry.model_copy(update={"model": "another"}))
    await store.freeze("rollout-1")


@pytest.mark.parametrize(
    ("freeze", "incomplete"),
    [
        (_frozen, False),
        (_marked_before, True),
        (_marked_after, True),
        (_dangling, True),
        (_conflicting, True),
    ],
)
async def test_a_frozen_rollout_keeps_gyms_snapshot_id_and_version_and_is_dropped_by_them(
    store_url: str,
    folder: Path,
    gym_files: TokenCaptureStore,
    gym_ledger: FileLineageStore,
    freeze: Callable[[TokenCaptureStore], Awaitable[None]],
    incomplete: bool,
) -> None:
    await serve_rollout("rollout-1", gym_files, gym_ledger, delta_records=True)
    await freeze(gym_files)
    theirs = await gym_files.freeze("rollout-1")
    assert theirs.incomplete is incomplete
    (imported,) = (await import_folder(store_url, folder)).rollouts
    assert (imported.state, imported.incomplete) == ("frozen", incomplete)
    async with source_of(store_url) as source:
        ours = await source.freeze("rollout-1")
        assert (ours.snapshot_id, ours.version) == (theirs.snapshot_id, theirs.version)
        assert content(ours) == content(theirs)
        assert not await source.drop("rollout-1", theirs.snapshot_id, theirs.version - 1)
        assert await source.drop("rollout-1", theirs.snapshot_id, theirs.version)


async def test_a_rollout_that_gym_dropped_stays_fenced_and_its_drop_may_be_repeated(
    store_url: str, folder: Path, gym_files: TokenCaptureStore, gym_ledger: FileLineageStore
) -> None:
    await serve_rollout("rollout-1", gym_files, gym_ledger, delta_records=False)
    await gym_ledger.record(_gym_commit(make_commit()))
    frozen = await gym_files.freeze("rollout-1")
    consumed = {"snapshot_id": frozen.snapshot_id, "version": frozen.version}
    assert await gym_files.drop("rollout-1", **consumed)
    (imported,) = (await import_folder(store_url, folder)).rollouts
    assert (imported.outcome, imported.state) == (ImportOutcome.IMPORTED, "retired")
    assert [finding.file for finding in imported.findings] == ["rollout-1.lineage.jsonl"]
    (again,) = (await import_folder(store_url, folder)).rollouts
    assert again.outcome is ImportOutcome.ALREADY_THERE
    async with source_of(store_url) as source:
        assert await source.drop("rollout-1", **consumed)
        assert not await source.drop("rollout-1", frozen.snapshot_id, frozen.version + 1)


async def test_a_rollout_that_goes_on_in_gyms_files_is_imported_further_until_it_is_frozen(
    store_url: str, folder: Path, gym_files: TokenCaptureStore
) -> None:
    rng = random.Random(3)
    first = random_entry(rng, "rollout-1", 0, None)
    second = random_entry(rng, "rollout-1", 1, first)
    third = random_entry(rng, "rollout-1", 2, second)
    await gym_files.begin_call("rollout-1", second.model_call_id)
    await gym_files.put(first)
    outcomes = [await import_folder(store_url, folder), await import_folder(store_url, folder)]
    await gym_files.put(second)
    outcomes.append(await import_folder(store_url, folder))
    await gym_files.put(third)
    await gym_files.freeze("rollout-1")
    outcomes += [await import_folder(store_url, folder), await import_folder(store_url, folder)]
    await gym_files.mark_incomplete("rollout-1", "lost")
    outcomes.append(await import_folder(store_url, folder))
    assert [report.rollouts[0].outcome for report in outcomes] == [
        ImportOutcome.IMPORTED,
        ImportOutcome.ALREADY_THERE,
        ImportOutcome.ADDED,
        ImportOutcome.ADDED,
        ImportOutcome.ALREADY_THERE,
        ImportOutcome.ADDED,
    ]
    assert all(report.is_clean for report in outcomes)
    theirs = await gym_files.freeze("rollout-1")
    async with source_of(store_url) as source:
        ours = await source.freeze("rollout-1")
    assert content(ours) == content(theirs)
    assert (ours.snapshot_id, ours.version) == (theirs.snapshot_id, theirs.version)


def _gym_commit(commit: Any) -> CaptureLedgerCommit:
    data = commit.model_dump()
    data["record"].pop("capture_key")
    return CaptureLedgerCommit.model_validate(data)


async def test_an_imported_ledger_has_gyms_manifest_and_resolves_as_gyms_does(
    store_url: str, folder: Path, gym_ledger: FileLineageStore
) -> None:
    root = make_commit()
    request = continuation(REQUEST, "Paris.", "?")
    child = make_commit(model_call_id="call-2", parent=root, request=request, text="é\u2028")
    for commit in (root, child):
        await gym_ledger.record(_gym_commit(commit))
    await gym_ledger.record_failure("rollout-1", "call-3", "worker_capture_failed")
    (imported,) = (await import_folder(store_url, folder)).rollouts
    assert (imported.outcome, imported.ledger_rows, imported.findings) == (ImportOutcome.IMPORTED, 3, [])
    (again,) = (await import_folder(store_url, folder)).rollouts
    assert again.outcome is ImportOutcome.ALREADY_THERE
    async with SqlLineageStore(store_url, run=RUN) as lineage:
        ours, theirs = await lineage.manifest("rollout-1"), await gym_ledger.manifest("rollout-1")
        assert RolloutManifest.model_validate(ours) == RolloutManifest.model_validate(theirs)
        asked = continuation(REQUEST, "Paris.", "And of Spain?")
        assert await lineage.resolve("rollout-1", asked) == await gym_ledger.resolve("rollout-1", asked)


@pytest.mark.parametrize("claimed", [None, "b" * 64])
async def test_a_ledger_goes_to_gyms_files_and_back_with_the_fingerprint_that_its_conversation_has(
    store_url: str, tmp_path: Path, claimed: str | None
) -> None:
    next_request = continuation(REQUEST, "Paris.", "And of Spain?")
    commit = make_commit()
    record = commit.record.model_copy(update={"continuation_fingerprint": claimed})
    async with open_store(store_url, run="first") as store:
        await store.lineage.record(commit.model_copy(update={"record": record}))
        await store.source.freeze("rollout-1")
        manifest = await store.lineage.manifest("rollout-1")
    await export(store_url, tmp_path / "files", ExportOptions(run="first", format="gym"))
    gyms = FileLineageStore(tmp_path / "files")
    found = await gyms.resolve("rollout-1", next_request)
    assert (found.match is not None, found.match.model_call_id) == (True, "call-1")
    await import_folder(store_url, tmp_path / "files")
    async with SqlLineageStore(store_url, run=RUN) as imported:
        again = await imported.resolve("rollout-1", next_request)
        assert again.match is not None
        assert again.match.staging_chain == found.match.staging_chain
        assert await imported.manifest("rollout-1") == manifest
    await gyms.close()


async def test_a_file_that_a_process_of_gym_is_writing_is_waited_for(
    store_url: str, folder: Path, gym_files: TokenCaptureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    from tokencustody.errors import StoreUnavailableError
    from tokencustody.gym_import import files

    await gym_files.put(random_entry(random.Random(1), "rollout-1", 0, None))
    monkeypatch.setattr(files, "_PATIENCE", 0.0)
    with gym_files.lock_path_for("rollout-1").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreUnavailableError, match=r"rollout-1\.tokens\.lock has been locked"):
            await import_folder(store_url, folder)
    assert (await import_folder(store_url, folder)).is_clean
