"""A SQLite file that is deleted, moved or replaced under an open store acknowledges nothing more, and hides nothing."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.test_loops import LoopThread
from tests.store.test_staging_concurrency import in_a_fork
from tests.support import forked
from tests.support.entries import make_entry
from tests.support.staged import stage
from tokencustody import CaptureStore, SqlStagingStore, SqlTokenSink, open_store
from tokencustody.database.faults import FAULT_POINTS
from tokencustody.errors import StoreUnavailableError
from tokencustody.spill.replaying import Replayer

FILES = ("captures.db", "captures.db-wal", "captures.db-shm")
GONE = "was opened was deleted, moved away, emptied or replaced"
PUT = "import sys; from tests.faults.test_moved_files import put; put(*sys.argv[1:])"


@pytest.fixture(autouse=True)
def _nothing_in_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replayer, "start", lambda self: None)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "database" / "captures.db"


@pytest.fixture(autouse=True)
def _folder(file: Path) -> None:
    file.parent.mkdir()


def put(file: str, call: str) -> None:
    """Put a call into what is found at the path."""

    async def put_one() -> None:
        async with open_store(file) as store:
            await store.sink.put(make_entry(model_call_id=call))

    asyncio.run(put_one())


def put_elsewhere(file: Path, call: str) -> None:
    """Let another process put a call into what it finds at the path."""
    process = forked.process(put, str(file), call)
    process.start()
    process.join()
    assert process.exitcode == 0


def delete(file: Path) -> None:
    for name in FILES:
        file.with_name(name).unlink(missing_ok=True)


def delete_the_file_alone(file: Path) -> None:
    file.unlink()


def delete_the_log(file: Path) -> None:
    file.with_name("captures.db-wal").unlink()


def delete_the_index(file: Path) -> None:
    file.with_name("captures.db-shm").unlink()


def move_away(file: Path) -> None:
    file.rename(file.with_name("elsewhere.db"))


def replace(file: Path) -> None:
    delete(file)
    put_elsewhere(file, "other")


def restore_a_backup(file: Path) -> None:
    backup = file.with_name("backup.db")
    shutil.copy(file, backup)
    backup.rename(file)


def cut_it_off(file: Path) -> None:
    file.write_bytes(b"")


def move_the_folder(file: Path) -> None:
    file.parent.rename(file.parent.with_name("elsewhere"))


LOSSES: dict[str, Callable[[Path], None]] = {
    loss.__name__: loss
    for loss in (
        delete,
        delete_the_file_alone,
        delete_the_log,
        delete_the_index,
        move_away,
        replace,
        restore_a_backup,
        cut_it_off,
        move_the_folder,
    )
}
CALLS: dict[str, Callable[[CaptureStore], Awaitable[object]]] = {
    "put": lambda store: store.sink.put(make_entry(model_call_id="call-2")),
    "begin_call": lambda store: store.sink.begin_call("rollout-1", "call-2"),
    "freeze": lambda store: store.source.freeze("rollout-1"),
    "retire": lambda store: store.source.retire(["rollout-1"]),
    "resolve": lambda store: store.lineage.resolve("rollout-1", [{"role": "assistant", "content": "hi"}]),
    "manifest": lambda store: store.lineage.manifest("rollout-1"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
async def test_no_call_is_answered_from_what_is_no_longer_at_the_path(
    file: Path, lose: Callable[[Path], None], call: Callable[[CaptureStore], Awaitable[object]]
) -> None:
    async with open_store(file, deadline=20) as store:
        await store.sink.put(make_entry())
        await store.lineage.has_rows("rollout-1")
        lose(file)
        for _ in range(2):  # nor does the next try take up what lies there now
            with pytest.raises(StoreUnavailableError, match=GONE):
                await call(store)


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
async def test_a_call_whose_file_is_lost_before_its_commit_is_not_acknowledged(
    file: Path, lose: Callable[[Path], None]
) -> None:
    async def lose_it() -> None:
        FAULT_POINTS.clear()
        await asyncio.to_thread(lose, file)

    async with open_store(file, deadline=20) as store:
        await store.sink.put(make_entry())
        FAULT_POINTS["before commit"] = lose_it
        with pytest.raises(StoreUnavailableError, match=GONE):
            await store.sink.put(make_entry(model_call_id="call-2"))


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_the_synchronous_store_refuses_too(file: Path, lose: Callable[[Path], None]) -> None:
    with SqlStagingStore(file) as staging:
        assert staging.stage(stage("call-1").snapshot).ok
        lose(file)
        answer = staging.stage(stage("call-2").snapshot)
        assert not answer.ok
        assert GONE in str(answer.error)
        with pytest.raises(StoreUnavailableError, match=GONE):
            staging.fetch(["rollout-1/call-1"])


async def test_a_file_that_comes_back_is_used_again(file: Path) -> None:
    async with open_store(file) as store:
        await store.sink.put(make_entry())
        move_away(file)
        with pytest.raises(StoreUnavailableError, match=GONE):
            await store.sink.put(make_entry(model_call_id="call-2"))
        file.with_name("elsewhere.db").rename(file)
        await store.sink.put(make_entry(model_call_id="call-2"))
        assert len((await store.source.freeze("rollout-1")).entries) == 2


async def test_what_is_there_now_is_used_once_every_store_on_what_was_there_is_closed(file: Path) -> None:
    async with open_store(file) as old:
        await old.sink.put(make_entry())
        replace(file)
        with pytest.raises(StoreUnavailableError, match=GONE):
            await old.sink.put(make_entry(model_call_id="call-2"))
        async with open_store(file) as beside:
            with pytest.raises(StoreUnavailableError, match=GONE):
                await beside.source.freeze("rollout-1")
            answer = await asyncio.to_thread(old.staging.stage, stage("call-1").snapshot)
            assert not answer.ok
    async with open_store(file) as new:
        snapshot = await new.source.freeze("rollout-1")
        assert [entry.model_call_id for entry in snapshot.entries] == ["other"]


async def test_what_was_acknowledged_outlives_the_loss_of_the_log_when_the_store_is_opened_anew(
    file: Path,
) -> None:
    async with open_store(file) as store:
        await store.sink.put(make_entry())
        delete_the_log(file)
        with pytest.raises(StoreUnavailableError, match=GONE):
            await store.sink.put(make_entry(model_call_id="call-2"))
        async with open_store(file) as beside:
            with pytest.raises(StoreUnavailableError):
                await beside.sink.put(make_entry(model_call_id="call-2"))
    async with open_store(file) as store:
        await store.sink.put(make_entry(model_call_id="call-2"))
        snapshot = await store.source.freeze("rollout-1")
        assert [entry.model_call_id for entry in snapshot.entries] == ["call-1", "call-2"]


LOSE_THE_INDEX = """
import asyncio, os, subprocess, sys
from tests.support.entries import make_entry
from tokencustody import open_store
from tokencustody.errors import StoreUnavailableError

