"""A database that any released revision wrote is upgraded and used."""

from __future__ import annotations

import functools
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, MetaData, Table, create_engine, insert, select
from sqlalchemy.pool import NullPool

from tests.schema import freeze
from tests.support import databases, probes
from tests.support.filled import filled_template
from tests.support.ledger import make_commit
from tests.support.postgres import Server
from tokencustody import TokenCaptureRetiredError, TokenCaptureSnapshot, open_store
from tokencustody.database.url import parse_url
from tokencustody.errors import PayloadConflictError, SchemaMismatchError
from tokencustody.schema import migrate
from tokencustody.schema.revisions import OLDEST
from tokencustody.store import SqlStagingStore

STAMPED = {"alembic_version", "wire_schema"}


def load_sqlite(path: Path, revision: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executescript((freeze.FROZEN / f"{revision}.sqlite.sql").read_text())


def load_postgresql(url: str, revision: str, scratch: Path) -> None:
    """Put the frozen rows into a PostgreSQL database that was brought to `revision`."""
    load_sqlite(scratch, revision)
    source = create_engine(f"sqlite:///{scratch}", poolclass=NullPool)
    held: dict[str, list[dict[str, Any]]] = {}
    with source.connect() as connection:
        reflected = MetaData()
        reflected.reflect(connection)
        for table in reflected.sorted_tables:
            rows = connection.execute(select(table)).mappings()
            held[table.name] = [{name: with_zone(value) for name, value in row.items()} for row in rows]
    assert all(held.values()), "a frozen database has rows in every table"

    def fill(connection: Connection) -> None:
        for name in (table.name for table in reflected.sorted_tables if table.name not in STAMPED):
            connection.execute(insert(Table(name, MetaData(), autoload_with=connection)), held[name])

    migrate.upgrade(url, revision)
    migrate.in_transaction(parse_url(url), fill)


def with_zone(value: Any) -> Any:
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) else value


def read(snapshot: TokenCaptureSnapshot) -> dict[str, Any]:
    return {
        "entries": sorted(map(freeze.plain, snapshot.entries), key=lambda each: str(each["model_call_id"])),
        "incomplete": snapshot.incomplete,
        "refused": [refusal.model_call_id for refusal in snapshot.refusals],
    }


def test_each_released_revision_has_a_frozen_database() -> None:
    files = {f"{revision}.{kind}" for revision in migrate.REVISIONS for kind in ("json", "sqlite.sql")}
    assert {path.name for path in freeze.FROZEN.iterdir()} == files


@pytest.fixture(params=migrate.REVISIONS)
def revision(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def frozen_template(
    postgres: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], str]]:
    """A function that returns the name of a PostgreSQL database as the release of a revision left it."""
    scratch = tmp_path_factory.mktemp("scratch")
    with ExitStack() as stack:

        @functools.cache
        def template(revision: str) -> str:
            load = functools.partial(load_postgresql, revision=revision, scratch=scratch / revision)
            return stack.enter_context(filled_template(postgres, None, load))

        yield template


