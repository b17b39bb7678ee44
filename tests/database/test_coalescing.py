"""Concurrent calls share transactions, and nobody's call depends on its neighbours."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest
from sqlalchemy import Connection, NullPool, make_url
from sqlalchemy.ext.asyncio import create_async_engine

from tests.database.test_transactions import Points, connection_lost, failing, serialization_failure
from tests.support.entries import make_entry
from tests.support.relay import Relay
from tests.support.rows import rows_of, run_sql
from tokencustody import (
    CaptureStore,
    SqlTokenSink,
    TokenCaptureFrozenError,
    TokenCaptureRetiredError,
    TokenEntry,
    open_store,
)
from tokencustody.database import coalescing
from tokencustody.database.coalescing import Coalesce
from tokencustody.database.registry import open_engines
from tokencustody.database.transactions import Database
from tokencustody.errors import InvalidRecordError, PayloadConflictError, StoreUnavailableError
from tokencustody.schema import tables
from tokencustody.states import FenceState, VersionEvent
from tokencustody.store.base import now
from tokencustody.txn.fence import RolloutKey, Stamp, advance_txn, lock_fence_txn

Batches = list[list[tuple[str, str, str]]]

every_mode = pytest.mark.parametrize("coalesce", list(Coalesce))


def call(rollout_id: str, model_call_id: str = "call-1", **fields: Any) -> TokenEntry:
    return make_entry(rollout_id, model_call_id, **fields)


def one_lane(url: str, **options: Any) -> CaptureStore:
    """Return a store that runs one batch at a time, whatever the run's default."""
    return open_store(url, pool_size=1, coalesce=Coalesce.PROCESS, **options)


async def turns(number: int = 20) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Batches:
    """The keys of the calls of each shared transaction, in the order in which they started."""
    seen: Batches = []
    write_shared = Database._write_shared

    async def watched(self: Any, engines: Any, write: Any, items: Sequence[Any], give_up: float) -> Any:
        seen.append([item.key for item in items])
        return await write_shared(self, engines, write, items, give_up)

    monkeypatch.setattr(Database, "_write_shared", watched)
    return seen


@asynccontextmanager
async def one_batch(store: CaptureStore, faults: Points, batches: Batches) -> AsyncIterator[None]:
    """What is put inside waits for the only lane, and so goes into one batch when this ends.

    `store` has a pool of one connection, and with it one lane.
    """
    held, go_on = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        del faults["before commit"]
        held.set()
        await go_on.wait()

    faults["before commit"] = hold
    plug = asyncio.create_task(store.sink.put(call("plug", f"call-{len(batches)}")))
    await held.wait()
    try:
        yield
        await turns()
    finally:
        go_on.set()
    await plug


def start(*puts: Awaitable[Any]) -> list[asyncio.Task[Any]]:
    return [asyncio.ensure_future(put) for put in puts]


async def outcomes(tasks: Sequence[asyncio.Task[Any]]) -> list[type[BaseException] | None]:
    return [
        None if answer is None else type(answer)
        for answer in await asyncio.gather(*tasks, return_exceptions=True)
    ]


async def stored(url: str) -> set[tuple[str, str]]:
    return {
        (row["rollout_id"], row["model_call_id"])
        for row in await rows_of(url, tables.entries)
        if row["rollout_id"] != "plug"
    }


async def test_a_call_that_cannot_be_stored_fails_alone_and_takes_no_neighbour_with_it(
    store_url: str, faults: Points, batches: Batches
) -> None:
    async with one_lane(store_url) as store:
        await store.sink.put(call("known", model="first"))
        await store.sink.put(call("frozen"))
        await store.source.freeze("frozen")
        await store.source.retire(["retired"])
        async with one_batch(store, faults, batches):
            puts = start(
                store.sink.put(call("new")),
                store.sink.put(call("known", model="other")),
                store.sink.put(call("known", "call-2")),
                store.sink.put(call("frozen", "late")),
                store.sink.put(call("known", model="first")),
                store.sink.put(call("retired", "late")),
                store.sink.put(call("bad").model_copy(update={"generation_token_ids": [-1, 0, 0]})),
                store.sink.put(call("bad")),
            )
        assert await outcomes(puts) == [
            None,
            PayloadConflictError,
            None,
            TokenCaptureFrozenError,
            None,
            TokenCaptureRetiredError,
            InvalidRecordError,
            None,
        ]
        assert len(batches[-1]) == 7  # the invalid one never came so far
        assert await stored(store_url) == {
            ("new", "call-1"),
            ("known", "call-1"),
            ("known", "call-2"),
            ("frozen", "call-1"),
            ("bad", "call-1"),
        }
        for rollout, incomplete in (("new", False), ("known", True), ("frozen", False), ("bad", False)):
            assert (await store.source.freeze(rollout)).incomplete == incomplete


