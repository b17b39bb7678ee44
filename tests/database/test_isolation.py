"""With `isolation="serializable"` PostgreSQL itself says of each transaction of a store that it is serializable."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import asyncpg
import pytest
from sqlalchemy import Connection, Engine, event

from tests.database.test_transactions import Points
from tests.faults.methods import METHODS
from tests.support.entries import REQUEST, continuation, make_entry
from tests.support.ledger import make_commit
from tests.support.staged import stage
from tokencustody import (
    CaptureStore,
    SqlLineageStore,
    SqlStagingStore,
    SqlTokenSink,
    SqlTokenSource,
    open_store,
)
from tokencustody.database.connecting import Driver, connect
from tokencustody.database.postgresql import PostgresqlEngines
from tokencustody.database.turns import turns_of
from tokencustody.database.url import parse_url
from tokencustody.errors import InvalidRecordError, StoreUnavailableError
from tokencustody.states import Isolation

Call = Callable[[CaptureStore], Awaitable[Any]]

NEXT = continuation(REQUEST, "Paris.", "And of Spain?")
KEY = "staged/call-1"


def in_thread(call: Callable[[SqlStagingStore], Any]) -> Call:
    return lambda store: asyncio.to_thread(call, store.staging)


# By the name of each method, beside those that write: they are `METHODS`.
READS: dict[str, Call] = {
    "resolve": lambda store: store.lineage.resolve("read", NEXT),
    "manifest": lambda store: store.lineage.manifest("read"),
    "has_rows": lambda store: store.lineage.has_rows("read"),
    "export_rows": lambda store: store.lineage.export_rows("read"),
    "fetch": in_thread(lambda staging: staging.fetch([KEY])),
    "fetch_extras": in_thread(lambda staging: staging.fetch_extras([KEY])),
    "fetch_attachments": in_thread(lambda staging: staging.fetch_attachments(KEY)),
    "fetch_prefix_token_ids": in_thread(lambda staging: staging.fetch_prefix_token_ids([KEY])),
    "orphans": in_thread(lambda staging: staging.orphans()),
}
# What the names of `METHODS` say in other words.
WRITES = {"put", "begin_call", "refuse_call", "mark_incomplete", "freeze", "drop", "retire", "delete"}
WRITES |= {"put_continuation", "record", "record_failure", "import_rows", "stage"}
# These have no transaction.
NO_TRANSACTION = {"close", "stats", "is_process_shared"}


class Recorder:
    """What the server said of each transaction, and the statements that it got beside one."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []
        self.beside: list[str] = []

    def ask(self, connection: Connection) -> None:
        asked = "SELECT current_setting('transaction_isolation'), current_setting('transaction_read_only')"
        self.said.append(tuple(connection.exec_driver_sql(asked).one()))  # type: ignore[arg-type]


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Ask the server within each transaction before its end, and note what goes past them, in this process."""
    recorder = Recorder()
    make = PostgresqlEngines._connect

    async def connected(engines: PostgresqlEngines) -> Driver:
        driver = await make(engines)
        within = False

        def note(query: Any) -> None:
            nonlocal within
            if query.query.startswith("BEGIN"):
                within = True
            elif query.query.startswith(("COMMIT", "ROLLBACK")):
                within = False
            elif not within:
                recorder.beside.append(query.query)

        driver.add_query_logger(note)
        return driver

    def noted(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
            recorder.beside.append(statement)

    PostgresqlEngines._connect = connected  # type: ignore[method-assign]
    event.listen(Engine, "commit", recorder.ask)
    event.listen(Engine, "before_cursor_execute", noted)
    try:
        yield recorder
    finally:
        PostgresqlEngines._connect = make  # type: ignore[method-assign]
        event.remove(Engine, "commit", recorder.ask)
        event.remove(Engine, "before_cursor_execute", noted)


def is_of_turns(statement: str) -> bool:
    """Return whether a statement takes or gives back a lock, and touches no table."""
    return "advisory" in statement and " FROM " not in statement


def test_every_method_of_the_stores_is_tried_here() -> None:
    methods = {
        name
        for store in (SqlTokenSink, SqlTokenSource, SqlLineageStore, SqlStagingStore)
        for name, _ in inspect.getmembers(store, inspect.isfunction)
        if not name.startswith("_")
    }
    assert methods - NO_TRANSACTION == READS.keys() | WRITES
    assert METHODS.keys() >= WRITES


@pytest.mark.parametrize("name", METHODS)
async def test_the_server_says_of_each_transaction_that_writes_that_it_is_serializable(
    postgres_url: str, name: str
) -> None:
    method = METHODS[name]
    with recorded() as recorder:
        async with open_store(postgres_url, isolation=Isolation.SERIALIZABLE) as store:
            await method.prepare(store, "rollout-1")
            recorder.said.clear()
            recorder.beside.clear()
            await method.run(store, "rollout-1")
    assert ("serializable", "off") in recorder.said
    assert {level for level, _ in recorder.said} == {"serializable"}
    assert [statement for statement in recorder.beside if not is_of_turns(statement)] == []


async def test_the_server_says_of_each_transaction_that_reads_that_it_is_serializable(
    postgres_url: str,
) -> None:
    with recorded() as recorder:
        async with open_store(postgres_url, isolation=Isolation.SERIALIZABLE) as store:
            await store.sink.put(make_entry("read"))
            await store.lineage.record(make_commit("read"))
            staged = stage("call-1", rollout="staged").snapshot
            assert (await asyncio.to_thread(store.staging.stage, staged, attachments={"a": b"1"})).ok
            for name, call in READS.items():
                recorder.said.clear()
                recorder.beside.clear()
                await call(store)
                assert recorder.said, name
                assert set(recorder.said) == {("serializable", "on")}, name
                assert recorder.beside == [], name


async def test_at_the_usual_level_the_server_says_another_one(postgres_url: str) -> None:
    with recorded() as recorder:
        async with open_store(postgres_url) as store:
            await store.source.freeze("rollout-1")
            await store.lineage.manifest("rollout-1")
            await store.sink.put(make_entry("rollout-2"))
    assert set(recorder.said) == {("read committed", "off"), ("repeatable read", "on")}
    # The single statement is a transaction by itself.
    assert any("INSERT INTO entries" in statement for statement in recorder.beside)


@pytest.mark.parametrize("level", Isolation)
async def test_a_freeze_sees_what_a_writer_of_another_level_committed_while_it_waited(
    postgres_url: str, faults: Points, level: Isolation
) -> None:
    (other,) = set(Isolation) - {level}
    # A transaction of several statements can be held between them.
    async with (
        open_store(postgres_url, coalesce="rollout", isolation=other) as store,
        open_store(postgres_url, pool_size=5, isolation=level) as trainer,
    ):
        # A fence that opens meanwhile would be a row that the freeze cannot pass over.
        await store.sink.put(make_entry())
        await trainer.source.freeze("warm-up")
        before_commit, go_on = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            faults.clear()
            before_commit.set()
            await go_on.wait()

        faults["before commit"] = hold
        putting = asyncio.create_task(store.sink.put(make_entry(model_call_id="call-2")))
        await before_commit.wait()
        freezing = asyncio.create_task(trainer.source.freeze("rollout-1"))
        watcher = await asyncpg.connect(postgres_url)
        while not await watcher.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
            assert not freezing.done()
        await watcher.close()
        go_on.set()
        await putting
        assert [entry.model_call_id for entry in (await freezing).entries] == ["call-1", "call-2"]


async def test_a_serialization_failure_at_the_commit_is_tried_again_and_nothing_was_written(
    postgres_url: str, faults: Points
) -> None:
    other = await asyncpg.connect(postgres_url)

    async def contradict() -> None:
        # It has seen nothing of the put, and the put nothing of it: neither order explains both.
        faults.clear()
        async with other.transaction(isolation="serializable"):
            assert await other.fetchval("SELECT count(*) FROM entries") == 0
            await other.execute(
                "INSERT INTO fences (run, rollout_id, state, version, incomplete, opened_at)"
                " VALUES ('default', 'rollout-0', 'open', 0, false, now())"
            )

    async with open_store(postgres_url, isolation=Isolation.SERIALIZABLE) as store:
        await store.source.freeze("warm-up")
        before = store.stats()
        faults["before commit"] = contradict
        await store.sink.put(make_entry())
        after = store.stats()
        assert after["retries_serialization"] == before["retries_serialization"] + 1
        assert after["unknown_commits"] == before["unknown_commits"]
        assert (
            await other.fetchval("SELECT count(*) FROM snapshot_versions WHERE rollout_id = 'rollout-1'") == 1
        )
        snapshot = await store.source.freeze("rollout-1")
        assert ([entry.model_call_id for entry in snapshot.entries], snapshot.version) == (["call-1"], 1)
    await other.close()


async def test_no_turn_outlasts_its_transaction(postgres_url: str) -> None:
    async with open_store(postgres_url, isolation=Isolation.SERIALIZABLE, pool_size=1) as store:
        await asyncio.gather(*(store.sink.put(make_entry(f"rollout-{number}")) for number in range(5)))
        with pytest.raises(ValueError, match="differing: model"):
            await store.sink.put(make_entry("rollout-0", model="other"))
        watcher = await asyncpg.connect(postgres_url)
        assert await watcher.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0
        await watcher.close()


async def test_the_server_ends_a_session_that_fell_silent_with_its_turn(postgres_url: str) -> None:
    silent = await connect(parse_url(postgres_url), 10.0)
    silent.longest_silence = 0.2
    async with turns_of(silent, patience=0.0) as turns:
        await turns.take(7)
        other = await asyncpg.connect(postgres_url)
        await other.execute("SELECT pg_advisory_lock(7)", timeout=60)
        await other.close()
    silent.terminate()


async def test_a_session_that_gave_its_turns_back_may_be_idle_again(postgres_url: str) -> None:
    driver = await connect(parse_url(postgres_url), 10.0)
    before = await driver.fetchval("SHOW idle_session_timeout")
    driver.longest_silence = 8.0
    async with turns_of(driver, patience=0.0) as turns:
        await turns.take(7)
        assert await driver.fetchval("SHOW idle_session_timeout") == "8s"
    assert await driver.fetchval("SHOW idle_session_timeout") == before
    await driver.close()


async def test_behind_a_pooler_it_is_refused_at_once(postgres_url: str) -> None:
    pooled = f"{postgres_url}{'&' if '?' in postgres_url else '?'}statement_cache_size=0"
    async with open_store(pooled, isolation=Isolation.SERIALIZABLE) as store:
        with pytest.raises(StoreUnavailableError, match="behind a pooler"):
            await store.source.freeze("rollout-1")


async def test_on_sqlite_it_changes_nothing(sqlite_url: str) -> None:
    async with open_store(sqlite_url, isolation=Isolation.SERIALIZABLE) as store:
        calls = [make_entry(model_call_id=f"call-{number}") for number in range(20)]
        await asyncio.gather(*map(store.sink.put, calls))
        assert store.stats()["shared_calls"] == 20
        assert len((await store.source.freeze("rollout-1")).entries) == 20


def test_another_level_is_refused() -> None:
    with pytest.raises(
        InvalidRecordError, match="isolation must be one of read committed, serializable, not"
    ):
        SqlTokenSink("captures.db", isolation="repeatable read")
