"""What retention removes is what was asked for, whole, and nothing that changed since it was listed."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest

from tests.support.entries import make_entry
from tests.support.ledger import make_commit
from tests.support.rollouts import linear_rollout
from tests.support.rows import rows_of, run_sql
from tests.support.staged import stage
from tokencustody import CaptureStore, TokenCaptureRetiredError, open_store
from tokencustody.database.faults import FAULT_POINTS
from tokencustody.database.url import parse_url
from tokencustody.errors import PayloadConflictError, StoreUnavailableError
from tokencustody.retention import retention as retention_module
from tokencustody.retention.retention import Retention, Settled
from tokencustody.retention.vacuum import vacuum
from tokencustody.schema import tables
from tokencustody.spill.files import spill_root
from tokencustody.spill.marks import Mark, Spill
from tokencustody.states import FenceState
from tokencustody.store import SqlStagingStore, removal
from tokencustody.txn.fence import RolloutKey, Stamp
from tokencustody.txn.selection import RolloutFilter, pages

RUN = "run-1"
FROZEN = RolloutFilter(run=RUN, state=FenceState.FROZEN)
OPEN = RolloutFilter(run=RUN, state=FenceState.OPEN)
OF_ROLLOUTS = [table for table in tables.metadata.sorted_tables if "run" in table.c]
Change = Callable[[CaptureStore, str], Awaitable[Any]]


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[CaptureStore]:
    async with open_store(store_url, run=RUN) as opened:
        yield opened


@pytest.fixture
async def retention(store: CaptureStore, store_url: str) -> AsyncIterator[Retention]:
    async with Retention(store_url, writer="keeper") as opened:
        yield opened


@pytest.fixture
def faults() -> Iterator[dict[str, Any]]:
    yield FAULT_POINTS
    FAULT_POINTS.clear()


async def put(store: CaptureStore, rollout: str, calls: int = 3, *, freeze: bool = True) -> None:
    for turn in linear_rollout(calls, rollout_id=rollout):
        await store.sink.begin_call(rollout, turn.entry.model_call_id)
        await store.sink.put(turn.entry)
    if freeze:
        await store.source.freeze(rollout)


async def put_staged(store: CaptureStore, rollout: str, *calls: str, recorded: bool = False) -> None:
    parent = None
    for call in calls:
        staged = stage(call, parent, rollout=rollout)
        parent = staged
        assert (await asyncio.to_thread(store.staging.stage, staged.snapshot, attachments={"raw": b"\0"})).ok
        if recorded:
            await store.lineage.record(make_commit(rollout, call))


async def staged_in(url: str) -> list[str]:
    calls = [f"{row['rollout_id']}/{row['model_call_id']}" for row in await rows_of(url, tables.staged_calls)]
    attached = await rows_of(url, tables.staged_attachments)
    assert calls == [f"{row['rollout_id']}/{row['model_call_id']}" for row in attached]
    return calls


async def states(retention: Retention, run: str = RUN) -> dict[str, str]:
    found = await retention.states(RolloutFilter(run=run))
    return {key.rollout_id: str(state) for key, state in found.items()}


async def export_mark(
    store: CaptureStore, url: str, rollout: str, is_held: str = "true", export_id: str = "e"
) -> None:
    snapshot = await store.source.freeze(rollout)
    await run_sql(
        url,
        "INSERT INTO exports (run, rollout_id, export_id, snapshot_id, version, destination, manifest_sha256,"
        " exported_at, written_by, is_held) VALUES (:run, :rollout, :export, :snapshot, :version, 'out',"
        f" '{'0' * 64}', '2026-01-01 00:00:00.000000', 'me', {is_held})",
        run=store.sink.run,
        rollout=rollout,
        export=export_id,
        snapshot=snapshot.snapshot_id,
        version=snapshot.version,
    )


async def test_retiring_removes_the_records_of_what_is_asked_for_and_keeps_fences_and_histories(
    store: CaptureStore, retention: Retention, store_url: str
) -> None:
    for rollout in ("a", "b"):
        await put(store, rollout)
    await put(store, "open", freeze=False)
    settled: list[Settled] = []
    await retention.retire(FROZEN, settled.append)
    assert settled == [Settled(RolloutKey(RUN, rollout), rows=6, removed=True) for rollout in ("a", "b")]
    assert await states(retention) == {"a": "retired", "b": "retired", "open": "open"}
    assert {row["rollout_id"] for row in await rows_of(store_url, tables.entries)} == {"open"}
    assert {row["rollout_id"] for row in await rows_of(store_url, tables.intents)} == {"open"}
    last = [row for row in await rows_of(store_url, tables.snapshot_versions) if row["rollout_id"] == "a"][-1]
    assert (last["event"], last["written_by"]) == ("retire", "keeper")
    with pytest.raises(TokenCaptureRetiredError):
        await store.sink.put(make_entry("a"))
    again: list[Settled] = []
    await retention.retire(FROZEN, again.append)
    assert again == []


async def test_deleting_removes_every_row_of_what_is_asked_for(
    store: CaptureStore, retention: Retention, store_url: str
) -> None:
    for rollout in ("a", "b"):
        await put(store, rollout)
        await store.sink.mark_incomplete(rollout, "call-9")
        await store.lineage.record(make_commit(rollout))
        await store.lineage.record_failure(rollout, "lost", "worker_capture_failed")
        await export_mark(store, store_url, rollout)
    settled: list[Settled] = []
    await retention.delete(RolloutFilter(run=RUN, rollout_ids=("a",)), settled.append)
    # Entries, intents, a mark, a ledger call and a ledger failure.
    assert settled == [Settled(RolloutKey(RUN, "a"), rows=9, removed=True)]
    for table in OF_ROLLOUTS:
        left = {row["rollout_id"] for row in await rows_of(store_url, table)}
        assert left == ({"b"} if "staged" not in table.name else set()), table.name
    await put(store, "a")


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (FROZEN, {"clean", "bad", "sent", "part", "unsaid"}),
        (OPEN, {"open"}),
        (RolloutFilter(run=RUN, state=FenceState.FROZEN, incomplete=True), {"bad"}),
        (
            RolloutFilter(run=RUN, state=FenceState.FROZEN, incomplete=False),
            {"clean", "sent", "part", "unsaid"},
        ),
        (RolloutFilter(run=RUN, state=FenceState.FROZEN, exported=True), {"sent"}),
        (RolloutFilter(run=RUN, state=FenceState.FROZEN, exported=False), {"clean", "bad"}),
        (RolloutFilter(run=RUN, state=FenceState.FROZEN, partly_exported=True), {"part", "unsaid"}),
        (RolloutFilter(run=RUN, prefix="cl"), {"clean"}),
        (RolloutFilter(run="run-2"), {"elsewhere"}),
        (RolloutFilter(run="run-3"), set()),
    ],
    ids=[
        "frozen",
        "open",
        "incomplete",
        "complete",
        "exported",
        "not exported",
        "partly exported",
        "prefix",
        "run",
        "no run",
    ],
)
async def test_what_is_removed_is_what_the_extent_told_and_nothing_else(
    store: CaptureStore, retention: Retention, store_url: str, wanted: RolloutFilter, expected: set[str]
) -> None:
    for rollout in ("clean", "sent", "bad", "part", "unsaid"):
        await put(store, rollout)
    await store.sink.mark_incomplete("bad", "call-9")
    await store.source.freeze("bad")
    # Of several exports, one that holds everything is enough. A mark of before revision 0005 says nothing.
    await export_mark(store, store_url, "sent", is_held="false", export_id="another")
    await export_mark(store, store_url, "sent")
    await export_mark(store, store_url, "part", is_held="false")
    await export_mark(store, store_url, "unsaid", is_held="NULL")
    await put(store, "open", freeze=False)
    async with open_store(store_url, run="run-2") as other:
        await put(other, "elsewhere")
    extent = await retention.extent(wanted)
    stored = {"open": 0, "frozen": 0} | {str(state): 0 for state in FenceState}
    for rollout in expected:
        stored["open" if rollout == "open" else "frozen"] += 1
    assert extent.rollouts == len(expected)
    assert {name: getattr(extent, name) for name in stored} == stored
    assert extent.incomplete == len(expected & {"bad"})
    assert extent.never_exported == len(expected - {"sent", "part", "unsaid"})
    assert extent.partly_exported == len(expected & {"part", "unsaid"})
    assert extent.calls == 3 * len(expected)
    entries = await rows_of(store_url, tables.entries)
    payloads = [len(row["payload"]) for row in entries if row["rollout_id"] in expected]
    assert extent.stored_bytes == sum(payloads)
    settled: list[Settled] = []
    await retention.delete(wanted, settled.append)
    assert {of.key.rollout_id for of in settled if of.removed} == expected
    left = set(await states(retention)) | set(await states(retention, "run-2"))
    assert left == {"clean", "sent", "bad", "part", "unsaid", "open", "elsewhere"} - expected


async def test_the_age_of_a_rollout_counts_from_when_it_came_into_its_present_state(
    store: CaptureStore, retention: Retention
) -> None:
    await put(store, "early")
    await put(store, "late", freeze=False)
    between = datetime.now(UTC)
    await store.source.freeze("late")
    settled: list[Settled] = []
    await retention.retire(RolloutFilter(state=FenceState.FROZEN, before=between), settled.append)
    assert await states(retention) == {"early": "retired", "late": "frozen"}


async def freeze(store: CaptureStore, rollout: str) -> None:
    await store.source.freeze(rollout)


async def mark(store: CaptureStore, rollout: str) -> None:
    await store.sink.mark_incomplete(rollout, "call-9")


async def conflict(store: CaptureStore, rollout: str) -> None:
    with suppress(PayloadConflictError):
        await store.sink.put(make_entry(rollout, "call-0", model="other"))


async def make_anew(store: CaptureStore, rollout: str) -> None:
    await store.source.delete([rollout])
    await put(store, rollout, freeze=False)


async def make_anew_and_freeze(store: CaptureStore, rollout: str) -> None:
    await make_anew(store, rollout)
    await store.source.freeze(rollout)


@pytest.mark.parametrize("removes", ["retire", "delete"])
@pytest.mark.parametrize(
    ("wanted", "change", "why"),
    [
        (OPEN, freeze, "it is frozen meanwhile"),
        (OPEN, mark, "it got version 1 meanwhile"),
        (OPEN, conflict, "it got version 1 meanwhile"),
        (OPEN, make_anew, "it was deleted and made anew meanwhile"),
        (FROZEN, mark, "it got version 2 meanwhile"),
        (FROZEN, make_anew_and_freeze, "it was deleted and made anew meanwhile"),
        (RolloutFilter(run=RUN, state=FenceState.FROZEN, exported=False), None, "it was exported meanwhile"),
    ],
)
async def test_a_rollout_that_changed_since_it_was_listed_is_left_and_told(
    store: CaptureStore,
    retention: Retention,
    store_url: str,
    monkeypatch: pytest.MonkeyPatch,
    removes: str,
    wanted: RolloutFilter,
    change: Change | None,
    why: str,
) -> None:
    for rollout in ("changed", "same"):
        await put(store, rollout, freeze=wanted.state is FenceState.FROZEN)

    async def happen() -> None:
        if change is None:
            await export_mark(store, store_url, "changed")
        else:
            await change(store, "changed")

    after_listing(monkeypatch, happen)
    settled: list[Settled] = []
    await getattr(retention, removes)(wanted, settled.append)
    assert settled == [
        Settled(RolloutKey(RUN, "changed"), left=why),
        Settled(RolloutKey(RUN, "same"), rows=6, removed=True),
    ]
    assert len((await store.source.freeze("changed")).entries) == 3


@pytest.mark.parametrize("removes", ["retire", "delete"])
async def test_a_rollout_that_somebody_else_removed_meanwhile_is_neither_removed_nor_left(
    store: CaptureStore, retention: Retention, monkeypatch: pytest.MonkeyPatch, removes: str
) -> None:
    await put(store, "gone")

    async def happen() -> None:
        await getattr(store.source, removes)(["gone"])

    after_listing(monkeypatch, happen)
    settled: list[Settled] = []
    await getattr(retention, removes)(FROZEN, settled.append)
    assert settled == [Settled(RolloutKey(RUN, "gone"))]


def after_listing(monkeypatch: pytest.MonkeyPatch, happen: Callable[[], Awaitable[None]]) -> None:
    """Let something happen between the listing of rollouts and the first removal."""
    listed = pages

    async def then(*arguments: Any, **options: Any) -> AsyncIterator[Any]:
        async for page in listed(*arguments, **options):
            await happen()
            yield page

    monkeypatch.setattr(retention_module, "pages", then)


@pytest.mark.parametrize("removes", ["retire", "delete"])
async def test_a_removal_does_not_overtake_a_mark_that_waits_on_this_host(
    store: CaptureStore, retention: Retention, store_url: str, removes: str
) -> None:
    await put(store, "marked")
    root = spill_root("")
    assert root is not None
    spill = Spill(root, parse_url(store_url))
    key = RolloutKey(RUN, "marked")
    spill.keep(Mark(key, "call-9", Stamp.make(datetime.now(UTC), "somebody")))
    settled: list[Settled] = []
    await getattr(retention, removes)(FROZEN, settled.append)
    assert settled == [Settled(key, left="it got version 2 meanwhile")]
    assert spill.is_empty()
    assert (await store.source.freeze("marked")).incomplete


@pytest.mark.parametrize("removes", ["retire", "delete"])
async def test_a_damaged_mark_of_a_rollout_keeps_that_rollout_and_no_other(
    store: CaptureStore, retention: Retention, store_url: str, removes: str
) -> None:
    for rollout in ("a", "b", "c"):
        await put(store, rollout)
    root = spill_root("")
    assert root is not None
    spill = Spill(root, parse_url(store_url))
    spill.keep(Mark(RolloutKey(RUN, "b"), "call-9", Stamp.make(datetime.now(UTC), "me"))).write_bytes(b"torn")
    settled: list[Settled] = []
    await getattr(retention, removes)(FROZEN, settled.append)
    assert [(of.key.rollout_id, of.removed) for of in settled] == [("a", True), ("b", False), ("c", True)]
    assert "tokencustody spill discard" in settled[1].left
    kept = {rollout: state for rollout, state in (await states(retention)).items() if state != "retired"}
    assert kept == {"b": "frozen"}


@pytest.mark.parametrize("removes", ["retire", "delete", "collect"])
async def test_a_removal_whose_acknowledgement_was_lost_is_told_as_one(
    store: CaptureStore, retention: Retention, store_url: str, faults: dict[str, Any], removes: str
) -> None:
    await put_staged(store, "a", "call-1")
    await put(store, "a")

    async def lose() -> None:
        faults.clear()
        raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")

    faults["after commit, before acknowledgement"] = lose
    settled: list[Settled] = []
    if removes == "collect":
        await retention.collect(datetime.now(UTC), settled.append)
    else:
        await getattr(retention, removes)(FROZEN, settled.append)
    assert not faults
    assert settled == [Settled(RolloutKey(RUN, "a"), rows=1 if removes == "collect" else 6, removed=True)]


async def test_a_cancelled_removal_ends_between_two_rollouts_and_told_of_each_that_is_gone(
    store: CaptureStore, retention: Retention, faults: dict[str, Any]
) -> None:
    for rollout in ("a", "b", "c"):
        await put(store, rollout)
    reached, go_on = asyncio.Event(), asyncio.Event()
    settled: list[Settled] = []

    async def hold() -> None:
        if settled:
            reached.set()
            await go_on.wait()

    faults["before commit"] = hold
    retiring = asyncio.create_task(retention.retire(FROZEN, settled.append))
    await reached.wait()
    retiring.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await retiring
    assert [of.key.rollout_id for of in settled if of.removed] == ["a", "b"]
    assert await states(retention) == {"a": "retired", "b": "retired", "c": "frozen"}


async def test_more_rollouts_than_a_page_holds_all_go(
    store: CaptureStore, retention: Retention, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = pages
    monkeypatch.setattr(retention_module, "pages", lambda *given, **_: listed(*given, size=2))
    monkeypatch.setattr(retention_module, "PAGE", 2)
    for number in range(5):
        await put(store, f"r-{number}", 1)
        await put_staged(store, f"r-{number}", "call-1")
    settled: list[Settled] = []
    await retention.retire(FROZEN, settled.append)
    assert len(settled) == 5
    assert await retention.orphans(datetime.now(UTC)) == 5
    await retention.collect(datetime.now(UTC), settled.append)
    assert len(settled) == 10
    assert all(of.removed for of in settled)


async def test_only_staged_calls_that_nobody_will_read_are_collected(
    store: CaptureStore, retention: Retention, store_url: str
) -> None:
    await put_staged(store, "unfenced", "call-1", "call-2")
    for rollout in ("open", "frozen", "retired"):
        await put_staged(store, rollout, "call-1", recorded=True)
        await put_staged(store, rollout, "stray")
    await store.source.freeze("frozen")
    await store.source.retire(["retired"])
    async with open_store(store_url, run="run-2") as other:
        # The ledger of another run names nothing of this one.
        await other.lineage.record(make_commit("unfenced", "call-1"))
        await put_staged(other, "unfenced", "call-9")
    now = datetime.now(UTC)
    garbage = ["frozen/stray", "retired/call-1", "retired/stray", "unfenced/call-1", "unfenced/call-2"]
    assert await asyncio.to_thread(store.staging.orphans) == garbage
    assert await retention.orphans(now, RUN) == await retention.orphans(now) == len(garbage)
    settled: list[Settled] = []
    await retention.collect(now, settled.append, RUN)
    assert [(of.key.rollout_id, of.rows) for of in settled] == [
        ("frozen", 1),
        ("retired", 2),
        ("unfenced", 2),
    ]
    left = ["frozen/call-1", "open/call-1", "open/stray", "unfenced/call-9"]
    assert await staged_in(store_url) == left
    assert await retention.orphans(now) == 0


async def test_a_staged_call_stays_while_one_that_stays_continues_it(
    store: CaptureStore, retention: Retention, store_url: str
) -> None:
    await put_staged(store, "recorded", "a", "b", "c", "d")
    await store.lineage.record(make_commit("recorded", "c"))
    await store.source.freeze("recorded")
    await put_staged(store, "young", "a", "b")
    old = datetime.now(UTC)
    root = stage("a", rollout="young")
    child = stage("late", stage("b", root, rollout="young"), rollout="young")
    assert (await asyncio.to_thread(store.staging.stage, child.snapshot, attachments={"raw": b"\0"})).ok
    settled: list[Settled] = []
    await retention.collect(old, settled.append)
    young = ["young/a", "young/b", "young/late"]
    assert await staged_in(store_url) == ["recorded/a", "recorded/b", "recorded/c", *young]
    await retention.collect(datetime.now(UTC), settled.append)
    assert await staged_in(store_url) == ["recorded/a", "recorded/b", "recorded/c"]


async def test_what_the_ledger_of_another_rollout_names_after_an_import_stays(
    store: CaptureStore, retention: Retention, store_url: str
) -> None:
    await put_staged(store, "origin", "a", "b", recorded=True)
    await put_staged(store, "origin", "stray")
    await store.lineage.import_rows("origin-2", await store.lineage.export_rows("origin"))
    await store.source.retire(["origin"])
    settled: list[Settled] = []
    await retention.collect(datetime.now(UTC), settled.append)
    assert await staged_in(store_url) == ["origin/a", "origin/b"]


@pytest.mark.parametrize("happens", ["staged", "recorded", "opened", "deleted and staged anew"])
async def test_what_is_staged_or_recorded_between_the_listing_and_the_removal_stays(
    store: CaptureStore,
    retention: Retention,
    store_url: str,
    monkeypatch: pytest.MonkeyPatch,
    happens: str,
) -> None:
    await put_staged(store, "r", "a", "b")
    before = datetime.now(UTC)
    listed = Retention._with_orphans

    async def with_orphans(*arguments: Any) -> AsyncIterator[Any]:
        async for found in listed(*arguments):
            match happens:
                case "staged":
                    await put_staged(store, "r", "c")
                case "opened":
                    await store.sink.begin_call("r", "a")
                case "recorded":
                    await store.lineage.record(make_commit("r", "a"))
                    await store.source.freeze("r")
                case _:
                    await asyncio.to_thread(store.staging.delete, ["r/a"])
                    await put_staged(store, "r", "a")
            yield found

    monkeypatch.setattr(Retention, "_with_orphans", with_orphans)
    settled: list[Settled] = []
    await retention.collect(before, settled.append)
    stays = {"staged": ["r/c"], "opened": ["r/a", "r/b"]}
    assert await staged_in(store_url) == stays.get(happens, ["r/a"])


async def test_a_staged_call_cannot_be_deleted_and_staged_anew_while_it_is_collected(
    store: CaptureStore, retention: Retention, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_staged(store, "r", "a")
    dispose = removal.dispose_txn
    refused = []

    def meddle(*arguments: Any) -> None:
        with SqlStagingStore(store_url, run=RUN, deadline=0.2, pool_size=1) as other:
            try:
                other.delete(["r/a"])
            except StoreUnavailableError as exc:
                refused.append(exc)
        dispose(*arguments)

    monkeypatch.setattr(retention_module, "dispose_txn", meddle)
    await retention.collect(datetime.now(UTC), lambda _: None)
    assert len(refused) == 1
    assert await staged_in(store_url) == []


async def test_deleting_a_run_leaves_nothing_of_it_and_everything_of_the_others(
    store: CaptureStore, retention: Retention, store_url: str
) -> None:
    async def fill(of: CaptureStore) -> None:
        await put(of, "frozen")
        await put(of, "open", freeze=False)
        await put_staged(of, "open", "call-1", recorded=True)
        await put_staged(of, "only-staged", "call-1")
        await put(of, "retired")
        await of.source.retire(["retired"])

    async with open_store(store_url, run="run-2") as other:
        await fill(store)
        await fill(other)

    async def of_the_other() -> dict[str, Any]:
        rows = {table.name: await rows_of(store_url, table) for table in OF_ROLLOUTS}
        return {name: [row for row in found if row["run"] == "run-2"] for name, found in rows.items()}

    kept = await of_the_other()
    settled: list[Settled] = []
    staged: list[Settled] = []
    await retention.delete_run(RUN, settled.append, staged.append)
    assert {of.key.rollout_id for of in settled if of.removed} == {"frozen", "open", "retired"}
    assert sum(of.rows for of in staged) == 2
    assert (
        {table.name: await rows_of(store_url, table) for table in OF_ROLLOUTS} == kept == await of_the_other()
    )


async def test_deleting_a_run_leaves_what_a_rollout_needs_that_is_left(
    store: CaptureStore, retention: Retention, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_staged(store, "r", "call-1", recorded=True)
    await store.source.freeze("r")

    async def happen() -> None:
        await store.sink.mark_incomplete("r", "call-9")

    after_listing(monkeypatch, happen)
    settled: list[Settled] = []
    await retention.delete_run(RUN, settled.append, settled.append)
    assert settled == [Settled(RolloutKey(RUN, "r"), left="it got version 2 meanwhile")]
    assert await staged_in(store_url) == ["r/call-1"]


async def test_retention_does_not_create_a_database(tmp_path: Any) -> None:
    async with Retention(tmp_path / "none.db") as retention:
        with pytest.raises(StoreUnavailableError, match="does not exist"):
            await retention.extent(FROZEN)
    assert not list(tmp_path.iterdir())


def test_vacuum_gives_back_what_was_retired(tmp_path: Any) -> None:
    path = tmp_path / "full.db"

    async def fill_and_retire() -> None:
        async with open_store(path, run=RUN) as store:
            for number in range(8):
                await store.sink.put(make_entry(f"r-{number}", prompt=list(range(50_000))))
            await put(store, "kept")
        async with Retention(path) as retention:
            await retention.retire(OPEN, lambda _: None)

    asyncio.run(fill_and_retire())
    before, after = vacuum(path)
    assert before > 800_000
    assert after < 200_000
    assert after == path.stat().st_size
    assert asyncio.run(reopened(path)) == 3


async def reopened(path: Any) -> int:
    async with open_store(path, run=RUN) as store:
        return len((await store.source.freeze("kept")).entries)


def test_vacuum_of_a_file_that_is_in_use_says_so_and_changes_nothing(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokencustody.retention.vacuum._PATIENCE", 0.1)
    path = tmp_path / "used.db"

    async def fill() -> None:
        async with open_store(path, run=RUN) as store:
            await put(store, "kept")

    asyncio.run(fill())
    for begin in ("BEGIN IMMEDIATE", "BEGIN; SELECT * FROM fences"):
        user = sqlite3.connect(path, isolation_level=None)
        for statement in begin.split(";"):
            user.execute(statement).fetchone()
        with pytest.raises(StoreUnavailableError, match=r"used\.db is (not available|in use)"):
            vacuum(path)
        user.close()
    assert asyncio.run(reopened(path)) == 3
