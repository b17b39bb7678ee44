import pickle
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import vectors
from tests.support.staged import OTHER_HASH, TAMPERINGS, Staged, family, receipt_of, stage, tamper
from tokencustody.staging.digest import compute_extras_digest
from tokencustody.staging.rebuild import (
    ExtrasCommitment,
    LinearizedRow,
    RebuildError,
    ReceiptVerificationError,
    WeightVersionSpan,
    linearize,
    verify_and_linearize,
)
from tokencustody.staging.records import RolloutReceipt, StagedCallBaseSnapshot, StagedCallSnapshot


def verify(calls: list[Staged], terminal: str) -> LinearizedRow:
    return verify_and_linearize(receipt_of(calls, terminal), [call.snapshot for call in calls])


def code_of(calls: list[Staged], terminal: str) -> str:
    with pytest.raises(ReceiptVerificationError) as caught:
        verify(calls, terminal)
    return caught.value.code


@pytest.mark.parametrize(
    "vector", vectors.load("linearize"), ids=lambda v: v["receipt"]["terminal_model_call_id"]
)
def test_the_linearized_row_equals_its_vector(vector: dict[str, Any]) -> None:
    receipt = RolloutReceipt.model_validate(vector["receipt"])
    snapshots = [StagedCallSnapshot.model_validate(snapshot) for snapshot in vector["snapshots"]]
    row = verify_and_linearize(receipt, snapshots)
    recorded = vector["row"] | {"link_spans": [tuple(span) for span in vector["row"]["link_spans"]]}
    assert {name: getattr(row, name) for name in recorded} == recorded
    assert linearize("r", snapshots, receipt.manifest, terminal_hint=receipt.terminal_model_call_id) == row


def test_a_row_is_its_calls_from_the_root_to_the_terminal() -> None:
    assert verify(family(), "c") == LinearizedRow(
        rollout_id="r",
        token_ids=[1, 2, 3, 4, 5, 6, 7, 8],
        token_mask=[0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0],
        logprobs=[0.0, 0.0, -0.75, 0.0, -0.5, -0.75, -0.25, -0.5],
        model_call_ids=["a", "b", "c"],
        prompt_len=2,
        weight_versions=[1, 2, 2],
        weight_version_spans=[
            WeightVersionSpan("a", 0, 3, 1),
            WeightVersionSpan("b", 3, 6, 2),
            WeightVersionSpan("c", 6, 8, 2),
        ],
        link_spans=[("a", 2, 1), ("b", 1, 2), ("c", 0, 2)],
        extras_commitments=[
            ExtrasCommitment("a", 1, compute_extras_digest(None)),
            ExtrasCommitment("b", 1, compute_extras_digest(None)),
            ExtrasCommitment("c", 1, compute_extras_digest({"routes": [[1, 2]]})),
        ],
    )


def test_a_terminal_before_the_end_leaves_out_the_calls_after_it_and_beside_it() -> None:
    assert verify(family(), "a").token_ids == [1, 2, 3]
    assert verify(family(), "d").token_ids == [1, 2, 3, 4, 9]


def test_rows_may_come_in_any_order_that_their_snapshots_share() -> None:
    assert verify(family()[::-1], "c") == verify(family(), "c")


token = st.integers(0, 2**64 - 1)
turn = st.tuples(st.lists(token, max_size=4), st.lists(token, min_size=1, max_size=4), st.integers(0, 5))


@given(st.lists(turn, min_size=1, max_size=6), st.data())
def test_what_was_staged_is_what_is_trained_on(
    turns: list[tuple[list[int], list[int], int]], data: st.DataObject
) -> None:
    calls: list[Staged] = []
    for number, (added, sampled, weight_version) in enumerate(turns):
        parent = calls[-1] if calls else None
        calls.append(stage(str(number), parent, added=added, sampled=sampled, weight_version=weight_version))
    order = data.draw(st.permutations(calls))
    row = verify(list(order), calls[-1].record.model_call_id)
    assert row.token_ids == [token for added, sampled, _ in turns for token in [*added, *sampled]]
    assert row.token_mask == [
        mask for added, sampled, _ in turns for mask in [0.0] * len(added) + [1.0] * len(sampled)
    ]
    ends = list(accumulate(len(added) + len(sampled) for added, sampled, _ in turns))
    assert [(span.start, span.end) for span in row.weight_version_spans] == list(
        zip([0, *ends], ends, strict=False)
    )
    assert row.weight_versions == [weight_version for _, _, weight_version in turns]
    assert row.prompt_len == len(turns[0][0])


