from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import vectors
from tests.support.staged import Staged, family, stage
from tokencustody.fingerprint import assistant_fingerprint
from tokencustody.staging.records import CallRecord, RolloutManifest, RolloutReceipt
from tokencustody.staging.terminal import TerminalSelection, assemble_receipt, select_terminal_call


def says(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def calls_tool(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}


def tool_says(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "1"}


def manifest_of(*calls: Staged, failures: dict[str, str] | None = None) -> RolloutManifest:
    return RolloutManifest.model_validate(
        {
            "rollout_id": "r",
            "records": [call.record.model_dump() for call in calls],
            "failures": [{"model_call_id": call, "reason": why} for call, why in (failures or {}).items()],
        }
    )


def spoken(
    call: str, parent: Staged | None, history: list[dict[str, Any]], *output: Any, **row: Any
) -> Staged:
    """Return a call whose row has the fingerprints of its output and of the conversation that it continues."""
    return stage(
        call,
        parent,
        output_fingerprint=assistant_fingerprint(output),
        continuation_fingerprint=assistant_fingerprint([*history, *output]),
        **row,
    )


def conversation() -> list[Staged]:
    """Return three turns in a line: a tool call, an interim answer, and the final answer, which repeats it."""
    first = spoken("a", None, [], calls_tool("1"))
    second = spoken("b", first, [calls_tool("1")], says("done"))
    third = spoken("c", second, [calls_tool("1"), says("done")], says("done"))
    return [first, second, third]


def outcome(receipt: RolloutReceipt) -> tuple[str | None, str | None]:
    """Return the terminal and the method of a trainable receipt, or None and why it is poisoned."""
    if receipt.capture_poisoned:
        return None, receipt.failure_reason
    return receipt.terminal_model_call_id, receipt.terminal_selection


@pytest.mark.parametrize("vector", vectors.load("terminal_selection"), ids=lambda v: v["name"])
def test_the_terminal_call_equals_its_vector(vector: dict[str, Any]) -> None:
    records = [CallRecord.model_validate(record) for record in vector["records"]]
    assert select_terminal_call(records) == TerminalSelection(vector["terminal"], vector["reason"])


@given(st.lists(st.integers(0, 6), max_size=6), st.randoms(use_true_random=False))
def test_the_order_of_a_manifest_with_one_root_does_not_change_its_terminal(
    parents: list[int], rng: Any
) -> None:
    calls = [stage("0")]
    for number, parent in enumerate(parents, start=1):
        calls.append(stage(str(number), calls[parent % number], sampled=[number]))
    records = [call.record for call in calls]
    selected = select_terminal_call(records)
    rng.shuffle(records)
    assert select_terminal_call(records) == selected
    leaves = {record.model_call_id for record in records} - {record.parent_call_id for record in records}
    assert selected.terminal_model_call_id in (leaves | {None})
    if len(leaves) == 1:
        assert selected == TerminalSelection(leaves.pop(), "selected")


def test_a_very_long_rollout_has_its_last_call_as_terminal() -> None:
    records = [stage("0").record]
    for number in range(1, 20_000):
        parent = records[-1]
        step = {"model_call_id": str(number), "parent_call_id": parent.model_call_id}
        records.append(parent.model_copy(update=step))
    assert select_terminal_call(records).terminal_model_call_id == "19999"


def test_witnesses_that_name_the_same_call_corroborate_the_strongest() -> None:
    response = {"id": "resp-a", "output": [calls_tool("1")]}
    receipt = assemble_receipt(
        manifest_of(*conversation()), declared_response_id="resp-a", scored_response=response, reward=0.5
    )
    assert outcome(receipt) == ("a", "declared")
    assert (receipt.reward, receipt.terminal_attribution_reason) == (
        0.5,
        "corroborated_by=response_id+content",
    )


@pytest.mark.parametrize(
    ("declared", "response_id", "text", "said"),
    [
        ("resp-b", "resp-c", None, "declared=b;response_id=c"),
        ("resp-b", None, "c", "declared=b;content=c"),
        ("resp-b", "resp-b", "c", "declared=b;response_id=b;content=c"),
        ("resp-b", "resp-c", "c", "declared=b;response_id=c;content=c"),
        ("resp-b", "resp-c", "a", "declared=b;response_id=c;content=a"),
        (None, "resp-b", "c", "response_id=b;content=c"),
    ],
)
def test_a_weaker_witness_vetoes_a_stronger_one_that_it_contradicts(
    declared: str | None, response_id: str | None, text: str | None, said: str
) -> None:
    calls = [spoken(call, None, [], says(call), sampled=[number]) for number, call in enumerate("abc")]
    response = {"id": response_id, "output": [says(text)] if text else []}
    receipt = assemble_receipt(
        manifest_of(*calls), declared_response_id=declared, scored_response=response, reward=1.0
    )
    assert outcome(receipt) == (None, "witness_disagreement")
    assert (receipt.terminal_model_call_id, receipt.terminal_selection) == (
        None,
        "declared" if declared else "response_id",
    )
    assert receipt.terminal_attribution_reason is not None
    assert receipt.terminal_attribution_reason.endswith(f"witness_disagreement[{said}]")


def test_witnesses_that_name_calls_with_the_same_tokens_agree() -> None:
    root = spoken("a", None, [], says("one"))
    retries = [spoken(call, root, [says("one")], says("two")) for call in ("c", "b")]
    response = {"id": "resp-b", "output": [says("two")]}
    receipt = assemble_receipt(
        manifest_of(root, *retries), declared_response_id="resp-c", scored_response=response
    )
    assert outcome(receipt) == ("c", "declared")


def test_the_same_tokens_in_other_calls_are_no_agreement() -> None:
    root = spoken("a", None, [], says("x"), added=[1], sampled=[2])
    child = spoken("b", root, [says("x")], says("y"), added=[3], sampled=[4])
    other = spoken("c", None, [], says("z"), added=[1, 2, 3], sampled=[4])
    assert child.record.cumulative_hash == other.record.cumulative_hash
    response = {"id": "resp-b", "output": [says("z")]}
    receipt = assemble_receipt(manifest_of(root, child, other), scored_response=response)
    assert outcome(receipt) == (None, "witness_disagreement")


def test_a_declared_id_of_no_captured_call_masks_and_never_falls_through() -> None:
    receipt = assemble_receipt(
        manifest_of(*conversation()), declared_response_id="other", scored_response={"id": "resp-c"}
    )
    assert outcome(receipt) == (None, "declared_terminal_not_captured")
    assert (receipt.terminal_model_call_id, receipt.terminal_selection) == (None, "declared")


def test_a_declared_id_of_two_different_calls_masks() -> None:
    root, second = stage("a"), stage("b", sampled=[4], response_id="resp-a")
    receipt = assemble_receipt(manifest_of(root, second), declared_response_id="resp-a")
    assert outcome(receipt) == (None, "declared_ambiguous")


def test_an_empty_declared_id_declares_nothing() -> None:
    receipt = assemble_receipt(manifest_of(*conversation()), declared_response_id="")
    assert outcome(receipt) == ("c", "heuristic")


def test_content_that_fits_several_calls_contradicts_nobody() -> None:
    response = {"id": "resp-a", "output": [says("done")]}
    receipt = assemble_receipt(manifest_of(*conversation()), scored_response=response)
    assert outcome(receipt) == ("a", "response_id")
    assert receipt.terminal_attribution_reason == "content_ambiguous"


def test_an_unknown_response_id_leaves_the_decision_to_the_content() -> None:
    root = spoken("a", None, [], says("one"))
    branches = [spoken(call, root, [says("one")], says(call), sampled=[n]) for n, call in enumerate("bc")]
    response = {"id": "rewritten", "output": [says("b")]}
    receipt = assemble_receipt(manifest_of(root, *branches), scored_response=response)
    assert outcome(receipt) == ("b", "content")
    assert receipt.terminal_attribution_reason == "response_id_no_match"


@pytest.mark.parametrize(
    "response",
    [
        {"output": [says("b")]},
        {"choices": [{"message": {"role": "assistant", "content": "b"}}]},
        {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "b"}]},
        {"output": [{"type": "reasoning", "summary": []}, says("b")]},
        {"output": [says("b"), {"role": "user", "content": "stop"}]},
    ],
)
def test_content_is_compared_in_every_dialect(response: dict[str, Any]) -> None:
    branches = [spoken(call, None, [], says(call), sampled=[number]) for number, call in enumerate("abc")]
    receipt = assemble_receipt(manifest_of(*branches), scored_response=response)
    assert outcome(receipt) == ("b", "content")


