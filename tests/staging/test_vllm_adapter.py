import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokencustody.staging.adapters.vllm import VLLMCaptureAdapter, extract_generation_token_info

ADAPTER = VLLMCaptureAdapter()
Body = dict[str, Any]


def with_message_fields() -> Body:
    fields = {
        "prompt_token_ids": [1, 2],
        "generation_token_ids": [3, 4],
        "generation_log_probs": [-0.5, -1.0],
    }
    return {"choices": [{"message": {"role": "assistant", "content": "x"} | fields}]}


def with_token_id_strings() -> Body:
    content = [{"token": "token_id:3", "logprob": -0.5}, {"token": "token_id:4", "logprob": -1.0}]
    return {
        "prompt_token_ids": [1, 2],
        "choices": [{"message": {"content": "x"}, "logprobs": {"content": content}}],
    }


def with_return_token_ids() -> Body:
    body = with_token_id_strings()
    for entry, text in zip(body["choices"][0]["logprobs"]["content"], ["7", "b"], strict=True):
        entry["token"] = text
    body["choices"][0]["token_ids"] = [3, 4]
    return body


SHAPES = [with_message_fields, with_token_id_strings, with_return_token_ids]


def changed(body: Body, path: str, value: Any) -> Body:
    body = copy.deepcopy(body)
    *parents, last = path.split(".")
    owner: Any = body
    for step in parents:
        owner = owner[int(step) if step.isdigit() else step]
    if value is DELETED:
        del owner[last]
    else:
        owner[int(last) if last.isdigit() else last] = value
    return body


DELETED = object()
MESSAGE = "choices.0.message"
CONTENT = "choices.0.logprobs.content"


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_read_from_every_place_that_vllm_puts_them(shape: Any) -> None:
    body = json.loads(json.dumps(shape()))
    assert ADAPTER.extract_prompt_ids(body) == [1, 2]
    assert ADAPTER.extract_generation(body) == ([3, 4], [-0.5, -1.0])
    assert extract_generation_token_info(body["choices"][0]) == ([3, 4], [-0.5, -1.0])
    assert ADAPTER.extract_extras(body) is None


@given(
    st.lists(st.integers(0, 2**64 - 1)),
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.floats(allow_nan=False, allow_infinity=False))),
)
def test_what_vllm_sampled_comes_back_in_every_bit(
    prompt: list[int], sampled: list[tuple[int, float]]
) -> None:
    ids, values = [token for token, _ in sampled], [value for _, value in sampled]
    text = [{"token": "x", "logprob": value} for value in values]
    named = [{"token": f"token_id:{token}", "logprob": value} for token, value in sampled]
    fields = {"generation_token_ids": ids, "generation_log_probs": values}
    choices: list[Body] = [
        {"message": fields},
        {"logprobs": {"content": named}},
        {"token_ids": ids, "logprobs": {"content": text}},
        {"token_ids": ids, "message": fields, "logprobs": {"content": named}},
    ]
    for choice in choices:
        body = json.loads(json.dumps({"prompt_token_ids": prompt, "choices": [choice]}))
        assert ADAPTER.extract_prompt_ids(body) == prompt
        got_ids, got_values = ADAPTER.extract_generation(body)
        assert got_ids == ids
        assert [value.hex() for value in got_values] == [value.hex() for value in values]


