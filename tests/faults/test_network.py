"""Connections that are cut around a commit, and networks that swallow everything."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from campaigns.relay import ChaosRelay, Cut, Request
from tests.faults.conftest import relay_before
from tests.faults.methods import METHODS, Method, right_answer
from tests.support.entries import make_entry
from tests.support.rows import rows_of
from tokencustody import CaptureStore, open_store
from tokencustody.database.connecting import Driver
from tokencustody.database.registry import open_engines
from tokencustody.errors import StoreUnavailableError
from tokencustody.schema import tables
from tokencustody.states import Isolation

DEADLINE = 3.0
# At the other level, those that then go another way.
CUT = [(name, Isolation.READ_COMMITTED) for name in METHODS] + [
    (name, Isolation.SERIALIZABLE) for name, method in METHODS.items() if method.request is Request.STATEMENT
]


async def versions_of(url: str, rollout: str) -> list[int]:
    rows = await rows_of(url, tables.snapshot_versions)
    return [row["version"] for row in rows if row["rollout_id"] == rollout]


def counted(store: CaptureStore, name: str) -> int:
    return store.stats()[name]


@pytest.mark.parametrize(("name", "isolation"), CUT)
async def test_a_call_whose_connection_is_cut_around_its_commit_happens_exactly_once(
    postgres_url: str, relay: ChaosRelay, name: str, isolation: Isolation
) -> None:
    method = METHODS[name]
    request = Request.COMMIT if isolation is Isolation.SERIALIZABLE else method.request
    async with open_store(relay.url(postgres_url), isolation=isolation) as store:
        for cut in Cut:
            # A new connection begins with statements of its own, which would be cut too.
            for times in (1, 3) if request is Request.COMMIT and cut is not Cut.AFTERWARDS else (1,):
                rollout = f"{cut.name.lower()}-{times}"
                await method.prepare(store, rollout)
                before = await versions_of(postgres_url, rollout)
                unknown, settled = (
                    counted(store, "unknown_commits"),
                    counted(store, "unknown_commits_settled"),
                )
                cuts = relay.counts["cuts"]
                for _ in range(times):
                    relay.cut_next(cut, request)
                answer = await method.run(store, rollout)
                assert relay.counts["cuts"] == cuts + times, rollout
                assert right_answer(method, rollout, answer), (rollout, answer)
                after = await versions_of(postgres_url, rollout)
                assert after == (
                    [] if method.versions is None else list(range(len(before) + method.versions))
                )
                if cut is not Cut.AFTERWARDS:
                    assert counted(store, "unknown_commits") - unknown == times, rollout
                    assert counted(store, "unknown_commits_settled") - settled == times, rollout
                assert method.after is None or await method.after(store, rollout), rollout
        assert not [engines for engines in open_engines() if engines.checked_out()]


@pytest.mark.parametrize("cut", [Cut.REQUEST, Cut.ANSWER], ids=lambda cut: cut.name)
async def test_a_call_whose_commit_is_swallowed_is_unavailable_by_its_deadline_and_can_be_repeated(
    postgres_url: str, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    farewells: list[float] = []
    close = asyncpg.Connection.close

    async def closing(connection: asyncpg.Connection, *, timeout: float | None = None) -> None:
        # One that lies idle is not given up.
        if timeout is not None and isinstance(connection, Driver) and connection.rested_since is None:
            farewells.append(timeout)
        await close(connection, timeout=timeout)

    monkeypatch.setattr(asyncpg.Connection, "close", closing)

    async def swallow(name: str, method: Method) -> None:
        rollout = name.replace(" ", "-").replace(",", "")
        with relay_before(postgres_url) as relay:
            url = relay.url(postgres_url)
            async with open_store(url, deadline=DEADLINE, spill=None, pool_size=1) as store:
                await method.prepare(store, rollout)
                relay.black_hole_next(cut, method.request)
                # The hole has no end of its own: only the deadline ends the call.
                await unavailable(method, store, rollout)
                assert relay.counts["black_holes"] == 1
                relay.heal()
            async with open_store(url, pool_size=1) as again:
                answer = await method.run(again, rollout)
                assert answer is not False or method.answer is False
                assert method.after is None or await method.after(again, rollout)
        after = await versions_of(postgres_url, rollout)
        assert after == list(range(len(after)))

    # At once, for each lasts as long as its deadline.
    results = await asyncio.gather(*(swallow(*each) for each in METHODS.items()), return_exceptions=True)
    assert {name: result for name, result in zip(METHODS, results, strict=True) if result is not None} == {}
    assert not [engines for engines in open_engines() if engines.checked_out()]
    # SQLAlchemy's farewell to a connection would wait for two seconds.
    assert not [timeout for timeout in farewells if timeout > 0.5]


async def unavailable(method: Method, store: CaptureStore, rollout: str) -> None:
    """Run a call that cannot reach the database; fail if it does not say so."""
    if method.soft:
        assert await method.call(store, rollout) is False
        return
    with pytest.raises(StoreUnavailableError):
        await method.call(store, rollout)


async def test_a_writer_that_is_cut_off_holds_others_up_no_longer_than_its_deadline(
    postgres_url: str, relay: ChaosRelay
) -> None:
    async with (
        open_store(relay.url(postgres_url), deadline=1, spill=None) as cut_off,
        open_store(postgres_url, deadline=10) as other,
    ):
        await cut_off.sink.mark_incomplete("rollout-1")
        relay.black_hole_next(Cut.REQUEST, Request.COMMIT)
        with pytest.raises(StoreUnavailableError):
            await cut_off.sink.mark_incomplete("rollout-1")
        # Its session still holds the rollout's lock, for the server has heard no farewell.
        snapshot = await other.source.freeze("rollout-1")
        assert snapshot.version == 2
        relay.heal()
        # Its COMMIT came too late.
        assert await versions_of(postgres_url, "rollout-1") == [0, 1, 2]


async def test_a_black_hole_that_ends_within_the_deadline_is_waited_for(
    postgres_url: str, relay: ChaosRelay
) -> None:
    async with open_store(relay.url(postgres_url)) as store:
        await store.sink.put(make_entry())
        relay.black_hole(0.2)
        await store.sink.put(make_entry(model_call_id="call-2"))
        assert relay.counts["black_holes"] == 1
        assert store.stats()["retries"] == 0


async def test_puts_whose_connections_are_all_reset_again_and_again_lose_nothing(
    postgres_url: str, relay: ChaosRelay
) -> None:
    async with open_store(relay.url(postgres_url)) as store:
        done = 0

        async def write(task: int) -> None:
            nonlocal done
            for number in range(20):
                await store.sink.put(make_entry("rollout-1", f"call-{task}-{number}"))
                done += 1
                if done % 10 == 0:
                    await asyncio.to_thread(relay.reset_all)

        await asyncio.gather(*(write(task) for task in range(5)))
        snapshot = await store.source.freeze("rollout-1")
        assert len(snapshot.entries) == 100
        assert not snapshot.incomplete
        assert relay.counts["resets"] > 0
