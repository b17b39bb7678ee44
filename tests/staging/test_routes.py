import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import vectors
from tokencustody.staging.routes import (
    RoutedExpertsFragment,
    classify_route_span,
    decode_routed_experts,
    encode_routed_experts,
    routed_experts_token_count,
)

VECTORS = vectors.load("routed_experts")
ENVELOPES = [vector for vector in VECTORS if "values" in vector]
REFUSED = [vector for vector in VECTORS if "error" in vector]
SPANS = [vector for vector in VECTORS if "mode" in vector]

BOUNDS = {"int8": 1 << 7, "int16": 1 << 15, "int32": 1 << 31}


@st.composite
def blocks(draw: st.DrawFn) -> tuple[str, list[list[list[int]]]]:
    dtype = draw(st.sampled_from(sorted(BOUNDS)))
    tokens, layers, topk = (draw(st.integers(1, 4)) for _ in range(3))
    value = st.integers(-BOUNDS[dtype], BOUNDS[dtype] - 1)
    row = st.lists(value, min_size=topk, max_size=topk)
    token = st.lists(row, min_size=layers, max_size=layers)
    return dtype, draw(st.lists(token, min_size=tokens, max_size=tokens))


def test_every_vector_is_of_a_known_kind() -> None:
    assert len(ENVELOPES) + len(REFUSED) + len(SPANS) == len(VECTORS)
    assert min(len(ENVELOPES), len(REFUSED), len(SPANS)) > 0


@pytest.mark.parametrize("vector", ENVELOPES, ids=lambda v: v["dtype"])
def test_an_envelope_equals_its_vector(vector: dict[str, Any]) -> None:
    encoded = encode_routed_experts(vector["values"], dtype=vector["dtype"])
    assert encoded == vector["encoded"]
    fragment = decode_routed_experts(encoded)
    assert fragment == RoutedExpertsFragment(vector["values"], vector["dtype"], 3, 2)
    assert routed_experts_token_count(encoded) == vector["token_count"]


@pytest.mark.parametrize("vector", REFUSED, ids=lambda v: v["encoded"])
def test_a_malformed_envelope_is_refused_as_in_its_vector(vector: dict[str, Any]) -> None:
    vectors.check(vector["error"], lambda: decode_routed_experts(vector["encoded"]))


@pytest.mark.parametrize("vector", SPANS, ids=lambda v: f"{v['mode']}-{v['staged_route_len']}")
def test_a_route_span_equals_its_vector(vector: dict[str, Any]) -> None:
    lengths = {name: length for name, length in vector.items() if name != "mode"}
    assert classify_route_span(**lengths) == vector["mode"]


@given(blocks())
def test_what_was_encoded_is_decoded(block: tuple[str, list[list[list[int]]]]) -> None:
    dtype, values = block
    encoded = encode_routed_experts(values, dtype=dtype)
    fragment = decode_routed_experts(encoded)
    assert (fragment.values, fragment.dtype) == (values, dtype)
    assert (fragment.num_layers, fragment.topk) == (len(values[0]), len(values[0][0]))
    assert routed_experts_token_count(encoded) == len(values) == routed_experts_token_count(values)


@given(blocks(), st.data())
def test_an_envelope_with_one_character_changed_is_refused_or_reads_differently(
    block: tuple[str, list[list[list[int]]]], data: st.DataObject
) -> None:
    encoded = encode_routed_experts(block[1], dtype=block[0])
    position = data.draw(st.integers(0, len(encoded) - 1))
    character = data.draw(st.characters(codec="ascii").filter(lambda c: c != encoded[position]))
    changed = encoded[:position] + character + encoded[position + 1 :]
    try:
        fragment = decode_routed_experts(changed)
    except ValueError:
        return
    assert encode_routed_experts(fragment.values, dtype=fragment.dtype) == changed


