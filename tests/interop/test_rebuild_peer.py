"""Receipts, terminals and routes of the published nemo-gym and ours accept, refuse and rebuild the same."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nemo_gym.token_id_capture.adapters.megatron import MegatronCaptureAdapter as PeerMegatronAdapter
from nemo_gym.token_id_capture.adapters.vllm import VLLMCaptureAdapter as PeerVLLMAdapter
from nemo_gym.token_id_capture.staging import rebuild as peer_rebuild
from nemo_gym.token_id_capture.staging import records as peer_records
from nemo_gym.token_id_capture.staging import routes as peer_routes
from nemo_gym.token_id_capture.staging import terminal as peer_terminal

from tests.support.staged import TAMPERINGS, Staged, family, receipt_of, stage, tamper
from tokencustody.staging import rebuild, routes, terminal
from tokencustody.staging.adapters.megatron import MegatronCaptureAdapter
from tokencustody.staging.adapters.vllm import VLLMCaptureAdapter
from tokencustody.staging.records import CallRecord, RolloutReceipt, StagedCallSnapshot

LATER_FIELDS = {"capture_key"}


def to_peer(receipt: RolloutReceipt, snapshots: list[StagedCallSnapshot]) -> tuple[Any, list[Any]]:
    """Return the peer's models of ours, as they are: what we tampered with must reach the peer's verification."""
    rows = [peer_records.CallRecord.model_construct(**dict(row)) for row in receipt.manifest]
    return (
        peer_records.RolloutReceipt.model_construct(**dict(receipt) | {"manifest": rows}),
        [peer_records.StagedCallSnapshot.model_construct(**dict(snapshot)) for snapshot in snapshots],
    )


def outcome(
    verify: Any, receipt: Any, snapshots: list[Any], errors: Any
) -> dict[str, Any] | tuple[str, bool]:
    """Return the row, or the failure's code and whether the rebuild, not a single call, failed."""
    try:
        return asdict(verify(receipt, snapshots))
    except errors.ReceiptVerificationError as error:
        return error.code, isinstance(error, errors.RebuildError)


def both(receipt: RolloutReceipt, snapshots: list[StagedCallSnapshot]) -> tuple[Any, Any]:
    ours = outcome(rebuild.verify_and_linearize, receipt, snapshots, rebuild)
    theirs = outcome(peer_rebuild.verify_and_linearize, *to_peer(receipt, snapshots), peer_rebuild)
    return ours, theirs


@st.composite
def rollouts(draw: st.DrawFn) -> list[Staged]:
    """Return the calls of a rollout: any forest of up to six, in any order."""
    token = st.integers(0, 2**64 - 1)
    calls: list[Staged] = []
    for number in range(draw(st.integers(1, 6))):
        parent = draw(st.sampled_from([None, *calls]))
        calls.append(
            stage(
                str(number),
                parent,
                added=draw(st.lists(token, max_size=3)),
                sampled=draw(st.lists(token, min_size=1, max_size=3)),
                weight_version=draw(st.integers(0, 3)),
                extras=draw(st.none() | st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=2)),
                admitted_at=draw(st.none() | st.sampled_from([1.0, 2.0, 3.0])),
            )
        )
    return draw(st.permutations(calls))


@given(rollouts(), st.data())
def test_each_accepts_the_other_s_receipts_and_rebuilds_the_same_row(
    calls: list[Staged], data: st.DataObject
) -> None:
    end = data.draw(st.sampled_from(calls)).record.model_call_id
    receipt, snapshots = receipt_of(calls, end), [call.snapshot for call in calls]
    peer_receipt = peer_records.RolloutReceipt.model_validate(
        receipt.model_dump(mode="json", exclude={"manifest": {"__all__": LATER_FIELDS}})
    )
    peer_snapshots = [
        peer_records.StagedCallSnapshot.model_validate(snapshot.model_dump()) for snapshot in snapshots
    ]
    row = asdict(rebuild.verify_and_linearize(receipt, snapshots))
    assert asdict(peer_rebuild.verify_and_linearize(peer_receipt, peer_snapshots)) == row
    assert asdict(rebuild.verify_and_linearize(peer_receipt, peer_snapshots)) == row
    read = RolloutReceipt.model_validate(peer_receipt.model_dump(mode="json"))
    assert read == receipt
    linearized = peer_rebuild.linearize("r", peer_snapshots, peer_receipt.manifest, terminal_hint=end)
    assert asdict(rebuild.linearize("r", snapshots, read.manifest, terminal_hint=end)) == asdict(linearized)


@pytest.mark.parametrize(("place", "name", "value", "code"), TAMPERINGS)
def test_both_name_one_changed_field_by_the_same_code(place: str, name: str, value: Any, code: str) -> None:
    calls = family()
    receipt, snapshots = tamper(receipt_of(calls, "c"), [call.snapshot for call in calls], place, name, value)
    ours, theirs = both(receipt, snapshots)
    assert ours == theirs
    assert ours[0] == code


