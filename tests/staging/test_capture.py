"""Capture in a worker: the order of build, stage and acknowledge, and whose fault each failure is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from tests.support import vectors
from tokencustody.staging import (
    ActiveCall,
    CaptureAdmission,
    CaptureError,
    CaptureHost,
    CommitCoords,
    RolloutTokenCapture,
    StagedCallRecord,
    StageResult,
    StreamingUnsupportedError,
    hash_token_ids,
    install_capture,
)

ROOT = CaptureAdmission(rollout_id="r", model_call_id="c1", mode="text")
CHILD = {
    "rollout_id": "r",
    "model_call_id": "c2",
    "mode": "token_in",
    "parent_call_id": "c1",
    "parent_chain_hash": "0f" * 32,
    "prev_len": 2,
}
INLINE = CaptureAdmission(**CHILD, required_prefix_token_ids=[1, 2])
CHAIN = CaptureAdmission(**CHILD, staging_chain=["r/c1"])
TOKENS: dict[str, Any] = {
    "prompt_token_ids": [1, 2, 3],
    "generated_token_ids": [4],
    "generated_logprobs": [-0.5],
}


class ListSink:
    """Keeps what was staged; answers with `answer` when one is given."""

    def __init__(self, answer: Callable[[StagedCallRecord], Any] | None = None) -> None:
        self.staged: list[tuple[StagedCallRecord, dict[str, Any]]] = []
        self.answer = answer

    def stage(self, record: StagedCallRecord, **options: Any) -> StageResult:
        self.staged.append((record, options))
        if self.answer is not None:
            answer: StageResult = self.answer(record)
            return answer
        return StageResult(ok=True, staging_key=record.staging_key)


class Adapter:
    """An engine whose response is the tokens themselves."""

    def enter_prefix(self, request_payload: dict[str, Any], prefix_ids: list[int]) -> dict[str, Any]:
        return request_payload | {"prompt": prefix_ids}

    def extract_prompt_ids(self, response_payload: Any) -> list[int]:
        ids: list[int] = response_payload["prompt"]
        return ids

    def extract_generation(self, response_payload: Any) -> tuple[list[int], list[float]]:
        return response_payload["generated"], response_payload["log_probs"]

    def extract_extras(self, response_payload: Any) -> dict[str, Any] | None:
        extras: dict[str, Any] | None = response_payload.get("extras")
        return extras


def capture_with(sink: Any, **options: Any) -> RolloutTokenCapture:
    return RolloutTokenCapture(sink=sink, weight_version_fn=lambda: 5, **options)


def raising(error: BaseException) -> Callable[[Any], Any]:
    def answer(_: Any) -> Any:
        raise error

    return answer


def assert_failed(coords: CommitCoords, admission: CaptureAdmission = ROOT) -> None:
    assert coords == CommitCoords(
        rollout_id=admission.rollout_id,
        model_call_id=admission.model_call_id,
        parent_call_id=admission.parent_call_id,
        prev_len=admission.prev_len,
        delta_len=0,
        cum_len=admission.prev_len,
        weight_version=5,
        disposition="capture_failed",
    )


@pytest.mark.parametrize(
    "vector", vectors.load("worker_capture"), ids=lambda v: v["admission"]["model_call_id"]
)
def test_a_worker_stages_and_acknowledges_as_its_vector_says(vector: dict[str, Any]) -> None:
    sink = ListSink()
    capture = RolloutTokenCapture(sink=sink, weight_version_fn=lambda: vector["weight_version"])
    call = capture.begin_call(
        CaptureAdmission(**vector["admission"]), prefix_token_ids=vector["prefix_token_ids"]
    )
    coords = capture.complete_call(
        call,
        prompt_token_ids=vector["prompt_token_ids"],
        generated_token_ids=vector["generated_token_ids"],
        generated_logprobs=vector["generated_logprobs"],
        extras=vector["extras"],
    )
    assert coords.model_dump(mode="json") == vector["coords"]
    assert [record.model_dump(mode="json") for record, _ in sink.staged] == vector["staged"]


def test_a_call_is_acknowledged_only_after_the_sink_holds_it() -> None:
    sink = ListSink()
    capture = capture_with(sink)
    call = capture.begin_call(ROOT)
    assert not sink.staged
    coords = capture.complete_call(call, **TOKENS, extras={"k": 1})
    ((record, options),) = sink.staged
    assert options == {}
    assert coords.disposition == "staged"
    assert coords.staging_key == "r/c1"
    shared = coords.model_dump(exclude={"disposition", "staging_key"})
    assert shared == record.model_dump(include=set(shared))
    assert record.cumulative_hash == hash_token_ids([1, 2, 3, 4])


def test_the_sink_names_the_staging_key() -> None:
    capture = capture_with(ListSink(lambda _: StageResult(ok=True, staging_key="elsewhere")))
    assert capture.complete_call(capture.begin_call(ROOT), **TOKENS).staging_key == "elsewhere"


@pytest.mark.parametrize("attachments", [{}, {"logits": b"\0"}])
def test_attachments_reach_the_sink_untouched_and_only_when_given(attachments: Mapping[str, Any]) -> None:
    sink = ListSink()
    capture = capture_with(sink, adapter=Adapter())
    capture.complete_call(capture.begin_call(ROOT), **TOKENS, attachments=attachments)
    response = {"prompt": [1, 2, 3], "generated": [4], "log_probs": [-0.5]}
    capture.complete_call_from_response(capture.begin_call(ROOT), response, attachments=attachments)
    capture.complete_call_from_response(capture.begin_call(ROOT), response)
    (first, second, third) = sink.staged
    assert first == second
    assert first[1]["attachments"] is attachments
    assert third == (first[0], {})


def test_a_sink_without_attachments_serves_calls_that_have_none(caplog: pytest.LogCaptureFixture) -> None:
    class PlainSink:
        def stage(self, record: StagedCallRecord) -> StageResult:
            return StageResult(ok=True, staging_key=record.staging_key)

    capture = capture_with(PlainSink())
    assert capture.complete_call(capture.begin_call(ROOT), **TOKENS).disposition == "staged"
    assert_failed(capture.complete_call(capture.begin_call(ROOT), **TOKENS, attachments={"k": b""}))
    assert "rollout r, model call c1: staging failed" in caplog.text


@pytest.mark.parametrize(
    ("answer", "logged"),
    [
        (lambda _: StageResult(ok=False, error="disk full"), "the sink refused the record: disk full"),
        (raising(OSError("disk on fire")), "disk on fire"),
        (raising(TimeoutError("too late")), "too late"),
        (lambda _: None, "the sink returned NoneType"),
        (lambda _: {"ok": True, "staging_key": "k"}, "the sink returned dict"),
    ],
    ids=["refuses", "raises", "late", "none", "dict"],
)
def test_a_sink_that_did_not_stage_fails_the_capture_and_not_the_call(
    answer: Callable[[Any], Any], logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    sink = ListSink(answer)
    capture = capture_with(sink)
    call = capture.begin_call(ROOT)
    assert_failed(capture.complete_call(call, **TOKENS))
    assert "rollout r, model call c1: " in caplog.text
    assert logged in caplog.text
    with pytest.raises(CaptureError, match="already completed"):
        capture.complete_call(call, **TOKENS)
    assert len(sink.staged) == 1


def test_an_interrupt_of_the_process_is_not_taken_for_a_failing_sink() -> None:
    capture = capture_with(ListSink(raising(KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        capture.complete_call(capture.begin_call(ROOT), **TOKENS)


@pytest.mark.parametrize("admission", [ROOT, INLINE], ids=["root", "child"])
@pytest.mark.parametrize(
    "change",
    [
        {"generated_logprobs": []},
        {"generated_logprobs": [-1]},
        {"generated_logprobs": [float("nan")]},
        {"generated_logprobs": [-1e39]},
        {"generated_token_ids": [True]},
        {"generated_token_ids": [-4]},
        {"generated_token_ids": [2**64]},
        {"prompt_token_ids": [1.0, 2.0, 3.0]},
        {"prompt_token_ids": [True, 2, 3]},
        {"prompt_token_ids": {1, 2, 3}},
        {"prompt_token_ids": bytes(8)},
        {"prompt_token_ids": None},
        {"prompt_token_ids": [1, 2], "generated_token_ids": [], "generated_logprobs": [0.0]},
        {"extras": {"k": (1,)}},
        {"extras": [1]},
    ],
    ids=str,
)
def test_a_delta_that_cannot_be_built_fails_the_capture_and_not_the_call(
    admission: CaptureAdmission, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    sink = ListSink()
    capture = capture_with(sink)
    call = capture.begin_call(admission)
    assert_failed(capture.complete_call(call, **(TOKENS | change)), admission)
    assert not sink.staged
    assert "the staged record could not be built" in caplog.text
    with pytest.raises(CaptureError, match="already completed"):
        capture.complete_call(call, **TOKENS)


@pytest.mark.parametrize("prompt", [[1], [1, 9, 3], [], [2, 1, 3]], ids=str)
def test_a_prompt_that_does_not_begin_with_the_admitted_prefix_is_not_staged(
    prompt: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    sink = ListSink()
    capture = capture_with(sink)
    call = capture.begin_call(CHAIN, prefix_token_ids=[1, 2])
    assert_failed(capture.complete_call(call, **(TOKENS | {"prompt_token_ids": prompt})), CHAIN)
    assert not sink.staged
    assert "the prompt does not begin with the admitted prefix" in caplog.text


def test_a_log_of_a_failure_shows_no_token(caplog: pytest.LogCaptureFixture) -> None:
    capture = capture_with(ListSink())
    for change in ({"generated_logprobs": [-1]}, {"generated_token_ids": [-987654]}, {"extras": {"k": (1,)}}):
        tokens = TOKENS | {"prompt_token_ids": [987654]} | change
        assert_failed(capture.complete_call(capture.begin_call(ROOT), **tokens))
    assert len(caplog.records) == 3
    assert "987654" not in caplog.text


@pytest.mark.parametrize(
    ("admission", "prefix", "message"),
    [
        (ROOT, [1], "the prefix has 1 token ids, the admission's prev_len is 0"),
        (CHAIN, None, "the prefix has 0 token ids.*fetch the staging_chain"),
        (CHAIN, [], "the prefix has 0 token ids"),
        (CHAIN, [1], "the prefix has 1 token ids"),
        (CHAIN, {1, 2}, "must be a list of plain numbers or an array of them, not set"),
        (CHAIN, [True, 2], "every id must be an integer"),
        (CHAIN, [1.0, 2], "every id must be an integer"),
        (CHAIN, ["1", 2], "every id must be an integer"),
        (CHAIN, [1, -2], r"every id must lie between 0 and 2\^64-1"),
        (CHAIN, [1, 2**64], r"every id must lie between 0 and 2\^64-1"),
        (INLINE, [1, 3], "are not the admission's inline prefix"),
        (INLINE, [], "the prefix has 0 token ids"),
    ],
    ids=str,
)
def test_a_wrong_prefix_is_the_caller_s_error(admission: CaptureAdmission, prefix: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=f"rollout r, model call {admission.model_call_id}: .*{message}"):
        capture_with(ListSink()).begin_call(admission, prefix_token_ids=prefix)


@pytest.mark.parametrize(
    ("admission", "prefix", "resolved"),
    [
        (ROOT, None, []),
        (ROOT, [], []),
        (INLINE, None, [1, 2]),
        (INLINE, [1, 2], [1, 2]),
        (CHAIN, [1, 2], [1, 2]),
    ],
    ids=str,
)
def test_an_admitted_call_carries_its_prefix_and_its_identity(
    admission: CaptureAdmission, prefix: list[int] | None, resolved: list[int]
) -> None:
    call = capture_with(ListSink()).begin_call(admission, prefix_token_ids=prefix)
    assert call == ActiveCall(admission, 5, resolved)
    assert (call.rollout_id, call.model_call_id) == (admission.rollout_id, admission.model_call_id)
    assert not call.completed


def test_a_caller_that_reuses_its_list_does_not_change_the_admitted_prefix() -> None:
    prefix = [1, 2]
    call = capture_with(ListSink()).begin_call(CHAIN, prefix_token_ids=prefix)
    prefix.clear()
    assert call.prefix_token_ids == [1, 2]


def test_a_streamed_response_cannot_be_captured() -> None:
    with pytest.raises(StreamingUnsupportedError, match="rollout r, model call c1"):
        capture_with(ListSink()).begin_call(ROOT, stream=True)
    assert issubclass(StreamingUnsupportedError, CaptureError)


@pytest.mark.parametrize("version", [-1, True, 1.5, "3", None])
def test_a_weight_version_is_an_integer_of_0_or_more(version: Any) -> None:
    sink = ListSink()
    capture = RolloutTokenCapture(sink=sink, weight_version_fn=lambda: version)
    with pytest.raises(CaptureError, match="rollout r, model call c1: the weight version"):
        capture.begin_call(ROOT)
    assert capture.begin_call(ROOT, weight_version=0).weight_version == 0


def test_the_weight_version_is_the_one_at_admission() -> None:
    versions = iter([7, 8])
    sink = ListSink()
    capture = RolloutTokenCapture(sink=sink, weight_version_fn=lambda: next(versions))
    early, late = capture.begin_call(ROOT), capture.begin_call(ROOT)
    assert capture.complete_call(late, **TOKENS).weight_version == 8
    assert capture.complete_call(early, **TOKENS).weight_version == 7


@pytest.mark.parametrize("admission", [None, ROOT.model_dump()])
def test_only_an_admission_is_admitted(admission: Any) -> None:
    with pytest.raises(TypeError, match="admission must be a CaptureAdmission"):
        capture_with(ListSink()).begin_call(admission)


def test_a_failed_call_is_completed(caplog: pytest.LogCaptureFixture) -> None:
    sink = ListSink()
    capture = capture_with(sink, adapter=Adapter())
    call = capture.begin_call(INLINE)
    assert_failed(capture.fail_call(call, reason="engine crashed"), INLINE)
    assert "rollout r, model call c2: capture failed: engine crashed" in caplog.text
    for complete in (
        lambda: capture.complete_call(call, **TOKENS),
        lambda: capture.complete_call_from_response(call, {}),
        lambda: capture.fail_call(call, reason="again"),
    ):
        with pytest.raises(CaptureError, match="rollout r, model call c2: the call was already completed"):
            complete()
    assert not sink.staged


class RacedCall(ActiveCall):
    """A call whose claim takes so long that a second thread is in it too, if nothing keeps it out."""

    inside = threading.Barrier(2)
    claimed = False

    @property
    def completed(self) -> bool:
        claimed = self.claimed
        with suppress(threading.BrokenBarrierError):
            self.inside.wait(timeout=0.2)
        return claimed

    @completed.setter
    def completed(self, value: bool) -> None:
        self.claimed = value


def test_threads_that_race_complete_a_call_once() -> None:
    sink = ListSink()
    capture = capture_with(sink)
    call = RacedCall(ROOT, 5)

    def complete(_: int) -> str:
        try:
            return capture.complete_call(call, **TOKENS).disposition
        except CaptureError:
            return "refused"

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(complete, range(2))) == ["refused", "staged"]
    assert len(sink.staged) == 1


def test_calls_are_staged_at_the_same_time() -> None:
    together = threading.Barrier(2)

    def answer(record: StagedCallRecord) -> StageResult:
        together.wait(timeout=20)
        return StageResult(ok=True, staging_key=record.staging_key)

    capture = capture_with(ListSink(answer))
    with ThreadPoolExecutor(2) as pool:
        coords = list(
            pool.map(lambda call: capture.complete_call(call, **TOKENS), map(capture.begin_call, [ROOT] * 2))
        )
    assert [coord.disposition for coord in coords] == ["staged", "staged"]


def test_a_response_is_read_by_the_adapter() -> None:
    sink = ListSink()
    adapter = Adapter()
    capture = capture_with(sink, adapter=adapter)
    assert capture.adapter is adapter
    response = {"prompt": [1, 2, 3], "generated": [4], "log_probs": [-0.5], "extras": {"k": "v"}}
    coords = capture.complete_call_from_response(capture.begin_call(INLINE), response)
    expected = capture.complete_call(capture.begin_call(INLINE), **TOKENS, extras={"k": "v"})
    assert coords == expected
    assert coords.disposition == "staged"


@pytest.mark.parametrize(
    "response",
    [
        {},
        {"prompt": [1, 2, 3]},
        {"prompt": [1, 2, 3], "generated": [4], "log_probs": []},
        {"prompt": [1, 9, 3], "generated": [4], "log_probs": [-0.5]},
        None,
    ],
    ids=str,
)
def test_a_response_that_cannot_be_read_fails_the_capture_and_not_the_call(
    response: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sink = ListSink()
    capture = capture_with(sink, adapter=Adapter())
    call = capture.begin_call(INLINE)
    assert_failed(capture.complete_call_from_response(call, response), INLINE)
    assert call.completed
    assert not sink.staged
    assert "the response could not be read into a staged record" in caplog.text


def test_reading_a_response_needs_an_adapter_and_leaves_the_call_open() -> None:
    capture = capture_with(ListSink())
    call = capture.begin_call(ROOT)
    with pytest.raises(CaptureError, match="needs a CaptureAdapter"):
        capture.complete_call_from_response(call, {})
    assert capture.complete_call(call, **TOKENS).disposition == "staged"


def test_a_continuation_shorter_than_its_saved_prefix_is_not_staged(caplog: pytest.LogCaptureFixture) -> None:
    cut = {
        "source_model_call_id": "c0",
        "source_capture_key": "r",
        "staging_keys": ("r/c0",),
        "prefix_digest": hash_token_ids([1, 2, 3, 4]),
        "effective_output_limit": 8,
    }
    sink = ListSink()
    capture = capture_with(sink)

    def complete(prefix_token_count: int) -> str:
        admission = CaptureAdmission(
            **(INLINE.model_dump() | {"generation_cut": cut | {"prefix_token_count": prefix_token_count}})
        )
        return capture.complete_call(capture.begin_call(admission), **TOKENS).disposition

    assert complete(4) == "staged"
    assert complete(5) == "capture_failed"
    assert "the call has 4 tokens, its saved prefix 5" in caplog.text
    assert len(sink.staged) == 1


def test_a_serving_layer_is_given_its_capture() -> None:
    host, sink, adapter = CaptureHost(), ListSink(), Adapter()
    assert host.token_capture is None
    capture = install_capture(host, sink=sink, weight_version_fn=lambda: 3, adapter=adapter)
    assert host.token_capture is capture
    assert capture.adapter is adapter
    coords = capture.complete_call(capture.begin_call(ROOT), **TOKENS)
    assert (coords.disposition, coords.weight_version) == ("staged", 3)
    assert len(sink.staged) == 1


class AsyncSink:
    async def stage(self, record: StagedCallRecord, **options: Any) -> StageResult:
        return StageResult(ok=True, staging_key=record.staging_key)


class HalfAdapter:
    def extract_prompt_ids(self, response_payload: Any) -> list[int]:
        return []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"serving_layer": None}, "no install_token_capture"),
        ({"serving_layer": object()}, "no install_token_capture"),
        ({"serving_layer": CaptureHost}, "no install_token_capture"),
        ({"sink": None}, "the sink does not implement StagingSink"),
        ({"sink": object()}, "the sink does not implement StagingSink"),
        ({"sink": ListSink}, "the sink does not implement StagingSink"),
        ({"sink": AsyncSink()}, "the sink's stage must be synchronous"),
        ({"weight_version_fn": 3}, "weight_version_fn cannot be called"),
        ({"adapter": object()}, "the adapter does not implement CaptureAdapter"),
        ({"adapter": HalfAdapter()}, "the adapter does not implement CaptureAdapter"),
        ({"adapter": Adapter}, "the adapter does not implement CaptureAdapter"),
    ],
)
def test_what_does_not_implement_its_protocol_is_not_installed(change: dict[str, Any], message: str) -> None:
    host = CaptureHost()
    parts: dict[str, Any] = {"serving_layer": host, "sink": ListSink(), "weight_version_fn": lambda: 1}
    parts |= change
    with pytest.raises(TypeError, match=message):
        install_capture(parts.pop("serving_layer"), **parts)
    assert host.token_capture is None


def test_a_staged_call_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    capture = capture_with(ListSink())
    capture.complete_call(capture.begin_call(ROOT), **TOKENS)
    assert caplog.records == []
