"""PgBouncer in transaction mode, a pool of three server connections, between the store and PostgreSQL."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import pytest

from campaigns.bouncer import PgBouncer
from campaigns.servers import PostgresCluster
from tests.faults.methods import METHODS, Method, right_answer
from tests.support.entries import make_entry
from tests.support.machine import needs_program
from tests.support.staged import stage
from tokencustody import SqlStagingStore, open_store
from tokencustody.database.connecting import connect
from tokencustody.database.url import parse_url
from tokencustody.errors import TokenCaptureFrozenError
from tokencustody.schema import migrate
from tokencustody.sql_prompt.queries import open_queries
from tokencustody.txn.selection import RolloutFilter
from tokencustody.verify import verify


@pytest.fixture(scope="module")
def bouncer() -> Iterator[PgBouncer]:
    needs_program("pgbouncer", package="pgbouncer")
    with PostgresCluster() as cluster:
        cluster.create_database("captures")
        with PgBouncer(cluster, "captures", pool_size=3) as bouncer:
            yield bouncer


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
async def test_each_method_works_behind_a_pooler(
    bouncer: PgBouncer, method: Method, request: pytest.FixtureRequest
) -> None:
    run = f"run-{list(METHODS.values()).index(method)}"
    # Two clients in turn, so that a server connection serves both. One has to find out that there is a pooler.
    async with (
        open_store(bouncer.url, run=run) as store,
        open_store(bouncer.plain_url, run=run, pool_size=1) as other,
    ):
        for rollout in ("rollout-1", "rollout-2"):
            await method.prepare(other, rollout)
            assert right_answer(method, rollout, await method.run(store, rollout))
            assert method.after is None or await method.after(other, rollout)


async def test_many_writers_share_the_few_connections_of_a_pooler(bouncer: PgBouncer) -> None:
    stores = [open_store(bouncer.url, run="many", pool_size=number) for number in (3, 4, 5)]
    entries = [
        [make_entry(f"rollout-{n % 7}", f"call-{s}-{n}") for n in range(100)] for s in range(len(stores))
    ]
    await asyncio.gather(
        *(
            store.sink.put(entry)
            for store, of_store in zip(stores, entries, strict=True)
            for entry in of_store
        )
    )
    snapshots = [await stores[0].source.freeze(f"rollout-{number}") for number in range(7)]
    for store in stores:
        await store.close()
    assert sum(len(snapshot.entries) for snapshot in snapshots) == 300
    assert not any(snapshot.incomplete for snapshot in snapshots)


async def test_no_put_that_succeeded_lies_behind_the_fence_of_a_pooler(bouncer: PgBouncer) -> None:
    async with (
        open_store(bouncer.url, run="race") as writer,
        open_store(bouncer.url, run="race", pool_size=2) as trainer,
    ):
        for rollout in (f"rollout-{number}" for number in range(10)):
            acknowledged: set[str] = set()

            async def write(call: str, rollout: str = rollout, acknowledged: set[str] = acknowledged) -> None:
                try:
                    await writer.sink.put(make_entry(rollout, call))
                except TokenCaptureFrozenError:
                    return
                acknowledged.add(call)

            puts = [asyncio.ensure_future(write(f"call-{number}")) for number in range(20)]
            await puts[0]
            snapshot = await trainer.source.freeze(rollout)
            await asyncio.gather(*puts)
            assert {entry.model_call_id for entry in snapshot.entries} == acknowledged
            again = await trainer.source.freeze(rollout)
            assert (again.entries, again.version) == (snapshot.entries, snapshot.version)


async def test_puts_outlive_the_pooler_they_go_through(bouncer: PgBouncer) -> None:
    async with open_store(bouncer.url, run="restarted") as store:
        done = 0

        async def write(task: int) -> None:
            nonlocal done
            for number in range(40):
                await store.sink.put(make_entry("rollout-1", f"call-{task}-{number}"))
                done += 1
                if done in (30, 100):
                    await asyncio.to_thread(bouncer.restart)

        await asyncio.gather(*(write(task) for task in range(5)))
        snapshot = await store.source.freeze("rollout-1")
        assert len(snapshot.entries) == 200
        assert not snapshot.incomplete
        assert store.stats()["retries"] > 0


WRITER = """
import asyncio, sys
from tests.support.entries import make_entry
from tokencustody import open_store

async def write(url, name):
    async with open_store(url, run="processes", pool_size=3) as store:
        async def one(task):
            for number in range(15):
                rollout, call = f"rollout-{number % 4}", f"{name}-{task}-{number}"
                await store.sink.begin_call(rollout, call)
                await store.sink.put(make_entry(rollout, call))
                await store.lineage.resolve(rollout, [{"role": "assistant", "content": "y"}])
        await asyncio.gather(*(one(task) for task in range(4)))

asyncio.run(write(*sys.argv[1:]))
"""


async def test_processes_that_were_not_told_of_a_pooler_find_it_out_and_never_meet_in_its_sessions(
    bouncer: PgBouncer,
) -> None:
    # The driver counts its statements from 1 in each process, so that all of them have the same names for other ones.
    writers = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", WRITER, bouncer.plain_url, f"writer-{n}")
        for n in range(3)
    ]
    assert [await writer.wait() for writer in writers] == [0, 0, 0]
    async with open_store(bouncer.plain_url, run="processes") as store:
        snapshots = [await store.source.freeze(f"rollout-{number}") for number in range(4)]
    assert sum(len(snapshot.entries) for snapshot in snapshots) == 3 * 4 * 15
    assert not any(snapshot.incomplete for snapshot in snapshots)


@pytest.mark.parametrize("asked", [None, 50])
async def test_no_statement_stays_prepared_behind_a_pooler_whatever_the_url_says(
    bouncer: PgBouncer, asked: int | None
) -> None:
    url = bouncer.plain_url + (f"?statement_cache_size={asked}" if asked else "")
    async with open_store(url, run=f"asked-{asked}") as store:
        await store.sink.put(make_entry())
        await store.source.freeze("rollout-1")
    with SqlStagingStore(url, run=f"asked-{asked}") as staging:
        assert staging.stage(stage("call-1").snapshot).ok
    assert migrate.check(url) == []
    assert (await asyncio.to_thread(verify, url, RolloutFilter(run=f"asked-{asked}"), jobs=1)).ok
    found: list[object] = []
    asking = open_queries(parse_url(url))
    for _ in range(2):
        await asyncio.to_thread(asking.run, "SELECT 1", lambda _, rows: found.extend(rows))
    assert len(found) == 2
    seen = set()
    for _ in range(2 * bouncer.pool_size):
        connection = await connect(parse_url(bouncer.url), deadline=30)
        seen.add((await connection.fetchval("SELECT count(*) FROM pg_prepared_statements"),))
        await connection.close()
    assert seen == {(0,)}


async def test_a_connection_without_a_pooler_keeps_its_prepared_statements(postgres_url: str) -> None:
    connection = await connect(parse_url(postgres_url), deadline=30)
    assert not connection.behind_pooler
    await connection.fetchval("SELECT 1")
    assert await connection.fetchval("SELECT count(*) FROM pg_prepared_statements") > 0
    await connection.close()