async def test_a_closed_fence_refuses_the_intents_of_its_rollout_only(
    store_url: str, faults: Points, batches: Batches
) -> None:
    async with one_lane(store_url) as store:
        await store.source.freeze("frozen")
        async with one_batch(store, faults, batches):
            begun = start(
                *(store.sink.begin_call(each, "call-1") for each in ("one", "frozen", "two", "one"))
            )
        assert await outcomes(begun) == [None, TokenCaptureFrozenError, None, None]
        intents = {row["rollout_id"] for row in await rows_of(store_url, tables.intents)}
        assert intents == {"one", "two"}


async def test_the_same_call_several_times_in_one_batch_is_stored_once(
    store_url: str, faults: Points, batches: Batches
) -> None:
    async with one_lane(store_url) as store:
        async with one_batch(store, faults, batches):
            puts = start(
                store.sink.put(call("one", model="first")),
                store.sink.put(call("one", model="first")),
                store.sink.put(call("one", model="second")),
                store.sink.put(call("one", model="first")),
                store.sink.put(call("one", model="third")),
            )
        assert await outcomes(puts) == [None, None, PayloadConflictError, None, PayloadConflictError]
        assert len(batches[1]) == 5
        snapshot = await store.source.freeze("one")
        assert [entry.model for entry in snapshot.entries] == ["first"]
        assert (snapshot.incomplete, snapshot.version) == (True, 3)


async def test_two_runs_share_a_batch_and_stay_apart(
    store_url: str, faults: Points, batches: Batches
) -> None:
    async with (
        one_lane(store_url) as here,
        one_lane(store_url, run="there") as there,
    ):
        await there.source.freeze("frozen-there")
        async with one_batch(here, faults, batches):
            puts = start(
                here.sink.put(call("one", model="here")),
                there.sink.put(call("one", model="there")),
                here.sink.put(call("frozen-there")),
                there.sink.put(call("frozen-there")),
            )
        assert await outcomes(puts) == [None, None, None, TokenCaptureFrozenError]
        assert len(batches[-1]) == 4
        assert [entry.model for entry in (await here.source.freeze("one")).entries] == ["here"]
        assert [entry.model for entry in (await there.source.freeze("one")).entries] == ["there"]


async def test_a_batch_that_fails_as_a_whole_is_run_again_one_by_one(
    store_url: str, faults: Points, batches: Batches
) -> None:
    async with one_lane(store_url) as store:
        async with one_batch(store, faults, batches):
            puts = start(*(store.sink.put(call(f"rollout-{n}")) for n in range(5)))
            await turns()
            faults["before commit"] = failing(1, lambda: KeyError("a bug"))
        assert await outcomes(puts) == [None] * 5
        assert list(map(len, batches)) == [1, 5, 1, 1, 1, 1, 1]
        assert len(await stored(store_url)) == 5


