"""Differential tests against the installed nemo_gym package: the same input, the same bytes."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nemo_gym import token_id_capture as peer
from nemo_gym.token_id_capture import fingerprint as peer_fingerprint
from nemo_gym.token_id_capture import records as peer_records

from tests.support.rollouts import linear_rollout
from tokencustody import fingerprint, lineage, records

# What the peer stumbles over; it refuses with ValueError.
CRASHES = (TypeError, AttributeError)


def agree(theirs: Callable[[], Any], ours: Callable[[], Any], *, crash_is_refusal: bool = True) -> None:
    """Demand equal values, or a ValueError of ours where the peer refuses.

    Where the peer crashes, ours is a ValueError too, or anything but a crash if `crash_is_refusal` is false.
    """
    try:
        expected = theirs()
    except (ValueError, *CRASHES) as exc:
        if isinstance(exc, ValueError) or crash_is_refusal:
            with pytest.raises(ValueError, match=r"\S"):
                ours()
        else:
            with suppress(ValueError):
                ours()
    else:
        assert ours() == expected


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
scalar = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | text
json_value = st.recursive(
    scalar, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2), max_leaves=4
)
identifier = st.sampled_from(["c1", "call_2", "", None]) | text
name = st.sampled_from(["search", "bash", ""]) | text
arguments = (
    st.dictionaries(text, json_value, max_size=3).map(json.dumps)
    | st.dictionaries(text, json_value, max_size=3).map(
        lambda value: json.dumps(value, indent=1, ensure_ascii=False)
    )
    | json_value
    | st.sampled_from(
        ["{bad", " padded ", "NaN", "[1,", "1e3", "-0", "\x00", '{"a":1,"a":2}', "Infinity", "1E400"]
    )
)


def record(
    required: dict[str, st.SearchStrategy[Any]], **optional: st.SearchStrategy[Any]
) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(required, optional=optional)


text_block = record(
    {"type": st.sampled_from(["text", "input_text", "output_text", ""]), "text": text},
    annotations=st.just([]),
)
image_block = record({"type": st.just("image_url"), "image_url": record({"url": text}, detail=text)})
thinking_block = record({"type": st.just("thinking"), "thinking": text}, signature=text)
tool_use_block = record({"type": st.just("tool_use"), "id": identifier}, name=name, input=arguments)
tool_result_block = record(
    {"type": st.just("tool_result")},
    tool_use_id=identifier,
    id=identifier,
    content=json_value,
    is_error=st.booleans(),
)
block = text | text_block | image_block | thinking_block | tool_use_block | tool_result_block
content = st.none() | text | st.lists(block, max_size=3)
tool_call = record(
    {"id": identifier}, type=st.just("function"), function=record({}, name=name, arguments=arguments)
)
chat_message = record(
    {"role": st.sampled_from(["system", "user", "assistant"]), "content": content},
    tool_calls=st.none() | st.lists(tool_call, max_size=2),
)
tool_message = record({"role": st.just("tool"), "content": content}, tool_call_id=identifier)
message_item = record(
    {"type": st.just("message"), "role": st.sampled_from(["user", "assistant"]), "content": content}
)
call_item = record(
    {"type": st.just("function_call"), "name": name},
    call_id=identifier,
    id=identifier,
    namespace=st.none() | text,
    arguments=arguments,
)
output_item = record(
    {"type": st.just("function_call_output")}, call_id=identifier, id=identifier, output=json_value
)
reasoning_item = record({"type": st.just("reasoning"), "summary": json_value}, content=content)
realistic = st.lists(
    chat_message | tool_message | message_item | call_item | output_item | reasoning_item, max_size=5
)

# The same keys with values of any JSON type, but for a dict where a list belongs: the peer walks its keys.
not_a_dict = scalar | st.lists(json_value, max_size=2)
junk_block = record(
    {}, type=json_value, text=json_value, id=json_value, name=json_value, input=json_value, content=json_value
)
junk_call = record({}, id=json_value, function=json_value | record({}, name=json_value, arguments=json_value))
junk_message = record(
    {},
    role=st.sampled_from(["assistant", "tool", "user"]) | json_value,
    type=st.sampled_from(["function_call", "function_call_output", "message"]) | json_value,
    content=json_value | st.lists(junk_block | json_value, max_size=2),
    tool_calls=not_a_dict | st.lists(junk_call, max_size=2),
    call_id=json_value,
    id=json_value,
    name=json_value,
    namespace=json_value,
    arguments=json_value,
    output=json_value,
    tool_call_id=json_value,
)


def hashes_agree(messages: list[Any]) -> None:
    agree(
        lambda: peer_fingerprint.assistant_fingerprint(messages),
        lambda: fingerprint.assistant_fingerprint(messages),
    )
    agree(
        lambda: peer_fingerprint.conversation_digest(messages),
        lambda: fingerprint.conversation_digest(messages),
    )


@settings(max_examples=300)
@given(realistic)
def test_both_hashes_of_realistic_messages_equal_the_peers(messages: list[Any]) -> None:
    hashes_agree(messages)


@settings(max_examples=300)
@given(st.lists(junk_message | json_value, max_size=3))
def test_both_hashes_of_malformed_messages_equal_the_peers_or_are_refused_by_both(
    messages: list[Any],
) -> None:
    hashes_agree(messages)


@settings(max_examples=200)
@given(arguments | text)
def test_canonical_tool_arguments_equal_the_peers(value: Any) -> None:
    agree(
        lambda: peer_fingerprint.canonicalize_tool_arguments(value),
        lambda: fingerprint.canonicalize_tool_arguments(value),
    )


@given(st.lists(st.integers(-1, 2**64 - 1), max_size=30))
def test_token_encodings_and_digests_equal_the_peers(ids: list[int]) -> None:
    agree(lambda: peer_records.encode_token_ids(ids), lambda: records.encode_token_ids(ids))
    agree(lambda: peer.compute_digest(ids), lambda: records.compute_digest(ids))


token_list = st.lists(st.integers(0, 9), max_size=2)
carrying = {
    "prompt_token_ids": st.none() | token_list,
    "generation_token_ids": st.none() | token_list,
    "generation_log_probs": st.none() | st.lists(st.floats(-9, 0), max_size=2),
    "routed_experts": st.none() | st.just([[1]]),
}
response_message = record({"role": st.just("assistant"), "content": content}, **carrying)
response_item = record(
    {"type": st.sampled_from(["message", "reasoning", "function_call"])}, content=content, **carrying
)
anthropic_block = record(
    {"type": st.sampled_from(["text", "thinking", "redacted_thinking", "tool_use"])},
    text=text,
    thinking=text,
    data=text,
    signature=text,
    id=text,
    input=json_value,
)
payload = (
    record(
        {
            "choices": st.lists(
                record({"message": st.none() | response_message}, index=st.just(0)), max_size=2
            )
        },
        id=text,
    )
    | record({"output": st.lists(response_item, max_size=3)}, id=text)
    | record(
        {"type": st.just("message"), "content": st.lists(anthropic_block | json_value, max_size=3)},
        role=st.just("assistant"),
        **carrying,
    )
    | record({}, output=json_value, choices=not_a_dict, type=json_value)
)


def shapes_agree(response: dict[str, Any]) -> None:
    for function in ("response_to_output_items", "extract_token_fields"):
        theirs, ours = getattr(peer_records, function), getattr(records, function)
        agree(partial(theirs, response), partial(ours, response), crash_is_refusal=False)


@settings(max_examples=300)
@given(payload)
def test_response_shapes_are_read_like_the_peer_reads_them(response: dict[str, Any]) -> None:
    shapes_agree(response)


TEXT = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    "response",
    [
        {"type": "message", "role": "assistant", "content": [TEXT]},
        {"type": "message", "content": [TEXT]},
        {"type": "message", "role": "user", "content": [TEXT]},
        {"type": "message", "role": "assistant", "content": ["a", 5, None, TEXT]},
        {"type": "message", "role": "assistant", "content": [{"type": "thinking"}, TEXT]},
        {"type": "message", "role": "assistant", "content": [{"type": "thinking", "thinking": ""}, TEXT]},
        {"type": "message", "role": "assistant", "content": [{"type": "redacted_thinking"}, TEXT]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "redacted_thinking", "data": ""}, TEXT],
        },
        {"output": [], "choices": [{"message": {"content": "a"}}]},
        {"output": [], "type": "message", "role": "assistant", "content": [TEXT]},
        {"choices": [], "type": "message", "role": "assistant", "content": [TEXT]},
        {"output": None, "choices": [{"message": {"content": "a"}}]},
        {"output": [5, None, {"type": "message"}]},
        {"choices": [{"message": {"role": "user", "type": "other"}}, {"message": []}, {"delta": {}}, None]},
        {"role": "assistant", "content": [TEXT]},
    ],
    ids=json.dumps,
)
def test_response_shapes_at_the_borders_are_read_like_the_peer_reads_them(response: dict[str, Any]) -> None:
    shapes_agree(response)


@settings(max_examples=200)
@given(st.lists(response_item, max_size=3))
def test_token_fields_are_stripped_like_the_peer_strips_them(items: list[dict[str, Any]]) -> None:
    agree(lambda: peer_records.strip_token_fields(items), lambda: records.strip_token_fields(items))


COMPLETE: dict[str, Any] = {
    "rollout_id": "r",
    "model_call_id": "c",
    "prompt_token_ids": [1],
    "generation_token_ids": [],
    "generation_log_probs": [],
}
entry_fields = st.fixed_dictionaries(
    {},
    optional={
        "schema_version": st.integers(0, 2),
        "generation_token_ids": token_list,
        "generation_log_probs": st.lists(st.floats(-9, 0), max_size=2),
        "token_item_index": st.none() | st.integers(-1, 2),
        "output_items": st.lists(st.just({"type": "message"}), max_size=2),
        "parent_call_id": st.none() | st.just("p"),
        "parent_resolution": st.none() | st.sampled_from(["root", "resolved", "unresolved", "other"]),
        "prompt_is_delta": st.booleans(),
        "x_unknown": json_value,
    },
)


@settings(max_examples=200)
@given(entry_fields)
def test_records_are_accepted_and_dumped_like_the_peers(fields: dict[str, Any]) -> None:
    complete = COMPLETE | fields
    agree(
        lambda: peer.TokenEntry.model_validate(complete).model_dump(mode="json"),
        lambda: records.TokenEntry.model_validate(complete).model_dump(mode="json"),
    )


def test_a_resolved_parent_with_an_empty_id_is_refused_as_the_peer_refuses_it() -> None:
    fields = {"parent_call_id": "", "parent_resolution": "resolved"}
    agree(
        lambda: peer.TokenEntry(**COMPLETE, **fields).model_dump(mode="json"),
        lambda: records.TokenEntry(**COMPLETE, **fields).model_dump(mode="json"),
    )


@settings(max_examples=50)
@given(st.integers(1, 4), st.integers(0, 2**32), st.sets(st.integers(0, 3)), st.integers(0, 5))
def test_requests_resolve_like_the_peers_matcher_resolves_them(
    turns: int, seed: int, twins: set[int], cut: int
) -> None:
    rollout = linear_rollout(turns, seed=seed)
    entries = [turn.entry for turn in rollout]
    for number in twins.intersection(range(turns)):
        entries.append(entries[number].model_copy(update={"model_call_id": f"{'ax'[number % 2]}-{number}"}))
    ours, theirs = lineage.RolloutLineage(), peer.RolloutLineage()
    for entry in entries:
        ours.add_entry(entry)
        theirs.add_entry(peer.TokenEntry.model_validate(entry.model_dump()))
    for turn in rollout:
        for request in (
            turn.request,
            turn.next_request(),
            turn.next_request()[min(cut, len(turn.request)) :],
        ):
            resolution, expected = ours.resolve(request), theirs.resolve(request)
            assert (resolution.status, resolution.reason) == (expected.status.value, expected.reason)
            assert (resolution.match is None) == (expected.match is None)
            if resolution.match is not None and expected.match is not None:
                for name in ("model_call_id", "cumulative_token_ids", "digest", "prev_len", "chain_hash"):
                    assert getattr(resolution.match, name) == getattr(expected.match, name)


@given(st.integers(1, 3), st.integers(0, 2**32))
def test_continuation_stamps_equal_the_peers(turns: int, seed: int) -> None:
    for turn in linear_rollout(turns, seed=seed):
        entry = peer.TokenEntry.model_validate(
            turn.entry.model_dump() | {"continuation_fingerprint": "", "fingerprint_version": None}
        )
        stamped = peer.stamp_continuation(entry, turn.request)
        assert stamped.model_dump(mode="json") == turn.entry.model_dump(mode="json")


@settings(max_examples=200)
@given(realistic, realistic)
def test_a_stamp_is_the_peers_unless_its_version_says_otherwise(
    request: list[Any], answer: list[Any]
) -> None:
    try:
        made = lineage.continuation_of(request, answer)
    except ValueError:
        with pytest.raises((ValueError, *CRASHES)):
            peer_fingerprint.conversation_digest([*request, *answer])
        return
    theirs = (
        peer_fingerprint.assistant_fingerprint([*request, *answer]),
        len(request),
        peer_fingerprint.conversation_digest(request),
    )
    ours = (made.fingerprint, made.context_len, made.context_digest)
    assert made.version in (2, 3)
    if made.version == 2:
        assert ours == theirs
    else:
        assert made.context_digest != theirs[2]
        assert made.fingerprint != theirs[0] or made.fingerprint == ""
