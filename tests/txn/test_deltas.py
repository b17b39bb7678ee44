"""What a freeze says of deltas that nobody can read whole."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text

from tests.export.exports import left_out, parquet_rows, run_sql
from tests.roles.secured import secured_database
from tests.support.entries import make_entry
from tests.support.postgres import Server
from tokencustody import TokenEntry, open_store
from tokencustody.errors import PayloadConflictError
from tokencustody.export import ExportOptions, export
from tokencustody.roles.granting import grant
from tokencustody.states import Role
from tokencustody.store import CaptureStore
from tokencustody.txn.deltas import broken_deltas
from tokencustody.verify import verify

ROOT = make_entry(model_call_id="root", prompt=[1], generation=[2])


def delta(call: str, parent: str, rollout_id: str = "rollout-1") -> TokenEntry:
    return make_entry(
        rollout_id,
        call,
        prompt=[3],
        generation=[4],
        parent=parent,
        cumulative=[1, 2, 3, 4],
        prompt_is_delta=True,
    )


async def incomplete(url: str) -> list[tuple[str, str, str, int]]:
    """Return (rollout, call, detail, version) of each reason that masks a rollout."""
    (rows,) = await run_sql(
        url,
        text(
            "SELECT rollout_id, model_call_id, detail, version, reason FROM audit_incomplete WHERE masks_rollout"
            " ORDER BY version"
        ),
    )
    assert {row.reason for row in rows} <= {"mark"}
    return [tuple(row)[:4] for row in rows]


@pytest.mark.parametrize(
    ("calls", "broken"),
    [
        ([delta("a", "lost")], [("a", "parent_missing")]),
        ([ROOT, delta("a", "lost")], [("a", "parent_missing")]),
        ([delta("a", "a")], [("a", "parent_cycle")]),
        ([ROOT, delta("a", "b"), delta("b", "a")], [("a", "parent_cycle"), ("b", "parent_cycle")]),
        # Below a break, at any depth, nothing else is wrong.
        ([delta("a", "lost"), delta("b", "a"), delta("c", "b")], [("a", "parent_missing")]),
        (
            [delta("a", "b"), delta("b", "c"), delta("c", "b")],
            [("b", "parent_cycle"), ("c", "parent_cycle")],
        ),
        (
            [delta("a", "lost"), delta("b", "gone"), delta("c", "c")],
            [("a", "parent_missing"), ("b", "parent_missing"), ("c", "parent_cycle")],
        ),
    ],
)
async def test_a_delta_that_nobody_can_read_whole_masks_the_rollout_with_a_row_that_says_why(
    store: CaptureStore, store_url: str, calls: list[TokenEntry], broken: list[tuple[str, str]]
) -> None:
    for entry in calls:
        await store.sink.put(entry)
    snapshot = await store.source.freeze("rollout-1")
    assert snapshot.incomplete
    assert {entry.model_call_id for entry in snapshot.entries} == {entry.model_call_id for entry in calls}
    rows = await incomplete(store_url)
    assert sorted((call, detail) for _, call, detail, _ in rows) == broken
    # Each mark is a version, and the freeze the one after them.
    assert [version for *_, version in rows] == list(range(1, len(broken) + 1))
    assert snapshot.version == len(broken) + 1

    again = await store.source.freeze("rollout-1")
    assert (again.version, again.snapshot_id, again.incomplete) == (
        snapshot.version,
        snapshot.snapshot_id,
        True,
    )
    assert await incomplete(store_url) == rows
    report = await asyncio.to_thread(verify, store_url)
    assert {finding.rule for finding in report.findings} <= {"prompt_lost", "parent_circle"}
    assert await store.source.drop("rollout-1", snapshot.snapshot_id, snapshot.version)


@pytest.mark.parametrize(
    "calls",
    [
        [delta("a", "root"), ROOT],
        [delta("b", "a"), delta("a", "root"), ROOT],
        # These prompts are whole, so each call can be read; what they say of their parents is for the export to judge.
        [make_entry(model_call_id="a", parent="lost")],
        [make_entry(model_call_id="a", parent="a")],
    ],
)
async def test_deltas_that_can_be_read_and_prompts_that_are_whole_mask_nothing(
    store: CaptureStore, store_url: str, calls: Sequence[TokenEntry]
) -> None:
    for entry in calls:
        await store.sink.put(entry)
    snapshot = await store.source.freeze("rollout-1")
    assert (snapshot.incomplete, snapshot.version) == (False, 1)
    assert await incomplete(store_url) == []


async def test_a_parent_of_another_rollout_or_run_is_none(store: CaptureStore, store_url: str) -> None:
    await store.sink.put(make_entry("other", "root", prompt=[1], generation=[2]))
    async with open_store(store_url, run="run-2") as elsewhere:
        await elsewhere.sink.put(ROOT)
    await store.sink.put(delta("a", "root"))
    assert (await store.source.freeze("rollout-1")).incomplete
    assert not (await store.source.freeze("other")).incomplete
    assert await incomplete(store_url) == [("rollout-1", "a", "parent_missing", 1)]


async def test_a_delta_on_a_conflicting_call_is_masked_by_the_conflict(
    store: CaptureStore, store_url: str
) -> None:
    await store.sink.put(ROOT)
    with pytest.raises(PayloadConflictError):
        await store.sink.put(make_entry(model_call_id="root", prompt=[1], generation=[9]))
    await store.sink.put(delta("a", "root"))
    assert (await store.source.freeze("rollout-1")).incomplete
    (rows,) = await run_sql(store_url, text("SELECT reason FROM audit_incomplete"))
    assert [row.reason for row in rows] == ["conflict"]


async def test_an_export_leaves_the_rollout_out_and_with_incomplete_ones_only_what_cannot_be_read(
    store: CaptureStore, store_url: str, tmp_path: Path
) -> None:
    for entry in (ROOT, delta("a", "lost")):
        await store.sink.put(entry)
    await store.source.freeze("rollout-1")
    report = await export(store_url, tmp_path / "without")
    assert (report.rollouts, report.left_out["incomplete"]) == (0, 1)
    await export(store_url, tmp_path / "with", ExportOptions(include_incomplete=True))
    assert [row["leaf_call_id"] for row in parquet_rows(tmp_path / "with")] == ["root"]
    assert ("rollout-1", "a", "parent_missing") in left_out(tmp_path / "with")


async def test_a_freeze_whose_answer_was_lost_marks_once(
    store: CaptureStore, store_url: str, faults: dict[str, object]
) -> None:
    await store.sink.put(delta("a", "lost"))

    async def lose() -> None:
        faults.clear()
        raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")

    faults["after commit, before acknowledgement"] = lose
    snapshot = await store.source.freeze("rollout-1")
    assert not faults
    assert (snapshot.incomplete, snapshot.version) == (True, 2)
    assert await incomplete(store_url) == [("rollout-1", "a", "parent_missing", 1)]


async def test_a_trainer_may_make_these_marks(postgres: Server) -> None:
    with secured_database(postgres, "trainer") as (database, (trainer,)):
        grant(database.url, Role.TRAINER, trainer, ["here"])
        async with (
            open_store(database.url, run="here") as owner,
            open_store(database.url_as(trainer), run="here") as store,
        ):
            await owner.sink.put(delta("a", "lost"))
            await owner.sink.put(delta("b", "b"))
            snapshot = await store.source.freeze("rollout-1")
        assert (snapshot.incomplete, snapshot.version) == (True, 3)


@given(st.dictionaries(st.integers(0, 7), st.integers(-2, 7), max_size=8))
def test_every_chain_ends_in_a_whole_call_or_in_one_that_is_named(parents: dict[int, int]) -> None:
    """-1 stands for a whole prompt, and a number that is no call for a parent that is lost."""
    rows = [
        SimpleNamespace(model_call_id=str(call), parent_call_id=str(parent), prompt_is_delta=parent != -1)
        for call, parent in parents.items()
    ]
    named = dict(broken_deltas(rows))
    for call in parents:
        walked: list[int] = []
        while call in parents and parents[call] != -1 and call not in walked:
            walked.append(call)
            call = parents[call]
        if call in walked:
            circle = walked[walked.index(call) :]
            assert all(named[str(member)] == "parent_cycle" for member in circle)
        elif call not in parents and walked:
            assert named[str(walked[-1])] == "parent_missing"
        else:
            assert not named.keys() & set(map(str, walked))
