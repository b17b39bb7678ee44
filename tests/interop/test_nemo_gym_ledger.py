"""The ledger in NeMo Gym's own types: Gym's commits go in, and manifests that Gym's models accept come out."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from nemo_gym.token_id_capture import CaptureLedger, CaptureLedgerCommit, ParentResolutionStatus
from nemo_gym.token_id_capture import control_routes as peer_routes
from nemo_gym.token_id_capture.lineage import FileLineageStore, InMemoryLineageStore
from nemo_gym.token_id_capture.staging.records import RolloutManifest

from tests.control.serving import TOKEN
from tests.interop.conftest import GymStores
from tests.support.entries import REQUEST, continuation
from tests.support.ledger import make_commit
from tokencustody.errors import InvalidRecordError, RolloutRetiredError

NEXT = continuation(REQUEST, "Paris.", "And of Spain?")


def gym_commit(*args: Any, **fields: Any) -> CaptureLedgerCommit:
    data = make_commit(*args, **fields).model_dump()
    data["record"].pop("capture_key")
    return CaptureLedgerCommit.model_validate(data)


async def test_the_ledger_keeps_gyms_commits_as_gyms_own_ledger_does(gym: GymStores) -> None:
    assert isinstance(gym.lineage, CaptureLedger)
    peer = InMemoryLineageStore()
    for ledger in (peer, gym.lineage):
        for call in ("call-2", "call-1"):
            await ledger.record(gym_commit(model_call_id=call, tokens=[1, 2, 3]))
            await ledger.record(gym_commit(model_call_id=call, tokens=[1, 2, 3]))
        with pytest.raises(ValueError, match="conflicting"):
            await ledger.record(gym_commit(model_call_id="call-1", text="Lyon."))
        await ledger.record_failure("rollout-1", "lost", "worker_capture_failed")
    ours, theirs = await gym.lineage.manifest("rollout-1"), await peer.manifest("rollout-1")
    assert RolloutManifest.model_validate(ours) == RolloutManifest.model_validate(theirs)
    assert await gym.lineage.has_rows("rollout-1") == await peer.has_rows("rollout-1")


async def test_a_recorded_call_resolves_as_in_gyms_own_ledger(gym: GymStores) -> None:
    peer = InMemoryLineageStore()
    for ledger in (peer, gym.lineage):
        await ledger.record(gym_commit())
    ours, theirs = await gym.lineage.resolve("rollout-1", NEXT), await peer.resolve("rollout-1", NEXT)
    assert ours == theirs
    assert ours.status is ParentResolutionStatus.RESOLVED


async def test_other_commits_are_refused_and_retired_ledgers_cannot_be_read(gym: GymStores) -> None:
    with pytest.raises(InvalidRecordError, match="nemo_gym's CaptureLedgerCommit"):
        await gym.lineage.record(make_commit())
    await gym.lineage.record(gym_commit())
    await gym.lineage.retire(["rollout-1"])
    with pytest.raises(RolloutRetiredError):
        await gym.lineage.manifest("rollout-1")
    with pytest.raises(RolloutRetiredError):
        await gym.lineage.has_rows("rollout-1")


ANSWER = [{"role": "assistant", "content": "Paris."}]
# What may differ between a commit and its repeat, and what a server gives anew to the same conversation.
REPEATS: dict[str, dict[str, Any]] = {
    "the same": {},
    "other ids of items": {"request": [{**REQUEST[0], "id": "m-2"}, *REQUEST[1:]]},
    "a type that says nothing": {"request": [{**REQUEST[0], "type": "message"}, *REQUEST[1:]]},
    "other thinking": {"response": [*ANSWER, {"type": "reasoning", "summary": []}]},
    "another request": {"request": [{**REQUEST[0], "content": "Other."}, *REQUEST[1:]]},
    "another answer": {"response": [{"role": "assistant", "content": "Lyon."}]},
    "another claim": {"fingerprint": "b" * 64},
    "another weight version": {"weight_version": 9},
    "another chain": {"chain": ["another/call", "rollout-1/call-1"]},
}


def repeat(
    request: Any = None, response: Any = None, fingerprint: Any = None, chain: Any = None, **fields: Any
) -> CaptureLedgerCommit:
    commit = gym_commit(**fields)
    record = commit.record.model_copy(update={"continuation_fingerprint": fingerprint} if fingerprint else {})
    return CaptureLedgerCommit(
        rollout_id=commit.rollout_id,
        record=record,
        staging_chain=commit.staging_chain if chain is None else chain,
        request_items=request or commit.request_items,
        response_items=response or ANSWER,
    )


async def outcome_of(write: Callable[[], Awaitable[None]]) -> str:
    try:
        await write()
    except ValueError:
        return "conflict"
    return "no-op"


@pytest.mark.parametrize("change", REPEATS)
async def test_a_repeated_commit_is_settled_as_gyms_own_ledger_settles_it(
    gym: GymStores, change: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        outcomes = []
        for ledger in (FileLineageStore(folder), gym.lineage):
            await ledger.record(repeat())
            outcomes.append(await outcome_of(lambda ledger=ledger: ledger.record(repeat(**REPEATS[change]))))
    assert outcomes[0] == outcomes[1]
    assert outcomes[1] == ("conflict" if change.startswith("another") else "no-op")


async def test_each_reason_of_a_failed_call_is_a_row_as_in_gyms_own_ledger(gym: GymStores) -> None:
    peer = InMemoryLineageStore()
    for ledger in (peer, gym.lineage):
        for reason in ("one", "another", "one"):
            await ledger.record_failure("rollout-1", "lost", reason)
    ours, theirs = await gym.lineage.manifest("rollout-1"), await peer.manifest("rollout-1")
    assert RolloutManifest.model_validate(ours) == RolloutManifest.model_validate(theirs)


@pytest.mark.parametrize("claimed", [None, "b" * 64])
async def test_a_row_resolves_by_its_conversation_whatever_fingerprint_its_record_claims(
    gym: GymStores, claimed: str | None
) -> None:
    peer = InMemoryLineageStore()
    commit = gym_commit()
    record = commit.record.model_copy(update={"continuation_fingerprint": claimed})
    commit = commit.model_copy(update={"record": record})
    for ledger in (peer, gym.lineage):
        await ledger.record(commit)
    ours, theirs = await gym.lineage.resolve("rollout-1", NEXT), await peer.resolve("rollout-1", NEXT)
    assert ours == theirs
    assert ours.status is ParentResolutionStatus.RESOLVED
    (row,) = (await gym.lineage.manifest("rollout-1"))["records"]
    assert row["continuation_fingerprint"] == claimed


async def test_rows_go_out_and_in_flat_from_threads_that_have_no_loop(gym: GymStores) -> None:
    await gym.lineage.record(gym_commit())
    await gym.lineage.record_failure("rollout-1", "lost", "worker_capture_failed")
    before = await gym.lineage.manifest("rollout-1")
    rows = await asyncio.to_thread(gym.lineage.export_rows, "rollout-1")
    assert rows == await gym.lineage.export_rows("rollout-1")
    assert "record" not in rows[0]
    assert rows[0]["staging_key"] == "rollout-1/call-1"
    await asyncio.gather(
        *(asyncio.to_thread(gym.lineage.import_rows, f"rollout-{number}", rows) for number in range(2, 6))
    )
    await gym.lineage.import_rows("rollout-6", rows)
    for number in range(2, 7):
        after = await gym.lineage.manifest(f"rollout-{number}")
        assert [row["capture_key"] for row in after["records"]] == ["rollout-1"]
        assert after["failures"] == before["failures"]
    found = await gym.lineage.resolve("rollout-2", NEXT)
    assert found.match is not None
    assert found.match.staging_chain == ("rollout-1/call-1",)
    await gym.lineage.record(gym_commit("rollout-1"))  # which is there


async def test_the_manifest_of_a_retired_rollout_is_no_error_of_the_server_on_gyms_route(
    gym: GymStores,
) -> None:
    await gym.lineage.record(gym_commit())
    await gym.lineage.retire(["rollout-1"])
    app = FastAPI()
    peer_routes.install_rollout_control_routes(app, gym.lineage, auth_token=TOKEN)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gym") as client:
        answer = await client.get(
            f"{peer_routes.CONTROL_ROUTE_PREFIX}/rollouts/rollout-1/manifest",
            headers={"Authorization": f"Bearer {TOKEN}"},
        )
    assert answer.status_code == 400
    assert "rollout-1 of run default is retired" in answer.json()["detail"]
