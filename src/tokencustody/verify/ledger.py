"""Rules on the ledger: its order, its parents, and whether it agrees with what is staged and stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from tokencustody.codec.calls import first_problem
from tokencustody.codec.row_hash import is_proven
from tokencustody.codec.staged import CALL_COLUMNS
from tokencustody.schema.tables import ledger_calls, ledger_failures
from tokencustody.staging.records import CallRecord
from tokencustody.txn.fence import RolloutKey
from tokencustody.txn.ledger_rows import MAY_LACK, record_of
from tokencustody.verify.calls import ProvenCall
from tokencustody.verify.findings import Found, Rule

# What a staged call says too.
SHARED_COLUMNS = tuple(name for name in CALL_COLUMNS if name != "rollout_id")
_RESTORE = "restore the row from a backup"


def staged_under(row: Any) -> tuple[str, str]:
    """Return the rollout and the call under which a ledger row says that its tokens are staged."""
    # A rollout id has no slash, a call id may.
    rollout_id, _, model_call_id = row.staging_key.partition("/")
    return rollout_id, model_call_id


def check_ledger(
    key: RolloutKey,
    calls: Sequence[Any],
    failed: Sequence[Any],
    malformed: Collection[str],
    staged: Callable[[tuple[str, str]], Any | None],
    proven: Mapping[str, ProvenCall],
    found: Found,
) -> None:
    """Check the ledger rows of a rollout, whose values have the form of their columns.

    `malformed` are the calls of the other rows. `staged` returns the row of a staged call, by rollout and call, if
    there is one; `proven` are the complete records.
    """

    def say(rule: Rule, call_id: str, text: str) -> None:
        found.add(key, rule, text, call_id)

    found.counts.ledger_rows += len(calls) + len(failed)
    by_id = {row.model_call_id: row for row in calls}
    failed_at = {row.model_call_id: row.position for row in failed}
    if not malformed:
        _check_positions(calls, failed, say)
    chains = {row.model_call_id: _chain(row) for row in calls}
    for table, rows in ((ledger_calls, calls), (ledger_failures, failed)):
        for row in rows:
            if not is_proven(table, row):
                text = f"it does not have the SHA-256 in row_sha256, so one of its columns was changed; {_RESTORE}"
                say(Rule.LEDGER_HASH, row.model_call_id, text)
    for row in calls:
        call_id, chain = row.model_call_id, chains[row.model_call_id]
        problem = _problem(row, chain)
        if problem:
            say(Rule.LEDGER_ROW, call_id, f"{problem}; {_RESTORE}")
        if row.parent_call_id is not None and row.parent_call_id not in malformed:
            _check_parent(row, by_id.get(row.parent_call_id), failed_at, chain, chains, say)
        tokens = staged(staged_under(row))
        if tokens is not None:
            differing = [name for name in SHARED_COLUMNS if getattr(tokens, name) != getattr(row, name)]
            if differing:
                text = (
                    f"{', '.join(differing)} differ from the call staged under its key; restore the wrong one"
                )
                say(Rule.LEDGER_STAGED, call_id, text)
        if call_id in proven:
            differing = _differing_from_entry(row, proven[call_id])
            if differing:
                text = f"{', '.join(differing)} differ from its complete record; restore the wrong one"
                say(Rule.LEDGER_ENTRY, call_id, text)


_Say = Callable[[Rule, str, str], None]


def _check_positions(calls: Sequence[Any], failed: Sequence[Any], say: _Say) -> None:
    ordered = sorted([*calls, *failed], key=lambda row: (row.position, row.model_call_id))
    for before, row in zip([None, *ordered], ordered, strict=False):
        last = 0 if before is None else before.position
        if row.position != last + 1:
            text = f"its position {row.position} follows {last}: a row is missing before it or was moved"
            say(Rule.LEDGER_POSITION, row.model_call_id, f"{text}; restore the ledger from a backup")


def _chain(row: Any) -> list[str] | None:
    try:
        chain = json.loads(row.staging_chain)
    except (ValueError, RecursionError):
        return None
    return chain if isinstance(chain, list) and all(isinstance(each, str) for each in chain) else None


def _problem(row: Any, chain: list[str] | None) -> str:
    record = record_of(row)
    try:
        CallRecord.model_validate(
            record | {name: record[name] or filler for name, filler in MAY_LACK.items()}
        )
    except ValidationError as exc:
        return f"it is no valid record ({first_problem(exc)})"
    if chain is None:
        return "its staging chain is no list of keys"
    if chain and chain[-1] != row.staging_key:
        return "its staging chain does not end with its own staging key"
    return ""


def _check_parent(
    row: Any,
    parent: Any | None,
    failed_at: Mapping[str, int],
    chain: list[str] | None,
    chains: Mapping[str, list[str] | None],
    say: _Say,
) -> None:
    call_id, name = row.model_call_id, f"{row.parent_call_id:.512}"
    if parent is None:
        how = "was recorded as failed" if row.parent_call_id in failed_at else "is not in the ledger"
        say(
            Rule.LEDGER_PARENT,
            call_id,
            f"its parent, model call {name}, {how}; do not train on a chain through it",
        )
        return
    if parent.cum_len != row.prev_len or parent.position >= row.position:
        text = f"it follows {row.prev_len} tokens at position {row.position}, but its parent, model call {name}, "
        text += f"ends after {parent.cum_len} at position {parent.position}; restore the wrong one"
        say(Rule.LEDGER_PARENT, call_id, text)
    above = chains[parent.model_call_id]
    if chain and above and chain[:-1] != above:
        text = f"its staging chain does not continue that of its parent, model call {name}; {_RESTORE}"
        say(Rule.LEDGER_CHAIN, call_id, text)


def _differing_from_entry(row: Any, call: ProvenCall) -> list[str]:
    """Return the columns that contradict what the complete record says, as far as it says anything."""
    fields = call.fields
    said: dict[str, Any] = {"cum_len": call.length}
    if row.cumulative_hash:
        said["cumulative_hash"] = call.staging_hash
    if fields["response_id"] and row.response_id:
        said["response_id"] = fields["response_id"]
    if row.continuation_fingerprint and fields["fingerprint_version"] == row.fingerprint_version:
        said["continuation_fingerprint"] = fields["continuation_fingerprint"]
        said["continuation_context_len"] = fields["continuation_context_len"]
        said["continuation_context_digest"] = fields["continuation_context_digest"]
    return [name for name, value in said.items() if getattr(row, name) != value]
