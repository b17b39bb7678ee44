"""The inference worker: it holds the engine, and stages each call's tokens before it answers.

No token id leaves this process but into the staging store: prefixes come from there, and answers carry text and
coordinates.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import zlib
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from tokencustody.demo.model import MODEL_NAME, ChatModel, Completion, ModelRefusedError
from tokencustody.demo.staging.processes import Line, Report, run_role
from tokencustody.staging.capture import RolloutTokenCapture
from tokencustody.staging.protocols import StagingSink
from tokencustody.staging.records import CaptureAdmission, StagedCallRecord, StageResult
from tokencustody.store import SqlStagingStore

FIRST_WEIGHT_VERSION = 1


class PolicyVersion:
    """The weight version in service. A policy update raises it once `update_after` calls have been admitted.

    The update is a change of number: the demo's weights stay what they are.
    """

    def __init__(self, update_after: int) -> None:
        self._calls_left = update_after

    def __call__(self) -> int:
        self._calls_left -= 1
        return FIRST_WEIGHT_VERSION + (self._calls_left < 0)


class AccidentProneSink:
    """A staging sink that loses some calls, and stages others twice, as after a lost acknowledgement."""

    def __init__(self, sink: StagingSink, lost: Collection[str], retried: Collection[str]) -> None:
        self._sink, self._lost, self._retried = sink, lost, retried

    def stage(self, record: StagedCallRecord, *, attachments: Mapping[str, Any] | None = None) -> StageResult:
        """Stage the record, or lose it, as was arranged."""
        if record.model_call_id in self._lost:
            return StageResult(ok=False, error="lost on purpose; nothing was staged")
        result = self._sink.stage(record, attachments=attachments)
        if result.ok and record.model_call_id in self._retried:
            result = self._sink.stage(record, attachments=attachments)
        return result


class InferenceWorker:
    """Answers model calls with `model` and stages those that were admitted in `staging`.

    `lost` calls are not staged, `retried` ones twice. Calls may come from many tasks at once.
    """

    def __init__(
        self,
        model: ChatModel,
        staging: SqlStagingStore,
        *,
        update_after: int,
        lost: Collection[str],
        retried: Collection[str],
        max_tokens: int,
        seed: int,
    ) -> None:
        self._model, self._staging = model, staging
        self._max_tokens, self._seed = max_tokens, seed
        self._capture = RolloutTokenCapture(
            sink=AccidentProneSink(staging, lost, retried), weight_version_fn=PolicyVersion(update_after)
        )

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the response to `request_items`, and where the call is staged if it has an `admission`.

        `refused` is the engine's code when it sampled nothing. `altered_by_text` says whether the prompt would have
        had other ids if its history had been tokenised from text again.
        """
        items = request["request_items"]
        prompt = rendered = await self._model.render(items)
        if request["admission"] is None:
            completion = await self._complete(request["model_call_id"], prompt)
            return _answer(completion, commit_coords=None, altered=False)

        admission = CaptureAdmission.model_validate(request["admission"])
        prefix: list[int] = []
        if admission.staging_chain:
            prefix = await asyncio.to_thread(self._staging.fetch_prefix_token_ids, admission.staging_chain)
            prompt = await self._model.extend(prefix, items[-1]["content"])
        call = self._capture.begin_call(admission, prefix_token_ids=prefix)
        try:
            completion = await self._complete(admission.model_call_id, prompt)
        except ModelRefusedError as refusal:
            coords = self._capture.fail_call(call, reason=refusal.code)
            return {"refused": refusal.code, "commit_coords": coords.model_dump()}
        complete_call = partial(
            self._capture.complete_call,
            call,
            prompt_token_ids=completion.prompt_token_ids,
            generated_token_ids=completion.token_ids,
            generated_logprobs=completion.log_probs,
        )
        coords = await asyncio.to_thread(complete_call)
        return _answer(completion, commit_coords=coords.model_dump(), altered=prompt != rendered)

    async def _complete(self, model_call_id: str, prompt: list[int]) -> Completion:
        seed = zlib.crc32(f"{self._seed}/{model_call_id}".encode())
        return await self._model.complete(prompt, max_tokens=self._max_tokens, seed=seed)


def _answer(completion: Completion, *, commit_coords: dict[str, Any] | None, altered: bool) -> dict[str, Any]:
    content = [{"type": "output_text", "text": completion.text}]
    return {
        "response": {
            "id": completion.response_id,
            "object": "response",
            "model": MODEL_NAME,
            "output": [{"type": "message", "role": "assistant", "content": content}],
        },
        "finish_reason": completion.finish_reason,
        "commit_coords": commit_coords,
        "altered_by_text": altered,
    }


async def work(orders: dict[str, Any], report: Report) -> None:
    """Load the model, report that it is ready, and answer on every line until it is closed."""
    with SqlStagingStore(orders["url"], run=orders["run"]) as staging:
        async with ChatModel(slots=len(orders["lines"])) as model, contextlib.AsyncExitStack() as exits:
            worker = InferenceWorker(
                model,
                staging,
                update_after=orders["update_after"],
                lost=frozenset(orders["lost"]),
                retried=frozenset(orders["retried"]),
                max_tokens=orders["max_tokens"],
                seed=orders["seed"],
            )
            lines = [await Line.open(socket.socket(fileno=number)) for number in orders["lines"]]
            for line in lines:
                exits.callback(line.close)
            report({"ready": "worker"})
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    group.create_task(line.answer_all(worker.answer))


if __name__ == "__main__":
    run_role(work)
