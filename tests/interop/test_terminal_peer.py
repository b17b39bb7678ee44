"""The terminal call of a scored response: the published nemo-gym and ours join the same witnesses alike."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nemo_gym.token_id_capture.staging import records as peer_records
from nemo_gym.token_id_capture.terminal import resolve_terminal

from tests.staging.test_terminal import calls_tool, conversation, manifest_of, says, spoken, tool_says
from tests.support.staged import Staged, stage
from tokencustody.staging.terminal import assemble_receipt


def check_alike(calls: list[Staged], declared: str | None, response: dict[str, Any] | None) -> str:
    """Compare the two verdicts, and return the peer's reason.

    Where no witness names a call, the peer leaves the rollout to its builder, and ours follows the parent links.
    """
    rows = [
        peer_records.CallRecord.model_validate(call.record.model_dump(exclude={"capture_key"}))
        for call in calls
    ]
    theirs = resolve_terminal(rows, response, declared_response_id=declared)
    ours = assemble_receipt(manifest_of(*calls), declared_response_id=declared, scored_response=response)
    reason = ours.terminal_attribution_reason or ""
    if theirs.model_call_id is not None:
        assert not ours.capture_poisoned
        assert (ours.terminal_model_call_id, ours.terminal_selection) == (theirs.model_call_id, theirs.method)
        assert reason == theirs.reason
    elif "witness_disagreement" in theirs.reason:
        assert (ours.terminal_model_call_id, ours.failure_reason) == (None, "witness_disagreement")
        assert reason == theirs.reason
    elif declared:
        assert (ours.terminal_model_call_id, ours.failure_reason) == (None, theirs.reason)
        assert reason == theirs.reason
    else:
        assert ours.terminal_selection == "heuristic"
        assert [*theirs.reason.split(","), ours.failure_reason] == [
            *reason.split(","),
            *([None] if ours.failure_reason is None else []),
        ]
    return str(theirs.reason)


@pytest.mark.parametrize("declared", [None, "", "resp-b", "same", "other"])
@pytest.mark.parametrize("response_id", [None, "", "resp-b", "resp-c", "same", "other", 5])
@pytest.mark.parametrize("text", [None, "b", "c", "twice", "nobody"])
def test_declared_id_response_id_and_content_are_joined_alike(
    declared: str | None, response_id: Any, text: str | None
) -> None:
    root = spoken("a", None, [], says("one"))
    calls = [root]
    for number, call in enumerate("bcdefg"):
        said = says("twice" if call in "de" else call)
        row = {"response_id": "same"} if call in "fg" else {}
        calls.append(spoken(call, root, [says("one")], said, sampled=[number], **row))
    response = {"id": response_id, "output": [] if text is None else [says(text)]}
    check_alike(calls, declared, response)


@pytest.mark.parametrize("declared", [None, "resp-b", "other"])
def test_without_a_response_they_judge_alike(declared: str | None) -> None:
    check_alike(conversation(), declared, None)


def test_a_contradiction_is_told_in_the_same_words() -> None:
    calls = [spoken(call, None, [], says(call), sampled=[number]) for number, call in enumerate("abc")]
    response = {"id": "resp-b", "output": [says("c")]}
    reason = check_alike(calls, "resp-a", response)
    assert reason == "witness_disagreement[declared=a;response_id=b;content=c]"


ITEMS = [
    says("x"),
    says("y"),
    calls_tool("1"),
    tool_says("1"),
    {"role": "user", "content": "u"},
    {"type": "reasoning", "summary": []},
]


@st.composite
def rollouts(draw: st.DrawFn) -> list[Staged]:
    """Return up to five calls that say little, in any forest: their tokens, ids and answers often meet."""
    calls: list[Staged] = []
    histories: dict[str, list[dict[str, Any]]] = {}
    for call in "abcde"[: draw(st.integers(1, 5))]:
        parent = draw(st.sampled_from([None, *calls]))
        history = histories[parent.record.model_call_id] if parent else []
        said = draw(st.lists(st.sampled_from(ITEMS[:3]), min_size=1, max_size=2))
        histories[call] = [*history, *said]
        calls.append(
            spoken(
                call,
                parent,
                history,
                *said,
                added=draw(st.sampled_from([[1], [1, 2]])),
                sampled=draw(st.sampled_from([[2], [3], [2, 3]])),
                response_id=draw(st.sampled_from(["r1", "r2", "r3", "r4"])),
                fingerprint_version=draw(st.sampled_from([2, 2, 2, 1, 0])),
            )
        )
    return draw(st.permutations(calls))


def trajectories() -> st.SearchStrategy[list[dict[str, Any]]]:
    """Return outputs that end in what the model wrote.

    Of those that end in an input, as a tool result, ours also compares the turn before it; the peer only the whole.
    """
    return st.lists(st.sampled_from(ITEMS), max_size=5).filter(
        lambda output: not output or output[-1] in ITEMS[:3]
    )


@given(
    rollouts(),
    st.sampled_from([None, None, "r1", "r2", "r5"]),
    st.none()
    | st.fixed_dictionaries(
        {
            "id": st.sampled_from([None, "r1", "r2", "r3", "r5"]),
            "output": trajectories(),
        }
    ),
)
def test_any_rollout_and_response_are_judged_alike(
    calls: list[Staged], declared: str | None, response: dict[str, Any] | None
) -> None:
    check_alike(calls, declared, response)


def test_calls_without_fingerprints_are_judged_alike() -> None:
    check_alike([stage("a"), stage("b", sampled=[4])], None, {"id": "resp-b", "output": [says("x")]})
