"""Hand-over: marking in the database what the finished files hold, and retiring exactly that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, select, tuple_

from tokencustody.audit.export.report import Exported, Kept, WhyKept
from tokencustody.sql.dialects import insert_if_absent
from tokencustody.sql.faults import reach
from tokencustody.sql.tables import FenceState, exports, fences
from tokencustody.store.base import SqlStore, now
from tokencustody.store.fence import RolloutKey, Stamp, find_fence_txn
from tokencustody.store.source import drop_txn

_PER_QUERY = 256


@dataclass(frozen=True, slots=True)
class HandOver:
    """What is noted of a rollout that was exported, and whether it is retired with that."""

    export_id: str
    destination: str
    manifest_sha256: str
    retire: bool


class ExportMarks(SqlStore):
    """The marks of exports in one database. It never makes one."""

    _creates = False

    async def hand_over(
        self, rollouts: Sequence[Exported], how: HandOver, done: Callable[[int], None]
    ) -> list[Kept]:
        """Mark each rollout, and retire it if that is wanted, in one transaction for each.

        Returns those that were not retired, or not even marked, because they are no longer what was exported. Repeating
        it changes nothing.
        """
        kept = []
        for start in range(0, len(rollouts), _PER_QUERY):
            some = rollouts[start : start + _PER_QUERY]
            settled = await self._settled(some, how)
            done(len(settled))
            for rollout in some:
                if rollout.key in settled:
                    continue
                why = await self._hand_over_one(rollout, how)
                await reach("an exported rollout was handed over")
                if why is not None:
                    kept.append(Kept(rollout.run, rollout.rollout_id, why))
                done(1)
        return kept

    async def _settled(self, rollouts: Sequence[Exported], how: HandOver) -> set[RolloutKey]:
        """Return the rollouts of which nothing is left to do, so that a repeat only reads."""
        wanted = {rollout.key: rollout for rollout in rollouts}
        marked = select(exports.c.run, exports.c.rollout_id).where(
            exports.c.export_id == how.export_id,
            tuple_(exports.c.run, exports.c.rollout_id).in_([(key.run, key.rollout_id) for key in wanted]),
        )
        found = select(
            fences.c.run, fences.c.rollout_id, fences.c.state, fences.c.snapshot_id, fences.c.version
        )
        found = found.where(tuple_(fences.c.run, fences.c.rollout_id).in_(marked))

        def look(connection: Connection) -> set[RolloutKey]:
            settled = set()
            for row in connection.execute(found):
                key = RolloutKey(row.run, row.rollout_id)
                exported = wanted[key]
                versions_since = row.version - exported.version
                if row.snapshot_id == exported.snapshot_id and (
                    versions_since == (row.state == FenceState.RETIRED)
                    and (not how.retire or row.state == FenceState.RETIRED)
                ):
                    settled.add(key)
            return settled

        return await self._database.read(look)

    async def _hand_over_one(self, rollout: Exported, how: HandOver) -> WhyKept | None:
        stamp = Stamp.make(now(), self.written_by)
        key = rollout.key
        mark = {
            **key.columns(),
            "export_id": how.export_id,
            "snapshot_id": rollout.snapshot_id,
            "version": rollout.version,
            "destination": how.destination,
            "manifest_sha256": how.manifest_sha256,
            "exported_at": stamp.at,
            "written_by": stamp.by,
        }

        def hand_over(connection: Connection) -> WhyKept | None:
            fence = find_fence_txn(connection, key, exclusive=True)
            if fence is None:
                return WhyKept.DELETED
            if fence.snapshot_id != rollout.snapshot_id:
                return WhyKept.MADE_ANEW
            connection.execute(insert_if_absent(connection, exports), mark)
            if how.retire and not rollout.whole:
                return WhyKept.PARTLY_EXPORTED
            if how.retire and drop_txn(connection, key, fence, rollout.snapshot_id, rollout.version, stamp):
                return None
            is_retired = fence.state is FenceState.RETIRED
            if fence.version - is_retired == rollout.version:
                return None
            return WhyKept.CHANGED

        # Never ahead of marks that wait on this host: they change what was exported.
        return await self._write_after_marks(key, hand_over)
