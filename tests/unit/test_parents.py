"""What continues which call, held in memory. `tests/store/test_parents.py` asks both databases the same."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.conversations import (
    AUTHORED,
    CTX,
    SCENARIOS,
    Asked,
    Call,
    called,
    result,
    said,
    user,
)
from tokencustody.bodies import request_items
from tokencustody.errors import InvalidRecordError, LoneSurrogateError
from tokencustody.fingerprint import assistant_fingerprint, canonicalize_tool_arguments, conversation_digest
from tokencustody.lineage import Continuation, RolloutLineage, continuation_of

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("asked", SCENARIOS, ids=lambda asked: asked.name)
def test_a_request_resolves_to_the_proven_call_alone(asked: Asked) -> None:
    lineage = RolloutLineage()
    for call in asked.calls:
        lineage.add_entry(call.entry())
    request = copy.deepcopy(asked.request)
    found = lineage.resolve(request)
    assert (found.match.model_call_id if found.match else found.reason) == asked.expected
    assert request == asked.request


@pytest.mark.parametrize(
    ("request_items", "answer"),
    [
        (CTX, [said("a")]),
        ([*CTX, called("{}"), result("r")], [called(f'{{"n":{2**70}}}')]),
        ([user([{"type": "image_url", "image_url": "u"}])], [said([{"type": "thinking", "thinking": "t"}])]),
        (
            [result([{"type": "text", "text": "r"}])],
            [{"type": "reasoning", "summary": []}, said("a", id="m")],
        ),
        ([user("u", id="m", status="completed", name=None)], [said("a", reasoning_content="t", name="")]),
        (
            [user([{"type": "tool_result", "tool_use_id": "k", "content": "r", "is_error": False}])],
            [said("a")],
        ),
        ([user("u")], [said("a"), {"type": "shell_call_output", "call_id": "k", "output": "o"}]),
    ],
)
def test_what_version_2_covers_is_stamped_with_version_2(
    request_items: list[dict[str, Any]], answer: list[dict[str, Any]]
) -> None:
    assert continuation_of(request_items, answer) == Continuation(
        assistant_fingerprint([*request_items, *answer]),
        len(request_items),
        conversation_digest(request_items),
        2,
    )


@pytest.mark.parametrize("made", AUTHORED.values(), ids=AUTHORED)
def test_what_version_2_leaves_out_is_stamped_with_version_3(made: Any) -> None:
    noisy = made("x") | {"status": "in_progress"}
    stamp = continuation_of(CTX, [made("x")])
    assert stamp.version == 3
    assert stamp.fingerprint
    assert stamp == continuation_of(CTX, [noisy])
    assert stamp.fingerprint != continuation_of(CTX, [made("y")]).fingerprint
    context = continuation_of([*CTX, made("x")], [said("a")])
    assert context.version == 3
    assert context.context_digest != continuation_of([*CTX, made("y")], [said("a")]).context_digest


@pytest.mark.parametrize(
    "asked",
    [
        {"input": "What is 2+2?"},
        {"input": []},
        {"messages": []},
        {"messages": [], "system": "Be brief."},
        {"prompt": "What is 2+2?"},
        {"prompt": [1, 2, 3]},
        {"input": [user("go on")], "previous_response_id": "resp_1"},
        {"input": [user("go on")], "conversation": "conv_1"},
        {"input": [user("go on")], "conversation": {"id": "conv_1"}},
        {"input": [user("go on")], "prompt": {"id": "pmpt_1", "variables": {"city": "Rome"}}},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "envelope",
    [{}, {"instructions": "Be brief."}, {"tools": [{"type": "function", "name": "f"}]}],
    ids=["bare", "instructions", "tools"],
)
def test_a_body_that_does_not_say_what_was_asked_has_no_items(
    asked: dict[str, Any], envelope: dict[str, Any]
) -> None:
    assert request_items({**envelope, **asked}) == []


def stamped_by_gym(call: Call) -> Any:
    entry = call.entry()
    entry.continuation_fingerprint = assistant_fingerprint([*call.request, *call.output])
    entry.continuation_context_digest = conversation_digest(call.request)
    entry.fingerprint_version = 2
    return entry


@pytest.mark.parametrize("made", AUTHORED.values(), ids=AUTHORED)
def test_a_version_2_stamp_proves_nothing_of_items_that_it_leaves_out(made: Any) -> None:
    lineage = RolloutLineage()
    lineage.add_entry(stamped_by_gym(Call("call-1", CTX, [made("x")])))
    lineage.add_entry(stamped_by_gym(Call("call-2", [*CTX, said("a"), made("x")], [said("b")])))
    for request in (
        [*CTX, made("x"), user("n")],
        [*CTX, said("a"), made("x"), said("b"), user("n")],
        [*CTX, said("a"), made("y"), said("b"), user("n")],
    ):
        assert lineage.resolve(request).reason == "unhashed_items"


def test_a_version_2_twin_of_a_version_3_call_makes_it_ambiguous() -> None:
    answer = [AUTHORED["custom_tool_call"]("x")]
    lineage = RolloutLineage()
    lineage.add_entry(Call("call-1", CTX, answer).entry())
    request = [*CTX, *answer, user("n")]
    assert lineage.resolve(request).status == "resolved"
    lineage.add_entry(stamped_by_gym(Call("call-2", CTX, answer, (1, 2, 9))))
    assert lineage.resolve(request).reason == "ambiguous"


def test_an_answer_of_other_thinking_is_known_by_its_own_words_first() -> None:
    thinking = [
        said([{"type": "thinking", "thinking": text}, {"type": "text", "text": "a"}]) for text in "xy"
    ]
    lineage = RolloutLineage()
    for number, answer in enumerate(thinking):
        lineage.add_entry(Call(f"call-{number}", CTX, [answer], (1, 2, number)).entry())
    for number, answer in enumerate(thinking):
        match = lineage.resolve([*CTX, answer, user("n")]).match
        assert match is not None
        assert match.model_call_id == f"call-{number}"


@pytest.mark.parametrize(
    ("value", "canonical"),
    [
        (f' {{"n": {2**64}}} ', f'{{"n": {2**64}}}'),
        ('{"b":"\\ud83d", "a":1}', '{"b":"\\ud83d", "a":1}'),
        ({"n": 2**64, "a": "\ud83d"}, '{"a":"\\ud83d","n":18446744073709551616}'),
        ("[" * 3000, "[" * 3000),
    ],
    ids=["integer", "surrogate", "object", "depth"],
)
def test_arguments_that_orjson_cannot_print_are_their_own_text(value: Any, canonical: str) -> None:
    assert canonicalize_tool_arguments(value) == canonical


LONE = "x\ud83d"


@pytest.mark.parametrize("wrap", [lambda value: [value], lambda value: {"in": value}], ids=["list", "object"])
@pytest.mark.parametrize("kind", ["holds itself", "holds one object many times", "is nested deeply"])
def test_a_lone_surrogate_is_looked_for_once_in_each_object(kind: str, wrap: Callable[[Any], Any]) -> None:
    held: Any = wrap(None)
    if kind == "holds itself":
        held = [held, held]
        held.append(wrap(held))
    for _ in range({"holds itself": 0, "holds one object many times": 60, "is nested deeply": 20_000}[kind]):
        held = wrap([held, held])
    with pytest.raises(LoneSurrogateError, match=r"^request_items\[0\]\.call_id: "):
        continuation_of([{"role": "tool", "name": held, "call_id": LONE, "tool_call_id": LONE}], [said("a")])


@pytest.mark.parametrize(
    ("item", "place"),
    [
        (user(LONE), "content"),
        (user([{"type": "text", "text": "a"}, {"type": "text", "text": LONE}]), "content[1].text"),
        (result("r", LONE), "tool_call_id"),
        (result(LONE), "content"),
        (said("", tool_calls=[{"id": LONE, "function": {"name": "f"}}]), "tool_calls[0].id"),
        (said("", tool_calls=[{"id": "k", "function": {"name": LONE}}]), "tool_calls[0].function.name"),
        ({"type": "function_call_output", "call_id": "k", "output": LONE}, "output"),
        ({"type": "function_call", "call_id": "k", "name": LONE, "arguments": "{}"}, "name"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_lone_surrogate_is_named_with_its_place_and_resolves_to_nothing(
    item: dict[str, Any], place: str
) -> None:
    with pytest.raises(LoneSurrogateError) as request:
        continuation_of([*CTX, item], [said("a")])
    assert str(request.value).startswith(f"request_items[2].{place}: a lone surrogate")
    call = Call("call-1", CTX, [said("a")])
    lineage = RolloutLineage()
    lineage.add_entry(call.entry())
    assert lineage.resolve([*CTX, item, said("a"), user("n")]).reason in ("unhashed_items", "no_match")
    if item.get("role") == "assistant" or item.get("type") == "function_call":
        with pytest.raises(LoneSurrogateError, match=r"^output_items\[0\]\.") as output:
            Call("call-1", CTX, [item]).entry()
        assert place in str(output.value)
        assert lineage.resolve([*CTX, item, user("n")]).reason == "unhashed_items"


def test_items_of_no_known_shape_are_named() -> None:
    with pytest.raises(InvalidRecordError, match=r"^request_items\[2\]: message content must be"):
        continuation_of([*CTX, user(5)], [])
    with pytest.raises(InvalidRecordError, match=r"^response_items\[1\] must be an object, not str"):
        continuation_of(CTX, [said("a"), "text"])  # type: ignore[list-item]
