"""Capture inside an inference worker: a call's exact token delta is staged before its response goes out.

The order is build, stage, acknowledge. A delta that cannot be built or staged gives `capture_failed` coordinates and
a log line; it never fails the model call. A caller that breaks the order of calls gets a `CaptureError`.
"""

from __future__ import annotations

import inspect
import logging
import threading
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from tokencustody.columns import are_same, ids_of, joined, uint64s
from tokencustody.staging.digest import (
    build_staging_delta,
    compute_chain_hash,
    compute_extras_digest,
    hash_token_ids,
)
from tokencustody.staging.protocols import CaptureAdapter, StagingSink, WeightVersionProvider
from tokencustody.staging.records import CaptureAdmission, CommitCoords, StagedCallRecord, StageResult

if TYPE_CHECKING:
    from typing_extensions import Buffer

LOGGER = logging.getLogger(__name__)


class CaptureError(Exception):
    """The caller of a worker's capture broke its contract. The message names the rollout and the call."""


class StreamingUnsupportedError(CaptureError):
    """A streamed response was to be captured. Only complete responses can be staged before they go out."""


@dataclass
class ActiveCall:
    """One admitted call: the weight version at its admission, and the prefix that its prompt must begin with."""

    admission: CaptureAdmission
    weight_version: int
    prefix_token_ids: list[int] | array[int] = field(default_factory=list)
    completed: bool = field(default=False, init=False)

    @property
    def rollout_id(self) -> str:
        """The rollout of the call."""
        return self.admission.rollout_id

    @property
    def model_call_id(self) -> str:
        """The id of the call."""
        return self.admission.model_call_id


