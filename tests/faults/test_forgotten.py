"""Connections that were forgotten on the way: nothing passes any more, and neither side is told."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from campaigns.relay import ChaosRelay
from tests.faults.methods import METHODS, Method, right_answer
from tests.support.entries import make_entry
from tests.support.staged import stage
from tokencustody import SqlStagingStore, open_store
from tokencustody.database import connecting, postgresql

# What a pooler says before it closes the connection of a client, which may not have seen the end yet.
_FAREWELL_FIELDS = b"SFATAL\0VFATAL\0C08P01\0Mserver conn crashed?\0\0"
_FAREWELL = b"E" + (4 + len(_FAREWELL_FIELDS)).to_bytes(4, "big") + _FAREWELL_FIELDS


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "_LONGEST_SILENCE", 0.3)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
async def test_a_call_on_a_connection_that_was_forgotten_succeeds_within_its_deadline(
    postgres_url: str, relay: ChaosRelay, method: Method
) -> None:
    async with open_store(relay.url(postgres_url)) as store:
        await method.prepare(store, "rollout-1")
        assert relay.forget_all() >= 1
        answer = await method.run(store, "rollout-1")
        assert right_answer(method, "rollout-1", answer)
        assert method.after is None or await method.after(store, "rollout-1")
        assert store.stats()["retries_timeout"] >= 1


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
async def test_a_call_on_a_connection_that_was_said_to_end_while_it_lay_idle_succeeds(
    postgres_url: str, relay: ChaosRelay, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that what is said first on a connection is a question of its own, not of a transaction.
    monkeypatch.setattr(postgresql, "_ASK_AGAIN", 0)
    connect, drivers = postgresql.connect, []

    async def watched(*args: Any, **options: Any) -> Any:
        drivers.append(await connect(*args, **options))
        return drivers[-1]

    monkeypatch.setattr(postgresql, "connect", watched)
    async with open_store(relay.url(postgres_url)) as store:
        await method.prepare(store, "rollout-1")
        idle = [driver for driver in drivers if not driver.is_closed()]
        assert idle
        for driver in idle:
            driver._protocol.data_received(_FAREWELL)
        answer = await method.run(store, "rollout-1")
        assert right_answer(method, "rollout-1", answer)
        assert method.after is None or await method.after(store, "rollout-1")
        assert store.stats()["retries_connection"] >= 1


async def test_a_store_closes_at_once_whose_idle_connections_were_forgotten(
    postgres_url: str, relay: ChaosRelay
) -> None:
    async with open_store(relay.url(postgres_url), deadline=600) as store:
        await store.sink.put(make_entry())
        assert relay.forget_all() >= 1


async def test_one_silent_connection_is_enough_to_distrust_all_that_lay_idle_beside_it(
    postgres_url: str, relay: ChaosRelay
) -> None:
    async with open_store(relay.url(postgres_url)) as store:
        await asyncio.gather(
            *(store.sink.mark_incomplete(f"rollout-{number}", "call-1") for number in range(8))
        )
        assert relay.forget_all() > 1
        for number in range(8):
            await store.sink.put(make_entry(f"rollout-{number}", "call-2"))
            await store.source.freeze(f"rollout-{number}")
        assert store.stats()["retries"] == 1


def test_a_staging_store_outlives_connections_that_were_forgotten(
    postgres_url: str, relay: ChaosRelay
) -> None:
    with SqlStagingStore(relay.url(postgres_url)) as staging:
        assert staging.stage(stage("call-0").snapshot).ok
        relay.forget_all()
        assert staging.stage(stage("call-1").snapshot).ok
        relay.forget_all()
        assert len(staging.fetch(["r/call-0", "r/call-1"])) == 2


async def test_a_server_that_is_there_is_waited_for_longer_than_one_that_is_silent(postgres_url: str) -> None:
    async with open_store(postgres_url) as store:
        await store.sink.mark_incomplete("rollout-1", "call-1")
        holder = await asyncpg.connect(postgres_url)
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute("SELECT FROM fences FOR UPDATE")
        marking = asyncio.create_task(store.sink.mark_incomplete("rollout-1", "call-2"))
        waits_long = (
            "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            " AND clock_timestamp() - state_change > interval '1 second'"
        )
        watcher = await asyncpg.connect(postgres_url)
        while not await watcher.fetch(waits_long) and not marking.done():
            pass
        await transaction.rollback()
        await marking
        assert store.stats()["retries"] == 0
        await holder.close()
        await watcher.close()
