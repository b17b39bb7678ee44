"""What a row of the ledger is made of: a commit or an exported row, and what manifests and exports say of it.

The columns without `recorded_` hold the fingerprint that the store derived from the conversation, for by that a request
finds its parent. What the record itself claimed is kept beside it, and comes back with the record.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from tokencustody.codec.calls import first_problem
from tokencustody.errors import InvalidRecordError
from tokencustody.fingerprint import FINGERPRINT_VERSION
from tokencustody.ids import check_call_id, check_rollout_id, check_text
from tokencustody.lineage import Continuation, continuation_of
from tokencustody.schema.tables import ledger_calls, ledger_failures
from tokencustody.staging.reasons import (
    LEDGER_ROW_MISSING_CHAIN_HASH_REASON,
    LEDGER_ROW_MISSING_RESPONSE_ID_REASON,
)
from tokencustody.staging.records import CallRecord, CaptureLedgerCommit, ManifestFailure, RolloutManifest

# The columns of a call that are fields of its manifest row, and where what the record claimed stands instead.
RECORD_COLUMNS = tuple(name for name in CallRecord.model_fields if name in ledger_calls.c)
_CLAIMED = {
    "continuation_fingerprint": "recorded_fingerprint",
    "fingerprint_version": "recorded_fingerprint_version",
}
_MAX_COLUMN_INT = 2**63 - 1
# A record that lacks one of these is kept and stands under the manifest's failures.
MAY_LACK = {"response_id": "-", "chain_hash": "0" * 64, "cumulative_hash": "0" * 64}
# How rows of other stores name what ours name otherwise.
_OTHER_NAMES = {
    "context_len": "continuation_context_len",
    "context_digest": "continuation_context_digest",
    "failure_reason": "reason",
    "fingerprint": "derived_fingerprint",
}


def row_of_commit(commit: CaptureLedgerCommit) -> dict[str, Any]:
    """Return the columns of a commit. Raises InvalidRecordError."""
    if not isinstance(commit, CaptureLedgerCommit):
        raise InvalidRecordError(f"commit must be a CaptureLedgerCommit, not {type(commit).__name__}")
    try:
        checked = CaptureLedgerCommit.model_validate(commit.model_dump())
    except ValidationError as exc:
        raise InvalidRecordError(first_problem(exc)) from None
    check_rollout_id(checked.rollout_id)
    try:
        made = continuation_of(checked.request_items, checked.response_items)
    except (ValueError, TypeError, RecursionError) as exc:
        raise InvalidRecordError(f"request_items or response_items of the commit: {exc}") from None
    return _call_row(checked.record.model_dump(), checked.staging_chain, made)


def row_of_export(rollout_id: str, row: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the table and the columns of an exported row, whose record may also stand in it field by field.

    The hash is derived from the columns, whatever the row says of it. Raises InvalidRecordError.
    """
    if not isinstance(row, Mapping):
        raise InvalidRecordError(f"a row must be an object, not {type(row).__name__}")
    try:
        row = {_OTHER_NAMES.get(name, name): value for name, value in row.items()}
        source = check_rollout_id(row.get("rollout_id", rollout_id))
        if "reason" in row:
            check_call_id(row["model_call_id"])
            failure = ManifestFailure(model_call_id=row["model_call_id"], reason=row["reason"])
            return ledger_failures, {
                "model_call_id": failure.model_call_id,
                "reason": check_text(failure.reason, "reason"),
            }
        record = dict(row["record"] if "record" in row else _flat_record(row))
        CallRecord.model_validate(
            record | {name: record.get(name) or filler for name, filler in MAY_LACK.items()}
        )
        if source != rollout_id:
            record["capture_key"] = record.get("capture_key") or source
        derived = row.get("derived_fingerprint")
        made = Continuation(
            check_text(
                record.get("continuation_fingerprint") or "" if derived is None else derived, "fingerprint"
            ),
            row["continuation_context_len"],
            check_text(row["continuation_context_digest"], "continuation_context_digest"),
            row.get("derived_fingerprint_version") or record.get("fingerprint_version") or 0,
        )
        columns = _call_row(record, row["staging_chain"], made)
        return ledger_calls, dict(_as_claimed(columns) if derived is None else columns)
    except ValidationError as exc:
        raise InvalidRecordError(first_problem(exc)) from None
    except KeyError as exc:
        raise InvalidRecordError(f"{exc.args[0]} is missing") from None
    except (ValueError, TypeError) as exc:
        raise InvalidRecordError(str(exc)) from None


def exported_call(rollout_id: str, row: Any) -> dict[str, Any]:
    """Return what `row_of_export` takes, of a row of a call."""
    derived = {
        "derived_fingerprint": row.continuation_fingerprint,
        "derived_fingerprint_version": row.fingerprint_version,
    }
    return {
        "rollout_id": rollout_id,
        "model_call_id": row.model_call_id,
        "record": record_of(row),
        "staging_chain": json.loads(row.staging_chain),
        **(derived if row.recorded_fingerprint_version is not None else {}),
        "continuation_context_len": row.continuation_context_len,
        "continuation_context_digest": row.continuation_context_digest,
        "payload_sha256": row.payload_sha256,
    }


