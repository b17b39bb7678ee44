"""Staged calls of a made-up rollout, and ways to tamper with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokencustody.fingerprint import FINGERPRINT_VERSION
from tokencustody.staging.digest import compute_chain_hash, compute_extras_digest, hash_token_ids
from tokencustody.staging.records import CallRecord, RolloutReceipt, StagedCallSnapshot

OTHER_HASH = "0" * 64


@dataclass(frozen=True)
class Staged:
    """One staged call: what the sink holds, its manifest row, and its whole token sequence."""

    snapshot: StagedCallSnapshot
    record: CallRecord
    token_ids: list[int]


def stage(
    call: str,
    parent: Staged | None = None,
    *,
    added: Sequence[int] = (1, 2),
    sampled: Sequence[int] = (3,),
    weight_version: int = 1,
    extras: dict[str, Any] | None = None,
    rollout: str = "r",
    chain_hash: str | None = None,
    cumulative_hash: str | None = None,
    prev_len: int | None = None,
    mask: Sequence[float] | None = None,
    **row: Any,
) -> Staged:
    """Return a call that continues `parent` by `added` prompt tokens and `sampled` tokens, its digests right.

    The hashes, the length before it and the mask can be set to wrong values that the call's digest then covers.
    """
    delta = [*added, *sampled]
    token_ids = (parent.token_ids if parent else []) + delta
    start = len(token_ids) - len(delta) if prev_len is None else prev_len
    column = list(mask) if mask is not None else [0.0] * len(added) + [1.0] * len(sampled)
    snapshot = StagedCallSnapshot.from_components(
        rollout_id=rollout,
        model_call_id=call,
        parent_call_id=parent.record.model_call_id if parent else None,
        mode="token_in" if parent else "text",
        prev_len=start,
        delta_len=len(delta),
        cum_len=start + len(delta),
        weight_version=weight_version,
        token_ids_delta=delta,
        token_mask_delta=column,
        generation_log_probs_delta=[-0.25 * (i + 1) if sampled else 0.0 for i, sampled in enumerate(column)],
        extras=extras,
        extras_digest=compute_extras_digest(extras),
        chain_hash=chain_hash or compute_chain_hash(parent.record.chain_hash if parent else None, delta),
        cumulative_hash=cumulative_hash or hash_token_ids(token_ids),
    )
    shared = snapshot.model_dump(include=set(CallRecord.model_fields))
    row = {
        "staging_key": snapshot.staging_key,
        "response_id": f"resp-{call}",
        "fingerprint_version": FINGERPRINT_VERSION,
    } | row
    return Staged(snapshot, CallRecord(**shared, **row), token_ids)


def family() -> list[Staged]:
    """Return a rollout of four calls: a root, two calls after it in a line, and a sibling of the second."""
    root = stage("a", added=[1, 2], sampled=[3], weight_version=1)
    middle = stage("b", root, added=[4], sampled=[5, 6], weight_version=2)
    last = stage("c", middle, added=[], sampled=[7, 8], weight_version=2, extras={"routes": [[1, 2]]})
    sibling = stage("d", root, added=[4], sampled=[9], weight_version=5)
    return [root, middle, last, sibling]


def receipt_of(calls: Sequence[Staged], terminal: str) -> RolloutReceipt:
    """Return a trainable receipt of these calls."""
    return RolloutReceipt(
        rollout_id="r",
        manifest=[call.record for call in calls],
        terminal_model_call_id=terminal,
        terminal_selection="declared",
    )


# Where one field is changed, to what, and the code of the failure that it must cause.
_RECEIPT_FIELDS: list[tuple[str, Any, str]] = [
    ("schema_version", 9, "unsupported_schema"),
    ("digest_version", 9, "unsupported_digest"),
    ("extras_digest_version", 9, "unsupported_extras_digest"),
    ("rollout_id", "q", "wrong_rollout"),
    ("terminal_model_call_id", "nobody", "missing_terminal"),
    ("failure_reason", "unresolved_parent", "rollout_failed"),
    ("capture_poisoned", True, "capture_poisoned"),
    ("manifest", [], "empty_manifest"),
]
# With the code of a change in the manifest row and its snapshot alike.
_SHARED_FIELDS: list[tuple[str, Any, str]] = [
    ("schema_version", 9, "wrong_schema_version"),
    ("digest_version", 9, "wrong_digest_version"),
    ("extras_digest_version", 9, "wrong_extras_digest_version"),
    ("parent_call_id", "d", "corrupt_digest"),
    ("mode", "text", "invalid_snapshot"),
    ("prev_len", 99, "invalid_snapshot"),
    ("delta_len", 99, "invalid_snapshot"),
    ("cum_len", 99, "invalid_snapshot"),
    ("weight_version", 99, "corrupt_digest"),
    ("digest", OTHER_HASH, "corrupt_digest"),
    ("extras_digest", OTHER_HASH, "corrupt_digest"),
    ("chain_hash", OTHER_HASH, "corrupt_digest"),
    ("cumulative_hash", OTHER_HASH, "corrupt_digest"),
]
_SNAPSHOT_FIELDS: list[tuple[str, Any, str]] = [
    ("rollout_id", "q", "wrong_rollout"),
    ("token_ids_delta", [4, 5, 7], "corrupt_digest"),
    ("token_ids_delta", [4, -1, 6], "invalid_snapshot"),
    ("token_mask_delta", [1.0, 1.0, 1.0], "corrupt_digest"),
    ("token_mask_delta", [0.0, 1.0, 0.0], "invalid_snapshot"),
    ("token_mask_delta", [0.0, 0.5, 1.0], "invalid_snapshot"),
    ("generation_log_probs_delta", [0.0, -0.5, -0.5], "corrupt_digest"),
    ("generation_log_probs_delta", [0.0, -0.5], "invalid_snapshot"),
    ("generation_log_probs_delta", [0.0, -0.5, float("nan")], "invalid_snapshot"),
]
TAMPERINGS: list[tuple[str, str, Any, str]] = [
    *(("receipt", name, value, code) for name, value, code in _RECEIPT_FIELDS),
    *(("both", name, value, code) for name, value, code in _SHARED_FIELDS),
    *(
        (place, name, value, f"wrong_{name}")
        for place in ("row", "snapshot")
        for name, value, _ in _SHARED_FIELDS
    ),
    ("row", "model_call_id", "nobody", "snapshot_identity_mismatch"),
    ("snapshot", "model_call_id", "nobody", "snapshot_identity_mismatch"),
    ("both", "model_call_id", "nobody", "corrupt_digest"),
    *(("snapshot", name, value, code) for name, value, code in _SNAPSHOT_FIELDS),
]


def tamper(
    receipt: Any, snapshots: Sequence[Any], place: str, name: str, value: Any
) -> tuple[Any, list[Any]]:
    """Return copies with one field changed, unvalidated: of the receipt, or of its second row, snapshot or both."""
    changed = {name: value}
    snapshots = list(snapshots)
    if place == "receipt":
        return receipt.model_copy(update=changed), snapshots
    if place in ("snapshot", "both"):
        snapshots[1] = snapshots[1].model_copy(update=changed)
    if place in ("row", "both"):
        rows = list(receipt.manifest)
        rows[1] = rows[1].model_copy(update=changed)
        receipt = receipt.model_copy(update={"manifest": rows})
    return receipt, snapshots
