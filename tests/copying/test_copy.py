"""A copy holds every row as it was, whatever the databases are, and overwrites nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, insert, select, update

from tests.support import databases, probes
from tests.support.entries import make_entry
from tests.support.killed import killed_at
from tests.support.postgres import Server
from tests.support.rich import ODD_CALL, execute, fill_frozen, fill_richly, rows
from tests.support.rollouts import linear_rollout
from tests.support.staged import stage
from tokencustody import open_store
from tokencustody.copying import Copier, CopyOutcome, CopyReport, copier
from tokencustody.copying import rows as copied_rows
from tokencustody.database.url import parse_url
from tokencustody.errors import (
    DamagedMarkError,
    InvalidRecordError,
    SchemaMismatchError,
    StoreUnavailableError,
)
from tokencustody.schema import migrate
from tokencustody.schema.tables import (
    entries,
    exports,
    failures,
    fences,
    intents,
    ledger_calls,
    ledger_failures,
    snapshot_versions,
    staged_attachments,
    staged_calls,
)
from tokencustody.spill.marks import Mark, Spill
from tokencustody.staging.records import StagedCallRecord
from tokencustody.store.base import now
from tokencustody.txn.fence import RolloutKey, Stamp

ALL = 8  # rollouts of fill_richly


def filled(fill: Callable[[str], Coroutine[Any, Any, None]]) -> pytest.MarkDecorator:
    return pytest.mark.filled(by=lambda url: asyncio.run(fill(url)))


RICH = filled(lambda url: fill_richly(url))
# With rows in every table.
TWO_FROZEN = filled(lambda url: fill_frozen(url, "another", "frozen"))
# One for each of CHANGES.
EACH_CHANGE = filled(lambda url: fill_frozen(url, *CHANGES))


@pytest.fixture
def other_url(store_url: str, tmp_path: Path, postgres: Server, _migrated_template: str) -> Iterator[str]:
    """The database to copy to, of the other kind and without rows."""
    if store_url.startswith("sqlite"):
        with databases.fresh(postgres, _migrated_template) as url:
            yield url
    else:
        yield f"sqlite:///{tmp_path / 'other.db'}"


async def copy(source: str, target: str, **options: Any) -> CopyReport:
    copying = Copier(source, target)
    try:
        return await copying.copy(**options)
    finally:
        await copying.close()


async def outcome_of(source: str, target: str, **options: Any) -> tuple[CopyOutcome, str]:
    """Copy one rollout, and return what became of it and why."""
    report = await copy(source, target, include_open=True, **options)
    ((outcome, count),) = report.outcomes.items()
    assert count == 1
    return outcome, report.notable[0].reason if report.notable else ""


@RICH
async def test_a_copy_and_a_copy_of_the_copy_have_equal_rows_in_every_table(
    store_url: str, other_url: str, tmp_path: Path
) -> None:
    await fill_frozen(store_url, "frozen", run="run-2")
    before = await rows(store_url)
    assert all(before.values()), "a table without rows proves nothing"
    report = await copy(store_url, other_url, include_open=True)
    assert report.outcomes == {CopyOutcome.COPIED: ALL + 1}
    assert report.rows == sum(map(len, before.values()))
    assert await rows(other_url) == before
    third = f"sqlite:///{tmp_path / 'third.db'}"
    assert (await copy(other_url, third, include_open=True)).is_clean
    assert await rows(third) == before
    assert await rows(store_url) == before


@RICH
async def test_what_a_copy_gives_back_is_what_was_put(store_url: str, other_url: str) -> None:
    await copy(store_url, other_url)
    snapshots = []
    for url in (store_url, other_url):
        async with open_store(url, run="run-1") as store:
            snapshots.append(
                [repr(await store.source.freeze(name)) for name in ("frozen", "deltas", "marked")]
            )
            snapshots[-1].append(await store.lineage.manifest("frozen"))
    assert snapshots[0] == snapshots[1]
    assert repr(ODD_CALL) in snapshots[0][0]


@RICH
async def test_a_repeated_copy_writes_nothing(store_url: str, other_url: str) -> None:
    await copy(store_url, other_url, include_open=True)
    before = await rows(other_url)
    report = await copy(store_url, other_url, include_open=True)
    assert (report.outcomes, report.rows) == ({CopyOutcome.ALREADY_THERE: ALL}, 0)
    assert await rows(other_url) == before


@RICH
async def test_open_rollouts_are_left_out_unless_they_are_asked_for(store_url: str, other_url: str) -> None:
    report = await copy(store_url, other_url)
    assert report.outcomes == {CopyOutcome.COPIED: ALL - 1, CopyOutcome.LEFT_OUT: 1}
    assert [(each.rollout_id, each.reason) for each in report.notable] == [("open", "it is open")]
    assert report.is_clean
    assert "'open'," not in "".join((await rows(other_url))["entries"])


@RICH
async def test_a_dry_run_says_what_would_be_done_and_writes_nothing(
    store_url: str, other_url: str, tmp_path: Path
) -> None:
    for target in (other_url, f"sqlite:///{tmp_path / 'new.db'}"):
        report = await copy(store_url, target, dry_run=True)
        assert report.outcomes == {CopyOutcome.COPIED: ALL - 1, CopyOutcome.LEFT_OUT: 1}
    assert not (tmp_path / "new.db").exists()
    await copy(store_url, other_url, prefix="frozen")
    before = await rows(other_url)
    report = await copy(store_url, other_url, dry_run=True, prefix="frozen")
    assert report.outcomes == {CopyOutcome.ALREADY_THERE: 1}
    assert await rows(other_url) == before


@RICH
async def test_only_what_is_asked_for_is_copied(store_url: str, other_url: str) -> None:
    await fill_frozen(store_url, "frozen", "alone", run="run-2")
    assert (await copy(store_url, other_url, run="run-2")).outcomes == {CopyOutcome.COPIED: 2}
    assert await rows(other_url, "run-1") == {name: {} for name in await rows(other_url)}
    report = await copy(store_url, other_url, run="run-1", rollout_ids=["alone", "frozen", "none"])
    assert report.outcomes == {CopyOutcome.COPIED: 2, CopyOutcome.FAILED: 1}
    assert [each.rollout_id for each in report.notable] == ["none"]


async def test_an_open_rollout_that_grew_moves_on_in_the_copy(store_url: str, other_url: str) -> None:
    turns = linear_rollout(6)
    async with open_store(store_url) as store:
        await store.sink.begin_call("rollout", "refused-later")
        for grows in (
            lambda: store.sink.put(turns[0].entry),
            lambda: store.sink.put(turns[1].entry),
            lambda: store.sink.refuse_call("rollout", model_call_id="refused-later", code="length"),
            lambda: store.sink.mark_incomplete("rollout", "lost"),
            lambda: store.sink.put(turns[2].entry),
            lambda: store.source.freeze("rollout"),
            lambda: store.sink.mark_incomplete("rollout", "lost-too"),
        ):
            await grows()
            outcome, _ = await outcome_of(store_url, other_url)
            assert outcome in (CopyOutcome.COPIED, CopyOutcome.UPDATED)
            assert await rows(other_url) == await rows(store_url)
        assert (await outcome_of(store_url, other_url))[0] is CopyOutcome.ALREADY_THERE


@TWO_FROZEN
async def test_what_is_retired_in_the_source_stays_in_the_copy(store_url: str, other_url: str) -> None:
    await copy(store_url, other_url)
    before = await rows(other_url)
    async with open_store(store_url, run="run-1") as store:
        await store.source.retire(["frozen"])
    report = await copy(store_url, other_url)
    assert report.outcomes == {CopyOutcome.ALREADY_THERE: 2}
    assert await rows(other_url) == before


@TWO_FROZEN
async def test_a_copy_that_was_consumed_is_not_brought_back(store_url: str, other_url: str) -> None:
    await copy(store_url, other_url)
    async with open_store(other_url, run="run-1") as store:
        await store.source.retire(["frozen"])
    before = await rows(other_url)
    assert (await outcome_of(store_url, other_url, rollout_ids=["frozen"]))[0] is CopyOutcome.ALREADY_THERE
    assert await rows(other_url) == before


def of(table: Any, rollout: str = "frozen") -> Any:
    return (table.c.run == "run-1") & (table.c.rollout_id == rollout)


CHANGES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    # Name of the rollout: table, which of its rows, and to what they change.
    "entry": (entries, {"model_call_id": "call-1"}, {"model": "changed"}),
    "time": (entries, {"model_call_id": "call-1"}, {"committed_at": now()}),
    "intent": (intents, {}, {"refusal_code": "another"}),
    "failure": (failures, {}, {"differing_fields": "another"}),
    "version": (snapshot_versions, {"version": 0}, {"written_by": "another"}),
    "verdict": (fences, {}, {"incomplete": False}),
    "snapshot": (fences, {}, {"snapshot_id": "another"}),
    "export": (exports, {}, {"destination": "another"}),
    "ledger": (ledger_calls, {"model_call_id": "call-1"}, {"weight_version": 77}),
    "reason": (ledger_failures, {}, {"reason": "another"}),
    "extras": (staged_calls, {"model_call_id": "staged-1"}, {"extras": b"another"}),
    "attachment": (staged_attachments, {"name": "note"}, {"kind": "bytes"}),
}


def change(rollout: str) -> Any:
    table, which, values = CHANGES[rollout]
    rows_of_call = [table.c[name] == value for name, value in which.items()]
    return update(table).where(of(table, rollout), *rows_of_call).values(values)


@EACH_CHANGE
@pytest.mark.parametrize("side", ["target", "source"])
async def test_any_row_that_differs_is_a_conflict_and_both_stay(
    store_url: str, other_url: str, side: str
) -> None:
    await copy(store_url, other_url)
    await execute(store_url if side == "source" else other_url, *map(change, CHANGES))
    before = [await rows(store_url), await rows(other_url)]
    report = await copy(store_url, other_url)
    assert {each.rollout_id: each.outcome for each in report.notable} == dict.fromkeys(
        CHANGES, CopyOutcome.CONFLICT
    )
    for each in report.notable:
        table = CHANGES[each.rollout_id][0].name
        assert table in each.reason or table == "snapshot_versions", each
    assert [await rows(store_url), await rows(other_url)] == before


async def test_a_row_that_the_source_lost_stays_in_the_copy(store_url: str, other_url: str) -> None:
    await fill_frozen(store_url, "frozen")
    await copy(store_url, other_url)
    before = await rows(other_url)
    await execute(store_url, delete(entries).where(of(entries), entries.c.model_call_id == "call-1"))
    assert (await outcome_of(store_url, other_url))[0] is CopyOutcome.ALREADY_THERE
    assert await rows(other_url) == before


async def test_two_rollouts_of_one_name_are_a_conflict(store_url: str, other_url: str) -> None:
    for url in (store_url, other_url):
        async with open_store(url) as store:
            await store.sink.put(make_entry("rollout"))
    before = await rows(other_url)
    outcome, reason = await outcome_of(store_url, other_url)
    assert (outcome, reason) == (CopyOutcome.CONFLICT, "the target's history of the rollout is another one")
    assert await rows(other_url) == before


@pytest.mark.parametrize("how", ["put", "frozen"])
async def test_a_rollout_that_went_on_in_both_is_a_conflict(store_url: str, other_url: str, how: str) -> None:
    turns = linear_rollout(3)
    async with open_store(store_url) as store, open_store(other_url) as other:
        await store.sink.put(turns[0].entry)
        await outcome_of(store_url, other_url)
        await store.sink.put(turns[1].entry)
        if how == "put":
            await other.sink.put(turns[2].entry)
        else:
            await other.source.freeze("rollout")
    before = await rows(other_url)
    assert (await outcome_of(store_url, other_url))[0] is CopyOutcome.CONFLICT
    assert await rows(other_url) == before


async def test_a_rollout_that_went_on_in_the_copy_alone_is_there(store_url: str, other_url: str) -> None:
    turns = linear_rollout(2)
    async with open_store(store_url) as store, open_store(other_url) as other:
        await store.sink.put(turns[0].entry)
        await outcome_of(store_url, other_url)
        await other.sink.put(turns[1].entry)
        assert (await outcome_of(store_url, other_url))[0] is CopyOutcome.ALREADY_THERE
        await other.source.freeze("rollout")
    assert (await outcome_of(store_url, other_url))[0] is CopyOutcome.ALREADY_THERE


DAMAGE = {
    "payload": (update(entries).where(of(entries)).values(payload=b"broken"), "entries"),
    "staged": (update(staged_calls).where(of(staged_calls)).values(payload=b"broken"), "staged_calls"),
    "attachment": (
        update(staged_attachments).where(of(staged_attachments)).values(data=b"broken"),
        "staged_attachments",
    ),
}


@TWO_FROZEN
@pytest.mark.parametrize(("damage", "table"), DAMAGE.values(), ids=DAMAGE.keys())
async def test_bytes_that_do_not_match_their_hash_are_not_copied(
    store_url: str, other_url: str, damage: Any, table: str
) -> None:
    await execute(store_url, damage)
    report = await copy(store_url, other_url)
    assert report.outcomes == {CopyOutcome.COPIED: 1, CopyOutcome.FAILED: 1}
    assert [each.rollout_id for each in report.notable] == ["frozen"]
    assert report.notable[0].reason.startswith(f"{table} of call ")
    assert not report.is_clean
    assert "'run-1', 'frozen'" not in "".join((await rows(other_url))["fences"])


@TWO_FROZEN
@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize(("damage", "table"), DAMAGE.values(), ids=DAMAGE.keys())
async def test_what_is_damaged_on_either_side_is_not_said_to_be_there(
    store_url: str, other_url: str, damage: Any, table: str, side: str
) -> None:
    await copy(store_url, other_url)
    await execute({"source": store_url, "target": other_url}[side], damage)
    report = await copy(store_url, other_url)
    (failed,) = report.notable
    assert (failed.rollout_id, failed.outcome) == ("frozen", CopyOutcome.FAILED)
    assert failed.reason.startswith(f"in the {side}, {table} of call ")
    assert not report.is_clean


@TWO_FROZEN
async def test_what_the_target_gives_back_is_compared_with_the_source(
    store_url: str, other_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that keeps something else: here a time that was rounded on the way."""
    add = copied_rows.Spool.add

    def rounded(self: Any, table: Any, page: Any) -> None:
        if table is intents:
            page = [row | {"begun_at": row["begun_at"].replace(microsecond=0)} for row in page]
        add(self, table, page)

    monkeypatch.setattr(copied_rows.Spool, "add", rounded)
    outcome, reason = await outcome_of(store_url, other_url, rollout_ids=["frozen"])
    assert outcome is CopyOutcome.FAILED
    assert "not what was written" in reason


