"""Rollouts that somebody holds, as a large freeze or a stopped client does, stop nobody but their own calls."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import asyncpg
import pytest

from tests.database.test_transactions import Operation
from tests.support.entries import REQUEST, continuation, make_entry
from tests.support.ledger import make_commit
from tests.support.staged import stage
from tokencustody import CaptureStore, SqlStagingStore, open_store
from tokencustody.codec.calls import pack_entry
from tokencustody.database.coalescing import Coalesce
from tokencustody.database.dialects import lock_number
from tokencustody.database.url import parse_url
from tokencustody.errors import StoreUnavailableError, TokenCaptureFrozenError
from tokencustody.store.base import now
from tokencustody.txn.fence import RolloutKey, Stamp
from tokencustody.txn.inserting import TOGETHER
from tokencustody.txn.kinds import ENTRIES
from tokencustody.txn.putting import new_call

NEXT = continuation(REQUEST, "Paris.", "And of Spain?")

# Ways to come to a rollout whose fence is held, each of which has to wait.
LATE: dict[str, Callable[[CaptureStore, str], Any]] = {
    "put": lambda s, rollout: s.sink.put(make_entry(rollout, "late")),
    "begin_call": lambda s, rollout: s.sink.begin_call(rollout, "late"),
    "refuse_call": lambda s, rollout: s.sink.refuse_call(rollout, model_call_id="late", code="busy"),
    "mark_incomplete": lambda s, rollout: s.sink.mark_incomplete(rollout, "late"),
    "freeze": lambda s, rollout: s.source.freeze(rollout),
    "retire": lambda s, rollout: s.source.retire([rollout]),
    "record": lambda s, rollout: s.lineage.record(make_commit(rollout)),
    "import_rows": lambda s, rollout: s.lineage.import_rows(
        rollout, [{"rollout_id": rollout, "model_call_id": "late", "reason": "lost"}]
    ),
}

# What other rollouts do meanwhile, one after the other.
OTHERS: dict[str, Operation] = {
    "begin_call": lambda s: s.sink.begin_call("free", "call-2"),
    "put": lambda s: s.sink.put(make_entry("free", "call-2")),
    "put again": lambda s: s.sink.put(make_entry("free", "call-2")),
    "resolve": lambda s: s.lineage.resolve("free", NEXT),
    "record": lambda s: s.lineage.record(make_commit("free")),
    "manifest": lambda s: s.lineage.manifest("free"),
    "refuse_call": lambda s: s.sink.refuse_call("free", model_call_id="call-3", code="busy"),
    "stage": lambda s: asyncio.to_thread(s.staging.stage, stage("call-1", rollout="free").snapshot),
    "mark_incomplete": lambda s: s.sink.mark_incomplete("free"),
    "freeze": lambda s: s.source.freeze("free"),
    "retire": lambda s: s.source.retire(["free"]),
    "delete": lambda s: s.source.delete(["free"]),
}


@asynccontextmanager
async def holding(url: str, run: str, rollouts: Sequence[str]) -> AsyncIterator[Callable[[], Any]]:
    """Hold the fences of rollouts as a freeze does that is reading them; yield what lets them go."""
    async with AsyncExitStack() as held:
        for rollout in rollouts:
            connection = await asyncpg.connect(url)
            held.push_async_callback(connection.close)
            transaction = connection.transaction()
            await transaction.start()
            await connection.execute("SELECT pg_advisory_xact_lock($1)", lock_number(f"{run}/{rollout}"))
            await connection.execute(
                "SELECT 1 FROM fences WHERE run = $1 AND rollout_id = $2 FOR UPDATE", run, rollout
            )
        yield held.aclose


async def some_wait(url: str, number: int) -> None:
    """Return once that many sessions have waited for a lock at the same time."""
    watcher = await asyncpg.connect(url)
    try:
        while await watcher.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted") < number:
            pass
    finally:
        await watcher.close()


@pytest.mark.parametrize(("pool_size", "late"), [*((4, late) for late in LATE), (1, "put"), (2, "freeze")])
async def test_calls_of_held_rollouts_leave_connections_for_all_others(
    postgres_url: str, pool_size: int, late: str
) -> None:
    rollouts = [f"held-{number}" for number in range(pool_size + 2)]
    async with open_store(postgres_url, run="run-1", pool_size=pool_size) as store:
        for rollout in (*rollouts, "free"):
            await store.sink.put(make_entry(rollout, "call-1"))
        async with holding(postgres_url, "run-1", rollouts) as let_go:
            waiting = [asyncio.create_task(LATE[late](store, rollout)) for rollout in rollouts]
            await some_wait(postgres_url, 1)
            for other in OTHERS.values():
                await other(store)
            assert not [task for task in waiting if task.done()]
            await let_go()
            await asyncio.gather(*waiting)


async def test_many_calls_of_one_held_rollout_leave_connections_for_all_others(postgres_url: str) -> None:
    async with open_store(postgres_url, run="run-1") as store:
        await store.sink.put(make_entry("held", "call-1"))
        async with holding(postgres_url, "run-1", ["held"]) as let_go:
            waiting = [
                asyncio.create_task(store.lineage.record(make_commit("held", f"late-{number}")))
                for number in range(20)
            ]
            await some_wait(postgres_url, 1)
            for other in OTHERS.values():
                await other(store)
            await let_go()
            await asyncio.gather(*waiting)
        assert len((await store.lineage.manifest("held"))["records"]) == 20


@pytest.mark.parametrize("coalesce", list(Coalesce))
async def test_a_call_that_another_writer_has_not_committed_keeps_no_lane(
    postgres_url: str, coalesce: Coalesce
) -> None:
    calls = [make_entry(f"held-{number}", "call-1") for number in range(2)]
    async with (
        open_store(postgres_url, run="run-1", coalesce=coalesce) as store,
        AsyncExitStack() as others_connections,
    ):
        await store.source.freeze("warm-up")
        # The same bytes from a client that stopped before its commit, as the repeat of a request on another host.
        early = []
        for call in calls:
            connection = await asyncpg.connect(postgres_url)
            others_connections.push_async_callback(connection.close)
            early.append(connection.transaction())
            await early[-1].start()
            key, stamp = RolloutKey("run-1", call.rollout_id), Stamp.make(now(), "another host")
            sql, parameters = TOGETHER[ENTRIES].statement(
                [new_call(key, call, pack_entry(call), stamp, None)]
            )
            assert len(await connection.fetch(sql, *parameters)) == 1
        late = [asyncio.create_task(store.sink.put(call)) for call in calls]
        await some_wait(postgres_url, 1)
        for other in OTHERS.values():
            await other(store)
        assert not [task for task in late if task.done()]
        for transaction in early:
            await transaction.commit()
        await asyncio.gather(*late)
        assert (await store.source.freeze("held-0")).incomplete is False


async def test_staged_calls_that_are_being_removed_keep_no_lane(postgres_url: str) -> None:
    records = [stage("call-1", rollout=f"held-{number}").snapshot for number in range(6)]
    # More threads than those of asyncio.
    with SqlStagingStore(postgres_url, run="run-1") as store, ThreadPoolExecutor(len(records)) as threads:
        for record in records:
            assert store.stage(record).ok
        remover = await asyncpg.connect(postgres_url)
        try:
            removal = remover.transaction()
            await removal.start()
            await remover.execute("DELETE FROM staged_calls")
            late = [threads.submit(store.stage, record) for record in records]
            await some_wait(postgres_url, 1)
            other = stage("call-1", rollout="free").snapshot
            assert (await asyncio.to_thread(store.stage, other)).ok
            assert not [staging for staging in late if staging.done()]
            await removal.commit()
            assert [(await asyncio.wrap_future(staging)).error for staging in late] == [None] * len(late)
        finally:
            await remover.close()
        assert store.fetch([f"held-{number}/call-1" for number in range(6)])


async def test_a_freeze_keeps_its_place_before_later_writes_however_often_it_waits(postgres_url: str) -> None:
    async with open_store(postgres_url, run="run-1", pool_size=1) as store:
        await store.sink.put(make_entry("held", "call-1"))
        async with holding(postgres_url, "run-1", ["held"]) as let_go:
            freezing = asyncio.create_task(store.source.freeze("held"))
            await some_wait(postgres_url, 1)
            late = asyncio.create_task(store.sink.put(make_entry("held", "late")))
            while not store.stats()["retries_lock"]:
                await store.sink.put(make_entry("free", "call-1"))
            await let_go()
            assert [entry.model_call_id for entry in (await freezing).entries] == ["call-1"]
            with pytest.raises(TokenCaptureFrozenError):
                await late


async def test_who_waits_for_a_held_rollout_until_the_deadline_is_told_so(postgres_url: str) -> None:
    # Without a connection to spare for one that waits, it is tried again and again.
    async with open_store(postgres_url, run="run-1", deadline=1.0, pool_size=2) as store:
        await store.sink.put(make_entry("held", "call-1"))
        async with holding(postgres_url, "run-1", ["held"]):
            with pytest.raises(StoreUnavailableError, match="another transaction holds what this one needs"):
                await store.source.freeze("held")


async def test_a_sqlite_file_that_somebody_writes_to_is_read_all_the_same(sqlite_url: str) -> None:
    async with open_store(sqlite_url, run="run-1", pool_size=1) as store:
        await store.sink.put(make_entry("free", "call-1"))
        other = sqlite3.connect(parse_url(sqlite_url).dsn, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        try:
            late = [asyncio.create_task(store.source.freeze(f"held-{number}")) for number in range(4)]
            for read in ("resolve", "manifest"):
                await OTHERS[read](store)
            assert not [task for task in late if task.done()]
        finally:
            other.close()
        await asyncio.gather(*late)
