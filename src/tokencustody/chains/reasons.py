"""Why a rollout or a call is in no row, and what a person can do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tokencustody.states import FenceState
from tokencustody.txn.fence import RolloutKey


class Why(StrEnum):
    """Why a rollout or a call is in no row or file; for staged calls the receipt gives further reasons."""

    # The whole rollout
    NOT_FROZEN = "not_frozen"
    RETIRED = "retired"
    UNKNOWN = "unknown"
    INCOMPLETE = "incomplete"
    CORRUPT = "corrupt"
    NO_CALLS = "no_calls"
    GYM_CANNOT_CARRY = "gym_cannot_carry"
    BROKEN = "broken"
    # A call that is no continuation: it begins a row of its own, or is left out
    UNRESOLVED_PARENT = "unresolved_parent"
    PARENT_NOT_RECORDED = "parent_not_recorded"
    PARENT_MISSING = "parent_missing"
    PARENT_CYCLE = "parent_cycle"
    PARENT_LEFT_OUT = "parent_left_out"
    NOT_A_CONTINUATION = "prompt_does_not_begin_with_parent"
    # A call that is in no row
    AMBIGUOUS_RETRY = "ambiguous_retry"
    SUPERSEDED_RETRY = "superseded_retry"
    CONFLICTING_CALL = "conflicting_call"
    NOT_PROVEN = "digest_or_length_mismatch"
    BEYOND_INT64 = "ids_beyond_int64"
    NO_GENERATED_TOKENS = "no_generated_tokens"
    # Calls of the ledger
    STAGED_BESIDE_RECORDS = "staged_beside_records"
    NOT_ON_TERMINAL_CHAIN = "not_on_terminal_chain"
    ONLY_STAGED = "only_staged"
    STAGED_CALL_MISSING = "staged_call_missing"


def why_not(state: FenceState, incomplete: bool) -> Why | None:
    """Return why a rollout is left out as a whole, or None where its calls decide."""
    match state:
        case FenceState.OPEN:
            return Why.NOT_FROZEN
        case FenceState.RETIRED:
            return Why.RETIRED
        case FenceState.FROZEN:
            return Why.INCOMPLETE if incomplete else None


# The conversation lost nothing by these.
HARMLESS = {Why.SUPERSEDED_RETRY, Why.NO_GENERATED_TOKENS}


# What a person can do about each, in one line.
REMEDIES: dict[str, str] = {
    Why.NOT_FROZEN: "freeze it, then export again with --unexported",
    Why.RETIRED: "its records are gone; look for the export that holds it in the view audit_exports",
    Why.UNKNOWN: "look for the name with tokencustody rollouts",
    Why.INCOMPLETE: "tokencustody show says what it lost; --include-incomplete exports the rest",
    Why.CORRUPT: "tokencustody verify names what is damaged; restore it from a backup",
    Why.NO_CALLS: "nothing was ever written to it; tokencustody retire lets it go",
    Why.GYM_CANNOT_CARRY: "export it with --format calls",
    Why.BROKEN: "--on-break split makes a row of each part",
    Why.UNRESOLVED_PARENT: "--on-break split makes a row of the call alone",
    Why.PARENT_NOT_RECORDED: "stamp_lineage records the parent; --on-break split makes a row of the call alone",
    Why.PARENT_MISSING: "its parent was never stored: a full prompt is a row by itself, a delta cannot be read",
    Why.PARENT_CYCLE: "tokencustody verify names the circle; a delta in it cannot be read",
    Why.PARENT_LEFT_OUT: "see why the call above it was left out",
    Why.NOT_A_CONTINUATION: "--on-break split begins a new row there",
    Why.AMBIGUOUS_RETRY: "if one prompt was sampled several times on purpose, --siblings keep trains each answer",
    Why.SUPERSEDED_RETRY: "nothing: the agent went on from another answer to the same request; --format calls holds it",
    Why.CONFLICTING_CALL: "two writers used its id; tokencustody show names them",
    Why.NOT_PROVEN: "its writer stamped another sequence; tokencustody verify names the call",
    Why.BEYOND_INT64: "export it with --format calls",
    Why.NO_GENERATED_TOKENS: "nothing: no token was sampled",
    Why.STAGED_BESIDE_RECORDS: "nothing, if the complete records are all that is to be trained",
    Why.NOT_ON_TERMINAL_CHAIN: "nothing, if the chain that ends in the terminal call is the one",
    Why.ONLY_STAGED: "Gym's files hold its row of the ledger; --format calls holds its tokens",
    Why.STAGED_CALL_MISSING: "the worker never staged it, or it was deleted; --format calls holds the others",
}


_ANY_OTHER_REMEDY = "the receipt or the ledger says so; --format calls holds what was captured"


def remedy(reason: str) -> str:
    """Return what a person can do about what was left out for a reason."""
    return REMEDIES.get(reason, _ANY_OTHER_REMEDY)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A rollout, or a call of it, that is in no row or file, and why. `detail` has no token in it."""

    run: str
    rollout_id: str
    reason: str
    model_call_id: str = ""
    detail: str = ""

    @classmethod
    def of(cls, key: RolloutKey, reason: str, model_call_id: str = "", detail: str = "") -> LeftOut:
        """Return what is said of a call of the rollout, or of all of it."""
        return cls(key.run, key.rollout_id, reason, model_call_id, detail)


@dataclass(frozen=True, slots=True)
class Shape:
    """How a rollout comes apart into rows, and how much of it is in the files.

    `breaks` counts the segments that do not begin with a root, by reason. `calls_left_out` are in no file. `whole`: the
    rollout lost nothing, for all that it left out are retries that the agent never received, and calls that sampled
    nothing. `is_held`: every token that was sampled in its complete records, and in the staged calls that its ledger
    names, is in the files.
    """

    segments: int
    breaks: dict[str, int]
    calls_left_out: int
    whole: bool
    is_held: bool
