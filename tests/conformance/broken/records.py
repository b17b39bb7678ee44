"""Transports that lose, mix up or misjudge records."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from tests.conformance.broken.registry import fails
from tests.conformance.memory import Memory, Rollout
from tokencustody.protocols import TokenCaptureSnapshot
from tokencustody.records import TokenEntry


@fails("put_then_freeze")
class NamelessSnapshot(Memory):
    def snapshot(self, rollout_id: str, rollout: Rollout) -> TokenCaptureSnapshot:
        return replace(super().snapshot(rollout_id, rollout), rollout_id="")


@fails("idempotent_reput", "conflicting_reput")
class RepeatOnlyFromTheSameClient(Memory):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.mine: set[tuple[str, str]] = set()

    async def put(self, entry: TokenEntry) -> None:
        call = (entry.rollout_id, entry.model_call_id)
        rollout = self.rollout(entry.rollout_id)
        if rollout.state == "open" and call[1] in rollout.entries and call not in self.mine:
            self.conflict(rollout, entry)
        await super().put(entry)
        self.mine.add(call)


@fails(
    "conflicting_reput", "concurrent_conflicting_put", "lineage_conflicting_call", "lineage_conflicting_twin"
)
class LastWriteWins(Memory):
    def conflict(self, rollout: Rollout, entry: TokenEntry) -> None:
        rollout.entries[entry.model_call_id] = self.stored(entry)


@fails("conflicting_reput", "concurrent_conflicting_put")
class ConflictLeavesNoTrace(Memory):
    def conflict(self, rollout: Rollout, entry: TokenEntry) -> None:
        rollout.conflicting.add(entry.model_call_id)
        raise ValueError("the call was stored before with other bytes")


@fails("conflicting_reput")
class UnknownFieldsAreNotCompared(Memory):
    def same(self, known: TokenEntry, entry: TokenEntry) -> bool:
        plain = [TokenEntry(**{k: getattr(e, k) for k in TokenEntry.model_fields}) for e in (known, entry)]
        return super().same(*plain)


@fails("mark_incomplete")
class MarkOfAStoredCallIsIgnored(Memory):
    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        if model_call_id not in self.rollout(rollout_id).entries:
            await super().mark_incomplete(rollout_id, model_call_id)


@fails("concurrent_identical_put")
class IdenticalPutsCollide(Memory):
    async def put(self, entry: TokenEntry) -> None:
        self.check_call_id(entry.model_call_id)
        rollout = self.rollout(entry.rollout_id)
        if rollout.state != "open" or entry.model_call_id in rollout.entries:
            await super().put(entry)
            return
        await asyncio.sleep(0)
        if entry.model_call_id in rollout.entries:
            if self.same(rollout.entries[entry.model_call_id], entry):
                raise RuntimeError("duplicate key")
            self.conflict(rollout, entry)
        rollout.entries[entry.model_call_id] = self.stored(entry)


@fails("concurrent_conflicting_put")
class LooksThenWrites(Memory):
    async def put(self, entry: TokenEntry) -> None:
        self.check_rollout_id(entry.rollout_id)
        rollout = self.rollout(entry.rollout_id)
        if rollout.state == "open" and entry.model_call_id not in rollout.entries:
            self.check_call_id(entry.model_call_id)
            await asyncio.sleep(0)
            rollout.entries[entry.model_call_id] = self.stored(entry)
        else:
            await super().put(entry)


@fails("rollout_isolation")
class RolloutIdsIgnoreCase(Memory):
    def key(self, rollout_id: str) -> tuple[str, str]:
        return self.run, rollout_id.casefold()


@fails("invalid_ids_refused", "retire_batch_validation", "delete_batch_validation")
class RolloutIdsAreNotChecked(Memory):
    def check_rollout_id(self, rollout_id: str) -> None:
        pass


@fails("invalid_ids_refused")
class CallIdsAreNotChecked(Memory):
    def check_call_id(self, call_id: str) -> None:
        pass


@fails("close_idempotency")
class SecondCloseRaises(Memory):
    closed = False

    async def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed")
        self.closed = True
