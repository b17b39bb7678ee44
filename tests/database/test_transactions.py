"""Durable before return, whatever the connection does: retries, lost commits, deadlines, loops, forks, cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import pickle
import socket
import sqlite3
import subprocess
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy.exc import DBAPIError, OperationalError

from tests.support.entries import make_entry
from tests.support.rows import rows_of
from tokencustody import CaptureStore, SqlTokenSink, SqlTokenSource, open_store
from tokencustody.database import faults as faults_module
from tokencustody.database.faults import SQLITE_CODES, SQLSTATES, Cause, Failure, Fault, classify, meaning
from tokencustody.database.registry import open_engines
from tokencustody.database.url import parse_url
from tokencustody.errors import (
    InvalidRecordError,
    PayloadConflictError,
    StoreClosedError,
    StoreUnavailableError,
)
from tokencustody.schema import tables
from tokencustody.spill.replaying import Replayer

Points = dict[str, Callable[[], Awaitable[None]]]
Operation = Callable[[CaptureStore], Awaitable[object]]


class DriverError(Exception):
    """Stands for a driver's error where only its codes matter."""

    def __init__(self, sqlstate: str | None = None, sqlite_errorcode: int | None = None) -> None:
        super().__init__("driver says no")
        self.sqlstate = sqlstate
        self.sqlite_errorcode = sqlite_errorcode


def failing(times: int, error: Callable[[], BaseException]) -> Callable[[], Awaitable[None]]:
    """Return a fault that raises `times` times and then lets everything through."""
    left = times

    async def fault() -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise error()

    return fault


def serialization_failure() -> BaseException:
    return DBAPIError("COMMIT", {}, DriverError(sqlstate="40001"))


def connection_lost() -> BaseException:
    return asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")


WRITES: dict[str, tuple[Operation, int]] = {
    "put": (lambda s: s.sink.put(make_entry()), 1),
    "begin_call": (lambda s: s.sink.begin_call("rollout-1", "call-1"), 1),
    "refuse_call": (lambda s: s.sink.refuse_call("rollout-1", model_call_id="call-1", code="busy"), 2),
    "mark_incomplete": (lambda s: s.sink.mark_incomplete("rollout-1", "call-1"), 2),
    "freeze": (lambda s: s.source.freeze("rollout-1"), 2),
    "retire": (lambda s: s.source.retire(["rollout-1"]), 2),
}


@pytest.mark.serializable
@pytest.mark.quick("An unknown commit is settled by looking")
@pytest.mark.parametrize("point", ["before commit", "after commit, before acknowledgement"])
@pytest.mark.parametrize("error", [serialization_failure, connection_lost])
@pytest.mark.parametrize(("operation", "versions"), WRITES.values(), ids=WRITES)
async def test_a_write_that_failed_or_lost_its_answer_happens_exactly_once(
    store: CaptureStore,
    store_url: str,
    faults: Points,
    operation: Operation,
    versions: int,
    point: str,
    error: Callable[[], BaseException],
) -> None:
    faults[point] = failing(2, error)
    await operation(store)
    assert len(await rows_of(store_url, tables.snapshot_versions)) == versions


@pytest.mark.quick("An unknown commit is settled by looking")
async def test_a_lost_answer_never_becomes_a_false_conflict(store: CaptureStore, faults: Points) -> None:
    faults["after commit, before acknowledgement"] = failing(1, connection_lost)
    await store.sink.put(make_entry())
    snapshot = await store.source.freeze("rollout-1")
    assert (len(snapshot.entries), snapshot.incomplete) == (1, False)


@pytest.mark.serializable
async def test_a_real_conflict_whose_answer_was_lost_is_recorded_once(
    store: CaptureStore, store_url: str, faults: Points
) -> None:
    await store.sink.put(make_entry())
    faults["after commit, before acknowledgement"] = failing(2, connection_lost)
    with pytest.raises(PayloadConflictError):
        await store.sink.put(make_entry(model="other"))
    assert len(await rows_of(store_url, tables.failures)) == 1


async def test_a_removal_whose_answer_was_lost_still_says_what_it_removed(
    store: CaptureStore, faults: Points
) -> None:
    for remove in (store.source.retire, store.source.delete):
        await store.source.delete(["rollout-1"])
        await store.sink.put(make_entry())
        faults["after commit, before acknowledgement"] = failing(1, connection_lost)
        assert await remove(["rollout-1"]) == {"removed": ["rollout-1"], "absent": []}


