"""The terminal call: which model call a rollout's answer came from, and the receipt that records it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tokencustody.fingerprint import FINGERPRINT_VERSION, assistant_fingerprint
from tokencustody.records import response_to_output_items
from tokencustody.staging.reasons import (
    TERMINAL_AMBIGUOUS,
    TERMINAL_DUPLICATE_CALL_ID,
    TERMINAL_NO_RECORDS,
    TERMINAL_NO_ROOT,
    TERMINAL_ORPHANED_ROW,
    TERMINAL_SELECTED,
)
from tokencustody.staging.records import CallRecord, RolloutManifest, RolloutReceipt

# Why a witness named no call. Wire contract: a string is never given another meaning.
DECLARED_NOT_CAPTURED = "declared_terminal_not_captured"
DECLARED_AMBIGUOUS = "declared_ambiguous"
NO_RESPONSE_OBJECT = "no_response_object"
RESPONSE_HAS_NO_ID = "response_has_no_id"
RESPONSE_ID_NO_MATCH = "response_id_no_match"
RESPONSE_ID_AMBIGUOUS = "response_id_ambiguous"
RESPONSE_HAS_NO_OUTPUT = "response_has_no_output"
NO_MODEL_AUTHORED_OUTPUT = "no_model_authored_output"
RESPONSE_OUTPUT_UNREADABLE = "response_output_unfingerprintable"
NO_CONTENT_MATCH = "no_content_match"
CONTENT_AMBIGUOUS = "content_ambiguous"
# Why witnesses together named none, and what is added where several named the same.
WITNESS_DISAGREEMENT = "witness_disagreement"
CORROBORATED_BY = "corroborated_by"

TerminalMethod = Literal["declared", "response_id", "content", "heuristic"]


@dataclass(frozen=True)
class TerminalSelection:
    """The call that the parent links end in, with reason "selected", or None with the reason why there is none."""

    terminal_model_call_id: str | None
    reason: str


@dataclass(frozen=True)
class TerminalAttribution:
    """The terminal call and the strongest method that named it, or None and why it cannot be trained on (`failure`).

    `reason` names, separated by commas, what witnesses were missing, and then which ones agree with the method
    (`corroborated_by=…`) or, without a call, what each one names (`witness_disagreement[…]`) or why the walk ended in
    none.
    """

    model_call_id: str | None
    method: TerminalMethod
    reason: str = ""
    failure: str = ""


@dataclass(frozen=True)
class _Testimony:
    """What one witness says: the calls that fit it, and why they are not one, or empty text.

    The walk along the parent links, which comes after it, must end in one of `possible`, if there are any.
    """

    method: TerminalMethod
    matches: Sequence[CallRecord]
    missing: str
    possible: Sequence[CallRecord] = ()


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

    `manifest` is what `CaptureLedger.manifest` or the manifest route returned. Three witnesses may name the terminal:
    `declared_response_id` (what the agent says it returned), the id of `scored_response` (the Responses, Chat or
    Anthropic response that was rewarded), and its content. A witness that fits several calls names none. Those that
    name one must all name the same: a weaker one never decides against a stronger, and vetoes it. Without any, the
    terminal is where the parent links end. A declared id of no captured call, or of several, is never replaced by
    another method.

    The receipt is poisoned, with the reason, when the manifest has failures (the first one's reason), when witnesses
    contradict each other (`witness_disagreement`) or when no method finds one call. Raises ValueError for a malformed
    manifest or a reward that is not finite, and TypeError for a `scored_response` that is no mapping.
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
            failure = failure or found.failure
    return RolloutReceipt(**receipt, capture_poisoned=failure is not None, failure_reason=failure)


def _attribute(
    records: Sequence[CallRecord], declared: str | None, response: Mapping[str, Any] | None
) -> TerminalAttribution:
    if response is not None and not isinstance(response, Mapping):
        raise TypeError(f"scored_response must be a mapping, not {type(response).__name__}")
    testimonies = []
    if declared:
        testimony = _by_declaration(records, declared)
        if testimony.missing:
            return TerminalAttribution(None, "declared", testimony.missing, testimony.missing)
        testimonies.append(testimony)
    reasons = [NO_RESPONSE_OBJECT] if response is None else []
    if response is not None:
        testimonies += [_by_response_id(records, response), _by_content(records, response)]
    reasons += [testimony.missing for testimony in testimonies if testimony.missing]
    named = [testimony for testimony in testimonies if not testimony.missing]
    if not named:
        return _by_walk(records, testimonies, reasons)
    method, call = named[0].method, _only(named[0].matches)
    if len({_sequence(testimony.matches[0]) for testimony in named}) > 1:
        claims = ";".join(f"{testimony.method}={_only(testimony.matches)}" for testimony in named)
        reasons.append(f"{WITNESS_DISAGREEMENT}[{claims}]")
        return TerminalAttribution(None, method, ",".join(reasons), WITNESS_DISAGREEMENT)
    if len(named) > 1:
        reasons.append(f"{CORROBORATED_BY}={'+'.join(testimony.method for testimony in named[1:])}")
    return TerminalAttribution(call, method, ",".join(reasons))


def _by_walk(
    records: Sequence[CallRecord], testimonies: Sequence[_Testimony], reasons: Sequence[str]
) -> TerminalAttribution:
    walk = select_terminal_call(records)
    call, failure = walk.terminal_model_call_id, walk.reason
    # A witness that fits several calls still rules out the others.
    if call is not None and not all(
        call in {record.model_call_id for record in testimony.possible}
        for testimony in testimonies
        if testimony.possible
    ):
        call, failure = None, TERMINAL_AMBIGUOUS
    if call is not None:
        return TerminalAttribution(call, "heuristic", ",".join(reasons))
    return TerminalAttribution(None, "heuristic", ",".join((*reasons, failure)), failure)


def _by_declaration(records: Sequence[CallRecord], declared: str) -> _Testimony:
    matches = [record for record in records if record.response_id == declared]
    missing = DECLARED_AMBIGUOUS if matches else DECLARED_NOT_CAPTURED
    return _Testimony("declared", matches, "" if _only(matches) else missing)


def _by_response_id(records: Sequence[CallRecord], response: Mapping[str, Any]) -> _Testimony:
    response_id = response.get("id")
    if not response_id:
        return _Testimony("response_id", [], RESPONSE_HAS_NO_ID)
    matches = [record for record in records if record.response_id == response_id]
    missing = RESPONSE_ID_AMBIGUOUS if matches else RESPONSE_ID_NO_MATCH
    return _Testimony("response_id", matches, "" if _only(matches) else missing, possible=matches)


def _by_content(records: Sequence[CallRecord], response: Mapping[str, Any]) -> _Testimony:
    try:
        items = response_to_output_items(response)
        whole = assistant_fingerprint(items)
        turns = {assistant_fingerprint(turn) for turn in (items, _last_turn(items), _last_words(items))}
    except ValueError:
        # A response that cannot be read is no witness, and no reason to fail the whole batch.
        return _Testimony("content", [], RESPONSE_OUTPUT_UNREADABLE)
    if not whole:
        return _Testimony("content", [], NO_MODEL_AUTHORED_OUTPUT if items else RESPONSE_HAS_NO_OUTPUT)
    comparable = [record for record in records if record.fingerprint_version == FINGERPRINT_VERSION]
    # Nothing says what it is: a whole trajectory that ends in the call, or what the call alone wrote.
    trajectory = [record for record in comparable if record.continuation_fingerprint == whole]
    alone = [record for record in comparable if record.output_fingerprint in turns - {""}]
    matches = list({record.model_call_id: record for record in (*trajectory, *alone)}.values())
    missing = CONTENT_AMBIGUOUS if matches else NO_CONTENT_MATCH
    # Several turns are more likely the first of these, and then no other call comes into question.
    possible = trajectory if trajectory and len(turns) > 1 else matches
    return _Testimony("content", matches, "" if _only(matches) else missing, possible)


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


def _last_words(items: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages and tool calls at the very end of a trajectory."""
    words: list[Mapping[str, Any]] = []
    for item in reversed(items):
        if not assistant_fingerprint([dict(item)]):
            break
        words.append(item)
    return words[::-1]


def _is_input(item: Mapping[str, Any]) -> bool:
    kind = item.get("type")
    return (item.get("role") or "assistant") != "assistant" or (
        isinstance(kind, str) and kind.endswith("_output")
    )


def _only(matches: Sequence[CallRecord]) -> str | None:
    """Return the call that the matches stand for: one, or several with the same tokens, of which the smallest id."""
    if len(set(map(_sequence, matches))) != 1:
        return None
    return min(record.model_call_id for record in matches)


def _sequence(record: CallRecord) -> tuple[str, str, int]:
    # The chain hash too: the same tokens may have been sampled by one call, or given to it by others.
    return record.cumulative_hash, record.chain_hash, record.cum_len


def _admission_order(record: CallRecord) -> tuple[bool, float]:
    return record.admitted_at is None, record.admitted_at or 0.0
