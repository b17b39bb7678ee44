"""Durable before return, as far as the settings of the connections decide it."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection

from tests.support.entries import make_entry
from tests.support.rows import run_sql
from tokencustody import CaptureStore, open_store
from tokencustody.errors import DurabilityError

pytestmark = [pytest.mark.disk, pytest.mark.quick("Durable before return")]


async def test_a_sqlite_commit_is_synced_before_it_is_acknowledged(sqlite_url: str) -> None:
    def settings(connection: Connection) -> tuple[str, int]:
        journal = (connection.exec_driver_sql("PRAGMA journal_mode")).scalar_one()
        synchronous = (connection.exec_driver_sql("PRAGMA synchronous")).scalar_one()
        return journal, synchronous

    async with open_store(sqlite_url) as store:
        await store.sink.put(make_entry())
        extra = 3  # with a write-ahead log the same as FULL
        assert await store.sink._database.write(settings) == ("wal", extra)


async def test_a_postgresql_that_acknowledges_before_it_syncs_is_refused(postgres_url: str) -> None:
    database = postgres_url.partition("?")[0].rpartition("/")[2]
    await run_sql(postgres_url, f'ALTER DATABASE "{database}" SET synchronous_commit = off')
    async with open_store(postgres_url) as store:
        with pytest.raises(DurabilityError, match="synchronous_commit=off"):
            await store.sink.put(make_entry())


async def test_readers_cannot_write(store_url: str) -> None:
    def write(connection: Connection) -> None:
        connection.exec_driver_sql("DELETE FROM entries")

    # Short, because a read-only server may be a standby that is about to take over, so that this is retried.
    async with open_store(store_url, deadline=1) as store:
        await store.sink.put(make_entry())
        with pytest.raises(Exception, match=r"readonly|read-only"):
            await store.source._database.read(write)
        assert len((await store.source.freeze("rollout-1")).entries) == 1


async def test_what_was_put_is_visible_to_another_client_at_once(store: CaptureStore, store_url: str) -> None:
    async with open_store(store_url, run="run-1") as other:
        for number in range(20):
            await store.sink.put(make_entry(model_call_id=f"call-{number}"))
            await other.sink.put(make_entry(model_call_id=f"call-{number}"))  # a repeat: it must be seen
        assert len((await other.source.freeze("rollout-1")).entries) == 20
