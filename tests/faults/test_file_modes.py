"""A SQLite file and its log are their owner's alone when a store creates them; one that is there keeps its mode."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.entries import make_entry
from tests.support.staged import stage
from tokencustody import SqlStagingStore, SqlTokenSource, open_store
from tokencustody.errors import CorruptEntryError, StoreUnavailableError
from tokencustody.schema import migrate

FILES = ("captures.db", "captures.db-shm", "captures.db-wal")


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    return {path.name: oct(path.stat().st_mode & 0o777) for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o277, 0o777], ids=oct)
async def test_a_file_that_a_store_creates_and_its_log_are_their_owners_alone_whatever_the_umask(
    tmp_path: Path, mask: int
) -> None:
    with umask(mask):
        async with open_store(tmp_path / "captures.db") as store:
            await store.sink.put(make_entry())
            await store.source.freeze("rollout-1")
            assert modes(tmp_path) == dict.fromkeys(FILES, "0o600")
        assert modes(tmp_path) == {"captures.db": "0o600"}


def with_a_migration(path: Path) -> None:
    migrate.upgrade(path)


def with_a_staging_store(path: Path) -> None:
    with SqlStagingStore(path) as staging:
        assert staging.stage(stage("call-1").snapshot).ok


@pytest.mark.parametrize("create", [with_a_migration, with_a_staging_store])
def test_every_way_to_create_a_file_makes_it_its_owners_alone(
    tmp_path: Path, create: Callable[[Path], None]
) -> None:
    with umask(0):
        create(tmp_path / "captures.db")
    assert modes(tmp_path) == {"captures.db": "0o600"}


@pytest.mark.parametrize("mode", [0o640, 0o666], ids=oct)
async def test_a_file_that_was_there_keeps_its_mode_and_gives_it_to_its_log(
    tmp_path: Path, mode: int
) -> None:
    path = tmp_path / "captures.db"
    path.touch()
    path.chmod(mode)
    async with open_store(path) as store:
        await store.sink.put(make_entry())
        assert modes(tmp_path) == dict.fromkeys(FILES, oct(mode))


async def test_a_file_that_is_removed_under_a_store_is_named_and_not_created_anew(tmp_path: Path) -> None:
    path = tmp_path / "captures.db"
    migrate.upgrade(path)
    # The first use looks at the schema through a reader, so the writer has not opened the file yet.
    async with open_store(path) as store:
        await store.lineage.has_rows("rollout-1")
        path.unlink()
        for name in FILES[1:]:
            (tmp_path / name).unlink(missing_ok=True)
        with pytest.raises(StoreUnavailableError, match=r"captures\.db is not available"):
            await store.sink.put(make_entry())
    assert modes(tmp_path) == {}


@pytest.mark.parametrize("name", ["a b.db", "50%41.db", "what?mode=memory", "a#b.db", "é.db", "\udcff.db"])
async def test_a_file_of_any_name_is_the_one_that_is_opened(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    async with open_store(path) as store:
        await store.sink.put(make_entry())
    assert list(modes(tmp_path)) == [name]
    file = sqlite3.connect(path)
    assert file.execute("SELECT model_call_id FROM entries").fetchall() == [("call-1",)]
    file.close()
    async with SqlTokenSource(path) as source:
        assert len((await source.freeze("rollout-1")).entries) == 1


@pytest.mark.parametrize("left", ["nothing", "an empty file"])
async def test_a_log_without_its_file_is_kept_and_named(tmp_path: Path, left: str) -> None:
    path, log = tmp_path / "captures.db", tmp_path / "captures.db-wal"
    async with open_store(path) as store:
        await store.sink.put(make_entry())
        held = log.read_bytes()
    assert held
    path.unlink()
    if left == "an empty file":
        path.touch()
    log.write_bytes(held)
    async with open_store(path) as store:
        with pytest.raises(StoreUnavailableError, match=r"its log captures\.db-wal is there"):
            await store.sink.put(make_entry())
    for migration in (migrate.upgrade, migrate.current, migrate.check):
        with pytest.raises(StoreUnavailableError, match=r"its log captures\.db-wal is there"):
            migration(str(path))
    assert log.read_bytes() == held


async def test_a_version_table_that_makes_no_sense_is_named(tmp_path: Path) -> None:
    path = tmp_path / "captures.db"
    migrate.upgrade(str(path))
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE odd AS SELECT NULL AS version_num")
        connection.execute("DROP TABLE alembic_version")
        connection.execute("ALTER TABLE odd RENAME TO alembic_version")
    connection.close()
    for migration in (migrate.current, migrate.check):
        with pytest.raises(CorruptEntryError, match="holds what this library does not write"):
            migration(str(path))
    async with open_store(path) as store:
        with pytest.raises(CorruptEntryError, match="holds what this library does not write"):
            await store.sink.put(make_entry())


def test_a_path_that_is_too_long_is_named(tmp_path: Path) -> None:
    for migration in (migrate.upgrade, migrate.current, migrate.check):
        try:
            said = str(migration(str(tmp_path / ("x" * 300))))
        except StoreUnavailableError as exc:
            said = str(exc)
            assert "x" * 300 in said
        # From Python 3.14 on it is a path that is not there, which `check` returns as a problem.
        assert re.search("is not available|does not exist", said)