async def main():
    for _ in range(2):
        async with open_store(sys.argv[1]) as store:
            if len(sys.argv) == 3:
                await store.sink.put(make_entry())
                os.unlink(sys.argv[1] + "-shm")
                subprocess.run([sys.executable, "-c", sys.argv.pop(), sys.argv[1], "other"], check=True)
            try:
                await store.sink.put(make_entry(model_call_id="call-2"))
            except StoreUnavailableError as exc:
                assert "end this process" in str(exc), exc
            else:
                raise AssertionError

asyncio.run(main())
"""


def test_what_two_processes_were_acknowledged_outlives_the_loss_of_the_index_of_the_log(file: Path) -> None:
    subprocess.run([sys.executable, "-c", LOSE_THE_INDEX, file, PUT], check=True)

    async def calls() -> list[str]:
        async with open_store(file) as store:
            return [entry.model_call_id for entry in (await store.source.freeze("rollout-1")).entries]

    assert asyncio.run(calls()) == ["call-1", "other"]


CUT_IT_OFF = """
import asyncio, sys
from tests.support.entries import make_entry
from tokencustody import open_store
from tokencustody.errors import StoreUnavailableError

async def main():
    async with open_store(sys.argv[1]) as store:
        await store.sink.put(make_entry())
        open(sys.argv[1], "w").close()
        for call in (store.sink.put(make_entry(model_call_id="call-2")), store.lineage.has_rows("rollout-1")):
            try:
                await call
            except StoreUnavailableError:
                continue
            raise AssertionError

asyncio.run(main())
"""


def test_the_log_that_alone_holds_a_call_outlives_a_file_that_was_cut_off(file: Path) -> None:
    subprocess.run([sys.executable, "-c", CUT_IT_OFF, file], check=True)
    assert file.with_name("captures.db-wal").stat().st_size > 4096


def test_a_store_does_not_change_the_file_with_the_loop(file: Path) -> None:
    store = open_store(file)
    with LoopThread() as one, LoopThread() as other:
        one.run(store.sink.put(make_entry()))
        replace(file)
        with pytest.raises(StoreUnavailableError, match=GONE):
            other.run(store.sink.put(make_entry(model_call_id="call-2")))
        one.run(store.close())


async def _put_and_close(sink: SqlTokenSink) -> None:
    try:
        # With the log alone gone, it is SQLite that does not find what the index says.
        with pytest.raises(StoreUnavailableError, match=f"{GONE}|disk I/O error"):
            await sink.put(make_entry(model_call_id="child"))
    finally:
        await sink.close()


@pytest.mark.parametrize("lose", [delete, delete_the_log, delete_the_index, replace])
def test_a_store_does_not_change_the_file_in_a_forked_process(
    file: Path, lose: Callable[[Path], None]
) -> None:
    sink = SqlTokenSink(file)
    with LoopThread() as one:
        one.run(sink.put(make_entry()))
        lose(file)
        assert in_a_fork(lambda: asyncio.run(_put_and_close(sink))) == 0
        one.run(sink.close())


async def test_a_mark_is_kept_on_this_host_while_the_file_is_away(file: Path) -> None:
    async with open_store(file) as store:
        await store.sink.put(make_entry())
        move_away(file)
        await store.sink.mark_incomplete("rollout-1", "call-2")
        assert store.stats()["spilled_marks"] == 1
        file.with_name("elsewhere.db").rename(file)
        assert (await store.source.freeze("rollout-1")).incomplete


@pytest.fixture(autouse=True)
def _no_fault_is_left() -> Iterator[None]:
    yield
    FAULT_POINTS.clear()