@pytest.mark.parametrize(("place", "name", "value", "code"), TAMPERINGS)
def test_one_changed_field_is_found_and_named_by_code_and_call(
    place: str, name: str, value: Any, code: str
) -> None:
    calls = family()
    receipt, snapshots = tamper(receipt_of(calls, "c"), [call.snapshot for call in calls], place, name, value)
    with pytest.raises(ReceiptVerificationError) as caught:
        verify_and_linearize(receipt, snapshots)
    assert caught.value.code == code
    assert str(caught.value) == f"{code}: {caught.value.detail}"
    if place != "receipt":
        named = snapshots[1].model_call_id
        assert named in caught.value.detail.replace(":", "").split()


def test_a_poisoned_receipt_says_why() -> None:
    receipt = receipt_of(family(), "c").model_copy(
        update={"capture_poisoned": True, "failure_reason": "unresolved_parent"}
    )
    with pytest.raises(ReceiptVerificationError, match="rollout_failed: unresolved_parent"):
        verify_and_linearize(receipt, [])


def test_snapshots_in_another_order_than_the_rows_are_refused() -> None:
    calls = family()
    with pytest.raises(
        ReceiptVerificationError, match=r"snapshot_order_mismatch: .* r/a must be of call a, not d"
    ):
        verify_and_linearize(receipt_of(calls, "c"), [call.snapshot for call in calls[::-1]])


@pytest.mark.parametrize("calls", [family()[:3], [*family(), family()[0]]], ids=["fewer", "more"])
def test_another_number_of_snapshots_than_rows_is_refused(calls: list[Staged]) -> None:
    with pytest.raises(ReceiptVerificationError, match="row_count_mismatch"):
        verify_and_linearize(receipt_of(family(), "a"), [call.snapshot for call in calls])


def test_a_manifest_that_names_a_call_twice_is_refused() -> None:
    calls = family()
    receipt = receipt_of(calls, "c")
    rows = [*receipt.manifest, receipt.manifest[0]]
    with pytest.raises(ReceiptVerificationError, match="duplicate_manifest_row"):
        verify_and_linearize(receipt.model_copy(update={"manifest": rows}), [call.snapshot for call in calls])


def test_a_staging_key_of_two_rows_is_refused() -> None:
    calls = family()
    calls[1] = stage("b", calls[0], added=[4], sampled=[5, 6], weight_version=2, staging_key="r/a")
    assert code_of(calls, "c") == "duplicate_staging_key"


def test_a_snapshot_that_is_there_twice_is_named() -> None:
    calls = family()
    snapshots = [calls[index].snapshot for index in (0, 1, 1, 3)]
    with pytest.raises(ReceiptVerificationError, match="duplicate_snapshot: the snapshot of call b"):
        verify_and_linearize(receipt_of(calls, "c"), snapshots)


def test_plain_data_is_no_snapshot_no_row_and_no_receipt() -> None:
    calls = family()
    receipt, snapshots = receipt_of(calls, "c"), [call.snapshot for call in calls]
    plain: list[Any] = [snapshot.model_dump() for snapshot in snapshots]
    with pytest.raises(TypeError, match="a StagedCallBaseSnapshot is needed, not dict"):
        verify_and_linearize(receipt, plain)
    with pytest.raises(TypeError, match="a StagedCallBaseSnapshot is needed, not dict"):
        linearize("r", plain, receipt.manifest, terminal_hint="c")
    rows: list[Any] = [row.model_dump() for row in receipt.manifest]
    with pytest.raises(TypeError, match="a CallRecord is needed, not dict"):
        linearize("r", snapshots, rows, terminal_hint="c")
    dumped: Any = receipt.model_dump()
    with pytest.raises(TypeError, match="a RolloutReceipt is needed, not dict"):
        verify_and_linearize(dumped, snapshots)


