"""What waits for what, and what is left when somebody stops waiting."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
from typing import Any

import asyncpg
import pytest

from tests.database.test_transactions import Operation, Points, connection_lost
from tests.support.entries import REQUEST, make_entry
from tests.support.ledger import make_commit
from tests.support.rows import rows_of, run_sql
from tokencustody import CaptureStore, SqlTokenSink, TokenCaptureFrozenError, open_store
from tokencustody.database.registry import open_engines
from tokencustody.database.url import parse_url
from tokencustody.errors import DurabilityError, PayloadConflictError
from tokencustody.schema import tables

METHODS: dict[str, Operation] = {
    "put": lambda s: s.sink.put(make_entry(model_call_id="call-2")),
    "conflicting put": lambda s: s.sink.put(make_entry(model="other")),
    "begin_call": lambda s: s.sink.begin_call("rollout-1", "call-3"),
    "refuse_call": lambda s: s.sink.refuse_call("rollout-1", model_call_id="call-4", code="busy"),
    "mark_incomplete": lambda s: s.sink.mark_incomplete("rollout-1"),
    "freeze": lambda s: s.source.freeze("rollout-1"),
    "drop": lambda s: s.source.drop("rollout-1", "some-id", 1),
    "retire": lambda s: s.source.retire(["rollout-1"]),
    "delete": lambda s: s.source.delete(["rollout-1"]),
    "resolve": lambda s: s.lineage.resolve(
        "rollout-1", [*REQUEST, {"role": "assistant", "content": "Paris."}]
    ),
    "record": lambda s: s.lineage.record(make_commit()),
    "manifest": lambda s: s.lineage.manifest("rollout-2"),
}


async def others_can_write(url: str) -> None:
    """Fail when a transaction that nobody runs still holds a lock."""
    if url.startswith("sqlite"):
        # The rollback runs in the connection's own thread, so it may need a moment.
        other = sqlite3.connect(parse_url(url).dsn, timeout=60, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        other.close()
        return
    connection = await asyncpg.connect(url)
    try:
        waiting = await connection.fetchval(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND state LIKE 'idle in %'"
        )
        assert waiting == 0
        # A session that was ended for it needs a moment to let go.
        while await connection.fetchval(
            "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)"
            " WHERE locktype = 'advisory' AND datname = current_database()"
        ):
            pass
    finally:
        await connection.close()


@pytest.mark.serializable
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
async def test_a_call_that_is_cancelled_at_any_point_holds_no_lock(
    store: CaptureStore, store_url: str, method: Operation
) -> None:
    # Each point on SQLite, whose lock is everybody's; a sample on PostgreSQL, where a connection has its own.
    for suspensions in range(0, 200, 1 if store_url.startswith("sqlite") else 4):
        await store.source.delete(["rollout-1", "rollout-2"])
        await store.sink.put(make_entry())
        task = asyncio.create_task(method(store))  # type: ignore[arg-type]
        for _ in range(suspensions):
            await asyncio.sleep(0)
        ended = task.done()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, PayloadConflictError):
            await task
        await others_can_write(store_url)
        (engines,) = open_engines()
        assert engines.running == engines.checked_out() == 0
        if ended:
            break


async def test_a_freeze_is_not_overtaken_by_writers_that_come_after_it(
    postgres_url: str, faults: Points
) -> None:
    # A transaction of several statements can be held between them.
    # The other pools are as those of other processes.
    async with (
        open_store(postgres_url, coalesce="rollout") as store,
        open_store(postgres_url, pool_size=5) as trainer,
        open_store(postgres_url, pool_size=3) as late,
    ):
        for opened in (store, trainer, late):
            await opened.source.freeze("warm-up")
        before_commit, go_on = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            faults.clear()
            before_commit.set()
            await go_on.wait()

        faults["before commit"] = hold
        early = asyncio.create_task(store.sink.put(make_entry()))
        await before_commit.wait()
        freezing = asyncio.create_task(trainer.source.freeze("rollout-1"))
        watcher = await asyncpg.connect(postgres_url)
        while not await watcher.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
            pass
        overtaking = asyncio.create_task(late.sink.put(make_entry(model_call_id="late")))
        while await watcher.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted") < 2:
            assert not overtaking.done()
        await watcher.close()
        go_on.set()
        await early
        assert [entry.model_call_id for entry in (await freezing).entries] == ["call-1"]
        with pytest.raises(TokenCaptureFrozenError):
            await overtaking


@pytest.mark.serializable
@pytest.mark.parametrize("fence", ["freeze", "retire"])
@pytest.mark.parametrize("method", ["put", "begin_call", "refuse_call", "mark_incomplete"])
async def test_a_write_whose_answer_was_lost_before_the_fence_has_still_succeeded(
    store: CaptureStore, store_url: str, faults: Points, method: str, fence: str
) -> None:
    if (method, fence) in {("put", "retire"), ("begin_call", "retire")}:
        # Its row is gone with the retirement, so there is nothing left to look at.
        expected: Any = pytest.raises(TokenCaptureFrozenError)
    else:
        expected = contextlib.nullcontext()

    async def fence_then_lose() -> None:
        faults.clear()
        async with open_store(store_url, run="run-1", pool_size=3) as trainer:  # as another process
            await (
                trainer.source.freeze("rollout-1")
                if fence == "freeze"
                else trainer.source.retire(["rollout-1"])
            )
        raise connection_lost()

    faults["after commit, before acknowledgement"] = fence_then_lose
    with expected:
        await METHODS[method](store)


async def test_a_conflict_is_kept_as_evidence_whatever_the_field_is_called(
    store: CaptureStore, store_url: str
) -> None:
    await store.sink.put(make_entry(**{"nul \0 name": 1}))
    with pytest.raises(PayloadConflictError):
        await store.sink.put(make_entry(**{"nul \0 name": 2}))
    (evidence,) = await rows_of(store_url, tables.failures)
    assert evidence["differing_fields"] == "nul \ufffd name"
    assert (await store.source.freeze("rollout-1")).incomplete


async def test_another_order_of_keys_is_the_same_payload_and_the_first_order_stays(
    store: CaptureStore,
) -> None:
    items = [{"role": "assistant", "content": "Paris.", "extra": {"b": 1, "a": [{"y": 1, "x": -0.0}]}}]
    turned = [{"extra": {"a": [{"x": -0.0, "y": 1}], "b": 1}, "content": "Paris.", "role": "assistant"}]
    await store.sink.put(make_entry(output_items=items, x_one=1, x_two=2))
    await store.sink.put(make_entry(output_items=turned, x_two=2, x_one=1))
    snapshot = await store.source.freeze("rollout-1")
    assert (snapshot.incomplete, snapshot.version) == (False, 1)
    assert str(snapshot.entries[0].output_items) == str(items)


@pytest.mark.parametrize(
    "other", [{"x": 1.0}, {"x": True}, {"x": "1"}, {"x": [1]}, {"x": -1}, {}], ids=lambda other: str(other)
)
async def test_equal_looking_values_of_another_type_are_other_bytes(
    store: CaptureStore, other: dict[str, Any]
) -> None:
    await store.sink.put(make_entry(x_unknown={"x": 1}))
    with pytest.raises(PayloadConflictError, match="differing: x_unknown"):
        await store.sink.put(make_entry(x_unknown=other))


async def test_closing_waits_for_the_puts_in_flight_and_leaves_no_connection(store_url: str) -> None:
    store = open_store(store_url)
    await store.source.freeze("warm-up")
    puts = [asyncio.create_task(store.sink.put(make_entry(model_call_id=f"call-{n}"))) for n in range(20)]
    await asyncio.sleep(0)
    await store.close()
    assert open_engines() == []
    await asyncio.gather(*puts)
    async with open_store(store_url) as again:
        assert len((await again.source.freeze("rollout-1")).entries) == 20


MANY_LOOPS = """
import asyncio, os, sys
import asyncpg
from tests.support.entries import make_entry
from tokencustody import SqlTokenSink

