from types import SimpleNamespace
from typing import Any

import pytest

from tokencustody.staging.adapters.megatron import MegatronCaptureAdapter
from tokencustody.staging.adapters.vllm import VLLMCaptureAdapter
from tokencustody.staging.capture import RolloutTokenCapture
from tokencustody.staging.protocols import CaptureAdapter
from tokencustody.staging.rebuild import verify_and_linearize
from tokencustody.staging.records import CaptureAdmission, CommitCoords, StagedCallRecord, StageResult
from tokencustody.staging.terminal import assemble_receipt


class MemorySink:
    def __init__(self) -> None:
        self.records: dict[str, StagedCallRecord] = {}

    def stage(self, record: StagedCallRecord, *, attachments: Any = None) -> StageResult:
        self.records[record.staging_key] = record
        return StageResult(ok=True, staging_key=record.staging_key)


def vllm_response(prompt: list[int], ids: list[int], log_probs: list[float]) -> dict[str, Any]:
    content = [{"token": "text", "logprob": value} for value in log_probs]
    return {"prompt_token_ids": prompt, "choices": [{"token_ids": ids, "logprobs": {"content": content}}]}


def megatron_payload(prompt: list[int], ids: list[int], log_probs: list[float]) -> SimpleNamespace:
    return SimpleNamespace(prompt_token_ids=prompt, generated_token_ids=ids, generated_log_probs=log_probs)


ENGINES = [(VLLMCaptureAdapter, vllm_response), (MegatronCaptureAdapter, megatron_payload)]


def row_of(coords: CommitCoords, mode: str) -> dict[str, Any]:
    row = coords.model_dump(exclude={"rollout_id", "disposition"})
    return row | {"mode": mode, "response_id": f"resp-{coords.model_call_id}"}


@pytest.mark.parametrize(("adapter", "answer"), ENGINES)
def test_what_an_engine_answered_becomes_one_training_row(adapter: Any, answer: Any) -> None:
    sink = MemorySink()
    assert isinstance(adapter(), CaptureAdapter)
    capture = RolloutTokenCapture(sink=sink, weight_version_fn=lambda: 7, adapter=adapter())
    root = capture.begin_call(CaptureAdmission(rollout_id="r", model_call_id="a", mode="text"))
    first = capture.complete_call_from_response(root, answer([1, 2], [3], [-0.5]))
    admission = CaptureAdmission(
        rollout_id="r",
        model_call_id="b",
        parent_call_id="a",
        mode="token_in",
        prev_len=3,
        required_prefix_token_ids=[1, 2, 3],
        parent_chain_hash=first.chain_hash,
    )
    second = capture.complete_call_from_response(
        capture.begin_call(admission), answer([1, 2, 3, 4], [5, 6], [-1.0, -1.5])
    )
    records = [row_of(first, "text"), row_of(second, "token_in")]
    receipt = assemble_receipt(
        {"rollout_id": "r", "records": records}, declared_response_id="resp-b", reward=1.0
    )
    row = verify_and_linearize(receipt, [sink.records[record.staging_key] for record in receipt.manifest])
    assert row.token_ids == [1, 2, 3, 4, 5, 6]
    assert row.token_mask == [0.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    assert row.logprobs == [0.0, 0.0, -0.5, 0.0, -1.0, -1.5]
    assert row.weight_versions == [7, 7]


@pytest.mark.parametrize(("adapter", "answer"), ENGINES)
def test_a_malformed_answer_fails_the_capture_and_not_the_model_call(adapter: Any, answer: Any) -> None:
    sink = MemorySink()
    capture = RolloutTokenCapture(sink=sink, weight_version_fn=lambda: 7, adapter=adapter())
    call = capture.begin_call(CaptureAdmission(rollout_id="r", model_call_id="a", mode="text"))
    coords = capture.complete_call_from_response(call, answer([1, 2], [3, 4], [-0.5]))
    assert coords.disposition == "capture_failed"
    assert sink.records == {}