def test_a_whole_trajectory_names_the_call_that_ends_it() -> None:
    calls = [spoken("a", None, [], calls_tool("1"))]
    calls.append(spoken("b", calls[0], [calls_tool("1")], says("first")))
    calls.append(spoken("c", calls[1], [calls_tool("1"), says("first")], says("second")))
    response = {"output": [calls_tool("1"), tool_says("1"), says("first")]}
    receipt = assemble_receipt(manifest_of(*calls), scored_response=response)
    assert outcome(receipt) == ("b", "content")
    response["output"].extend([{"role": "user", "content": "and?"}, says("second")])
    receipt = assemble_receipt(manifest_of(*calls), scored_response=response)
    assert outcome(receipt) == ("c", "content")


def test_a_trajectory_whose_last_turn_is_that_of_another_call_too_is_never_given_to_the_other() -> None:
    response = {"output": [calls_tool("1"), tool_says("1"), says("done")]}
    receipt = assemble_receipt(manifest_of(*conversation()), scored_response=response)
    assert outcome(receipt) == (None, "ambiguous_terminal")
    response["output"].extend([{"role": "user", "content": "and?"}, says("done")])
    receipt = assemble_receipt(manifest_of(*conversation()), scored_response=response)
    assert outcome(receipt) == ("c", "heuristic")


