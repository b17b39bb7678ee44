"""Staging by many threads in shared transactions: each call is answered for itself, and only for what is stored."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest

from tests.database.test_transactions import Points, connection_lost, failing, serialization_failure
from tests.support.rows import rows_of, run_sql
from tests.support.staged import stage
from tokencustody import SqlStagingStore
from tokencustody.database.coalescing import Coalesce, Gatherer
from tokencustody.database.registry import open_engines
from tokencustody.schema import tables
from tokencustody.staging.records import StagedCallRecord, StageResult
from tokencustody.store.base import now

THREADS = 16
ROLLOUTS = 4

Staging = Callable[[], StageResult]


@pytest.fixture(params=[Coalesce.PROCESS, Coalesce.OFF])
def staging(request: pytest.FixtureRequest, store_url: str) -> Iterator[SqlStagingStore]:
    """A staging store on a new database that has written one call, in each mode in which calls wait for a lane.

    With one connection there is one lane, so that what waits for it goes into one batch if the mode allows it.
    """
    with SqlStagingStore(store_url, pool_size=1, coalesce=request.param) as opened:
        assert opened.stage(stage("first").snapshot).ok
        yield opened


def neighbours(count: int) -> list[StagedCallRecord]:
    """Return calls of several rollouts."""
    return [stage(f"call-{n}", added=[n], rollout=f"r{n % ROLLOUTS}").snapshot for n in range(count)]


def at_once(
    staging: SqlStagingStore,
    faults: Points,
    calls: Sequence[Staging],
    then: Callable[[], None] = lambda: None,
) -> list[Future[StageResult]]:
    """Run every call in a thread of its own while the only lane is held, until all wait for it; return their ends.

    `then` runs before the lane is free.
    """
    held = threading.Event()

    async def hold() -> None:
        del faults["before commit"]
        held.set()
        gatherers = [each for each in open_engines()[0].kept.values() if isinstance(each, Gatherer)]
        while (  # noqa: ASYNC110 - nothing tells when a call begins to wait
            sum(len(each._queue) for each in gatherers) < len(calls)
        ):
            await asyncio.sleep(0)
        then()

    faults["before commit"] = hold
    with ThreadPoolExecutor(len(calls) + 1) as pool:
        plug = pool.submit(staging.stage, stage("plug").snapshot)
        assert held.wait(30)
        ends = [pool.submit(call) for call in calls]
        assert plug.result(60).ok
    return ends


def keys_of(calls: Sequence[StagedCallRecord]) -> list[str]:
    return [call.staging_key for call in calls]


def test_calls_share_as_many_transactions_as_the_mode_allows(
    staging: SqlStagingStore, faults: Points
) -> None:
    calls = neighbours(THREADS)
    before = staging.stats()
    ends = at_once(staging, faults, [partial(staging.stage, call) for call in calls])
    assert all(end.result().ok for end in ends)
    done = {name: count - before[name] for name, count in staging.stats().items()}
    batches = {Coalesce.PROCESS: 1, Coalesce.OFF: THREADS}
    assert done["shared_calls"] == 1 + THREADS
    assert done["shared_transactions"] == done["transactions"] == 1 + batches[staging._database._coalesce]
    assert [call.token_ids_delta[0] for call in staging.fetch(keys_of(calls))] == list(range(THREADS))


def other_weights(staging: SqlStagingStore) -> Staging:
    return lambda: staging.stage(stage("taken", rollout="r0", weight_version=2).snapshot)


def unstorable(staging: SqlStagingStore) -> Staging:
    return lambda: staging.stage(stage("taken", rollout="r0", weight_version=2**63).snapshot)


def more_attachments(staging: SqlStagingStore) -> Staging:
    return lambda: staging.stage(stage("attached", rollout="r0").snapshot)


BAD = {
    "other data": (other_weights, "taken of rollout r0 was staged before with other data"),
    "attachments": (more_attachments, "attached of rollout r0 was staged before with other data"),
}


@pytest.mark.parametrize(("bad", "said"), BAD.values(), ids=BAD)
def test_a_call_that_conflicts_fails_alone_in_its_batch(
    staging: SqlStagingStore, faults: Points, bad: Callable[[SqlStagingStore], Staging], said: str
) -> None:
    first = stage("taken", rollout="r0").snapshot
    staging.stage(first)
    staging.stage(stage("attached", rollout="r0").snapshot, attachments={"a": b"x"})
    calls = neighbours(THREADS - 1)
    ends = at_once(staging, faults, [bad(staging), *(partial(staging.stage, call) for call in calls)])
    failed, *others = [end.result() for end in ends]
    assert not failed.ok
    assert said in (failed.error or "")
    assert [result.staging_key for result in others] == keys_of(calls)
    assert len(staging.fetch(keys_of(calls))) == THREADS - 1
    assert staging.fetch(["r0/taken"])[0].weight_version == first.weight_version
    assert staging.fetch_attachments("r0/attached") == {"a": b"x"}


async def test_a_repeat_among_new_calls_succeeds_and_is_one_row(
    staging: SqlStagingStore, store_url: str, faults: Points
) -> None:
    calls = neighbours(THREADS)
    staging.stage(calls[0])
    ends = at_once(staging, faults, [partial(staging.stage, call) for call in calls])
    assert all(end.result().ok for end in ends)
    stored = [
        (row["rollout_id"], row["model_call_id"]) for row in await rows_of(store_url, tables.staged_calls)
    ]
    assert sorted(stored) == sorted(
        [("r", "first"), ("r", "plug"), *((call.rollout_id, call.model_call_id) for call in calls)]
    )


async def test_a_call_that_the_database_refuses_fails_alone_in_its_batch(
    staging: SqlStagingStore, store_url: str, faults: Points
) -> None:
    if store_url.startswith("sqlite"):
        await run_sql(
            store_url,
            "CREATE TRIGGER refuse BEFORE INSERT ON staged_calls WHEN NEW.model_call_id = 'bad'"
            " BEGIN SELECT RAISE(ABORT, 'refused'); END",
        )
        said = "is not available: IntegrityError: refused"  # by somebody's trigger, which damages nothing
    else:
        said = "holds what this library does not write"
        await run_sql(
            store_url, "ALTER TABLE staged_calls ADD CONSTRAINT refuse CHECK (model_call_id <> 'bad')"
        )
    calls = neighbours(THREADS - 1)
    bad = partial(staging.stage, stage("bad", rollout="r0").snapshot)
    ends = at_once(staging, faults, [bad, *(partial(staging.stage, call) for call in calls)])
    refused = ends[0].result()
    assert not refused.ok
    assert said in (refused.error or "")
    assert all(end.result().ok for end in ends[1:])
    assert len(staging.fetch(keys_of(calls))) == THREADS - 1


def test_a_record_that_cannot_be_stored_fails_while_its_neighbours_wait_to_be(
    staging: SqlStagingStore, faults: Points
) -> None:
    calls = neighbours(THREADS - 1)
    results: list[StageResult] = []

    def after_a_bad_one(call: StagedCallRecord) -> StageResult:
        results.append(unstorable(staging)())
        return staging.stage(call)

    ends = at_once(staging, faults, [partial(after_a_bad_one, call) for call in calls])
    assert all(end.result().ok for end in ends)
    assert {result.error for result in results} == {
        f"weight_version: {2**63} does not lie between 0 and 2^63-1"
    }
    assert len(staging.fetch(keys_of(calls))) == THREADS - 1


def nearly(call: StagedCallRecord) -> StagedCallRecord:
    """Return the call with a log probability that its digest does not tell from the first."""
    near = call.model_copy(deep=True)
    near.generation_log_probs_delta[-1] = math.nextafter(near.generation_log_probs_delta[-1], 0)
    return near


OTHERS: dict[str, Callable[[StagedCallRecord], StagedCallRecord]] = {
    "the same": lambda call: call,
    "other tokens": lambda call: stage(call.model_call_id, added=[9]).snapshot,
    "other bits below float32": nearly,
}


@pytest.mark.parametrize("other", OTHERS)
def test_one_key_twice_at_once_is_one_call_and_whoever_was_told_so_finds_its_own(
    staging: SqlStagingStore, faults: Points, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    # At the same moment, so that nothing but their data tells them apart.
    moment = now()
    monkeypatch.setattr("tokencustody.store.staging.now", lambda: moment)
    first = stage("twice").snapshot
    second = OTHERS[other](first)
    ends = at_once(staging, faults, [partial(staging.stage, first), partial(staging.stage, second)])
    told = [end.result().ok for end in ends]
    held = staging.fetch(["r/twice"])[0]
    assert told == [
        held.token_ids_delta == call.token_ids_delta
        and held.generation_log_probs_delta == call.generation_log_probs_delta
        for call in (first, second)
    ]
    assert any(told)
    # The next one is told the same, whether it comes alone or among others.
    again = at_once(
        staging,
        faults,
        [partial(staging.stage, call) for call in (first, *neighbours(3))],
    )
    assert again[0].result().ok is told[0]


@pytest.mark.parametrize("point", ["before commit", "after commit, before acknowledgement"])
@pytest.mark.parametrize("error", [serialization_failure, connection_lost])
async def test_a_batch_whose_commit_failed_or_lost_its_answer_is_staged_once(
    staging: SqlStagingStore, store_url: str, faults: Points, point: str, error: Callable[[], BaseException]
) -> None:
    calls = neighbours(THREADS)

    def fail() -> None:
        # Twice, because the call that holds the lane comes by the second point too.
        faults[point] = failing(2, error)

    ends = at_once(staging, faults, [partial(staging.stage, call) for call in calls], fail)
    assert all(end.result().ok for end in ends)
    assert len(await rows_of(store_url, tables.staged_calls)) == 2 + THREADS
    assert len(staging.fetch(keys_of(calls))) == THREADS


def test_nothing_that_was_acknowledged_is_missing_when_others_delete_at_the_same_time(
    staging: SqlStagingStore,
) -> None:
    kept = [neighbours(10 * THREADS)[thread::THREADS] for thread in range(THREADS)]
    removals: list[str] = []
    done = threading.Event()

    def stage_and_delete(thread: int) -> None:
        victim = stage(f"victim-{thread}").snapshot
        for call in kept[thread]:
            assert staging.stage(victim).ok
            assert staging.stage(call).ok
            removals.extend(staging.delete([victim.staging_key]))

    def rival() -> None:
        rng = random.Random(1)
        while not done.is_set():
            removals.extend(
                staging.delete([f"r/victim-{number}" for number in rng.sample(range(THREADS), 3)])
            )

    with ThreadPoolExecutor(THREADS + 1) as pool:
        deleting = pool.submit(rival)
        list(pool.map(stage_and_delete, range(THREADS)))
        done.set()
        deleting.result()
    # Each time a victim was acknowledged it was there, so that exactly one deletion found it.
    assert sorted(removals) == sorted(f"r/victim-{thread}" for thread in range(THREADS) for _ in range(10))
    keys = [key for calls in kept for key in keys_of(calls)]
    assert [call.staging_key for call in staging.fetch(keys)] == keys