@pytest.mark.parametrize("error", [connection_lost, serialization_failure])
@pytest.mark.parametrize("frozen_meanwhile", [False, True])
async def test_a_batch_whose_answer_was_lost_is_acknowledged_to_all_and_happened_once(
    store_url: str,
    faults: Points,
    batches: Batches,
    frozen_meanwhile: bool,
    error: Callable[[], BaseException],
) -> None:
    async def lose() -> None:
        if len(batches[-1]) == 1:
            return
        faults.clear()
        if frozen_meanwhile:
            async with open_store(store_url, pool_size=2) as trainer:
                assert len((await trainer.source.freeze("one")).entries) == 3
        raise error()

    async with one_lane(store_url) as store:
        async with one_batch(store, faults, batches):
            puts = start(
                *(store.sink.put(call("one", f"call-{n}")) for n in range(3)),
                store.sink.put(call("two")),
                store.sink.put(call("one", "call-0")),
            )
            await turns()
            faults["after commit, before acknowledgement"] = lose
        repeat = TokenCaptureFrozenError if frozen_meanwhile else None
        assert await outcomes(puts) == [None, None, None, None, repeat]
        assert len(batches[1]) == 5
        snapshot = await store.source.freeze("one")
        assert (len(snapshot.entries), snapshot.incomplete, snapshot.version) == (3, False, 1)
        assert len((await store.source.freeze("two")).entries) == 1


KILLED_BEFORE_ITS_ANSWER = """
import asyncio, os, signal, sys
from tests.support.entries import make_entry
from tokencustody import open_store
from tokencustody.database.faults import FAULT_POINTS

async def main():
    held, go_on = asyncio.Event(), asyncio.Event()

    async def hold():
        FAULT_POINTS.clear()
        held.set()
        await go_on.wait()
        FAULT_POINTS["after commit, before acknowledgement"] = first

    async def first():
        FAULT_POINTS["after commit, before acknowledgement"] = kill

    async def kill():
        print(store.stats()["shared_transactions"], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    store = open_store(sys.argv[1], pool_size=1)
    await store.source.freeze("warm-up")
    FAULT_POINTS["before commit"] = hold
    plug = asyncio.create_task(store.sink.put(make_entry("plug")))
    await held.wait()
    puts = [asyncio.create_task(store.sink.put(make_entry(f"rollout-{n % 3}", f"call-{n}"))) for n in range(9)]
    for _ in range(20):
        await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(plug, *puts)

asyncio.run(main())
"""


async def test_a_process_that_is_killed_between_commit_and_acknowledgement_leaves_the_whole_batch(
    store_url: str,
) -> None:
    command = [sys.executable, "-c", KILLED_BEFORE_ITS_ANSWER, store_url]
    ended = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=600, check=False
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "2\n"), ended.stderr
    assert await stored(store_url) == {(f"rollout-{n % 3}", f"call-{n}") for n in range(9)}
    async with open_store(store_url) as store:
        await asyncio.gather(*(store.sink.put(call(f"rollout-{n % 3}", f"call-{n}")) for n in range(9)))
        for number in range(3):
            snapshot = await store.source.freeze(f"rollout-{number}")
            assert (len(snapshot.entries), snapshot.incomplete, snapshot.version) == (3, False, 1)


@pytest.mark.parametrize("whom", ["the first", "one", "the last", "all"])
async def test_a_call_that_is_cancelled_at_any_point_leaves_its_batch_to_the_others(
    store_url: str, faults: Points, batches: Batches, whom: str
) -> None:
    async with one_lane(store_url) as store:
        suspensions, ended = 0, False
        while not ended:
            rollouts = [f"rollout-{suspensions}-{n}" for n in range(4)]
            async with one_batch(store, faults, batches):
                puts = start(*(store.sink.put(call(rollout)) for rollout in rollouts))
            for _ in range(suspensions):
                await asyncio.sleep(0)
            ended = all(put.done() for put in puts)
            assert suspensions < 100_000
            chosen = {"the first": puts[:1], "one": puts[1:2], "the last": puts[3:], "all": puts}[whom]
            for put in chosen:
                put.cancel()
            for put, answer in zip(puts, await asyncio.gather(*puts, return_exceptions=True), strict=True):
                assert answer is None or (put in chosen and isinstance(answer, asyncio.CancelledError)), repr(
                    answer
                )
            (engines,) = open_engines()
            assert engines.running == engines.checked_out() == 0
            there = {rollout for rollout, _ in await stored(store_url)} & set(rollouts)
            # A batch is a transaction: it is there as a whole or not at all.
            assert there == set(rollouts) or (whom == "all" and not there)
            # Every turn at first; most later ones are spent waiting for the database.
            suspensions += 1 + suspensions // 10
        assert sum(len(batch) == 4 for batch in batches) > 3


