"""Transports that each break one promise, and the checks that must notice.

`BROKEN` lists each with exactly the checks that fail on it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.conformance.memory import NO_PARENT, Memory, Rollout
from tokencustody.errors import LineageError
from tokencustody.fingerprint import conversation_digest
from tokencustody.lineage import RolloutLineage, resolved
from tokencustody.protocols import LineageResolution, RolloutRemovalPayload, TokenCaptureSnapshot
from tokencustody.records import ParentResolutionStatus, TokenEntry, cumulative_tokens

BROKEN: dict[type[Memory], set[str]] = {}


def fails(*checks: str) -> Callable[[type[Memory]], type[Memory]]:
    """Name the checks that must fail on the decorated transport; all others must pass."""

    def register(client: type[Memory]) -> type[Memory]:
        BROKEN[client] = set(checks)
        return client

    return register


# Records.


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


@fails("conflicting_reput", "concurrent_conflicting_put", "lineage_conflicting_call")
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


# The fence.


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
        if rollout.version == 1 and not rollout.entries and not rollout.intents:
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
    async def refuse_call(self, rollout_id: str, *, model_call_id: str, code: str) -> None:
        rollout = self.rollout(rollout_id)
        if rollout.state != "open":
            await super().refuse_call(rollout_id, model_call_id=model_call_id, code=code)
            return
        await asyncio.sleep(0)
        self.check_call_id(model_call_id)
        if rollout.refusals.setdefault(model_call_id, code) != code:
            raise ValueError("the call was refused before with another code")


# Intents.


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


@fails("repeated_refusal")
class LastRefusalWins(Memory):
    async def refuse_call(self, rollout_id: str, *, model_call_id: str, code: str) -> None:
        refusals = self.rollout(rollout_id).refusals
        if self.rollout(rollout_id).state == "open" and model_call_id in refusals:
            refusals[model_call_id] = code
        else:
            await super().refuse_call(rollout_id, model_call_id=model_call_id, code=code)


@fails("post_freeze_refusal")
class LateRefusalSettlesTheIntent(Memory):
    async def refuse_call(self, rollout_id: str, *, model_call_id: str, code: str) -> None:
        rollout = self.rollout(rollout_id)
        if rollout.state == "frozen" and model_call_id in self.dangling(rollout):
            rollout.refusals[model_call_id] = code
            rollout.incomplete = bool(self.dangling(rollout))
        else:
            await super().refuse_call(rollout_id, model_call_id=model_call_id, code=code)


# Retirement.


@fails("conditional_retirement", "stale_drop_loses_nothing")
class DropTakesNoKeywords(Memory):
    async def drop(self, rollout_id: str, *snapshot: Any) -> bool:
        return await super().drop(rollout_id, *snapshot)


@fails("conditional_retirement", "late_use_of_dropped_rollout", "drop_of_dropped_rollout")
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


@fails("stale_drop_loses_nothing", "drop_of_dropped_rollout", "post_freeze_mark")
class DropIgnoresTheVersion(Memory):
    async def drop(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        return await super().drop(rollout_id, snapshot_id, self.rollout(rollout_id).version)


@fails("drop_of_dropped_rollout")
class SecondDropIsFalse(Memory):
    async def drop(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        if self.rollout(rollout_id).state == "retired":
            return False
        return await super().drop(rollout_id, snapshot_id, version)


@fails("late_use_of_dropped_rollout")
class DroppedIsOnlyFrozen(Memory):
    async def drop(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        dropped = await super().drop(rollout_id, snapshot_id, version)
        if dropped:
            self.rollout(rollout_id).state = "frozen"
        return dropped


@fails("late_use_of_dropped_rollout", "unconditional_retirement", "repeated_retirement")
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


@fails("deletion", "deletion_after_retirement")
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


# Lineage.


@fails(
    "lineage_visibility",
    "lineage_rollout_scope",
    "lineage_conflicting_call",
    "lineage_retired_rollout",
    "lineage_delta_chain",
)
class ResolverReadsOnce(Memory):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.read: dict[str, RolloutLineage] = {}

    def lineage(self, rollout_id: str) -> RolloutLineage:
        return self.read.setdefault(rollout_id, super().lineage(rollout_id))


@fails("lineage_visibility_fresh_client")
class FrozenRolloutHasNoParents(Memory):
    def lineage(self, rollout_id: str) -> RolloutLineage:
        return RolloutLineage() if self.rollout(rollout_id).state == "frozen" else super().lineage(rollout_id)


@fails("lineage_root")
class OnlyAnEmptyRolloutHasRoots(Memory):
    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        resolution = await super().resolve(rollout_id, request_items)
        is_root = resolution.status == ParentResolutionStatus.ROOT
        return NO_PARENT if is_root and self.rollout(rollout_id).entries else resolution


@fails("lineage_no_match")
class ContextIsNotCompared(Memory):
    def lineage(self, rollout_id: str) -> RolloutLineage:
        lineage = super().lineage(rollout_id)
        anything = {"continuation_context_len": 0, "continuation_context_digest": conversation_digest([])}
        lineage.entries = {call: entry.model_copy(update=anything) for call, entry in lineage.entries.items()}
        return lineage


@fails(
    "lineage_rollout_scope",
    "lineage_conflicting_call",
    "lineage_retired_rollout",
    "lineage_fingerprint_version",
    "namespace_lineage",
)
class ParentsOfOtherRollouts(Memory):
    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        for known in (rollout_id, *(other for _, other in list(self.backend.rollouts))):
            resolution = await super().resolve(known, request_items)
            if resolution != NO_PARENT:
                return resolution
        return NO_PARENT


@fails("lineage_conflicting_call")
class ConflictingCallStaysACandidate(Memory):
    def lineage(self, rollout_id: str) -> RolloutLineage:
        return RolloutLineage(dict(self.rollout(rollout_id).entries))


@fails("lineage_malformed_request")
class MalformedRequestIsARoot(Memory):
    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        try:
            return await super().resolve(rollout_id, request_items)
        except ValueError:
            return LineageResolution(ParentResolutionStatus.ROOT)


@fails("lineage_retired_rollout")
class RetiredCallsStayCandidates(Memory):
    async def retire(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        kept = {r: super(RetiredCallsStayCandidates, self).lineage(r) for r in self.batch(rollout_ids)}
        vars(self.backend).setdefault("kept", {}).update(kept)
        return await super().retire(rollout_ids)

    def lineage(self, rollout_id: str) -> RolloutLineage:
        return vars(self.backend).get("kept", {}).get(rollout_id) or super().lineage(rollout_id)


@fails("lineage_ambiguous_twins")
class FirstTwinWins(Memory):
    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        resolution = await super().resolve(rollout_id, request_items)
        if resolution.reason != "ambiguous":
            return resolution
        first = min(self.rollout(rollout_id).entries.values(), key=lambda entry: entry.model_call_id)
        return resolved(first, tuple(cumulative_tokens(first)))


@fails("lineage_equal_twins")
class TwinsAreSortedByLocale(Memory):
    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        resolution = await super().resolve(rollout_id, request_items)
        if resolution.match is None:
            return resolution
        twins = [e for e in self.rollout(rollout_id).entries.values() if e.digest == resolution.match.digest]
        first = min(twins, key=lambda entry: entry.model_call_id.casefold())
        return LineageResolution(
            resolution.status, replace(resolution.match, model_call_id=first.model_call_id)
        )


@fails("lineage_fingerprint_version")
class FingerprintVersionIsIgnored(Memory):
    def lineage(self, rollout_id: str) -> RolloutLineage:
        lineage = super().lineage(rollout_id)
        for call_id, entry in lineage.entries.items():
            lineage.entries[call_id] = entry.model_copy(update={"fingerprint_version": None})
        return lineage


@fails("lineage_delta_chain", "lineage_unproven_chain")
class DeltaIsTakenForTheWhole(Memory):
    def lineage(self, rollout_id: str) -> RolloutLineage:
        lineage = super().lineage(rollout_id)
        for call_id, entry in lineage.entries.items():
            changes = {"prompt_is_delta": False, "digest": None, "cum_len": None}
            if entry.prompt_is_delta:
                lineage.entries[call_id] = entry.model_copy(update=changes)
        return lineage


@fails("lineage_unproven_chain")
class ChainIsNotProven(Memory):
    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        try:
            return await super().resolve(rollout_id, request_items)
        except LineageError:
            any_entry = next(iter(self.rollout(rollout_id).entries.values()))
            return resolved(any_entry, (1, 2, 3))


# Exactness.


@fails("exact_token_ids")
class TokenIdsAreSigned(Memory):
    def stored(self, entry: TokenEntry) -> TokenEntry:
        ids = [(n + 2**63) % 2**64 - 2**63 for n in entry.prompt_token_ids]
        return entry.model_copy(deep=True, update={"prompt_token_ids": ids})


@fails("exact_log_probs")
class NegativeZeroIsZero(Memory):
    def stored(self, entry: TokenEntry) -> TokenEntry:
        return entry.model_copy(
            deep=True, update={"generation_log_probs": [p + 0.0 for p in entry.generation_log_probs]}
        )


@fails("exact_log_probs")
class EveryNanIsTheSame(Memory):
    def stored(self, entry: TokenEntry) -> TokenEntry:
        plain = json.loads(json.dumps(entry.generation_log_probs))
        return entry.model_copy(deep=True, update={"generation_log_probs": plain})


@fails("exact_text")
class TextHasNoNul(Memory):
    def stored(self, entry: TokenEntry) -> TokenEntry:
        return entry.model_copy(deep=True, update={"model": entry.model.replace("\0", "")})


@fails("exact_unknown_fields")
class WholeFloatsBecomeInts(Memory):
    def stored(self, entry: TokenEntry) -> TokenEntry:
        def plain(value: Any) -> Any:
            return int(value) if isinstance(value, float) and value.is_integer() else value

        return entry.model_copy(deep=True, update={k: plain(v) for k, v in (entry.model_extra or {}).items()})


@fails("exact_unknown_fields")
class NullIsAbsent(Memory):
    def stored(self, entry: TokenEntry) -> TokenEntry:
        kept = {k: v for k, v in (entry.model_extra or {}).items() if v is not None}
        return TokenEntry.model_construct(**{k: getattr(entry, k) for k in TokenEntry.model_fields}, **kept)


@fails("exact_routed_experts")
class EmptyExpertsAreNone(Memory):
    def stored(self, entry: TokenEntry) -> TokenEntry:
        return entry.model_copy(deep=True, update={"routed_experts": entry.routed_experts or None})


@fails("exact_fields")
class TimesAreMicroseconds(Memory):
    def stored(self, entry: TokenEntry) -> TokenEntry:
        return entry.model_copy(deep=True, update={"created_at": round(entry.created_at, 6)})


@fails("exact_continuations")
class ClaimedPrefixIsBelieved(Memory):
    def stored(self, entry: TokenEntry) -> TokenEntry:
        parent = self.rollout(entry.rollout_id).entries.get(entry.parent_call_id or "")
        if parent is None or entry.prompt_is_delta or parent.prompt_is_delta or parent.cum_len is None:
            return entry.model_copy(deep=True)
        prefix = cumulative_tokens(parent)
        return entry.model_copy(
            deep=True, update={"prompt_token_ids": prefix + entry.prompt_token_ids[len(prefix) :]}
        )


@fails("exact_call_ids")
class CallIdsIgnoreMargins(Memory):
    async def put(self, entry: TokenEntry) -> None:
        await super().put(
            entry.model_copy(update={"model_call_id": entry.model_call_id.strip(" ") or entry.model_call_id})
        )


@fails("exact_long_lists")
class LongPromptsAreCut(Memory):
    def stored(self, entry: TokenEntry) -> TokenEntry:
        return entry.model_copy(deep=True, update={"prompt_token_ids": entry.prompt_token_ids[:131_072]})


# Namespaces.


@fails("namespace_isolation", "namespace_removal", "namespace_lineage")
class OneNamespace(Memory):
    def key(self, rollout_id: str) -> tuple[str, str]:
        return "", rollout_id


@fails("namespace_isolation")
class MarksReachEveryNamespace(Memory):
    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        for run in ("run", "other"):
            await Memory(self.backend, run).mark_incomplete(rollout_id, model_call_id)


@fails("namespace_removal")
class RetireReachesEveryNamespace(Memory):
    async def retire(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        result = await super().retire(rollout_ids)
        await Memory(self.backend, "other").retire(rollout_ids)
        return result


@fails("namespace_lineage")
class ParentsOfOtherNamespaces(Memory):
    def lineage(self, rollout_id: str) -> RolloutLineage:
        lineage = super().lineage(rollout_id)
        lineage.entries.update(Memory(self.backend, "other").rollout(rollout_id).entries)
        return lineage
