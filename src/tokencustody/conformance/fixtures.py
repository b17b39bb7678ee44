"""Records and staged calls for the checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokencustody.fingerprint import FINGERPRINT_VERSION, assistant_fingerprint
from tokencustody.lineage import stamp_continuation
from tokencustody.records import ParentResolutionStatus, TokenEntry, stamp_lineage
from tokencustody.staging.digest import compute_chain_hash, compute_extras_digest, hash_token_ids
from tokencustody.staging.records import CallRecord, CaptureLedgerCommit, StagedCallRecord

Items = list[dict[str, Any]]

# Answers of which nothing is hashed.
EMPTY_ANSWERS: dict[str, Items] = {
    "nothing": [],
    "an empty text": [{"role": "assistant", "content": ""}],
    "no content": [{"role": "assistant", "content": None, "reasoning_content": "Hm."}],
    "empty parts": [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": ""}]}
    ],
    "thinking": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}],
}


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


@dataclass(frozen=True)
class StagedTurn:
    """One call as its worker stages it (`staged`) and its server records it (`commit`), and its whole sequence."""

    staged: StagedCallRecord
    commit: CaptureLedgerCommit
    token_ids: list[int]

    @property
    def key(self) -> str:
        """The staging key."""
        return self.staged.staging_key

    def following(self, text: str = "And then?") -> Items:
        """Return the request that goes on after this call."""
        return [*self.commit.request_items, *self.commit.response_items, message("user", text)]


def staged_turn(
    rollout_id: str,
    call: str = "call-1",
    reply: str = "It stops late writes.",
    *,
    parent: StagedTurn | None = None,
    token_ids: Sequence[int] | None = None,
    mask: Sequence[float] | None = None,
    log_probs: Sequence[float] | None = None,
    extras: dict[str, Any] | None = None,
    weight_version: int = 3,
    **row: Any,
) -> StagedTurn:
    """Return a call that `reply` answered, a root or one that continues `parent`; its tokens follow from `call`.

    `token_ids`, `mask` and `log_probs` replace the columns of the delta, `row` replaces fields of the ledger row.
    """
    first = sum(call.encode()) % 50_000
    delta = [first, first + 1, first + 2] if token_ids is None else list(token_ids)
    sampled = [0.0] + [1.0] * (len(delta) - 1) if mask is None else list(mask)
    whole = [*(parent.token_ids if parent else ()), *delta]
    staged = StagedCallRecord.from_components(
        rollout_id=rollout_id,
        model_call_id=call,
        parent_call_id=parent.staged.model_call_id if parent else None,
        mode="token_in" if parent else "text",
        prev_len=len(whole) - len(delta),
        delta_len=len(delta),
        cum_len=len(whole),
        weight_version=weight_version,
        token_ids_delta=delta,
        token_mask_delta=sampled,
        generation_log_probs_delta=[-0.75 * m for m in sampled] if log_probs is None else list(log_probs),
        extras=extras,
        extras_digest=compute_extras_digest(extras),
        chain_hash=compute_chain_hash(parent.staged.chain_hash if parent else None, delta),
        cumulative_hash=hash_token_ids(whole),
    )
    request = parent.following() if parent else opening()
    response = [message("assistant", reply)]
    values: dict[str, Any] = {
        "staging_key": staged.staging_key,
        "response_id": f"response-{call}",
        "admitted_at": 1_700_000_000.125,
        "output_fingerprint": assistant_fingerprint(response),
        "continuation_fingerprint": assistant_fingerprint([*request, *response]),
        "fingerprint_version": FINGERPRINT_VERSION,
    }
    shared = staged.model_dump(include=set(CallRecord.model_fields))
    commit = CaptureLedgerCommit(
        rollout_id=rollout_id,
        record=CallRecord(**(shared | values | row)),
        staging_chain=(*(parent.commit.staging_chain if parent else ()), staged.staging_key),
        request_items=request,
        response_items=response,
    )
    return StagedTurn(staged, commit, whole)
