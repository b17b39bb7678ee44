import hashlib
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import vectors
from tokencustody.records import (
    TOKEN_FIELDS,
    ParentResolutionStatus,
    TokenEntry,
    compute_digest,
    cumulative_tokens,
    encode_token_ids,
    extract_token_fields,
    response_to_output_items,
    stamp_lineage,
    strip_token_fields,
)

pytestmark = pytest.mark.quick

DIGESTS = vectors.load("token_digest")
VALIDATIONS = vectors.load("token_entry_validation")
SHAPES = vectors.load("response_shapes")

token_ids = st.lists(st.integers(0, 2**64 - 1), max_size=40)


def entry(**fields: Any) -> TokenEntry:
    minimal: dict[str, Any] = {
        "rollout_id": "rollout",
        "model_call_id": "call",
        "prompt_token_ids": [1, 2],
        "generation_token_ids": [3],
        "generation_log_probs": [-0.5],
    }
    return TokenEntry(**(minimal | fields))


@pytest.mark.parametrize(
    "vector", DIGESTS, ids=lambda v: f"{len(v['token_ids'])}-ids-{str(v['token_ids'])[:24]}"
)
def test_a_token_digest_equals_its_vector(vector: dict[str, Any]) -> None:
    recorded = vector["entry_digest"]
    vectors.check(
        recorded if isinstance(recorded, dict) else {"ok": recorded},
        lambda: compute_digest(vector["token_ids"]),
    )


@pytest.mark.parametrize(
    "vector", [v for v in DIGESTS if v.get("entry_encoding_hex")], ids=lambda v: str(v["token_ids"])[:24]
)
def test_a_token_encoding_equals_its_vector(vector: dict[str, Any]) -> None:
    assert encode_token_ids(vector["token_ids"]).hex() == vector["entry_encoding_hex"]


@given(token_ids)
def test_a_token_digest_is_the_hash_that_the_contract_spells_out(ids: list[int]) -> None:
    encoding = b"\x01" + struct.pack(">Q", len(ids)) + struct.pack(f">{len(ids)}Q", *ids)
    assert encode_token_ids(ids) == encoding
    assert compute_digest(ids) == hashlib.sha256(b"nemo-gym-tokens" + (encoding if ids else b"")).hexdigest()


@pytest.mark.parametrize("bad", [-1, 2**64, True, 1.0, "1", None])
def test_only_integers_of_64_unsigned_bits_have_a_digest(bad: Any) -> None:
    with pytest.raises(ValueError, match="every id must"):
        compute_digest([7, bad])


@pytest.mark.parametrize("vector", VALIDATIONS, ids=lambda v: v["name"])
def test_a_record_is_accepted_or_refused_as_its_vector_says(vector: dict[str, Any]) -> None:
    vectors.check(
        vector["result"], lambda: TokenEntry.model_validate(vector["payload"]).model_dump(mode="json")
    )


def test_a_newer_and_an_older_schema_version_are_refused_in_different_words() -> None:
    with pytest.raises(ValueError, match=r"schema_version 2 is newer.*upgrade"):
        entry(schema_version=2)
    with pytest.raises(ValueError, match="schema_version 0 is older"):
        entry(schema_version=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schema_version", "1"),
        ("rollout_id", 5),
        ("model_call_id", b"call"),
        ("model", None),
        ("prompt_token_ids", [1, True]),
        ("prompt_token_ids", [1.0]),
        ("prompt_token_ids", ["1"]),
        ("prompt_token_ids", "12"),
        ("generation_token_ids", None),
        ("generation_log_probs", ["-0.5"]),
        ("generation_log_probs", [None]),
        ("output_items", ["text"]),
        ("token_item_index", "0"),
        ("created_at", "now"),
        ("parent_resolution", "perhaps"),
        ("prompt_is_delta", 1),
        ("cum_len", True),
        ("digest", 7),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"(?m)^{field}"):
        entry(**{field: value})


@pytest.mark.parametrize("field", ["rollout_id", "model_call_id", *TOKEN_FIELDS])
def test_a_required_field_cannot_be_left_out(field: str) -> None:
    payload = entry().model_dump()
    del payload[field]
    with pytest.raises(ValueError, match=f"(?m)^{field}\n.*required"):
        TokenEntry.model_validate(payload)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"generation_log_probs": [-0.5, -0.5]},
            "generation_log_probs has 2 values for 1 generation_token_ids",
        ),
        ({"token_item_index": 0}, "token_item_index 0 lies outside output_items"),
        ({"parent_resolution": "resolved"}, "parent_call_id is missing"),
        ({"parent_resolution": "root", "parent_call_id": "p"}, "parent_call_id is set"),
        ({"parent_resolution": "unresolved", "parent_call_id": "p"}, "parent_call_id is set"),
        ({"prompt_is_delta": True, "parent_call_id": "p"}, "prompt_is_delta needs a resolved parent_call_id"),
    ],
)
def test_fields_that_contradict_one_another_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        entry(**fields)


def test_unknown_fields_keep_their_values_and_types() -> None:
    extra = {"x_int": 1, "x_float": 1.0, "x_bool": True, "x_nested": {"é\x00": [None, {"deep": -0.0}]}}
    dumped = entry(**extra).model_dump()
    assert {name: repr(dumped[name]) for name in extra} == {
        name: repr(value) for name, value in extra.items()
    }


@given(st.lists(st.floats(width=64), max_size=20))
def test_log_probabilities_keep_every_bit(values: list[float]) -> None:
    held = entry(generation_token_ids=[0] * len(values), generation_log_probs=values).generation_log_probs
    assert struct.pack(f"<{len(held)}d", *held) == struct.pack(f"<{len(values)}d", *values)


