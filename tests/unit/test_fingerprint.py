import hashlib
import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import vectors
from tokencustody import fingerprint
from tokencustody.fingerprint import assistant_fingerprint, canonicalize_tool_arguments, conversation_digest

pytestmark = pytest.mark.quick

CASES = vectors.load("fingerprint")
Items = list[dict[str, Any]]

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
arguments = st.dictionaries(text, st.none() | st.booleans() | st.integers(-(2**53), 2**53) | text, max_size=3)


def hash_of(domain: bytes, *fields: tuple[int, str]) -> str:
    written = b"".join(bytes([tag]) + struct.pack(">Q", len(t.encode())) + t.encode() for tag, t in fields)
    return hashlib.sha256(domain + written).hexdigest()


def label(vector: dict[str, Any]) -> str:
    return json.dumps(vector["messages"])[:40]


def test_the_vectors_are_of_this_fingerprint_version() -> None:
    assert CASES["fingerprint_version"] == fingerprint.FINGERPRINT_VERSION


@pytest.mark.parametrize("vector", CASES["cases"], ids=label)
def test_the_assistant_fingerprint_equals_its_vector(vector: dict[str, Any]) -> None:
    vectors.check(vector["assistant_fingerprint"], lambda: assistant_fingerprint(vector["messages"]))


@pytest.mark.parametrize("vector", CASES["cases"], ids=label)
def test_the_conversation_digest_equals_its_vector(vector: dict[str, Any]) -> None:
    vectors.check(vector["conversation_digest"], lambda: conversation_digest(vector["messages"]))


@pytest.mark.parametrize("vector", vectors.load("tool_arguments"), ids=lambda v: repr(v["value"]))
def test_canonical_tool_arguments_equal_their_vector(vector: dict[str, Any]) -> None:
    vectors.check(vector["canonical"], lambda: canonicalize_tool_arguments(vector["value"]))


def test_both_hashes_are_the_fields_that_the_contract_spells_out() -> None:
    messages: Items = [
        {"role": "user", "content": "é"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": "u"}],
            "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    image = '{"image_url":"u","type":"image_url"}'
    called = '{"a":2,"b":1}'
    assert assistant_fingerprint(messages) == hash_of(
        b"nemo-gym-lineage",
        *[(0, "text"), (1, "hi"), (0, "image_url"), (1, image), (2, "c1"), (3, "f"), (4, called)],
    )
    assert conversation_digest(messages) == hash_of(
        b"nemo-gym-lineage-context",
        *[(0, "user"), (1, "text"), (2, "é")],
        *[(0, "assistant"), (1, "text"), (2, "hi"), (1, "image_url"), (2, image)],
        *[(3, "c1"), (4, "f"), (5, called)],
        *[(0, "tool"), (1, "text"), (2, "42"), (6, "c1"), (7, "42")],
    )


# One turn of a conversation: who speaks, the text, and the model's tool calls as (id, name, arguments).
model_turn = st.tuples(st.just("assistant"), text, st.lists(st.tuples(text, text, arguments), max_size=2))
user_turn = st.tuples(st.just("user"), text, st.just([]))
conversation = st.lists(user_turn | model_turn, max_size=5)
Turn = tuple[str, str, list[tuple[str, str, dict[str, Any]]]]


def in_chat(turns: list[Turn]) -> Items:
    return [
        {
            "role": role,
            "content": said,
            "tool_calls": [
                {"id": i, "type": "function", "function": {"name": n, "arguments": json.dumps(a, indent=1)}}
                for i, n, a in calls
            ],
        }
        for role, said, calls in turns
    ]


def in_responses(turns: list[Turn]) -> Items:
    items: Items = []
    for role, said, calls in turns:
        kind = "output_text" if role == "assistant" else "input_text"
        items.append({"type": "message", "role": role, "content": [{"type": kind, "text": said}]})
        items += [
            {"type": "function_call", "call_id": i, "name": n, "arguments": json.dumps(a)}
            for i, n, a in calls
        ]
    return items


def in_anthropic(turns: list[Turn]) -> Items:
    return [
        {
            "role": role,
            "content": [
                {"type": "text", "text": said},
                *({"type": "tool_use", "id": i, "name": n, "input": a} for i, n, a in calls),
            ],
        }
        for role, said, calls in turns
    ]


@given(conversation)
def test_a_turn_has_one_assistant_fingerprint_in_every_dialect(turns: list[Turn]) -> None:
    chat = assistant_fingerprint(in_chat(turns))
    assert chat == assistant_fingerprint(in_responses(turns)) == assistant_fingerprint(in_anthropic(turns))
    assert bool(chat) == any(role == "assistant" for role, _, _ in turns)


@given(conversation)
def test_spoken_turns_have_one_conversation_digest_in_every_dialect(turns: list[Turn]) -> None:
    spoken: list[Turn] = [(role, said, []) for role, said, _ in turns]
    chat = conversation_digest(in_chat(spoken))
    assert chat == conversation_digest(in_responses(spoken)) == conversation_digest(in_anthropic(spoken))
    with_calls = conversation_digest(in_chat(turns))
    assert with_calls == conversation_digest(in_anthropic(turns))


# A message whose role is "tool" is a result itself, whatever blocks are in it.
@given(text, text.filter(lambda role: role != "tool"), text)
def test_a_tool_result_has_the_same_fields_in_every_dialect(call_id: str, role: str, output: str) -> None:
    for form, said in (
        ({"type": "function_call_output", "call_id": call_id, "output": output}, []),
        (
            {"role": "tool", "tool_call_id": call_id, "content": output},
            [(1, "text"), (2, output)] if output else [],
        ),
        ({"role": role, "content": [{"type": "tool_result", "tool_use_id": call_id, "content": output}]}, []),
    ):
        named = str(form.get("role") or form.get("type") or "")
        expected = [(0, named), *said, (6, call_id), (7, output)]
        assert conversation_digest([form]) == hash_of(b"nemo-gym-lineage-context", *expected)
        assert assistant_fingerprint([form]) == ("" if role != "assistant" else assistant_fingerprint([form]))


BASE: Items = [
    {"role": "user", "content": "what is 6 * 7?"},
    {
        "role": "assistant",
        "content": "let me see",
        "tool_calls": [{"id": "c1", "function": {"name": "calc", "arguments": '{"x": 6}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "42"},
]


def changed(edit: Callable[[Items], Any]) -> Items:
    copy: Items = json.loads(json.dumps(BASE))
    edit(copy)
    return copy


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda m: m[1].update(content="let me see!"), id="text"),
        pytest.param(lambda m: m[1]["tool_calls"][0].update(id="c2"), id="call-id"),
        pytest.param(lambda m: m[1]["tool_calls"][0]["function"].update(name="calc2"), id="name"),
        pytest.param(lambda m: m[1]["tool_calls"][0]["function"].update(arguments='{"x":7}'), id="arguments"),
        pytest.param(lambda m: m[1].pop("tool_calls"), id="no-call"),
        pytest.param(lambda m: m.append({"role": "assistant", "content": "42"}), id="one-turn-more"),
    ],
)
def test_every_model_authored_field_changes_both_hashes(edit: Callable[[Items], Any]) -> None:
    assert assistant_fingerprint(changed(edit)) != assistant_fingerprint(BASE)
    assert conversation_digest(changed(edit)) != conversation_digest(BASE)


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda m: m[0].update(content="?"), id="user-text"),
        pytest.param(lambda m: m[0].update(role="system"), id="role"),
        pytest.param(lambda m: m[2].update(content="43"), id="tool-output"),
        pytest.param(lambda m: m[2].update(tool_call_id="c9"), id="tool-result-id"),
        pytest.param(lambda m: m.reverse(), id="order"),
    ],
)
def test_every_other_field_changes_the_conversation_digest_alone(edit: Callable[[Items], Any]) -> None:
    assert assistant_fingerprint(changed(edit)) == assistant_fingerprint(BASE)
    assert conversation_digest(changed(edit)) != conversation_digest(BASE)


