"""Marks and retirement after an export."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from tests.export.exports import RUN, branching, manifest, parquet_rows, put_linear, put_rollout, run_sql
from tests.support.entries import make_entry
from tokencustody import open_store
from tokencustody.database.faults import FAULT_POINTS
from tokencustody.database.url import parse_url
from tokencustody.export import ExportError, ExportOptions, Format, WhyKept, export
from tokencustody.retention.retention import Retention, Settled
from tokencustody.schema import tables
from tokencustody.spill.marks import Mark, Spill
from tokencustody.states import FenceState
from tokencustody.txn.fence import RolloutKey, Stamp
from tokencustody.txn.selection import RolloutFilter

FENCES = select(tables.fences.c.rollout_id, tables.fences.c.state, tables.fences.c.version).order_by(
    tables.fences.c.rollout_id
)
MARKS = select(tables.exports).order_by(tables.exports.c.rollout_id)
CALLS = select(func.count()).select_from(tables.entries)


async def states(url: str) -> dict[str, str]:
    (rows,) = await run_sql(url, FENCES)
    return {row.rollout_id: row.state for row in rows}


async def marks(url: str) -> list[Any]:
    (rows,) = await run_sql(url, MARKS)
    return rows


async def calls(url: str) -> int:
    ((row,),) = await run_sql(url, CALLS)
    return int(row[0])


async def test_each_exported_rollout_is_marked_with_where_it_went(store_url: str, tmp_path: Path) -> None:
    await put_linear(store_url, 2)
    await put_rollout(store_url, [make_entry("open")], freeze=False)
    report = await export(store_url, tmp_path / "out")
    found = await marks(store_url)
    assert [row.rollout_id for row in found] == ["rollout-000", "rollout-001"]
    held = manifest(tmp_path / "out")["parts"][0]["rollouts"]
    for row, rollout in zip(found, held, strict=True):
        assert (row.run, row.export_id, row.destination) == (RUN, report.export_id, str(tmp_path / "out"))
        assert (row.snapshot_id, row.version) == (rollout["snapshot_id"], rollout["version"])
        assert row.manifest_sha256 == report.manifest_sha256
        assert row.written_by
    assert await states(store_url) == {"open": "open", "rollout-000": "frozen", "rollout-001": "frozen"}
    assert report.retired == 0


def bytes_of(url: str) -> bytes | None:
    """Return the bytes of a SQLite file."""
    return Path(url.removeprefix("sqlite:///")).read_bytes() if url.startswith("sqlite") else None


async def test_without_marks_an_export_only_reads(store_url: str, tmp_path: Path) -> None:
    await put_linear(store_url, 2)
    before = bytes_of(store_url)
    may_not_write = "" if before else "?options=-c%20default_transaction_read_only%3Don"
    report = await export(store_url + may_not_write, tmp_path / "out", mark=False)
    assert (report.rollouts, report.marked) == (2, 0)
    assert bytes_of(store_url) == before
    assert await marks(store_url) == []


async def test_without_marks_not_even_the_log_of_a_sqlite_file_is_touched(
    sqlite_url: str, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    async with open_store(sqlite_url, run=RUN) as store:
        await store.sink.put(make_entry())
        await store.source.freeze("rollout-1")
        # While the store is open its rows are in the log; in the copy, the export is the last to close.
        for name in ("captures.db", "captures.db-wal"):
            shutil.copy(tmp_path / name, copy / name)
    url = f"sqlite:///{copy / 'captures.db'}"
    before = bytes_of(url)
    assert (await export(url, tmp_path / "out", mark=False)).rollouts == 1
    assert bytes_of(url) == before


async def test_only_what_no_export_has_marked_can_be_asked_for(store_url: str, tmp_path: Path) -> None:
    await put_linear(store_url, 2)
    new = ExportOptions(unexported=True)
    assert (await export(store_url, tmp_path / "first", new)).rollouts == 2
    await put_rollout(store_url, [make_entry("later")])
    second = await export(store_url, tmp_path / "second", new)
    assert [each["rollout_id"] for each in manifest(tmp_path / "second")["parts"][0]["rollouts"]] == ["later"]
    assert second.marked == 1


async def test_retire_drops_exactly_what_the_files_hold_and_keeps_the_rest(
    store_url: str, tmp_path: Path
) -> None:
    await put_linear(store_url, 2)
    await put_rollout(store_url, [make_entry("open")], freeze=False)
    await put_rollout(store_url, [make_entry("masked")])
    async with open_store(store_url, run=RUN) as store:
        await store.sink.mark_incomplete("masked")
    report = await export(store_url, tmp_path / "out", retire=True)
    assert (report.marked, report.retired, report.ok) == (2, 2, True)
    assert await states(store_url) == {
        "masked": "frozen",
        "open": "open",
        "rollout-000": "retired",
        "rollout-001": "retired",
    }
    assert await calls(store_url) == 2
    (events,) = await run_sql(
        store_url,
        select(tables.snapshot_versions.c.event, tables.snapshot_versions.c.snapshot_id)
        .where(tables.snapshot_versions.c.rollout_id == "rollout-000")
        .order_by(tables.snapshot_versions.c.version),
    )
    assert [row.event for row in events] == ["open", "freeze", "drop"]
    assert [row.rollout_id for row in await marks(store_url)] == ["rollout-000", "rollout-001"]
    # A trainer that consumed the same snapshot is told the same as if it had dropped it.
    async with open_store(store_url, run=RUN) as store:
        assert await store.source.drop("rollout-000", events[1].snapshot_id, 1)


async def test_a_finished_export_can_be_retired_later(store_url: str, tmp_path: Path) -> None:
    await put_linear(store_url, 2)
    await export(store_url, tmp_path / "out")
    assert set((await states(store_url)).values()) == {"frozen"}
    report = await export(store_url, tmp_path / "out", retire=True)
    assert (report.already_finished, report.retired) == (True, 2)
    assert set((await states(store_url)).values()) == {"retired"}
    again = await export(store_url, tmp_path / "out", retire=True)
    assert (again.retired, again.ok) == (2, True)


async def test_a_rollout_that_changed_since_stays_and_is_reported(store_url: str, tmp_path: Path) -> None:
    for name in ("anew", "deleted", "marked", "same"):
        await put_rollout(store_url, [make_entry(name)])
    await export(store_url, tmp_path / "out", mark=False)
    async with open_store(store_url, run=RUN) as store:
        await store.sink.mark_incomplete("marked", "lost")
        await store.source.delete(["anew", "deleted"])
        await store.sink.put(make_entry("anew"))
        await store.source.freeze("anew")
    report = await export(store_url, tmp_path / "out", retire=True)
    assert {kept.rollout_id: kept.why for kept in report.kept} == {
        "anew": WhyKept.MADE_ANEW,
        "deleted": WhyKept.DELETED,
        "marked": WhyKept.CHANGED,
    }
    assert (report.ok, report.retired, report.marked) == (False, 1, 2)
    assert await states(store_url) == {"anew": "frozen", "marked": "frozen", "same": "retired"}
    assert [row.rollout_id for row in await marks(store_url)] == ["marked", "same"]
    assert await calls(store_url) == 2


async def test_a_rollout_that_was_retired_in_another_way_since_is_reported(
    store_url: str, tmp_path: Path
) -> None:
    for name in ("dropped", "changed"):
        await put_rollout(store_url, [make_entry(name)])
    await export(store_url, tmp_path / "out")
    async with open_store(store_url, run=RUN) as store:
        snapshot = await store.source.freeze("dropped")
        await store.source.drop("dropped", snapshot.snapshot_id, snapshot.version)
        await store.sink.mark_incomplete("changed")
        await store.source.retire(["changed"])
    report = await export(store_url, tmp_path / "out", retire=True)
    assert {kept.rollout_id: kept.why for kept in report.kept} == {
        "changed": WhyKept.CHANGED,
        "dropped": WhyKept.RETIRED,
    }


async def test_a_rollout_of_which_a_call_was_left_out_is_not_retired(store_url: str, tmp_path: Path) -> None:
    lost = make_entry(
        model_call_id="stray",
        prompt=[7],
        parent="nobody",
        prompt_is_delta=True,
        cumulative=[6, 7, 30, 31, 32],
    )
    await put_rollout(store_url, [*branching(), lost])
    all_of_it = ExportOptions(include_incomplete=True)
    report = await export(store_url, tmp_path / "out", all_of_it, retire=True)
    assert [(kept.rollout_id, kept.why) for kept in report.kept] == [("rollout-1", WhyKept.PARTLY_EXPORTED)]
    assert await calls(store_url) == 5
    assert (await states(store_url)) == {"rollout-1": "frozen"}
    assert not report.ok
    # In a format that holds all of it, it is.
    whole = await export(store_url, tmp_path / "calls", replace(all_of_it, format="calls"), retire=True)  # type: ignore[arg-type]
    assert (whole.retired, whole.ok) == (1, True)


async def test_what_is_partly_exported_is_not_exported_again_and_is_marked_as_that(
    store_url: str, tmp_path: Path
) -> None:
    # Two answers to one prompt, both continued: which of them the agent received is not known.
    await put_rollout(
        store_url,
        [
            make_entry("part", "a", prompt=[1], generation=[2]),
            make_entry("part", "b", prompt=[1], generation=[3]),
            make_entry("part", "a-2", prompt=[1, 2, 4], generation=[5], parent="a"),
            make_entry("part", "b-2", prompt=[1, 3, 4], generation=[6], parent="b"),
            make_entry("part", "other", prompt=[7], generation=[8]),
        ],
    )
    await put_linear(store_url, 1)
    report = await export(store_url, tmp_path / "out")
    assert report.left_out["ambiguous_retry"] > 0
    assert {row.rollout_id: row.is_held for row in await marks(store_url)} == {
        "part": False,
        "rollout-000": True,
    }
    again = await export(store_url, tmp_path / "again", ExportOptions(unexported=True))
    assert again.rollouts == 0
    # All of it is, once one export holds all of it.
    settled: list[Settled] = []
    async with Retention(store_url) as retention:
        exported = RolloutFilter(state=FenceState.FROZEN, exported=True)
        await retention.retire(exported, settled.append)
        assert await states(store_url) == {"part": "frozen", "rollout-000": "retired"}
        await export(store_url, tmp_path / "calls", ExportOptions(format=Format.CALLS))
        await retention.retire(exported, settled.append)
    assert await states(store_url) == {"part": "retired", "rollout-000": "retired"}
    assert [of.key.rollout_id for of in settled if of.removed] == ["rollout-000", "part"]


@pytest.mark.parametrize("at", ["end", "beginning", "branch"])
async def test_an_answer_of_nothing_is_no_reason_to_keep_a_rollout(
    store_url: str, tmp_path: Path, at: str
) -> None:
    spoken = make_entry(model_call_id="spoken", prompt=[1, 2], generation=[3])
    silent = {
        # Aborted, and asked again; in whichever order they were stored.
        "end": make_entry(model_call_id="silent", prompt=[1, 2], generation=[]),
        "beginning": make_entry(model_call_id="silent", prompt=[1, 2], generation=[]),
        "branch": make_entry(model_call_id="silent", prompt=[1, 2, 3, 4], generation=[], parent="spoken"),
    }[at]
    await put_rollout(store_url, [silent, spoken] if at == "beginning" else [spoken, silent])
    report = await export(store_url, tmp_path / "out", retire=True)
    (row,) = parquet_rows(tmp_path / "out")
    assert (row["loss_mask"][:3], row["whole"]) == ([0, 0, 1], True)
    assert (report.retired, report.kept, report.ok) == (1, [], True)
    assert (await states(store_url)) == {"rollout-1": "retired"}


async def test_a_rollout_that_sampled_nothing_at_all_is_handed_over_with_the_others(
    store_url: str, tmp_path: Path
) -> None:
    await put_rollout(store_url, [make_entry("silent", generation=[])])
    await put_linear(store_url, 1)
    report = await export(store_url, tmp_path / "out", ExportOptions(rows_per_file=1), retire=True)
    assert [row["rollout_id"] for row in parquet_rows(tmp_path / "out")] == ["rollout-000"]
    assert (report.left_out, report.rollouts, report.retired) == ({"no_generated_tokens": 1}, 2, 2)
    assert await states(store_url) == {"rollout-000": "retired", "silent": "retired"}


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("together", [False, True], ids=["one-after-the-other", "at-once"])
async def test_of_two_exports_that_hold_the_same_rollouts_each_is_handed_over_by_one(
    store_url: str, tmp_path: Path, together: bool, marked: bool
) -> None:
    await put_linear(store_url, 6)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        await export(store_url, folder, mark=marked)
    retiring = [export(store_url, folder, retire=True) for folder in folders]
    reports = await asyncio.gather(*retiring) if together else [await each for each in retiring]
    assert sum(report.retired for report in reports) == 6
    assert {kept.why for report in reports for kept in report.kept} == {WhyKept.RETIRED}
    assert sum(len(report.kept) for report in reports) == 6
    assert not all(report.ok for report in reports)
    assert len(await marks(store_url)) == (12 if marked else 6)
    again = [await export(store_url, folder, retire=True) for folder in folders]
    assert [len(report.kept) for report in again] == [len(report.kept) for report in reports]


async def test_what_was_retired_by_hand_is_not_said_to_be_retired_by_an_export(
    store_url: str, tmp_path: Path
) -> None:
    await put_linear(store_url, 1)
    await export(store_url, tmp_path / "out")
    async with open_store(store_url, run=RUN) as store:
        await store.source.retire(["rollout-000"])
    report = await export(store_url, tmp_path / "out", retire=True)
    assert (report.retired, [kept.why for kept in report.kept]) == (0, [WhyKept.RETIRED])
    # Nothing is amiss where no retirement is asked for.
    assert (await export(store_url, tmp_path / "out")).ok


async def test_what_another_export_has_marked_since_is_not_handed_over_as_unexported(
    store_url: str, tmp_path: Path
) -> None:
    await put_linear(store_url, 2)
    unexported = ExportOptions(unexported=True)
    for name in "ab":
        await export(store_url, tmp_path / name, unexported, mark=False)
    assert (await export(store_url, tmp_path / "a", unexported)).ok
    again = await export(store_url, tmp_path / "b", unexported, retire=True)
    assert ([kept.why for kept in again.kept], again.marked, again.retired) == ([WhyKept.EXPORTED] * 2, 0, 0)
    assert set((await states(store_url)).values()) == {"frozen"}
    # Those that did not ask for that may hand over what others hold too.
    every = await export(store_url, tmp_path / "c", retire=True)
    assert (every.retired, every.ok) == (2, True)


async def test_a_manifest_that_was_changed_after_it_was_marked_retires_nothing(
    store_url: str, tmp_path: Path
) -> None:
    await put_linear(store_url, 2)
    await export(store_url, tmp_path / "out")
    await put_rollout(store_url, [make_entry("added")])
    async with open_store(store_url, run=RUN) as store:
        snapshot = await store.source.freeze("added")
    document = manifest(tmp_path / "out")
    added = document["parts"][0]["rollouts"][0] | {
        "rollout_id": "added",
        "snapshot_id": snapshot.snapshot_id,
        "version": snapshot.version,
    }
    # At the front, so that it would be the first to go.
    document["parts"][0]["rollouts"].insert(0, added)
    for told in ("lists 3 rollouts", "is not the one that was written"):
        (tmp_path / "out" / "_manifest.json").write_text(json.dumps(document))
        with pytest.raises(ExportError, match=told):
            await export(store_url, tmp_path / "out", retire=True)
        assert set((await states(store_url)).values()) == {"frozen"}
        document["counts"]["rollouts"] = 3


@pytest.mark.parametrize("damage", ["flipped", "shorter", "gone", "manifest"])
async def test_nothing_is_marked_or_retired_when_a_file_is_not_what_the_manifest_lists(
    store_url: str, tmp_path: Path, damage: str
) -> None:
    await put_linear(store_url, 2)
    await export(store_url, tmp_path / "out", mark=False)
    path = tmp_path / "out" / ("_manifest.json" if damage == "manifest" else "part-00000.parquet")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    match damage:
        case "flipped":
            path.write_bytes(data)
        case "shorter":
            path.write_bytes(data[:-1])
        case "gone":
            path.unlink()
        case "manifest":
            path.write_bytes(b"{" + data)
    with pytest.raises(ExportError, match=path.name) as refused:
        await export(store_url, tmp_path / "out", retire=True)
    assert ("Restore the file, or export into a new folder" in str(refused.value)) == (damage != "manifest")
    assert await marks(store_url) == []
    assert set((await states(store_url)).values()) == {"frozen"}


async def test_mark_and_retirement_are_one_transaction(store_url: str, tmp_path: Path) -> None:
    await put_linear(store_url, 1)
    await export(store_url, tmp_path / "out", mark=False)

    async def fail() -> None:
        raise RuntimeError("just before the commit")

    FAULT_POINTS["before commit"] = fail
    try:
        with pytest.raises(RuntimeError, match="just before"):
            await export(store_url, tmp_path / "out", retire=True)
    finally:
        FAULT_POINTS.clear()
    assert await marks(store_url) == []
    assert await states(store_url) == {"rollout-000": "frozen"}
    assert await calls(store_url) == 3

    # And a commit whose answer is lost is settled by looking.
    tries = 0

    async def lose() -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ConnectionResetError("the answer was lost")

    FAULT_POINTS["after commit, before acknowledgement"] = lose
    try:
        report = await export(store_url, tmp_path / "out", retire=True)
    finally:
        FAULT_POINTS.clear()
    assert tries > 1
    assert (report.retired, report.kept) == (1, [])
    (versions,) = await run_sql(store_url, select(tables.snapshot_versions.c.event))
    assert [row.event for row in versions].count("drop") == 1


async def test_a_mark_that_waits_on_this_host_comes_before_the_retirement(
    store_url: str, tmp_path: Path, spill_folder: Path
) -> None:
    await put_linear(store_url, 2)
    await export(store_url, tmp_path / "out", mark=False)
    stamp = Stamp.make(datetime.now(UTC), "test-writer")
    waiting = Spill(spill_folder, parse_url(store_url))
    waiting.keep(Mark(RolloutKey(RUN, "rollout-000"), "lost", stamp))
    report = await export(store_url, tmp_path / "out", retire=True)
    assert [(kept.rollout_id, kept.why) for kept in report.kept] == [("rollout-000", WhyKept.CHANGED)]
    assert await states(store_url) == {"rollout-000": "frozen", "rollout-001": "retired"}
    assert waiting.is_empty()


@pytest.mark.parametrize("retire", [False, True], ids=["mark", "retire"])
async def test_a_damaged_mark_of_a_rollout_keeps_that_rollout_and_no_other(
    store_url: str, tmp_path: Path, spill_folder: Path, retire: bool
) -> None:
    await put_linear(store_url, 3)
    stamp = Stamp.make(datetime.now(UTC), "test-writer")
    waiting = Spill(spill_folder, parse_url(store_url))
    waiting.keep(Mark(RolloutKey(RUN, "rollout-001"), "lost", stamp)).write_bytes(b"torn")
    report = await export(store_url, tmp_path / "out", retire=retire)
    assert [(kept.rollout_id, kept.why) for kept in report.kept] == [("rollout-001", WhyKept.DAMAGED_MARK)]
    assert "tokencustody spill discard" in report.kept[0].detail
    assert (report.ok, report.marked, report.retired) == (False, 2, 2 if retire else 0)
    assert [row.rollout_id for row in await marks(store_url)] == ["rollout-000", "rollout-002"]
    others = "retired" if retire else "frozen"
    assert await states(store_url) == {"rollout-000": others, "rollout-001": "frozen", "rollout-002": others}


async def test_the_folder_is_found_from_anywhere_by_what_is_noted(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_linear(store_url, 1)
    monkeypatch.chdir(tmp_path)
    await export(store_url, "out")
    (mark,) = await marks(store_url)
    assert mark.destination == str(tmp_path / "out")
    # The files may be moved: they do not say where they were.
    assert str(tmp_path / "out") not in (tmp_path / "out" / "_manifest.json").read_text()


async def test_retirement_without_the_mark_is_refused(sqlite_url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mark"):
        await export(sqlite_url, tmp_path / "out", mark=False, retire=True)


async def test_writers_go_on_while_an_export_reads(store_url: str, tmp_path: Path) -> None:
    await put_linear(store_url, 6)
    written = 0
    stop = asyncio.Event()

    async def write() -> None:
        nonlocal written
        async with open_store(store_url, run=RUN, deadline=2.0) as store:
            while not stop.is_set() or not written:
                await store.sink.put(make_entry("writing", f"call-{written}"))
                written += 1

    writing = asyncio.create_task(write())
    report = await export(store_url, tmp_path / "out", ExportOptions(rows_per_file=1), mark=False)
    stop.set()
    await writing
    assert report.rollouts == 6
    assert written