@given(token_ids, token_ids)
def test_the_cumulative_sequence_is_prompt_then_generation(prompt: list[int], sampled: list[int]) -> None:
    record = entry(
        prompt_token_ids=prompt, generation_token_ids=sampled, generation_log_probs=[-1.0] * len(sampled)
    )
    assert cumulative_tokens(record) == prompt + sampled


def test_a_delta_record_has_no_cumulative_sequence_of_its_own() -> None:
    with pytest.raises(ValueError, match="model call call has a delta prompt"):
        cumulative_tokens(entry(prompt_is_delta=True, parent_resolution="resolved", parent_call_id="p"))


@given(token_ids, token_ids, st.booleans())
def test_stamping_records_the_length_and_digest_of_the_whole_sequence(
    prompt: list[int], sampled: list[int], said: bool
) -> None:
    record = entry(
        prompt_token_ids=prompt, generation_token_ids=sampled, generation_log_probs=[-1.0] * len(sampled)
    )
    whole = prompt + sampled
    stamped = stamp_lineage(
        record, "p", parent_resolution=ParentResolutionStatus.RESOLVED, cumulative=whole if said else None
    )
    assert stamped is record
    assert (record.cum_len, record.digest) == (len(whole), compute_digest(whole))
    assert (record.parent_call_id, record.parent_resolution) == ("p", ParentResolutionStatus.RESOLVED)


@pytest.mark.parametrize("cumulative", [[], [1, 2], [1, 2, 4], [1, 2, 3, 3], [0, 1, 2, 3]])
def test_stamping_refuses_a_sequence_that_is_not_the_records_own(cumulative: list[int]) -> None:
    record = entry()
    with pytest.raises(ValueError, match="cumulative disagrees"):
        stamp_lineage(record, None, cumulative=cumulative)
    assert record == entry()


def test_stamping_a_delta_takes_the_whole_sequence_from_its_caller() -> None:
    record = entry(prompt_is_delta=True, parent_resolution="resolved", parent_call_id="p")
    resolved = ParentResolutionStatus.RESOLVED
    stamp_lineage(record, "p", parent_resolution=resolved, cumulative=[9, 9, 1, 2, 3])
    assert (record.cum_len, record.digest) == (5, compute_digest([9, 9, 1, 2, 3]))
    for wrong in ([9, 9, 1, 2], [3], [], [9, 1, 2, 4]):
        with pytest.raises(ValueError, match="cumulative does not end with the entry's own arrays"):
            stamp_lineage(record, "p", parent_resolution=resolved, cumulative=wrong)
    with pytest.raises(ValueError, match="delta prompt"):
        stamp_lineage(record, "p", parent_resolution=resolved)


@pytest.mark.parametrize(("parent", "resolution"), [(None, "resolved"), ("p", "root"), ("p", "unresolved")])
def test_stamping_refuses_a_parent_that_contradicts_its_resolution(
    parent: str | None, resolution: str
) -> None:
    record = entry()
    with pytest.raises(ValueError, match="parent_call_id"):
        stamp_lineage(record, parent, parent_resolution=ParentResolutionStatus(resolution))
    assert record == entry()


@pytest.mark.parametrize("vector", SHAPES, ids=lambda v: v["name"])
def test_a_response_is_read_as_its_vector_says(vector: dict[str, Any]) -> None:
    items = response_to_output_items(vector["payload"])
    assert items == vector["output_items"]["ok"]
    vectors.check(vector["token_fields"], lambda: extract_token_fields(vector["payload"]))
    vectors.check(vector["stripped"], lambda: list(strip_token_fields(items)))


plain_items = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["message", "reasoning"]), "content": st.text(max_size=5)}
    ),
    max_size=4,
)


@given(plain_items, plain_items, token_ids, token_ids)
def test_token_fields_are_read_from_their_one_carrier_and_stripped_from_it_alone(
    before: list[dict[str, Any]], after: list[dict[str, Any]], prompt: list[int], sampled: list[int]
) -> None:
    tokens = dict(zip(TOKEN_FIELDS, (prompt, sampled, [-1.5] * len(sampled)), strict=True))
    carrier = {"type": "message", "role": "assistant", "content": "hi"}
    items = [*before, carrier | tokens | {"routed_experts": [[1, 2]]}, *after]
    assert extract_token_fields({"output": items}) == tokens | {"routed_experts": [[1, 2]]}
    assert strip_token_fields(items) == ([*before, carrier, *after], len(before))
    assert items[len(before)]["prompt_token_ids"] == prompt
    assert strip_token_fields([*before, *after]) == ([*before, *after], None)
    assert extract_token_fields({"output": [*before, *after]}) is None


@pytest.mark.parametrize("missing", TOKEN_FIELDS)
def test_a_carrier_that_lacks_one_of_the_lists_is_refused_by_its_name(missing: str) -> None:
    tokens = {field: None if field == missing else [1] for field in TOKEN_FIELDS}
    with pytest.raises(ValueError, match=missing):
        extract_token_fields({"choices": [{"message": tokens}]})


def test_an_error_about_many_tokens_is_short_and_shows_none_of_them() -> None:
    with pytest.raises(ValueError, match="prompt_token_ids") as refused:
        TokenEntry(
            rollout_id="r",
            model_call_id="c",
            prompt_token_ids=["987654"] * 50_000,  # type: ignore[list-item]
            generation_token_ids=[],
            generation_log_probs=[],
        )
    assert len(str(refused.value)) < 500
    assert "987654" not in str(refused.value)