def test_a_trajectory_that_ends_in_a_tool_result_names_the_call_before_it() -> None:
    response = {"output": [calls_tool("1"), tool_says("1")]}
    receipt = assemble_receipt(manifest_of(*conversation()), scored_response=response)
    assert outcome(receipt) == ("a", "content")


@pytest.mark.parametrize(
    ("output", "terminal"),
    [
        ([says("edited"), {"role": "user", "content": "and?"}, says("b")], "b"),
        ([says("edited"), {"role": "tool", "tool_call_id": "1", "content": "1"}, says("b")], "b"),
        ([says("edited"), tool_says("1"), says("b"), {"role": "user", "content": "stop"}], "b"),
        ([says("edited"), tool_says("1"), {"type": "reasoning", "summary": []}, calls_tool("1")], "c"),
        ([says("edited"), tool_says("1"), calls_tool("1"), tool_says("1")], "c"),
    ],
)
def test_a_trajectory_whose_earlier_turns_were_edited_is_known_by_its_last_turn(
    output: list[dict[str, Any]], terminal: str
) -> None:
    written = {"a": says("a"), "b": says("b"), "c": calls_tool("1")}
    calls = [spoken(call, None, [], item, sampled=[n]) for n, (call, item) in enumerate(written.items())]
    receipt = assemble_receipt(manifest_of(*calls), scored_response={"output": output})
    assert outcome(receipt) == (terminal, "content")


def test_a_response_id_of_two_calls_leaves_them_to_the_content() -> None:
    calls = [
        spoken(call, None, [], says(call), sampled=[n], response_id="same") for n, call in enumerate("abc")
    ]
    response = {"id": "same", "output": [says("b")]}
    receipt = assemble_receipt(manifest_of(*calls), scored_response=response)
    assert outcome(receipt) == ("b", "content")
    assert receipt.terminal_attribution_reason == "response_id_ambiguous"


def test_content_of_two_calls_is_decided_by_the_walk_among_them() -> None:
    receipt = assemble_receipt(manifest_of(*conversation()), scored_response={"output": [says("done")]})
    assert outcome(receipt) == ("c", "heuristic")
    assert receipt.terminal_attribution_reason == "response_has_no_id,content_ambiguous"


def test_one_turn_is_not_taken_for_a_whole_trajectory() -> None:
    root = spoken("a", None, [], says("done"))
    last = spoken("b", root, [says("done")], says("done"))
    receipt = assemble_receipt(manifest_of(root, last), scored_response={"output": [says("done")]})
    assert outcome(receipt) == ("b", "heuristic")


def test_the_walk_never_replaces_calls_that_the_content_names() -> None:
    calls = conversation()
    history = [calls_tool("1"), says("done"), says("done")]
    calls.append(spoken("d", calls[-1], history, says("summary")))
    receipt = assemble_receipt(manifest_of(*calls), scored_response={"output": [says("done")]})
    assert outcome(receipt) == (None, "ambiguous_terminal")
    assert receipt.terminal_selection == "heuristic"


def test_calls_with_the_same_tokens_stand_for_one_another() -> None:
    root = spoken("a", None, [], says("one"))
    retries = [spoken(call, root, [says("one")], says("two")) for call in ("c", "b")]
    receipt = assemble_receipt(manifest_of(root, *retries), scored_response={"output": [says("two")]})
    assert outcome(receipt) == ("b", "content")


def test_fingerprints_of_another_version_are_not_compared() -> None:
    only = spoken("a", None, [], says("one"), fingerprint_version=1)
    other = stage("b", sampled=[9], admitted_at=1.0)
    receipt = assemble_receipt(manifest_of(only, other), scored_response={"output": [says("one")]})
    assert outcome(receipt) == ("b", "heuristic")
    assert receipt.terminal_attribution_reason == "response_has_no_id,no_content_match"


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ({}, "response_has_no_output"),
        ({"output": []}, "response_has_no_output"),
        ({"output": [{"role": "user", "content": "x"}]}, "no_model_authored_output"),
    ],
)
def test_a_response_without_output_leaves_the_decision_to_the_walk(
    response: dict[str, Any], reason: str
) -> None:
    receipt = assemble_receipt(manifest_of(*conversation()), scored_response=response)
    assert outcome(receipt) == ("c", "heuristic")
    assert receipt.terminal_attribution_reason == f"response_has_no_id,{reason}"


