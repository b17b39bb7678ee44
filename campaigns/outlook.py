"""What a rollout can no longer answer: the search gives up early what cannot lead to the answers that are to come.

Until somebody deletes it, a rollout only goes from open to frozen to retired, its version grows, and what it holds
stays until it is retired, after which it shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from campaigns.model import (
    CONFLICT_ERROR,
    FROZEN,
    FROZEN_ERROR,
    OPEN,
    RETIRED,
    Answer,
    Arguments,
    RolloutState,
)


def can_still_answer(state: RolloutState, name: str, arguments: Arguments, answer: Answer) -> bool:
    """Return False when the rollout cannot give this answer any more, now or later, unless it is deleted first."""
    if answer.error == FROZEN_ERROR:
        return state.fence != RETIRED
    outlook = _OUTLOOKS.get(name)
    return outlook is None or outlook(state, arguments, answer)


def _put(state: RolloutState, arguments: Arguments, answer: Answer) -> bool:
    if answer.error not in (None, CONFLICT_ERROR):
        return True
    if state.fence != OPEN:
        return False
    held = state.calls.get(arguments["call"])
    return held is None or (held.payload == arguments["payload"]) == (answer.error is None)


def _begin(state: RolloutState, _: Arguments, answer: Answer) -> bool:
    return answer.error is not None or state.fence == OPEN


def _refuse(state: RolloutState, arguments: Arguments, answer: Answer) -> bool:
    if answer.error not in (None, CONFLICT_ERROR):
        return True
    if state.fence != OPEN:
        return False
    held = state.intents.get(arguments["call"])
    return held is None or (held == arguments["code"]) == (answer.error is None)


def _mark(state: RolloutState, _: Arguments, answer: Answer) -> bool:
    return answer.error is not None or state.fence != RETIRED


def _freeze(state: RolloutState, _: Arguments, answer: Answer) -> bool:
    if answer.error is not None:
        return True
    shown: dict[str, Any] = answer.value
    if state.fence == RETIRED or state.version + (state.fence == OPEN) > shown["version"]:
        return False
    if state.is_marked and not shown["incomplete"]:
        return False
    refusals = state.refusals
    calls = {call: held.payload for call, held in state.calls.items()}
    if state.fence == FROZEN:
        is_that = state.snapshot_id in (None, shown["snapshot_id"])
        return bool(is_that and calls == shown["calls"] and refusals == shown["refusals"])
    return bool(calls.items() <= shown["calls"].items()) and bool(
        refusals.items() <= shown["refusals"].items()
    )


def _drop(state: RolloutState, arguments: Arguments, answer: Answer) -> bool:
    if answer.value is not True:
        return True
    if state.fence == RETIRED:
        return bool(state.version - 1 == arguments["version"])
    return bool(state.version + (state.fence == OPEN) <= arguments["version"])


def _manifest(state: RolloutState, _: Arguments, answer: Answer) -> bool:
    if answer.error is not None:
        return True
    if state.fence == RETIRED:
        return False
    records, failures = answer.value["records"], answer.value["failures"]
    held_records = [[call, held.payload] for call, held in state.records]
    held_failures = [[call, reason] for call, reason in state.failures]
    return bool(
        held_records == records[: len(held_records)] and held_failures == failures[: len(held_failures)]
    )


_OUTLOOKS: dict[str, Callable[[RolloutState, Arguments, Answer], bool]] = {
    "put": _put,
    "begin": _begin,
    "refuse": _refuse,
    "mark": _mark,
    "freeze": _freeze,
    "drop": _drop,
    "manifest": _manifest,
}
