"""Durability that is taken away while a store is open: by a reload, a role or a database, beside a pooler or not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from urllib.parse import urlsplit

import pytest
from sqlalchemy import Table, text

from campaigns.bouncer import PgBouncer
from campaigns.servers import PostgresCluster
from tests.support.entries import make_entry
from tests.support.ledger import make_commit
from tests.support.machine import needs_program
from tests.support.rows import rows_of
from tokencustody import CaptureStore, open_store
from tokencustody.database import postgresql
from tokencustody.errors import DurabilityError
from tokencustody.schema import tables

SHOW = text("SHOW synchronous_commit")

Write = Callable[[CaptureStore], Awaitable[object]]
WRITES: dict[str, tuple[Write, Table]] = {
    "put": (lambda store: store.sink.put(make_entry()), tables.entries),
    "mark_incomplete": (lambda store: store.sink.mark_incomplete("rollout-1", "lost"), tables.failures),
    "record": (lambda store: store.lineage.record(make_commit()), tables.ledger_calls),
}
EACH_WRITE = pytest.mark.parametrize(("write", "table"), WRITES.values(), ids=WRITES)


@pytest.fixture(scope="module")
def cluster() -> Iterator[PostgresCluster]:
    # Else what was not synced at its commit would be synced a moment later.
    with PostgresCluster(settings={"wal_writer_delay": "10s"}) as cluster:
        cluster.create_database("captures")
        yield cluster


@pytest.fixture(params=["directly", "pooler", "pooler that the URL names"])
def url(request: pytest.FixtureRequest, cluster: PostgresCluster) -> Iterator[str]:
    if request.param == "directly":
        yield cluster.url_of("captures")
        return
    needs_program("pgbouncer", package="pgbouncer")
    with PgBouncer(cluster, "captures", pool_size=3) as bouncer:
        yield bouncer.plain_url if request.param == "pooler" else bouncer.url


@EACH_WRITE
async def test_a_reload_that_turns_synchronous_commit_off_under_open_connections_loses_nothing(
    cluster: PostgresCluster, url: str, write: Write, table: Table
) -> None:
    direct = cluster.url_of("captures")
    run = f"run-{urlsplit(url).port}"
    async with open_store(url, run=run, pool_size=1) as store:
        await store.sink.put(make_entry("warm"))
        await asyncio.to_thread(cluster.change, "synchronous_commit", "off")
        await write(store)
        await asyncio.to_thread(cluster.kill_postmaster)
        await asyncio.to_thread(cluster.start)
        await asyncio.to_thread(cluster.change, "synchronous_commit", None)
        kept = [(row["run"], row["rollout_id"]) for row in await rows_of(direct, table)]
        assert (run, "rollout-1") in kept


@pytest.mark.parametrize("way", ["ALTER DATABASE captures SET", "ALTER ROLE tokencustody SET", "URL"])
async def test_a_weaker_commit_that_is_configured_is_raised_and_a_stronger_one_kept(
    cluster: PostgresCluster, way: str
) -> None:
    for configured, used in {"local": "on", "remote_write": "on", "remote_apply": "remote_apply"}.items():
        url = cluster.url_of("captures")
        if way == "URL":
            url += f"?synchronous_commit={configured}"
        else:
            cluster.fetch(f"{way} synchronous_commit = {configured}")
        async with open_store(url) as store:
            assert await store.sink._database.write(lambda connection: connection.scalar(SHOW)) == used
    if way != "URL":
        cluster.fetch(f"{way.removesuffix('SET')} RESET synchronous_commit")


async def test_a_url_that_turns_synchronous_commit_off_is_refused(cluster: PostgresCluster) -> None:
    async with open_store(cluster.url_of("captures") + "?synchronous_commit=off") as store:
        with pytest.raises(DurabilityError, match="synchronous_commit=off"):
            await store.sink.put(make_entry())


@EACH_WRITE
async def test_a_reload_that_turns_fsync_off_under_open_connections_is_noticed(
    cluster: PostgresCluster, url: str, monkeypatch: pytest.MonkeyPatch, write: Write, table: Table
) -> None:
    async with open_store(url, run=f"fsync-{table.name}-{urlsplit(url).port}", spill=None) as store:
        await store.sink.put(make_entry("warm"))
        await asyncio.to_thread(cluster.change, "fsync", "off")
        monkeypatch.setattr(postgresql, "_ASK_AGAIN", 0.0)
        try:
            with pytest.raises(DurabilityError, match="fsync=off"):
                await write(store)
        finally:
            await asyncio.to_thread(cluster.change, "fsync", None)
        await write(store)
