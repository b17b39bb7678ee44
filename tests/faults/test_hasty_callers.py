"""Callers with less patience than a connection or a first use takes: what was begun for them serves the next one."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from campaigns.relay import ChaosRelay
from tests.faults.test_cancellation import Stepped, cancelled_at
from tests.support.entries import make_entry
from tokencustody import CaptureStore, open_store
from tokencustody.database.url import parse_url
from tokencustody.schema import migrate

Operation = Callable[[CaptureStore], Coroutine[Any, Any, object]]
CALLS: dict[str, Operation] = {
    "put": lambda store: store.sink.put(make_entry()),
    "mark_incomplete": lambda store: store.sink.mark_incomplete("rollout-1"),
    "freeze": lambda store: store.source.freeze("rollout-1"),
    "resolve": lambda store: store.lineage.resolve("rollout-1", [{"role": "assistant", "content": "y"}]),
}
EACH_CALL = pytest.mark.parametrize("operation", CALLS.values(), ids=CALLS)


@pytest.fixture(autouse=True)
def _nothing_is_logged(caplog: pytest.LogCaptureFixture) -> Any:
    # Only what this test makes is looked through for what nobody awaited.
    gc.freeze()
    yield
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def cancelled_while_connecting(store: CaptureStore, operation: Operation, relay: ChaosRelay) -> None:
    """Cancel a call when the relay has its connection, through which nothing passes."""
    connections = relay.counts["connections"]
    relay.black_hole()
    calling = asyncio.create_task(operation(store))
    # In the relay's thread, which sets no event here, and has no turn while this one spins.
    while relay.counts["connections"] == connections:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling


@EACH_CALL
async def test_a_connection_that_was_begun_for_a_cancelled_call_serves_the_next_one(
    postgres_url: str, relay: ChaosRelay, operation: Operation
) -> None:
    async with open_store(relay.url(postgres_url), pool_size=1) as store:
        await store.sink.put(make_entry("warm"))
        relay.reset_all()
        connections = relay.counts["connections"]
        await cancelled_while_connecting(store, operation, relay)
        relay.heal()
        await operation(store)
        # The driver asks for TLS on one, and may go on without it on another.
        assert relay.counts["connections"] == connections + 1


@EACH_CALL
async def test_a_connection_that_failed_while_nobody_waited_for_it_is_made_anew(
    postgres_url: str, relay: ChaosRelay, operation: Operation
) -> None:
    async with open_store(relay.url(postgres_url), pool_size=1) as store:
        await store.sink.put(make_entry("warm"))
        relay.reset_all()
        await cancelled_while_connecting(store, operation, relay)
        relay.heal()
        relay.reset_all()
        await operation(store)


async def test_a_store_closes_at_once_though_a_connection_is_still_being_made(
    postgres_url: str, relay: ChaosRelay
) -> None:
    store = open_store(relay.url(postgres_url), pool_size=1, deadline=600)
    await store.sink.put(make_entry("warm"))
    relay.reset_all()
    await cancelled_while_connecting(store, CALLS["put"], relay)
    await store.close()
    relay.heal()


@EACH_CALL
async def test_callers_with_the_patience_for_a_warm_call_get_through_a_first_use(
    store_url: str, operation: Operation
) -> None:
    async with open_store(store_url, run="warm") as store:
        await store.sink.put(make_entry("warm"))
        warm = Stepped(operation(store), 0, lambda: None)
        await warm
    async with open_store(store_url, run="cold") as store:
        tries = 1
        # The first statements of a connection are prepared. What was begun goes on between the calls.
        while await cancelled_at(operation(store), warm.waits + 10):
            tries += 1
            assert tries < 200, "nobody comes to anything"
            await asyncio.sleep(0)


@pytest.mark.parametrize("turns", [0, 1, 2, 4, 8, 16, 32, 64])
async def test_a_store_closes_while_its_first_use_goes_on_for_a_cancelled_caller(
    unused_store_url: str, turns: int
) -> None:
    async with open_store(unused_store_url) as store:
        assert await cancelled_at(store.sink.put(make_entry()), 1)
        for _ in range(turns):
            await asyncio.sleep(0)
    is_file = unused_store_url.startswith("sqlite")
    if not is_file or await asyncio.to_thread(Path(parse_url(unused_store_url).dsn).exists):
        assert migrate.current(unused_store_url) in (None, migrate.HEAD)
    async with open_store(unused_store_url) as store:
        await store.sink.put(make_entry())
