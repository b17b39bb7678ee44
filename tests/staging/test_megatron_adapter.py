from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokencustody.staging.adapters.megatron import MegatronCaptureAdapter

ADAPTER = MegatronCaptureAdapter()
FIELDS: dict[str, Any] = {
    "prompt_token_ids": [1, 2],
    "generated_token_ids": [3, 4],
    "generated_log_probs": [-0.5, -1.0],
}
FORMS = [dict, SimpleNamespace]


def extract(form: Any, fields: dict[str, Any]) -> tuple[list[int], list[int], list[float]]:
    payload = form(**fields)
    return ADAPTER.extract_prompt_ids(payload), *ADAPTER.extract_generation(payload)


@pytest.mark.parametrize("form", FORMS)
@given(
    prompt=st.lists(st.integers(0, 2**64 - 1)),
    sampled=st.lists(st.tuples(st.integers(0, 2**64 - 1), st.floats(allow_nan=False, allow_infinity=False))),
    column=st.sampled_from([list, tuple]),
)
def test_an_object_and_a_mapping_are_read_alike_in_every_bit(
    form: Any, prompt: list[int], sampled: list[tuple[int, float]], column: Any
) -> None:
    ids, values = [token for token, _ in sampled], [value for _, value in sampled]
    fields = {
        "prompt_token_ids": column(prompt),
        "generated_token_ids": column(ids),
        "generated_log_probs": column(values),
    }
    got_prompt, got_ids, got_values = extract(form, fields)
    assert (got_prompt, got_ids) == (prompt, ids)
    assert [value.hex() for value in got_values] == [value.hex() for value in values]
    assert ADAPTER.extract_extras(form(**fields)) is None


NO_IDS: list[Any] = [
    None,
    "12",
    b"12",
    {1: 2},
    3,
    {1, 2},
    [True, 2],
    [1.0, 2],
    ["1", "2"],
    [None, 2],
    [1, -2],
    [1, 1 << 64],
    [[1], 2],
]
NO_LOG_PROBS: list[Any] = [
    None,
    "x",
    {},
    1.0,
    [True, 0.0],
    ["-1", 0.0],
    [None, 0.0],
    [float("nan"), 0.0],
    [float("inf"), 0.0],
]
MALFORMED = [
    *(("prompt_token_ids", value) for value in NO_IDS),
    *(("generated_token_ids", value) for value in NO_IDS),
    *(("generated_log_probs", value) for value in NO_LOG_PROBS),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "value"), MALFORMED)
def test_a_malformed_field_is_refused_by_its_name(form: Any, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        extract(form, FIELDS | {name: value})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FIELDS)
def test_a_missing_field_is_refused_by_its_name(form: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"has no {name}"):
        extract(form, {field: value for field, value in FIELDS.items() if field != name})


@pytest.mark.parametrize("ids", [[], [3], [3, 4, 5]])
def test_columns_of_different_length_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=f"2 values for the {len(ids)} ids of generated_token_ids"):
        ADAPTER.extract_generation(FIELDS | {"generated_token_ids": ids})


def test_entering_a_prefix_copies_the_request_and_the_ids() -> None:
    request: dict[str, Any] = {"prompt": "x"}
    assert ADAPTER.enter_prefix(request, [1, 2]) == {"prompt": "x", "required_prefix_token_ids": [1, 2]}
    assert request == {"prompt": "x"}
    with pytest.raises(ValueError, match="required_prefix_token_ids"):
        ADAPTER.enter_prefix(request, [True])
