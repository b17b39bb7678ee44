"""Ledger commits for tests, as a serving process records them after a worker staged the call."""

from __future__ import annotations

from typing import Any

from tests.support.entries import REQUEST
from tokencustody.fingerprint import FINGERPRINT_VERSION, assistant_fingerprint
from tokencustody.staging.digest import EMPTY_EXTRAS_DIGEST, compute_chain_hash, hash_token_ids
from tokencustody.staging.records import CallRecord, CaptureLedgerCommit, staging_key


def make_commit(
    rollout_id: str = "rollout-1",
    model_call_id: str = "call-1",
    *,
    request: list[dict[str, Any]] | None = None,
    text: str = "Paris.",
    tokens: list[int] | None = None,
    parent: CaptureLedgerCommit | None = None,
    **fields: Any,
) -> CaptureLedgerCommit:
    """Return the commit of a root call, or of one that continues `parent`; `fields` replace those of its record."""
    request = REQUEST if request is None else request
    response = [{"role": "assistant", "content": text}]
    delta = [10, 11, 30] if tokens is None else tokens
    key = staging_key(rollout_id, model_call_id)
    prev_len = parent.record.cum_len if parent else 0
    record = {
        "model_call_id": model_call_id,
        "parent_call_id": parent.record.model_call_id if parent else None,
        "mode": "token_in" if parent else "text",
        "prev_len": prev_len,
        "delta_len": len(delta),
        "cum_len": prev_len + len(delta),
        "weight_version": 3,
        "digest": "d" * 64,
        "extras_digest": EMPTY_EXTRAS_DIGEST,
        "staging_key": key,
        "chain_hash": compute_chain_hash(parent.record.chain_hash if parent else None, delta),
        "cumulative_hash": hash_token_ids(delta),
        "response_id": f"response-{model_call_id}",
        "output_fingerprint": assistant_fingerprint(response),
        "continuation_fingerprint": assistant_fingerprint([*request, *response]),
        "fingerprint_version": FINGERPRINT_VERSION,
        "admitted_at": 1700000000.5,
    }
    return CaptureLedgerCommit(
        rollout_id=rollout_id,
        record=CallRecord(**(record | fields)),
        staging_chain=(*(parent.staging_chain if parent else ()), key),
        request_items=request,
        response_items=response,
    )
