"""The seal of a frozen rollout: one hash over which calls it held, so that a call that is gone is noticed.

It is the SHA-256 of one line of JSON, in ASCII and without spaces: a list of [call id, payload_sha256] for each
complete record, and a list of [call id, refusal code or null] for each intent, both in the order of their ids. Nothing
of that changes behind a fence; the ledger and the marks, which do, are not sealed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, select

from tokencustody.errors import CorruptEntryError
from tokencustody.sql.tables import VersionEvent, entries, intents, snapshot_versions
from tokencustody.store.fence import RolloutKey, of_rollout

INTENTS = select(intents.c.model_call_id, intents.c.refusal_code).where(of_rollout(intents))
_CALLS = select(entries.c.model_call_id, entries.c.payload_sha256).where(of_rollout(entries))
_SEAL = select(snapshot_versions.c.sealed_sha256).where(
    of_rollout(snapshot_versions), snapshot_versions.c.event == VersionEvent.FREEZE
)


def seal_of(calls: Iterable[Any], announced: Iterable[Any]) -> str:
    """Return the seal (hex) of rows of `entries` and of `intents`."""
    held = sorted([row.model_call_id, row.payload_sha256] for row in calls)
    intended = sorted(([row.model_call_id, row.refusal_code] for row in announced), key=lambda each: each[0])
    return hashlib.sha256(json.dumps([held, intended], separators=(",", ":")).encode()).hexdigest()


def seal_txn(connection: Connection, key: RolloutKey) -> str:
    """Return the seal of what a rollout holds now."""
    calls, announced = (connection.execute(rows, key.named()).all() for rows in (_CALLS, INTENTS))
    return seal_of(calls, announced)


def check_seal_txn(
    connection: Connection, key: RolloutKey, calls: Iterable[Any], announced: Iterable[Any]
) -> None:
    """Raise CorruptEntryError unless a frozen rollout holds what it held when it was frozen.

    One that was frozen before revision 0004 has no seal.
    """
    seal = connection.scalar(_SEAL, key.named())
    if seal is not None and seal != seal_of(calls, announced):
        raise CorruptEntryError(
            f"rollout {key.rollout_id} of run {key.run} does not hold the calls and intents that it held when it was "
            "frozen: some were removed, added or changed; find them with tokencustody verify, and restore it from a "
            "backup"
        )