@pytest.fixture
def frozen_url(dialect: str, revision: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database as that release left it."""
    if dialect == "sqlite":
        load_sqlite(tmp_path / "captures.db", revision)
        yield f"sqlite:///{tmp_path / 'captures.db'}"
        return
    template = request.getfixturevalue("frozen_template")(revision)
    with databases.fresh(request.getfixturevalue("postgres"), template) as url:
        yield url


async def test_a_frozen_database_is_upgraded_and_used(frozen_url: str, revision: str) -> None:
    expected = json.loads((freeze.FROZEN / f"{revision}.json").read_text())
    manifest, staged = expected.pop("manifest", None), expected.pop("staged", [])
    assert migrate.current(frozen_url) == revision
    async with open_store(frozen_url) as store:
        if revision < OLDEST:
            with pytest.raises(SchemaMismatchError, match=rf"{revision}.*{migrate.HEAD}.*db upgrade"):
                await store.source.freeze("open")
        else:
            await store.sink.put(freeze.entry("between", "between"))
            assert (await store.source.freeze("frozen")).snapshot_id == expected["frozen"]["snapshot_id"]
    assert migrate.upgrade(frozen_url) == (revision, migrate.HEAD)
    assert migrate.check(frozen_url) == []

    async with open_store(frozen_url) as store:
        await store.sink.put(freeze.entry("root"))  # the same bytes again
        with pytest.raises(PayloadConflictError):
            await store.sink.put(freeze.entry("first", "marked", model="another-model"))
        await store.sink.put(freeze.entry("new", "new"))
        for rollout, held in expected.items():
            snapshot = await store.source.freeze(rollout)
            wanted = sorted(held["entries"], key=lambda each: str(each["model_call_id"]))
            assert read(snapshot) == {
                "entries": wanted,
                "incomplete": held["incomplete"],
                "refused": held["refused"],
            }
            if "snapshot_id" in held:
                assert (snapshot.snapshot_id, snapshot.version) == (held["snapshot_id"], held["version"])
                assert await store.source.drop(rollout, snapshot.snapshot_id, snapshot.version)
        assert [each.model_call_id for each in (await store.source.freeze("new")).entries] == ["new"]
        for rollout in ("dropped", "retired"):
            with pytest.raises(TokenCaptureRetiredError):
                await store.source.freeze(rollout)
    async with open_store(frozen_url, run=freeze.OTHER_RUN) as store:
        (other,) = (await store.source.freeze("open")).entries
        assert other.model == "another-model"
    if manifest is not None:
        async with open_store(frozen_url) as store:
            assert await store.lineage.manifest("ledger") == manifest
            match = (await store.lineage.resolve("ledger", freeze.NEXT_REQUEST)).match
            assert match is not None
            assert (match.model_call_id, match.staging_chain) == ("call-1", ("ledger/call-1",))
    keys = [f"staged/{each['record']['model_call_id']}" for each in staged]
    with SqlStagingStore(frozen_url) as staging:
        for snapshot, extras, each in zip(
            staging.fetch(keys), staging.fetch_extras(keys), staged, strict=True
        ):
            assert snapshot.digest == each["record"]["digest"]
            assert snapshot.token_ids_delta == each["record"]["token_ids_delta"]
            assert extras == each["extras"]
        for record, attachments in freeze.staged_calls()[: len(staged)]:
            assert staging.stage(record, attachments=attachments).ok  # the same again


async def test_a_frozen_database_survives_going_down_to_its_revision_and_up_again(
    frozen_url: str, revision: str
) -> None:
    tables = ("fences", "entries", "intents", "failures", "snapshot_versions")

    def counts() -> list[list[tuple[Any, ...]]]:
        return [probes.rows(frozen_url, f"SELECT count(*) FROM {name}") for name in tables]

    before = counts()
    migrate.upgrade(frozen_url)
    migrate.downgrade(frozen_url, revision)
    assert migrate.current(frozen_url) == revision
    migrate.upgrade(frozen_url)
    assert counts() == before


async def test_what_the_revision_before_cannot_hold_keeps_a_database_from_going_back(
    migrated_url: str,
) -> None:
    async with open_store(migrated_url) as store:
        await store.lineage.record_failure("reasons", "call", "one")
        await store.lineage.record_failure("reasons", "call", "another")
        await store.sink.refuse_call("refused", model_call_id="call", code=None)
        await store.source.freeze("late")
        await store.lineage.record(make_commit("late"))
        for rollout, said in (
            ("late", "1 versions are of rows that came after a freeze"),
            ("refused", "1 refusals have no code"),
            ("reasons", "1 failed calls have more than one reason"),
        ):
            with pytest.raises(SchemaMismatchError, match=f"{said}, which revision 0004_audit cannot hold"):
                migrate.downgrade(migrated_url, "0004_audit")
            await store.source.delete([rollout])
        await store.lineage.record(make_commit("kept"))
        kept = await store.lineage.manifest("kept")
        snapshot = await store.source.freeze("kept")
    assert migrate.downgrade(migrated_url, "0004_audit") == (migrate.HEAD, "0004_audit")
    migrate.upgrade(migrated_url)
    async with open_store(migrated_url) as store:
        assert await store.lineage.manifest("kept") == kept
        assert await store.source.freeze("kept") == snapshot
        await store.lineage.record(make_commit("kept"))  # the same again
        assert (await store.source.freeze("kept")) == snapshot
