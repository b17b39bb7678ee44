"""The terminal call: which model call a rollout's answer came from, and the receipt that records it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tokencustody.fingerprint import FINGERPRINT_VERSION, assistant_fingerprint
from tokencustody.records import response_to_output_items
from tokencustody.staging.records import (
    TERMINAL_AMBIGUOUS,
    TERMINAL_DUPLICATE_CALL_ID,
    TERMINAL_NO_RECORDS,
    TERMINAL_NO_ROOT,
    TERMINAL_ORPHANED_ROW,
    TERMINAL_SELECTED,
    CallRecord,
    RolloutManifest,
    RolloutReceipt,
)

# Why a witness named no call. Wire contract: a string is never given another meaning.
DECLARED_NOT_CAPTURED = "declared_terminal_not_captured"
DECLARED_AMBIGUOUS = "declared_ambiguous"
NO_RESPONSE_OBJECT = "no_response_object"
RESPONSE_HAS_NO_ID = "response_has_no_id"
RESPONSE_ID_NO_MATCH = "response_id_no_match"
RESPONSE_ID_AMBIGUOUS = "response_id_ambiguous"
RESPONSE_HAS_NO_OUTPUT = "response_has_no_output"
NO_CONTENT_MATCH = "no_content_match"
CONTENT_AMBIGUOUS = "content_ambiguous"

TerminalMethod = Literal["declared", "response_id", "content", "heuristic"]
_Witness = Callable[[Sequence[CallRecord], Mapping[str, Any]], tuple[list[CallRecord], str]]


@dataclass(frozen=True)
class TerminalSelection:
    """The call that the parent links end in, with reason "selected", or None with the reason why there is none."""

    terminal_model_call_id: str | None
    reason: str


@dataclass(frozen=True)
class TerminalAttribution:
    """The terminal call and the method that decided, or None.

    `reason` names, separated by commas, what the methods asked before found missing; without a call its last name
    is why the deciding method found none.
    """

    model_call_id: str | None
    method: TerminalMethod
    reason: str = ""


def select_terminal_call(records: Sequence[CallRecord]) -> TerminalSelection:
    """Return the call that the parent links of a manifest end in, without any other witness.

    A root with children comes before one without; among equals the first admitted (unstamped last), then the first
    in the manifest. From it the walk follows the child that was itself continued, or the only child. It never
    chooses between two.
    """
    if not records:
        return TerminalSelection(None, TERMINAL_NO_RECORDS)
    calls = {record.model_call_id for record in records}
    if len(calls) != len(records):
        return TerminalSelection(None, TERMINAL_DUPLICATE_CALL_ID)
    children: defaultdict[str | None, list[CallRecord]] = defaultdict(list)
    for record in records:
        children[record.parent_call_id].append(record)
    if children.keys() - calls - {None}:
        return TerminalSelection(None, TERMINAL_ORPHANED_ROW)

    def continued_first(siblings: list[CallRecord]) -> list[CallRecord]:
        return [record for record in siblings if record.model_call_id in children] or siblings

    candidates = sorted(continued_first(children[None]), key=_admission_order)[:1]
    if not candidates:
        return TerminalSelection(None, TERMINAL_NO_ROOT)
    while len(candidates) == 1:
        call = candidates[0].model_call_id
        if call not in children:
            return TerminalSelection(call, TERMINAL_SELECTED)
        candidates = continued_first(children[call])
    return TerminalSelection(None, TERMINAL_AMBIGUOUS)


def assemble_receipt(
    manifest: RolloutManifest | Mapping[str, Any],
    *,
    declared_response_id: str | None = None,
    scored_response: Mapping[str, Any] | None = None,
    reward: float | None = None,
) -> RolloutReceipt:
    """Return the receipt of a finished rollout: its manifest and its terminal call, or why it cannot be trained on.

    `manifest` is what `CaptureLedger.manifest` or the manifest route returned. The terminal is the call of
    `declared_response_id` (what the agent says it returned); else of the id of `scored_response` (the Responses, Chat
    or Anthropic response that was rewarded); else of its content; else where the parent links end. A declared id of
    no captured call is never replaced by another method.

    The receipt is poisoned, with the reason, when the manifest has failures (the first one's reason) or no method
    finds one call. Raises ValueError for a malformed manifest or a reward that is not finite, and TypeError for a
    `scored_response` that is no mapping.
    """
    manifest = RolloutManifest.model_validate(manifest)
    # The first row of each call: a receipt names a call once, and with a second one it is poisoned below.
    rows = {record.model_call_id: record for record in reversed(manifest.records)}
    receipt: dict[str, Any] = {
        "rollout_id": manifest.rollout_id,
        "reward": reward,
        "manifest": [record for record in manifest.records if rows[record.model_call_id] is record],
    }
    failure = manifest.failures[0].reason if manifest.failures else None
    if len(rows) != len(manifest.records):
        failure = failure or TERMINAL_DUPLICATE_CALL_ID
    else:
        found = _attribute(manifest.records, declared_response_id, scored_response)
        receipt["terminal_model_call_id"] = found.model_call_id
        receipt["terminal_selection"] = found.method
        receipt["terminal_attribution_reason"] = found.reason or None
        if found.model_call_id is None:
            failure = failure or found.reason.split(",")[-1]
    return RolloutReceipt(**receipt, capture_poisoned=failure is not None, failure_reason=failure)


def _attribute(
    records: Sequence[CallRecord], declared: str | None, response: Mapping[str, Any] | None
) -> TerminalAttribution:
    if response is not None and not isinstance(response, Mapping):
        raise TypeError(f"scored_response must be a mapping, not {type(response).__name__}")
    if declared:
        matches = [record for record in records if record.response_id == declared]
        call = _only(matches)
        reason = "" if call else DECLARED_AMBIGUOUS if matches else DECLARED_NOT_CAPTURED
        return TerminalAttribution(call, "declared", reason)

    reasons = [NO_RESPONSE_OBJECT] if response is None else []
    candidates = records
    if response is not None:
        for method, witness in _WITNESSES:
            matches, reason = witness(candidates, response)
            if call := _only(matches):
                return TerminalAttribution(call, method, ",".join(reasons))
            reasons.append(reason)
            # A witness that fits several calls still rules out the others.
            candidates = matches or candidates
    walk = select_terminal_call(records)
    call, reason = walk.terminal_model_call_id, walk.reason
    if call is not None and call not in {record.model_call_id for record in candidates}:
        call, reason = None, TERMINAL_AMBIGUOUS
    if call is None:
        reasons.append(reason)
    return TerminalAttribution(call, "heuristic", ",".join(reasons))


def _by_response_id(
    records: Sequence[CallRecord], response: Mapping[str, Any]
) -> tuple[list[CallRecord], str]:
    response_id = response.get("id")
    if not response_id:
        return [], RESPONSE_HAS_NO_ID
    matches = [record for record in records if record.response_id == response_id]
    return matches, RESPONSE_ID_AMBIGUOUS if matches else RESPONSE_ID_NO_MATCH


def _by_content(records: Sequence[CallRecord], response: Mapping[str, Any]) -> tuple[list[CallRecord], str]:
    comparable = [record for record in records if record.fingerprint_version == FINGERPRINT_VERSION]
    try:
        items = response_to_output_items(response)
        whole, last = assistant_fingerprint(items), assistant_fingerprint(_last_turn(items))
    except ValueError:
        # A response that cannot be read is no witness, and no reason to fail the whole batch.
        return [], RESPONSE_HAS_NO_OUTPUT
    if not whole:
        return [], RESPONSE_HAS_NO_OUTPUT
    matches: list[CallRecord] = []
    if whole != last:
        # A response of several turns is a whole trajectory, which only its last call continues.
        matches = [record for record in comparable if record.continuation_fingerprint == whole]
    matches = matches or [record for record in comparable if record.output_fingerprint == last]
    return matches, CONTENT_AMBIGUOUS if matches else NO_CONTENT_MATCH


_WITNESSES: tuple[tuple[TerminalMethod, _Witness], ...] = (
    ("response_id", _by_response_id),
    ("content", _by_content),
)


def _last_turn(items: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return what the model wrote after the last input of a trajectory, leaving out inputs at its very end."""
    turn: list[Mapping[str, Any]] = []
    for item in reversed(items):
        if _is_input(item):
            if turn:
                break
        else:
            turn.append(item)
    return turn[::-1]


def _is_input(item: Mapping[str, Any]) -> bool:
    kind = item.get("type")
    return (item.get("role") or "assistant") != "assistant" or (
        isinstance(kind, str) and kind.endswith("_output")
    )


def _only(matches: Sequence[CallRecord]) -> str | None:
    """Return the call that the matches stand for: one, or several with the same tokens, of which the smallest id."""
    if len({(record.cumulative_hash, record.cum_len) for record in matches}) != 1:
        return None
    return min(record.model_call_id for record in matches)


def _admission_order(record: CallRecord) -> tuple[bool, float]:
    return record.admitted_at is None, record.admitted_at or 0.0
