"""From a receipt and the staged calls it names to one verified training row.

Nothing is trusted: every manifest row is compared to its staged call, every digest is computed again, and the row is
what the terminal's parent links, chain hashes and cumulative hash prove. A failure is a `ReceiptVerificationError` with
one of the codes below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel

from tokencustody.records import shown
from tokencustody.staging.digest import (
    EXTRAS_DIGEST_VERSION,
    STAGING_DIGEST_VERSION,
    STAGING_SCHEMA_VERSION,
    compute_chain_hash,
    compute_extras_digest,
    compute_staging_digest,
    hash_token_ids,
)
from tokencustody.staging.records import CallRecord, RolloutReceipt, StagedCallBaseSnapshot

# The receipt as a whole
UNSUPPORTED_SCHEMA = "unsupported_schema"
UNSUPPORTED_DIGEST = "unsupported_digest"
UNSUPPORTED_EXTRAS_DIGEST = "unsupported_extras_digest"
ROLLOUT_FAILED = "rollout_failed"
CAPTURE_POISONED = "capture_poisoned"
EMPTY_MANIFEST = "empty_manifest"
DUPLICATE_MANIFEST_ROW = "duplicate_manifest_row"
DUPLICATE_STAGING_KEY = "duplicate_staging_key"
ROW_COUNT_MISMATCH = "row_count_mismatch"
# A row and its snapshot; a field that differs has the code "wrong_" + its name
WRONG_ROLLOUT = "wrong_rollout"
SNAPSHOT_IDENTITY_MISMATCH = "snapshot_identity_mismatch"
DUPLICATE_SNAPSHOT = "duplicate_snapshot"
SNAPSHOT_ORDER_MISMATCH = "snapshot_order_mismatch"
INVALID_SNAPSHOT = "invalid_snapshot"
CORRUPT_DIGEST = "corrupt_digest"
CORRUPT_EXTRAS = "corrupt_extras"
# The parent graph and the terminal's chain
MISSING_TERMINAL = "missing_terminal"
MISSING_PARENT = "missing_parent"
PARENT_LENGTH_MISMATCH = "parent_length_mismatch"
CHAIN_HASH_MISMATCH = "chain_hash_mismatch"
CUMULATIVE_HASH_MISMATCH = "cumulative_hash_mismatch"
EMPTY_GENERATION = "empty_generation"
INVALID_MASK_ORDER = "invalid_mask_order"

_VERSIONS = {
    "schema_version": (STAGING_SCHEMA_VERSION, UNSUPPORTED_SCHEMA),
    "digest_version": (STAGING_DIGEST_VERSION, UNSUPPORTED_DIGEST),
    "extras_digest_version": (EXTRAS_DIGEST_VERSION, UNSUPPORTED_EXTRAS_DIGEST),
}
_COMPARED = (
    "parent_call_id",
    "prev_len",
    "delta_len",
    "cum_len",
    "weight_version",
    "digest",
    "extras_digest",
    "mode",
    "chain_hash",
    "cumulative_hash",
)


class ReceiptVerificationError(ValueError):
    """A receipt and its staged calls do not prove a training row. `code` says what failed, the message where."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.code, self.detail)


class RebuildError(ReceiptVerificationError):
    """Each staged call is what the manifest says, but together they do not form the terminal's token sequence."""


@dataclass(frozen=True)
class WeightVersionSpan:
    """Tokens `start` to `end` (exclusive) of a row were staged by one call, under one policy version."""

    model_call_id: str
    start: int
    end: int
    weight_version: int


@dataclass(frozen=True)
class ExtrasCommitment:
    """What the extras of one call must hash to, with `compute_extras_digest`, when they are loaded."""

    model_call_id: str
    extras_digest_version: int
    extras_digest: str


@dataclass(frozen=True)
class LinearizedRow:
    """One training row: the calls from the root to the terminal, end to end.

    `token_ids`, `token_mask` (1.0 for a sampled token) and `logprobs` (natural logarithms, 0.0 where the mask is 0.0)
    have one value per token. `prompt_len` counts the tokens before the first sampled one. Per call, in order:
    `model_call_ids`, `weight_versions`, `weight_version_spans`, `link_spans` (call, prompt tokens that it added,
    tokens that it sampled) and `extras_commitments`.
    """

    rollout_id: str
    token_ids: list[int]
    token_mask: list[float]
    logprobs: list[float]
    model_call_ids: list[str]
    prompt_len: int
    weight_versions: list[int]
    weight_version_spans: list[WeightVersionSpan]
    link_spans: list[tuple[str, int, int]] = field(default_factory=list)
    extras_commitments: list[ExtrasCommitment] = field(default_factory=list)


