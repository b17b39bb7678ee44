"""What is told about rollouts and calls: never a token, log probability or message. Lengths are in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from tokencustody.states import FenceState, VersionEvent


class ReasonKind(StrEnum):
    """What made a rollout incomplete."""

    MARK = "mark"
    CONFLICT = "conflict"
    REFUSAL_CONFLICT = "refusal_conflict"
    DANGLING_INTENT = "dangling_intent"


@dataclass(frozen=True, slots=True)
class Reason:
    """One cause why a rollout is incomplete, and how many `times` it was recorded.

    `model_call_id` is empty where none is known: for a mark that named no call, and for the dangling intents
    of a retired rollout, which went with its records. `differing_fields` is separated by commas, as stored.
    """

    kind: ReasonKind
    model_call_id: str
    differing_fields: str = ""
    times: int = 1


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """One rollout. `incomplete` is the verdict that a snapshot carries, `reasons` why.

    `calls` and their tokens are complete records, of which `parents_not_recorded` say nothing of their parent: they are
    neither roots nor resolved nor unresolved, for their writer stamped no lineage. `ledger_calls` are those that the
    token-free ledger recorded, and `ledger_failures` those of which it recorded why they were not captured.

    `not_yet_captured` are the announced calls of an open rollout with neither entry nor refusal: they make it
    incomplete if it is frozen now. A retired rollout has no calls left; `retired_by` says whether it was
    dropped as a consumed snapshot or retired in whatever state it was.
    """

    run: str
    rollout_id: str
    state: FenceState
    version: int
    snapshot_id: str | None
    incomplete: bool
    reasons: tuple[Reason, ...]
    not_yet_captured: tuple[str, ...]
    calls: int
    prompt_tokens: int
    generated_tokens: int
    parents_not_recorded: int
    ledger_calls: int
    ledger_failures: int
    opened_at: datetime
    frozen_at: datetime | None
    retired_at: datetime | None
    retired_by: VersionEvent | None


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over every rollout that a filter matches."""

    rollouts: int
    open: int
    frozen: int
    retired: int
    incomplete: int
    calls: int
    prompt_tokens: int
    generated_tokens: int
    parents_not_recorded: int
    ledger_calls: int
    ledger_failures: int


@dataclass(frozen=True, slots=True)
class RolloutPage:
    """The newest rollouts that a filter matches, and the totals of all of them."""

    rollouts: tuple[RolloutSummary, ...]
    totals: Totals


@dataclass(frozen=True, slots=True)
class CallSummary:
    """One stored call. With `prompt_is_delta`, `prompt_len` counts only what follows the parent."""

    model_call_id: str
    parent_call_id: str | None
    parent_resolution: str | None
    parent_resolution_reason: str
    model: str
    response_id: str | None
    prompt_len: int
    prompt_is_delta: bool
    generation_len: int
    cum_len: int | None
    committed_at: datetime
    written_by: str


@dataclass(frozen=True, slots=True)
class Intent:
    """One call that was announced or refused, perhaps without a code; `stored` says whether its entry arrived."""

    model_call_id: str
    stored: bool
    refusal_code: str | None
    begun_at: datetime
    refused_at: datetime | None
    written_by: str


@dataclass(frozen=True, slots=True)
class LedgerCall:
    """One call of the token-free ledger. Its tokens `prev_len` to `cum_len` are staged under `staging_key`.

    A manifest counts a call without response id or chain hash among its failures.
    """

    position: int
    model_call_id: str
    parent_call_id: str | None
    mode: str
    staging_key: str
    prev_len: int
    cum_len: int
    weight_version: int
    response_id: str | None
    chain_hash: str | None
    committed_at: datetime
    written_by: str


@dataclass(frozen=True, slots=True)
class LedgerFailure:
    """Why one call was not captured, as the ledger recorded it. Positions count calls and failures together."""

    position: int
    model_call_id: str
    reason: str
    recorded_at: datetime
    written_by: str


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a rollout and the event that made it; the last four fields are a failure's evidence."""

    version: int
    event: VersionEvent
    model_call_id: str
    snapshot_id: str | None
    recorded_at: datetime
    written_by: str
    failure_kind: ReasonKind | None
    differing_fields: str | None
    first_payload_sha256: str | None
    second_payload_sha256: str | None


@dataclass(frozen=True, slots=True)
class RolloutDetail:
    """One rollout without its payloads: calls in commit order, intents by time, versions from the first.

    What the ledger holds is in commit order.
    """

    summary: RolloutSummary
    calls: tuple[CallSummary, ...]
    intents: tuple[Intent, ...]
    versions: tuple[Version, ...]
    ledger_calls: tuple[LedgerCall, ...]
    ledger_failures: tuple[LedgerFailure, ...]
