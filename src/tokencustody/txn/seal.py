"""The seal of a frozen rollout: one hash over what it held, so that a row that is gone is noticed.

It is the SHA-256 of one line of JSON, in ASCII and without spaces, with four lists: [call id, payload_sha256] for each
complete record and [call id, refusal code or null, whether it was refused] for each intent, in the order of their ids;
then [position, hash of the row] for each call and for each failure in the ledger, the hash as in `codec.row_hash`.
Nothing of that changes behind a fence but the ledger, and a version for which a row came late is sealed anew. The marks
have their own rows in the history. Staged calls outlive the rollout, so each has in its own row the hash of what was
attached to it, and is checked by that.

Seals of revision 0004 have no version: [call id, payload_sha256] and [call id, refusal code or null].
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from tokencustody.codec.attachments import attachments_sha256
from tokencustody.codec.row_hash import row_sha256
from tokencustody.errors import CorruptEntryError
from tokencustody.schema.tables import (
    entries,
    intents,
    ledger_calls,
    ledger_failures,
    snapshot_versions,
    staged_attachments,
    staged_calls,
)
from tokencustody.states import VersionEvent
from tokencustody.txn.fence import SEAL_VERSION, Fence, RolloutKey, Stamp, advance_txn, of_rollout

SEAL_VERSIONS = (None, SEAL_VERSION)

_LEDGER = (ledger_calls, ledger_failures)
_CALLS = select(entries.c.model_call_id, entries.c.payload_sha256).where(of_rollout(entries))
_BESIDE = [select(table).where(of_rollout(table)) for table in (intents, *_LEDGER)]
_ATTACHED = select(staged_calls.c.model_call_id, staged_calls.c.attachments_sha256).where(
    of_rollout(staged_calls), staged_calls.c.attachments_sha256.is_not(None)
)
_ATTACHMENTS = select(
    staged_attachments.c.model_call_id, staged_attachments.c.name, staged_attachments.c.row_sha256
).where(of_rollout(staged_attachments))
_SEAL = (
    select(snapshot_versions.c.sealed_sha256, snapshot_versions.c.seal_version)
    .where(of_rollout(snapshot_versions), snapshot_versions.c.sealed_sha256.is_not(None))
    .order_by(snapshot_versions.c.version.desc())
    .limit(1)
)


@dataclass(frozen=True, slots=True)
class Held:
    """The rows of a rollout that are sealed."""

    calls: Sequence[Any]
    announced: Sequence[Any]
    recorded: Sequence[Any]
    failed: Sequence[Any]


def seal_of(held: Held, version: int | None = SEAL_VERSION) -> str:
    """Return the seal (hex) of these rows."""
    calls = sorted([row.model_call_id, row.payload_sha256] for row in held.calls)
    announced = sorted(held.announced, key=lambda row: row.model_call_id)
    sealed: list[Any]
    if version is None:
        sealed = [calls, [[row.model_call_id, row.refusal_code] for row in announced]]
    else:
        refusals = [[row.model_call_id, row.refusal_code, row.refused_at is not None] for row in announced]
        ledger = [
            sorted([row.position, row_sha256(table, row._mapping)] for row in rows)
            for table, rows in zip(_LEDGER, (held.recorded, held.failed), strict=True)
        ]
        sealed = [calls, refusals, *ledger]
    return hashlib.sha256(json.dumps(sealed, separators=(",", ":")).encode()).hexdigest()


def held_txn(connection: Connection, key: RolloutKey, calls: Sequence[Any] | None = None) -> Held:
    """Return what a rollout holds now. `calls` are the rows of its complete records, if they were read already."""
    if calls is None:
        calls = connection.execute(_CALLS, key.named()).all()
    return Held(calls, *(connection.execute(statement, key.named()).all() for statement in _BESIDE))


def seal_txn(connection: Connection, key: RolloutKey) -> str:
    """Return the seal of what a rollout holds now."""
    return seal_of(held_txn(connection, key))


def last_seal(history: Sequence[Any]) -> Any | None:
    """Return the version that sealed last, of a history in the order of its versions."""
    return next((row for row in reversed(history) if row.sealed_sha256 is not None), None)


def is_sealed(seal: Any | None, held: Held) -> bool:
    """Return whether these rows are those that the version sealed. One without a seal has nothing to prove."""
    if seal is None:
        return True
    return seal.seal_version in SEAL_VERSIONS and seal.sealed_sha256 == seal_of(held, seal.seal_version)


def check_seal_txn(connection: Connection, key: RolloutKey, held: Held) -> None:
    """Raise CorruptEntryError unless a frozen rollout holds what it held when it was sealed, and its staged calls have
    the attachments that they were staged with.

    One that was frozen before revision 0004 has no seal.
    """
    seal = connection.execute(_SEAL, key.named()).one_or_none()
    if not is_sealed(seal, held):
        raise CorruptEntryError(
            f"rollout {key.rollout_id} of run {key.run} does not hold the calls, intents and ledger rows that it held "
            "when it was frozen: some were removed, added or changed; find them with tokencustody verify, and restore "
            "it from a backup"
        )
    _check_attachments_txn(connection, key)


def _check_attachments_txn(connection: Connection, key: RolloutKey) -> None:
    attached: defaultdict[str, list[tuple[str, str | None]]] = defaultdict(list)
    for call, name, sha256 in connection.execute(_ATTACHMENTS, key.named()):
        attached[call].append((name, sha256))
    for call, sha256 in connection.execute(_ATTACHED, key.named()):
        if sha256 != attachments_sha256(attached[call]):
            raise CorruptEntryError(
                f"staged call {call} of rollout {key.rollout_id} of run {key.run} does not have the attachments that "
                "it was staged with: some were removed, added or changed; restore them from a backup"
            )


class LateRows:
    """Rows of the ledger that may come to a frozen rollout, whose fence is locked exclusively.

    Made before they are added, so that no new seal hides what an earlier one does not fit.
    """

    def __init__(self, connection: Connection, key: RolloutKey, fence: Fence, stamp: Stamp) -> None:
        self._advancing = connection, key, fence
        self._stamp = stamp
        seal = connection.execute(_SEAL, key.named()).one_or_none()
        self._is_sealed = is_sealed(seal, held_txn(connection, key))

    def advance_txn(self, model_call_id: str) -> int:
        """Make, and return, the version that tells who froze before that rows came since."""
        connection, key, fence = self._advancing
        return advance_txn(
            connection,
            key,
            fence,
            VersionEvent.LATE_LEDGER,
            self._stamp,
            model_call_id=model_call_id,
            seal=seal_txn(connection, key) if self._is_sealed else None,
        )