NO_IDS: list[Any] = [
    None,
    "34",
    b"34",
    {"3": 4},
    3,
    [True, 4],
    [3.0, 4],
    ["3", "4"],
    [3, None],
    [3, -4],
    [3, 1 << 64],
    [[3], 4],
]
NO_LOG_PROBS: list[Any] = [
    None,
    "x",
    {},
    [True, -1.0],
    ["-0.5", -1.0],
    [None, -1.0],
    [float("nan"), -1.0],
    [float("-inf"), 0.0],
]
NO_TOKENS = [None, 4, "4", "abc", "token_id:", "token_id:x", "token_id:-4", "token_id: 4", "token_id:+4"]
NO_TOKENS += ["token_id:04", "token_id:1_0", "token_id:\uff14", "token_id:4 ", "token_id:4\n", "Token_id:4"]
MALFORMED_GENERATION: list[tuple[Any, str, Any, str]] = [
    *(
        (with_message_fields, f"{MESSAGE}.generation_token_ids", ids, "generation_token_ids")
        for ids in NO_IDS
    ),
    *(
        (with_message_fields, f"{MESSAGE}.generation_log_probs", v, "generation_log_probs")
        for v in NO_LOG_PROBS
    ),
    (with_message_fields, f"{MESSAGE}.generation_log_probs", [10**400, 0.0], "generation_log_probs"),
    (with_message_fields, f"{MESSAGE}.generation_log_probs", [-0.5], "1 values for the 2 ids of message"),
    (with_message_fields, f"{MESSAGE}.generation_token_ids", [], "2 values for the 0 ids of message"),
    (with_message_fields, f"{MESSAGE}.generation_log_probs", DELETED, "generation_log_probs"),
    (with_message_fields, f"{MESSAGE}.generation_token_ids", DELETED, "generation_token_ids"),
    (with_message_fields, MESSAGE, None, "generation_token_ids"),
    (with_message_fields, MESSAGE, "text", "message must be an object"),
    *((with_return_token_ids, "choices.0.token_ids", ids, "token_ids|token") for ids in NO_IDS),
    (with_return_token_ids, "choices.0.token_ids", [3], "2 values for the 1 ids of choice.token_ids"),
    (with_return_token_ids, "choices.0.token_ids", DELETED, r"content\[0\].token must be token_id:N"),
    (with_return_token_ids, "choices.0.logprobs", None, "logprobs.content"),
    (with_return_token_ids, "choices.0.logprobs", [], "logprobs must be an object"),
    (with_return_token_ids, f"{CONTENT}.1.logprob", DELETED, "logprob"),
    (with_return_token_ids, CONTENT, None, "logprobs.content"),
    *(
        (with_token_id_strings, f"{CONTENT}.1.logprob", v, "logprob")
        for v in [None, True, "-1", float("nan")]
    ),
    *(
        (with_token_id_strings, f"{CONTENT}.1.token", token, r"content\[1\].token must be token_id:N")
        for token in NO_TOKENS
    ),
    (with_token_id_strings, f"{CONTENT}.1", "token_id:4", "list of objects"),
    (with_token_id_strings, CONTENT, {}, "list of objects"),
    (with_token_id_strings, CONTENT, None, "has none of"),
    (with_token_id_strings, "choices.0.token_ids", [3, 5], "logprobs.content differs from choice.token_ids"),
    (with_message_fields, "choices.0.token_ids", [3], "choice.token_ids differs from message"),
]


@pytest.mark.parametrize(("shape", "path", "value", "named"), MALFORMED_GENERATION)
def test_a_malformed_generation_is_refused_by_the_name_of_its_field(
    shape: Any, path: str, value: Any, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        ADAPTER.extract_generation(changed(shape(), path, value))


@pytest.mark.parametrize("ids", NO_IDS)
def test_malformed_prompt_ids_are_refused_by_name(ids: Any) -> None:
    for shape, path in ((with_message_fields, MESSAGE), (with_token_id_strings, "")):
        with pytest.raises(ValueError, match="prompt_token_ids"):
            ADAPTER.extract_prompt_ids(changed(shape(), f"{path}.prompt_token_ids".lstrip("."), ids))


def test_two_prompts_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"message.prompt_token_ids differs from prompt_token_ids"):
        ADAPTER.extract_prompt_ids(with_message_fields() | {"prompt_token_ids": [1]})


@pytest.mark.parametrize(
    "body",
    [
        *(None, "x", [], {}, {"choices": None}, {"choices": {}}, {"choices": []}, {"choices": ["x"]}),
        {"choices": with_message_fields()["choices"] * 2},
    ],
    ids=repr,
)
def test_anything_but_one_choice_is_refused(body: Any) -> None:
    for extract in (ADAPTER.extract_prompt_ids, ADAPTER.extract_generation, ADAPTER.extract_extras):
        with pytest.raises(ValueError, match=r"choice|must be an object"):
            extract(body)


def test_the_text_of_tokens_is_not_looked_at_beside_their_ids() -> None:
    for token in (DELETED, None, 5, "token_id:3"):
        body = changed(with_return_token_ids(), f"{CONTENT}.0.token", token)
        assert ADAPTER.extract_generation(body) == ([3, 4], [-0.5, -1.0])
    empty = changed(with_message_fields(), "choices.0.logprobs", {"content": []})
    assert ADAPTER.extract_generation(empty) == ([3, 4], [-0.5, -1.0])