def test_a_parent_outside_the_manifest_is_refused_even_beside_the_chain() -> None:
    root, middle, last, sibling = family()
    assert code_of([middle], "b") == "missing_parent"
    stranger = stage("e", stage("nobody"), sampled=[5])
    assert code_of([root, middle, last, sibling, stranger], "c") == "missing_parent"


@pytest.mark.parametrize("terminal", ["a", "b"])
def test_a_child_that_does_not_start_where_its_parent_ends_is_refused(terminal: str) -> None:
    root = stage("a")
    assert code_of([root, stage("b", root, prev_len=2)], terminal) == "parent_length_mismatch"


def test_calls_that_are_one_another_s_parent_are_refused() -> None:
    self_parent = stage("a", stage("a"), prev_len=1)
    assert code_of([self_parent], "a") == "parent_length_mismatch"
    circle = [stage("a", stage("b"), prev_len=3), stage("b", stage("a"), prev_len=6)]
    assert code_of(circle, "a") == "parent_length_mismatch"


def test_a_chain_hash_that_does_not_extend_the_parent_s_is_refused() -> None:
    root = stage("a")
    assert code_of([stage("a", chain_hash=OTHER_HASH)], "a") == "chain_hash_mismatch"
    assert code_of([root, stage("b", root, chain_hash=OTHER_HASH)], "b") == "chain_hash_mismatch"
    twin = stage("a", added=[1, 9])
    assert code_of([root, stage("b", twin)], "b") == "chain_hash_mismatch"


def test_a_cumulative_hash_that_does_not_cover_the_row_is_refused() -> None:
    root = stage("a")
    last = stage("b", root, cumulative_hash=OTHER_HASH)
    assert code_of([root, last], "b") == "cumulative_hash_mismatch"


@pytest.mark.parametrize(
    ("mask", "code"),
    [
        ([0.0, 0.0, 0.0], "empty_generation"),
        ([1.0, 0.0, 0.0], "invalid_mask_order"),
        ([0.0, 1.0, 0.0], "invalid_mask_order"),
    ],
)
def test_a_mask_that_is_not_prompt_then_sampled_tokens_is_refused(mask: list[float], code: str) -> None:
    root = stage("a")
    assert code_of([stage("a", mask=mask)], "a") == code
    assert code_of([root, stage("b", root, mask=mask)], "b") == code


def test_a_terminal_is_never_guessed() -> None:
    calls = family()[:1]
    with pytest.raises(RebuildError, match="missing_terminal: no terminal call is given"):
        linearize("r", [call.snapshot for call in calls], [call.record for call in calls])
    with pytest.raises(RebuildError, match="missing_terminal: terminal call z is not in the manifest"):
        linearize("r", [call.snapshot for call in calls], [call.record for call in calls], terminal_hint="z")


def test_extras_that_are_loaded_must_be_those_that_were_staged() -> None:
    calls = family()
    receipt, snapshots = receipt_of(calls, "c"), [call.snapshot for call in calls]
    for extras, code in (({"routes": [[2, 1]]}, "corrupt_extras"), ({"routes": (1,)}, "invalid_snapshot")):
        changed = [*snapshots[:2], snapshots[2].model_copy(update={"extras": extras}), snapshots[3]]
        with pytest.raises(ReceiptVerificationError, match=f"{code}: call c"):
            verify_and_linearize(receipt, changed)


def test_snapshots_without_extras_give_the_same_row() -> None:
    calls = family()
    bare = [
        StagedCallBaseSnapshot.model_validate(call.snapshot.model_dump(exclude={"extras"})) for call in calls
    ]
    assert verify_and_linearize(receipt_of(calls, "c"), bare) == verify(calls, "c")


def test_a_row_from_a_checkpoint_is_verified_against_the_rollout_that_staged_it() -> None:
    staged = stage("a", rollout="before", capture_key="before")
    child = stage("b", staged)
    assert verify([staged, child], "b").rollout_id == "r"
    assert code_of([stage("a", rollout="before")], "a") == "wrong_rollout"
    assert code_of([stage("a", capture_key="before")], "a") == "wrong_rollout"


def test_a_verification_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(RebuildError("missing_parent", "call b")))  # noqa: S301
    assert (type(error), error.code, error.detail) == (RebuildError, "missing_parent", "call b")