def wrong_parent_graphs() -> list[tuple[list[Staged], str]]:
    root = stage("a")
    twin = stage("a", added=[1, 9])
    right = family()
    return [
        ([right[1]], "b"),
        ([*right, stage("e", stage("nobody"))], "c"),
        ([root, stage("b", root, prev_len=2)], "b"),
        ([root, stage("b", root, prev_len=2)], "a"),
        ([stage("a", stage("a"), prev_len=1)], "a"),
        ([stage("a", stage("b"), prev_len=3), stage("b", stage("a"), prev_len=6)], "a"),
        ([stage("a", chain_hash="1" * 64)], "a"),
        ([root, stage("b", root, chain_hash="1" * 64)], "a"),
        ([root, stage("b", root, chain_hash="1" * 64)], "b"),
        ([root, stage("b", twin)], "b"),
        ([root, stage("b", root, cumulative_hash="1" * 64)], "a"),
        ([root, stage("b", root, cumulative_hash="1" * 64)], "b"),
        *(
            (calls, end)
            for mask in ([0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, 1.0], [1.0, 0.0, 1.0])
            for calls in ([stage("a", mask=mask)], [root, stage("b", root, mask=mask)])
            for end in ("a", calls[-1].record.model_call_id)
        ),
    ]


@pytest.mark.parametrize(("calls", "end"), wrong_parent_graphs())
def test_both_judge_the_parent_graph_alike(calls: list[Staged], end: str) -> None:
    ours, theirs = both(receipt_of(calls, end), [call.snapshot for call in calls])
    assert ours == theirs


@pytest.mark.parametrize("taken", [list(taken) for taken in product(range(4), repeat=4)] + [[0, 1, 2], []])
def test_both_want_the_snapshots_of_all_rows_in_their_order_and_each_once(taken: list[int]) -> None:
    calls = family()
    ours, theirs = both(receipt_of(calls, "c"), [calls[index].snapshot for index in taken])
    assert ours == theirs
    if taken[:3] == [0, 1, 2] and taken[3:] in ([0], [1], [2]):
        assert ours == ("duplicate_snapshot", False)


@pytest.mark.parametrize("ends", [["b", "b"], ["a"], ["b", "d", "b"]])
@pytest.mark.parametrize("terminal", ["c", "nobody"])
@pytest.mark.parametrize("given", [4, 3])
def test_both_refuse_a_manifest_that_names_a_call_or_a_staging_key_twice(
    ends: list[str], terminal: str, given: int
) -> None:
    calls = {call.record.model_call_id: call for call in family()}
    receipt = receipt_of(list(calls.values()), "c").model_copy(update={"terminal_model_call_id": terminal})
    rows = [*receipt.manifest, *(calls[call].record for call in ends)]
    snapshots = [calls[row.model_call_id].snapshot for row in rows]
    ours, theirs = both(receipt.model_copy(update={"manifest": rows}), snapshots)
    assert ours == theirs == ("duplicate_manifest_row", False)
    for index, key in [(1, "r/a"), (3, "r/c"), (0, "r/d")]:
        rows = list(receipt.manifest)
        rows[index] = rows[index].model_copy(update={"staging_key": key})
        snapshots = [calls[row.model_call_id].snapshot for row in rows][:given]
        ours, theirs = both(receipt.model_copy(update={"manifest": rows}), snapshots)
        assert ours == theirs == ("duplicate_staging_key", False)


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("value", [{"model_call_id": "a"}, None, "a", 1])
def test_both_take_nothing_but_snapshots_for_a_snapshot(index: int, value: Any) -> None:
    calls = family()
    receipt, snapshots = receipt_of(calls, "c"), [call.snapshot for call in calls]
    peer_receipt, peer_snapshots = to_peer(receipt, snapshots)
    if isinstance(value, dict):
        value = snapshots[index].model_dump()
    with pytest.raises(TypeError, match="StagedCallBaseSnapshot"):
        rebuild.verify_and_linearize(receipt, [*snapshots[:index], value, *snapshots[index + 1 :]])
    with pytest.raises(TypeError, match="StagedCallBaseSnapshot"):
        peer_rebuild.verify_and_linearize(
            peer_receipt, [*peer_snapshots[:index], value, *peer_snapshots[index + 1 :]]
        )


def test_what_is_found_before_a_mapping_is_told_first_by_both() -> None:
    calls = family()
    receipt, snapshots = receipt_of(calls, "c"), [call.snapshot for call in calls]
    peer_receipt, peer_snapshots = to_peer(receipt, snapshots)
    ours = outcome(rebuild.verify_and_linearize, receipt, [snapshots[1], *snapshots[1:3], {}], rebuild)
    theirs = outcome(
        peer_rebuild.verify_and_linearize,
        peer_receipt,
        [peer_snapshots[1], *peer_snapshots[1:3], {}],
        peer_rebuild,
    )
    assert ours == theirs == ("snapshot_order_mismatch", False)


