"""The serving process: it finds each call's parent, admits the call to the worker, and keeps the ledger.

It never sees a token id. Its control routes let a trainer read the manifests.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import ValidationError

from tokencustody.control.server import bind, serve_control
from tokencustody.demo.staging.plans import MISTAKEN_RESPONSE_ID, StagedPlan, plan_staged_rollouts
from tokencustody.demo.staging.processes import Line, Report, run_role
from tokencustody.fingerprint import assistant_fingerprint
from tokencustody.lineage import continuation_of
from tokencustody.protocols import LineageResolution
from tokencustody.records import ParentResolutionStatus
from tokencustody.staging.reasons import (
    INVALID_COMMIT_COORDS_REASON,
    UNRESOLVED_PARENT_REASON,
    WORKER_CAPTURE_FAILED_REASON,
    WORKER_MISSING_COMMIT_COORDS_REASON,
)
from tokencustody.staging.records import CallRecord, CaptureAdmission, CaptureLedgerCommit, CommitCoords
from tokencustody.store import SqlLineageStore

Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


@dataclass
class RolloutResult:
    """What an agent hands on when its rollout is over: a reward, and what it knows of the rewarded answer."""

    rollout_id: str
    reward: float
    declared_response_id: str | None = None
    scored_response: dict[str, Any] | None = None


@dataclass
class Tally:
    """What this process knows without asking the database. `refused` maps calls to the engine's code."""

    calls: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    retries: int = 0
    altered_by_text: int = 0
    by_parent: dict[str, int] = field(
        default_factory=lambda: {str(status): 0 for status in ParentResolutionStatus}
    )


