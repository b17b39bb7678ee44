"""An import may be repeated, killed or wrong about the database: nothing there is overwritten or half."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import false, func, select, update

from tests.gym_import.gym_folders import (
    found,
    freeze,
    import_folder,
    import_one,
    line_of,
    state_of,
    write_rollout,
)
from tests.support.entries import make_entry
from tests.support.killed import killed_at
from tests.support.rich import execute, rows
from tests.support.rollouts import linear_rollout
from tokencustody import open_store
from tokencustody.codec.calls import differing_fields
from tokencustody.database.url import parse_url
from tokencustody.gym_import import ImportOutcome, importing
from tokencustody.records import TokenEntry
from tokencustody.schema.opening import CaptureDatabase
from tokencustody.schema.tables import entries, fences
from tokencustody.store import SqlTokenSink, SqlTokenSource
from tokencustody.txn.sequences import KnownSequences

ENTRIES = [turn.entry for turn in linear_rollout(4)]
LINES = [line_of(entry) for entry in ENTRIES]
FROZEN = state_of(
    {entry.model_call_id: line for entry, line in zip(ENTRIES, LINES, strict=True)},
    frozen=True,
    snapshot_id="snapshot-1",
    version=5,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "gym"


async def put(url: str, *entries_to_put: TokenEntry) -> None:
    async with SqlTokenSink(url) as sink:
        for entry in entries_to_put:
            await sink.put(entry)


async def test_a_repeated_import_changes_nothing(store_url: str, folder: Path) -> None:
    write_rollout(folder, LINES, intents=["call-0", "never-came"], marks=["lost"], state=FROZEN)
    assert (await import_one(store_url, folder)).outcome is ImportOutcome.IMPORTED
    before = await rows(store_url)
    again = await import_one(store_url, folder)
    assert (again.outcome, again.added, again.calls) == (ImportOutcome.ALREADY_THERE, 0, 4)
    assert await rows(store_url) == before


async def test_a_dry_run_says_what_would_be_done_and_makes_nothing(new_sqlite_url: str, folder: Path) -> None:
    write_rollout(folder, LINES[:2])
    imported = await import_one(new_sqlite_url, folder, dry_run=True)
    assert (imported.outcome, imported.added) == (ImportOutcome.IMPORTED, 2)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["gym"]


async def test_a_dry_run_of_more_calls_adds_none(store_url: str, folder: Path) -> None:
    write_rollout(folder, LINES[:2])
    await import_one(store_url, folder)
    before = await rows(store_url)
    write_rollout(folder, LINES, marks=["lost"])
    imported = await import_one(store_url, folder, dry_run=True)
    assert (imported.outcome, imported.added) == (ImportOutcome.ADDED, 2)
    assert await rows(store_url) == before


async def test_what_was_put_by_a_serving_process_is_known_again(store_url: str, folder: Path) -> None:
    odd = TokenEntry.model_validate({**dict(ENTRIES[1]), "zz": {"b": 1, "a": 2}, "aa": 3})
    await put(store_url, ENTRIES[0], odd, *ENTRIES[2:])
    before = await rows(store_url)
    write_rollout(folder, [LINES[0], line_of(odd), *LINES[2:]])
    assert (await import_one(store_url, folder)).outcome is ImportOutcome.ALREADY_THERE
    assert await rows(store_url) == before


CONFLICTS = {
    "other content": ([line_of(ENTRIES[0], model="another")], None, ("conflict", "jsonl", 1, "call-0")),
    "other snapshot": (LINES, FROZEN, ("conflict", "json", None, None)),
    "more calls": ([*LINES, line_of(linear_rollout(5)[4].entry)], None, ("conflict", "jsonl", 5, "call-4")),
}


@pytest.mark.parametrize(("lines", "state", "expected"), CONFLICTS.values(), ids=CONFLICTS.keys())
async def test_what_a_frozen_rollout_of_the_database_has_otherwise_is_a_conflict_and_stays(
    store_url: str, folder: Path, lines: list[bytes], state: dict[str, Any] | None, expected: Any
) -> None:
    await put(store_url, *ENTRIES)
    await freeze(store_url)
    before = await rows(store_url)
    write_rollout(folder, lines, state=state)
    for dry_run in (True, False):
        imported = await import_one(store_url, folder, dry_run=dry_run)
        assert (imported.outcome, imported.added, found(imported)) == (ImportOutcome.CONFLICT, 0, [expected])
    assert await rows(store_url) == before


@pytest.mark.parametrize("appears", ["before", "meanwhile"])
async def test_a_conflict_undoes_what_else_would_be_added(
    store_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, appears: str
) -> None:
    await put(store_url, ENTRIES[3])
    if appears == "meanwhile":
        # The first look, which does not lock, finds no rollout.
        monkeypatch.setattr(importing, "_FENCE", select(fences.c.state).where(false()))
    before = await rows(store_url)
    write_rollout(
        folder, [*LINES[:3], line_of(ENTRIES[3], model="another")], intents=["announced"], marks=["lost"]
    )
    imported = await import_one(store_url, folder)
    assert (imported.outcome, found(imported)) == (
        ImportOutcome.CONFLICT,
        [("conflict", "jsonl", 4, "call-3")],
    )
    assert await rows(store_url) == before


async def test_a_snapshot_is_not_raised_over_calls_that_it_lacks(store_url: str, folder: Path) -> None:
    await put(store_url, *ENTRIES, linear_rollout(5)[4].entry)
    before = await rows(store_url)
    write_rollout(folder, LINES, state=FROZEN)
    assert (await import_one(store_url, folder)).outcome is ImportOutcome.CONFLICT
    assert await rows(store_url) == before


async def test_a_rollout_that_was_retired_is_not_brought_back(store_url: str, folder: Path) -> None:
    write_rollout(folder, LINES, state=FROZEN)
    await import_one(store_url, folder)
    async with SqlTokenSource(store_url) as source:
        assert await source.drop("rollout", "snapshot-1", 5)
    before = await rows(store_url)
    # It was consumed as exactly this snapshot.
    assert (await import_one(store_url, folder)).outcome is ImportOutcome.ALREADY_THERE
    write_rollout(folder, LINES, state=FROZEN | {"snapshot_id": "another"})
    assert (await import_one(store_url, folder)).outcome is ImportOutcome.CONFLICT
    assert await rows(store_url) == before


async def test_a_rollout_that_is_retired_in_the_files_is_not_retired_in_the_database(
    store_url: str, folder: Path
) -> None:
    await put(store_url, *ENTRIES)
    before = await rows(store_url)
    write_rollout(folder, [], state=FROZEN | {"retired": True, "entry_digests": {}})
    assert (await import_one(store_url, folder)).outcome is ImportOutcome.CONFLICT
    assert await rows(store_url) == before


async def test_no_row_of_a_call_that_is_damaged_in_the_database_is_trusted(
    store_url: str, folder: Path
) -> None:
    write_rollout(folder, LINES)
    await import_one(store_url, folder)
    await execute(store_url, update(entries).values(payload=b"broken", payload_sha256="0" * 64))
    imported = await import_one(store_url, folder)
    assert imported.outcome is ImportOutcome.FAILED
    assert "call-0" in imported.findings[0].reason


async def test_prompts_are_stored_without_what_their_parents_hold(store_url: str, folder: Path) -> None:
    turns = linear_rollout(30)
    await put(store_url, *(turn.entry for turn in turns))
    shared = await _stored(store_url, "default")
    write_rollout(folder, [line_of(turn.entry) for turn in turns])
    await import_folder(store_url, folder, run="imported")
    assert await _stored(store_url, "imported") == shared
    assert shared[1] == 29


async def test_prompts_share_also_when_their_parents_were_long_ago_or_in_an_import_before(
    store_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = linear_rollout(12)
    monkeypatch.setattr(KnownSequences, "find", lambda *_: None)
    write_rollout(folder, [line_of(turn.entry) for turn in turns[:6]])
    await import_folder(store_url, folder)
    write_rollout(folder, [line_of(turn.entry) for turn in turns])
    await import_folder(store_url, folder)
    monkeypatch.undo()
    assert (await _stored(store_url, "default"))[1] == 11
    assert list((await freeze(store_url)).entries) == sorted(
        (turn.entry for turn in turns), key=lambda entry: entry.model_call_id
    )


async def _stored(url: str, run: str) -> tuple[int, int]:
    """Return the bytes of the payloads, and how many calls lean on their parents."""
    sizes = select(func.sum(func.length(entries.c.payload)), func.count(entries.c.stored_sha256))
    database = CaptureDatabase(parse_url(url))
    try:
        size, shared = await database.read(
            lambda connection: connection.execute(sizes.where(entries.c.run == run)).one()
        )
    finally:
        await database.close()
    return int(size), int(shared)


@pytest.mark.parametrize("point", ["before commit", "after"])
async def test_an_import_that_is_killed_leaves_whole_rollouts_and_is_finished_by_another(
    store_url: str, folder: Path, point: str
) -> None:
    for number in range(4):
        name = f"rollout-{number}"
        lines = [line_of(entry, rollout_id=name) for entry in ENTRIES]
        state = {"frozen": True, "snapshot_id": f"snapshot-{number}", "version": 5}
        write_rollout(folder, lines, rollout_id=name, intents=["never-came"], marks=["lost"], state=state)
    killed_at(3, point, "import", str(folder), "--url", store_url)
    whole = 2 if point == "before commit" else 3
    held = await rows(store_url)
    counts = {"fences": 1, "entries": 4, "intents": 1, "failures": 1, "snapshot_versions": 3}
    assert {name: len(held[name]) for name in counts} == {n: each * whole for n, each in counts.items()}
    report = await import_folder(store_url, folder)
    assert [each.outcome for each in report.rollouts] == [
        *[ImportOutcome.ALREADY_THERE] * whole,
        *[ImportOutcome.IMPORTED] * (4 - whole),
    ]
    for number in range(4):
        snapshot = await freeze(store_url, f"rollout-{number}")
        assert (len(snapshot.entries), snapshot.version, snapshot.incomplete) == (4, 5, True)


async def test_only_the_rollouts_that_are_asked_for_are_imported(store_url: str, folder: Path) -> None:
    for name in ("a-1", "a-2", "b-1"):
        write_rollout(folder, [line_of(ENTRIES[0], rollout_id=name)], rollout_id=name)
    report = await import_folder(store_url, folder, prefix="a-", rollout_ids=["a-2", "b-1", "none"])
    assert [(each.rollout_id, each.outcome) for each in report.rollouts] == [
        ("b-1", ImportOutcome.FAILED),
        ("none", ImportOutcome.FAILED),
        ("a-2", ImportOutcome.IMPORTED),
    ]
    assert not report.is_clean


async def test_a_serving_process_goes_on_with_an_imported_rollout(store_url: str, folder: Path) -> None:
    turns = linear_rollout(3)
    write_rollout(folder, [line_of(turn.entry) for turn in turns[:2]])
    await import_folder(store_url, folder)
    async with open_store(store_url) as store:
        resolution = await store.lineage.resolve("rollout", turns[2].request)
        assert resolution.match is not None
        assert resolution.match.model_call_id == "call-1"
        assert resolution.match.cumulative_token_ids == turns[1].tokens
        await store.sink.put(turns[2].entry)
        assert len((await store.source.freeze("rollout")).entries) == 3


async def test_a_long_rollout_is_imported_in_batches(store_url: str, folder: Path) -> None:
    rng = random.Random(5)
    lines = [
        line_of(ENTRIES[0], model_call_id=f"call-{number}", extra="x" * rng.randrange(200_000))
        for number in range(150)
    ]
    write_rollout(folder, lines)
    imported = await import_one(store_url, folder)
    assert (imported.added, imported.incomplete) == (150, False)
    assert len((await freeze(store_url)).entries) == 150


async def test_a_rollout_that_is_there_is_not_masked_when_its_files_are_damaged_later(
    store_url: str, folder: Path
) -> None:
    write_rollout(folder, LINES, state=FROZEN)
    await import_one(store_url, folder)
    before = await rows(store_url)
    write_rollout(folder, LINES[:1], last_line=LINES[1][:20], state=FROZEN)
    imported = await import_one(store_url, folder)
    assert (imported.outcome, imported.incomplete) == (ImportOutcome.ALREADY_THERE, False)
    assert {kind for kind, *_ in found(imported)} == {"lost"}
    assert not imported.is_clean
    assert await rows(store_url) == before


async def test_a_call_that_is_there_is_not_lost_when_its_line_is_changed_later(
    store_url: str, folder: Path
) -> None:
    write_rollout(folder, LINES)
    await import_one(store_url, folder)
    before = await rows(store_url)
    write_rollout(folder, [LINES[0], line_of(ENTRIES[1], schema_version=2), *LINES[2:]])
    assert (await import_one(store_url, folder)).outcome is ImportOutcome.ALREADY_THERE
    assert await rows(store_url) == before


async def test_a_second_content_of_a_call_that_is_frozen_is_kept_as_evidence_in_a_later_version(
    store_url: str, folder: Path
) -> None:
    write_rollout(folder, LINES, state=FROZEN)
    await import_one(store_url, folder)
    write_rollout(folder, [*LINES, line_of(ENTRIES[0], model="another")], state=FROZEN)
    assert (await import_one(store_url, folder)).outcome is ImportOutcome.ADDED
    snapshot = await freeze(store_url)
    assert (snapshot.snapshot_id, snapshot.version, snapshot.incomplete) == ("snapshot-1", 6, True)


async def test_numbers_that_strict_json_lacks_come_back_in_every_bit(store_url: str, folder: Path) -> None:
    odd = make_entry(
        "rollout",
        log_probs=[float("nan"), float("-inf"), -0.0],
        prompt=[2**64 - 1, 0],
        wide=[2**64, 2**80, -(2**70)],
        small={"b": 5e-324, "a": -0.0},
    )
    write_rollout(folder, [line_of(odd)])
    assert (await import_one(store_url, folder)).is_clean
    (entry,) = (await freeze(store_url)).entries
    assert differing_fields(entry, odd) == []