def verify_and_linearize(
    receipt: RolloutReceipt, snapshots: Sequence[StagedCallBaseSnapshot]
) -> LinearizedRow:
    """Return the training row that a receipt and its staged calls prove.

    `snapshots` are those of all manifest rows, in the manifest's order. Extras that a snapshot carries are verified
    too. Raises ReceiptVerificationError, and TypeError for anything but such models: plain data is not validated.
    """
    _require(receipt, RolloutReceipt)
    for name, (known, code) in _VERSIONS.items():
        version = getattr(receipt, name)
        if version != known:
            raise ReceiptVerificationError(code, f"the receipt has {name} {version}, not {known}")
    if receipt.failure_reason is not None:
        raise ReceiptVerificationError(ROLLOUT_FAILED, receipt.failure_reason)
    if receipt.capture_poisoned:
        raise ReceiptVerificationError(CAPTURE_POISONED, "the receipt is poisoned and gives no reason")
    return linearize(
        receipt.rollout_id, snapshots, receipt.manifest, terminal_hint=receipt.terminal_model_call_id
    )


def linearize(
    rollout_id: str,
    snapshots: Sequence[StagedCallBaseSnapshot],
    manifest: Sequence[CallRecord],
    *,
    terminal_hint: str | None = None,
) -> LinearizedRow:
    """Return the row that ends in the call `terminal_hint`, verified as `verify_and_linearize` does.

    Raises as that does, also when no terminal is given: it is never guessed here.
    """
    if not manifest:
        raise ReceiptVerificationError(EMPTY_MANIFEST, "the manifest has no calls")
    records = _by_call(manifest)
    if len(snapshots) != len(manifest):
        raise ReceiptVerificationError(
            ROW_COUNT_MISMATCH, f"{len(snapshots)} snapshots for {len(manifest)} manifest rows"
        )
    seen: set[str] = set()
    for record, snapshot in zip(manifest, snapshots, strict=True):
        _require(snapshot, StagedCallBaseSnapshot)
        _check_identity(rollout_id, record, snapshot, records, seen)
        _compare_row(record, snapshot)
        _check_integrity(snapshot)
    _check_parents(manifest, records)
    by_call = {snapshot.model_call_id: snapshot for snapshot in snapshots}
    return _join(rollout_id, [by_call[call] for call in _chain(records, terminal_hint)])


def _require(value: object, model: type[BaseModel]) -> None:
    """Raise TypeError unless the value is such a model, or the peer's of the same fields."""
    if not isinstance(value, model) and not all(
        hasattr(value, name) for name, field in model.model_fields.items() if field.is_required()
    ):
        raise TypeError(
            f"a {model.__name__} is needed, not {type(value).__name__}; validate plain data with the model"
        )


def _by_call(manifest: Sequence[CallRecord]) -> dict[str, CallRecord]:
    records: dict[str, CallRecord] = {}
    keys: set[str] = set()
    for record in manifest:
        _require(record, CallRecord)
        call = record.model_call_id
        if call in records:
            raise ReceiptVerificationError(DUPLICATE_MANIFEST_ROW, f"the manifest names call {call} twice")
        if record.staging_key in keys:
            raise ReceiptVerificationError(
                DUPLICATE_STAGING_KEY,
                f"call {call} has the staging key of a call before it, {record.staging_key:.200}",
            )
        records[call] = record
        keys.add(record.staging_key)
    return records


def _check_identity(
    rollout_id: str,
    record: CallRecord,
    snapshot: StagedCallBaseSnapshot,
    records: dict[str, CallRecord],
    seen: set[str],
) -> None:
    """Raise ReceiptVerificationError unless the snapshot is that of the row; note in `seen` that it came."""
    call = snapshot.model_call_id
    # A row that a checkpoint brought in was staged by another rollout. Rows of protocol release 0.7.0 lack the field.
    staged_by = getattr(record, "capture_key", None) or rollout_id
    if snapshot.rollout_id != staged_by:
        raise ReceiptVerificationError(
            WRONG_ROLLOUT,
            f"snapshot {call} belongs to rollout {snapshot.rollout_id!s:.200}, not {staged_by!s:.200}",
        )
    if call not in records:
        raise ReceiptVerificationError(SNAPSHOT_IDENTITY_MISMATCH, f"snapshot {call} is not in the manifest")
    if call in seen:
        raise ReceiptVerificationError(DUPLICATE_SNAPSHOT, f"the snapshot of call {call} is there twice")
    seen.add(call)
    if call != record.model_call_id:
        raise ReceiptVerificationError(
            SNAPSHOT_ORDER_MISMATCH,
            f"the snapshot of {record.staging_key} must be of call {record.model_call_id}, not {call}",
        )


def _compare_row(record: CallRecord, snapshot: StagedCallBaseSnapshot) -> None:
    for name, (known, _) in _VERSIONS.items():
        staged, recorded = getattr(snapshot, name), getattr(record, name)
        if not staged == recorded == known:
            raise ReceiptVerificationError(
                f"wrong_{name}",
                f"call {record.model_call_id}: snapshot {shown(staged)}, manifest {shown(recorded)}, expected {known}",
            )
    for name in _COMPARED:
        staged, recorded = getattr(snapshot, name), getattr(record, name)
        if staged != recorded:
            raise ReceiptVerificationError(
                f"wrong_{name}",
                f"call {record.model_call_id}: snapshot {shown(staged)}, manifest {shown(recorded)}",
            )