sink = SqlTokenSink(sys.argv[1])

async def sessions():
    connection = await asyncpg.connect(sys.argv[1])
    print(await connection.fetchval("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"))
    await connection.close()

for number in range(20):
    asyncio.run(sink.put(make_entry(model_call_id=f"call-{number}")))
    asyncio.run(sessions())
"""


def test_a_store_that_goes_through_many_loops_does_not_pile_up_connections(postgres_url: str) -> None:
    # In a process of its own, since each loop that ends with the store open is worth a warning.
    command = [sys.executable, "-W", "ignore::ResourceWarning", "-c", MANY_LOOPS, postgres_url]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert max(map(int, ended.stdout.split())) <= 4


def test_closing_does_not_wait_for_a_loop_that_has_stopped(store_url: str) -> None:
    sink = SqlTokenSink(store_url)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(sink.put(make_entry()))
    (engines,) = open_engines()
    asyncio.run(sink.close())
    loop.run_until_complete(engines.dispose())
    loop.close()


async def test_a_database_that_turns_off_synchronous_commit_is_refused_at_the_next_connection(
    postgres_url: str,
) -> None:
    database = postgres_url.partition("?")[0].rpartition("/")[2]
    async with open_store(postgres_url) as store:
        await store.sink.put(make_entry())
        await run_sql(postgres_url, f'ALTER DATABASE "{database}" SET synchronous_commit = off')
        admin = await asyncpg.connect(postgres_url)
        await admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        await admin.close()
        with pytest.raises(DurabilityError, match="synchronous_commit=off"):
            await store.sink.put(make_entry(model_call_id="call-2"))