async def test_a_drop_whose_answer_was_lost_is_still_true(store: CaptureStore, faults: Points) -> None:
    await store.sink.put(make_entry())
    snapshot = await store.source.freeze("rollout-1")
    faults["after commit, before acknowledgement"] = failing(1, connection_lost)
    assert await store.source.drop("rollout-1", snapshot.snapshot_id, snapshot.version)


async def test_retries_end_at_the_deadline_with_the_last_cause(store_url: str, faults: Points) -> None:
    async with open_store(store_url, deadline=1.0) as store:
        await store.source.freeze("another-rollout")
        faults["before commit"] = failing(10_000, serialization_failure)
        with pytest.raises(
            StoreUnavailableError, match=r"not available after \d+ tries: DriverError"
        ) as gave_up:
            await store.sink.put(make_entry())
        assert isinstance(gave_up.value.__cause__, DBAPIError)
        faults.clear()
        assert [row["rollout_id"] for row in await rows_of(store_url, tables.fences)] == ["another-rollout"]


async def test_an_error_of_ours_is_not_retried(store: CaptureStore, faults: Points) -> None:
    tries = 0

    async def count() -> None:
        nonlocal tries
        tries += 1
        raise RuntimeError("a bug")

    faults["before commit"] = count
    with pytest.raises(RuntimeError, match="a bug"):
        await store.sink.put(make_entry())
    assert tries == 1


async def test_a_killed_connection_is_replaced_and_the_write_succeeds(
    postgres_url: str, faults: Points
) -> None:
    async with open_store(postgres_url) as store:
        await store.sink.put(make_entry())

        async def kill_every_other_session() -> None:
            faults.clear()
            admin = await asyncpg.connect(postgres_url)
            await admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            await admin.close()

        faults["before commit"] = kill_every_other_session
        await store.sink.put(make_entry(model_call_id="call-2"))
        assert len((await store.source.freeze("rollout-1")).entries) == 2


