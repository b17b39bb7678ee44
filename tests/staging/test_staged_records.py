"""The wire models of worker staging: what each accepts, and one refusal for every rule."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from tests.support import vectors
from tokencustody.staging import (
    EMPTY_EXTRAS_DIGEST,
    CallRecord,
    CaptureAdmission,
    CommitCoords,
    GenerationCutContinuation,
    RolloutReceipt,
    RolloutRemoval,
    StagedCallBaseSnapshot,
    StagedCallRecord,
    StagedCallSnapshot,
    StageResult,
    compute_chain_hash,
    compute_extras_digest,
    compute_staging_digest,
    hash_token_ids,
    records,
    staging_key,
)
from tokencustody.staging import reasons as words

STAGED = vectors.load("staged_call")
REJECTS = vectors.load("staged_call_rejects")
MODELS = vectors.load("wire_models")
# Fields that the references have on top of the release that the vectors came from.
LATER_FIELDS = {"capture_key", "generation_cut"}
HASH = "0f" * 32


def components(**change: Any) -> dict[str, Any]:
    """Return what `from_components` takes for a root call, with `change`."""
    return {
        "rollout_id": "rollout",
        "model_call_id": "call",
        "parent_call_id": None,
        "mode": "text",
        "prev_len": 0,
        "delta_len": 2,
        "cum_len": 2,
        "weight_version": 3,
        "token_ids_delta": [8, 9],
        "token_mask_delta": [0.0, 1.0],
        "generation_log_probs_delta": [0.0, -0.5],
        "extras": None,
        "extras_digest": EMPTY_EXTRAS_DIGEST,
        "chain_hash": compute_chain_hash(None, [8, 9]),
        "cumulative_hash": hash_token_ids([8, 9]),
        **change,
    }


def without_later_fields(model: BaseModel) -> Any:
    def strip(value: Any) -> Any:
        match value:
            case dict():
                return {
                    name: strip(item)
                    for name, item in value.items()
                    if name not in LATER_FIELDS or item is not None
                }
            case list():
                return [strip(item) for item in value]
        return value

    return strip(model.model_dump(mode="json"))


@pytest.mark.parametrize("vector", MODELS, ids=lambda v: f"{v['model']}-{v['name']}")
def test_a_wire_model_equals_its_vector(vector: dict[str, Any]) -> None:
    model = getattr(records, vector["model"])
    vectors.check(vector["result"], lambda: without_later_fields(model(**vector["payload"])))


@pytest.mark.parametrize("model", [StagedCallRecord, StagedCallSnapshot])
@pytest.mark.parametrize("vector", STAGED, ids=lambda v: v["staging_key"])
def test_a_staged_call_round_trips_and_equals_its_vector(
    vector: dict[str, Any], model: type[StagedCallRecord]
) -> None:
    call = model(**vector["record"])
    assert call.model_dump(mode="json") == vector["record"]
    assert call.staging_key == vector["staging_key"]
    assert model.model_validate_json(call.model_dump_json()) == call


@pytest.mark.parametrize("vector", STAGED, ids=lambda v: v["staging_key"])
def test_from_components_computes_the_digest_of_its_vector(vector: dict[str, Any]) -> None:
    versions = ("schema_version", "digest_version", "extras_digest_version")
    parts = {name: value for name, value in vector["fields"].items() if name not in versions}
    assert StagedCallRecord.from_components(**parts, extras=vector["extras"]) == StagedCallRecord(
        **vector["record"]
    )


@pytest.mark.parametrize("vector", STAGED, ids=lambda v: v["staging_key"])
def test_a_base_snapshot_is_verified_without_its_extras(vector: dict[str, Any]) -> None:
    payload = {name: value for name, value in vector["record"].items() if name != "extras"}
    assert StagedCallBaseSnapshot(**payload).digest == vector["digest"]
    with pytest.raises(ValidationError, match="digest does not match the contents"):
        StagedCallBaseSnapshot(**(payload | {"weight_version": payload["weight_version"] + 1}))


@pytest.mark.parametrize("vector", [v for v in REJECTS if "change" in v], ids=lambda v: v["name"])
def test_a_staged_call_is_refused_as_its_vector_says(vector: dict[str, Any]) -> None:
    (base,) = [v["base"] for v in REJECTS if "base" in v]
    vectors.check(vector["result"], lambda: compute_staging_digest(**(base | vector["change"])))
    payload = base | vector["change"] | {"extras": {}}
    vectors.check(vector["result"], lambda: StagedCallRecord(**payload, digest="0" * 64))
    unversioned = {name: value for name, value in payload.items() if name in components()}
    if unversioned.items() >= vector["change"].items():
        vectors.check(vector["result"], lambda: StagedCallRecord.from_components(**unversioned))


@pytest.mark.parametrize("field", ["token_mask_delta", "generation_log_probs_delta"])
@pytest.mark.parametrize("values", [[0, 1.0], [0.0, True]])
def test_from_components_turns_no_number_into_a_float(field: str, values: list[Any]) -> None:
    with pytest.raises(ValueError, match=f"{field}: every value must be a Python float"):
        StagedCallRecord.from_components(**components(**{field: values}))


def test_a_wire_constructor_takes_the_integers_that_json_made_of_floats() -> None:
    record = StagedCallRecord.from_components(**components(generation_log_probs_delta=[0.0, -1.0]))
    wire = record.model_dump() | {"token_mask_delta": [0, 1], "generation_log_probs_delta": [0, -1]}
    assert StagedCallRecord(**wire) == record


def test_a_wire_constructor_needs_a_digest() -> None:
    payload = StagedCallRecord.from_components(**components()).model_dump(exclude={"digest"})
    with pytest.raises(ValidationError, match="digest\n  Field required"):
        StagedCallRecord(**payload)


def test_a_wrong_digest_is_refused_whatever_the_context_of_validation() -> None:
    payload = StagedCallRecord.from_components(**components()).model_dump() | {"digest": HASH}
    for context in (None, {}, object(), True):
        with pytest.raises(ValidationError, match="rollout/call: digest does not match"):
            StagedCallRecord.model_validate(payload, context=context)


def test_extras_must_have_the_digest_that_the_call_commits() -> None:
    extras = {"k": [1, "two", None]}
    digest = compute_extras_digest(extras)
    record = StagedCallRecord.from_components(**components(extras=extras, extras_digest=digest))
    assert record.extras == extras
    for change in (
        {"extras": None},
        {"extras": {}},
        {"extras": {"k": 1}},
        {"extras_digest": EMPTY_EXTRAS_DIGEST},
    ):
        with pytest.raises(ValidationError, match="extras_digest does not match the extras"):
            StagedCallRecord.from_components(**(components(extras=extras, extras_digest=digest) | change))


@pytest.mark.parametrize("value", [(1,), b"1", float("nan"), 2**63])
def test_extras_that_have_no_digest_are_refused_as_a_validation_error(value: Any) -> None:
    with pytest.raises(ValidationError, match="extras: "):
        StagedCallRecord.from_components(**components(extras={"k": value}))


def test_a_root_has_no_extras_by_default() -> None:
    payload = StagedCallRecord.from_components(**components()).model_dump(exclude={"extras", "extras_digest"})
    assert StagedCallRecord(**payload).extras_digest == EMPTY_EXTRAS_DIGEST


def test_an_error_shows_no_token_and_no_log_probability() -> None:
    record = StagedCallRecord.from_components(
        **components(token_ids_delta=[123456, 9], generation_log_probs_delta=[0.0, -0.123456])
    )
    with pytest.raises(ValidationError) as refused:
        StagedCallRecord(**(record.model_dump() | {"weight_version": 4}))
    assert "123456" not in str(refused.value)
    with pytest.raises(ValidationError) as refused:
        StagedCallRecord(**(record.model_dump() | {"token_ids_delta": ["123456", 9]}))
    assert "123456" not in str(refused.value)


ROW: dict[str, Any] = {
    "model_call_id": "c1",
    "prev_len": 0,
    "delta_len": 2,
    "cum_len": 2,
    "weight_version": 1,
    "digest": HASH,
    "extras_digest": HASH,
    "staging_key": "r/c1",
    "mode": "text",
    "chain_hash": HASH,
    "cumulative_hash": HASH,
    "response_id": "resp",
}
COORDS: dict[str, Any] = {
    "rollout_id": "r",
    "model_call_id": "c1",
    "prev_len": 0,
    "delta_len": 2,
    "cum_len": 2,
    "weight_version": 1,
    "digest": HASH,
    "extras_digest": HASH,
    "staging_key": "r/c1",
    "chain_hash": HASH,
    "cumulative_hash": HASH,
}
PAYLOAD = ("digest", "extras_digest", "staging_key", "chain_hash", "cumulative_hash")
FAILED = COORDS | dict.fromkeys(PAYLOAD) | {"disposition": "capture_failed", "delta_len": 0, "cum_len": 0}
CUT: dict[str, Any] = {
    "source_model_call_id": "c0",
    "source_capture_key": "r",
    "staging_keys": ("r/c0",),
    "prefix_token_count": 3,
    "prefix_digest": hash_token_ids([1, 2, 3]),
    "effective_output_limit": 16,
}
RECEIPT: dict[str, Any] = {
    "rollout_id": "r",
    "manifest": [ROW],
    "terminal_model_call_id": "c1",
    "terminal_selection": "heuristic",
}
POISONED: dict[str, Any] = {
    "rollout_id": "r",
    "capture_poisoned": True,
    "failure_reason": "worker_capture_failed",
}


@pytest.mark.parametrize("field", ["capture_key", "response_id", "staging_key", "model_call_id"])
@pytest.mark.parametrize("value", ["", 5, b"key", "\ud800"])
def test_an_identifier_of_a_row_is_text_that_is_not_empty(field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        CallRecord(**(ROW | {field: value}))


def test_a_row_keeps_the_rollout_that_staged_it() -> None:
    assert CallRecord(**ROW).capture_key is None
    assert CallRecord(**ROW, capture_key="source").model_dump()["capture_key"] == "source"


@pytest.mark.parametrize(
    "field", ["prev_len", "delta_len", "cum_len", "weight_version", "fingerprint_version"]
)
@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None])
def test_a_length_or_version_is_a_strict_integer_of_0_or_more(field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        CallRecord(**(ROW | {field: value}))


@pytest.mark.parametrize("value", [HASH[1:], HASH + "0", HASH + "\n", HASH.upper(), "g" * 64, HASH.encode()])
def test_a_digest_is_lowercase_hex_of_32_bytes_and_nothing_more(value: Any) -> None:
    with pytest.raises(ValidationError, match="chain_hash"):
        CallRecord(**(ROW | {"chain_hash": value}))


@pytest.mark.parametrize("field", PAYLOAD)
def test_staged_coordinates_carry_every_payload_field_and_failed_ones_none(field: str) -> None:
    CommitCoords(**COORDS)
    CommitCoords(**FAILED)
    with pytest.raises(ValidationError, match="staged coordinates need"):
        CommitCoords(**(COORDS | {field: None}))
    with pytest.raises(ValidationError, match="capture_failed coordinates have no"):
        CommitCoords(**(FAILED | {field: COORDS[field]}))


@pytest.mark.parametrize(
    "change", [{"delta_len": 2, "cum_len": 2}, {"cum_len": 2}, {"delta_len": 1}], ids=["both", "cum", "delta"]
)
def test_failed_coordinates_have_no_delta(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="capture_failed coordinates have no delta"):
        CommitCoords(**(FAILED | change))


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (COORDS, {"prev_len": 1, "cum_len": 3}),
        (COORDS, {"parent_call_id": "p"}),
        (COORDS, {"parent_call_id": ""}),
        (COORDS, {"cum_len": 3}),
        (COORDS, {"delta_len": 0, "cum_len": 0}),
        (FAILED, {"prev_len": 3, "cum_len": 3}),
        (FAILED, {"parent_call_id": "p"}),
    ],
)
def test_coordinates_that_describe_no_position_are_refused(
    base: dict[str, Any], change: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError, match=r"CommitCoords"):
        CommitCoords(**(base | change))


def test_a_generation_cut_travels_with_its_admission() -> None:
    admission = CaptureAdmission(rollout_id="r", model_call_id="c1", mode="text", generation_cut=CUT)
    assert CaptureAdmission.model_validate_json(admission.model_dump_json()) == admission
    assert admission.generation_cut == GenerationCutContinuation(**CUT)
    assert CaptureAdmission(rollout_id="r", model_call_id="c1", mode="text").generation_cut is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"staging_keys": ()}, "staging_keys"),
        ({"staging_keys": ("",)}, "staging_keys"),
        ({"staging_keys": ("k", "k")}, "staging_keys: a key is named twice"),
        ({"staging_keys": ("k", "l", "k")}, "staging_keys: a key is named twice"),
        ({"staging_keys": (1,)}, "staging_keys"),
        ({"source_model_call_id": ""}, "source_model_call_id"),
        ({"source_capture_key": ""}, "source_capture_key"),
        ({"prefix_token_count": -1}, "prefix_token_count"),
        ({"prefix_token_count": True}, "prefix_token_count"),
        ({"prefix_digest": HASH.upper()}, "prefix_digest"),
        ({"effective_output_limit": 0}, "effective_output_limit"),
        ({"terminal_finish_reason": "tool_calls"}, "terminal_finish_reason"),
        ({"terminal_stop_reason": 151645}, "terminal_stop_reason needs the terminal_finish_reason"),
        ({"terminal_stop_reason": "\n\n"}, "terminal_stop_reason needs the terminal_finish_reason"),
        ({"terminal_stop_reason": 0}, "terminal_stop_reason needs the terminal_finish_reason"),
        ({"terminal_stop_reason": ""}, "terminal_stop_reason needs the terminal_finish_reason"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_generation_cut_that_no_worker_can_continue_is_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        GenerationCutContinuation(**(CUT | change))


@pytest.mark.parametrize(
    "finish",
    [
        {},
        {"terminal_finish_reason": "length"},
        {"terminal_finish_reason": "stop", "terminal_stop_reason": 151645},
        {"terminal_finish_reason": "stop", "terminal_stop_reason": "\n\n"},
    ],
)
def test_a_generation_cut_says_whether_the_generation_had_finished(finish: dict[str, Any]) -> None:
    cut = GenerationCutContinuation(**(CUT | finish))
    assert (cut.terminal_finish_reason, cut.terminal_stop_reason) == (
        finish.get("terminal_finish_reason"),
        finish.get("terminal_stop_reason"),
    )


def test_the_prefix_of_a_generation_cut_is_checked_by_length_and_hash() -> None:
    cut = GenerationCutContinuation(**CUT)
    cut.check_prefix([1, 2, 3])
    with pytest.raises(ValueError, match="model call c0 has 2 tokens, not 3"):
        cut.check_prefix([1, 2])
    with pytest.raises(ValueError, match="model call c0 does not have its digest"):
        cut.check_prefix([1, 2, 4])


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (RECEIPT, {"terminal_selection": None}, "needs the terminal_selection"),
        (
            RECEIPT,
            {"terminal_selection": None, "capture_poisoned": True, "failure_reason": "x"},
            "needs the terminal",
        ),
        (RECEIPT, {"terminal_model_call_id": None}, "names its terminal_model_call_id"),
        (RECEIPT, {"failure_reason": "x"}, "has no failure_reason"),
        (RECEIPT, {"failure_reason": ""}, "has no failure_reason"),
        (RECEIPT, {"terminal_model_call_id": "c2"}, "c2 is not in the manifest"),
        (RECEIPT, {"manifest": [ROW, ROW]}, "names a model call twice"),
        (RECEIPT, {"manifest": [ROW, ROW], "capture_poisoned": True}, "names a model call twice"),
        (POISONED, {"failure_reason": None}, "is poisoned and has a failure_reason"),
        (POISONED, {"capture_poisoned": False}, "is poisoned and has a failure_reason"),
        (POISONED, {"reward": float("inf")}, "reward"),
    ],
)
def test_a_receipt_is_in_one_of_its_three_states(
    base: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    RolloutReceipt(**base)
    with pytest.raises(ValidationError, match=message):
        RolloutReceipt(**(base | change))


def test_a_poisoned_receipt_may_name_the_terminal_that_was_found() -> None:
    receipt = RolloutReceipt(**(RECEIPT | {"capture_poisoned": True, "failure_reason": "x"}))
    assert receipt.terminal_model_call_id == "c1"
    assert RolloutReceipt(**(RECEIPT | {"capture_poisoned": True, "terminal_model_call_id": None})).manifest


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ok": True}, "needs the staging_key"),
        ({"ok": False}, "needs an error"),
        ({"ok": False, "error": ""}, "needs an error"),
        ({"ok": True, "staging_key": ""}, "staging_key"),
    ],
)
def test_a_stage_result_says_where_or_why_not(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        StageResult(**fields)


def test_a_removal_lists_what_had_records_and_what_had_none() -> None:
    removal = RolloutRemoval(removed=["a"], absent=["b"])
    assert removal.model_dump() == {"schema_version": 2, "removed": ["a"], "absent": ["b"]}
    with pytest.raises(ValidationError, match="removed"):
        RolloutRemoval(removed=[""])


@pytest.mark.parametrize("ids", [("", "c"), ("r", ""), ("", "")])
def test_a_staging_key_needs_both_ids(ids: tuple[str, str]) -> None:
    assert staging_key("r", "c/1") == "r/c/1"
    with pytest.raises(ValueError, match="must not be empty"):
        staging_key(*ids)


def test_the_reasons_of_the_contract_keep_their_strings() -> None:
    reasons = {name: value for name, value in vars(words).items() if name.endswith("_REASON")}
    terminals = {name: value for name, value in vars(words).items() if name.startswith("TERMINAL_")}
    assert reasons == {
        "UNRESOLVED_PARENT_REASON": "unresolved_parent",
        "UNCOMMITTED_CALL_REASON": "request_finished_without_staged_coordinates",
        "LEDGER_ROW_MISSING_RESPONSE_ID_REASON": "ledger_row_missing_response_id",
        "LEDGER_ROW_MISSING_CHAIN_HASH_REASON": "ledger_row_missing_chain_hash",
        "WORKER_MISSING_COMMIT_COORDS_REASON": "worker_response_missing_commit_coordinates",
        "WORKER_CAPTURE_FAILED_REASON": "worker_capture_failed",
        "INVALID_COMMIT_COORDS_REASON": "invalid_worker_commit_coordinates",
    }
    assert terminals == {
        "TERMINAL_SELECTED": "selected",
        "TERMINAL_NO_RECORDS": "no_records",
        "TERMINAL_DUPLICATE_CALL_ID": "duplicate_call_id",
        "TERMINAL_ORPHANED_ROW": "orphaned_row",
        "TERMINAL_NO_ROOT": "no_root",
        "TERMINAL_AMBIGUOUS": "ambiguous_terminal",
    }
