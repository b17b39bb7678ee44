"""Staging stores that lose, mix up, change or half keep what they are given."""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tests.conformance.broken.registry import fails
from tests.conformance.memory import Memory
from tests.conformance.staging import MemoryStaging
from tokencustody.protocols import RolloutRemovalPayload
from tokencustody.staging.records import StagedCallBaseSnapshot, StagedCallRecord, StageResult


@fails("stage_then_fetch", "exact_staged_columns", "staged_prefix")
class OnlyTheWriterSeesChildren(MemoryStaging):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.mine: dict[tuple[str, str], tuple[Any, Any]] = {}

    def store(self, key: tuple[str, str], call: tuple[Any, Any]) -> tuple[Any, Any]:
        is_root = call[0].parent_call_id is None
        return super().store(key, call) if is_root else self.mine.setdefault(key, call)

    def found(self, staging_key: str) -> tuple[Any, Any]:
        return self.mine.get(self.key(staging_key)) or super().found(staging_key)


@fails("fetch_order")
class CallsComeRolloutByRollout(MemoryStaging):
    def fetch(self, staging_keys: list[str]) -> list[StagedCallBaseSnapshot]:
        return super().fetch(sorted(staging_keys, key=lambda key: key.partition("/")[0]))


@fails("identical_stage")
class RepeatWithExtrasIsAConflict(MemoryStaging):
    def same(self, known: tuple[Any, Any], given: tuple[Any, Any]) -> bool:
        repeated = known[0] is not given[0] and known[0].extras is not None
        return not repeated and super().same(known, given)


@fails("conflicting_stage", "concurrent_conflicting_stages", "attachments_are_part_of_the_call")
class LastStageWins(MemoryStaging):
    def store(self, key: tuple[str, str], call: tuple[Any, Any]) -> tuple[Any, Any]:
        self.backend.staged[key] = call
        return call


@fails("conflicting_stage", "concurrent_conflicting_stages", "attachments_are_part_of_the_call")
class ConflictIsASuccess(MemoryStaging):
    def same(self, known: tuple[Any, Any], given: tuple[Any, Any]) -> bool:
        return True


@fails("conflicting_stage")
class ExtrasAreNotCompared(MemoryStaging):
    def same(self, known: tuple[Any, Any], given: tuple[Any, Any]) -> bool:
        tokens_only = [
            (record.model_copy(update={"extras": None, "extras_digest": "", "digest": ""}), kept)
            for record, kept in (known, given)
        ]
        return super().same(*tokens_only)


@fails("conflicting_stage", "concurrent_conflicting_stages", "attachments_are_part_of_the_call")
class ConflictRaises(MemoryStaging):
    def stage(self, record: StagedCallRecord, *, attachments: Mapping[str, Any] | None = None) -> StageResult:
        result = super().stage(record, attachments=attachments)
        if result.error and "another record" in result.error:
            raise KeyError(record.staging_key)
        return result


@fails(
    "missing_staged_call", "unproven_record", "staged_prefix", "staged_deletion", "attachments_all_or_nothing"
)
class MissingCallsAreLeftOut(MemoryStaging):
    def fetch(self, staging_keys: list[str]) -> list[StagedCallBaseSnapshot]:
        return super().fetch([key for key in staging_keys if self.key(key) in self.backend.staged])


@fails("staged_call_identity")
class StagingKeysIgnoreCase(MemoryStaging):
    def key(self, staging_key: str) -> tuple[str, str]:
        return self.run, staging_key.casefold()


@fails("exact_staged_columns")
class LogProbsAreFloat32(MemoryStaging):
    def proven(self, record: StagedCallRecord) -> StagedCallRecord:
        values = record.generation_log_probs_delta
        narrow = list(struct.unpack(f"{len(values)}f", struct.pack(f"{len(values)}f", *values)))
        return super().proven(record).model_copy(update={"generation_log_probs_delta": narrow})


@fails("exact_staged_columns")
class MaskIsOneBit(MemoryStaging):
    def proven(self, record: StagedCallRecord) -> StagedCallRecord:
        mask = [float(bool(value)) for value in record.token_mask_delta]
        return super().proven(record).model_copy(update={"token_mask_delta": mask})


@fails("unproven_record", "staged_extras")
class ContentsAreNotProven(MemoryStaging):
    def proven(self, record: StagedCallRecord) -> StagedCallRecord:
        return record


class RacedStaging(MemoryStaging):
    """Lets two threads that stage at once meet between looking and writing."""

    def meet(self, key: tuple[str, str]) -> None:
        if "-concurrent_" not in key[1]:
            return  # Nobody else would come.
        with self.backend.lock:
            meetings = vars(self.backend).setdefault("meetings", {})
            barrier = meetings.setdefault(key[1].partition("/")[0], threading.Barrier(2))
        # The last thread of a rollout may be alone, and breaks the barrier when its patience ends.
        with suppress(threading.BrokenBarrierError):
            barrier.wait(1.0)


