"""Transports that change what they store, or let namespaces meet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.conformance.broken.registry import fails
from tests.conformance.memory import Memory, copied
from tokencustody.lineage import RolloutLineage
from tokencustody.protocols import RolloutRemovalPayload
from tokencustody.records import TokenEntry, cumulative_tokens


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
        return copied(entry).model_copy(update={"prompt_token_ids": entry.prompt_token_ids[:131_072]})


@fails("namespace_isolation", "namespace_removal", "namespace_lineage", "namespace_ledger")
class OneNamespace(Memory):
    def key(self, rollout_id: str) -> tuple[str, str]:
        return "run", rollout_id


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
