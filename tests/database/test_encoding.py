"""A PostgreSQL database has to hold every text that there is, or none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import databases
from tests.support.entries import make_entry
from tests.support.postgres import Server, fetch
from tests.support.staged import stage
from tokencustody import SqlStagingStore, open_store
from tokencustody.errors import SchemaMismatchError
from tokencustody.schema import migrate


@pytest.fixture(params=["LATIN1", "SQL_ASCII", "EUC_JP"])
def encoded(request: pytest.FixtureRequest, postgres: Server) -> Iterator[tuple[str, str]]:
    """An encoding, and the URL of a database that has it."""
    name = f"tokencustody_test_{request.param.lower()}"
    locale = "LC_COLLATE 'C' LC_CTYPE 'C'"
    fetch(postgres.url, f"CREATE DATABASE {name} ENCODING '{request.param}' {locale} TEMPLATE template0")
    try:
        yield request.param, postgres.url_of(name)
    finally:
        databases.drop(postgres, name)


async def test_a_database_of_another_encoding_is_refused_with_what_to_do(encoded: tuple[str, str]) -> None:
    encoding, url = encoded
    refusal = f"encoding {encoding}, .*createdb -E UTF8 -T template0"
    for look in (migrate.upgrade, migrate.check, migrate.current, migrate.require_current):
        with pytest.raises(SchemaMismatchError, match=refusal):
            look(url)
    assert fetch(url, "SELECT FROM pg_tables WHERE schemaname = 'public'") == []
    async with open_store(url, spill=None) as store:
        with pytest.raises(SchemaMismatchError, match=refusal):
            await store.sink.put(make_entry())
        with pytest.raises(SchemaMismatchError, match=refusal):
            await store.source.freeze("rollout-1")


def test_a_staging_store_refuses_a_database_of_another_encoding(encoded: tuple[str, str]) -> None:
    with SqlStagingStore(encoded[1]) as staging, pytest.raises(SchemaMismatchError, match=encoded[0]):
        staging.stage(stage("call-1").snapshot)


async def test_a_client_encoding_that_would_garble_text_is_refused(postgres_url: str) -> None:
    async with open_store(f"{postgres_url}?client_encoding=LATIN1") as store:
        with pytest.raises(SchemaMismatchError, match="client_encoding LATIN1: leave it out"):
            await store.sink.put(make_entry())