def _check_integrity(snapshot: StagedCallBaseSnapshot) -> None:
    call = snapshot.model_call_id
    extras = getattr(snapshot, "extras", None)
    try:
        digest = compute_staging_digest(
            schema_version=snapshot.schema_version,
            digest_version=snapshot.digest_version,
            extras_digest_version=snapshot.extras_digest_version,
            rollout_id=snapshot.rollout_id,
            model_call_id=call,
            parent_call_id=snapshot.parent_call_id,
            mode=snapshot.mode,
            prev_len=snapshot.prev_len,
            delta_len=snapshot.delta_len,
            cum_len=snapshot.cum_len,
            weight_version=snapshot.weight_version,
            token_ids_delta=snapshot.token_ids_delta,
            token_mask_delta=snapshot.token_mask_delta,
            generation_log_probs_delta=snapshot.generation_log_probs_delta,
            extras_digest=snapshot.extras_digest,
            chain_hash=snapshot.chain_hash,
            cumulative_hash=snapshot.cumulative_hash,
        )
        # Without extras there is only the commitment, which the row hands on.
        extras_digest = snapshot.extras_digest if extras is None else compute_extras_digest(extras)
    except (TypeError, ValueError) as error:
        raise ReceiptVerificationError(INVALID_SNAPSHOT, f"call {call}: {error}") from error
    if digest != snapshot.digest:
        raise ReceiptVerificationError(CORRUPT_DIGEST, f"call {call}: the digest does not match the contents")
    if extras_digest != snapshot.extras_digest:
        raise ReceiptVerificationError(
            CORRUPT_EXTRAS, f"call {call}: extras_digest does not match the extras"
        )


def _check_parents(manifest: Sequence[CallRecord], records: dict[str, CallRecord]) -> None:
    # A child starts where its parent ends and adds tokens, so links that pass here cannot form a circle.
    for record in manifest:
        if record.parent_call_id is None:
            continue
        parent = records.get(record.parent_call_id)
        if parent is None:
            raise RebuildError(
                MISSING_PARENT,
                f"parent {record.parent_call_id} of call {record.model_call_id} is not in the manifest",
            )
        if record.prev_len != parent.cum_len:
            raise RebuildError(
                PARENT_LENGTH_MISMATCH,
                f"call {record.model_call_id} starts at {record.prev_len}, its parent {parent.model_call_id} ends "
                f"at {parent.cum_len}",
            )


def _chain(records: dict[str, CallRecord], terminal: str | None) -> list[str]:
    if terminal is None:
        raise RebuildError(MISSING_TERMINAL, "no terminal call is given")
    if terminal not in records:
        raise RebuildError(MISSING_TERMINAL, f"terminal call {terminal!s:.200} is not in the manifest")
    chain: list[str] = []
    call: str | None = terminal
    while call is not None:
        chain.append(call)
        call = records[call].parent_call_id
    return chain[::-1]


def _join(rollout_id: str, chain: Sequence[StagedCallBaseSnapshot]) -> LinearizedRow:
    row = LinearizedRow(rollout_id, [], [], [], [], _carried(chain[0]), [], [])
    chain_hash = None
    for snapshot in chain:
        call = snapshot.model_call_id
        carried = _carried(snapshot)
        chain_hash = compute_chain_hash(chain_hash, snapshot.token_ids_delta)
        if chain_hash != snapshot.chain_hash:
            raise RebuildError(CHAIN_HASH_MISMATCH, f"call {call} does not continue the chain of its parent")
        row.token_ids.extend(snapshot.token_ids_delta)
        row.token_mask.extend(snapshot.token_mask_delta)
        row.logprobs.extend(snapshot.generation_log_probs_delta)
        row.model_call_ids.append(call)
        row.weight_versions.append(snapshot.weight_version)
        row.weight_version_spans.append(
            WeightVersionSpan(call, snapshot.prev_len, snapshot.cum_len, snapshot.weight_version)
        )
        row.link_spans.append((call, carried, snapshot.delta_len - carried))
        row.extras_commitments.append(
            ExtrasCommitment(call, snapshot.extras_digest_version, snapshot.extras_digest)
        )
    if hash_token_ids(row.token_ids) != chain[-1].cumulative_hash:
        raise RebuildError(
            CUMULATIVE_HASH_MISMATCH,
            f"the cumulative hash of terminal call {chain[-1].model_call_id} is not that of the row's tokens",
        )
    return row


def _carried(snapshot: StagedCallBaseSnapshot) -> int:
    """Return how many prompt tokens the call added before the ones it sampled."""
    mask = snapshot.token_mask_delta
    if 1.0 not in mask:
        raise RebuildError(EMPTY_GENERATION, f"call {snapshot.model_call_id} sampled no token")
    carried = mask.index(1.0)
    if 0.0 in mask[carried:]:
        raise RebuildError(
            INVALID_MASK_ORDER,
            f"call {snapshot.model_call_id}: a prompt token follows a sampled one in the mask",
        )
    return carried
