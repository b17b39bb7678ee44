"""Disks that run full while calls are written."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import asyncpg
import pytest

from campaigns.disks import SmallDisk
from campaigns.servers import PostgresCluster
from tests.support.entries import make_entry
from tests.support.machine import needs_mounts
from tokencustody import CaptureStore, TokenEntry, open_store
from tokencustody.errors import StoreUnavailableError

MEBIBYTE = 1 << 20


@pytest.fixture
def small_disk(request: pytest.FixtureRequest) -> Iterator[SmallDisk]:
    needs_mounts()
    with SmallDisk(request.param * MEBIBYTE) as disk:
        yield disk


def call(number: int) -> TokenEntry:
    # Incompressible enough to fill a page.
    return make_entry(model_call_id=f"call-{number}", prompt=[number * 7919 + n * n for n in range(2000)])


async def put_until_full(store: CaptureStore, numbers: Iterator[int]) -> tuple[list[str], str]:
    """Return the calls that were acknowledged, and the error that ended it."""
    acknowledged: list[str] = []
    for number in numbers:
        try:
            await store.sink.put(call(number))
        except StoreUnavailableError as exc:
            return acknowledged, str(exc)
        acknowledged.append(f"call-{number}")
        assert number < 10_000
    raise AssertionError


async def compare(store: CaptureStore, acknowledged: list[str]) -> None:
    snapshot = await store.source.freeze("rollout-1")
    found = {entry.model_call_id: entry for entry in snapshot.entries}
    assert not set(acknowledged) - set(found)
    for call_id, entry in found.items():
        assert entry == call(int(call_id.removeprefix("call-")))


@pytest.mark.parametrize("small_disk", [2], indirect=True)
async def test_sqlite_on_a_full_disk_loses_nothing_and_works_again_once_there_is_space(
    small_disk: SmallDisk,
) -> None:
    numbers = itertools.count()
    async with open_store(f"sqlite:///{small_disk.folder}/captures.db", deadline=5) as store:
        acknowledged: list[str] = []
        for _ in range(2):
            more, error = await put_until_full(store, numbers)
            acknowledged += more
            assert "full" in error
            assert "captures.db" in error
            # Nothing can be taken back either: what failed leaves no lock and no half transaction.
            with pytest.raises(StoreUnavailableError, match="full"):
                await store.sink.put(call(next(numbers)))
            small_disk.grow(2 * MEBIBYTE)
            await store.sink.put(call(number := next(numbers)))
            acknowledged.append(f"call-{number}")
        await compare(store, acknowledged)


@pytest.mark.parametrize("small_disk", [150], indirect=True)
async def test_postgresql_on_a_full_disk_loses_nothing_and_works_again_once_there_is_space(
    small_disk: SmallDisk,
) -> None:
    numbers = itertools.count()
    with PostgresCluster(small_disk.folder) as cluster:
        async with open_store(cluster.create_database("captures"), deadline=5) as store:
            await store.sink.put(call(next(numbers)))
            small_disk.fill()
            acknowledged, error = await put_until_full(store, numbers)
            assert "No space left on device" in error
            assert "127.0.0.1" in error
            small_disk.free()
            await store.sink.put(call(number := next(numbers)))
            await compare(store, [*acknowledged, "call-0", f"call-{number}"])


@pytest.mark.parametrize("small_disk", [150], indirect=True)
async def test_a_server_that_stops_because_its_log_has_no_space_has_lost_nothing_when_it_is_started_again(
    small_disk: SmallDisk,
) -> None:
    numbers = itertools.count()
    with PostgresCluster(small_disk.folder) as cluster:
        async with open_store(cluster.create_database("captures"), deadline=2) as store:
            await store.sink.put(call(next(numbers)))
            small_disk.fill()
            acknowledged, _ = await put_until_full(store, numbers)
            # More than the segments of the log that are there can take: the server panics.
            with pytest.raises((asyncpg.PostgresError, OSError)):
                cluster.fetch("SELECT pg_logical_emit_message(false, 'x', repeat('x', 50000000))")
            with pytest.raises(StoreUnavailableError):
                await store.sink.put(call(next(numbers)))
            small_disk.free()
            cluster.restart_immediate()
            await store.sink.put(call(number := next(numbers)))
            await compare(store, [*acknowledged, "call-0", f"call-{number}"])
