"""Transports that retire or delete too much, too little or the wrong thing."""

from __future__ import annotations

from collections.abc import Sequence

from tests.conformance.broken.registry import fails
from tests.conformance.memory import Memory, Rollout
from tokencustody.protocols import RolloutRemovalPayload


@fails(
    "conditional_retirement",
    "late_use_of_dropped_rollout",
    "drop_of_dropped_rollout",
    "source_fences_the_ledger",
)
class DropLowersTheFence(Memory):
    async def drop(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        dropped = await super().drop(rollout_id, snapshot_id, version)
        if dropped:
            self.backend.rollouts[self.key(rollout_id)] = Rollout()
        return dropped


@fails("stale_drop_loses_nothing")
class DropOfAnUnknownRolloutSucceeds(Memory):
    async def drop(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        unknown = self.rollout(rollout_id) == Rollout()
        return unknown or await super().drop(rollout_id, snapshot_id, version)


@fails("stale_drop_loses_nothing", "drop_of_dropped_rollout", "post_freeze_mark", "late_rows_make_a_version")
class DropIgnoresTheVersion(Memory):
    async def drop(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        return await super().drop(rollout_id, snapshot_id, self.rollout(rollout_id).version)


@fails("drop_of_dropped_rollout")
class SecondDropIsFalse(Memory):
    async def drop(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        if self.rollout(rollout_id).state == "retired":
            return False
        return await super().drop(rollout_id, snapshot_id, version)


@fails("late_use_of_dropped_rollout", "source_fences_the_ledger")
class DroppedIsOnlyFrozen(Memory):
    async def drop(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        dropped = await super().drop(rollout_id, snapshot_id, version)
        if dropped:
            self.rollout(rollout_id).state = "frozen"
        return dropped


@fails(
    "late_use_of_dropped_rollout",
    "unconditional_retirement",
    "repeated_retirement",
    "ledger_fences_the_source",
)
class RetiredRolloutsTakeMarks(Memory):
    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        if self.rollout(rollout_id).state != "retired":
            await super().mark_incomplete(rollout_id, model_call_id)


@fails("unconditional_retirement")
class UnknownRolloutIsNotRetired(Memory):
    async def retire(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        unknown = [self.key(r) for r in self.batch(rollout_ids) if self.rollout(r) == Rollout()]
        result = await super().retire(rollout_ids)
        for key in unknown:
            del self.backend.rollouts[key]
        return result


@fails("repeated_retirement")
class DuplicatesCountTwice(Memory):
    async def retire(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        result = await super().retire(rollout_ids)
        return RolloutRemovalPayload(
            absent=[r for r in rollout_ids if r in result["absent"]],
            removed=[r for r in rollout_ids if r in result["removed"]],
        )


@fails("deletion")
class DeleteKeepsTheMark(Memory):
    async def delete(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        marked = [r for r in self.batch(rollout_ids) if self.rollout(r).incomplete]
        result = await super().delete(rollout_ids)
        for rollout_id in marked:
            self.rollout(rollout_id).incomplete = True
        return result


@fails("reused_id_is_a_new_rollout")
class SnapshotIdFollowsFromTheRolloutId(Memory):
    def new_snapshot_id(self, rollout_id: str) -> str:
        return "/".join(self.key(rollout_id))


@fails("deletion", "deletion_after_retirement", "source_fences_the_ledger")
class DeleteKeepsTheFenceOfRetiredRollouts(Memory):
    async def delete(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        retired = [r for r in self.batch(rollout_ids) if self.rollout(r).state == "retired"]
        result = await super().delete(rollout_ids)
        for rollout_id in retired:
            self.rollout(rollout_id).state = "retired"
        return result


@fails("retire_batch_validation")
class RetireChecksOneByOne(Memory):
    async def retire(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        result = RolloutRemovalPayload(absent=[], removed=[])
        for rollout_id in dict.fromkeys(rollout_ids):
            one = await super().retire([rollout_id])
            result["absent"] += one["absent"]
            result["removed"] += one["removed"]
        return result


@fails("delete_batch_validation")
class DeleteTakesABareString(Memory):
    async def delete(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        return await super().delete([rollout_ids] if isinstance(rollout_ids, str) else rollout_ids)
