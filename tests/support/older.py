"""Rows as older releases left them, which this one no longer writes and still reads."""

from __future__ import annotations

from sqlalchemy import Connection

from tokencustody.states import FailureKind, VersionEvent
from tokencustody.store import CaptureStore
from tokencustody.store.base import now
from tokencustody.txn.fence import RolloutKey, Stamp, fail_txn, lock_fence_txn


async def refuse_with_another_code(store: CaptureStore, rollout: str, call: str) -> None:
    """Mark a rollout for a second refusal of a call, as a release before revision 0005 did."""
    key = RolloutKey(store.sink.run, rollout)
    stamp = Stamp.make(now(), store.sink.written_by)

    def conflict(connection: Connection) -> None:
        fence = lock_fence_txn(connection, key, stamp)
        kind = FailureKind.REFUSAL_CONFLICT
        fail_txn(
            connection, key, fence, VersionEvent.CONFLICT, kind, stamp, model_call_id=call, differing="code"
        )

    await store.sink._database.write(conflict)