class RolloutTokenCapture:
    """Stages the token deltas of one worker's calls. Any thread may use it; each call is completed once."""

    def __init__(
        self,
        *,
        sink: StagingSink,
        weight_version_fn: WeightVersionProvider,
        adapter: CaptureAdapter | None = None,
    ) -> None:
        self._sink = sink
        self._weight_version_fn = weight_version_fn
        self._adapter = adapter
        self._completion_lock = threading.Lock()

    @property
    def adapter(self) -> CaptureAdapter | None:
        """What reads this worker's engine payloads, if anything does."""
        return self._adapter

    def begin_call(
        self,
        admission: CaptureAdmission,
        *,
        prefix_token_ids: list[int] | Buffer | None = None,
        stream: bool = False,
        weight_version: int | None = None,
    ) -> ActiveCall:
        """Admit a call and fix its weight version, now read from the provider unless `weight_version` gives it.

        `prefix_token_ids` are the parent's tokens, as a list or an array: needed when the admission names them by a
        `staging_chain`, equal to an inline prefix when there is one, empty for a root. A `generation_cut` is no parent:
        its prefix belongs to the call itself, so it is checked with `GenerationCutContinuation.check_prefix` and not
        passed here.

        Raises TypeError for what is no admission, StreamingUnsupportedError for a streamed call, and CaptureError
        for a wrong prefix or weight version.
        """
        if not isinstance(admission, CaptureAdmission):
            raise TypeError(f"admission must be a CaptureAdmission, not {type(admission).__name__}")
        if stream:
            raise StreamingUnsupportedError(f"{_name(admission)}: a streamed response cannot be captured")
        prefix = _resolve_prefix(admission, prefix_token_ids)
        if weight_version is None:
            weight_version = self._weight_version_fn()
        if type(weight_version) is not int or weight_version < 0:
            raise CaptureError(f"{_name(admission)}: the weight version must be an integer, 0 or more")
        return ActiveCall(admission, weight_version, prefix)

    def complete_call(
        self,
        call: ActiveCall,
        *,
        prompt_token_ids: list[int] | Buffer,
        generated_token_ids: list[int] | Buffer,
        generated_logprobs: list[float] | Buffer,
        extras: dict[str, Any] | None = None,
        attachments: Mapping[str, Any] | None = None,
    ) -> CommitCoords:
        """Stage the call's delta, and return its coordinates only when the sink holds it.

        `prompt_token_ids` is the whole prompt, prefix included. Each column is a list or an array as for `TokenEntry`,
        which the engine may use again once this returns. `attachments` go to the sink untouched, in the write
        of the record, and are part of no digest. Raises CaptureError for a call that was completed before.
        """
        self._claim_completion(call)
        try:
            record = _build(call, prompt_token_ids, generated_token_ids, generated_logprobs, extras)
        except Exception:
            LOGGER.exception("%s: the staged record could not be built", _name(call.admission))
            return _failed_coords(call)
        return self._stage(call, record, attachments)

    def complete_call_from_response(
        self,
        call: ActiveCall,
        response_payload: Any,
        *,
        attachments: Mapping[str, Any] | None = None,
    ) -> CommitCoords:
        """Read the engine's response with the adapter, and stage it as `complete_call` does.

        A response that the adapter refuses gives `capture_failed` coordinates. Raises CaptureError without an
        adapter, and for a call that was completed before.
        """
        adapter = self._adapter
        if adapter is None:
            raise CaptureError(f"{_name(call.admission)}: reading a response needs a CaptureAdapter")
        self._claim_completion(call)
        try:
            prompt_ids = adapter.extract_prompt_ids(response_payload)
            generated_ids, log_probs = adapter.extract_generation(response_payload)
            extras = adapter.extract_extras(response_payload)
            record = _build(call, prompt_ids, generated_ids, log_probs, extras)
        except Exception:
            LOGGER.exception("%s: the response could not be read into a staged record", _name(call.admission))
            return _failed_coords(call)
        return self._stage(call, record, attachments)

    def fail_call(self, call: ActiveCall, *, reason: str) -> CommitCoords:
        """Give up a call that will not be staged, and return its `capture_failed` coordinates.

        Raises CaptureError for a call that was completed before.
        """
        self._claim_completion(call)
        LOGGER.warning("%s: capture failed: %s", _name(call.admission), reason)
        return _failed_coords(call)

    def _claim_completion(self, call: ActiveCall) -> None:
        with self._completion_lock:
            if call.completed:
                raise CaptureError(f"{_name(call.admission)}: the call was already completed")
            call.completed = True

    def _stage(
        self, call: ActiveCall, record: StagedCallRecord, attachments: Mapping[str, Any] | None
    ) -> CommitCoords:
        try:
            # A sink that knows no attachments serves as long as none are given.
            if attachments is None:
                result = self._sink.stage(record)
            else:
                result = self._sink.stage(record, attachments=attachments)
            result = _stage_result(result)
        except Exception:
            LOGGER.exception("%s: staging failed", _name(call.admission))
            return _failed_coords(call)
        if not result.ok:
            LOGGER.warning("%s: the sink refused the record: %s", _name(call.admission), result.error)
            return _failed_coords(call)
        return CommitCoords(
            rollout_id=record.rollout_id,
            model_call_id=record.model_call_id,
            parent_call_id=record.parent_call_id,
            prev_len=record.prev_len,
            delta_len=record.delta_len,
            cum_len=record.cum_len,
            weight_version=record.weight_version,
            digest=record.digest,
            extras_digest=record.extras_digest,
            staging_key=result.staging_key,
            chain_hash=record.chain_hash,
            cumulative_hash=record.cumulative_hash,
        )


class CaptureHost:
    """The place in a serving layer where `install_capture` puts the worker's capture."""

    def __init__(self) -> None:
        self.token_capture: RolloutTokenCapture | None = None

    def install_token_capture(self, capture: RolloutTokenCapture) -> None:
        """Capture every further call with `capture`."""
        self.token_capture = capture


def install_capture(
    serving_layer: Any,
    *,
    sink: StagingSink,
    weight_version_fn: WeightVersionProvider,
    adapter: CaptureAdapter | None = None,
) -> RolloutTokenCapture:
    """Give a serving layer its capture, by its method `install_token_capture(capture)`, and return the capture.

    Raises TypeError for a part that does not implement its protocol, an asynchronous `stage` included.
    """
    if not callable(getattr(serving_layer, "install_token_capture", None)) or inspect.isclass(serving_layer):
        raise TypeError(f"the serving layer has no install_token_capture(capture): {serving_layer!r}")
    _require(sink, StagingSink, "sink")
    if inspect.iscoroutinefunction(sink.stage):
        raise TypeError(f"the sink's stage must be synchronous: {sink!r}")
    if not callable(weight_version_fn):
        raise TypeError(f"weight_version_fn cannot be called: {weight_version_fn!r}")
    if adapter is not None:
        _require(adapter, CaptureAdapter, "adapter")
    capture = RolloutTokenCapture(sink=sink, weight_version_fn=weight_version_fn, adapter=adapter)
    serving_layer.install_token_capture(capture)
    return capture


