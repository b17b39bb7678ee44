"""Removing while others write, freeze and stage: nothing goes that was not meant, and nothing is left behind.

Everybody has a thread with an event loop and connections of its own.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.support.entries import make_entry
from tests.support.ledger import make_commit
from tests.support.postgres import fetch
from tests.support.rows import rows_of
from tests.support.staged import Staged, stage
from tokencustody import CaptureStore, TokenCaptureFrozenError, TokenCaptureRetiredError, open_store
from tokencustody.database.faults import FAULT_POINTS
from tokencustody.retention.retention import Retention, Settled
from tokencustody.schema import tables
from tokencustody.states import FenceState
from tokencustody.txn.selection import RolloutFilter

RUN = "run-1"
WRITERS = 3
PUTS = 60
Job = Callable[[int], Coroutine[Any, Any, None]]


def together(*jobs: Job) -> None:
    """Run each job in a thread of its own, all from the same moment on."""
    started = threading.Barrier(len(jobs))

    def work(number: int, job: Job) -> None:
        async def begin() -> None:
            await asyncio.to_thread(started.wait)
            await job(number)

        asyncio.run(begin())

    with ThreadPoolExecutor(len(jobs)) as threads:
        for done in [threads.submit(work, number, job) for number, job in enumerate(jobs)]:
            done.result()


@dataclass
class Acknowledged:
    """What writers were told: the calls by rollout."""

    puts: dict[str, set[str]] = field(default_factory=dict)
    frozen: dict[str, set[str]] = field(default_factory=dict)
    running: int = WRITERS


@pytest.mark.race
@pytest.mark.parametrize("state", [FenceState.FROZEN, FenceState.OPEN])
def test_removing_rollouts_loses_no_call_of_others_and_leaves_no_row_of_its_own(
    store_url: str, state: FenceState
) -> None:
    acknowledged = Acknowledged()
    settled: list[Settled] = []
    lock = threading.Lock()

    async def write(number: int) -> None:
        rng = random.Random(f"{state} {number}")
        async with open_store(store_url, run=RUN, writer=f"writer-{number}") as store:
            for step in range(PUTS):
                rollout = f"{rng.choice(['keep', 'go'])}-{rng.randrange(12)}"
                call = f"{number}-{step}"
                try:
                    await store.sink.put(make_entry(rollout, call))
                except TokenCaptureFrozenError:
                    continue
                with lock:
                    acknowledged.puts.setdefault(rollout, set()).add(call)
                if rng.random() < 0.15:
                    await freeze(store, rollout)
        with lock:
            acknowledged.running -= 1

    async def freeze(store: CaptureStore, rollout: str) -> None:
        try:
            snapshot = await store.source.freeze(rollout)
        except TokenCaptureRetiredError:
            return
        with lock:
            acknowledged.frozen[rollout] = {entry.model_call_id for entry in snapshot.entries}

    async def remove(_: int) -> None:
        wanted = RolloutFilter(run=RUN, state=state, prefix="go-")
        async with Retention(store_url) as retention:
            while acknowledged.running:
                await retention.retire(wanted, settled.append)
            await retention.retire(wanted, settled.append)

    together(remove, *[write] * WRITERS)

    async def check() -> None:
        fences = {row["rollout_id"]: row for row in await rows_of(store_url, tables.fences)}
        stored: dict[str, set[str]] = {}
        for row in await rows_of(store_url, tables.entries):
            stored.setdefault(row["rollout_id"], set()).add(row["model_call_id"])
        retired = {rollout for rollout, row in fences.items() if row["state"] == "retired"}
        assert retired == {of.key.rollout_id for of in settled if of.removed}
        assert retired
        assert all(rollout.startswith("go-") for rollout in retired)
        assert not retired & set(stored)
        rest = {rollout: calls for rollout, calls in acknowledged.puts.items() if rollout not in retired}
        assert stored == rest
        # Whatever was frozen held every acknowledged call, whoever removed it then.
        for rollout, calls in acknowledged.frozen.items():
            assert calls == acknowledged.puts[rollout]
        rows = {of.key.rollout_id: of.rows for of in settled if of.removed}
        assert rows == {rollout: len(acknowledged.puts[rollout]) for rollout in retired}

    asyncio.run(check())


async def test_a_call_that_is_being_recorded_is_not_collected(store_url: str) -> None:
    recording, go_on = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        FAULT_POINTS.clear()
        recording.set()
        await go_on.wait()

    async with open_store(store_url, run=RUN) as store, Retention(store_url) as retention:
        staged = stage("call-1", rollout="r").snapshot
        assert (await asyncio.to_thread(store.staging.stage, staged)).ok
        FAULT_POINTS["before commit"] = hold
        record = asyncio.create_task(store.lineage.record(make_commit("r", "call-1")))
        await recording.wait()
        collect = asyncio.create_task(retention.collect(datetime.now(UTC), lambda _: None))
        if store_url.startswith("postgresql"):
            waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            while not collect.done() and not (await asyncio.to_thread(fetch, store_url, waiting))[0][0]:
                pass
        go_on.set()
        await asyncio.gather(record, collect)
        await store.source.freeze("r")
        assert len(await asyncio.to_thread(store.staging.fetch, ["r/call-1"])) == 1


@pytest.mark.race
@pytest.mark.parametrize("seed", [1, 2])
def test_collecting_leaves_every_call_that_is_staged_or_recorded_meanwhile(store_url: str, seed: int) -> None:
    rollouts = [f"r-{number}" for number in range(12)]
    old: dict[str, Staged] = {}

    async def stage_old() -> None:
        async with open_store(store_url, run=RUN) as store:
            for rollout in rollouts:
                root = stage("old", rollout=rollout)
                old[rollout] = root
                for call in (root, stage("old-child", root, rollout=rollout)):
                    assert (await asyncio.to_thread(store.staging.stage, call.snapshot)).ok

    asyncio.run(stage_old())
    before = datetime.now(UTC)
    staged: dict[str, Staged] = {}
    recorded: set[str] = set()
    running = WRITERS
    lock = threading.Lock()

    async def work(number: int) -> None:
        nonlocal running
        rng = random.Random(f"{seed} {number}")
        async with open_store(store_url, run=RUN) as store:
            for step in range(30):
                rollout, call = rng.choice(rollouts), f"{number}-{step}"
                made = stage(call, rollout=rollout)
                result = await asyncio.to_thread(store.staging.stage, made.snapshot, attachments={"a": b"1"})
                assert result.ok
                staged[f"{rollout}/{call}"] = made
                if rng.random() < 0.3:
                    # What was staged long ago is recorded after all, unless it is gone already.
                    await store.lineage.record(make_commit(rollout, "old"))
                    try:
                        await asyncio.to_thread(store.staging.fetch, [f"{rollout}/old"])
                        with lock:
                            recorded.add(f"{rollout}/old")
                    except LookupError:
                        pass
                    await store.source.freeze(rollout)
        with lock:
            running -= 1

    async def collect(_: int) -> None:
        async with Retention(store_url) as retention:
            while running:
                await retention.collect(before, lambda _: None)
            await retention.collect(before, lambda _: None)

    together(collect, *[work] * WRITERS)

    async def check() -> None:
        async with open_store(store_url, run=RUN) as store:
            keys = [*staged, *recorded]
            found = await asyncio.to_thread(store.staging.fetch, keys)
        assert [snapshot.token_ids_delta for snapshot in found][: len(staged)] == [
            made.snapshot.token_ids_delta for made in staged.values()
        ]
        left = {
            f"{row['rollout_id']}/{row['model_call_id']}"
            for row in await rows_of(store_url, tables.staged_calls)
        }
        assert left == {*staged, *recorded}
        attached = await rows_of(store_url, tables.staged_attachments)
        assert {f"{row['rollout_id']}/{row['model_call_id']}" for row in attached} == set(staged)

    asyncio.run(check())
