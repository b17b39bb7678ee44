"""Entries for tests, stamped as a serving process stamps them."""

from __future__ import annotations

from typing import Any

from tokencustody import ParentResolutionStatus, TokenEntry, stamp_continuation, stamp_lineage

REQUEST = [{"role": "user", "content": "What is the capital of France?"}]


def make_entry(
    rollout_id: str = "rollout-1",
    model_call_id: str = "call-1",
    *,
    prompt: list[int] | None = None,
    generation: list[int] | None = None,
    request: list[dict[str, Any]] | None = None,
    text: str = "Paris.",
    parent: str | None = None,
    cumulative: list[int] | None = None,
    **fields: Any,
) -> TokenEntry:
    """Return a root entry, or with `parent` a resolved one; `fields` go into it as they are.

    Without a request, entries of the same prompt below the same parent answer the same one.
    """
    generation = [30, 31, 32] if generation is None else generation
    entry = TokenEntry(
        rollout_id=rollout_id,
        model_call_id=model_call_id,
        prompt_token_ids=[10, 11, 12, 13] if prompt is None else prompt,
        generation_token_ids=generation,
        generation_log_probs=fields.pop("log_probs", [-0.25 * (n + 1) for n in range(len(generation))]),
        output_items=fields.pop("output_items", [{"role": "assistant", "content": text}]),
        created_at=1700000000.25,
        **({"parent_call_id": parent, "parent_resolution": "resolved"} if parent else {}),
        **fields,
    )
    status = ParentResolutionStatus.RESOLVED if parent else ParentResolutionStatus.ROOT
    stamp_lineage(entry, parent, parent_resolution=status, cumulative=cumulative)
    if request is None:
        request = REQUEST if prompt is None else [{"role": "user", "content": f"{parent}: {prompt}"}]
    return stamp_continuation(entry, request)


def continuation(request: list[dict[str, Any]], text: str, question: str) -> list[dict[str, Any]]:
    """Return the request that follows a call which answered `request` with `text`."""
    return [*request, {"role": "assistant", "content": text}, {"role": "user", "content": question}]