@pytest.mark.parametrize("point", ["before commit", "after"])
async def test_a_copy_that_is_killed_leaves_whole_rollouts_and_is_finished_by_another(
    store_url: str, other_url: str, point: str
) -> None:
    async with open_store(store_url) as store:
        for number in range(4):
            for turn in linear_rollout(3, rollout_id=f"rollout-{number}"):
                await store.sink.put(turn.entry)
            await store.source.freeze(f"rollout-{number}")
    migrate.upgrade(other_url)
    killed_at(3, point, "copy", "--from", store_url, "--to", other_url)
    whole = 2 if point == "before commit" else 3
    held = await rows(other_url)
    assert [len(held[name]) for name in ("fences", "entries", "snapshot_versions")] == [
        whole,
        3 * whole,
        2 * whole,
    ]
    report = await copy(store_url, other_url)
    assert report.outcomes == {CopyOutcome.ALREADY_THERE: whole, CopyOutcome.COPIED: 4 - whole}
    assert await rows(other_url) == await rows(store_url)


@TWO_FROZEN
async def test_rows_are_read_some_at_a_time(
    store_url: str, other_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pages and a spool so small that nothing fits."""
    monkeypatch.setattr(copied_rows, "_PAGE_BYTES", 100)
    monkeypatch.setattr(copied_rows, "_PAGE_ROWS", 2)
    monkeypatch.setattr(copied_rows, "_BYTES_IN_MEMORY", 10)
    assert (await copy(store_url, other_url, include_open=True)).is_clean
    assert await rows(other_url) == await rows(store_url)


@RICH
async def test_staged_calls_that_came_after_the_copy_are_added(store_url: str, other_url: str) -> None:
    await copy(store_url, other_url)
    async with open_store(store_url, run="run-1") as store:
        for rollout in ("frozen", "alone", "retired"):
            record = StagedCallRecord.model_validate(stage("later", rollout=rollout).snapshot.model_dump())
            assert (await asyncio.to_thread(store.staging.stage, record)).ok
    report = await copy(store_url, other_url)
    assert report.outcomes == {
        CopyOutcome.UPDATED: 3,
        CopyOutcome.ALREADY_THERE: ALL - 4,
        CopyOutcome.LEFT_OUT: 1,
    }
    # One of them behind a freeze, with its version.
    assert (report.rows, report.is_clean) == (4, True)


@TWO_FROZEN
async def test_a_rollout_whose_mark_waits_on_this_host_is_left_out(
    store_url: str, other_url: str, spill_folder: Path
) -> None:
    waiting = Mark(RolloutKey("run-1", "frozen"), "lost", Stamp.make(now(), "test"))
    Spill(spill_folder, parse_url(store_url)).keep(waiting)
    report = await copy(store_url, other_url)
    assert report.outcomes == {CopyOutcome.COPIED: 1, CopyOutcome.LEFT_OUT: 1}
    assert "spill replay" in report.notable[0].reason


@TWO_FROZEN
@pytest.mark.parametrize("is_known", [False, True])
async def test_a_rollout_whose_mark_on_this_host_is_damaged_is_left_out_until_a_person_decides(
    store_url: str, other_url: str, spill_folder: Path, is_known: bool
) -> None:
    key = RolloutKey("run-1", "frozen")
    spill = Spill(spill_folder, parse_url(store_url))
    file = spill.keep(Mark(key, "lost", Stamp.make(now(), "test")))
    file.write_bytes(file.read_bytes()[:40])
    if is_known:
        async with open_store(store_url, run="run-1") as store:
            with pytest.raises(DamagedMarkError):
                await store.source.freeze("frozen")
    for dry_run in (True, False):
        report = await copy(store_url, other_url, dry_run=dry_run)
        assert report.outcomes == {CopyOutcome.COPIED: 1, CopyOutcome.LEFT_OUT: 1}
        assert ("spill discard" if is_known else "spill replay") in report.notable[0].reason
    for file in (*spill.waiting(key), *spill.damaged(key)):
        file.unlink()
    assert (await copy(store_url, other_url)).outcomes == {
        CopyOutcome.COPIED: 1,
        CopyOutcome.ALREADY_THERE: 1,
    }


@TWO_FROZEN
async def test_a_damaged_mark_of_a_rollout_in_the_target_leaves_that_rollout_and_no_other(
    store_url: str, other_url: str, spill_folder: Path
) -> None:
    spill = Spill(spill_folder, parse_url(other_url))
    spill.keep(Mark(RolloutKey("run-1", "frozen"), "lost", Stamp.make(now(), "test"))).write_bytes(b"torn")
    report = await copy(store_url, other_url)
    # A PostgreSQL source cannot tell that a damaged file is not its own.
    held_up = CopyOutcome.FAILED if store_url.startswith("sqlite") else CopyOutcome.LEFT_OUT
    assert report.outcomes == {CopyOutcome.COPIED: 1, held_up: 1}
    assert "spill discard" in report.notable[0].reason


async def test_many_staged_rollouts_without_a_fence_are_all_copied(
    store_url: str, other_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "PAGE", 3)
    rng = random.Random(11)
    names = {f"{rng.choice('aB-._9')}{number}" for number in range(7)}
    snapshot = stage("call").snapshot
    row = {
        **{column.name: getattr(snapshot, column.name, None) for column in staged_calls.c},
        "extras": None,
        "run": "run-1",
        "token_width": 2,
        "staged_at": now(),
        "written_by": "test",
        "payload": b"",
        "payload_sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    }
    await execute(store_url, *(insert(staged_calls).values(row | {"rollout_id": name}) for name in names))
    assert (await copy(store_url, other_url)).outcomes == {CopyOutcome.COPIED: 7}
    assert await rows(other_url) == await rows(store_url)


async def test_a_database_is_not_copied_to_itself(store_url: str, tmp_path: Path) -> None:
    others = [store_url]
    if store_url.startswith("sqlite"):
        link = tmp_path / "link.db"
        link.symlink_to(parse_url(store_url).dsn)
        others += [str(link), parse_url(store_url).dsn]
    else:
        others += [store_url.replace("127.0.0.1", "localhost")]
    for other in others:
        with pytest.raises(InvalidRecordError, match="are the same database"):
            await copy(store_url, other)


@TWO_FROZEN
async def test_both_databases_must_be_there_and_on_the_newest_revision(
    store_url: str, other_url: str, tmp_path: Path
) -> None:
    missing = f"sqlite:///{tmp_path / 'missing.db'}"
    with pytest.raises(StoreUnavailableError, match="does not exist"):
        await copy(missing, store_url)
    migrate.upgrade(other_url, "0003_prefix_sharing")
    if other_url.startswith("postgresql"):
        migrate.downgrade(other_url, "0003_prefix_sharing")
    for source, target in ((store_url, other_url), (other_url, store_url)):
        with pytest.raises(SchemaMismatchError, match="db upgrade"):
            await copy(source, target)


@TWO_FROZEN
async def test_nothing_is_copied_of_a_database_that_may_hold_more_than_this_library_knows(
    store_url: str, other_url: str
) -> None:
    probes.run_script(store_url, "UPDATE alembic_version SET version_num = '9999_later'")
    with pytest.raises(SchemaMismatchError, match=r"9999_later.*does not know: upgrade tokencustody"):
        await copy(store_url, other_url)


async def test_an_intent_that_the_target_refused_otherwise_stays(store_url: str, other_url: str) -> None:
    async with open_store(store_url) as store:
        await store.sink.begin_call("rollout", "call-1")
        await outcome_of(store_url, other_url)
        await execute(other_url, update(intents).values(refusal_code="another", refused_at=now()))
        await store.sink.refuse_call("rollout", model_call_id="call-1", code="length")
    before = await rows(other_url)
    outcome, reason = await outcome_of(store_url, other_url)
    assert (outcome, "intents (call-1)" in reason) == (CopyOutcome.CONFLICT, True)
    assert await rows(other_url) == before


async def test_a_rollout_that_somebody_opens_in_the_target_meanwhile_stays(
    store_url: str, other_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's image is that of before."""
    for url in (store_url, other_url):
        async with open_store(url) as store:
            await store.sink.put(make_entry("rollout"))
    before = await rows(other_url)
    source = (await rows(store_url))["fences"]
    image = copier.image_txn

    def image_of_before(connection: Any, key: Any, spool: Any = None) -> Any:
        found = image(connection, key, spool)
        (fence,) = connection.execute(select(fences))
        return found if repr(tuple(fence)) in source else copied_rows.Image()

    monkeypatch.setattr(copier, "image_txn", image_of_before)
    outcome, reason = await outcome_of(store_url, other_url)
    assert (outcome, "meanwhile" in reason) == (CopyOutcome.CONFLICT, True)
    assert await rows(other_url) == before
