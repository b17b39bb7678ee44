"""Our client against the manifest route that NeMo Gym serves, on our ledger."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from nemo_gym.token_id_capture import control_routes as peer

from tests.control.serving import TOKEN, serving
from tests.support.ledger import make_commit
from tokencustody import control
from tokencustody.store import SqlLineageStore


async def test_our_client_reads_the_peers_manifest_route_as_it_reads_ours(store_url: str) -> None:
    async with SqlLineageStore(store_url) as ledger:
        commits = [make_commit(model_call_id=f"call-{number}") for number in (2, 1)]
        for commit in commits:
            await ledger.record(commit)
        await ledger.record_failure("rollout-1", "call-3", "worker_capture_failed")
        manifests = []
        for install in (control.install_rollout_control_routes, peer.install_rollout_control_routes):
            app = FastAPI()
            install(app, ledger, auth_token=TOKEN)
            async with serving(app) as url:
                async with control.RolloutControlClient(url, TOKEN) as client:
                    manifests.append(await client.manifest("rollout-1"))
                async with control.RolloutControlClient(url, "another") as client:
                    with pytest.raises(control.ControlAuthError, match="401"):
                        await client.manifest("rollout-1")
    assert manifests[0] == manifests[1]
    assert manifests[0].records == [commit.record for commit in commits]


def test_the_routes_stand_where_the_peers_stand() -> None:
    assert control.CONTROL_ROUTE_PREFIX == peer.CONTROL_ROUTE_PREFIX
