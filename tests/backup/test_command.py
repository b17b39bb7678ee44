"""`tokencustody backup`: a copy of a SQLite file that is being written, whole or not at all."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path

import pytest

from tests.support.entries import make_entry
from tokencustody import open_store
from tokencustody.backup.backup import back_up
from tokencustody.cli import main
from tokencustody.database.url import parse_url
from tokencustody.errors import BackupError, SchemaMismatchError, StoreUnavailableError
from tokencustody.schema import migrate
from tokencustody.verify import verify

# Puts calls for ever, and tells of each once it was acknowledged.
WRITER = """
import asyncio, sys
from tests.support.entries import make_entry
from tokencustody import open_store

async def write():
    async with open_store(sys.argv[1], run=sys.argv[2]) as store:
        for number in range(1_000_000):
            await store.sink.put(make_entry(rollout_id=f"rollout-{number % 7}", model_call_id=f"call-{number}"))
            print(f"call-{number}", flush=True)

asyncio.run(write())
"""
# Backs up, and dies or runs out of room on the way.
DYING = """
import os, signal, sys
from contextlib import nullcontext
from tokencustody.backup.backup import back_up
die = lambda _done: os.kill(os.getpid(), signal.SIGKILL)
back_up(sys.argv[1], sys.argv[2], overwrite=True, watch=lambda *_: nullcontext(die))
"""
INTERRUPTED = """
import os, signal, sys
from tokencustody.__main__ import main
from tokencustody.backup import backup
backup._prove = lambda *_: os.kill(os.getpid(), signal.SIGINT)
main()
"""
WITHOUT_ROOM = """
import resource, sys
from tokencustody.backup.backup import back_up
from tokencustody.errors import BackupError
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    back_up(sys.argv[1], sys.argv[2], overwrite=True)
except BackupError as exc:
    print(exc)
