"""Upgrades happen whole or not at all, once, whoever runs them and however many at the same time."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy import Connection, text

from tests.support import probes
from tests.support.postgres import Server
from tokencustody import open_store
from tokencustody.database.url import parse_url
from tokencustody.errors import SchemaMismatchError, StoreUnavailableError
from tokencustody.schema import migrate

ROUNDS = 5


def test_a_second_upgrade_changes_nothing(empty_url: str) -> None:
    said: list[str] = []
    assert migrate.upgrade(empty_url, progress=said.append) == (None, migrate.HEAD)
    assert said == [f"applied {revision}" for revision in migrate.REVISIONS]
    assert migrate.upgrade(empty_url, progress=said.append) == (migrate.HEAD, migrate.HEAD)
    assert len(said) == len(migrate.REVISIONS)


async def test_an_upgrade_works_inside_a_running_event_loop(empty_url: str) -> None:
    assert migrate.upgrade(empty_url) == (None, migrate.HEAD)
    assert migrate.current(empty_url) == migrate.HEAD
    assert migrate.check(empty_url) == []


def test_an_upgrade_that_fails_leaves_nothing_behind(empty_url: str) -> None:
    def fail(line: str) -> None:
        raise RuntimeError(f"stopped after {line}")

    with pytest.raises(RuntimeError, match=f"stopped after applied {migrate.REVISIONS[0]}"):
        migrate.upgrade(empty_url, progress=fail)
    assert probes.objects(empty_url) == []
    assert migrate.upgrade(empty_url) == (None, migrate.HEAD)


def test_a_downgrade_that_fails_loses_nothing(migrated_url: str) -> None:

    def fail(line: str) -> None:
        raise RuntimeError(line)

    with pytest.raises(RuntimeError, match=f"undid {migrate.HEAD}"):
        migrate.downgrade(migrated_url, "base", progress=fail)
    assert migrate.check(migrated_url) == []


def test_two_upgrades_at_the_same_time_both_succeed_and_one_does_the_work(empty_url: str) -> None:
    with probes.workers(2, migrate.upgrade) as two:
        for _ in range(ROUNDS):
            reports = two.act_on(empty_url)
            assert sorted(reports) == sorted([str((None, migrate.HEAD)), str((migrate.HEAD, migrate.HEAD))])
            assert migrate.check(empty_url) == []
            migrate.downgrade(empty_url, "base")


async def test_an_upgrade_waits_for_the_documented_advisory_lock(empty_postgres_url: str) -> None:
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    holder = await asyncpg.connect(empty_postgres_url)
    try:
        with probes.workers(1, migrate.upgrade) as one:
            async with holder.transaction():
                await holder.execute("SELECT pg_advisory_xact_lock($1)", migrate.LOCK_KEY)
                one.tell(empty_postgres_url)
                async with asyncio.timeout(60):
                    while await holder.fetchval(waiting) == 0:
                        pass
                assert probes.objects(empty_postgres_url) == []
            assert one.reports() == [str((None, migrate.HEAD))]
    finally:
        await holder.close()


def test_upgrades_wait_even_where_serializable_is_the_default(empty_postgres_url: str) -> None:
    (name,) = probes.rows(empty_postgres_url, "SELECT current_database()")[0]
    probes.rows(
        empty_postgres_url, f'ALTER DATABASE "{name}" SET default_transaction_isolation = serializable'
    )
    with probes.workers(2, migrate.upgrade) as two:
        for _ in range(ROUNDS):
            reports = two.act_on(empty_postgres_url)
            assert sorted(reports) == sorted([str((None, migrate.HEAD)), str((migrate.HEAD, migrate.HEAD))])
            migrate.downgrade(empty_postgres_url, "base")


def freeze_its_own(url: str) -> int:
    """Freeze a rollout that no other process has."""

    async def freeze() -> int:
        async with open_store(url) as store:
            return (await store.source.freeze(f"rollout-{os.getpid()}")).version

    return asyncio.run(freeze())


def test_many_processes_may_open_one_new_sqlite_file(tmp_path: Path) -> None:
    with probes.workers(6, freeze_its_own) as six:
        for number in range(ROUNDS):
            url = f"sqlite:///{tmp_path / f'new-{number}.db'}"
            assert six.act_on(url) == ["1"] * 6
            assert probes.rows(url, "SELECT count(*) FROM fences") == [(6,)]
            assert migrate.check(url) == []


async def test_one_event_loop_may_create_many_sqlite_files_at_the_same_time(tmp_path: Path) -> None:
    urls = [f"sqlite:///{tmp_path / f'{number}.db'}" for number in range(8)]

    async def freeze(url: str) -> int:
        async with open_store(url) as store:
            return (await store.source.freeze("rollout")).version

    assert await asyncio.gather(*map(freeze, urls)) == [1] * 8
    assert [migrate.check(url) for url in urls] == [[]] * 8


def test_a_revision_that_this_library_does_not_know_is_left_alone(migrated_url: str) -> None:
    probes.run_script(migrated_url, "UPDATE alembic_version SET version_num = '9999_later'")
    before = probes.catalogue(migrated_url)
    steps: list[Callable[[], object]] = [
        lambda: migrate.upgrade(migrated_url),
        lambda: migrate.downgrade(migrated_url, "base"),
    ]
    for step in steps:
        with pytest.raises(SchemaMismatchError, match=rf"9999_later.*{migrate.HEAD}.*upgrade tokencustody"):
            step()
    assert probes.catalogue(migrated_url) == before


def test_an_unknown_target_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'never.db'}"
    steps: list[Callable[[], object]] = [
        lambda: migrate.upgrade(url, "0000_never"),
        lambda: migrate.downgrade(url, "0000_never"),
    ]
    for step in steps:
        with pytest.raises(migrate.UnknownRevisionError, match=f"'0000_never'.*{migrate.HEAD}"):
            step()
    assert list(tmp_path.iterdir()) == []


def test_looking_at_a_missing_sqlite_file_does_not_create_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'missing.db'}"
    assert migrate.check(url) == ["the file does not exist"]
    for step in (lambda: migrate.current(url), lambda: migrate.downgrade(url, "base")):
        with pytest.raises(StoreUnavailableError, match="does not exist: look at the path"):
            step()
    assert asyncio.run(migrate.is_new_sqlite(parse_url(url)))
    assert list(tmp_path.iterdir()) == []


def test_looking_at_a_sqlite_file_does_not_change_it(tmp_path: Path) -> None:
    path = tmp_path / "of_somebody_else.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE theirs (a INTEGER); INSERT INTO theirs VALUES (1)")
    before = path.read_bytes()
    assert migrate.current(f"sqlite:///{path}") is None
    assert migrate.check(f"sqlite:///{path}") == [f"revision: none instead of {migrate.HEAD}"]
    assert not asyncio.run(migrate.is_new_sqlite(parse_url(path)))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_unreachable_database_is_named_without_its_password(postgres: Server, tmp_path: Path) -> None:
    steps: list[Callable[[str], object]] = [migrate.upgrade, migrate.current, migrate.check]
    nobody = "postgresql://somebody:not-to-be-seen@127.0.0.1:1/captures"
    for step in steps:
        with pytest.raises(StoreUnavailableError, match=r"127\.0\.0\.1:1/captures") as refused:
            step(nobody)
        assert "not-to-be-seen" not in str(refused.value)
        with pytest.raises(StoreUnavailableError, match="tokencustody_no_such_database"):
            step(postgres.url_of("tokencustody_no_such_database"))
    with pytest.raises(StoreUnavailableError, match=r"no-such-folder/x\.db"):
        migrate.upgrade(tmp_path / "no-such-folder" / "x.db")
    (tmp_path / "text.db").write_text("this is no database" * 100)
    for step in steps:
        with pytest.raises(StoreUnavailableError, match=r"text\.db"):
            step(f"sqlite:///{tmp_path / 'text.db'}")


async def test_a_writer_that_holds_a_fence_only_delays_an_upgrade(postgres_url: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    try:
        async with connection.transaction():
            await connection.execute("SELECT * FROM fences FOR SHARE")
            assert await asyncio.to_thread(migrate.upgrade, postgres_url) == (migrate.HEAD, migrate.HEAD)
    finally:
        await connection.close()


def test_opening_a_store_does_not_load_alembic(postgres_url: str) -> None:
    program = (
        "import asyncio, sys\nfrom tokencustody import open_store\n"
        "async def main():\n"
        "    async with open_store(sys.argv[1]) as store:\n"
        "        await store.source.freeze('rollout')\n"
        "asyncio.run(main())\n"
        "assert 'sqlalchemy' in sys.modules and not {'alembic', 'mako'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program, postgres_url], check=True)


def test_tables_of_another_application_are_named_and_left_alone(empty_url: str) -> None:
    def make_table(connection: Connection) -> None:
        connection.execute(text("CREATE TABLE entries (a INTEGER)"))

    migrate.in_transaction(parse_url(empty_url), make_table)
    with pytest.raises(SchemaMismatchError, match="tables of another application under the names entries"):
        migrate.upgrade(empty_url)
    assert migrate.current(empty_url) is None
