"""Letting rollouts go: one fence covers the complete records and the ledger, so one removal covers both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime

from sqlalchemy import Connection, delete, select

from tokencustody.errors import DamagedMarkError
from tokencustody.ids import check_batch
from tokencustody.protocols import RolloutRemovalPayload
from tokencustody.schema.tables import (
    entries,
    exports,
    failures,
    fences,
    intents,
    ledger_calls,
    ledger_failures,
    snapshot_versions,
    staged_calls,
)
from tokencustody.staging.records import staging_key
from tokencustody.states import FenceState, VersionEvent
from tokencustody.store.base import SqlStore, now
from tokencustody.txn.fence import (
    Fence,
    RolloutKey,
    Stamp,
    advance_txn,
    find_fence_txn,
    lock_fence_txn,
    of_rollout,
)
from tokencustody.txn.staged_calls import REMOVE_STAGED

# What a rollout holds besides its fence and its history. Staged token data is its framework's to delete.
_RECORDS = (entries, intents, failures, ledger_calls, ledger_failures)

_DELETE = {
    table: delete(table).where(of_rollout(table)) for table in (*_RECORDS, exports, snapshot_versions, fences)
}

_STATE = select(fences.c.state).where(of_rollout(fences))
_STAGED = select(staged_calls.c.model_call_id, staged_calls.c.parent_call_id, staged_calls.c.staged_at).where(
    of_rollout(staged_calls)
)
_LATE = select(snapshot_versions.c.model_call_id).where(
    of_rollout(snapshot_versions), snapshot_versions.c.event == VersionEvent.LATE_STAGE
)
_NAMED = select(ledger_calls.c.staging_key).where(of_rollout(ledger_calls))

_Removal = Callable[[Connection, RolloutKey, Stamp], bool]


class RolloutRemover(SqlStore):
    """The two batch methods that `TokenSource` and `CaptureLedger` share."""

    async def retire(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        """Remove the records of rollouts in any state and keep their fences. Repeating it is a no-op.

        All ids are checked before anything changes: TypeError for a bare string, InvalidRecordError for an id outside
        the rules. Each rollout is retired in a transaction of its own. Those of which a mark on this host is damaged
        are left as they are and named, when all others are done, by one DamagedMarkError.
        """

        def retire_one(connection: Connection, key: RolloutKey, stamp: Stamp) -> bool:
            fence = lock_fence_txn(connection, key, stamp)
            return fence.state is not FenceState.RETIRED and retire_txn(connection, key, fence, stamp) > 0

        return await self._for_each(rollout_ids, retire_one)

    async def delete(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        """Remove the records, fences and histories of rollouts, after which their ids read as unused.

        Repeating it is a no-op. Checks, transactions and damaged marks as for `retire`.
        """

        def delete_one(connection: Connection, key: RolloutKey, _stamp: Stamp) -> bool:
            fence = find_fence_txn(connection, key)
            return fence is not None and delete_txn(connection, key) > 0

        return await self._for_each(rollout_ids, delete_one)

    async def _for_each(self, rollout_ids: Sequence[str], remove: _Removal) -> RolloutRemovalPayload:
        result = RolloutRemovalPayload(absent=[], removed=[])
        damaged: list[DamagedMarkError] = []
        for rollout_id in check_batch(rollout_ids):
            try:
                removed = await self._remove(RolloutKey(self.run, rollout_id), remove)
            except DamagedMarkError as exc:
                damaged.append(exc)
            else:
                result["removed" if removed else "absent"].append(rollout_id)
        if damaged:
            raise DamagedMarkError("; ".join(map(str, damaged))) from damaged[0]
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


def retire_txn(connection: Connection, key: RolloutKey, fence: Fence, stamp: Stamp) -> int:
    """Retire an exclusively locked rollout that is not retired yet; return the number of rows that are gone."""
    removed = remove_records_txn(connection, key)
    advance_txn(
        connection, key, fence, VersionEvent.RETIRE, stamp, state=FenceState.RETIRED, retired_at=stamp.at
    )
    return removed


def delete_txn(connection: Connection, key: RolloutKey) -> int:
    """Delete everything about an exclusively locked rollout; return the number of rows besides fence and history."""
    removed = remove_records_txn(connection, key)
    for table in (exports, snapshot_versions, fences):
        connection.execute(_DELETE[table], key.named())
    return removed


def disposable_txn(
    connection: Connection, key: RolloutKey, before: datetime, named_elsewhere: Collection[str], *, lock: bool
) -> list[str]:
    """Return the ids of staged calls of a rollout that nobody will read, staged before then; `lock` keeps them as
    they are, so that none is deleted and staged anew before `dispose_txn` comes to it.

    They are those of `SqlStagingStore.orphans`, but no call that one which stays continues. `named_elsewhere` are the
    staging keys that ledgers of other rollouts name. While the rollout is locked exclusively its ledger names no more.
    """
    state = connection.scalar(_STATE, key.named())
    if state == FenceState.OPEN:
        return []
    staged = connection.execute(_STAGED.with_for_update() if lock else _STAGED, key.named()).all()
    named = {*connection.execute(_NAMED, key.named()).scalars(), *named_elsewhere}
    # Staged behind a freeze: whoever froze is yet to look again.
    late = set(connection.execute(_LATE, key.named()).scalars()) if state == FenceState.FROZEN else set()
    parents = {row.model_call_id: row.parent_call_id for row in staged}
    kept = set()
    for row in staged:
        is_named = staging_key(key.rollout_id, row.model_call_id) in named
        if row.staged_at >= before or is_named or row.model_call_id in late:
            link = row.model_call_id
            # Up to the root, or to what is known to stay.
            while link in parents and link not in kept:
                kept.add(link)
                link = parents[link]
    return [call for call in parents if call not in kept]


def dispose_txn(connection: Connection, key: RolloutKey, calls: Sequence[str]) -> None:
    """Delete these staged calls, whose rows are locked, with their attachments."""
    for statement in REMOVE_STAGED if calls else ():
        connection.execute(statement, [key.named(call) for call in calls])