@fails("concurrent_conflicting_stages")
class LooksThenStages(RacedStaging):
    def store(self, key: tuple[str, str], call: tuple[Any, Any]) -> tuple[Any, Any]:
        known = self.backend.staged.get(key)
        if known is None:
            self.meet(key)
            self.backend.staged[key] = call
        return known or call


@fails("concurrent_stages", "concurrent_conflicting_stages")
class CopiesThenReplacesCalls(RacedStaging):
    def store(self, key: tuple[str, str], call: tuple[Any, Any]) -> tuple[Any, Any]:
        copied = dict(self.backend.staged)
        held = copied.setdefault(key, call)
        self.meet(key)
        self.backend.staged = copied
        return held


@fails("staged_extras")
class NoExtrasAreEmptyExtras(MemoryStaging):
    def fetch_extras(self, staging_keys: list[str]) -> list[dict[str, Any] | None]:
        return [extras or {} for extras in super().fetch_extras(staging_keys)]


@fails("staged_extras")
class WholeNumbersInExtrasAreInts(MemoryStaging):
    def fetch_extras(self, staging_keys: list[str]) -> list[dict[str, Any] | None]:
        return [extras and _whole(extras) for extras in super().fetch_extras(staging_keys)]


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


@fails("staged_prefix")
class PrefixIsNotProven(MemoryStaging):
    def prove_prefix(self, token_ids: list[int], last: StagedCallBaseSnapshot | None) -> None:
        pass


@fails("staged_deletion")
class DeletedKeysStayTaken(MemoryStaging):
    def delete(self, staging_keys: list[str]) -> None:
        vars(self.backend).setdefault("deleted", set()).update(map(self.key, staging_keys))

    def found(self, staging_key: str) -> tuple[Any, Any]:
        if self.key(staging_key) in vars(self.backend).get("deleted", ()):
            raise KeyError(staging_key)
        return super().found(staging_key)


@fails("staged_deletion")
class DeleteTakesTheWholeRollout(MemoryStaging):
    def delete(self, staging_keys: list[str]) -> None:
        rollouts = {key.partition("/")[0] for key in staging_keys}
        super().delete([key for _, key in self.backend.staged if key.partition("/")[0] in rollouts])


@fails("source_keeps_staged_calls")
class RetireRemovesStagedCalls(Memory):
    async def retire(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        result = await super().retire(rollout_ids)
        staged = self.backend.staged
        for key in [key for key, (record, _) in staged.items() if record.rollout_id in rollout_ids]:
            del staged[key]
        return result


@fails("attachments_round_trip")
class NoAttachmentsAreNone(MemoryStaging):
    def fetch_attachments(self, staging_key: str) -> dict[str, Any]:
        return super().fetch_attachments(staging_key) or None  # type: ignore[return-value]


@fails("attachments_round_trip", "attachments_are_part_of_the_call")
class ShapesAreForgotten(MemoryStaging):
    def kept(self, value: Any) -> Any:
        kept = super().kept(value)
        return kept.cast("B").cast(kept.format) if isinstance(kept, memoryview) and len(kept) else kept


@fails("attachments_round_trip", "attachments_are_part_of_the_call")
class NumbersAreFloats(MemoryStaging):
    def kept(self, value: Any) -> Any:
        return float(value) if type(value) is int else super().kept(value)


@fails("attachments_round_trip", "attachments_are_part_of_the_call")
class EmptyValuesAreDropped(MemoryStaging):
    def stage(self, record: StagedCallRecord, *, attachments: Mapping[str, Any] | None = None) -> StageResult:
        filled = {name: value for name, value in (attachments or {}).items() if value is not None}
        return super().stage(record, attachments=filled)


@fails("attachments_are_part_of_the_call")
class AttachmentsAreNotCompared(MemoryStaging):
    def same(self, known: tuple[Any, Any], given: tuple[Any, Any]) -> bool:
        return super().same((known[0], {}), (given[0], {}))


@fails("attachments_all_or_nothing")
class OpaqueValuesAreDropped(MemoryStaging):
    def stage(self, record: StagedCallRecord, *, attachments: Mapping[str, Any] | None = None) -> StageResult:
        return super().stage(
            record, attachments={k: v for k, v in (attachments or {}).items() if self.takes(v)}
        )

    def takes(self, value: Any) -> bool:
        try:
            self.kept(value)
        except TypeError:
            return False
        return True


@fails("attachments_all_or_nothing")
class OpaqueValuesAreText(MemoryStaging):
    def kept(self, value: Any) -> Any:
        try:
            return super().kept(value)
        except TypeError:
            return str(value)


@fails("attachments_all_or_nothing")
class TuplesAreLists(MemoryStaging):
    def kept(self, value: Any) -> Any:
        return super().kept(list(value) if type(value) is tuple else value)


@fails("attachments_all_or_nothing")
class RecordIsStagedBeforeItsAttachments(MemoryStaging):
    def stage(self, record: StagedCallRecord, *, attachments: Mapping[str, Any] | None = None) -> StageResult:
        result = super().stage(record, attachments=attachments)
        if attachments and not result.ok and self.key(record.staging_key) not in self.backend.staged:
            self.store(self.key(record.staging_key), (record, {}))
        return result
