"""Records for the checks."""

from __future__ import annotations

from typing import Any

from tokencustody.lineage import stamp_continuation
from tokencustody.records import ParentResolutionStatus, TokenEntry, stamp_lineage

Items = list[dict[str, Any]]


def record(rollout_id: str, call: str = "call-1", **fields: Any) -> TokenEntry:
    """Return a small record; its tokens follow from `call`, `fields` replace the defaults."""
    first = sum(call.encode()) % 50_000
    values: dict[str, Any] = {
        "model": "conformance-model",
        "prompt_token_ids": [first, first + 1, first + 2],
        "generation_token_ids": [first + 3, first + 4],
        "generation_log_probs": [-0.25, -1.5],
        "output_items": [message("assistant", f"reply of {call}")],
        "response_id": f"response-{call}",
        "created_at": 1_700_000_000.125,
    }
    return TokenEntry(rollout_id=rollout_id, model_call_id=call, **(values | fields))


def message(role: str, text: str) -> dict[str, Any]:
    """Return one conversation item of the Responses dialect."""
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def opening(text: str = "What is the fence for?") -> Items:
    """Return the request of a first turn."""
    return [message("system", "You are brief."), message("user", text)]


def turn(
    rollout_id: str, call: str, request: Items, reply: str = "It stops late writes.", **fields: Any
) -> TokenEntry:
    """Return a root record that a later request can name as its parent: `request` answered with `reply`."""
    entry = record(rollout_id, call, output_items=[message("assistant", reply)], **fields)
    stamp_lineage(entry, None, parent_resolution=ParentResolutionStatus.ROOT)
    return stamp_continuation(entry, request)


def continued(request: Items, entry: TokenEntry, text: str = "And then?") -> Items:
    """Return the request that goes on after `entry` answered `request`."""
    return [*request, *entry.output_items, message("user", text)]


def child_turn(
    parent_tokens: list[int], parent: TokenEntry, call: str, request: Items, *, delta: bool
) -> TokenEntry:
    """Return a record whose prompt is `parent_tokens` (left out when `delta`) and two new ids."""
    suffix = [71, 72]
    entry = record(
        parent.rollout_id,
        call,
        prompt_token_ids=suffix if delta else [*parent_tokens, *suffix],
        output_items=[message("assistant", f"continued by {call}")],
        parent_call_id=parent.model_call_id,
        parent_resolution=ParentResolutionStatus.RESOLVED,
        prompt_is_delta=delta,
    )
    whole = [*parent_tokens, *suffix, *entry.generation_token_ids]
    stamp_lineage(
        entry, parent.model_call_id, parent_resolution=ParentResolutionStatus.RESOLVED, cumulative=whole
    )
    return stamp_continuation(entry, request)
