"""Marks that are made while the database is away wait on this host, and none is lost, doubled or overtaken."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pwd
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
from typer.testing import CliRunner

from campaigns.relay import ChaosRelay
from tests.database.test_transactions import Points, connection_lost
from tests.support.entries import make_entry
from tests.support.machine import needs_mounts, needs_root
from tests.support.rows import rows_of, run_sql
from tokencustody import CaptureStore, open_store
from tokencustody.cli import app
from tokencustody.database.transactions import Database
from tokencustody.database.url import parse_url
from tokencustody.errors import (
    CorruptEntryError,
    DamagedMarkError,
    DurabilityError,
    InvalidRecordError,
    SchemaMismatchError,
    StoreUnavailableError,
    TokenCaptureRetiredError,
)
from tokencustody.schema import migrate, tables
from tokencustody.spill import replaying
from tokencustody.spill.files import spill_root
from tokencustody.spill.marks import Mark, Spill
from tokencustody.spill.replaying import Replayer, replay
from tokencustody.txn.fence import RolloutKey, Stamp

RUN = "run-1"
SOON = 0.5
LOCK = """
import sqlite3, sys
sqlite3.connect(sys.argv[1], isolation_level=None).execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


class Outage:
    """A database of its own for a test, by a URL at which it can be away."""

    def __init__(self, url: str, relay: ChaosRelay | None) -> None:
        self.url = url if relay is None else relay.url(url)
        self._relay = relay

    @contextmanager
    def away(self) -> Iterator[None]:
        """Let nobody reach PostgreSQL, or another process hold the lock of a SQLite file."""
        if self._relay is not None:
            self._relay.black_hole()
            yield
            self._relay.heal()
            return
        command = [sys.executable, "-c", LOCK, parse_url(self.url).dsn]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as locking:
            assert locking.stdout is not None
            assert locking.stdout.readline() == b"locked\n"
            yield
            locking.communicate()

    def open(self, run: str = RUN, **options: Any) -> CaptureStore:
        return open_store(self.url, run=run, deadline=options.pop("deadline", SOON), **options)


@pytest.fixture
def outage(store_url: str) -> Iterator[Outage]:
    if store_url.startswith("sqlite"):
        yield Outage(store_url, None)
        return
    parts = urlsplit(store_url)
    with ChaosRelay(parts.hostname or "localhost", parts.port or 5432) as relay:
        yield Outage(store_url, relay)


@pytest.fixture
def spill(store_url: str, spill_folder: Path) -> Spill:
    """The spill of `store_url`, when that is used without a detour."""
    return Spill(spill_folder, parse_url(store_url))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(replaying, "_LONGEST_PAUSE", 0.05)


@pytest.fixture
def nothing_in_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replayer, "start", lambda self: None)


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def make_mark(call: str = "call-1", rollout: str = "rollout-1", run: str = RUN, seconds: int = 0) -> Mark:
    at = datetime.now(UTC) + timedelta(seconds=seconds)
    return Mark(RolloutKey(run, rollout), call, Stamp.make(at, "test-writer"))


async def replayed(store: CaptureStore) -> None:
    """Wait until the background has nothing left to do."""
    for each in (store.sink, store.source):
        replayer = each._replayer
        assert replayer is not None
        # The look, and then the replay.
        while tasks := [task for task in replayer._tasks.values() if not task.done()]:
            async with asyncio.timeout(60):
                await asyncio.wait(tasks)


async def events(url: str, rollout: str = "rollout-1", run: str = RUN) -> list[tuple[str, str]]:
    """Return what made the versions of a rollout, which must be gapless from 0."""
    rows = [
        row
        for row in await rows_of(url, tables.snapshot_versions)
        if (row["run"], row["rollout_id"]) == (run, rollout)
    ]
    assert [row["version"] for row in rows] == list(range(len(rows)))
    return [(row["event"], row["model_call_id"]) for row in rows]