"""


async def fill(url: str, calls: int) -> None:
    async with open_store(url, run="here") as store:
        for number in range(calls):
            await store.sink.put(make_entry(model_call_id=f"call-{number}"))
        await store.source.freeze(make_entry().rollout_id)


@pytest.fixture
def filled_url(sqlite_url: str) -> str:
    asyncio.run(fill(sqlite_url, 20))
    return sqlite_url


def calls_of(file: Path, run: str) -> set[str]:
    with closing(sqlite3.connect(file)) as connection:
        return {
            call for (call,) in connection.execute("SELECT model_call_id FROM entries WHERE run = ?", [run])
        }


def folder_of(url: str) -> Path:
    return Path(parse_url(url).dsn).parent


@pytest.mark.quick("A backup is whole")
def test_a_backup_holds_every_call_that_was_acknowledged_before_it_began_whatever_writes_meanwhile(
    sqlite_url: str, tmp_path: Path
) -> None:
    runs = ["one", "two", "three"]
    acknowledged: dict[str, set[str]] = {}
    file = tmp_path / "backup.db"
    with ExitStack() as stack:
        writers = []
        for run in runs:
            writer = subprocess.Popen(
                [sys.executable, "-c", WRITER, sqlite_url, run], stdout=subprocess.PIPE, text=True
            )
            stack.callback(writer.wait)
            stack.callback(writer.kill)
            writers.append(writer)
        for run, writer in zip(runs, writers, strict=True):
            assert writer.stdout is not None
            stack.enter_context(writer.stdout)
            acknowledged[run] = {writer.stdout.readline().strip() for _ in range(30)}

        def commits_go_on(_done: int) -> None:
            for run, writer in zip(runs, writers, strict=True):
                assert writer.stdout is not None
                assert writer.stdout.readline().startswith("call-"), run

        made = back_up(sqlite_url, file, watch=lambda *_: nullcontext(commits_go_on))
    held = {run: calls_of(file, run) for run in runs}
    assert all(acknowledged[run] <= held[run] for run in runs)
    assert made.calls == sum(map(len, held.values()))
    found = verify(f"sqlite:///{file}")
    assert (found.ok, found.counts.calls) == (True, made.calls)


def test_a_plain_copy_of_a_file_that_is_in_use_lacks_acknowledged_calls_and_a_backup_has_them(
    sqlite_url: str, tmp_path: Path
) -> None:
    """They are in the log beside it until that is moved into the file."""

    async def copy_while_open() -> None:
        async with open_store(sqlite_url, run="here") as store:
            for number in range(3):
                await store.sink.put(make_entry(model_call_id=f"call-{number}"))
            shutil.copy(parse_url(sqlite_url).dsn, tmp_path / "copied.db")
            await asyncio.to_thread(back_up, sqlite_url, tmp_path / "backup.db")

    asyncio.run(copy_while_open())
    written = {"call-0", "call-1", "call-2"}
    assert calls_of(tmp_path / "copied.db", "here") == set()
    assert calls_of(tmp_path / "backup.db", "here") == written


def test_a_backup_is_read_by_its_owner_only_and_opens_as_a_store(filled_url: str, tmp_path: Path) -> None:
    file = tmp_path / "backup.db"
    before = os.umask(0)
    try:
        back_up(filled_url, file)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert migrate.check(f"sqlite:///{file}") == []
    asyncio.run(fill(f"sqlite:///{tmp_path / 'backup.db'}", 0))
    assert not list(tmp_path.glob("*.part*"))


def test_a_database_of_an_older_revision_can_be_backed_up_before_it_is_upgraded(
    new_sqlite_url: str, tmp_path: Path
) -> None:
    migrate.upgrade(new_sqlite_url, "0001_capture")
    made = back_up(new_sqlite_url, tmp_path / "backup.db")
    assert (made.revision, made.staged_calls) == ("0001_capture", 0)
    assert migrate.upgrade(f"sqlite:///{tmp_path / 'backup.db'}") == ("0001_capture", migrate.HEAD)


def test_a_backup_is_not_written_over_what_is_there_unless_it_is_told(
    filled_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "backup.db"
    file.write_text("mine")
    with pytest.raises(BackupError, match="--overwrite"):
        back_up(filled_url, file)
    assert file.read_text() == "mine"
    back_up(filled_url, file, overwrite=True)
    assert len(calls_of(file, "here")) == 20
    back_up(filled_url, file, overwrite=True)


def test_a_backup_is_not_written_over_what_was_made_meanwhile(filled_url: str, tmp_path: Path) -> None:
    file = tmp_path / "backup.db"

    def somebody_else(_done: int) -> None:
        file.write_text("theirs")

    with pytest.raises(BackupError, match="made by somebody else meanwhile"):
        back_up(filled_url, file, watch=lambda *_: nullcontext(somebody_else))
    assert file.read_text() == "theirs"
    assert not list(tmp_path.glob("*.part*"))


def test_a_file_system_without_links_takes_a_backup_too(
    filled_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    back_up(filled_url, tmp_path / "backup.db")
    assert len(calls_of(tmp_path / "backup.db", "here")) == 20


def test_a_backup_that_is_killed_leaves_the_one_before_it(filled_url: str, tmp_path: Path) -> None:
    file = tmp_path / "backup.db"
    back_up(filled_url, file)
    before = file.read_bytes()
    done = subprocess.run([sys.executable, "-c", DYING, filled_url, str(file)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert file.read_bytes() == before


def test_a_backup_that_is_interrupted_leaves_nothing(filled_url: str, tmp_path: Path) -> None:
    arguments = ["backup", str(tmp_path / "backup.db"), "--url", filled_url]
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, *arguments], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (130, b"")
    assert not list(tmp_path.glob("backup.db*"))


def test_a_disk_without_room_is_told_and_leaves_the_backup_before(filled_url: str, tmp_path: Path) -> None:
    file = tmp_path / "backup.db"
    back_up(filled_url, file)
    before = file.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ROOM, filled_url, str(file)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"{file} could not be written: ")
    assert file.read_bytes() == before
    assert not list(tmp_path.glob("*.part*"))


def test_a_damaged_database_gives_no_backup_that_looks_sound(filled_url: str, tmp_path: Path) -> None:
    database = Path(parse_url(filled_url).dsn)
    with database.open("r+b") as file:
        # A page of the tables: what it says of itself is nonsense now.
        file.seek(4096 * 2)
        file.write(b"\xff" * 4096)
    with pytest.raises((BackupError, StoreUnavailableError)):
        back_up(filled_url, tmp_path / "backup.db")
    assert not (tmp_path / "backup.db").exists()
    assert not list(tmp_path.glob("*.part*"))


@pytest.mark.parametrize("log", ["-wal", "-journal"])
def test_a_log_beside_the_name_of_the_backup_is_no_part_of_it(
    filled_url: str, tmp_path: Path, log: str
) -> None:
    (tmp_path / f"backup.db{log}").write_text("of another file")
    with pytest.raises(BackupError, match=f"backup.db{log} is there"):
        back_up(filled_url, tmp_path / "backup.db", overwrite=True)
    assert not (tmp_path / "backup.db").exists()


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("captures.db", "is the database itself"),
        (".", "is a folder: name a file in it"),
        ("/dev/null", "/dev/null is not a regular file"),
        ("no/such/backup.db", "make it first"),
        ("postgresql://me@host/x", "a backup is a file"),
    ],
)
def test_what_cannot_hold_a_backup_is_named(
    filled_url: str, file: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder_of(filled_url))
    with pytest.raises(BackupError, match=said):
        back_up(filled_url, file, overwrite=True)
    assert len(calls_of(Path(parse_url(filled_url).dsn), "here")) == 20


@pytest.mark.parametrize("log", ["-wal", "-shm", "-journal"])
@pytest.mark.parametrize(
    "named", ["as it is", "relatively", "by a link", "in a linked folder", "by a hard link"]
)
def test_the_log_of_a_database_is_no_place_for_a_backup(
    filled_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str, named: str
) -> None:
    file = Path(parse_url(filled_url).dsn)
    target = path = Path(f"{file}{log}")
    with closing(sqlite3.connect(file)) as holder:
        holder.execute("PRAGMA user_version = 7")
        before = {each: each.stat().st_ino for each in file.parent.iterdir() if each.is_file()}
        match named:
            case "relatively":
                monkeypatch.chdir(file.parent)
                target = Path(path.name)
            case "by a link":
                target = tmp_path / "elsewhere"
                target.symlink_to(path)
            case "in a linked folder":
                (tmp_path / "linked").symlink_to(file.parent)
                target = tmp_path / "linked" / path.name
            case "by a hard link" if log != "-journal":
                target = tmp_path / "elsewhere"
                target.hardlink_to(path)
        with pytest.raises(BackupError, match="the log of"):
            back_up(filled_url, target, overwrite=True)
        assert {each: each.stat().st_ino for each in before} == before
        assert path.exists() == (log != "-journal")
    assert len(calls_of(file, "here")) == 20


def test_a_log_is_opened_as_no_database_and_a_report_replaces_neither(
    filled_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(parse_url(filled_url).dsn)
    log = Path(f"{file}-wal")
    with closing(sqlite3.connect(file)) as holder:
        holder.execute("PRAGMA user_version = 7")
        holder.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
        assert log.stat().st_size == 0
        with pytest.raises(StoreUnavailableError, match="the name of the log of"):
            asyncio.run(fill(str(log), 1))
        for path in (file, log):
            command = ["tokencustody", "verify", "--url", filled_url, "--report", str(path)]
            monkeypatch.setattr(sys, "argv", command)
            with pytest.raises(SystemExit) as exited:
                main()
            assert (exited.value.code, "is a database" in capsys.readouterr().err) == (2, True)
        assert log.stat().st_size == 0
    assert len(calls_of(file, "here")) == 20


def test_what_is_no_capture_database_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError, match=r"missing\.db does not exist"):
        back_up(tmp_path / "missing.db", tmp_path / "backup.db")
    (tmp_path / "empty.db").touch()
    with pytest.raises(SchemaMismatchError, match="has no tokencustody tables"):
        back_up(tmp_path / "empty.db", tmp_path / "backup.db")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.db"]


def test_postgresql_is_told_its_own_programs_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(BackupError, match=r"pg_dump --format=custom .*me@host:5432/captures") as refused:
        back_up("postgresql://me:s3cret@host/captures", tmp_path / "backup.dump")
    assert "s3cret" not in str(refused.value)


def test_the_command_says_what_it_wrote_and_which_marks_wait(
    filled_url: str,
    tmp_path: Path,
    spill_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def spill_a_mark() -> None:
        # Somebody holds the file, so the mark waits on this host.
        with closing(sqlite3.connect(parse_url(filled_url).dsn, isolation_level=None)) as holder:
            holder.execute("BEGIN IMMEDIATE")
            async with open_store(filled_url, run="here", deadline=0.2) as store:
                await store.sink.mark_incomplete(make_entry().rollout_id, "call-1")

    def run(*arguments: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["tokencustody", "backup", *arguments, "--url", filled_url])
        with pytest.raises(SystemExit) as exited:
            main()
        out, err = capsys.readouterr()
        assert exited.value.code in (0, None), err
        return out, err

    out, err = run(str(tmp_path / "first.db"))
    assert "1 rollout, 20 calls" in out
    assert err == ""
    asyncio.run(spill_a_mark())
    out, err = run(str(tmp_path / "second.db"), "--json")
    said = json.loads(out)
    assert (said["calls"], said["waiting_marks"]) == (20, 1)
    assert "1 mark for this database waiting on this host" in err
    assert "spill replay" in err
