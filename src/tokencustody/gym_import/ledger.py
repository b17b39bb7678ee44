"""The ledger of a rollout in Gym's files, compared with the database's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from tokencustody.gym_import.files import lines
from tokencustody.gym_import.findings import Findings
from tokencustody.gym_import.held import Held, ledger_call_txn
from tokencustody.gym_import.records import UnreadableLineError, read_ledger_row
from tokencustody.schema.tables import ledger_failures
from tokencustody.txn.fence import RolloutKey
from tokencustody.txn.ledger_rows import is_same_call


def new_ledger_rows(
    connection: Connection | None, key: RolloutKey, path: Path | None, held: Held, found: Findings
) -> list[tuple[Any, dict[str, Any]]]:
    """Return the rows of a ledger file that the database lacks, each with its table; `held` knows them from then on."""
    calls, failed = held.ledger, held.ledger_failures
    seen: dict[str, str] = {}
    failed_before: set[str] = set()
    new: list[tuple[Any, dict[str, Any]]] = []
    for line in lines(path):
        if line.is_blank:
            continue
        try:
            table, row = read_ledger_row(key.rollout_id, line.text)
        except UnreadableLineError as exc:
            found.lose_line(path, line, exc)
            continue
        found.rollout.ledger_rows += 1
        call = row["model_call_id"]
        if table is ledger_failures:
            failed_before.add(call)
            reasons = failed.setdefault(call, set())
            if row["reason"] not in reasons:
                reasons.add(row["reason"])
                new.append((table, row))
            continue
        identity = row["payload_sha256"]
        if call in failed_before:
            found.lose(path, line, call, "the call failed before; that stays")
        elif seen.setdefault(call, identity) != identity:
            found.lose(path, line, call, "the ledger has other data of the call before; those stay")
        elif call in calls or call in failed:
            if not _is_in_ledger(connection, key, held, row):
                found.conflict(path, "the database's ledger holds the call with other data", line, call)
        else:
            calls[call] = identity
            new.append((table, row))
    return new


def _is_in_ledger(connection: Connection | None, key: RolloutKey, held: Held, row: dict[str, Any]) -> bool:
    call = row["model_call_id"]
    identity = held.ledger.get(call)
    if identity == row["payload_sha256"]:
        return True
    if identity is None or connection is None:
        return False
    stored = ledger_call_txn(connection, key, call)
    # Gym's line does not say by which rules a fingerprint was derived.
    return is_same_call(stored, row | {"fingerprint_version": stored.fingerprint_version})