@pytest.mark.quick("A mark is never lost")
async def test_a_mark_made_while_the_database_is_away_is_acknowledged_and_reaches_it_by_itself(
    outage: Outage, store_url: str, spill_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with outage.open() as store:
        await store.sink.put(make_entry())
        with outage.away():
            await store.sink.mark_incomplete("rollout-1", "call-2")
            (file,) = files_in(spill_folder)
            (record,) = [each for each in caplog.records if each.name == "tokencustody.store.sink"]
            assert record.levelno == logging.WARNING
            said = record.getMessage()
            assert "call call-2 of rollout rollout-1 of run run-1 waits on this host" in said
            assert str(file) in said
            assert (store.stats()["spilled_marks"], store.stats()["replayed_marks"]) == (1, 0)
        await replayed(store)
        assert files_in(spill_folder) == []
        assert store.stats()["replayed_marks"] == 1
    async with outage.open(deadline=60) as store:
        assert (await store.source.freeze("rollout-1")).incomplete
    assert await events(store_url) == [("open", ""), ("mark", "call-2"), ("freeze", "")]


@pytest.mark.quick("A mark is never lost")
@pytest.mark.usefixtures("nothing_in_background")
async def test_a_freeze_does_not_overtake_a_mark_that_waits(
    outage: Outage, store_url: str, spill_folder: Path
) -> None:
    async with outage.open() as writer:
        await writer.sink.put(make_entry())
        with outage.away():
            await writer.sink.mark_incomplete("rollout-1", "call-2")
    async with outage.open(deadline=10) as trainer:
        assert (await trainer.source.freeze("rollout-1")).incomplete
        assert trainer.stats()["replayed_marks"] == 1
    assert await events(store_url) == [("open", ""), ("mark", "call-2"), ("freeze", "")]
    assert files_in(spill_folder) == []


@pytest.mark.usefixtures("nothing_in_background")
async def test_a_mark_that_waits_changes_a_frozen_rollout_before_its_old_snapshot_is_dropped(
    store_url: str, spill: Spill
) -> None:
    async with open_store(store_url, run=RUN) as store:
        await store.sink.put(make_entry())
        frozen = await store.source.freeze("rollout-1")
        spill.keep(make_mark())
        assert await store.source.drop("rollout-1", frozen.snapshot_id, frozen.version) is False
        again = await store.source.freeze("rollout-1")
        assert (again.snapshot_id, again.version, again.incomplete) == (
            frozen.snapshot_id,
            frozen.version + 1,
            True,
        )
        assert await store.source.drop("rollout-1", again.snapshot_id, again.version) is True


@pytest.mark.usefixtures("nothing_in_background")
async def test_a_rollout_that_is_retired_keeps_the_row_of_a_mark_that_waited(
    store_url: str, spill: Spill
) -> None:
    async with open_store(store_url, run=RUN) as store:
        await store.sink.put(make_entry())
        spill.keep(make_mark("call-2"))
        await store.lineage.retire(["rollout-1"])
    assert await events(store_url) == [("open", ""), ("mark", "call-2"), ("retire", "")]
    assert spill.waiting() == []


async def test_a_rollout_that_is_deleted_is_not_opened_again_by_a_mark_that_waited(
    store_url: str, spill: Spill
) -> None:
    async with open_store(store_url, run=RUN) as store:
        await store.sink.put(make_entry())
        spill.keep(make_mark())
        await store.source.delete(["rollout-1"])
        await replayed(store)
    assert await rows_of(store_url, tables.fences) == []
    assert spill.waiting() == []


async def test_nothing_is_written_after_a_mark_that_somebody_else_is_replaying(
    store_url: str, spill: Spill
) -> None:
    # Who has read a mark may store it at any time, also when its rollout has been deleted meanwhile.
    async with open_store(store_url, run=RUN, deadline=SOON) as store:
        await store.sink.put(make_entry())
        path = spill.keep(make_mark())
        claim = spill.claim(path)
        assert claim is not None
        with pytest.raises(StoreUnavailableError, match="its replay has not ended elsewhere"):
            await store.source.delete(["rollout-1"])
        claim.close()
        assert await store.source.delete(["rollout-1"]) == {"absent": [], "removed": ["rollout-1"]}
        await replayed(store)
    assert await rows_of(store_url, tables.fences) == []


async def test_a_replay_that_fails_leaves_every_mark_where_it_is(outage: Outage, spill_folder: Path) -> None:
    spill = Spill(spill_folder, parse_url(outage.url))
    marks = [spill.keep(make_mark(f"call-{number}", seconds=number)) for number in range(3)]
    async with outage.open() as store:
        with outage.away(), pytest.raises(StoreUnavailableError):
            await replay(store.sink._database, spill)
        assert spill.waiting() == marks
        with outage.away(), pytest.raises(StoreUnavailableError):
            await store.source.freeze("rollout-1")
        assert spill.waiting() == marks


async def test_a_mark_that_waited_while_another_host_deleted_its_rollout_masks_what_uses_the_id(
    store_url: str, spill: Spill
) -> None:
    async with open_store(store_url, run=RUN, spill=None) as other_host:
        await other_host.sink.put(make_entry())
        spill.keep(make_mark())
        await other_host.source.delete(["rollout-1"])
    async with open_store(store_url, run=RUN) as store:
        assert (await store.source.freeze("rollout-1")).incomplete


async def test_a_mark_whose_rollout_was_retired_meanwhile_is_discarded_with_a_warning(
    store_url: str, spill: Spill, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_store(store_url, run=RUN) as store:
        await store.source.retire(["rollout-1"])
        before = await events(store_url)
        spill.keep(make_mark("call-7"))
        # Refused, but it sees to what waits.
        with pytest.raises(TokenCaptureRetiredError):
            await store.source.freeze("rollout-1")
        await replayed(store)
        assert store.stats()["replayed_marks"] == 0
    assert await events(store_url) == before
    assert spill.waiting() == []
    assert "call call-7 of rollout rollout-1 of run run-1 waited on this host" in caplog.text


async def test_a_mark_that_a_fence_refuses_is_counted_once_and_not_kept(
    store_url: str, spill_folder: Path
) -> None:
    async with open_store(store_url, run=RUN) as store:
        await store.source.retire(["rollout-1"])
        before = store.stats()["late_writes_refused"]
        with pytest.raises(TokenCaptureRetiredError):
            await store.sink.mark_incomplete("rollout-1")
        assert store.stats()["late_writes_refused"] == before + 1
    assert files_in(spill_folder) == []


CAUSES: dict[str, BaseException] = {
    "of SQLite": sqlite3.OperationalError("unknown"),
    "of PostgreSQL": asyncpg.UntranslatableCharacterError("no such character"),
    "damage": CorruptEntryError("a table is missing"),
    "another revision": SchemaMismatchError("upgrade tokencustody"),
    "not durable": DurabilityError("fsync is off"),
    "a time-out": TimeoutError(),
    "memory": MemoryError(),
    "a bug": RuntimeError("a bug"),
}


@pytest.mark.usefixtures("nothing_in_background")
@pytest.mark.parametrize("cause", CAUSES.values(), ids=CAUSES)
async def test_a_mark_that_cannot_be_stored_is_kept_whatever_the_reason(
    store_url: str, spill: Spill, faults: Points, cause: BaseException
) -> None:
    async def fail() -> None:
        raise cause

    async with open_store(store_url, run=RUN, deadline=1) as store:
        faults["before commit"] = fail
        await store.sink.mark_incomplete("rollout-1", "call-2")
        assert len(spill.waiting()) == 1
        faults.clear()
    async with open_store(store_url, run=RUN) as store:
        assert (await store.source.freeze("rollout-1")).incomplete


async def test_a_mark_is_kept_where_the_tables_are_gone(store_url: str, spill: Spill) -> None:
    async with open_store(store_url, run=RUN) as store:
        await store.sink.put(make_entry())
        await run_sql(store_url, "ALTER TABLE failures RENAME TO elsewhere")
        await store.sink.mark_incomplete("rollout-1", "call-2")
        assert len(spill.waiting()) == 1
        await run_sql(store_url, "ALTER TABLE elsewhere RENAME TO failures")
        assert (await store.source.freeze("rollout-1")).incomplete


async def test_a_mark_that_was_stored_although_its_answer_was_lost_makes_one_version(
    store_url: str, spill: Spill, faults: Points
) -> None:
    async def lose() -> None:
        raise connection_lost()

    async with open_store(store_url, run=RUN, deadline=SOON) as store:
        await store.sink.put(make_entry())
        faults["after commit, before acknowledgement"] = lose
        await store.sink.mark_incomplete("rollout-1", "call-2")
        assert store.stats()["spilled_marks"] == 1
        faults.clear()
        await replayed(store)
    assert await events(store_url) == [("open", ""), ("mark", "call-2")]
    assert spill.waiting() == []


async def test_marks_are_replayed_in_the_order_in_which_they_were_made(store_url: str, spill: Spill) -> None:
    calls = [f"call-{number}" for number in range(9, 0, -1)]
    for number, call in enumerate(calls):
        spill.keep(make_mark(call, seconds=number))
    async with open_store(store_url, run=RUN) as store:
        await store.sink.begin_call("another", "call-1")
        await replayed(store)
    assert await events(store_url) == [("open", ""), *(("mark", call) for call in calls)]


def test_two_processes_that_replay_at_once_store_each_mark_once(store_url: str, spill: Spill) -> None:
    count = 12
    for number in range(count):
        spill.keep(make_mark(f"call-{number}", rollout=f"rollout-{number % 3}"))
    command = [sys.executable, "-m", "tokencustody", "spill", "replay", "--url", store_url, "--json"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    said = [json.loads(each.communicate(timeout=60)[0]) for each in running]
    assert [each.returncode for each in running] == [0, 0]
    assert all(each["discarded"] == each["corrupt"] == 0 for each in said)
    marks = [event for n in range(3) for event in asyncio.run(events(store_url, f"rollout-{n}")) if event[1]]
    assert sorted(marks) == sorted(("mark", f"call-{number}") for number in range(count))
    assert spill.waiting() == []


KILLED_AFTER_THE_MARK = """
import asyncio, os, signal, sys
from tokencustody import open_store

async def main():
    store = open_store(sys.argv[1], run="run-1", deadline=0.2)
    await store.sink.mark_incomplete("rollout-1", "call-1")
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
KILLED_BEFORE_THE_REMOVAL = """
import asyncio, os, signal, sys
from tokencustody import open_store
from tokencustody.spill.marks import Spill

Spill.remove = lambda self, path: os.kill(os.getpid(), signal.SIGKILL)

async def main():
    await open_store(sys.argv[1], run="run-1").source.freeze("rollout-1")

asyncio.run(main())
"""


async def _killed(program: str, url: str) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, url)
    assert await process.wait() == -signal.SIGKILL


@pytest.mark.quick("A mark is never lost")
async def test_a_mark_outlives_its_process_and_the_next_use_of_the_database_replays_it(
    outage: Outage, store_url: str, spill_folder: Path
) -> None:
    with outage.away():
        await _killed(KILLED_AFTER_THE_MARK, outage.url)
    assert len(files_in(spill_folder)) == 1
    async with outage.open(run="another-run", deadline=10) as store:
        await store.sink.begin_call("another", "call-1")
        await replayed(store)
    assert await events(store_url) == [("open", ""), ("mark", "call-1")]
    assert files_in(spill_folder) == []


async def test_a_replayer_that_is_killed_after_its_commit_leaves_the_mark_to_be_replayed_without_effect(
    store_url: str, spill: Spill
) -> None:
    spill.keep(make_mark())
    await _killed(KILLED_BEFORE_THE_REMOVAL, store_url)
    assert len(spill.waiting()) == 1
    async with open_store(store_url, run=RUN) as store:
        await store.source.freeze("rollout-1")
    assert await events(store_url) == [("open", ""), ("mark", "call-1"), ("freeze", "")]
    assert spill.waiting() == []


def _flip(data: bytes) -> bytes:
    return data.replace(b"call-1", b"call-9")


def _of_another_database(data: bytes) -> bytes:
    return data.replace(b'"database": "', b'"database": "x')


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda _: b"",
        lambda _: b"[" * 60_000,
        lambda _: b"\xff\0" * 40_000,
        lambda _: b'{"run": 1}',
        _flip,
        _of_another_database,
    ],
    ids=["torn", "empty", "nested", "garbage", "fields missing", "byte flipped", "another database"],
)
async def test_a_damaged_mark_hinders_no_other_and_its_rollout_is_neither_frozen_nor_let_go(
    store_url: str, spill: Spill, caplog: pytest.LogCaptureFixture, damage: Any
) -> None:
    async with open_store(store_url, run=RUN) as store:
        frozen = await store.source.freeze("rollout-2")
        corrupt = [spill.keep(make_mark("call-1", rollout=f"rollout-{number}")) for number in (1, 2)]
        spill.keep(make_mark("call-2", seconds=1))
        content = damage(corrupt[0].read_bytes())
        for path in corrupt:
            path.write_bytes(content)
        refused = [
            lambda: store.source.freeze("rollout-1"),
            lambda: store.source.retire(["rollout-1"]),
            lambda: store.lineage.delete(["rollout-1"]),
            lambda: store.source.drop("rollout-2", frozen.snapshot_id, frozen.version),
        ]
        for again in range(2):
            for call in refused:
                with pytest.raises(StoreUnavailableError, match="damaged") as error:
                    await call()
                said = str(error.value)
                assert "of run run-1" in said
                assert "tokencustody spill mark" in said
                assert "tokencustody spill discard" in said
            await replay(store.sink._database, spill)
            assert again or "call-2" in [call for _, call in await events(store_url)]
        # A mark is never refused for another one.
        await store.sink.mark_incomplete("rollout-1", "call-3")
        assert not (await store.source.freeze("rollout-3")).incomplete
        aside = spill.damaged(RolloutKey(RUN, "rollout-1"))
        assert [(path.name, path.read_bytes()) for path in aside] == [(f"{corrupt[0].name}.corrupt", content)]
        assert str(aside[0]) in caplog.text
        aside[0].unlink()
        assert (await store.source.freeze("rollout-1")).incomplete


@pytest.mark.parametrize("removal", ["retire", "delete"])
async def test_damaged_marks_keep_their_own_rollouts_from_removal_and_all_are_named(
    store_url: str, spill: Spill, removal: str
) -> None:
    names = [f"rollout-{number}" for number in range(5)]
    async with open_store(store_url, run=RUN) as store:
        for name in names:
            await store.sink.put(make_entry(name))
        for name in names[1:4:2]:
            spill.keep(make_mark(rollout=name)).write_bytes(b"torn")
        with pytest.raises(DamagedMarkError) as refused:
            await getattr(store.source, removal)(names)
        assert [name for name in names if f"rollout {name} of run" in str(refused.value)] == names[1:4:2]
    (held,) = {tuple(row["rollout_id"] for row in await rows_of(store_url, tables.entries))}
    assert sorted(held) == names[1:4:2]


@pytest.mark.parametrize("moment", ["waiting", "damaged", "claim"])
async def test_a_mark_that_another_process_finds_to_be_damaged_meanwhile_is_not_overtaken(
    store_url: str, spill: Spill, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = spill.keep(make_mark())
    path.write_bytes(b"torn")
    method = getattr(Spill, moment)

    def found_by_another(self: Spill, *arguments: object) -> object:
        monkeypatch.setattr(Spill, moment, method)
        claim = Spill.claim(self, path)
        assert claim is not None
        claim.close()
        return method(self, *arguments)

    monkeypatch.setattr(Replayer, "start", lambda self: None)
    async with open_store(store_url, run=RUN) as store:
        await store.source.freeze("rollout-2")
        monkeypatch.setattr(Spill, moment, found_by_another)
        with pytest.raises(StoreUnavailableError, match="damaged"):
            await store.source.freeze("rollout-1")


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a link", "a link to nothing", "a socket"])
async def test_what_is_no_file_under_the_name_of_a_mark_holds_up_its_rollout_and_no_loop(
    store_url: str, spill: Spill, tmp_path: Path, kind: str
) -> None:
    path = spill.keep(make_mark())
    content = path.read_bytes()
    path.unlink()
    match kind:
        case "a pipe":
            os.mkfifo(path)
        case "a folder":
            path.mkdir()
        case "a link":
            (tmp_path / "copy").write_bytes(content)
            path.symlink_to(tmp_path / "copy")
        case "a link to nothing":
            path.symlink_to(tmp_path / "nothing")
        case "a socket":
            with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(path.parent):
                bound.bind(path.name)
    async with open_store(store_url, run=RUN) as store:
        await store.sink.begin_call("rollout-2", "call-1")
        await replay(store.sink._database, spill)
        with pytest.raises(StoreUnavailableError, match=r"rollout-1 .* cannot be read.* spill discard"):
            await store.source.freeze("rollout-1")
        await store.sink.mark_incomplete("rollout-1")
        await store.source.freeze("rollout-2")


async def test_a_file_whose_name_is_no_marks_holds_up_no_rollout(store_url: str, spill: Spill) -> None:
    for name in ("stray", "x.mark1", "note.txt", "x.mark1.corrupt"):
        (spill.keep(make_mark()).parent / name).write_bytes(b"stray")
    async with open_store(store_url, run=RUN) as store:
        assert (await store.source.freeze("rollout-1")).incomplete
        assert not (await store.source.freeze("rollout-2")).incomplete


async def test_a_damaged_mark_that_was_spilled_under_another_address_holds_up_its_rollout(
    postgres_url: str, spill_folder: Path
) -> None:
    elsewhere = Spill(spill_folder, parse_url("postgresql://old-host/captures"))
    path = elsewhere.keep(make_mark())
    path.write_bytes(b"torn")
    async with open_store(postgres_url, run=RUN) as store:
        with pytest.raises(StoreUnavailableError, match=r"rollout-1 of run run-1 .* damaged"):
            await store.source.freeze("rollout-1")
        await store.source.freeze("rollout-2")
    assert path.read_bytes() == b"torn"


@contextmanager
def hanging(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    """Let one method of the spill wait until this ends, as a volume does whose server is gone."""
    go_on = threading.Event()
    method = getattr(Spill, name)

    def hang(self: Spill, *arguments: object) -> object:
        assert go_on.wait(60)
        return method(self, *arguments)

    monkeypatch.setattr(Spill, name, hang)
    try:
        yield
    finally:
        go_on.set()


@pytest.mark.parametrize("name", ["is_empty", "waiting", "claim"])
async def test_a_folder_that_does_not_answer_holds_up_neither_the_loop_nor_what_needs_no_marks(
    store_url: str, spill: Spill, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    spill.keep(make_mark())
    store = open_store(store_url, run=RUN)
    loop = asyncio.get_running_loop()
    with hanging(monkeypatch, name):
        await store.sink.put(make_entry())
        await store.sink.mark_incomplete("rollout-1", "call-2")
        monkeypatch.setattr(Database, "end_of_patience", lambda self: loop.time() + 0.5)
        with pytest.raises(StoreUnavailableError, match="does not answer"):
            await store.source.freeze("rollout-1")
        await store.close()


async def test_a_commit_is_answered_also_where_the_file_of_its_mark_cannot_be_removed_in_time(
    sqlite_url: str, spill_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Spill(spill_folder, parse_url(sqlite_url)).keep(make_mark())
    monkeypatch.setattr(Replayer, "start", lambda self: None)
    finish = replaying._finish

    async def finish_soon(*arguments: Any) -> None:
        # Whatever time the commit took.
        await finish(*arguments[:-1], asyncio.get_running_loop().time() + 0.1)

    monkeypatch.setattr(replaying, "_finish", finish_soon)
    async with open_store(sqlite_url, run=RUN) as store:
        with hanging(monkeypatch, "finish"):
            assert (await store.source.freeze("rollout-1")).incomplete
    assert await events(sqlite_url) == [("open", ""), ("mark", "call-1"), ("freeze", "")]


@pytest.mark.parametrize("place", ["root", "folder"])
@pytest.mark.parametrize("fault", ["of another user", "writable for all"])
async def test_a_folder_that_others_can_change_is_refused_by_name(
    outage: Outage, spill_folder: Path, place: str, fault: str
) -> None:
    needs_root()
    spill = Spill(spill_folder, parse_url(outage.url))
    path = spill.keep(make_mark())
    unsafe = spill.folder if place == "folder" else spill_folder
    if fault == "of another user":
        os.chown(unsafe, pwd.getpwnam("nobody").pw_uid, -1)
        said = "it belongs to another user"
    else:
        unsafe.chmod(0o777)
        said = "every user may write into it"
    async with outage.open(deadline=10) as store:
        with pytest.raises(StoreUnavailableError, match=said) as freezing:
            await store.source.freeze("rollout-1")
    async with outage.open() as store:
        with outage.away(), pytest.raises(StoreUnavailableError, match=said) as marking:
            await store.sink.mark_incomplete("rollout-2")
    assert all(f"{unsafe}" in str(error.value) for error in (freezing, marking))
    assert path.exists()
    os.chown(unsafe, 0, -1)
    unsafe.chmod(0o1777)  # as /tmp
    spill.keep(make_mark())


async def test_a_file_that_cannot_be_read_does_not_hinder_the_others_but_its_rollout_is_not_frozen(
    sqlite_url: str, spill_folder: Path
) -> None:
    spill = Spill(spill_folder, parse_url(sqlite_url))
    unreadable = spill.keep(make_mark("call-1", seconds=0))
    spill.keep(make_mark("call-1", rollout="rollout-2", seconds=1))
    unreadable.unlink()
    unreadable.mkdir()  # which root cannot read as a file either
    async with open_store(sqlite_url, run=RUN) as store:
        await replay(store.sink._database, spill)
        with pytest.raises(
            StoreUnavailableError, match=r"rollout rollout-1 of run run-1 waits on this host .* cannot be"
        ):
            await store.source.freeze("rollout-1")
    assert await events(sqlite_url, "rollout-2") == [("open", ""), ("mark", "call-1")]
    assert spill.waiting() == [unreadable]


async def test_a_mark_goes_into_the_run_in_which_it_was_made(store_url: str, spill: Spill) -> None:
    spill.keep(make_mark(run="run-a"))
    async with open_store(store_url, run="run-b") as store:
        assert not (await store.source.freeze("rollout-1")).incomplete
        await replayed(store)
    assert await events(store_url, run="run-a") == [("open", ""), ("mark", "call-1")]
    assert await events(store_url, run="run-b") == [("open", ""), ("freeze", "")]


async def test_a_store_that_reaches_the_database_by_another_address_does_not_overtake_a_mark(
    outage: Outage, store_url: str, tmp_path: Path, nothing_in_background: None
) -> None:
    other_way = store_url
    if store_url.startswith("sqlite"):
        (tmp_path / "link.db").symlink_to(parse_url(store_url).dsn)
        other_way = f"sqlite:///{tmp_path / 'link.db'}"
    async with outage.open() as store:
        await store.sink.begin_call("rollout-1", "call-0")
        with outage.away():
            await store.sink.mark_incomplete("rollout-1", "call-1")
    # The first thing that this store does, and nothing replays in the background.
    async with open_store(other_way, run=RUN, pool_size=1) as store:
        snapshot = await store.source.freeze("rollout-1")
        assert (snapshot.incomplete, snapshot.version) == (True, 2)
    assert await events(store_url) == [("open", ""), ("mark", "call-1"), ("freeze", "")]


async def test_a_mark_under_another_address_is_replayed_by_the_first_use_of_the_database(
    outage: Outage, store_url: str
) -> None:
    async with outage.open() as store:
        await store.sink.begin_call("rollout-1", "call-0")
        with outage.away():
            await store.sink.mark_incomplete("rollout-1", "call-1")
            await store.close()
    async with open_store(store_url, run="another-run") as store:
        await store.sink.begin_call("rollout-2", "call-0")
        await replayed(store)
    assert await events(store_url) == [("open", ""), ("mark", "call-1")]


@contextmanager
def as_nobody() -> Iterator[None]:
    """Act as a user who may read nothing of ours. What is imported must be before."""
    needs_root()
    os.seteuid(pwd.getpwnam("nobody").pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)


async def test_a_freeze_by_a_user_who_may_not_see_the_waiting_marks_is_refused(
    store_url: str, spill_folder: Path
) -> None:
    async with open_store(store_url, run=RUN) as store:
        await store.source.freeze("another")
        Spill(spill_folder, parse_url(store_url)).keep(make_mark())
        with (
            as_nobody(),
            pytest.raises(StoreUnavailableError, match=r"may wait in .*, but this user may not look"),
        ):
            await store.source.freeze("rollout-1")
    assert await events(store_url) == []


def test_marks_that_this_user_may_not_see_are_no_empty_list(postgres_url: str, spill_folder: Path) -> None:
    commands = (["list"], ["replay", "--url", postgres_url])
    for seen in (False, True):
        if seen:
            Spill(spill_folder, parse_url(postgres_url)).keep(make_mark())
        for command in commands:
            with as_nobody() if seen else contextlib.nullcontext():
                done = CliRunner().invoke(app, ["spill", *command])
            assert done.exit_code == (1 if seen else 0)
            assert done.stderr.startswith("error: marks may wait in ") == seen


async def test_the_marks_of_another_database_of_the_same_server_stay_where_they_are(
    postgres_url: str, empty_postgres_url: str, spill_folder: Path
) -> None:
    migrate.upgrade(empty_postgres_url)
    for url in (postgres_url, empty_postgres_url):
        async with open_store(url, run=RUN) as store:
            await store.sink.begin_call("rollout-1", "call-0")
    Spill(spill_folder, parse_url(empty_postgres_url)).keep(make_mark())
    async with open_store(postgres_url, run=RUN) as store:
        assert (await store.source.freeze("rollout-1")).version == 1
        await replayed(store)
    assert len(Spill(spill_folder, parse_url(empty_postgres_url)).waiting()) == 1


async def test_the_marks_of_another_database_stay_where_they_are(tmp_path: Path, spill_folder: Path) -> None:
    one, other = (Spill(spill_folder, parse_url(tmp_path / name)) for name in ("one.db", "other.db"))
    one.keep(make_mark())
    other.keep(make_mark())
    async with open_store(tmp_path / "one.db", run=RUN) as store:
        await store.source.freeze("rollout-1")
        await replayed(store)
    assert (len(one.waiting()), len(other.waiting())) == (0, 1)


def test_the_spill_of_a_database_is_the_same_for_every_user_and_another_for_every_database(
    tmp_path: Path,
) -> None:
    def folder(url: str) -> Path:
        return Spill(tmp_path, parse_url(url)).folder

    same = {
        folder(url)
        for url in (
            "postgresql://db:5432/captures",
            "postgres://db/captures?sslmode=require",
            "postgresql://a@db/captures",
            "postgresql+asyncpg://b%40c:secret@db:5432/captures",
        )
    }
    others = {
        folder(url)
        for url in (
            "postgresql://db/captures2",
            "postgresql://db2/captures",
            "postgresql://db:5433/captures",
            "postgresql:///captures?host=/run/postgresql",
            "sqlite:////captures",
        )
    }
    assert len(same) == 1
    assert len(others - same) == 5


async def test_no_name_content_log_or_error_holds_the_password(
    spill_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url = "postgresql://someone:hunter2@127.0.0.1:1/captures"
    async with open_store(url, deadline=0.05) as store:
        await store.sink.mark_incomplete("rollout-1", "call-1")
    (file,) = files_in(spill_folder)
    (tmp_path / "file").touch()
    async with open_store(url, deadline=0.05, spill=tmp_path / "file") as store:
        with pytest.raises(StoreUnavailableError) as raised:
            await store.sink.mark_incomplete("rollout-1", "call-1")
    said = [str(file), file.read_text(), caplog.text, str(raised.value), repr(raised.value)]
    assert "127.0.0.1:1/captures" in file.read_text()
    assert not [text for text in said if "hunter2" in text or "someone" in str(file)]


def test_only_its_user_may_look_at_the_spill(sqlite_url: str, tmp_path: Path) -> None:
    root = tmp_path / "state" / "tokencustody" / "spill"
    before = os.umask(0)
    try:
        file = Spill(root, parse_url(sqlite_url)).keep(make_mark())
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent, root, root.parent)}
    assert modes == {file: 0o600, file.parent: 0o700, root: 0o700, root.parent: 0o700}


@pytest.mark.parametrize(
    ("option", "environment", "expected"),
    [
        ("", {}, "home/.local/state/tokencustody/spill"),
        ("", {"XDG_STATE_HOME": "state"}, "home/.local/state/tokencustody/spill"),
        ("", {"XDG_STATE_HOME": "{}/state"}, "state/tokencustody/spill"),
        ("", {"TOKENCUSTODY_SPILL": "{}/named"}, "named"),
        ("", {"TOKENCUSTODY_SPILL": ""}, None),
        ("{}/given", {"TOKENCUSTODY_SPILL": "{}/named"}, "given"),
        (None, {"TOKENCUSTODY_SPILL": "{}/named"}, None),
    ],
)
def test_the_spill_lies_where_the_option_or_the_environment_says_else_in_the_state_folder(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    option: str | None,
    environment: dict[str, str],
    expected: str | None,
) -> None:
    for name in ("TOKENCUSTODY_SPILL", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "{}/home", **environment}.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    found = spill_root(option if option is None else option.format(tmp_path))
    assert found == (None if expected is None else tmp_path / expected)


def test_a_spill_that_is_no_path_is_refused_when_a_store_is_made(sqlite_url: str) -> None:
    with pytest.raises(InvalidRecordError, match="spill"):
        open_store(sqlite_url, spill="a\0b")


async def test_without_a_spill_the_caller_is_told_that_the_mark_is_not_stored(
    outage: Outage, spill_folder: Path
) -> None:
    async with outage.open(spill=None) as store:
        with outage.away(), pytest.raises(StoreUnavailableError):
            await store.sink.mark_incomplete("rollout-1")
        assert store.stats()["spilled_marks"] == 0
    assert files_in(spill_folder) == []


async def test_a_mark_that_cannot_be_kept_on_this_host_either_is_an_error_that_says_both_reasons(
    outage: Outage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    async with outage.open(spill=tmp_path / "file" / "spill") as store:
        with outage.away(), pytest.raises(StoreUnavailableError) as raised:
            await store.sink.mark_incomplete("rollout-1", "call-1")
        assert store.stats()["spilled_marks"] == 0
    for part in ("is not available", "call call-1 of rollout rollout-1 of run run-1", "Not a directory"):
        assert part in str(raised.value)
    (error,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "rollout-1" in error.getMessage()


def test_a_spill_on_a_full_disk_leaves_nothing_behind_and_works_once_there_is_room(
    tmp_path: Path, sqlite_url: str
) -> None:
    needs_mounts()
    spill = Spill(tmp_path / "small", parse_url(sqlite_url))
    spill.folder.parent.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", spill.folder.parent], check=True)
    try:
        first = spill.keep(make_mark())
        filling = spill.folder.parent / "filling"
        with contextlib.suppress(OSError), filling.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        with pytest.raises(OSError, match="No space left"):
            spill.keep(make_mark("call-2"))
        assert files_in(spill.folder) == [first]
        filling.unlink()
        second = spill.keep(make_mark("call-2"))
        assert spill.waiting() == sorted([first, second])
    finally:
        subprocess.run(["umount", spill.folder.parent], check=True)


async def test_a_store_that_is_closed_while_the_database_is_away_ends_at_once_and_says_what_waits(
    outage: Outage, spill_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with outage.away():
        store = outage.open()
        await store.sink.mark_incomplete("rollout-1", "call-1")
        marking = asyncio.create_task(store.sink.mark_incomplete("rollout-1", "call-2"))
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await store.close()
            await marking
        await store.close()
    assert len(files_in(spill_folder)) == 2
    (said,) = [record.getMessage() for record in caplog.records if "still wait in" in record.getMessage()]
    assert said.startswith("2 marks for ")
    assert "tokencustody spill replay" in said


async def test_a_store_that_is_closed_while_a_replay_gets_no_answer_ends_before_its_deadline(
    outage: Outage, spill_folder: Path
) -> None:
    spill = Spill(spill_folder, parse_url(outage.url))
    spill.keep(make_mark())
    with outage.away():
        store = outage.open(deadline=60)
        using = asyncio.create_task(store.sink.begin_call("rollout-1", "call-1"))
        await asyncio.sleep(0)
        using.cancel()
        assert [task for task in asyncio.all_tasks() if task.get_name() == "tokencustody spill"]
        async with asyncio.timeout(10):
            await store.close()
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "tokencustody spill"]
    assert len(spill.waiting()) == 1


async def test_a_caller_that_is_cancelled_while_its_mark_is_being_kept_leaves_a_whole_mark_or_none(
    outage: Outage, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping, go_on, kept = (threading.Event() for _ in range(3))
    keep = Spill.keep

    def keep_later(self: Spill, mark: Mark) -> Path:
        keeping.set()
        assert go_on.wait(20)
        path = keep(self, mark)
        kept.set()
        return path

    monkeypatch.setattr(Spill, "keep", keep_later)
    async with outage.open() as store:
        with outage.away():
            marking = asyncio.create_task(store.sink.mark_incomplete("rollout-1", "call-1"))
            assert await asyncio.to_thread(keeping.wait, 20)
            marking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await marking
            go_on.set()
            assert await asyncio.to_thread(kept.wait, 20)
    async with outage.open(deadline=60) as store:
        assert (await store.source.freeze("rollout-1")).incomplete
    assert (await events(store_url)).count(("mark", "call-1")) == 1


def test_a_loop_that_ends_with_marks_waiting_ends_without_a_word(
    outage: Outage, spill_folder: Path, recwarn: pytest.WarningsRecorder
) -> None:
    async def main() -> CaptureStore:
        store = outage.open()
        await store.sink.mark_incomplete("rollout-1", "call-1")
        await store.sink._database.close()
        return store

    with outage.away():
        asyncio.run(main())
    assert len(files_in(spill_folder)) == 1
    assert not list(recwarn)
