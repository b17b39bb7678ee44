"""Hand-over: marking in the database what the finished files hold, and retiring exactly that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from sqlalchemy import BigInteger, Connection, and_, bindparam, select, tuple_

from tokencustody.database.dialects import insert_if_absent
from tokencustody.database.faults import reach
from tokencustody.errors import DamagedMarkError, ExportError
from tokencustody.export.report import Exported, Kept, WhyKept
from tokencustody.schema.tables import exports, fences, snapshot_versions
from tokencustody.states import FenceState
from tokencustody.store.base import SqlStore, now
from tokencustody.store.source import drop_txn
from tokencustody.txn.fence import RolloutKey, Stamp, find_fence_txn, happened_txn, of_rollout

_PER_QUERY = 256

_MARKED_BY = select(exports.c.export_id).where(
    of_rollout(exports), exports.c.version == bindparam("version", type_=BigInteger())
)


@dataclass(frozen=True, slots=True)
class HandOver:
    """What is noted of a rollout that was exported, and whether it is retired with that.

    `once` leaves alone what another export has marked at the same version.
    """

    export_id: str
    destination: str
    manifest_sha256: str
    retire: bool
    once: bool

    def event_id(self, key: RolloutKey) -> str:
        """Return the event id of a rollout's retirement by this export, by which a repeat knows it from others'."""
        return sha256(f"{self.export_id}/{key.lock_name}".encode()).hexdigest()[:32]


class ExportMarks(SqlStore):
    """The marks of exports in one database. It never makes one."""

    _creates = False

    async def hand_over(
        self, rollouts: Sequence[Exported], how: HandOver, done: Callable[[int], None]
    ) -> list[Kept]:
        """Mark each rollout, and retire it if that is wanted, in one transaction for each.

        Returns those that were not retired, or not even marked, because they are no longer what was exported, or
        somebody else's, or because a mark of theirs that waits on this host is damaged. Repeating it changes nothing.
        Raises ExportError, before anything changes, when the manifest is not the one with which this export marked
        rollouts before.
        """
        kept = []
        settled: set[RolloutKey] = set()
        for start in range(0, len(rollouts), _PER_QUERY):
            settled |= await self._settled(rollouts[start : start + _PER_QUERY], how)
        done(len(settled))
        for rollout in rollouts:
            if rollout.key in settled:
                continue
            why: WhyKept | None
            try:
                why, detail = await self._hand_over_one(rollout, how), ""
            except DamagedMarkError as exc:
                why, detail = WhyKept.DAMAGED_MARK, str(exc)
            await reach("an exported rollout was handed over")
            if why is not None:
                kept.append(Kept(rollout.run, rollout.rollout_id, why, detail))
            done(1)
        return kept

    async def _settled(self, rollouts: Sequence[Exported], how: HandOver) -> set[RolloutKey]:
        """Return the rollouts of which nothing is left to do, so that a repeat only reads."""
        wanted = {rollout.key: rollout for rollout in rollouts}
        of_fence = and_(fences.c.run == exports.c.run, fences.c.rollout_id == exports.c.rollout_id)
        event = snapshot_versions.c
        newest = and_(
            event.run == fences.c.run,
            event.rollout_id == fences.c.rollout_id,
            event.version == fences.c.version,
        )
        found = (
            select(
                fences.c.run,
                fences.c.rollout_id,
                fences.c.state,
                fences.c.snapshot_id,
                fences.c.version,
                event.event_id,
                exports.c.manifest_sha256,
            )
            .join(exports, of_fence)
            .join(snapshot_versions, newest)
            .where(
                exports.c.export_id == how.export_id,
                tuple_(exports.c.run, exports.c.rollout_id).in_(
                    [(key.run, key.rollout_id) for key in wanted]
                ),
            )
        )

        def look(connection: Connection) -> set[RolloutKey]:
            settled = set()
            for row in connection.execute(found):
                if row.manifest_sha256 != how.manifest_sha256:
                    raise ExportError(
                        f"the manifest in {how.destination} is not the one that was written: rollout "
                        f"{row.rollout_id} of run {row.run} was marked with another; restore the folder, or export "
                        "to a new one"
                    )
                key = RolloutKey(row.run, row.rollout_id)
                exported = wanted[key]
                versions_since = row.version - exported.version
                if row.snapshot_id == exported.snapshot_id and (
                    versions_since == (row.state == FenceState.RETIRED)
                    and (not how.retire or row.event_id == how.event_id(key))
                ):
                    settled.add(key)
            return settled

        return await self._database.read(look)

    async def _hand_over_one(self, rollout: Exported, how: HandOver) -> WhyKept | None:
        key = rollout.key
        stamp = Stamp(now(), self.written_by, how.event_id(key))
        mark = {
            **key.columns(),
            "export_id": how.export_id,
            "snapshot_id": rollout.snapshot_id,
            "version": rollout.version,
            "destination": how.destination,
            "manifest_sha256": how.manifest_sha256,
            "exported_at": stamp.at,
            "written_by": stamp.by,
            "is_held": rollout.is_held,
        }

        def hand_over(connection: Connection) -> WhyKept | None:
            fence = find_fence_txn(connection, key)
            if fence is None:
                return WhyKept.DELETED
            if fence.snapshot_id != rollout.snapshot_id:
                return WhyKept.MADE_ANEW
            marked_by = set(connection.scalars(_MARKED_BY, key.named(version=rollout.version)))
            is_mine = how.export_id in marked_by
            is_retired = fence.state is FenceState.RETIRED
            is_changed = fence.version - is_retired != rollout.version
            if is_retired and not is_mine:
                return WhyKept.RETIRED
            if is_retired and how.retire and not happened_txn(connection, key, stamp):
                return WhyKept.CHANGED if is_changed else WhyKept.RETIRED
            if how.once and marked_by and not is_mine:
                return WhyKept.EXPORTED
            connection.execute(insert_if_absent(connection, exports), mark)
            if how.retire and not rollout.is_held:
                return WhyKept.PARTLY_EXPORTED
            if how.retire and drop_txn(connection, key, fence, rollout.snapshot_id, rollout.version, stamp):
                return None
            return WhyKept.CHANGED if is_changed else None

        # Never ahead of marks that wait on this host: they change what was exported.
        return await self._write_after_marks(key, hand_over)