def exported_failure(rollout_id: str, row: Any) -> dict[str, Any]:
    """Return what `row_of_export` takes, of a row of a failure."""
    return {"rollout_id": rollout_id, "model_call_id": row.model_call_id, "reason": row.reason}


def flat(exported: Mapping[str, Any]) -> dict[str, Any]:
    """Return an exported row with the fields of its record beside the others instead of below them."""
    return {**exported.get("record", {}), **{name: exported[name] for name in exported if name != "record"}}


def record_of(row: Any) -> dict[str, Any]:
    """Return the fields of the record as they were recorded, of a row of a call."""
    fields = {name: getattr(row, name) for name in RECORD_COLUMNS}
    if row.recorded_fingerprint_version is not None:
        fields |= {name: getattr(row, column) for name, column in _CLAIMED.items()}
    return fields


def manifest_of(rollout_id: str, calls: Sequence[Any], failures: Sequence[Any]) -> dict[str, Any]:
    """Return the manifest that those rows make, as `SqlLineageStore.manifest` does."""
    problems: list[tuple[int, ManifestFailure]] = [
        (row.position, ManifestFailure(model_call_id=row.model_call_id, reason=row.reason))
        for row in failures
    ]
    records = []
    for row in calls:
        reason = _why_incomplete(row)
        if reason is None:
            records.append(CallRecord(**record_of(row)))
        else:
            problems.append((row.position, ManifestFailure(model_call_id=row.model_call_id, reason=reason)))
    manifest = RolloutManifest(
        rollout_id=rollout_id,
        records=records,
        failures=[failure for _, failure in sorted(problems, key=lambda problem: problem[0])],
    )
    wire = manifest.model_dump(mode="json")
    for record in wire["records"]:
        # Readers of the release before this field refuse a record that has it.
        if record["capture_key"] is None:
            del record["capture_key"]
    return wire


def is_same_call(held: Any, row: Mapping[str, Any]) -> bool:
    """Return whether a stored row is of the same commit, in which conversations count by their hashes alone."""
    # Not by their own hashes: those of older rows cover something else.
    said: Mapping[str, Any] = held._mapping
    if said["recorded_fingerprint_version"] is None or row["recorded_fingerprint_version"] is None:
        said, row = _as_claimed(said), _as_claimed(row)
    return all(said[name] == value for name, value in row.items() if name != "payload_sha256")


def _call_row(record: Mapping[str, Any], staging_chain: Iterable[str], made: Continuation) -> dict[str, Any]:
    row = {name: record.get(name) for name in RECORD_COLUMNS}
    check_call_id(record["model_call_id"])
    for name, value in row.items():
        if isinstance(value, str):
            check_text(value, f"record.{name}")
        elif isinstance(value, int) and value > _MAX_COLUMN_INT:
            raise InvalidRecordError(f"record.{name}: {value} does not lie between 0 and 2^63-1")
    for name, number in (
        ("continuation_context_len", made.context_len),
        ("fingerprint_version", made.version),
    ):
        if type(number) is not int or not 0 <= number <= _MAX_COLUMN_INT:
            raise InvalidRecordError(f"{name} is no integer between 0 and 2^63-1")
    if not isinstance(staging_chain, list | tuple):
        raise InvalidRecordError(f"staging_chain must be a list, not {type(staging_chain).__name__}")
    chain = [check_text(key, f"staging_chain[{index}]") for index, key in enumerate(staging_chain)]
    claimed = record.get("fingerprint_version") or 0
    row |= {
        "cumulative_hash": record.get("cumulative_hash") or "",
        "recorded_fingerprint": record.get("continuation_fingerprint"),
        "recorded_fingerprint_version": claimed,
        "continuation_fingerprint": made.fingerprint,
        # By a record without a version, or with one that its reader could not check, nothing is ever resolved.
        "fingerprint_version": made.version if claimed == FINGERPRINT_VERSION else claimed,
        "staging_chain": json.dumps(chain, ensure_ascii=False),
        "continuation_context_len": made.context_len,
        "continuation_context_digest": made.context_digest,
    }
    identity = json.dumps(row, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
    return row | {"payload_sha256": hashlib.sha256(identity).hexdigest()}


def _as_claimed(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the columns as they are where nobody derived a fingerprint, as in rows older than revision 0005."""
    if row["recorded_fingerprint_version"] is None:
        return row
    claims = {name: row[column] for name, column in _CLAIMED.items()}
    return {**row, **claims, **dict.fromkeys(_CLAIMED.values())}


def _flat_record(row: Mapping[str, Any]) -> dict[str, Any]:
    record = {name: row[name] for name in CallRecord.model_fields if name in row}
    if "staging_digest" in row:
        # The other store's name for it; its `digest` is the cumulative hash.
        record["digest"] = row["staging_digest"]
    return record


def _why_incomplete(row: Any) -> str | None:
    if not row.response_id:
        return LEDGER_ROW_MISSING_RESPONSE_ID_REASON
    return None if row.chain_hash and row.cumulative_hash else LEDGER_ROW_MISSING_CHAIN_HASH_REASON
