"""The ledger in NeMo Gym's own types: Gym's commits go in, and manifests that Gym's models accept come out."""

from __future__ import annotations

from typing import Any

import pytest
from nemo_gym.token_id_capture import CaptureLedger, CaptureLedgerCommit, ParentResolutionStatus
from nemo_gym.token_id_capture.lineage import InMemoryLineageStore
from nemo_gym.token_id_capture.staging.records import RolloutManifest

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
