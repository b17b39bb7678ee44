"""A primary that crashes and a standby that takes its place: what was acknowledged, and what is left of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from campaigns.servers import USER, PostgresCluster, PostgresStandby
from tests.support.entries import make_entry
from tokencustody import CaptureStore, open_store
from tokencustody.database.standby import synchronous_standbys
from tokencustody.database.url import parse_url
from tokencustody.errors import DurabilityError, StoreUnavailableError, TokenCaptureFrozenError
from tokencustody.states import Isolation

DEADLINE = 30.0


@pytest.fixture
def primary() -> Iterator[PostgresCluster]:
    with PostgresCluster() as cluster:
        cluster.create_database("captures")
        yield cluster


@pytest.fixture
def standby(primary: PostgresCluster) -> Iterator[PostgresStandby]:
    with PostgresStandby(primary) as standby:
        yield standby


def url_of_both(primary: PostgresCluster, standby: PostgresCluster) -> str:
    place = f"127.0.0.1:{primary.port}"
    return (
        primary.url_of("captures").replace(place, f"{place},127.0.0.1:{standby.port}")
        + "?target_session_attrs=primary"
    )


def wait_for_standbys(primary: PostgresCluster, standby: PostgresCluster) -> None:
    primary.change("synchronous_standby_names", "*")
    # Until it counts as one, a commit waits.
    primary.fetch("SELECT pg_switch_wal()")
    while not primary.fetch("SELECT FROM pg_stat_replication WHERE sync_state = 'sync'"):
        pass
    # It would have none of its own.
    standby.change("synchronous_standby_names", "")


async def fail_over(primary: PostgresCluster, standby: PostgresStandby) -> None:
    await asyncio.to_thread(primary.kill_postmaster)
    await asyncio.to_thread(standby.promote)


async def calls_of(store: CaptureStore, rollout: str) -> list[str]:
    return [entry.model_call_id for entry in (await store.source.freeze(rollout)).entries]


async def test_with_a_synchronous_standby_a_failover_loses_nothing_acknowledged_and_no_fence(
    primary: PostgresCluster, standby: PostgresStandby
) -> None:
    await asyncio.to_thread(wait_for_standbys, primary, standby)
    async with open_store(url_of_both(primary, standby), deadline=DEADLINE, pool_size=2) as store:
        for number in range(5):
            await store.sink.put(make_entry("frozen", f"call-{number}"))
            await store.sink.put(make_entry("open", f"call-{number}"))
        snapshot = await store.source.freeze("frozen")
        await asyncio.to_thread(standby.disconnect)
        async with open_store(primary.url_of("captures"), deadline=1) as hasty:
            with pytest.raises(StoreUnavailableError, match="a commit may have happened"):
                await hasty.sink.put(make_entry("open", "never-acknowledged"))
        await fail_over(primary, standby)
        again = await store.source.freeze("frozen")
        assert (again.snapshot_id, again.version) == (snapshot.snapshot_id, snapshot.version)
        assert again.entries == snapshot.entries
        with pytest.raises(TokenCaptureFrozenError):
            await store.sink.put(make_entry("frozen", "late"))
        assert await calls_of(store, "open") == [f"call-{number}" for number in range(5)]


async def test_without_a_synchronous_standby_a_failover_may_lose_calls_and_open_a_fence_as_documented(
    primary: PostgresCluster, standby: PostgresStandby
) -> None:
    async with open_store(url_of_both(primary, standby), deadline=DEADLINE) as store:
        await store.sink.put(make_entry("rollout-1", "replicated"))
        await asyncio.to_thread(wait_until_replayed, primary, standby)
        await asyncio.to_thread(standby.disconnect)
        await store.sink.put(make_entry("rollout-1", "acknowledged"))
        assert await calls_of(store, "rollout-1") == ["acknowledged", "replicated"]
        await fail_over(primary, standby)
        await store.sink.put(make_entry("rollout-1", "late"))
        assert await calls_of(store, "rollout-1") == ["late", "replicated"]


@pytest.mark.parametrize("isolation", Isolation)
async def test_a_write_that_comes_to_a_standby_waits_until_it_is_promoted(
    primary: PostgresCluster, standby: PostgresStandby, isolation: Isolation
) -> None:
    async with open_store(primary.url_of("captures")) as store:
        await store.sink.put(make_entry("rollout-1", "call-1"))
    await asyncio.to_thread(wait_until_replayed, primary, standby)
    async with open_store(standby.url_of("captures"), deadline=DEADLINE, isolation=isolation) as store:
        putting = asyncio.create_task(store.sink.put(make_entry("rollout-1", "call-2")))
        while not store.stats()["retries_read_only"]:
            assert not putting.done()
            await asyncio.sleep(0)
        await fail_over(primary, standby)
        await putting
        assert await calls_of(store, "rollout-1") == ["call-1", "call-2"]


def wait_until_replayed(primary: PostgresCluster, standby: PostgresCluster) -> None:
    (written,) = primary.fetch("SELECT pg_current_wal_lsn() AS lsn")
    while standby.fetch("SELECT pg_last_wal_replay_lsn() >= $1::pg_lsn AS done", written["lsn"]) != [(True,)]:
        pass


@pytest.mark.parametrize("method", ["put", "mark_incomplete"])
async def test_a_commit_whose_wait_for_the_standby_is_cancelled_is_not_acknowledged(
    primary: PostgresCluster, standby: PostgresStandby, method: str
) -> None:
    await asyncio.to_thread(wait_for_standbys, primary, standby)
    async with open_store(primary.url_of("captures"), deadline=DEADLINE) as store:
        await store.sink.put(make_entry("rollout-1", "call-1"))
        await asyncio.to_thread(standby.disconnect)
        if method == "put":
            writing = asyncio.create_task(store.sink.put(make_entry("rollout-1", "call-2")))
        else:
            writing = asyncio.create_task(store.sink.mark_incomplete("rollout-1", "call-2"))
        # Twice: what is found to be stored already waits for the standby all the same.
        for _ in range(2):
            await asyncio.to_thread(cancel_wait, primary, writing)
        assert not writing.done()
        assert store.stats()["unknown_commits"] >= 1
        await asyncio.to_thread(primary.change, "synchronous_standby_names", "")
        await writing
        assert store.stats()["unknown_commits_settled"] >= 1


def cancel_wait(primary: PostgresCluster, writing: asyncio.Task[None]) -> None:
    """Cancel what waits for a standby, and return once something else waits, or the caller no more."""
    cancelled: set[int] = set()
    while not writing.done():
        waiting = primary.fetch("SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
        pids = {row["pid"] for row in waiting}
        if cancelled and pids - cancelled:
            return
        for pid in pids - cancelled:
            primary.fetch("SELECT pg_cancel_backend($1)", pid)
        cancelled |= pids


@pytest.mark.parametrize("setting", ["local", "remote_write"])
async def test_commits_that_do_not_wait_for_the_named_standby_are_refused(
    primary: PostgresCluster, setting: str
) -> None:
    url = primary.url_of("captures")
    primary.fetch(f"ALTER DATABASE captures SET synchronous_commit = {setting}")
    async with open_store(url) as store:
        await store.sink.put(make_entry())
    await asyncio.to_thread(primary.change, "synchronous_standby_names", "*")
    async with open_store(url) as store:
        with pytest.raises(DurabilityError, match=f"synchronous_commit={setting}.* on or remote_apply"):
            await store.sink.put(make_entry())


def test_a_check_says_whether_commits_wait_for_a_standby(
    primary: PostgresCluster, standby: PostgresStandby
) -> None:
    url = parse_url(primary.url_of("captures"))
    primary.fetch("CREATE ROLE unprivileged LOGIN PASSWORD 'x'")
    assert "may lose acknowledged calls" in str(synchronous_standbys(url))
    wait_for_standbys(primary, standby)
    assert str(synchronous_standbys(url)).endswith("synchronous_standby_names is '*', 1 connected")
    standby.disconnect()
    assert str(synchronous_standbys(url)).endswith("none connected, so no write is acknowledged")
    theirs = primary.url_of("captures").replace(f"{USER}:{primary.password}", "unprivileged:x")
    assert str(synchronous_standbys(parse_url(theirs))).endswith("synchronous_standby_names is '*'")