@pytest.mark.parametrize("receipt", [None, {}, receipt_of(family(), "c").model_dump()])
def test_both_take_nothing_but_a_receipt_for_a_receipt(receipt: Any) -> None:
    for library in (rebuild, peer_rebuild):
        with pytest.raises(TypeError, match="RolloutReceipt"):
            library.verify_and_linearize(receipt, [])


names = st.sampled_from("abcdef")


@given(st.lists(st.tuples(names, st.none() | names, st.sampled_from([None, 1.0, 2.0])), max_size=8))
def test_both_select_the_same_terminal_or_give_the_same_reason(
    rows: list[tuple[str, str | None, Any]],
) -> None:
    def records(model: Any) -> list[Any]:
        fields = ("model_call_id", "parent_call_id", "admitted_at")
        return [model.model_construct(**dict(zip(fields, row, strict=True))) for row in rows]

    ours = terminal.select_terminal_call(records(CallRecord))
    theirs = peer_terminal.select_terminal_call(records(peer_records.CallRecord))
    assert asdict(ours) == asdict(theirs)


@given(rollouts())
def test_both_select_the_same_terminal_of_a_sound_rollout(calls: list[Staged]) -> None:
    records = [call.record for call in calls]
    assert asdict(terminal.select_terminal_call(records)) == asdict(
        peer_terminal.select_terminal_call(records)
    )


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(["int8", "int16", "int32"]),
    st.data(),
)
def test_both_write_and_read_the_same_routes(
    tokens: int, layers: int, topk: int, dtype: str, data: st.DataObject
) -> None:
    value = st.integers(-200, 40_000)
    values = [[[data.draw(value) for _ in range(topk)] for _ in range(layers)] for _ in range(tokens)]

    def encoded(library: Any) -> str | None:
        try:
            return str(library.encode_routed_experts(values, dtype=dtype))
        except ValueError:
            return None

    envelope = encoded(routes)
    assert envelope == encoded(peer_routes)
    if envelope is not None:
        assert asdict(routes.decode_routed_experts(envelope)) == asdict(
            peer_routes.decode_routed_experts(envelope)
        )
    assert asdict(routes.decode_routed_experts(values)) == asdict(peer_routes.decode_routed_experts(values))


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 9))
def test_both_classify_a_route_span_alike(carry: int, generation: int, staged: int) -> None:
    lengths = {"carry_len": carry, "generation_len": generation, "staged_route_len": staged}
    assert routes.classify_route_span(**lengths) == peer_routes.classify_route_span(**lengths)


FIELDS = {"generation_token_ids": [3, 4], "generation_log_probs": [-0.5, -1.0]}
NAMED = [{"token": "token_id:3", "logprob": -0.5}, {"token": "token_id:4", "logprob": -1.0}]


@pytest.mark.parametrize(
    "body",
    [
        {"choices": [{"message": FIELDS | {"prompt_token_ids": [1, 2]}}]},
        {"prompt_token_ids": [1, 2], "choices": [{"message": FIELDS}]},
        {"prompt_token_ids": [1, 2], "choices": [{"message": {}, "logprobs": {"content": NAMED}}]},
        {"prompt_token_ids": [1, 2], "choices": [{"token_ids": [3, 4], "logprobs": {"content": NAMED}}]},
        {"prompt_token_ids": [], "choices": [{"logprobs": {"content": []}}], "media_spans": [{"a": 1}]},
        {"prompt_token_ids": [1], "choices": [{"message": FIELDS | {"routed_experts": [[[1]]]}}]},
    ],
)
def test_both_read_the_same_from_a_vllm_response(body: dict[str, Any]) -> None:
    ours, theirs = VLLMCaptureAdapter(), PeerVLLMAdapter()
    assert ours.extract_prompt_ids(body) == theirs.extract_prompt_ids(body)
    assert ours.extract_generation(body) == theirs.extract_generation(body)
    assert ours.extract_extras(body) == theirs.extract_extras(body)
    assert ours.enter_prefix(body, [1, 2]) == theirs.enter_prefix(body, [1, 2])


def test_both_read_the_same_from_a_megatron_payload() -> None:
    payload = {"prompt_token_ids": (1, 2), "generated_token_ids": [3], "generated_log_probs": [-1]}
    ours, theirs = MegatronCaptureAdapter(), PeerMegatronAdapter()
    assert ours.extract_prompt_ids(payload) == theirs.extract_prompt_ids(payload)
    assert ours.extract_generation(payload) == theirs.extract_generation(payload)
    assert ours.extract_extras(payload) == theirs.extract_extras(payload)
    assert ours.enter_prefix(payload, [1]) == theirs.enter_prefix(payload, [1])
