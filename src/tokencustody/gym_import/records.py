"""One line of Gym's files as what the store holds of it."""

from __future__ import annotations

from array import array
from typing import Any

from tokencustody.codec.calls import construct, validated
from tokencustody.codec.exact_json import parse_json
from tokencustody.codec.id_columns import big_endian, digest_of_big_endian
from tokencustody.errors import InvalidRecordError
from tokencustody.ids import check_call_id, is_call_id
from tokencustody.records import TokenEntry
from tokencustody.txn.ledger_rows import row_of_export

# How Gym's ledger names what the store's ledger names otherwise, and what it says twice or only for itself.
_RENAMED = {"staging_digest": "digest"}
_NOT_OF_RECORD = {"context_len", "context_digest", "staging_chain", "fingerprint", "digest"}


class UnreadableLineError(ValueError):
    """A line is no record of its rollout. The message says why; `model_call_id` is the call, if that can be read."""

    def __init__(self, reason: str, model_call_id: str | None = None) -> None:
        super().__init__(reason)
        self.model_call_id = model_call_id


def read_entry(rollout_id: str, text: bytes | None) -> TokenEntry:
    """Return the record of a line of ID.tokens.jsonl, checked. Raises UnreadableLineError."""
    fields = _object(text)
    call = fields.get("model_call_id")
    named = call if isinstance(call, str) and is_call_id(call) else None
    try:
        entry = validated(construct(TokenEntry, fields))
        check_call_id(entry.model_call_id)
    except InvalidRecordError as exc:
        raise UnreadableLineError(str(exc), named) from None
    if entry.rollout_id != rollout_id:
        raise UnreadableLineError(f"the line belongs to rollout {entry.rollout_id:.255}", named)
    return entry


def digest_problem(entry: TokenEntry, sequence: array[int]) -> str:
    """Return in what the record of a call contradicts its whole sequence (64 bits each), nothing when it does not."""
    if entry.cum_len is not None and entry.cum_len != len(sequence):
        return f"cum_len is {entry.cum_len}, but the sequence has {len(sequence)} ids"
    if entry.digest is not None and entry.digest != digest_of_big_endian(big_endian(sequence)):
        return "the ids do not have the recorded digest"
    return ""


def read_ledger_row(rollout_id: str, text: bytes | None) -> tuple[Any, dict[str, Any]]:
    """Return the table and the columns of a line of ID.lineage.jsonl. Raises UnreadableLineError."""
    found = _object(text)
    call = found.get("model_call_id")
    named = call if isinstance(call, str) and is_call_id(call) else None
    exported: dict[str, Any] = {"rollout_id": rollout_id, "model_call_id": call}
    if "failure_reason" in found:
        exported["reason"] = found["failure_reason"]
    else:
        record = {
            _RENAMED.get(name, name): value for name, value in found.items() if name not in _NOT_OF_RECORD
        }
        exported |= {
            "record": record,
            "staging_chain": found.get("staging_chain", []),
            "derived_fingerprint": found.get("fingerprint"),
            "continuation_context_len": found.get("context_len", 0),
            "continuation_context_digest": found.get("context_digest", ""),
        }
    try:
        if found.get("digest", "") not in ("", None, found.get("cumulative_hash")):
            raise InvalidRecordError("digest is not the cumulative_hash")
        return row_of_export(rollout_id, exported)
    except InvalidRecordError as exc:
        raise UnreadableLineError(str(exc), named) from None


def _object(text: bytes | None) -> dict[str, Any]:
    if text is None:
        raise UnreadableLineError("the line is longer than any that a store accepts")
    try:
        found = parse_json(text)
    except (ValueError, RecursionError) as exc:
        # Not what the parser says of it: that may quote the line.
        raise UnreadableLineError("the line is no JSON") from exc
    if not isinstance(found, dict):
        raise UnreadableLineError("the line is no JSON object")
    return found
