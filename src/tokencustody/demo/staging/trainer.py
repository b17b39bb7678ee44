"""The trainer: it reads manifests over HTTP, fetches what they name, and makes verified training rows of them."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, field
from typing import Any

from tokencustody.control import RolloutControlClient
from tokencustody.demo.staging.processes import Report, run_role
from tokencustody.staging.rebuild import LinearizedRow, ReceiptVerificationError, verify_and_linearize
from tokencustody.staging.terminal import assemble_receipt
from tokencustody.store import SqlStagingStore


@dataclass(frozen=True)
class Span:
    """One call's part of a training row: tokens `start` to `end`, the prompt's first, then those it sampled."""

    model_call_id: str
    start: int
    end: int
    prompt_tokens: int
    generated_tokens: int
    weight_version: int
    mean_log_prob: float


@dataclass(frozen=True)
class Verdict:
    """What the trainer made of one rollout. `reason` is empty for a trainable one, which has `spans`.

    `calls` counts the rows of its manifest, `failures` maps its calls that were not captured to why.
    """

    rollout_id: str
    reason: str
    detail: str
    terminal_selection: str | None
    reward: float | None
    calls: int
    failures: dict[str, str]
    spans: list[Span] = field(default_factory=list)


async def read_rollout(
    client: RolloutControlClient, staging: SqlStagingStore, result: dict[str, Any]
) -> tuple[Verdict, LinearizedRow | None]:
    """Return the verdict on a finished rollout, and its training row if it is trainable."""
    rollout_id = result["rollout_id"]
    manifest = await client.manifest(rollout_id)
    receipt = assemble_receipt(
        manifest,
        declared_response_id=result["declared_response_id"],
        scored_response=result["scored_response"],
        reward=result["reward"],
    )
    reason, detail, row = receipt.failure_reason or "", receipt.terminal_attribution_reason or "", None
    if not receipt.capture_poisoned:
        keys = [record.staging_key for record in receipt.manifest]
        snapshots = await asyncio.to_thread(staging.fetch, keys)
        try:
            row = verify_and_linearize(receipt, snapshots)
        except ReceiptVerificationError as exc:
            reason, detail = exc.code, exc.detail
    verdict = Verdict(
        rollout_id=rollout_id,
        reason=reason,
        detail=detail,
        terminal_selection=receipt.terminal_selection,
        reward=receipt.reward,
        calls=len(manifest.records),
        failures={failure.model_call_id: failure.reason for failure in manifest.failures},
        spans=[] if row is None else spans_of(row),
    )
    return verdict, row


def spans_of(row: LinearizedRow) -> list[Span]:
    """Return the calls of a training row, in its order."""
    return [
        Span(
            model_call_id=part.model_call_id,
            start=part.start,
            end=part.end,
            prompt_tokens=prompt_tokens,
            generated_tokens=generated_tokens,
            weight_version=part.weight_version,
            mean_log_prob=sum(row.logprobs[part.start : part.end]) / generated_tokens,
        )
        for part, (_, prompt_tokens, generated_tokens) in zip(
            row.weight_version_spans, row.link_spans, strict=True
        )
    ]


async def work(orders: dict[str, Any], report: Report) -> None:
    """Report a verdict on each rollout, then let all of them go."""
    rollout_ids = [result["rollout_id"] for result in orders["results"]]
    with SqlStagingStore(orders["url"], run=orders["run"]) as staging:
        async with RolloutControlClient(orders["base_url"], orders["auth_token"]) as client:
            for result in orders["results"]:
                verdict, _ = await read_rollout(client, staging, result)
                report({"verdict": asdict(verdict)})
            removal = await client.retire(rollout_ids)
        orphans = await asyncio.to_thread(staging.orphans)
    report({"retired": len(removal.removed), "absent": removal.absent, "staged_calls_left": len(orphans)})


if __name__ == "__main__":
    run_role(work)
