"""What the database holds of a rollout, to compare the files of a folder with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, Select, Table, select

from tokencustody.schema.tables import entries, failures, fences, intents, ledger_calls, ledger_failures
from tokencustody.states import FailureKind, FenceState
from tokencustody.txn.fence import Fence, RolloutKey, of_call, of_rollout

_LEDGER_CALL = select(ledger_calls).where(of_call(ledger_calls))


def _of_rollout(table: Table, *names: str) -> Select[Any]:
    return select(*(table.c[name] for name in names)).where(of_rollout(table))


_FENCE = _of_rollout(fences, "state", "version", "snapshot_id", "incomplete")
_CALLS = _of_rollout(entries, "model_call_id", "payload_sha256")
_ANNOUNCED = _of_rollout(intents, "model_call_id", "refused_at")
_FAILED = _of_rollout(failures, "kind", "model_call_id", "second_payload_sha256")
_RECORDED = _of_rollout(ledger_calls, "model_call_id", "payload_sha256")
_REASONS = _of_rollout(ledger_failures, "model_call_id", "reason")


@dataclass
class Held:
    """What the database holds of a rollout, without payloads. `fence` is None where it holds nothing.

    `failed` are the calls for which it is marked, or of which it has a conflict.
    """

    fence: Fence | None = None
    calls: dict[str, str] = field(default_factory=dict)
    intents: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    conflicts: set[tuple[str, str]] = field(default_factory=set)
    ledger: dict[str, str] = field(default_factory=dict)
    ledger_failures: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def read_txn(cls, connection: Connection, key: RolloutKey) -> Held:
        """Return what is held now."""

        def found(statement: Select[Any]) -> Any:
            return connection.execute(statement, key.named()).all()

        fence = connection.execute(_FENCE, key.named()).one_or_none()
        failed, announced = found(_FAILED), found(_ANNOUNCED)
        reasons: dict[str, set[str]] = {}
        for call, reason in found(_REASONS):
            reasons.setdefault(call, set()).add(reason)
        return cls(
            fence=None if fence is None else Fence(FenceState(fence[0]), *fence[1:]),
            calls=dict(map(tuple, found(_CALLS))),
            intents={call for call, _ in announced},
            refused={call for call, refused_at in announced if refused_at is not None},
            failed={call for _, call, _ in failed},
            conflicts={(call, second) for kind, call, second in failed if kind == FailureKind.CONFLICT},
            ledger=dict(map(tuple, found(_RECORDED))),
            ledger_failures=reasons,
        )


def ledger_call_txn(connection: Connection, key: RolloutKey, call: str) -> Row[Any]:
    """Return the row that the ledger holds of a call."""
    return connection.execute(_LEDGER_CALL, key.named(call)).one()