class Gateway:
    """Serves model calls through a worker, and records each in the ledger before its answer is used.

    `retried` calls are recorded twice, as after a lost acknowledgement.
    """

    def __init__(self, ledger: SqlLineageStore, retried: frozenset[str] = frozenset()) -> None:
        self._ledger = ledger
        self._retried = retried
        self.tally = Tally()

    async def call(
        self, ask: Ask, rollout_id: str, model_call_id: str, request_items: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the worker's answer to the request."""
        parent = await self._ledger.resolve(rollout_id, request_items)
        admission = admit(rollout_id, model_call_id, parent)
        admitted_at = time.time()
        answer = await ask(
            {
                "model_call_id": model_call_id,
                "request_items": request_items,
                "admission": None if admission is None else admission.model_dump(),
            }
        )
        self.tally.calls += 1
        self.tally.by_parent[parent.status] += 1
        if "refused" in answer:
            # Nothing was sampled, so there is nothing that the ledger could miss.
            self.tally.refused[model_call_id] = answer["refused"]
            return answer
        self.tally.altered_by_text += answer["altered_by_text"]
        outcome = _check(admission, answer["commit_coords"])
        if isinstance(outcome, str):
            await self._ledger.record_failure(rollout_id, model_call_id, outcome)
            return answer
        commit = _commit(outcome, parent, request_items, answer["response"], admitted_at)
        await self._ledger.record(commit)
        if model_call_id in self._retried:
            await self._ledger.record(commit)
            self.tally.retries += 1
        return answer


def admit(rollout_id: str, model_call_id: str, parent: LineageResolution) -> CaptureAdmission | None:
    """Return the admission of a call, or None when its parent is not proven: such a call is not captured."""
    if parent.status is ParentResolutionStatus.UNRESOLVED:
        return None
    if parent.match is None:
        return CaptureAdmission(rollout_id=rollout_id, model_call_id=model_call_id, mode="text")
    return CaptureAdmission(
        rollout_id=rollout_id,
        model_call_id=model_call_id,
        parent_call_id=parent.match.model_call_id,
        prev_len=parent.match.prev_len,
        mode="token_in",
        staging_chain=list(parent.match.staging_chain),
        parent_chain_hash=parent.match.chain_hash,
    )


def _check(admission: CaptureAdmission | None, commit_coords: dict[str, Any] | None) -> CommitCoords | str:
    """Return the worker's coordinates when they are those of the admitted, staged call, else why they are not."""
    if admission is None:
        return UNRESOLVED_PARENT_REASON
    if commit_coords is None:
        return WORKER_MISSING_COMMIT_COORDS_REASON
    try:
        coords = CommitCoords.model_validate(commit_coords)
    except ValidationError:
        return INVALID_COMMIT_COORDS_REASON
    names = ("rollout_id", "model_call_id", "parent_call_id", "prev_len")
    if any(getattr(coords, name) != getattr(admission, name) for name in names):
        return INVALID_COMMIT_COORDS_REASON
    return WORKER_CAPTURE_FAILED_REASON if coords.disposition == "capture_failed" else coords


def _commit(
    coords: CommitCoords,
    parent: LineageResolution,
    request_items: list[dict[str, Any]],
    response: dict[str, Any],
    admitted_at: float,
) -> CaptureLedgerCommit:
    output = response["output"]
    continuation = continuation_of(request_items, output)
    row = coords.model_dump(exclude={"rollout_id", "disposition"}) | {
        "mode": "text" if parent.match is None else "token_in",
        "response_id": response["id"],
        "admitted_at": admitted_at,
        "output_fingerprint": assistant_fingerprint(output),
        "continuation_fingerprint": continuation.fingerprint,
        "fingerprint_version": continuation.version,
    }
    # This call's own key included: it is what a child's prefix is made of.
    chain = (*(parent.match.staging_chain if parent.match else ()), row["staging_key"])
    return CaptureLedgerCommit(
        rollout_id=coords.rollout_id,
        record=CallRecord(**row),
        staging_chain=chain,
        request_items=request_items,
        response_items=output,
    )


async def play(
    plan: StagedPlan, gateway: Gateway, ask: Ask, context: int, on_call: Callable[[], object]
) -> RolloutResult:
    """Play one rollout as its agent would, and return what the agent hands on."""
    rollout = plan.rollout
    calls = 0

    async def call(request_items: list[dict[str, Any]]) -> dict[str, Any]:
        nonlocal calls
        call_id = plan.call_id(calls)
        calls += 1
        answer = await gateway.call(ask, rollout.rollout_id, call_id, request_items)
        on_call()
        return answer

    if rollout.too_long:
        await call([_user("Proofread my notes: " + "one more line. " * (context // 3))])
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] = {}
    for text in rollout.user_turns:
        messages.append(_user(text))
        answer = await call(list(messages))
        messages.append(
            {"role": "assistant", "content": answer["response"]["output"][0]["content"][0]["text"]}
        )
    if plan.forked:
        answer = await call(messages[:-1])

    response = answer["response"]
    result = RolloutResult(rollout.rollout_id, reward=float(answer["finish_reason"] == "stop"))
    if plan.mistaken:
        result.declared_response_id = MISTAKEN_RESPONSE_ID
    elif plan.witness == "declared":
        result.declared_response_id = response["id"]
    elif plan.witness == "response_id":
        result.scored_response = response
    elif plan.witness == "content":
        result.scored_response = {name: value for name, value in response.items() if name != "id"}
    return result


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def play_all(
    plans: list[StagedPlan], gateway: Gateway, asks: list[Ask], context: int, on_call: Callable[[], object]
) -> list[RolloutResult]:
    """Play every plan, one at a time on each line to the worker. The first error stops all of them."""
    waiting = list(reversed(plans))
    results: dict[str, RolloutResult] = {}

    async def play_on(ask: Ask) -> None:
        while waiting:
            plan = waiting.pop()
            results[plan.rollout.rollout_id] = await play(plan, gateway, ask, context, on_call)

    async with asyncio.TaskGroup() as group:
        for ask in asks:
            group.create_task(play_on(ask))
    return [results[plan.rollout.rollout_id] for plan in plans]


async def work(orders: dict[str, Any], report: Report) -> None:
    """Play the rollouts, report each call and the results, and serve the control routes from first to last."""
    plans = plan_staged_rollouts(orders["rollouts"], orders["turns"], orders["seed"])
    async with contextlib.AsyncExitStack() as exits:
        ledger = await exits.enter_async_context(SqlLineageStore(orders["url"], run=orders["run"]))
        lines = [await Line.open(socket.socket(fileno=number)) for number in orders["lines"]]
        for line in lines:
            exits.callback(line.close)
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        control = asyncio.create_task(
            serve_control(
                ledger,
                auth_token=orders["auth_token"],
                sock=bind("127.0.0.1", 0),
                on_ready=ready.set_result,
            )
        )
        exits.push_async_callback(_end, control, ready)
        starting: set[asyncio.Future[Any]] = {ready, control}
        await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            await control
        report({"ready": "serving", "base_url": ready.result()})
        gateway = Gateway(ledger, frozenset(call for plan in plans for call in plan.retried_calls))
        results = await play_all(
            plans, gateway, [line.ask for line in lines], orders["context"], lambda: report({"called": 1})
        )
        report({"results": [asdict(result) for result in results], "tally": asdict(gateway.tally)})
        await control


async def _end(control: asyncio.Task[None], ready: asyncio.Future[str]) -> None:
    if ready.done() and not control.done():
        signal.raise_signal(signal.SIGTERM)  # it answers what it was asked, then returns
    else:
        control.cancel()
    await asyncio.wait({control})


if __name__ == "__main__":
    run_role(work)