@given(arguments)
def test_arguments_hash_alike_however_they_are_written(value: dict[str, Any]) -> None:
    backwards = dict(reversed(value.items()))
    written = {
        canonicalize_tool_arguments(value),
        canonicalize_tool_arguments(backwards),
        canonicalize_tool_arguments(json.dumps(backwards, indent=2)),
        canonicalize_tool_arguments(json.dumps(value, ensure_ascii=False)),
    }
    assert len(written) == 1


@given(text, text, st.integers(1, 8))
def test_moving_the_border_between_two_texts_changes_both_hashes(first: str, second: str, step: int) -> None:
    moved = first + second[:step], second[step:]
    before = [{"role": "assistant", "content": [first + "x", second + "y"]}]
    after = [{"role": "assistant", "content": [moved[0] + "x", moved[1] + "y"]}]
    same = moved == (first, second)
    assert (assistant_fingerprint(before) == assistant_fingerprint(after)) == same
    assert (conversation_digest(before) == conversation_digest(after)) == same


@pytest.mark.parametrize(
    "message",
    [
        "text",
        None,
        5,
        {"role": "assistant", "content": 5},
        {"role": "assistant", "content": {"text": "x"}},
        {"role": "assistant", "content": [5]},
        {"role": "assistant", "content": [{"text": 5}]},
        {"role": "assistant", "content": [{}]},
        {"role": "assistant", "tool_calls": "call"},
        {"role": "assistant", "tool_calls": ["call"]},
        {"role": "assistant", "tool_calls": [{"function": "f"}]},
        {"role": "assistant", "content": [{"type": "blob", "data": {1}}]},
        {"type": "function_call", "name": "f", "arguments": {"x": {1, 2}}},
    ],
    ids=repr,
)
def test_a_message_of_no_known_shape_is_a_value_error(message: Any) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        assistant_fingerprint([message])
    with pytest.raises(ValueError, match=r"\S"):
        conversation_digest([message])
