"""Transports that name the wrong parent, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.conformance.broken.registry import fails
from tests.conformance.memory import NO_PARENT, Memory
from tokencustody.errors import LineageError
from tokencustody.fingerprint import conversation_digest, prefix_digests
from tokencustody.fingerprint_v3 import is_input, prefix_digests_v3
from tokencustody.lineage import RolloutLineage, resolved
from tokencustody.protocols import LineageResolution, RolloutRemovalPayload
from tokencustody.records import ParentResolutionStatus, cumulative_tokens


def before_the_answer(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items before the last one that a model wrote."""
    answers = [number for number, item in enumerate(items) if not is_input(item)]
    return items[: answers[-1]] if answers else []


@fails("lineage_prev_len")
class MatchHasNoLength(Memory):
    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        found = await super().resolve(rollout_id, request_items)
        return found if found.match is None else replace(found, match=replace(found.match, prev_len=0))


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


@fails("lineage_no_match", "lineage_edited_item", "lineage_empty_answer")
class ContextIsNotCompared(Memory):
    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        self.asked = before_the_answer(request_items)
        return await super().resolve(rollout_id, request_items)

    def lineage(self, rollout_id: str) -> RolloutLineage:
        lineage = super().lineage(rollout_id)
        length = len(self.asked)
        for call_id, entry in lineage.entries.items():
            digests = prefix_digests_v3 if entry.fingerprint_version == 3 else prefix_digests
            digest = digests(self.asked, {length})[length]
            anything = {"continuation_context_len": length, "continuation_context_digest": digest}
            lineage.entries[call_id] = entry.model_copy(update=anything)
        return lineage


@fails(
    "lineage_rollout_scope",
    "lineage_conflicting_call",
    "lineage_retired_rollout",
    "lineage_fingerprint_version",
    "lineage_empty_answer",
    "namespace_lineage",
)
class ParentsOfOtherRollouts(Memory):
    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        for known in (rollout_id, *(other for _, other in list(self.backend.rollouts))):
            resolution = await super().resolve(known, request_items)
            if resolution != NO_PARENT:
                return resolution
        return NO_PARENT


@fails("lineage_conflicting_call", "lineage_conflicting_twin")
class ConflictingCallStaysACandidate(Memory):
    def lineage(self, rollout_id: str) -> RolloutLineage:
        return RolloutLineage(dict(self.rollout(rollout_id).entries))


@fails("lineage_conflicting_twin")
class ConflictingCallIsForgotten(Memory):
    def lineage(self, rollout_id: str) -> RolloutLineage:
        lineage = super().lineage(rollout_id)
        lineage.entries = {c: e for c, e in lineage.entries.items() if c not in lineage.conflicting}
        return lineage


@fails("lineage_empty_answer")
class EmptyAnswerIsFollowedByItsRequest(Memory):
    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        resolution = await super().resolve(rollout_id, request_items)
        for entry in self.rollout(rollout_id).entries.values():
            same = conversation_digest(request_items) == entry.continuation_context_digest
            if resolution == NO_PARENT and same:
                return resolved(entry.model_call_id, entry.digest or "", tuple(cumulative_tokens(entry)))
        return resolution


@fails("lineage_odd_arguments")
class LongIntegersAreRefused(Memory):
    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        if str(2**70) in str(request_items):
            raise ValueError("Integer exceeds 64-bit range")
        return await super().resolve(rollout_id, request_items)


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


@fails("lineage_ambiguous_twins", "lineage_conflicting_twin")
class FirstTwinWins(Memory):
    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        resolution = await super().resolve(rollout_id, request_items)
        if resolution.reason != "ambiguous":
            return resolution
        first = min(self.rollout(rollout_id).entries.values(), key=lambda entry: entry.model_call_id)
        return resolved(first.model_call_id, first.digest or "", tuple(cumulative_tokens(first)))


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
            return resolved(any_entry.model_call_id, any_entry.digest or "", (1, 2, 3))
