"""Trouble is counted: by cause, for the whole process, in `stats()` and in OpenTelemetry."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tests.support.entries import make_entry
from tokencustody import open_store
from tokencustody.database import registry
from tokencustody.database.stats import STATS, Kind
from tokencustody.errors import PayloadConflictError, StoreUnavailableError, TokenCaptureFrozenError
from tokencustody.store import CaptureStore, SqlStagingStore

Points = dict[str, Callable[[], Awaitable[None]]]
AFTER_COMMIT = "after commit, before acknowledgement"


def failing(
    times: int, error: Exception, then: Callable[[], None] = lambda: None
) -> Callable[[], Awaitable[None]]:
    left = times

    async def fail() -> None:
        nonlocal left
        if left:
            left -= 1
            raise error
        then()

    return fail


def changes(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    counted = [name for name in after if name != "log_bytes"]
    return {name: after[name] - before[name] for name in counted if after[name] != before[name]}


async def test_every_figure_is_there_from_the_start(store: CaptureStore) -> None:
    assert store.stats() == {stat.name: 0 for stat in STATS}


async def test_conflicts_and_late_writes_are_counted(store: CaptureStore) -> None:
    await store.sink.put(make_entry())
    before = store.stats()
    with pytest.raises(PayloadConflictError):
        await store.sink.put(make_entry(model="another"))
    await store.sink.refuse_call("rollout-1", model_call_id="refused", code="length")
    with pytest.raises(PayloadConflictError):
        await store.sink.refuse_call("rollout-1", model_call_id="refused", code="other")
    await store.source.freeze("rollout-1")
    for late in (store.sink.put(make_entry()), store.sink.begin_call("rollout-1", "late")):
        with pytest.raises(TokenCaptureFrozenError):
            await late
    counted = changes(before, store.stats())
    assert (counted["conflicts"], counted["late_writes_refused"]) == (2, 2)


async def test_what_a_retired_ledger_discards_is_counted(store: CaptureStore, store_url: str) -> None:
    await store.source.retire(["rollout-1"])
    before = store.stats()
    await store.lineage.record_failure("rollout-1", "call-1", "lost")
    shared = {"shared_calls": 1, "shared_transactions": 1} if store_url.startswith("sqlite") else {}
    assert changes(before, store.stats()) == {"transactions": 1, "late_writes_refused": 1, **shared}


@pytest.mark.parametrize("method", ["put", "mark_incomplete"])
async def test_a_commit_whose_answer_was_lost_is_counted_and_settled(
    store: CaptureStore, faults: Points, method: str
) -> None:
    await store.source.freeze("warm-up")
    before = store.stats()
    faults[AFTER_COMMIT] = failing(2, ConnectionResetError("lost"))
    await (store.sink.put(make_entry()) if method == "put" else store.sink.mark_incomplete("rollout-1"))
    counted = changes(before, store.stats())
    expected = {"retries": 2, "retries_connection": 2, "unknown_commits": 2, "unknown_commits_settled": 2}
    assert {name: counted.get(name) for name in expected} == expected


async def test_a_failure_before_the_commit_is_no_unknown_outcome(store: CaptureStore, faults: Points) -> None:
    await store.source.freeze("warm-up")
    before = store.stats()
    faults["before commit"] = failing(1, ConnectionResetError("lost"))
    await store.sink.mark_incomplete("rollout-1")
    assert changes(before, store.stats()) == {"transactions": 1, "retries": 1, "retries_connection": 1}


async def test_an_unknown_outcome_that_is_not_settled_says_so(store_url: str, faults: Points) -> None:
    async with open_store(store_url) as patient:
        await patient.source.freeze("warm-up")
    async with open_store(store_url, deadline=0.5) as store:
        await store.source.freeze("warm-up")
        faults[AFTER_COMMIT] = failing(10**9, ConnectionResetError("lost"))
        with pytest.raises(
            StoreUnavailableError, match="ConnectionResetError: lost; a commit may have happened"
        ):
            await store.source.drop("rollout-1", "some-id", 1)
        counted = store.stats()
        assert counted["unknown_commits"] >= 1
        assert counted["unknown_commits_settled"] == 0
        assert counted["unavailable"] == 1
        # The schema check and the freeze before went well.
        faults.clear()
        assert (await store.source.freeze("warm-up")).version == 1


async def test_figures_are_those_of_the_process_and_outlive_the_store(store_url: str) -> None:
    async with open_store(store_url) as one, open_store(store_url, pool_size=2) as two:
        await one.sink.put(make_entry())
        await two.sink.put(make_entry(model_call_id="call-2"))
        assert one.stats()["shared_calls"] == two.stats()["shared_calls"] == 2
    assert one.stats()["shared_calls"] == 2
    with SqlStagingStore(store_url) as staging:
        assert staging.stats()["shared_calls"] == 2


async def test_the_queue_is_seen_while_it_waits(store: CaptureStore, faults: Points) -> None:
    await store.source.freeze("warm-up")
    held, go_on = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        held.set()
        await go_on.wait()

    faults["before commit"] = hold
    puts = [
        asyncio.create_task(store.sink.put(make_entry(model_call_id=f"call-{number}")))
        for number in range(20)
    ]
    await held.wait()
    while store.stats()["queue_depth"] < 1:  # noqa: ASYNC110 - the store has no event for this
        await asyncio.sleep(0)
    assert store.stats()["queued_bytes"] > 0
    faults.clear()
    go_on.set()
    await asyncio.gather(*puts)
    assert (store.stats()["queue_depth"], store.stats()["queued_bytes"]) == (0, 0)


async def test_open_telemetry_sees_the_same_figures_by_database_and_cause(
    store: CaptureStore, faults: Points
) -> None:
    # OpenTelemetry puts what goes beyond 2,000 databases into one, and other tests may have used that many.
    registry._registry.counted.clear()
    reader = _reader()
    await store.source.freeze("warm-up")
    faults[AFTER_COMMIT] = failing(1, ConnectionResetError("lost"))
    await store.sink.put(make_entry())
    data = reader.get_metrics_data()
    assert data is not None
    display = store.sink._database.url.display
    seen = {}
    scopes = data.resource_metrics[0].scope_metrics
    for metric in next(scope for scope in scopes if scope.scope.name == "tokencustody").metrics:
        for point in metric.data.data_points:
            attributes = dict(point.attributes or {})
            if attributes.pop("database") == display:
                seen[metric.name, attributes.get("cause")] = point.value
    stats = store.stats()
    assert seen == {
        (f"tokencustody.{'retries' if stat.cause else stat.name}", stat.cause): stats[stat.name]
        for stat in STATS
        if stat.name != "retries"
    }
    assert seen["tokencustody.retries", "connection"] == 1


_readers: list[InMemoryMetricReader] = []


def _reader() -> InMemoryMetricReader:
    # A process has one provider of meters, and it cannot be replaced.
    if not _readers:
        _readers.append(InMemoryMetricReader())
        metrics.set_meter_provider(MeterProvider(_readers))
    return _readers[0]


def test_without_open_telemetry_nothing_is_missed() -> None:
    hide = "import sys; sys.modules['opentelemetry'] = None"
    code = f"{hide}; from tokencustody.database import telemetry; print(telemetry.publish())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_counters_and_gauges_are_told_apart() -> None:
    assert {stat.name for stat in STATS if stat.kind is Kind.GAUGE} == {
        "queue_depth",
        "queued_bytes",
        "log_bytes",
    }