@pytest.mark.parametrize("content", [5, [5], [{"neither": 1}]])
def test_a_response_that_cannot_be_read_leaves_the_decision_to_the_walk(content: Any) -> None:
    response = {"output": [{"role": "assistant", "content": content}]}
    receipt = assemble_receipt(manifest_of(*conversation()), scored_response=response)
    assert outcome(receipt) == ("c", "heuristic")
    assert receipt.terminal_attribution_reason == "response_has_no_id,response_output_unfingerprintable"


def test_without_a_witness_the_parent_links_decide() -> None:
    receipt = assemble_receipt(manifest_of(*conversation()))
    assert outcome(receipt) == ("c", "heuristic")
    assert receipt.terminal_attribution_reason == "no_response_object"


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([], "no_records"),
        (family()[1:], "orphaned_row"),
        ([*family()[:2], stage("e", family()[0], sampled=[8])], "ambiguous_terminal"),
    ],
)
def test_a_manifest_that_ends_in_no_one_call_is_poisoned_with_the_reason(
    calls: list[Staged], reason: str
) -> None:
    receipt = assemble_receipt(manifest_of(*calls), reward=1.0)
    assert outcome(receipt) == (None, reason)
    assert (receipt.terminal_selection, receipt.reward) == ("heuristic", 1.0)
    assert receipt.terminal_attribution_reason == f"no_response_object,{reason}"


def test_a_failure_poisons_with_its_own_reason_and_keeps_the_attribution() -> None:
    failures = {"x": "worker_capture_failed", "y": "unresolved_parent"}
    receipt = assemble_receipt(manifest_of(*conversation(), failures=failures), declared_response_id="resp-b")
    assert outcome(receipt) == (None, "worker_capture_failed")
    assert (receipt.terminal_model_call_id, receipt.terminal_selection) == ("b", "declared")


def test_a_failure_comes_before_an_attribution_that_found_no_call() -> None:
    receipt = assemble_receipt(
        manifest_of(failures={"x": "unresolved_parent"}), declared_response_id="resp-b"
    )
    assert outcome(receipt) == (None, "unresolved_parent")
    assert receipt.terminal_attribution_reason == "declared_terminal_not_captured"


def test_a_manifest_that_names_a_call_twice_is_poisoned() -> None:
    first, second = stage("a"), stage("a", sampled=[9])
    receipt = assemble_receipt(manifest_of(first, second), declared_response_id="resp-a")
    assert outcome(receipt) == (None, "duplicate_call_id")
    assert receipt.manifest == [first.record]
    failed = manifest_of(first, second, failures={"x": "unresolved_parent"})
    assert outcome(assemble_receipt(failed)) == (None, "unresolved_parent")
    assert (receipt.terminal_model_call_id, receipt.terminal_selection) == (None, None)


def test_plain_wire_data_of_a_manifest_gives_the_same_receipt() -> None:
    manifest = manifest_of(*conversation())
    assert assemble_receipt(manifest.model_dump(mode="json")) == assemble_receipt(manifest)


def test_a_scored_response_that_is_no_mapping_is_a_type_error() -> None:
    response: Any = says("done")["content"]
    with pytest.raises(TypeError, match="scored_response must be a mapping, not list"):
        assemble_receipt(manifest_of(*conversation()), scored_response=response)


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="reward"):
        assemble_receipt(manifest_of(*conversation()), reward=float("nan"))


@given(
    st.lists(st.sampled_from(["a", "b", "c", "zz"]), max_size=2),
    st.sampled_from([None, "resp-a", "resp-b", "other", ""]),
    st.none()
    | st.fixed_dictionaries(
        {
            "id": st.sampled_from([None, "resp-c", "other", 5]),
            "output": st.lists(
                st.sampled_from(
                    [
                        says("done"),
                        says("x"),
                        calls_tool("1"),
                        tool_says("1"),
                        {"role": "user", "content": "u"},
                    ]
                ),
                max_size=4,
            ),
        }
    ),
)
def test_every_receipt_is_trainable_with_a_terminal_or_poisoned_with_a_reason(
    failed: list[str], declared: str | None, response: dict[str, Any] | None
) -> None:
    manifest = manifest_of(*conversation(), failures=dict.fromkeys(failed, "worker_capture_failed"))
    receipt = assemble_receipt(manifest, declared_response_id=declared, scored_response=response)
    assert receipt.capture_poisoned == (receipt.failure_reason is not None)
    assert receipt.capture_poisoned or receipt.terminal_model_call_id in {"a", "b", "c"}
    assert not failed or receipt.failure_reason == "worker_capture_failed"
    if declared == "other":
        assert receipt.terminal_model_call_id is None
    assert RolloutReceipt.model_validate_json(receipt.model_dump_json()) == receipt
