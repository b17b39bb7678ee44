"""Letting rollouts go: one fence covers the complete records and the ledger, so one removal covers both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import Connection, delete

from tokencustody.protocols import RolloutRemovalPayload
from tokencustody.sql.tables import (
    FenceState,
    VersionEvent,
    entries,
    exports,
    failures,
    fences,
    intents,
    ledger_calls,
    ledger_failures,
    snapshot_versions,
)
from tokencustody.store.base import SqlStore, now
from tokencustody.store.fence import (
    RolloutKey,
    Stamp,
    advance_txn,
    find_fence_txn,
    lock_fence_txn,
    of_rollout,
)
from tokencustody.store.ids import check_batch

# What a rollout holds besides its fence and its history. Staged token data is its framework's to delete.
_RECORDS = (entries, intents, failures, ledger_calls, ledger_failures)

_DELETE = {
    table: delete(table).where(of_rollout(table)) for table in (*_RECORDS, exports, snapshot_versions, fences)
}

_Removal = Callable[[Connection, RolloutKey, Stamp], bool]


class RolloutRemover(SqlStore):
    """The two batch methods that `TokenSource` and `CaptureLedger` share."""

    async def retire(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        """Remove the records of rollouts in any state and keep their fences. Repeating it is a no-op.

        All ids are checked before anything changes: TypeError for a bare string, InvalidRecordError for an id outside
        the rules. Each rollout is retired in a transaction of its own.
        """

        def retire_one(connection: Connection, key: RolloutKey, stamp: Stamp) -> bool:
            fence = lock_fence_txn(connection, key, stamp, exclusive=True)
            if fence.state is FenceState.RETIRED:
                return False
            removed = remove_records_txn(connection, key)
            advance_txn(
                connection,
                key,
                fence,
                VersionEvent.RETIRE,
                stamp,
                state=FenceState.RETIRED,
                retired_at=stamp.at,
            )
            return removed > 0

        return await self._for_each(rollout_ids, retire_one)

    async def delete(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        """Remove the records, fences and histories of rollouts, after which their ids read as unused.

        Repeating it is a no-op. Checks and transactions as for `retire`.
        """

        def delete_one(connection: Connection, key: RolloutKey, _stamp: Stamp) -> bool:
            if find_fence_txn(connection, key, exclusive=True) is None:
                return False
            removed = remove_records_txn(connection, key)
            for table in (exports, snapshot_versions, fences):
                connection.execute(_DELETE[table], key.named())
            return removed > 0

        return await self._for_each(rollout_ids, delete_one)

    async def _for_each(self, rollout_ids: Sequence[str], remove: _Removal) -> RolloutRemovalPayload:
        result = RolloutRemovalPayload(absent=[], removed=[])
        for rollout_id in check_batch(rollout_ids):
            removed = await self._remove(RolloutKey(self.run, rollout_id), remove)
            result["removed" if removed else "absent"].append(rollout_id)
        return result

    async def _remove(self, key: RolloutKey, remove: _Removal) -> bool:
        stamp = Stamp.make(now(), self.written_by)
        had_records = False

        def attempt(connection: Connection) -> bool:
            nonlocal had_records
            # Or-ed: a repeat after a commit whose answer was lost finds nothing left to remove.
            had_records = remove(connection, key, stamp) or had_records
            return had_records

        return await self._write_after_marks(key, attempt)


def remove_records_txn(connection: Connection, key: RolloutKey) -> int:
    """Delete everything an exclusively locked rollout holds but its fence and history; return the number of rows."""
    removed = 0
    for table in _RECORDS:
        removed += connection.execute(_DELETE[table], key.named()).rowcount
    return removed