async def test_callers_wait_when_too_many_bytes_do_and_then_go_on_in_their_order(
    store_url: str, faults: Points, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with one_lane(store_url) as store:
        await store.sink.put(call("warm-up"))
        (row,) = await rows_of(store_url, tables.entries)
        monkeypatch.setattr(coalescing, "_MOST_WAITING_BYTES", 5 * len(row["payload"]))
        async with one_batch(store, faults, batches):
            puts = start(*(store.sink.put(call("one", f"call-{n:02}")) for n in range(30)))
        assert await outcomes(puts) == [None] * 30
        order = [key[2] for batch in batches[2:] for key in batch]
        assert order == [f"call-{n:02}" for n in range(30)]
        assert max(map(len, batches)) <= 5
        assert len((await store.source.freeze("one")).entries) == 30


@pytest.mark.parametrize("room", [5, 1000])
async def test_closing_waits_for_every_call_in_the_queue_and_outside(
    store_url: str, faults: Points, batches: Batches, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    store = one_lane(store_url)
    await store.sink.put(call("warm-up"))
    (row,) = await rows_of(store_url, tables.entries)
    monkeypatch.setattr(coalescing, "_MOST_WAITING_BYTES", room * len(row["payload"]))
    async with one_batch(store, faults, batches):
        puts = start(*(store.sink.put(call("one", f"call-{n}")) for n in range(20)))
        await turns()
        closing = asyncio.create_task(store.close())
        await turns()
        assert not closing.done()
    await closing
    assert open_engines() == []
    assert await outcomes(puts) == [None] * 20
    assert len(await stored(store_url)) == 21


@every_mode
async def test_what_one_transaction_holds_is_what_the_mode_allows(
    store_url: str, batches: Batches, coalesce: Coalesce
) -> None:
    async with open_store(store_url, coalesce=coalesce) as store:
        await store.sink.mark_incomplete("warm-up")
        await asyncio.gather(
            *(store.sink.put(call(f"rollout-{n % 5}", f"call-{n}")) for n in range(40)),
            *(store.sink.begin_call(f"rollout-{n % 5}", f"call-{n}") for n in range(40)),
        )
        stats = store.stats()
        gathers = coalesce is not Coalesce.ROLLOUT or store_url.startswith("sqlite")
        assert stats["shared_calls"] == sum(map(len, batches)) == (80 if gathers else 0)
        assert stats["shared_transactions"] == len(batches)
    match coalesce:
        case Coalesce.ROLLOUT if not gathers:
            assert stats["transactions"] == 1 + 80
        case Coalesce.PROCESS | Coalesce.ROLLOUT:
            assert max(len({key[:2] for key in batch}) for batch in batches) == 5
            assert len(batches) <= 10
        case Coalesce.OFF:
            assert max(map(len, batches)) == 1


@every_mode
async def test_one_rollout_in_every_mode_is_whole(store_url: str, coalesce: Coalesce) -> None:
    async with open_store(store_url, coalesce=coalesce) as store:
        await asyncio.gather(*(store.sink.put(call("one", f"call-{n:03}")) for n in range(150)))
        snapshot = await store.source.freeze("one")
        assert [entry.model_call_id for entry in snapshot.entries] == [f"call-{n:03}" for n in range(150)]
        assert (snapshot.incomplete, snapshot.version) == (False, 1)


@every_mode
async def test_a_lone_call_is_one_transaction(store_url: str, coalesce: Coalesce) -> None:
    async with open_store(store_url, coalesce=coalesce) as store:
        await store.sink.mark_incomplete("warm-up")
        before = store.stats()
        for number in range(3):
            await store.sink.put(call("one", f"call-{number}"))
            await store.sink.begin_call("one", f"call-{number}")
        after = store.stats()
        changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
        changed.pop("log_bytes", None)  # of a SQLite file
        shared = dict.fromkeys(("shared_calls", "shared_transactions"), 6)
        gathers = coalesce is not Coalesce.ROLLOUT or store_url.startswith("sqlite")
        assert changed == {"transactions": 6} | (shared if gathers else {})


@pytest.mark.parametrize("coalesce", [Coalesce.PROCESS, Coalesce.OFF])
async def test_a_lone_call_is_one_round_trip_on_postgresql(postgres_url: str, coalesce: Coalesce) -> None:
    async with Relay.to(postgres_url) as relay, open_store(relay.url, coalesce=coalesce) as store:
        parent = call("one", "warm-up")
        await store.sink.put(parent)
        await store.sink.begin_call("one", "warm-up")
        child = call("one", "child", prompt=[10, 11, 12, 13, 30, 31, 32, 1], parent="warm-up")
        for kind, operation in (
            ("a root", lambda: store.sink.put(call("one", "root"))),
            ("another rollout", lambda: store.sink.put(call("two", "root"))),
            ("a child of a known parent", lambda: store.sink.put(child)),
            ("an intent", lambda: store.sink.begin_call("one", "call-9")),
        ):
            before = relay.round_trips
            await operation()
            assert relay.round_trips - before == 1, kind
        shared = {
            row["model_call_id"]: row["shared_len"] for row in await rows_of(postgres_url, tables.entries)
        }
        assert shared["child"] == 7


@every_mode
async def test_calls_that_wait_behind_others_end_at_their_own_deadline(
    store_url: str, faults: Points, coalesce: Coalesce
) -> None:
    async with open_store(store_url, deadline=1.0, coalesce=coalesce) as store:
        await store.source.freeze("warm-up")
        faults["before commit"] = failing(10**9, serialization_failure)
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def put(number: int) -> float:
            with pytest.raises(StoreUnavailableError):
                await store.sink.put(call(f"rollout-{number}"))
            return loop.time() - began

        alone = await put(40)
        began = loop.time()
        waited = await asyncio.gather(*(put(number) for number in range(40)))
        # One after the other they would take forty times as long as one alone.
        assert max(waited) < 20 * alone, (alone, waited)


@asynccontextmanager
async def held_fence(url: str, rollout_id: str) -> AsyncIterator[None]:
    """Hold a rollout's fence as a freeze does that has not committed. Its first event opens the fence, if need be."""
    key, stamp = RolloutKey("default", rollout_id), Stamp.make(now(), "somebody else")

    def freeze(connection: Connection) -> None:
        fence = lock_fence_txn(connection, key, stamp)
        advance_txn(
            connection,
            key,
            fence,
            VersionEvent.FREEZE,
            stamp,
            state=FenceState.FROZEN,
            snapshot_id="a-snapshot",
            frozen_at=stamp.at,
        )

    engine = create_async_engine(make_url(url).set(drivername="postgresql+asyncpg"), poolclass=NullPool)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(freeze)
            yield
    finally:
        await engine.dispose()


@every_mode
@pytest.mark.parametrize("is_known", [True, False], ids=["an open rollout", "a new rollout"])
@pytest.mark.parametrize("waiting", [1, 12])
async def test_calls_of_a_rollout_that_another_process_holds_do_not_hold_up_other_rollouts(
    postgres_url: str, coalesce: Coalesce, is_known: bool, waiting: int
) -> None:
    async with open_store(postgres_url, coalesce=coalesce) as store:
        await store.sink.put(call("held" if is_known else "another"))
        async with held_fence(postgres_url, "held"):
            held = start(*(store.sink.put(call("held", f"late-{n}")) for n in range(waiting)))
            await turns()
            for which in ("first", "second"):
                await asyncio.gather(*(store.sink.put(call(f"other-{n}", which)) for n in range(10)))
            assert not any(put.done() for put in held)
        assert await outcomes(held) == [TokenCaptureFrozenError] * waiting


@pytest.mark.parametrize("coalesce", [Coalesce.PROCESS, Coalesce.OFF])
async def test_a_fence_whose_row_somebody_has_locked_does_not_hold_up_other_rollouts(
    postgres_url: str, coalesce: Coalesce
) -> None:
    async with open_store(postgres_url, coalesce=coalesce) as store:
        await store.sink.put(call("held"))
        holder = await asyncpg.connect(postgres_url)
        try:
            async with holder.transaction():
                await holder.execute("SELECT 1 FROM fences WHERE rollout_id = 'held' FOR UPDATE")
                held = start(*(store.sink.put(call("held", f"late-{n}")) for n in range(12)))
                await turns()
                await asyncio.gather(*(store.sink.put(call(f"other-{n}")) for n in range(10)))
        finally:
            await holder.close()
        assert await outcomes(held) == [None] * 12


GATE = 4711
# Stands for the server's own function, and lets the test stop the statement between its snapshot and its locks.
STOPPING_LOCK = f"""
CREATE FUNCTION public.pg_try_advisory_xact_lock_shared(number bigint) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_catalog.pg_advisory_xact_lock({GATE});
    RETURN pg_catalog.pg_try_advisory_xact_lock_shared(number);
END $$
"""


@asynccontextmanager
async def a_put_between_its_snapshot_and_its_lock(
    url: str,
    put: Callable[[CaptureStore], Awaitable[None]],
    before: Callable[[CaptureStore], Awaitable[None]],
) -> AsyncIterator[asyncio.Task[None]]:
    await run_sql(url, STOPPING_LOCK)
    separator = "&" if "?" in url else "?"
    async with open_store(f"{url}{separator}options=-csearch_path%3Dpublic,pg_catalog") as store:
        await before(store)
        gate = await asyncpg.connect(url)
        try:
            await gate.execute(f"SELECT pg_advisory_lock({GATE})")
            task = asyncio.ensure_future(put(store))
            while not await gate.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
                assert not task.done()
            yield task
            await gate.execute(f"SELECT pg_advisory_unlock({GATE})")
            await asyncio.wait([task])
        finally:
            await gate.close()


@pytest.mark.parametrize("fence", ["freeze", "retire"])
@pytest.mark.parametrize("is_known", [True, False], ids=["an open rollout", "a new rollout"])
async def test_a_fence_that_is_raised_while_a_statement_runs_is_never_passed(
    postgres_url: str, fence: str, is_known: bool
) -> None:
    async def before(store: CaptureStore) -> None:
        await store.sink.put(call("one" if is_known else "another"))

    late = a_put_between_its_snapshot_and_its_lock(
        postgres_url, lambda store: store.sink.put(call("one", "late")), before
    )
    async with late as putting, open_store(postgres_url, pool_size=1) as trainer:
        if fence == "freeze":
            assert len((await trainer.source.freeze("one")).entries) == is_known
        else:
            await trainer.source.retire(["one"])
    assert isinstance(putting.exception(), TokenCaptureFrozenError)  # which the retired one is too
    assert ("one", "late") not in await stored(postgres_url)


@pytest.mark.parametrize("same_tokens", [True, False])
async def test_a_parent_that_is_replaced_while_a_statement_runs_is_never_leaned_on(
    postgres_url: str, same_tokens: bool
) -> None:
    child = call("one", "child", prompt=[10, 11, 12, 13, 30, 31, 32, 1], parent="call-1")
    late = a_put_between_its_snapshot_and_its_lock(
        postgres_url, lambda store: store.sink.put(child), lambda store: store.sink.put(call("one"))
    )
    async with late as putting, open_store(postgres_url, pool_size=1) as trainer:
        await trainer.source.delete(["one"])
        await trainer.sink.put(call("one", generation=[30, 31, 32] if same_tokens else [7, 7, 7]))
    assert putting.exception() is None
    async with open_store(postgres_url) as store:
        snapshot = await store.source.freeze("one")
        assert child in snapshot.entries


async def test_no_call_fails_because_the_server_has_just_closed_its_connection(postgres_url: str) -> None:
    async with open_store(postgres_url, pool_size=1) as store:
        admin = await asyncpg.connect(postgres_url)
        # Often, because what the driver says depends on how much of the end it has read by then.
        for number in range(60):
            await store.sink.begin_call("one", f"call-{number}")
            await admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            await turns(number % 8)
            await store.sink.put(call("one", f"call-{number}"))
        await admin.close()
        snapshot = await store.source.freeze("one")
        assert (len(snapshot.entries), snapshot.incomplete) == (60, False)


def test_an_unknown_mode_is_refused_before_anything_is_opened() -> None:
    with pytest.raises(InvalidRecordError, match="coalesce must be one of process, rollout, off"):
        SqlTokenSink("captures.db", coalesce="batch")
