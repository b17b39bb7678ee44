"""The trainable chain of a rollout whose token data workers staged: the one that its receipt proves."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from tokencustody.chains.chains import Chain, Link
from tokencustody.chains.engine_fields import EngineFields, routed_text
from tokencustody.chains.reading import FrozenRollout
from tokencustody.chains.reasons import LeftOut, Why
from tokencustody.codec.staged import unpack_call, unpack_extras
from tokencustody.records import ParentResolutionStatus, compute_digest
from tokencustody.staging.rebuild import LinearizedRow, ReceiptVerificationError, verify_and_linearize
from tokencustody.staging.records import RolloutReceipt
from tokencustody.staging.terminal import assemble_receipt
from tokencustody.txn.ledger_rows import manifest_of

_MAX_INT64 = 2**63 - 1


def staged_chain(rollout: FrozenRollout) -> tuple[Chain | None, list[LeftOut]]:
    """Return the chain that ends in the rollout's terminal call, if one is proven, and what is not in it.

    The terminal is where the parent links end, as `assemble_receipt` finds it without a scored response. Raises
    CorruptEntryError that names a staged call whose bytes or extras are not those that were staged.
    """
    manifest = manifest_of(
        rollout.key.rollout_id, list(rollout.ledger.values()), list(rollout.ledger_failures)
    )
    receipt = assemble_receipt(manifest)
    if receipt.capture_poisoned:
        return None, [LeftOut.of(rollout.key, receipt.failure_reason or "capture_poisoned")]
    missing = [row.model_call_id for row in receipt.manifest if row.model_call_id not in rollout.staged]
    if missing:
        return None, [LeftOut.of(rollout.key, Why.STAGED_CALL_MISSING, call) for call in missing]
    snapshots = [unpack_call(rollout.staged[row.model_call_id]) for row in receipt.manifest]
    try:
        row = verify_and_linearize(receipt, snapshots)
    except ReceiptVerificationError as exc:
        return None, [LeftOut.of(rollout.key, exc.code, detail=exc.detail[:500])]
    if max(row.token_ids) > _MAX_INT64:
        return None, [LeftOut.of(rollout.key, Why.BEYOND_INT64)]
    on_chain = set(row.model_call_ids)
    beside = [
        LeftOut.of(rollout.key, Why.NOT_ON_TERMINAL_CHAIN, call)
        for call in rollout.ledger
        if call not in on_chain
    ]
    routes = {
        call: routed_text((unpack_extras(rollout.staged[call]) or {}).get("routed_experts"))
        for call in row.model_call_ids
    }
    return _chain(rollout, receipt, row, routes), beside


def staged_left_out(rollout: FrozenRollout, why: Why) -> list[LeftOut]:
    """Return `why` for each staged call of the rollout, for which its files have no place, and which are missing."""
    return [
        LeftOut.of(rollout.key, why if call in rollout.staged else Why.STAGED_CALL_MISSING, call)
        for call in rollout.only_in_ledger
    ]


def _chain(
    rollout: FrozenRollout, receipt: RolloutReceipt, row: LinearizedRow, routes: Mapping[str, str | None]
) -> Chain:
    records = {record.model_call_id: record for record in receipt.manifest}
    links = []
    for (call, carried, generated), span in zip(row.link_spans, row.weight_version_spans, strict=True):
        is_root = records[call].parent_call_id is None
        links.append(
            Link(
                model_call_id=call,
                start=span.start,
                generation_start=span.start + carried,
                generation_len=generated,
                engine=EngineFields(span.weight_version, None, routes[call]),
                model="",
                parent_resolution=ParentResolutionStatus.ROOT if is_root else ParentResolutionStatus.RESOLVED,
                response_id=records[call].response_id,
                payload_sha256=rollout.staged[call].payload_sha256,
            )
        )
    return Chain(
        source="ledger",
        token_ids=array("q", row.token_ids),
        loss_mask=array("b", map(int, row.token_mask)),
        log_probs=array("d", row.logprobs),
        links=tuple(links),
        digest=compute_digest(row.token_ids),
    )