def _require(part: object, protocol: type, name: str) -> None:
    if inspect.isclass(part) or not isinstance(part, protocol):
        raise TypeError(f"the {name} does not implement {protocol.__name__}: {part!r}")


def _resolve_prefix(
    admission: CaptureAdmission, prefix_token_ids: list[int] | Buffer | None
) -> list[int] | array[int]:
    inline = admission.required_prefix_token_ids
    try:
        prefix = inline if prefix_token_ids is None else ids_of(prefix_token_ids, "prefix_token_ids")
        if isinstance(prefix, list):  # of an array everything was asked
            uint64s(prefix, "prefix_token_ids")
        is_inline = not inline or are_same(prefix, inline, "required_prefix_token_ids")
    except ValueError as exc:
        raise CaptureError(f"{_name(admission)}: {exc}") from None
    if len(prefix) != admission.prev_len:
        raise CaptureError(
            f"{_name(admission)}: the prefix has {len(prefix)} token ids, the admission's prev_len is "
            f"{admission.prev_len}" + ("; fetch the staging_chain" if admission.staging_chain else "")
        )
    if not is_inline:
        raise CaptureError(f"{_name(admission)}: prefix_token_ids are not the admission's inline prefix")
    return prefix[:]


def _build(
    call: ActiveCall,
    prompt_token_ids: list[int] | Buffer,
    generated_token_ids: list[int] | Buffer,
    generated_log_probs: list[float] | Buffer,
    extras: dict[str, Any] | None,
) -> StagedCallRecord:
    admission = call.admission
    prompt = ids_of(prompt_token_ids, "prompt_token_ids")
    generated = ids_of(generated_token_ids, "generated_token_ids")
    if not are_same(prompt[: admission.prev_len], call.prefix_token_ids, "prompt_token_ids"):
        raise ValueError("the prompt does not begin with the admitted prefix")
    delta, mask, log_probs = build_staging_delta(
        prompt_token_ids=prompt,
        generated_token_ids=generated,
        generated_log_probs=generated_log_probs,
        prev_len=admission.prev_len,
    )
    cum_len = admission.prev_len + len(delta)
    cut = admission.generation_cut
    if cut is not None and cum_len < cut.prefix_token_count:
        raise ValueError(f"the call has {cum_len} tokens, its saved prefix {cut.prefix_token_count}")
    return StagedCallRecord.from_components(
        rollout_id=admission.rollout_id,
        model_call_id=admission.model_call_id,
        parent_call_id=admission.parent_call_id,
        mode=admission.mode,
        prev_len=admission.prev_len,
        delta_len=len(delta),
        cum_len=cum_len,
        weight_version=call.weight_version,
        token_ids_delta=delta,
        token_mask_delta=mask,
        generation_log_probs_delta=log_probs,
        extras=extras,
        extras_digest=compute_extras_digest(extras),
        chain_hash=compute_chain_hash(admission.parent_chain_hash, delta),
        cumulative_hash=hash_token_ids(joined(prompt, generated, "token ids")),
    )


def _stage_result(result: object) -> StageResult:
    """Return the sink's answer, also when it is the peer's model of the same fields. Raises TypeError otherwise."""
    if isinstance(result, BaseModel) and not isinstance(result, StageResult):
        result = StageResult.model_validate(result, from_attributes=True)
    if not isinstance(result, StageResult):
        raise TypeError(f"the sink returned {type(result).__name__}, not a StageResult")
    return result


def _failed_coords(call: ActiveCall) -> CommitCoords:
    admission = call.admission
    return CommitCoords(
        rollout_id=admission.rollout_id,
        model_call_id=admission.model_call_id,
        parent_call_id=admission.parent_call_id,
        prev_len=admission.prev_len,
        delta_len=0,
        cum_len=admission.prev_len,
        weight_version=call.weight_version,
        disposition="capture_failed",
    )


def _name(admission: CaptureAdmission) -> str:
    return f"rollout {admission.rollout_id}, model call {admission.model_call_id}"