LOG_PROBS = [
    ([-0.5, -1.5], r"logprobs.content\[\].logprob differs from message.generation_log_probs"),
    ([-0.5, -1.0000000000000002], "differs from"),
    ([-0.5, None], "logprob"),
    ([-0.5, float("nan")], "logprob"),
    ([-0.5], "1 values for the 2 ids"),
]


@pytest.mark.parametrize(("values", "named"), LOG_PROBS)
@pytest.mark.parametrize("names", [["token_id:3", "token_id:4"], ["a", "b"]], ids=["ids", "text"])
def test_two_places_whose_log_probabilities_differ_are_refused(
    values: list[Any], named: str, names: list[str]
) -> None:
    content = [{"token": name, "logprob": value} for name, value in zip(names, values, strict=False)]
    if len(content) < 2 and names[0] == "token_id:3":
        named = "logprobs.content differs from message.generation_token_ids"
    with pytest.raises(ValueError, match=named):
        ADAPTER.extract_generation(changed(with_message_fields(), "choices.0.logprobs", {"content": content}))


@pytest.mark.parametrize("value", [DELETED, None])
def test_entries_without_any_log_probability_contradict_nobody(value: Any) -> None:
    body = with_message_fields()
    body["choices"][0]["logprobs"] = copy.deepcopy(with_token_id_strings()["choices"][0]["logprobs"])
    assert ADAPTER.extract_generation(body) == ([3, 4], [-0.5, -1.0])
    for entry in (0, 1):
        body = changed(body, f"{CONTENT}.{entry}.logprob", value)
    assert ADAPTER.extract_generation(body) == ([3, 4], [-0.5, -1.0])


def test_a_whole_number_is_a_log_probability() -> None:
    body = changed(with_message_fields(), f"{MESSAGE}.generation_log_probs", [0, -1])
    _, values = ADAPTER.extract_generation(body)
    assert [(type(value), value) for value in values] == [(float, 0.0), (float, -1.0)]


def test_a_number_that_is_the_text_of_a_token_is_not_its_id() -> None:
    body = changed(with_token_id_strings(), CONTENT, [{"token": "7", "logprob": -0.5}])
    with pytest.raises(ValueError, match="token_id:N"):
        ADAPTER.extract_generation(body)


def test_extras_are_routes_of_the_message_and_media_spans_of_the_body() -> None:
    routed = changed(with_message_fields(), f"{MESSAGE}.routed_experts", "nrlre1:int8:1x1x1:AQ==")
    assert ADAPTER.extract_extras(routed) == {"routed_experts": "nrlre1:int8:1x1x1:AQ=="}
    assert ADAPTER.extract_extras(routed | {"media_spans": [{"start": 0}]}) == {
        "routed_experts": "nrlre1:int8:1x1x1:AQ==",
        "media_spans": [{"start": 0}],
    }
    assert ADAPTER.extract_extras(with_message_fields() | {"media_spans": []}) == {"media_spans": []}


@pytest.mark.parametrize("routes", [5, True, 1.5, b"x", (1,), object()])
def test_routes_of_no_json_container_are_refused(routes: Any) -> None:
    with pytest.raises(ValueError, match="routed_experts"):
        ADAPTER.extract_extras(changed(with_message_fields(), f"{MESSAGE}.routed_experts", routes))


@pytest.mark.parametrize("spans", [None, "x", {}, ({},), [1], [{}, None]], ids=repr)
def test_media_spans_that_are_no_list_of_objects_are_refused(spans: Any) -> None:
    with pytest.raises(ValueError, match="media_spans"):
        ADAPTER.extract_extras(with_message_fields() | {"media_spans": spans})


def test_entering_a_prefix_copies_the_request_and_the_ids() -> None:
    request, prefix = {"messages": [], "required_prefix_token_ids": [9]}, [1, 2]
    entered = ADAPTER.enter_prefix(request, prefix)
    prefix.append(3)
    assert entered == {"messages": [], "required_prefix_token_ids": [1, 2]}
    assert request["required_prefix_token_ids"] == [9]


@pytest.mark.parametrize("prefix", NO_IDS, ids=repr)
def test_a_prefix_that_is_no_list_of_ids_is_refused(prefix: Any) -> None:
    with pytest.raises(ValueError, match="required_prefix_token_ids"):
        ADAPTER.enter_prefix({}, prefix)
