"""The staging store under the published peer's own worker capture and receipts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import nemo_gym.token_id_capture.staging as gym
import pytest

import tokencustody
from tokencustody.integrations import nemo_gym as integration
from tokencustody.staging import records
from tokencustody.store import AttachedBuffer


@pytest.fixture(params=[tokencustody.SqlStagingStore, integration.SqlStagingStore])
def staging(request: pytest.FixtureRequest, store_url: str) -> Iterator[Any]:
    """Both staging stores: with this library's snapshots and with Gym's."""
    with request.param(store_url) as opened:
        yield opened


def admission(call: str, parent: Any = None) -> gym.CaptureAdmission:
    """Return the admission of a root, or of a call whose prefix is the staged `parent`."""
    if parent is None:
        return gym.CaptureAdmission(rollout_id="r", model_call_id=call, mode="text")
    return gym.CaptureAdmission(
        rollout_id="r",
        model_call_id=call,
        mode="token_in",
        parent_call_id=parent.model_call_id,
        prev_len=parent.cum_len,
        parent_chain_hash=parent.chain_hash,
        staging_chain=[parent.staging_key],
    )


def captured(capture: Any, call: str, generated: list[int], **more: Any) -> gym.CommitCoords:
    return capture.complete_call(
        capture.begin_call(admission(call)),
        prompt_token_ids=[10, 11],
        generated_token_ids=generated,
        generated_logprobs=[-0.1 * (i + 1) for i in range(len(generated))],
        **more,
    )


def test_the_published_capture_stages_and_continues_through_the_store(staging: Any) -> None:
    host = gym.CaptureHost()
    capture = gym.install_capture(host, sink=staging, weight_version_fn=lambda: 3)
    assert isinstance(staging, gym.StagingSink)
    assert isinstance(staging, gym.StagingSource)
    root = captured(
        capture, "call-1", [12, 13], extras={"k": [1, "é"]}, attachments={"a": b"x", "b": bytearray(b"y")}
    )
    assert (root.disposition, root.staging_key) == ("staged", "r/call-1")
    prefix = staging.fetch_prefix_token_ids(["r/call-1"])
    assert prefix == [10, 11, 12, 13]
    child = capture.complete_call(
        capture.begin_call(admission("call-2", root), prefix_token_ids=prefix),
        prompt_token_ids=[*prefix, 14],
        generated_token_ids=[15],
        generated_logprobs=[-1.5],
    )
    assert child.disposition == "staged"
    assert staging.fetch_prefix_token_ids(["r/call-1", "r/call-2"]) == [10, 11, 12, 13, 14, 15]
    assert staging.fetch_extras(["r/call-1", "r/call-2"]) == [{"k": [1, "é"]}, None]
    assert staging.fetch_attachments("r/call-1") == {"a": b"x", "b": AttachedBuffer("|u1", (1,), b"y")}
    for coords, snapshot in zip((root, child), staging.fetch(["r/call-1", "r/call-2"]), strict=True):
        accepted = gym.StagedCallBaseSnapshot.model_validate(snapshot.model_dump())
        assert accepted.digest == coords.digest
        assert accepted.model_dump() == snapshot.model_dump()


def test_other_data_under_a_key_fails_the_capture_and_never_the_call(
    staging: Any, caplog: pytest.LogCaptureFixture
) -> None:
    capture = gym.RolloutTokenCapture(sink=staging, weight_version_fn=lambda: 3)
    assert captured(capture, "call-1", [12]).disposition == "staged"
    assert captured(capture, "call-1", [12]).disposition == "staged"
    with caplog.at_level(logging.WARNING):
        assert captured(capture, "call-1", [8888]).disposition == "capture_failed"
    assert "differing" in caplog.text
    with caplog.at_level(logging.WARNING):
        assert captured(capture, "call-2", [12], attachments={"a": {1}}).disposition == "capture_failed"
    assert "attachment 'a'" in caplog.text


def test_a_record_is_answered_in_its_own_implementations_types(staging: Any) -> None:
    staged = []

    class Recorder:
        def stage(self, record: Any, *, attachments: Any = None) -> Any:
            staged.append(record)
            return staging.stage(record, attachments=attachments)

    captured(gym.RolloutTokenCapture(sink=Recorder(), weight_version_fn=lambda: 3), "call-1", [12])
    (record,) = staged
    ours = records.StagedCallRecord.model_validate(record.model_dump())
    assert staging.stage(record) == gym.StageResult(ok=True, staging_key="r/call-1")
    assert staging.stage(ours) == records.StageResult(ok=True, staging_key="r/call-1")
    assert type(staging.stage(record)) is gym.StageResult
    assert type(staging.stage(ours)) is records.StageResult
    changed = record.model_copy(update={"weight_version": 9})
    assert type(staging.stage(changed)) is gym.StageResult
    assert not staging.stage(changed).ok


def test_the_published_verification_accepts_the_calls_that_the_integration_fetches(store_url: str) -> None:
    with integration.SqlStagingStore(store_url) as staging:
        capture = gym.RolloutTokenCapture(sink=staging, weight_version_fn=lambda: 3)
        coords = captured(capture, "call-1", [12, 13])
        shared = coords.model_dump(include=set(gym.CallRecord.model_fields))
        row = gym.CallRecord(**shared, mode="text", response_id="response-1")
        receipt = gym.RolloutReceipt(
            rollout_id="r", manifest=[row], terminal_model_call_id="call-1", terminal_selection="declared"
        )
        linear = gym.verify_and_linearize(receipt, staging.fetch(["r/call-1"]))
        assert linear.token_ids == [10, 11, 12, 13]