@pytest.mark.parametrize(
    "shape",
    ["0x1x1", "-1x1x1", "+1x1x1", " 1x1x1", "01x1x1", "1_0x1x1", "\uff11x1x1", "1x1", "1x1x1x1", "1X1X1"],
)
def test_a_shape_that_is_not_three_positive_integers_is_refused(shape: str) -> None:
    for read in (decode_routed_experts, routed_experts_token_count):
        with pytest.raises(ValueError, match="shape"):
            read(f"nrlre1:int8:{shape}:{base64.b64encode(bytes(10)).decode()}")


@pytest.mark.parametrize(
    "data", ["AQ", "AQ=", "AQ===", "AR==", "A===", "-_==", " AQ==", "AQ==\n", "AQ==:x", "AQé="]
)
def test_data_that_is_not_canonical_base64_of_its_length_is_refused(data: str) -> None:
    with pytest.raises(ValueError, match="routed_experts: the data is not"):
        decode_routed_experts(f"nrlre1:int8:1x1x1:{data}")


@pytest.mark.parametrize("data", ["", "AQ", "AQ=", "AQ===", "AQI=", "AQ==AQ=="])
def test_a_token_count_is_refused_when_the_data_has_another_length(data: str) -> None:
    with pytest.raises(ValueError, match="not the 1 bytes of its shape"):
        routed_experts_token_count(f"nrlre1:int8:1x1x1:{data}")


@pytest.mark.parametrize("text", ["", "nrlre1", "nrlre1:int8:1x1x1", "nrlre2:int8:1x1x1:AQ=="])
def test_text_that_is_no_envelope_of_this_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no nrlre1 envelope"):
        decode_routed_experts(text)


def test_a_token_count_that_its_data_cannot_hold_is_refused_without_decoding() -> None:
    with pytest.raises(ValueError, match="not the 999999999999999999 bytes of its shape"):
        routed_experts_token_count("nrlre1:int8:999999999999999999x1x1:AQ==")


@pytest.mark.parametrize(
    "values",
    [
        None,
        "abc",
        [],
        [[]],
        [[[]]],
        [[[1, 2]], [[3]]],
        [[[1]], [[2], [3]]],
        [[[1]], []],
        [[[1.0]]],
        [[[True]]],
        [[["1"]]],
        [[None]],
        [[b"ab"]],
        (((1,),),),
        ([[1]],),
        [([1],)],
        [[(1,)]],
    ],
    ids=repr,
)
def test_values_that_are_no_full_block_of_integers_are_refused(values: Any) -> None:
    for use in (encode_routed_experts, decode_routed_experts, routed_experts_token_count):
        with pytest.raises(ValueError, match="routed_experts"):
            use(values)


def test_a_value_that_the_dtype_cannot_hold_is_refused() -> None:
    for dtype, bound in BOUNDS.items():
        for value in (bound, -bound - 1):
            with pytest.raises(ValueError, match=f"does not fit {dtype}"):
                encode_routed_experts([[[value]]], dtype=dtype)


def test_nested_lists_are_read_as_the_older_form() -> None:
    assert decode_routed_experts([[[1 << 40, -1]]]) == RoutedExpertsFragment(
        [[[1 << 40, -1]]], "legacy-int", 1, 2
    )


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 12))
def test_a_route_span_covers_all_the_generated_or_no_tokens(carry: int, generation: int, staged: int) -> None:
    mode = classify_route_span(carry_len=carry, generation_len=generation, staged_route_len=staged)
    assert (mode == "full") == (staged == carry + generation > 0)
    assert (mode == "tail") == (staged >= generation > 0 and staged != carry + generation)


@pytest.mark.parametrize("name", ["carry_len", "generation_len", "staged_route_len"])
@pytest.mark.parametrize("length", [-1, True, 1.0, "1", None])
def test_a_length_that_is_no_integer_from_0_is_refused_by_its_name(name: str, length: Any) -> None:
    with pytest.raises(ValueError, match=name):
        classify_route_span(**{"carry_len": 1, "generation_len": 1, "staged_route_len": 1} | {name: length})
