"""The digests of worker staging, against the recorded vectors and an independent computation from the contract."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import vectors
from tests.support.staged import stage
from tokencustody import staging
from tokencustody.staging import (
    EMPTY_EXTRAS_DIGEST,
    StagedCallRecord,
    build_staging_delta,
    compute_chain_hash,
    compute_extras_digest,
    compute_staging_digest,
    encode_token_ids,
    hash_token_ids,
)

SURROGATE = "a\ud800b"

token_ids = st.lists(st.integers(0, 2**64 - 1), max_size=30)
hexes = st.binary(min_size=32, max_size=32).map(bytes.hex)
text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
extra = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text | st.just(""), inner, max_size=3),
    max_leaves=12,
)
A = "ab" * 32
B = "cd" * 32
ROOT: dict[str, Any] = {
    "schema_version": 2,
    "digest_version": 2,
    "extras_digest_version": 1,
    "rollout_id": "rollout",
    "model_call_id": "call",
    "parent_call_id": None,
    "mode": "text",
    "prev_len": 0,
    "delta_len": 3,
    "cum_len": 3,
    "weight_version": 7,
    "token_ids_delta": [5, 6, 7],
    "token_mask_delta": [0.0, 1.0, 1.0],
    "generation_log_probs_delta": [0.0, -0.5, -1.25],
    "extras_digest": EMPTY_EXTRAS_DIGEST,
    "chain_hash": A,
    "cumulative_hash": B,
}
CHILD = ROOT | {"parent_call_id": "parent", "mode": "token_in", "prev_len": 4, "cum_len": 7}


def sha256(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def q(value: int) -> bytes:
    return struct.pack(">Q", value)


def sized(data: bytes) -> bytes:
    return q(len(data)) + data


def utf8(value: str) -> bytes:
    return sized(value.encode())


def ids_as_spelled_out(ids: list[int]) -> bytes:
    return q(len(ids)) + b"".join(q(token) for token in ids)


def extra_as_spelled_out(value: Any) -> bytes:
    match value:
        case None:
            return b"N"
        case bool():
            return b"B" + (b"\x01" if value else b"\x00")
        case int():
            return b"I" + struct.pack(">q", value)
        case float():
            return b"F" + struct.pack(">d", value)
        case str():
            return b"S" + utf8(value)
        case list():
            return b"L" + q(len(value)) + b"".join(extra_as_spelled_out(item) for item in value)
    items = sorted((key.encode(), item) for key, item in value.items())
    return b"D" + q(len(items)) + b"".join(sized(key) + extra_as_spelled_out(item) for key, item in items)


def call_as_spelled_out(call: dict[str, Any]) -> str:
    parent = call["parent_call_id"]

    def floats(values: list[float]) -> bytes:
        return sized(q(len(values)) + b"".join(struct.pack(">f", value) for value in values))

    return sha256(
        b"nemo-gym-staging-call-v2",
        bytes([2, 2, 1]),
        utf8(call["rollout_id"]),
        utf8(call["model_call_id"]),
        b"\x00" if parent is None else b"\x01" + utf8(parent),
        utf8(call["mode"]),
        *(q(call[name]) for name in ("prev_len", "delta_len", "cum_len", "weight_version")),
        sized(ids_as_spelled_out(call["token_ids_delta"])),
        floats(call["token_mask_delta"]),
        floats(call["generation_log_probs_delta"]),
        bytes.fromhex(call["extras_digest"]),
        b"\x01" + bytes.fromhex(call["chain_hash"]),
        b"\x01" + bytes.fromhex(call["cumulative_hash"]),
    )


@pytest.mark.parametrize("vector", vectors.load("token_digest"), ids=lambda v: str(v["token_ids"])[:24])
def test_a_token_hash_and_encoding_equal_their_vector(vector: dict[str, Any]) -> None:
    recorded = vector["staging_hash"]
    vectors.check(
        recorded if isinstance(recorded, dict) else {"ok": recorded},
        lambda: hash_token_ids(vector["token_ids"]),
    )
    if vector.get("staging_encoding_hex"):
        assert encode_token_ids(vector["token_ids"]).hex() == vector["staging_encoding_hex"]


@pytest.mark.parametrize("vector", vectors.load("chain_hash"))
def test_a_chain_hash_equals_its_vector(vector: dict[str, Any]) -> None:
    computed = compute_chain_hash(vector["parent_chain_hash"], vector["token_ids_delta"])
    assert computed == vector["chain_hash"]


@pytest.mark.parametrize("vector", vectors.load("extras_digest"))
def test_an_extras_digest_equals_its_vector(vector: dict[str, Any]) -> None:
    vectors.check(vector["digest"], lambda: compute_extras_digest(vector["extras"]))


@pytest.mark.parametrize("vector", vectors.load("staged_call"))
def test_a_staged_call_digest_equals_its_vector(vector: dict[str, Any]) -> None:
    assert compute_staging_digest(**vector["fields"]) == vector["digest"]


@given(ids=token_ids, parent=st.none() | hexes)
def test_token_and_chain_hashes_are_what_the_contract_spells_out(ids: list[int], parent: str | None) -> None:
    encoding = ids_as_spelled_out(ids)
    link = b"\x00" if parent is None else b"\x01" + bytes.fromhex(parent)
    assert encode_token_ids(ids) == encoding
    assert hash_token_ids(ids) == sha256(b"nemo-gym-staging-prefix-v2", encoding)
    assert compute_chain_hash(parent, ids) == sha256(b"nemo-gym-staging-chain-v1", link, encoding)


@given(extras=st.none() | st.dictionaries(text | st.just(""), extra, max_size=4))
def test_an_extras_digest_is_what_the_contract_spells_out(extras: dict[str, Any] | None) -> None:
    expected = sha256(b"nemo-gym-staging-extras-v1", b"\x01", extra_as_spelled_out(extras))
    assert compute_extras_digest(extras) == expected


@settings(max_examples=60)
@given(data=st.data())
def test_a_staged_call_digest_is_what_the_contract_spells_out(data: st.DataObject) -> None:
    columns = data.draw(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.none() | float32), min_size=1))
    prev_len = data.draw(st.integers(0, 2**62))
    call = {
        **(CHILD if prev_len else ROOT),
        "rollout_id": data.draw(text),
        "model_call_id": data.draw(text),
        "parent_call_id": data.draw(text) if prev_len else None,
        "prev_len": prev_len,
        "delta_len": len(columns),
        "cum_len": prev_len + len(columns),
        "weight_version": data.draw(st.integers(0, 2**64 - 1)),
        "token_ids_delta": [token for token, _ in columns],
        "token_mask_delta": [0.0 if log_prob is None else 1.0 for _, log_prob in columns],
        "generation_log_probs_delta": [log_prob or 0.0 for _, log_prob in columns],
        "extras_digest": data.draw(hexes),
        "chain_hash": data.draw(hexes),
        "cumulative_hash": data.draw(hexes),
    }
    assert compute_staging_digest(**call) == call_as_spelled_out(call)


@pytest.mark.parametrize("call", [ROOT, CHILD], ids=["root", "child"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rollout_id", "other"),
        ("model_call_id", "other"),
        ("weight_version", 8),
        ("token_ids_delta", [5, 6, 8]),
        ("token_mask_delta", [0.0, 1.0, 0.0]),
        ("generation_log_probs_delta", [0.0, -0.5, -1.5]),
        ("extras_digest", A),
        ("chain_hash", B),
        ("cumulative_hash", A),
    ],
)
def test_the_digest_of_a_staged_call_commits_every_field(
    call: dict[str, Any], field: str, value: Any
) -> None:
    call = call | {"generation_log_probs_delta": [0.0, -0.5, 0.0]}
    assert compute_staging_digest(**call) != compute_staging_digest(**(call | {field: value}))


def test_the_digest_of_a_child_commits_its_position() -> None:
    digests = {
        compute_staging_digest(**(CHILD | change))
        for change in ({}, {"parent_call_id": "other"}, {"prev_len": 5, "cum_len": 8})
    }
    assert len(digests) == 3


@pytest.mark.parametrize("call", [ROOT, CHILD], ids=["root", "child"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 1}, "unsupported staging schema version 1"),
        ({"schema_version": 2.0}, "unsupported staging schema version"),
        ({"digest_version": 3}, "unsupported staging digest version 3"),
        ({"extras_digest_version": True}, "unsupported extras digest version"),
        ({"rollout_id": ""}, "rollout_id and model_call_id must not be empty"),
        ({"model_call_id": ""}, "rollout_id and model_call_id must not be empty"),
        ({"rollout_id": "\ud800"}, "surrogates not allowed"),
        ({"parent_call_id": ""}, "parent_call_id must not be empty"),
        ({"mode": "stream"}, "unsupported capture mode 'stream'"),
        ({"delta_len": 0, "cum_len": 0, "prev_len": 0}, "a staged delta|a call with a parent"),
        ({"cum_len": 9}, "cum_len 9 is not"),
        ({"token_ids_delta": [5, 6]}, "delta has 2 token ids"),
        ({"token_mask_delta": [1.0]}, "1 mask values"),
        ({"generation_log_probs_delta": []}, "0 log probabilities"),
        ({"token_ids_delta": [5, 6, -7]}, "every id must lie"),
        ({"token_ids_delta": [5, 6, True]}, "every id must be an integer"),
        ({"token_mask_delta": [0.0, 0.5, 1.0]}, "must be 0.0 or 1.0"),
        ({"token_mask_delta": [0, 1, 1]}, "token_mask_delta: every value must be a Python float"),
        ({"token_mask_delta": [0.0, float("nan"), 1.0]}, "token_mask_delta: every value must be finite"),
        ({"token_mask_delta": [0.0, 0.0, 1.0]}, "mask 0.0 must have log probability 0.0"),
        (
            {"generation_log_probs_delta": [0, -1, -1]},
            "generation_log_probs_delta: every value must be a Python",
        ),
        ({"generation_log_probs_delta": [0.0, float("-inf"), -1.0]}, "finite as float32"),
        ({"generation_log_probs_delta": [0.0, float("nan"), -1.0]}, "finite as float32"),
        ({"generation_log_probs_delta": [0.0, float("inf"), float("-inf")]}, "finite as float32"),
        ({"generation_log_probs_delta": [0.0, -1e39, -1.0]}, "finite as float32"),
        ({"weight_version": -1}, "weight_version must be an integer"),
        ({"weight_version": 2**64}, "weight_version must be an integer"),
        ({"weight_version": True}, "weight_version must be an integer"),
        ({"extras_digest": A.upper()}, "extras_digest must be a SHA-256"),
        ({"chain_hash": A[1:]}, "chain_hash must be a SHA-256"),
        ({"cumulative_hash": A + "\n"}, "cumulative_hash must be a SHA-256"),
    ],
)
def test_a_call_that_the_digest_cannot_stand_for_is_refused(
    call: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compute_staging_digest(**(call | change))


@pytest.mark.parametrize(
    "change",
    [{"mode": "token_in"}, {"prev_len": 1, "cum_len": 4}, {"mode": "token_in", "prev_len": 1, "cum_len": 4}],
)
def test_a_call_without_a_parent_is_a_text_root(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a call without a parent"):
        compute_staging_digest(**(ROOT | change))


@pytest.mark.parametrize("change", [{"mode": "text"}, {"prev_len": 0, "cum_len": 3}])
def test_a_call_with_a_parent_continues_a_prefix_in_token_in_mode(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a call with a parent"):
        compute_staging_digest(**(CHILD | change))


@pytest.mark.parametrize("field", ["rollout_id", "parent_call_id", "chain_hash", "cumulative_hash"])
def test_an_id_or_hash_of_a_call_is_text(field: str) -> None:
    with pytest.raises(TypeError, match=f"{field} must be text, not int"):
        compute_staging_digest(**(CHILD | {field: 5}))


def test_the_largest_float32_is_hashed_and_the_next_float64_beyond_its_rounding_is_refused() -> None:
    largest = 3.4028234663852886e38
    compute_staging_digest(**(ROOT | {"generation_log_probs_delta": [0.0, -largest, -largest]}))
    with pytest.raises(ValueError, match="finite as float32"):
        compute_staging_digest(**(ROOT | {"generation_log_probs_delta": [0.0, -3.4028235677973366e38, 0.0]}))


class Colour(IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value", [(1,), b"1", {1}, Colour.RED, Text("x"), MappingProxyType({}), {1: 2}, {Text("k"): 1}, object()]
)
@pytest.mark.parametrize(
    "nest", [lambda v: v, lambda v: [v], lambda v: {"k": v}], ids=["bare", "list", "dict"]
)
def test_extras_of_other_types_than_json_s_are_refused(value: Any, nest: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"^extras: "):
        compute_extras_digest({"extra": nest(value)})


@pytest.mark.parametrize("extras", [[], "text", 1])
def test_extras_are_a_mapping(extras: Any) -> None:
    with pytest.raises(TypeError, match="extras must be a mapping or None"):
        compute_extras_digest(extras)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, float("nan"), float("inf"), "\ud800", {"\ud800": 1}])
def test_extras_that_no_peer_can_hash_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        compute_extras_digest({"extra": value})


def test_extras_that_contain_themselves_are_refused() -> None:
    extras: dict[str, Any] = {}
    extras["again"] = extras
    with pytest.raises(ValueError, match="nested too deeply"):
        compute_extras_digest(extras)


def test_a_read_only_mapping_of_extras_hashes_like_a_dict() -> None:
    assert compute_extras_digest(MappingProxyType({"a": 1})) == compute_extras_digest({"a": 1})


def test_no_extras_and_empty_extras_have_different_digests() -> None:
    assert compute_extras_digest(None) == EMPTY_EXTRAS_DIGEST != compute_extras_digest({})


@pytest.mark.parametrize("parent", ["", A.upper(), A[2:], "g" * 64, A.encode(), A + "\n"])
def test_a_parent_chain_hash_is_lowercase_hex_of_32_bytes(parent: Any) -> None:
    with pytest.raises(ValueError, match="parent_chain_hash must be a SHA-256"):
        compute_chain_hash(parent, [1])


def test_a_delta_is_the_rest_of_the_prompt_and_the_generation() -> None:
    delta = build_staging_delta(
        prompt_token_ids=[1, 2, 3], generated_token_ids=[4, 5], generated_log_probs=[-0.5, -0.25], prev_len=2
    )
    assert delta == ([3, 4, 5], [0.0, 1.0, 1.0], [0.0, -0.5, -0.25])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prev_len": 4}, "prev_len 4 lies outside the prompt of 3"),
        ({"prev_len": -1}, "prev_len -1 lies outside"),
        ({"generated_log_probs": []}, "0 log probabilities for 1 generated tokens"),
        ({"prev_len": 3, "generated_token_ids": [], "generated_log_probs": []}, "adds no token"),
    ],
)
def test_a_delta_that_cannot_be_cut_out_is_refused(change: dict[str, Any], message: str) -> None:
    parts: dict[str, Any] = {
        "prompt_token_ids": [1, 2, 3],
        "generated_token_ids": [4],
        "generated_log_probs": [-0.5],
        "prev_len": 0,
    }
    with pytest.raises(ValueError, match=message):
        build_staging_delta(**(parts | change))


def test_this_installation_computes_the_golden_vectors() -> None:
    staging.assert_golden_vectors()


@pytest.mark.parametrize("function", ["encode_token_ids", "hash_token_ids", "compute_chain_hash"])
def test_the_golden_vectors_catch_a_token_hash_that_is_wrong(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(staging.conformance, function)
    monkeypatch.setattr(staging.conformance, function, lambda *args: right(*args[:-1], args[-1][:-1]))
    with pytest.raises(AssertionError, match="the golden vector says"):
        staging.assert_golden_vectors()


def test_the_golden_vectors_catch_an_extras_or_call_digest_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(staging.conformance, "compute_extras_digest", lambda _: EMPTY_EXTRAS_DIGEST)
        with pytest.raises(AssertionError, match="extras digest 1"):
            staging.assert_golden_vectors()
    monkeypatch.setattr(staging.conformance, "compute_staging_digest", lambda **_: EMPTY_EXTRAS_DIGEST)
    with pytest.raises(AssertionError, match="staged call digest 0"):
        staging.assert_golden_vectors()


@pytest.mark.parametrize(
    ("extras", "place"),
    [
        ({"x": SURROGATE}, "extras['x']"),
        ({"a": 1, "x": {"y": [0, SURROGATE]}}, "extras['x']['y'][1]"),
        ({SURROGATE: 1}, "extras key"),
        ({"x": {SURROGATE: 1, "a": 2}}, "extras['x'] key"),
    ],
)
def test_text_in_extras_that_utf8_cannot_carry_is_refused_with_its_place(
    extras: dict[str, Any], place: str
) -> None:
    said = f"{place}: UTF-8 cannot carry the text: surrogates not allowed"
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        compute_extras_digest(extras)
    assert type(caught.value) is ValueError
    with pytest.raises(ValueError, match=re.escape(said)):
        StagedCallRecord(**(stage("a").snapshot.model_dump() | {"extras": extras}))


@pytest.mark.parametrize("field", ["rollout_id", "model_call_id", "parent_call_id"])
def test_an_id_that_utf8_cannot_carry_is_refused_by_its_name(field: str) -> None:
    call = stage("b", stage("a")).snapshot.model_dump(exclude={"digest", "extras"})
    with pytest.raises(ValueError, match=f"{field}: UTF-8 cannot carry") as caught:
        compute_staging_digest(**(call | {field: SURROGATE}))
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("kind", ["holds itself", "holds one object many times"])
def test_a_lone_surrogate_in_extras_is_looked_for_once_in_each_object(kind: str) -> None:
    held: list[Any] = []
    if kind == "holds itself":
        held += [held, held]
    else:
        for _ in range(60):
            held = [held, {"in": held}]
    with pytest.raises(ValueError, match=r"^extras\['a'\]: UTF-8 cannot carry the text"):
        compute_extras_digest({"a": "\ud800", "b": held})
