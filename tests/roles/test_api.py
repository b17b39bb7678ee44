"""What a store tells a caller whom the database denies something, and that nobody else suffers for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.faults.methods import METHODS
from tests.roles.secured import PASSWORD, Secured, secured_database
from tests.support.entries import REQUEST, continuation, make_entry
from tests.support.postgres import Server
from tests.support.rows import rows_of
from tokencustody import CaptureStore, open_store
from tokencustody.database.url import parse_url
from tokencustody.errors import AccessDeniedError, LineageError, StagedCallMissingError
from tokencustody.records import ParentResolutionStatus
from tokencustody.roles.granting import grant, revoke
from tokencustody.schema import tables
from tokencustody.schema.opening import CaptureDatabase
from tokencustody.spill.marks import Mark, Spill
from tokencustody.spill.replaying import replay
from tokencustody.states import Role
from tokencustody.txn.fence import RolloutKey, Stamp

# What these answer for a rollout, or a staged call, that is not there.
UNSEEN: dict[str, Any] = {"drop": False, "delete": None, "unstage": []}


@pytest.fixture(scope="module")
def database(postgres: Server) -> Iterator[tuple[Secured, str]]:
    """A database, and a worker of the run `here`."""
    with secured_database(postgres, "worker") as (database, (worker,)):
        grant(database.url, Role.WORKER, worker, ["here"])
        yield database, database.url_as(worker)


@pytest.mark.parametrize("name", METHODS)
async def test_a_worker_has_no_part_in_another_run(database: tuple[Secured, str], name: str) -> None:
    method, rollout = METHODS[name], f"elsewhere-{list(METHODS).index(name)}"
    async with (
        open_store(database[0].url, run="elsewhere") as owner,
        open_store(database[1], run="elsewhere") as store,
    ):
        await method.prepare(owner, rollout)
        if name in UNSEEN:
            assert await method.run(store, rollout) in (UNSEEN[name], {"absent": [rollout], "removed": []})
        elif method.soft:
            assert await method.run(store, rollout) is False
        else:
            # Of another run he does not even see the parent.
            error = LineageError if name == "put_continuation" else AccessDeniedError
            with pytest.raises(error):
                await method.run(store, rollout)


async def test_a_worker_resolves_and_reads_nothing_of_another_run(database: tuple[Secured, str]) -> None:
    async with (
        open_store(database[0].url, run="unseen") as owner,
        open_store(database[1], run="unseen") as store,
    ):
        await owner.sink.put(make_entry("rollout-1", "call-1"))
        request = continuation(REQUEST, "Paris.", "And of Spain?")
        seen = await owner.lineage.resolve("rollout-1", request)
        unseen = await store.lineage.resolve("rollout-1", request)
        assert (seen.status, unseen.status) == (
            ParentResolutionStatus.RESOLVED,
            ParentResolutionStatus.UNRESOLVED,
        )
        assert not await store.lineage.has_rows("rollout-1")
        with pytest.raises(StagedCallMissingError):
            await asyncio.to_thread(store.staging.fetch, ["rollout-1/call-1"])


async def denied(store: CaptureStore) -> str:
    with pytest.raises(AccessDeniedError) as caught:
        await store.source.freeze("rollout-1")
    return str(caught.value)


async def test_a_denial_says_in_one_line_what_was_denied_to_whom_and_who_may_and_is_not_tried_again(
    database: tuple[Secured, str],
) -> None:
    async with open_store(database[1], run="here") as store:
        said = await denied(store)
        figures = store.stats()
    assert parse_url(database[1]).display in said
    assert "permission denied for table fences" in said
    assert "a trainer freezes" in said
    assert PASSWORD not in said
    assert "\n" not in said
    assert "tries" not in said
    assert figures["retries"] == 0


async def test_a_call_that_is_denied_does_not_take_with_it_those_of_its_batch(
    database: tuple[Secured, str],
) -> None:
    # Stores on one URL share their transactions, whatever their runs. A first call keeps both lanes busy.
    async with (
        open_store(database[1], run="here") as here,
        open_store(database[1], run="elsewhere") as elsewhere,
    ):
        before = here.stats().get("shared_calls", 0)
        puts = [
            store.sink.put(make_entry("together", f"call-{number}"))
            for number in range(20)
            for store in (here, elsewhere)
        ]
        outcomes = await asyncio.gather(*puts, return_exceptions=True)
        assert here.stats()["shared_calls"] - before > len(puts)  # some batch was taken apart
    assert [type(outcome) for outcome in outcomes] == [type(None), AccessDeniedError] * 20
    rows = await rows_of(database[0].url, tables.entries)
    assert {row["run"] for row in rows if row["rollout_id"] == "together"} == {"here"}
    assert len([row for row in rows if row["rollout_id"] == "together"]) == 20


async def test_a_mark_of_another_run_is_denied_and_not_kept_on_this_host(
    database: tuple[Secured, str], spill_folder: Path
) -> None:
    async with open_store(database[1], run="elsewhere") as store:
        with pytest.raises(AccessDeniedError):
            await store.sink.mark_incomplete("rollout-1", "call-1")
    assert Spill(spill_folder, parse_url(database[1])).is_empty()


async def test_a_role_that_is_revoked_is_denied_with_its_next_call_and_let_in_again_once_granted(
    postgres: Server,
) -> None:
    with secured_database(postgres, "worker") as (database, (worker,)):
        await asyncio.to_thread(grant, database.url, Role.WORKER, worker, ["here"])
        async with open_store(database.url_as(worker), run="here") as store:
            await store.sink.put(make_entry("rollout-1", "call-1"))
            await asyncio.to_thread(revoke, database.url, worker)
            with pytest.raises(AccessDeniedError):
                await store.sink.put(make_entry("rollout-1", "call-2"))
            await asyncio.to_thread(grant, database.url, Role.WORKER, worker, ["here"])
            await store.sink.put(make_entry("rollout-1", "call-2"))


async def test_marks_of_a_worker_are_replayed_past_those_that_it_may_not_make_which_stay_for_others(
    database: tuple[Secured, str], spill_folder: Path
) -> None:
    spill = Spill(spill_folder, parse_url(database[1]))
    foreign, own = (
        spill.keep(Mark(RolloutKey(run, "marked"), "call-1", Stamp.make(datetime.now(UTC), "test-writer")))
        for run in ("elsewhere", "here")
    )
    worker, owner = CaptureDatabase(parse_url(database[1])), CaptureDatabase(parse_url(database[0].url))
    try:
        with pytest.raises(AccessDeniedError):
            await replay(worker, spill)
        assert (own.exists(), foreign.exists()) == (False, True)
        await replay(owner, spill)
        assert not foreign.exists()
    finally:
        await worker.close()
        await owner.close()
    marks = await rows_of(database[0].url, tables.failures)
    assert {row["run"] for row in marks if row["rollout_id"] == "marked"} == {"elsewhere", "here"}
