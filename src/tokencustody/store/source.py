"""The source: where a trainer freezes rollouts, reads them, and lets them go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection

from tokencustody.codec.chains import unpack_calls
from tokencustody.errors import InvalidRecordError
from tokencustody.ids import check_rollout_id
from tokencustody.protocols import CallRefusal, TokenCaptureSnapshot
from tokencustody.states import FenceState, VersionEvent
from tokencustody.store.base import now
from tokencustody.store.removal import RolloutRemover, remove_records_txn
from tokencustody.txn.deltas import mark_broken_txn
from tokencustody.txn.fence import (
    Fence,
    RolloutKey,
    Stamp,
    advance_txn,
    find_fence_txn,
    lock_fence_txn,
    refuse_if_retired,
)
from tokencustody.txn.reading import all_calls_txn
from tokencustody.txn.seal import check_seal_txn, held_txn, seal_of


@dataclass(frozen=True, slots=True)
class _Frozen:
    snapshot_id: str
    version: int
    incomplete: bool
    calls: list[Any]
    refusals: tuple[CallRefusal, ...]


class SqlTokenSource(RolloutRemover):
    """A `TokenSource` with a strict fence.

    Every method returns once its change is durable, and raises StoreUnavailableError when the deadline passes first.
    """

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Raise the fence and return everything that was stored before it.

        No put, begin_call or refuse_call that returned success, on any host, ever lies after it. Freezing again returns
        the same snapshot id, and the same version unless the rollout was marked since, or got rows in its ledger or
        staged calls. A rollout without calls gives an empty snapshot. A delta whose parent never came, or that is its
        own parent through others, marks the rollout, for nobody can read it whole.

        Raises TokenCaptureRetiredError for a retired rollout, CorruptEntryError naming the first call whose stored
        bytes are not those that were written, or the rollout if anything was removed, added or changed behind the
        fence.
        """
        frozen = await self._raise_fence(RolloutKey(self.run, check_rollout_id(rollout_id)), all_calls_txn)
        return TokenCaptureSnapshot(
            rollout_id=rollout_id,
            # In a thread, for other rollouts go on meanwhile; each row is let go as soon as it is read.
            entries=tuple(await asyncio.to_thread(unpack_calls, rollout_id, _taken_from(frozen.calls))),
            incomplete=frozen.incomplete,
            snapshot_id=frozen.snapshot_id,
            version=frozen.version,
            refusals=frozen.refusals,
        )

    async def _raise_fence(
        self, key: RolloutKey, read_calls: Callable[[Connection, RolloutKey], Sequence[Any]]
    ) -> _Frozen:
        """Freeze the rollout, whose calls `read_calls` reads as `all_calls_txn` does, be it without their payloads."""
        stamp = Stamp.make(now(), self.written_by)
        minted_id = uuid4().hex

        def raise_fence(connection: Connection) -> _Frozen:
            fence = lock_fence_txn(connection, key, stamp)
            refuse_if_retired(fence, key, "the freeze")
            snapshot_id = fence.snapshot_id or minted_id
            calls = list(read_calls(connection, key))
            held = held_txn(connection, key, calls)
            refused = {
                row.model_call_id: row.refusal_code for row in held.announced if row.refused_at is not None
            }
            if fence.state is FenceState.FROZEN:
                check_seal_txn(connection, key, held)
                version, incomplete = fence.version, fence.incomplete
            else:
                fence = mark_broken_txn(connection, key, fence, calls, stamp)
                settled = refused.keys() | {row.model_call_id for row in calls}
                incomplete = fence.incomplete or any(
                    row.model_call_id not in settled for row in held.announced
                )
                version = advance_txn(
                    connection,
                    key,
                    fence,
                    VersionEvent.FREEZE,
                    stamp,
                    seal=seal_of(held),
                    state=FenceState.FROZEN,
                    snapshot_id=snapshot_id,
                    incomplete=incomplete,
                    frozen_at=stamp.at,
                )
            refusals = tuple(CallRefusal(call_id, code) for call_id, code in sorted(refused.items()))
            return _Frozen(snapshot_id, version, incomplete, calls, refusals)

        return await self._write_after_marks(key, raise_fence)

    async def drop(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        """Retire exactly the frozen snapshot that was consumed.

        Returns False, with nothing lost, when the rollout is open or unknown, or was marked or got rows in its ledger
        or staged calls since. For a retired rollout it is True only if it was exactly that snapshot.
        """
        key = RolloutKey(self.run, check_rollout_id(rollout_id))
        if not isinstance(snapshot_id, str):
            raise InvalidRecordError(f"snapshot_id must be a string, not {type(snapshot_id).__name__}")
        if type(version) is not int:
            raise InvalidRecordError(f"version must be an integer, not {type(version).__name__}")
        stamp = Stamp.make(now(), self.written_by)

        def retire_snapshot(connection: Connection) -> bool:
            fence = find_fence_txn(connection, key)
            return drop_txn(connection, key, fence, snapshot_id, version, stamp)

        return await self._write_after_marks(key, retire_snapshot)


def drop_txn(
    connection: Connection, key: RolloutKey, fence: Fence | None, snapshot_id: str, version: int, stamp: Stamp
) -> bool:
    """Retire exactly that snapshot of an exclusively locked rollout; return as `SqlTokenSource.drop` does."""
    if fence is None or fence.state is FenceState.OPEN or fence.snapshot_id != snapshot_id:
        return False
    if fence.state is FenceState.RETIRED:
        # Retirement is the last version of a rollout, so it retired the one before.
        return fence.version - 1 == version
    if fence.version != version:
        return False
    remove_records_txn(connection, key)
    advance_txn(
        connection,
        key,
        fence,
        VersionEvent.DROP,
        stamp,
        state=FenceState.RETIRED,
        retired_at=stamp.at,
    )
    return True


def _taken_from(rows: list[Any]) -> Iterator[Any]:
    rows.reverse()
    while rows:
        yield rows.pop()
