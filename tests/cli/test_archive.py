"""What only reads, reads a SQLite file where nothing can be written, and leaves one that can be written as it is."""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.support import commands
from tests.support.archive import archived
from tests.support.audited import RUN, fill
from tests.support.machine import needs_linux
from tokencustody.schema import migrate

READING = [
    ["runs"],
    ["rollouts"],
    ["show", "clean", "--run", RUN],
    ["sql", "SELECT count(*) FROM audit_rollouts"],
    ["sql", "SELECT DISTINCT agrees FROM audit_integrity"],
    ["db", "check"],
    ["db", "current"],
    ["verify"],
]
# One for each way in which they open it.
SOME = [["rollouts"], ["sql", "SELECT count(*) FROM audit_rollouts"], ["db", "check"]]


def command(words: list[str], file: Path) -> subprocess.CompletedProcess[str]:
    return commands.run([*words, "--url", str(file)], before=commands.drop_privileges)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "archive" / "captures.db"
    file.parent.mkdir()
    fill(str(file))
    return file


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        each.name: (hashlib.sha256(each.read_bytes()).digest(), each.stat().st_mtime_ns)
        for each in folder.iterdir()
    }


def test_an_archive_says_what_the_same_file_says_where_it_can_be_written(file: Path) -> None:
    needs_linux("a way to bind root by file modes")
    before = contents(file.parent)
    said = [command(words, file) for words in READING]
    assert contents(file.parent)[file.name] == before[file.name]
    # SQLite leaves them where the last that closed a file could not have deleted them.
    for left in ("captures.db-wal", "captures.db-shm"):
        file.with_name(left).unlink(missing_ok=True)
    assert contents(file.parent) == before
    with archived(file):
        for words, there in zip(READING, said, strict=True):
            here = command(words, file)
            # Verify says how long it took.
            assert (here.returncode, here.stderr) == (there.returncode, there.stderr), words
            assert here.stdout == there.stdout or words == ["verify"], words
            assert here.returncode == 0 or words == ["verify"], (words, here.stderr)
    assert contents(file.parent) == before


def leave(path: Path, script: str) -> None:
    """Write to a file with a process that ends as by a power cut."""
    ending = (
        f"import os, sqlite3\nc = sqlite3.connect({str(path)!r}, isolation_level=None)\n{script}\nos._exit(0)"
    )
    subprocess.run([sys.executable, "-c", ending], check=True)


def with_a_log(path: Path) -> None:
    leave(path, "c.execute('UPDATE fences SET version = 77')")
    assert path.with_name("captures.db-wal").stat().st_size


def with_a_journal(path: Path) -> None:
    leave(path, "c.execute('PRAGMA journal_mode = DELETE').close()")
    pages = "for _ in range(500): c.execute('INSERT INTO big VALUES (randomblob(3000))')"
    leave(
        path,
        "c.execute('CREATE TABLE big (data)')\nc.execute('PRAGMA cache_size = 1')\n"
        f"c.execute('BEGIN')\nc.execute('UPDATE fences SET version = 77')\n{pages}",
    )
    assert path.with_name("captures.db-journal").stat().st_size


def test_what_waits_in_a_log_is_read_and_stays_there(file: Path) -> None:
    with_a_log(file)
    names = ("captures.db", "captures.db-wal")
    before = contents(file.parent)
    for words in SOME:
        done = command(words, file)
        assert "not available" not in done.stderr, words
        assert {name: contents(file.parent)[name] for name in names} == {name: before[name] for name in names}
    assert "77" in command(["sql", "--csv", "SELECT DISTINCT version FROM fences"], file).stdout.splitlines()


def test_what_a_transaction_left_that_did_not_end_is_never_read(file: Path) -> None:
    needs_linux("a way to bind root by file modes")
    with_a_journal(file)
    # Where it cannot be rolled back, there is nothing that could be read.
    with archived(file):
        for words in SOME:
            done = command(words, file)
            assert (done.returncode, "is not available" in done.stderr) == (1, True), words
    for words in SOME:
        left = shutil.copytree(file.parent, file.parent.with_name(" ".join(words).replace(" ", "-")))
        assert command(words, left / file.name).returncode == 0, words
        with closing(sqlite3.connect(left / file.name)) as connection:
            assert connection.execute("SELECT count(*) FROM fences WHERE version = 77").fetchone() == (0,)


def test_a_file_that_is_not_migrated_is_left_without_a_table(tmp_path: Path) -> None:
    empty = tmp_path / "empty.db"
    empty.touch()
    for words in SOME:
        command(words, empty)
    assert (empty.stat().st_size, list(tmp_path.iterdir())) == (0, [empty])
    assert migrate.current(empty) is None