async def test_a_busy_sqlite_file_is_waited_for(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        await store.sink.put(make_entry())
        blocker = sqlite3.connect(parse_url(sqlite_url).dsn, isolation_level=None, check_same_thread=False)
        blocker.execute("BEGIN IMMEDIATE")
        waiting = asyncio.create_task(store.sink.put(make_entry(model_call_id="call-2")))
        reading = await store.lineage.resolve("rollout-1", [{"role": "user", "content": "hi"}])
        assert reading.status == "root"  # readers do not wait for writers
        assert not waiting.done()
        blocker.execute("COMMIT")
        blocker.close()
        await waiting


async def test_a_sqlite_file_that_stays_busy_is_unavailable_at_the_deadline(sqlite_url: str) -> None:
    async with open_store(sqlite_url, deadline=0.5) as store:
        await store.sink.put(make_entry())
        blocker = sqlite3.connect(parse_url(sqlite_url).dsn, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailableError, match=r"captures\.db is not available"):
            await store.sink.put(make_entry(model_call_id="call-2"))
        blocker.close()


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_an_unreachable_server_is_named_without_the_password_within_the_deadline() -> None:
    port = closed_port()
    async with open_store(f"postgresql://alice:s3cret@127.0.0.1:{port}/captures", deadline=0.5) as store:
        started = asyncio.get_running_loop().time()
        with pytest.raises(StoreUnavailableError) as unreachable:
            await store.sink.put(make_entry())
        assert asyncio.get_running_loop().time() - started < 5
    chain: list[BaseException] = [unreachable.value]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    said = " ".join(f"{error!r} {error}" for error in chain) + repr(store)
    assert f"postgresql://alice@127.0.0.1:{port}/captures" in str(unreachable.value)
    assert "s3cret" not in said


async def test_a_server_that_never_answers_is_given_up_at_the_deadline() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        async with open_store(f"postgresql://127.0.0.1:{port}/captures", deadline=0.5) as store:
            with pytest.raises(StoreUnavailableError, match=f":{port}/captures is not available"):
                await store.source.freeze("rollout-1")


async def test_a_missing_database_is_unavailable_at_once(postgres_url: str) -> None:
    url = postgres_url.replace("/tokencustody_test", "/no_such_tokencustody_test")
    async with open_store(url) as store:
        with pytest.raises(StoreUnavailableError, match=r"no_such_tokencustody_test.*does not exist"):
            await store.source.freeze("rollout-1")


async def test_a_url_parameter_that_the_server_does_not_know_is_named_at_once(postgres_url: str) -> None:
    joined = "&" if "?" in postgres_url else "?"
    async with open_store(f"{postgres_url}{joined}no_such_setting=1") as store:
        with pytest.raises(StoreUnavailableError, match="no_such_setting"):
            await store.source.freeze("rollout-1")


@pytest.mark.parametrize(
    "option",
    [
        {"pool_size": 0},
        {"pool_size": "4"},
        {"deadline": 0},
        {"deadline": "x"},
        {"writer": ""},
        {"run": "a/b"},
    ],
    ids=str,
)
def test_options_outside_their_range_are_refused_by_name(sqlite_url: str, option: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecordError, match=next(iter(option))):
        open_store(sqlite_url, **option)


async def test_a_sqlite_path_that_cannot_be_opened_is_unavailable_at_once(tmp_path: Path) -> None:
    async with open_store(tmp_path / "missing" / "captures.db") as store:
        with pytest.raises(StoreUnavailableError, match=r"missing/captures\.db is not available"):
            await store.source.freeze("rollout-1")


def postgresql_states() -> dict[str, str]:
    """Return every SQLSTATE that PostgreSQL's driver knows, with the name of its error."""
    known = (getattr(asyncpg.exceptions, name) for name in dir(asyncpg.exceptions))
    return {
        error.sqlstate: error.__name__ for error in known if isinstance(getattr(error, "sqlstate", None), str)
    }


def sqlite_codes() -> dict[int, str]:
    """Return every result code of SQLite, primary and extended, that the driver names, without those of success."""
    primary = {name: code for name, code in vars(sqlite3).items() if name in SQLITE_PRIMARY}
    extended = {
        name: code
        for name, code in vars(sqlite3).items()
        if name.startswith(tuple(f"{prefix}_" for prefix in SQLITE_PRIMARY)) and code > 255
    }
    return {code: name for name, code in (primary | extended).items()}


# The primary codes are 1 to 28, but names of other things have these numbers too.
_NAMES = """
ERROR INTERNAL PERM ABORT BUSY LOCKED NOMEM READONLY INTERRUPT IOERR CORRUPT NOTFOUND FULL CANTOPEN PROTOCOL
EMPTY SCHEMA TOOBIG CONSTRAINT MISMATCH MISUSE NOLFS AUTH FORMAT RANGE NOTADB NOTICE WARNING
"""
SQLITE_PRIMARY = [f"SQLITE_{name}" for name in _NAMES.split()]
# Whatever is not called damage here is never answered with the advice to restore a backup.
STATES_OF_DAMAGE = {"23", "40002", "42703", "42804", "42883", "42P01", "XX001", "XX002"}
CODES_OF_DAMAGE = {
    "SQLITE_ERROR",
    "SQLITE_ERROR_MISSING_COLLSEQ",
    "SQLITE_CORRUPT",
    "SQLITE_CONSTRAINT",
    "SQLITE_MISMATCH",
    "SQLITE_IOERR_DATA",
    "SQLITE_IOERR_CORRUPTFS",
}
# What another session, the server or a race did to a transaction that can be run again.
PASSING_STATES = {
    *("40000", "40001", "40003", "40P01", "55006", "55P03", "72000"),
    *("08000", "08001", "08003", "08004", "08006", "08007", "08P01"),
    *("25006", "25P03", "25P04", "53300", "57P01", "57P02", "57P03", "57P05"),
}
PASSING_CODES = {
    "ABORT",
    "BUSY",
    "LOCKED",
    "INTERRUPT",
    "PROTOCOL",
    "SCHEMA",
    "ERROR_RETRY",
    "ERROR_SNAPSHOT",
}


@pytest.mark.parametrize("sqlstate", postgresql_states())
def test_each_state_of_postgresql_is_decided(sqlstate: str) -> None:
    driver = DriverError(sqlstate=sqlstate)
    wrapped = DBAPIError("SELECT", {}, driver)
    failure = meaning(driver)
    assert failure is not None
    assert sqlstate[:2] in SQLSTATES
    assert (failure.fault in (Fault.RETRY, Fault.LOST)) == (sqlstate in PASSING_STATES)
    assert (failure.cause is not None) == (sqlstate in PASSING_STATES)
    assert (failure.fault is Fault.DAMAGE) == (not {sqlstate, sqlstate[:2]}.isdisjoint(STATES_OF_DAMAGE))
    for error in (driver, wrapped):
        decided_here = failure.fault in (Fault.DAMAGE, Fault.OURS)
        assert classify(error) == (None if decided_here else failure)
        damaged = faults_module.damage(parse_url("postgresql://h/d"), error)
        assert (damaged is not None) == (failure.fault is Fault.DAMAGE)


def test_a_state_that_no_postgresql_has_is_a_refusal() -> None:
    assert classify(DriverError(sqlstate="CR000")) == Failure(Fault.UNAVAILABLE)


def test_a_plan_that_is_out_of_date_is_made_anew() -> None:
    outdated = asyncpg.InvalidCachedStatementError("cached plan must not change result type")
    assert classify(outdated) == Failure(Fault.RETRY, Cause.INTERRUPTED)
    assert classify(asyncpg.FeatureNotSupportedError("no")) == Failure(Fault.UNAVAILABLE)


def test_a_connection_at_its_end_is_lost_and_a_wrong_argument_is_not() -> None:
    lost = Failure(Fault.LOST, Cause.CONNECTION)
    for error in (
        asyncpg.InternalClientError("cannot switch to state 15; another operation (2) is in progress"),
        asyncpg.InterfaceError("connection is closed"),
    ):
        assert classify(error) == lost
        translated = DriverError()
        translated.__cause__ = error
        assert classify(DBAPIError("SELECT", {}, translated)) == lost
    assert classify(asyncpg.DataError("invalid input for query argument $1")) is None


@pytest.mark.parametrize(("code", "name"), sqlite_codes().items())
def test_each_code_of_sqlite_is_decided(code: int, name: str) -> None:
    driver = DriverError(sqlite_errorcode=code)
    wrapped = OperationalError("SELECT", {}, driver)
    failure = meaning(driver)
    assert code & 0xFF in SQLITE_CODES
    assert failure == SQLITE_CODES.get(code, SQLITE_CODES[code & 0xFF])
    passing = any(name.removeprefix("SQLITE_").startswith(each) for each in PASSING_CODES)
    assert (failure.fault is Fault.RETRY) == passing
    is_damage = name in CODES_OF_DAMAGE or (
        name.startswith(("SQLITE_CORRUPT_", "SQLITE_CONSTRAINT_")) and name != "SQLITE_CONSTRAINT_TRIGGER"
    )
    assert (failure.fault is Fault.DAMAGE) == is_damage
    for error in (driver, wrapped):
        assert classify(error) == (None if failure.fault in (Fault.DAMAGE, Fault.OURS) else failure)
        assert (faults_module.damage(parse_url("x.db"), error) is not None) == is_damage


def test_what_this_user_may_not_open_is_not_asked_for_again() -> None:
    assert classify(PermissionError(13, "Permission denied")) == Failure(Fault.UNAVAILABLE)


def test_an_error_that_no_driver_made_is_no_fault() -> None:
    assert classify(KeyError("x")) is None


@pytest.mark.parametrize("sqlstate", ["22021", "22P05"])
def test_a_character_that_the_database_cannot_hold_is_answered_with_the_encoding_to_choose(
    sqlstate: str,
) -> None:
    said = str(faults_module.unavailable(parse_url("postgresql://h/d"), DriverError(sqlstate=sqlstate)))
    assert "give tokencustody a database whose encoding is UTF8" in said


LOCKS_OF_THE_INDEX = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
# The read marks of the log's index, which a network file system's broken locks would leave taken as well.
fcntl.lockf(file, fcntl.LOCK_EX, 5, 123)
print("locked", flush=True)
sys.stdin.read()
"""


async def test_a_locking_protocol_that_stays_broken_is_tried_until_the_deadline_and_named(
    sqlite_url: str, faults: Points
) -> None:
    def broken() -> BaseException:
        return OperationalError("COMMIT", {}, DriverError(sqlite_errorcode=sqlite3.SQLITE_PROTOCOL))

    async with open_store(sqlite_url) as store:
        faults["before commit"] = failing(3, broken)
        await store.sink.put(make_entry())
        assert store.stats()["retries_lock"] == 3
    async with open_store(sqlite_url, deadline=0.5) as store:
        await store.lineage.has_rows("rollout-1")
        faults["before commit"] = failing(10_000, broken)
        with pytest.raises(StoreUnavailableError, match="keep the file on a local file system"):
            await store.sink.put(make_entry(model_call_id="call-2"))


async def test_a_mark_is_kept_while_the_locks_of_the_log_stay_taken(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replayer, "start", lambda self: None)
    async with open_store(sqlite_url) as store:
        await store.sink.put(make_entry())
        command = [sys.executable, "-c", LOCKS_OF_THE_INDEX, f"{parse_url(sqlite_url).dsn}-shm"]
        locking = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert locking.stdout is not None
        assert await locking.stdout.readline() == b"locked\n"
        # SQLite itself is patient for ten seconds with these locks, once.
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(store.sink._database, "end_of_patience", lambda: loop.time() + 0.1)
        await store.sink.mark_incomplete("rollout-1", "call-2")
        await locking.communicate(b"")
        assert store.stats()["spilled_marks"] == 1
        assert (await store.source.freeze("rollout-1")).incomplete


def test_the_statement_and_its_parameters_stay_out_of_the_error() -> None:
    wrapped = DBAPIError("INSERT INTO entries …", {"payload": b"token ids"}, DriverError(sqlstate="53100"))
    said = str(faults_module.unavailable(parse_url("postgresql://u:s3cret@h/d"), wrapped))
    assert "driver says no" in said
    assert not {"INSERT", "token ids", "s3cret"} & set(said.split())


@pytest.mark.parametrize(
    ("error", "is_of_a_pooler"),
    [
        (asyncpg.InvalidSQLStatementNameError('prepared statement "x" does not exist'), True),
        (asyncpg.DuplicatePreparedStatementError('prepared statement "x" already exists'), True),
        (asyncpg.InvalidCursorNameError('portal "x" does not exist'), True),
        (
            asyncpg.ProtocolViolationError(
                'bind message supplies 2 parameters, but prepared statement "x" requires 3'
            ),
            True,
        ),
        (asyncpg.ProtocolViolationError("query_wait_timeout"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_pooler_does_to_prepared_statements_is_told_with_the_remedy(
    error: asyncpg.PostgresError, is_of_a_pooler: bool
) -> None:
    assert classify(error) is not None
    said = str(faults_module.unavailable(parse_url("postgresql://h/d"), error))
    assert ("statement_cache_size=0" in said) is is_of_a_pooler


async def test_stores_of_one_loop_on_one_url_share_one_engine_that_closes_with_the_last(
    store_url: str,
) -> None:
    sink, source = SqlTokenSink(store_url), SqlTokenSource(store_url)
    assert open_engines() == []  # a constructor opens nothing
    await sink.put(make_entry())
    await source.freeze("rollout-1")
    assert len(open_engines()) == 1
    await sink.close()
    await sink.close()
    assert len((await source.freeze("rollout-1")).entries) == 1
    await source.close()
    assert open_engines() == []
    with pytest.raises(StoreClosedError, match="closed"):
        await sink.put(make_entry())


def in_a_thread_with_a_loop(work: Callable[[], Awaitable[None]], done: threading.Event) -> threading.Thread:
    """Start a thread whose loop runs `work` and then goes on until `done` is set."""

    async def main() -> None:
        await work()
        await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    return thread


async def test_one_store_serves_several_loops_at_once_and_closes_in_all_of_them(store_url: str) -> None:
    store = open_store(store_url)
    await store.source.freeze("another-rollout")
    stored = [threading.Event() for _ in range(3)]
    done = threading.Event()

    async def put(number: int) -> None:
        for call in range(5):
            await store.sink.put(make_entry(model_call_id=f"call-{number}-{call}"))
        stored[number].set()

    threads = [in_a_thread_with_a_loop(partial(put, number), done) for number in range(3)]
    for event in stored:
        assert await asyncio.to_thread(event.wait, 30)
    assert len((await store.source.freeze("rollout-1")).entries) == 15
    assert len(open_engines()) == 4
    await store.close()
    assert open_engines() == []
    done.set()
    for thread in threads:
        await asyncio.to_thread(thread.join)


ONE_LOOP_AFTER_ANOTHER = """
import asyncio, sys
from tests.support.entries import make_entry
from tokencustody import SqlTokenSink, SqlTokenSource
sink, source = SqlTokenSink(url=sys.argv[1]), SqlTokenSource(url=sys.argv[1])
for number in range(3):
    asyncio.run(sink.put(make_entry(model_call_id=f"call-{number}")))
print(len(asyncio.run(source.freeze("rollout-1")).entries))
"""


def test_a_store_that_outlives_its_loops_serves_the_next_one_and_lets_the_process_end(store_url: str) -> None:
    command = [sys.executable, "-W", "ignore::ResourceWarning", "-c", ONE_LOOP_AFTER_ANOTHER, store_url]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "3\n", "")


async def test_a_fork_after_use_opens_connections_of_its_own(store_url: str) -> None:
    async with open_store(store_url) as store:
        await store.sink.put(make_entry(model_call_id="parent-1"))

        def child() -> None:
            asyncio.run(store.sink.put(make_entry(model_call_id="child")))
            asyncio.run(store.close())

        with warnings.catch_warnings():
            # Python warns of forking with threads; that is just what is tried here.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = multiprocessing.get_context("fork").Process(target=child)
            process.start()
        await asyncio.to_thread(process.join, 60)
        assert process.exitcode == 0
        await store.sink.put(make_entry(model_call_id="parent-2"))
        calls = {entry.model_call_id for entry in (await store.source.freeze("rollout-1")).entries}
        assert calls == {"parent-1", "child", "parent-2"}


def put_in_a_spawned_process(make_sink: Callable[[], SqlTokenSink]) -> None:
    async def main() -> None:
        async with make_sink() as sink:
            await sink.put(make_entry(model_call_id="child"))

    asyncio.run(main())


async def test_a_spawned_process_makes_the_store_from_its_arguments(store_url: str) -> None:
    async with open_store(store_url) as store:
        await store.sink.put(make_entry(model_call_id="parent"))
        process = multiprocessing.get_context("spawn").Process(
            target=put_in_a_spawned_process, args=(partial(SqlTokenSink, url=store_url),)
        )
        process.start()
        await asyncio.to_thread(process.join, 60)
        assert process.exitcode == 0
        assert len((await store.source.freeze("rollout-1")).entries) == 2


@pytest.mark.quick("Nothing is left behind")
@pytest.mark.parametrize("steps", range(0, 40, 3))
async def test_a_cancelled_put_leaves_no_transaction_open_and_no_half_row(
    store: CaptureStore, store_url: str, steps: int
) -> None:
    await store.sink.put(make_entry())
    cancelled = asyncio.create_task(store.sink.put(make_entry(model_call_id="call-2")))
    for _ in range(steps):
        await asyncio.sleep(0)
    cancelled.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await cancelled
    await store.sink.put(make_entry(model_call_id="call-3"))
    calls = {entry.model_call_id for entry in (await store.source.freeze("rollout-1")).entries}
    assert {"call-1", "call-3"} <= calls <= {"call-1", "call-2", "call-3"}
    (engines,) = open_engines()
    assert engines.checked_out() == 0


URLS = {
    "postgres://u@h/d": "postgresql://u@h:5432/d",
    "postgresql+asyncpg://u:p@h:1234/d?sslmode=require": "postgresql://u@h:1234/d",
    "postgresql://u:p%40ss@[::1]:5433/d%20b": "postgresql://u@[::1]:5433/d b",
    "postgresql:///d?host=/var/run/postgresql&user=u&password=s3cret": "postgresql://u@:5432/d?host=/var/run/postgresql",
    "sqlite:////var/x.db": "sqlite:////var/x.db",
    "sqlite+aiosqlite:////var/x.db": "sqlite:////var/x.db",
    "/var/x.db": "sqlite:////var/x.db",
}


@pytest.mark.parametrize(("url", "display"), URLS.items())
def test_accepted_urls_are_shown_without_their_password(url: str, display: str) -> None:
    parsed = parse_url(url)
    assert parsed.display == display
    assert not {"s3cret", "p%40ss"} & set(repr(parsed).replace(":", " ").replace("@", " ").split())


@pytest.mark.parametrize(
    "url",
    [
        "mysql://u:s3cret@h/d",
        "postgresql://u:1/s3cret@h/d",
        "postgresql://u:1#s3cret@h/d",
        "postgresql://u:1?s3cret@h/d",
        "postgresql+psycopg2://u:s3cret@h/d",
        "postgresql://u:s3cret@h:port/d",
        "postgresql://u:s3cret@h/d?connect_timeout=soon",
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite:///x.db?mode=ro",
        "",
    ],
)
def test_other_urls_are_refused_before_anything_is_opened(url: str) -> None:
    with pytest.raises(InvalidRecordError) as refused:
        open_store(url)
    assert "s3cret" not in str(refused.value)


def test_a_store_can_be_pickled_by_its_arguments_and_says_where_it_stores() -> None:
    sink = pickle.loads(pickle.dumps(partial(SqlTokenSink, url="postgresql://u:s3cret@h/d", run="run-1")))()  # noqa: S301
    assert repr(sink) == "SqlTokenSink('postgresql://u@h:5432/d', run='run-1')"
