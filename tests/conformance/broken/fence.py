"""Transports whose fence or intents can be got around."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tests.conformance.broken.registry import fails
from tests.conformance.memory import Memory, Rollout
from tokencustody.protocols import TokenCaptureSnapshot
from tokencustody.records import TokenEntry


@fails("freeze_idempotency")
class EveryConcurrentFreezeNamesASnapshot(Memory):
    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        found_open = self.rollout(rollout_id).state == "open"
        snapshot = await super().freeze(rollout_id)
        if not found_open:
            return snapshot
        self.rollout(rollout_id).snapshot_id = self.new_snapshot_id(rollout_id)
        return replace(snapshot, snapshot_id=self.rollout(rollout_id).snapshot_id)


@fails("freeze_unknown_rollout")
class UnknownRolloutIsNotFenced(Memory):
    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        snapshot = await super().freeze(rollout_id)
        rollout = self.rollout(rollout_id)
        if rollout.version == 1 and not rollout.has_records() and not rollout.intents:
            rollout.state = "open"
        return snapshot


@fails("post_freeze_write")
class LateRepeatSucceeds(Memory):
    async def put(self, entry: TokenEntry) -> None:
        known = self.rollout(entry.rollout_id).entries.get(entry.model_call_id)
        if known is None or not self.same(known, entry):
            await super().put(entry)


@fails("post_freeze_write")
class LateConflictMarks(Memory):
    async def put(self, entry: TokenEntry) -> None:
        rollout = self.rollout(entry.rollout_id)
        known = rollout.entries.get(entry.model_call_id)
        if rollout.state == "frozen" and known is not None and not self.same(known, entry):
            await self.mark_incomplete(entry.rollout_id)
        await super().put(entry)


@fails("post_freeze_mark")
class LateMarkKeepsTheVersion(Memory):
    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        await super().mark_incomplete(rollout_id, model_call_id)
        self.rollout(rollout_id).version -= 1


@fails("strict_fence")
class FenceIsLookedAtBeforeTheWrite(Memory):
    async def put(self, entry: TokenEntry) -> None:
        self.check_call_id(entry.model_call_id)
        rollout = self.rollout(entry.rollout_id)
        self.refuse_late(rollout)
        await asyncio.sleep(0)
        with self.backend.lock:
            known = rollout.entries.setdefault(entry.model_call_id, self.stored(entry))
            if not self.same(known, self.stored(entry)):
                self.conflict(rollout, entry)


@fails("strict_fence")
class SnapshotIsReadBeforeTheFence(Memory):
    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        with self.backend.lock:
            early = self.snapshot(rollout_id, self.rollout(rollout_id))
        # A turn of another thread, in which the writers go on.
        await asyncio.to_thread(int)
        snapshot = await super().freeze(rollout_id)
        return replace(snapshot, entries=early.entries)


@fails("strict_fence")
class RefusedWriteStays(Memory):
    async def put(self, entry: TokenEntry) -> None:
        before = self.rollout(entry.rollout_id)
        if before.state == "open" and entry.model_call_id not in before.entries:
            self.check_call_id(entry.model_call_id)
            with self.backend.lock:
                before.entries[entry.model_call_id] = self.stored(entry)
            await asyncio.sleep(0)
        await super().put(entry)


@fails("strict_fence")
class RefusalsAreNotFenced(Memory):
    async def refuse_call(self, rollout_id: str, *, model_call_id: str, code: str | None) -> None:
        rollout = self.rollout(rollout_id)
        if rollout.state != "open":
            await super().refuse_call(rollout_id, model_call_id=model_call_id, code=code)
            return
        await asyncio.sleep(0)
        self.check_call_id(model_call_id)
        if rollout.refusals.setdefault(model_call_id, code) != code and code is not None:
            raise ValueError("the call was refused before with another code")


@fails("begin_call_custody")
class IntentAfterItsRecordDangles(Memory):
    def dangling(self, rollout: Rollout) -> set[str]:
        return rollout.intents - rollout.refusals.keys()

    async def put(self, entry: TokenEntry) -> None:
        await super().put(entry)
        self.rollout(entry.rollout_id).intents.discard(entry.model_call_id)


@fails("begin_call_custody")
class IntentsAloneMakeNoRollout(Memory):
    def dangling(self, rollout: Rollout) -> set[str]:
        alone = not rollout.entries and not rollout.refusals and len(rollout.intents) == 1
        return set() if alone else super().dangling(rollout)


@fails("post_freeze_intent")
class LateRepeatedIntentSucceeds(Memory):
    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        if model_call_id not in self.rollout(rollout_id).intents:
            await super().begin_call(rollout_id, model_call_id)


@fails("refused_intent", "post_freeze_refusal")
class OneRefusalSettlesAll(Memory):
    def dangling(self, rollout: Rollout) -> set[str]:
        return set() if rollout.refusals else super().dangling(rollout)


@fails("repeated_refusal", "refusal_without_code")
class LastRefusalWins(Memory):
    async def refuse_call(self, rollout_id: str, *, model_call_id: str, code: str | None) -> None:
        refusals = self.rollout(rollout_id).refusals
        if self.rollout(rollout_id).state == "open" and model_call_id in refusals:
            refusals[model_call_id] = code
        else:
            await super().refuse_call(rollout_id, model_call_id=model_call_id, code=code)


@fails("repeated_refusal")
class AnotherCodeMarksTheRollout(Memory):
    async def refuse_call(self, rollout_id: str, *, model_call_id: str, code: str | None) -> None:
        try:
            await super().refuse_call(rollout_id, model_call_id=model_call_id, code=code)
        except ValueError:
            if self.rollout(rollout_id).refusals.get(model_call_id) is not None:
                self.rollout(rollout_id).incomplete = True
            raise


@fails("refusal_without_code")
class RefusalNeedsACode(Memory):
    async def refuse_call(self, rollout_id: str, *, model_call_id: str, code: str | None) -> None:
        if code is None:
            raise TypeError("code must be a string")
        await super().refuse_call(rollout_id, model_call_id=model_call_id, code=code)


@fails("post_freeze_refusal")
class LateRefusalSettlesTheIntent(Memory):
    async def refuse_call(self, rollout_id: str, *, model_call_id: str, code: str | None) -> None:
        rollout = self.rollout(rollout_id)
        if rollout.state == "frozen" and model_call_id in self.dangling(rollout):
            rollout.refusals[model_call_id] = code
            rollout.incomplete = bool(self.dangling(rollout))
        else:
            await super().refuse_call(rollout_id, model_call_id=model_call_id, code=code)
