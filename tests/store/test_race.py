"""Writers in several processes against one fence: what was acknowledged is in the snapshot, and nothing else is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.support import forked
from tests.support.entries import make_entry
from tests.support.rows import rows_of
from tokencustody import CaptureStore, TokenCaptureFrozenError, TokenCaptureRetiredError, open_store
from tokencustody.database.coalescing import Coalesce
from tokencustody.errors import PayloadConflictError
from tokencustody.schema import tables
from tokencustody.states import Isolation

# Each way in which the calls of a process may share transactions; none are shared where each is serializable.
MODES = [*product(["sqlite", "postgresql"], Coalesce), ("serializable", Coalesce.PROCESS)]

pytestmark = [
    pytest.mark.race,
    pytest.mark.parametrize(("store_url", "coalesce"), MODES, indirect=["store_url"]),
]

PROCESSES = 3
TASKS = 4


@pytest.fixture
def options(coalesce: Coalesce, default_isolation: Isolation) -> dict[str, str]:
    """The options of the writers' stores."""
    return {"coalesce": coalesce, "isolation": default_isolation}


@dataclass
class Outcome:
    """What one process saw: the calls that were acknowledged, and those that the fence refused."""

    stored: list[str] = field(default_factory=list)
    announced: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    conflicts: int = 0


async def write_until_refused(store: CaptureStore, name: str) -> Outcome:
    """Put and announce calls from several tasks until the fence refuses them."""
    outcome = Outcome()

    async def one_task(task: int) -> None:
        for number in range(10_000):
            call = f"{name}-{task}-{number}"
            try:
                if number % 3 == 2:
                    await store.sink.begin_call("rollout-1", call)
                    outcome.announced.append(call)
                else:
                    await store.sink.put(make_entry(model_call_id=call))
                    outcome.stored.append(call)
            except TokenCaptureFrozenError:
                outcome.refused.append(call)
                return

    await asyncio.gather(*(one_task(task) for task in range(TASKS)))
    return outcome


async def put_the_same(store: CaptureStore, _name: str) -> Outcome:
    await store.sink.put(make_entry())
    return Outcome(stored=["call-1"])


async def put_another_payload(store: CaptureStore, name: str) -> Outcome:
    try:
        await store.sink.put(make_entry(model=name))
    except PayloadConflictError:
        return Outcome(conflicts=1)
    return Outcome(stored=[name])


def work(
    connection: Connection, url: str, name: str, job: Callable[..., Any], options: dict[str, str]
) -> None:
    async def main() -> Outcome:
        async with open_store(url, run="run-1", writer=name, **options) as store:
            await store.source.freeze("warm-up")  # connected before the race starts
            connection.send("ready")
            connection.recv()
            return await job(store, name)

    connection.send(asyncio.run(main()))


@contextmanager
def writers(url: str, job: Callable[..., Any], options: dict[str, str]) -> Iterator[list[Connection]]:
    """Start the processes, wait until all are connected, and let them go at once."""
    connections, processes = [], []
    for number in range(PROCESSES):
        here, there = forked.CONTEXT.Pipe()
        process = forked.process(work, there, url, f"writer-{number}", job, options)
        process.start()
        connections.append(here)
        processes.append(process)
    try:
        for connection in connections:
            assert connection.recv() == "ready"
        for connection in connections:
            connection.send("go")
        yield connections
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()


@pytest.mark.parametrize("calls_before", [1, 40])
async def test_what_was_acknowledged_before_a_racing_freeze_is_in_the_snapshot_and_nothing_after(
    store: CaptureStore, store_url: str, calls_before: int, options: dict[str, str]
) -> None:
    with writers(store_url, write_until_refused, options) as connections:
        while len(await rows_of(store_url, tables.entries)) < calls_before:
            pass
        snapshot = await store.source.freeze("rollout-1")
        outcomes: list[Outcome] = [await asyncio.to_thread(connection.recv) for connection in connections]
    stored = {call for outcome in outcomes for call in outcome.stored}
    announced = {call for outcome in outcomes for call in outcome.announced}
    assert len(stored) >= calls_before
    assert {entry.model_call_id for entry in snapshot.entries} == stored
    assert {row["model_call_id"] for row in await rows_of(store_url, tables.intents)} == announced
    assert snapshot.incomplete == bool(announced)
    assert sum(len(outcome.refused) for outcome in outcomes) == PROCESSES * TASKS
    assert await store.source.freeze("rollout-1") == snapshot


async def test_a_racing_retirement_leaves_no_row_behind(
    store: CaptureStore, store_url: str, options: dict[str, str]
) -> None:
    with writers(store_url, write_until_refused, options) as connections:
        while len(await rows_of(store_url, tables.entries)) < 10:
            pass
        assert await store.source.retire(["rollout-1"]) == {"removed": ["rollout-1"], "absent": []}
        for connection in connections:
            assert len((await asyncio.to_thread(connection.recv)).refused) == TASKS
    assert await rows_of(store_url, tables.entries) == []
    assert await rows_of(store_url, tables.intents) == []
    with pytest.raises(TokenCaptureRetiredError):
        await store.sink.put(make_entry())


async def test_the_same_call_from_several_processes_is_stored_once_and_acknowledged_to_all(
    store: CaptureStore, store_url: str, options: dict[str, str]
) -> None:
    with writers(store_url, put_the_same, options) as connections:
        outcomes = [await asyncio.to_thread(connection.recv) for connection in connections]
    assert [outcome.stored for outcome in outcomes] == [["call-1"]] * PROCESSES
    snapshot = await store.source.freeze("rollout-1")
    assert (len(snapshot.entries), snapshot.incomplete, snapshot.version) == (1, False, 1)


async def test_of_several_payloads_under_one_call_id_one_wins_and_each_other_is_kept_as_evidence(
    store: CaptureStore, store_url: str, options: dict[str, str]
) -> None:
    with writers(store_url, put_another_payload, options) as connections:
        outcomes = [await asyncio.to_thread(connection.recv) for connection in connections]
    (winner,) = [name for outcome in outcomes for name in outcome.stored]
    snapshot = await store.source.freeze("rollout-1")
    assert [entry.model for entry in snapshot.entries] == [winner]
    assert (snapshot.incomplete, snapshot.version) == (True, PROCESSES)
    evidence = await rows_of(store_url, tables.failures)
    assert {row["written_by"] for row in evidence} | {winner} == {f"writer-{n}" for n in range(PROCESSES)}
    assert len(evidence) == PROCESSES - 1
