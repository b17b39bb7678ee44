"""Ledgers that lose, mix up or misjudge rows, and stores that fence records and ledger apart."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.conformance.broken.lineage import before_the_answer
from tests.conformance.broken.registry import fails
from tests.conformance.ledger import MemoryLedger
from tests.conformance.memory import NO_PARENT, Memory, Rollout
from tokencustody.errors import RolloutRetiredError
from tokencustody.fingerprint import conversation_digest
from tokencustody.lineage import AMBIGUOUS, NO_MATCH
from tokencustody.protocols import LineageMatch, LineageResolution, RolloutRemovalPayload
from tokencustody.records import ParentResolutionStatus
from tokencustody.staging.records import CallRecord, CaptureLedgerCommit


@fails("record_then_manifest", "exact_ledger_rows")
class ManifestIsSorted(MemoryLedger):
    async def manifest(self, rollout_id: str) -> dict[str, Any]:
        manifest = await super().manifest(rollout_id)
        manifest["records"].sort(key=lambda row: row["model_call_id"])
        return manifest


@fails(
    "ledger_failures",
    "record_after_failure",
    "ledger_isolation",
    "record_after_freeze",
    "concurrent_records",
    "late_rows_make_a_version",
)
class FailuresAreNoWireData(MemoryLedger):
    async def manifest(self, rollout_id: str) -> dict[str, Any]:
        manifest = await super().manifest(rollout_id)
        return manifest | {"failures": tuple(manifest["failures"]) or []}


@fails("ledger_capture_key")
class WhoStagedIsForgotten(MemoryLedger):
    def stored_call(self, commit: CaptureLedgerCommit) -> CaptureLedgerCommit:
        row = commit.record.model_copy(update={"capture_key": None})
        return commit.model_copy(deep=True, update={"record": row})


@fails("identical_record")
class RepeatMovesToTheEnd(MemoryLedger):
    async def record(self, commit: CaptureLedgerCommit) -> None:
        await super().record(commit)
        calls = self.rollout(commit.rollout_id).calls
        if commit.record.model_call_id in calls:
            calls[commit.record.model_call_id] = calls.pop(commit.record.model_call_id)


@fails("conflicting_record", "concurrent_conflicting_records", "repeated_conversation")
class LastRecordWins(MemoryLedger):
    async def record(self, commit: CaptureLedgerCommit) -> None:
        try:
            await super().record(commit)
        except ValueError:
            calls = self.rollout(commit.rollout_id).calls
            if commit.record.model_call_id not in calls:
                raise
            calls[commit.record.model_call_id] = self.stored_call(commit)


@fails("conflicting_record", "repeated_conversation")
class OnlyManifestFieldsAreCompared(MemoryLedger):
    def same_call(self, known: CaptureLedgerCommit, commit: CaptureLedgerCommit) -> bool:
        return known.record == commit.record


@fails("ledger_failures")
class LastReasonWins(MemoryLedger):
    async def record_failure(self, rollout_id: str, model_call_id: str, reason: str) -> None:
        failures = self.rollout(rollout_id).failures
        failures[:] = [each for each in failures if each[0] != model_call_id or each[1] == reason]
        await super().record_failure(rollout_id, model_call_id, reason)


@fails("ledger_failures")
class OneReasonIsEnough(MemoryLedger):
    async def record_failure(self, rollout_id: str, model_call_id: str, reason: str) -> None:
        rollout = self.rollout(rollout_id)
        if rollout.has_failed(model_call_id) and (model_call_id, reason) not in rollout.failures:
            raise ValueError("conflicting reason of a failure")
        await super().record_failure(rollout_id, model_call_id, reason)


@fails("repeated_conversation")
class ItemIdsAreCompared(MemoryLedger):
    def same_call(self, known: CaptureLedgerCommit, commit: CaptureLedgerCommit) -> bool:
        return known == commit


@fails("ledger_derived_fingerprint")
class TheClaimIsBelieved(MemoryLedger):
    def fingerprint(self, commit: CaptureLedgerCommit) -> str | None:
        return commit.record.continuation_fingerprint


@fails("late_rows_make_a_version")
class LateRowsGoWithTheSnapshot(MemoryLedger):
    def has_new_row(self, rollout: Rollout) -> None:
        pass


@fails("record_after_failure", "failed_call_is_no_parent")
class RecordHealsAFailure(MemoryLedger):
    async def record(self, commit: CaptureLedgerCommit) -> None:
        failures = self.rollout(commit.rollout_id).failures
        call = commit.record.model_call_id
        healed = [each for each in failures if each[0] == call]
        failures[:] = [each for each in failures if each[0] != call]
        await super().record(commit)
        failures += healed


@fails("record_after_failure")
class FailureReplacesTheRecord(MemoryLedger):
    async def record_failure(self, rollout_id: str, model_call_id: str, reason: str) -> None:
        await super().record_failure(rollout_id, model_call_id, reason)
        self.rollout(rollout_id).calls.pop(model_call_id, None)


@fails("ledger_has_rows")
class FailuresAreNoRows(MemoryLedger):
    async def has_rows(self, rollout_id: str) -> bool:
        return await super().has_rows(rollout_id) and bool(self.rollout(rollout_id).calls)


@fails("ledger_isolation")
class LedgerIgnoresCase(MemoryLedger):
    def key(self, rollout_id: str) -> tuple[str, str]:
        return self.run, rollout_id.casefold()


@fails("ledger_invalid_ids", "ledger_retire_validation", "ledger_delete_validation")
class LedgerChecksNoRolloutIds(MemoryLedger):
    def check_rollout_id(self, rollout_id: str) -> None:
        pass


@fails("ledger_invalid_ids")
class LedgerChecksNoCallIds(MemoryLedger):
    def check_call_id(self, call_id: str) -> None:
        pass


@fails("record_after_freeze", "late_rows_make_a_version")
class FreezeFencesTheLedger(MemoryLedger):
    async def record(self, commit: CaptureLedgerCommit) -> None:
        if self.rollout(commit.rollout_id).state != "frozen":
            await super().record(commit)


@fails("concurrent_records")
class CopiesThenReplacesRows(MemoryLedger):
    async def record(self, commit: CaptureLedgerCommit) -> None:
        before = self.rollout(commit.rollout_id)
        calls = dict(before.calls)
        await super().record(commit)
        if before.state != "retired":
            before.calls = calls | {commit.record.model_call_id: before.calls[commit.record.model_call_id]}


@fails("concurrent_conflicting_records")
class LooksThenRecords(MemoryLedger):
    async def record(self, commit: CaptureLedgerCommit) -> None:
        rollout = self.rollout(commit.rollout_id)
        call = commit.record.model_call_id
        if rollout.state != "open" or call in rollout.calls or rollout.has_failed(call):
            await super().record(commit)
            return
        self.check_call_id(call)
        await asyncio.sleep(0)
        rollout.calls.setdefault(call, self.stored_call(commit))


@fails("ledger_visibility")
class LedgerIsReadOnce(MemoryLedger):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.read: dict[str, Rollout] = {}

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        self.read.setdefault(rollout_id, copy.deepcopy(self.rollout(rollout_id)))
        return await super().resolve(rollout_id, request_items)

    def resolve_rows(self, rollout: Rollout, request_items: list[dict[str, Any]]) -> LineageResolution:
        known = next(rollout_id for (_, rollout_id), held in self.backend.rollouts.items() if held is rollout)
        return super().resolve_rows(self.read[known], request_items)


@fails("ledger_visibility", "ledger_visibility_fresh_client", "namespace_ledger")
class ChainIsOnlyTheLastCall(MemoryLedger):
    def match(self, commit: CaptureLedgerCommit) -> LineageMatch:
        return replace(super().match(commit), staging_chain=(commit.record.staging_key,))


@fails(
    "ledger_visibility",
    "ledger_visibility_fresh_client",
    "ledger_equal_twins",
    "namespace_ledger",
    "ledger_derived_fingerprint",
)
class DigestIsThatOfTheDelta(MemoryLedger):
    def match(self, commit: CaptureLedgerCommit) -> LineageMatch:
        return replace(super().match(commit), digest=commit.record.digest)


@fails("ledger_visibility_fresh_client")
class FrozenLedgerHasNoParents(MemoryLedger):
    def resolve_rows(self, rollout: Rollout, request_items: list[dict[str, Any]]) -> LineageResolution:
        return NO_PARENT if rollout.state == "frozen" else super().resolve_rows(rollout, request_items)


@fails("ledger_no_match", "ledger_empty_answer")
class LedgerContextIsNotCompared(MemoryLedger):
    def resolve_rows(self, rollout: Rollout, request_items: list[dict[str, Any]]) -> LineageResolution:
        self.asked = before_the_answer(request_items)
        return super().resolve_rows(rollout, request_items)

    def context(self, commit: CaptureLedgerCommit) -> tuple[int, str]:
        return len(self.asked), conversation_digest(self.asked)


@fails("ledger_empty_answer")
class EmptyRowIsFollowedByItsRequest(MemoryLedger):
    def resolve_rows(self, rollout: Rollout, request_items: list[dict[str, Any]]) -> LineageResolution:
        resolution = super().resolve_rows(rollout, request_items)
        for commit in rollout.calls.values():
            if resolution == NO_PARENT and commit.request_items == request_items:
                return LineageResolution(ParentResolutionStatus.RESOLVED, self.match(commit))
        return resolution


@fails("ledger_unversioned_rows")
class EveryVersionCounts(MemoryLedger):
    def is_candidate(self, row: CallRecord) -> bool:
        return True


@fails("ledger_equal_twins")
class RowTwinsAreSortedByLocale(MemoryLedger):
    def match(self, commit: CaptureLedgerCommit) -> LineageMatch:
        calls = self.rollout(commit.rollout_id).calls.values()
        twins = [each for each in calls if each.record.cumulative_hash == commit.record.cumulative_hash]
        return super().match(min(twins, key=lambda each: each.record.model_call_id.casefold()))


@fails("ledger_ambiguous_twins")
class FirstRowWins(MemoryLedger):
    def resolve_rows(self, rollout: Rollout, request_items: list[dict[str, Any]]) -> LineageResolution:
        resolution = super().resolve_rows(rollout, request_items)
        if resolution.reason != AMBIGUOUS:
            return resolution
        return LineageResolution(
            ParentResolutionStatus.RESOLVED, self.match(next(iter(rollout.calls.values())))
        )


@fails("complete_records_first")
class LedgerIsAskedFirst(MemoryLedger):
    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        resolution = self.resolve_rows(self.rollout(rollout_id), request_items)
        found = resolution.status == ParentResolutionStatus.RESOLVED
        return resolution if found else await super().resolve(rollout_id, request_items)


@fails("complete_records_first")
class LedgerSettlesAmbiguity(MemoryLedger):
    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        resolution = await super().resolve(rollout_id, request_items)
        if resolution.reason != AMBIGUOUS:
            return resolution
        from_rows = self.resolve_rows(self.rollout(rollout_id), request_items)
        return from_rows if from_rows.reason != NO_MATCH else resolution


@fails("ledger_retirement", "ledger_repeated_retirement", "source_fences_the_ledger")
class LateRowIsAnError(MemoryLedger):
    async def record(self, commit: CaptureLedgerCommit) -> None:
        if self.rollout(commit.rollout_id).state == "retired":
            raise RolloutRetiredError
        await super().record(commit)


@fails("ledger_retirement", "ledger_repeated_retirement", "source_fences_the_ledger")
class LateRowIsKept(MemoryLedger):
    async def record(self, commit: CaptureLedgerCommit) -> None:
        rollout = self.rollout(commit.rollout_id)
        if rollout.state == "retired":
            rollout.calls[commit.record.model_call_id] = self.stored_call(commit)
        await super().record(commit)


@fails("ledger_retirement", "ledger_repeated_retirement", "source_fences_the_ledger")
class RetiredLedgerLooksEmpty(MemoryLedger):
    def refuse_reading(self, rollout: Rollout) -> None:
        pass


@fails("ledger_retirement")
class FrozenRolloutIsNotRetired(MemoryLedger):
    async def retire(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        frozen = [r for r in self.batch(rollout_ids) if self.rollout(r).state == "frozen"]
        result = await super().retire(rollout_ids)
        for rollout_id in frozen:
            self.rollout(rollout_id).state = "frozen"
        return result


@fails("ledger_repeated_retirement")
class LedgerCountsDuplicates(MemoryLedger):
    async def retire(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        result = await super().retire(rollout_ids)
        return RolloutRemovalPayload(
            absent=[r for r in rollout_ids if r in result["absent"]],
            removed=[r for r in rollout_ids if r in result["removed"]],
        )


@fails("ledger_deletion")
class DeleteKeepsTheFailures(MemoryLedger):
    async def delete(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        kept = {r: list(self.rollout(r).failures) for r in self.batch(rollout_ids)}
        result = await super().delete(rollout_ids)
        for rollout_id, failures in kept.items():
            self.rollout(rollout_id).failures = failures
        return result


@fails("ledger_retire_validation")
class LedgerRetiresOneByOne(MemoryLedger):
    async def retire(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        result = RolloutRemovalPayload(absent=[], removed=[])
        for rollout_id in dict.fromkeys(rollout_ids):
            one = await super().retire([rollout_id])
            result["absent"] += one["absent"]
            result["removed"] += one["removed"]
        return result


@fails("ledger_delete_validation")
class LedgerDeletesABareString(MemoryLedger):
    async def delete(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        return await super().delete([rollout_ids] if isinstance(rollout_ids, str) else rollout_ids)


@fails("source_fences_the_ledger")
class LedgerRowsDoNotCount(Memory):
    async def retire(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        rows_only = {r for r in self.batch(rollout_ids) if not self.rollout(r).entries}
        result = await super().retire(rollout_ids)
        return RolloutRemovalPayload(
            absent=[r for r in dict.fromkeys(rollout_ids) if r in rows_only],
            removed=[r for r in result["removed"] if r not in rows_only],
        )


@fails("source_fences_the_ledger")
class LedgerHasAFenceOfItsOwn(MemoryLedger):
    async def retire(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        result = await super().retire(rollout_ids)
        for rollout_id in rollout_ids:
            self.rollout(rollout_id).snapshot_id = "retired by the ledger"
        return result

    def refuse_reading(self, rollout: Rollout) -> None:
        if rollout.snapshot_id == "retired by the ledger":
            super().refuse_reading(rollout)


@fails("ledger_fences_the_source")
class LedgerRetiresItsRowsOnly(MemoryLedger):
    async def retire(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        rollouts = {r: self.rollout(r) for r in self.batch(rollout_ids)}
        kept = {r: copy.deepcopy(rollout) for r, rollout in rollouts.items() if rollout.entries}
        result = await super().retire(rollout_ids)
        for rollout_id, rollout in kept.items():
            self.backend.rollouts[self.key(rollout_id)] = rollout
        return result


@fails("namespace_ledger")
class RetiredAnywhereIsRetired(MemoryLedger):
    def rollout(self, rollout_id: str) -> Rollout:
        elsewhere = self.backend.rollouts.get(("other", rollout_id))
        return elsewhere if elsewhere and elsewhere.state == "retired" else super().rollout(rollout_id)


@fails("ledger_keeps_staged_calls")
class LedgerDeletesStagedCalls(MemoryLedger):
    async def delete(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        result = await super().delete(rollout_ids)
        staged = self.backend.staged
        for key in [key for key, (record, _) in staged.items() if record.rollout_id in rollout_ids]:
            del staged[key]
        return result
