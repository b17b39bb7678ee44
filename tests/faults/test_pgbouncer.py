"""PgBouncer in transaction mode, a pool of three server connections, between the store and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from campaigns.bouncer import PgBouncer
from campaigns.servers import PostgresCluster
from tests.faults.methods import METHODS, Method, right_answer
from tests.support.entries import make_entry
from tests.support.machine import needs_program
from tokencustody import open_store
from tokencustody.errors import StoreUnavailableError, TokenCaptureFrozenError


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
    # Two clients in turn, so that a server connection serves both.
    async with (
        open_store(bouncer.url, run=run) as store,
        open_store(bouncer.url, run=run, pool_size=1) as other,
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


async def test_a_pooler_without_the_setting_that_it_needs_is_told_by_name(bouncer: PgBouncer) -> None:
    async def use(run: str) -> None:
        async with open_store(bouncer.plain_url, run=run, deadline=5) as store:
            await asyncio.gather(*(store.sink.put(make_entry(f"r-{n}", "call-1")) for n in range(10)))
            await asyncio.gather(*(store.source.freeze(f"r-{n}") for n in range(10)))

    # Which statements meet a server connection that does not know them is the pooler's choice.
    with pytest.raises(StoreUnavailableError, match="statement_cache_size=0"):
        await until_it_fails(use)


async def until_it_fails(use: Callable[[str], Awaitable[None]]) -> None:
    for number in range(10):
        await asyncio.gather(*(use(f"plain-{number}-{n}") for n in range(3)))
