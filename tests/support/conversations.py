"""Conversations whose parents are asked for: calls, a request, and what it must resolve to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokencustody import TokenEntry, request_items, stamp_continuation, stamp_lineage

Items = list[dict[str, Any]]
Made = Callable[[str], dict[str, Any]]

CTX: Items = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


def user(text: Any, **fields: Any) -> dict[str, Any]:
    """Return what a user says."""
    return {"role": "user", "content": text, **fields}


def said(text: Any, **fields: Any) -> dict[str, Any]:
    """Return what the model says, in the Chat dialect."""
    return {"role": "assistant", "content": text, **fields}


def called(arguments: Any, call_id: str = "k") -> dict[str, Any]:
    """Return a message of the model that calls a tool, in the Chat dialect."""
    function = {"name": "f", "arguments": arguments}
    return said("", tool_calls=[{"id": call_id, "type": "function", "function": function}])


def result(output: Any, call_id: str = "k", **fields: Any) -> dict[str, Any]:
    """Return a tool's result, in the Chat dialect."""
    return {"role": "tool", "tool_call_id": call_id, "content": output, **fields}


@dataclass(frozen=True)
class Call:
    """A call that was captured. Its sequence follows from `tokens`."""

    call_id: str
    request: Items
    output: Items
    tokens: tuple[int, ...] = (1, 2, 3)
    fields: dict[str, Any] = field(default_factory=dict)

    def entry(self, rollout_id: str = "rollout-1") -> TokenEntry:
        """Return its complete record, stamped."""
        *prompt, last = self.tokens
        made = TokenEntry(
            rollout_id=rollout_id,
            model_call_id=self.call_id,
            prompt_token_ids=prompt,
            generation_token_ids=[last],
            generation_log_probs=[-0.5],
            output_items=copy.deepcopy(self.output),
        )
        stamped = stamp_continuation(stamp_lineage(made, None), copy.deepcopy(self.request))
        return stamped.model_copy(update=self.fields)


@dataclass(frozen=True)
class Asked:
    """A request after some calls, and the call it must resolve to or the reason why there is none."""

    name: str
    calls: list[Call]
    request: Items
    expected: str


FIRST = Call("call-1", CTX, [called("{}")])
TURN_2: Items = [*CTX, called("{}"), result("files")]
SHOT: Items = [user("2+2?"), said("4"), user("3+3?")]

EMPTY_ANSWERS: dict[str, Items] = {
    "no items": [],
    "an empty text": [said("")],
    "no text": [said(None)],
    "an empty list": [said([])],
    "empty parts": [said([{"type": "output_text", "text": ""}, ""])],
    "no tool calls": [said("", tool_calls=[])],
    "only thinking (Chat)": [said(None, reasoning_content="hm")],
    "only thinking (Responses)": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}],
    "an empty message item": [{"type": "message", "role": "assistant", "content": []}],
}


def _empty_answers() -> list[Asked]:
    asked = []
    for what, answer in EMPTY_ANSWERS.items():
        empty = Call("call-2", TURN_2, answer, (1, 2, 3, 4))
        again, go_on = list(TURN_2), [*TURN_2, user("go on")]
        few_shot = Call("call-1", SHOT, answer)
        asked += [
            Asked(f"{what}: the same request again", [FIRST, empty], again, "call-1"),
            Asked(f"{what}: the same request again, the parent lost", [empty], again, "no_match"),
            Asked(f"{what}: left out of the next request, the parent lost", [empty], go_on, "no_match"),
            Asked(f"{what}: left out of the next request", [FIRST, empty], go_on, "ambiguous"),
            Asked(f"{what}: kept in the next request", [empty], [*TURN_2, said(""), user("go on")], "call-2"),
            Asked(f"{what}: a prompt with examples again", [few_shot], SHOT, "no_match"),
            Asked(f"{what}: a prompt with examples goes on", [few_shot], [*SHOT, user("?")], "no_match"),
        ]
    return asked


HELLO: Items = [said("hello")]
AFTER_HELLO: Items = [*CTX, *HELLO, user("next")]
OTHER: Items = [said("other")]


def _conflicts() -> list[Asked]:
    twin = Call("call-b", CTX, HELLO, (1, 2, 3))
    same, more = Call("call-a", CTX, HELLO, (1, 2, 3)), Call("call-a", CTX, HELLO, (1, 2, 9))
    renamed = Call("call-a", CTX, HELLO, (1, 2, 3), {"model": "other"})
    elsewhere = Call("call-a", CTX, OTHER, (1, 2, 8))
    return [
        Asked("a conflict alone", [same, more], AFTER_HELLO, "no_match"),
        Asked("a conflict and its equal twin", [same, more, twin], AFTER_HELLO, "ambiguous"),
        Asked(
            "a conflict of another field and its equal twin", [twin, same, renamed], AFTER_HELLO, "ambiguous"
        ),
        Asked(
            "a conflict whose second payload is the twin's", [elsewhere, more, twin], AFTER_HELLO, "ambiguous"
        ),
        Asked("a conflict whose second payload alone matches", [elsewhere, same], AFTER_HELLO, "no_match"),
        Asked(
            "a conflict of another answer",
            [Call("call-c", CTX, OTHER), elsewhere, more],
            AFTER_HELLO,
            "no_match",
        ),
        Asked(
            "a conflict elsewhere",
            [elsewhere, Call("call-a", CTX, OTHER, (7, 7)), twin],
            AFTER_HELLO,
            "call-b",
        ),
    ]


ENVELOPE = request_items({"messages": [user("u")], "instructions": "Be brief."})[0]


def _nothing_asked() -> list[Asked]:
    asked = []
    for what, context in (("no items", []), ("only an envelope", [ENVELOPE])):
        unknown = Call("call-2", context, HELLO, (1, 2, 9))
        answered: Items = [*context, *HELLO, user("next")]
        known: Items = [*context, user("u")]
        asked += [
            Asked(f"{what} asked, and the answer opens the next request", [unknown], answered, "no_match"),
            Asked(
                f"{what} asked, and a question opens it", [unknown], [*known, *HELLO, user("n")], "no_match"
            ),
            Asked(
                f"{what} asked, beside a question with the same answer",
                [unknown, Call("call-1", known, HELLO)],
                [*known, *HELLO, user("n")],
                "ambiguous",
            ),
        ]
    return asked


def _inserted() -> list[Asked]:
    call = Call("call-1", CTX, HELLO)
    return [
        Asked(
            "an item put before the answer", [call], [*CTX, user("inserted"), *AFTER_HELLO[2:]], "no_match"
        ),
        Asked(
            "thinking before the answer",
            [call],
            [*CTX, {"type": "reasoning", "summary": []}, *AFTER_HELLO[2:]],
            "call-1",
        ),
    ]


# What version 2 hashes nothing of, made of one value that is content.
AUTHORED: dict[str, Made] = {
    "custom_tool_call": lambda v: {"type": "custom_tool_call", "call_id": "k", "name": "patch", "input": v},
    "local_shell_call": lambda v: {"type": "local_shell_call", "call_id": "k", "action": {"command": [v]}},
    "shell_call": lambda v: {"type": "shell_call", "call_id": "k", "action": {"commands": [v]}},
    "apply_patch_call": lambda v: {"type": "apply_patch_call", "call_id": "k", "operation": {"diff": v}},
    "computer_call": lambda v: {
        "type": "computer_call",
        "call_id": "k",
        "action": {"type": "type", "text": v},
    },
    "mcp_call": lambda v: {"type": "mcp_call", "id": "m", "name": "x", "arguments": v, "output": "o"},
    "web_search_call": lambda v: {"type": "web_search_call", "id": "m", "action": {"query": v}},
    "file_search_call": lambda v: {"type": "file_search_call", "id": "m", "queries": [v]},
    "code_interpreter_call": lambda v: {"type": "code_interpreter_call", "id": "m", "code": v},
    "image_generation_call": lambda v: {"type": "image_generation_call", "id": "m", "result": v},
    "an image_generation_call by its id": lambda v: {"type": "image_generation_call", "id": v},
    "an mcp_approval_request by its id": lambda v: {"type": "mcp_approval_request", "id": v, "name": "f"},
    "an unknown type": lambda v: {"type": "telepathy_call", "thought": v},
    "function_call of a message": lambda v: said(None, function_call={"name": "f", "arguments": v}),
    "a custom tool of Chat": lambda v: said(
        None, tool_calls=[{"id": "k", "type": "custom", "custom": {"input": v}}]
    ),
    "refusal of a message": lambda v: said(None, refusal=v),
}
CONTEXT: dict[str, Made] = {
    "custom_tool_call_output": lambda v: {"type": "custom_tool_call_output", "call_id": "k", "output": v},
    "local_shell_call_output": lambda v: {"type": "local_shell_call_output", "id": "k", "output": v},
    "the id of a local_shell_call_output": lambda v: {
        "type": "local_shell_call_output",
        "id": v,
        "output": "o",
    },
    "shell_call_output": lambda v: {"type": "shell_call_output", "call_id": "k", "output": [{"stdout": v}]},
    "apply_patch_call_output": lambda v: {"type": "apply_patch_call_output", "call_id": "k", "output": v},
    "computer_call_output": lambda v: {
        "type": "computer_call_output",
        "call_id": "k",
        "output": {"image_url": v},
    },
    "compaction": lambda v: {"type": "compaction", "encrypted_content": v},
    "item_reference": lambda v: {"type": "item_reference", "id": v},
    "a user's name": lambda v: user("hi", name=v),
    "a tool's name": lambda v: result("r", name=v),
    "a field of a text": lambda v: user([{"type": "text", "text": "hi", "citations": [v]}]),
    "a field of a function_call_output": lambda v: {
        "type": "function_call_output",
        "call_id": "k",
        "output": "r",
        "name": v,
    },
    "is_error": lambda v: user(
        [{"type": "tool_result", "tool_use_id": "k", "content": "r", "is_error": v == "x"}]
    ),
    **AUTHORED,
}


def _unhashed_by_version_2() -> list[Asked]:
    asked = []
    for what, made in CONTEXT.items():
        request: Items = [*CTX, said("a"), made("x")]
        calls = [Call("call-1", CTX, [said("a")]), Call("call-2", request, [said("b")], (1, 2, 3, 4))]
        same, edited = [*request, said("b"), user("n")], [*CTX, said("a"), made("y"), said("b"), user("n")]
        asked += [
            Asked(f"{what} in the context", calls, same, "call-2"),
            Asked(f"{what}, edited in the context", calls, edited, "no_match"),
        ]
    for what, made in AUTHORED.items():
        alone = Call("call-1", CTX, [made("x")])
        beside = Call("call-1", CTX, [said("Editing."), made("x")])
        asked += [
            Asked(f"{what} alone", [alone], [*CTX, made("x"), user("n")], "call-1"),
            Asked(f"{what} of another answer", [alone], [*CTX, made("y"), user("n")], "no_match"),
            Asked(f"{what} after a text", [beside], [*CTX, said("Editing."), made("x"), user("n")], "call-1"),
            Asked(
                f"{what} of another answer with the same text",
                [beside],
                [*CTX, said("Editing."), made("y"), user("n")],
                "no_match",
            ),
            Asked(
                f"{what}, and a later item that version 2 leaves out",
                [Call("call-1", CTX, HELLO)],
                [*CTX, *HELLO, user("hi", name="x")],
                "call-1",
            ),
        ]
    return asked


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
MARK = {"cache_control": {"type": "ephemeral"}}
THINKING = {"type": "thinking", "thinking": "hm", "signature": "x"}
TEXT, USE = {"type": "text", "text": "hi"}, {"type": "tool_use", "id": "k", "name": "f", "input": {}}
ANSWER: Items = [
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
    {"type": "message", "role": "assistant", "content": [TEXT, USE]},
]


def _tool_result(content: Any, **fields: Any) -> dict[str, Any]:
    return user([{"type": "tool_result", "tool_use_id": "k", "content": content, **fields}])


def _dialects() -> list[Asked]:
    ok: Items = [said("ok")]
    parts = [{"type": "text", "text": "r"}]
    marked = [{"type": "text", "text": "r", **MARK}]

    def context(name: str, before: Items, after: Items) -> Asked:
        return Asked(name, [Call("call-1", before, ok)], [*after, *ok, user("n")], "call-1")

    def echo(name: str, answer: Items, echoed: Items) -> Asked:
        return Asked(name, [Call("call-1", CTX, answer)], [*CTX, *echoed, user("n")], "call-1")

    second: Items = [user("u"), said([THINKING, TEXT, USE]), _tool_result("files")]
    return [
        context("a cache mark leaves an image", [user([{**IMAGE, **MARK}])], [user([IMAGE])]),
        context("a cache mark comes to an image", [user([IMAGE])], [user([{**IMAGE, **MARK}])]),
        context(
            "a cache mark leaves a tool result",
            [user("u"), _tool_result("r", **MARK)],
            [user("u"), _tool_result("r")],
        ),
        context(
            "a cache mark leaves the parts of a tool result", [_tool_result(marked)], [_tool_result(parts)]
        ),
        context("a cache mark leaves the parts of a tool message", [result(marked)], [result("r")]),
        context("a tool message as text and as parts", [result("r")], [result(parts)]),
        context("a tool result as text and as parts", [_tool_result("r")], [_tool_result(parts)]),
        context(
            "a function_call_output as text and as parts",
            [{"type": "function_call_output", "call_id": "k", "output": "r"}],
            [
                {
                    "type": "function_call_output",
                    "call_id": "k",
                    "output": [{"type": "input_text", "text": "r"}],
                }
            ],
        ),
        echo("thinking echoed", ANSWER, [said([THINKING, TEXT, USE])]),
        echo(
            "redacted thinking echoed",
            ANSWER,
            [said([{"type": "redacted_thinking", "data": "q"}, TEXT, USE])],
        ),
        echo("thinking left out", ANSWER, [said([TEXT, USE])]),
        Asked(
            "a tool result as parts, and no arguments echoed as an object",
            [Call("call-1", [user("u"), called("{}"), result("r")], [called("")])],
            [user("u"), called("{}"), result(parts), called("{}"), result("r")],
            "call-1",
        ),
        echo("no arguments echoed as an object", [called("")], [called("{}")]),
        echo("null arguments echoed as an object", [called(None)], [called({})]),
        echo(
            "an empty object of arguments beside none",
            [called("{}", "a"), called("", "b")],
            [called("{}", "a"), called("", "b")],
        ),
        Asked(
            "thinking echoed in each turn",
            [Call("call-1", [user("u")], ANSWER), Call("call-2", second, ANSWER, (1, 2, 3, 4))],
            [*second, said([THINKING, TEXT, USE]), _tool_result("more")],
            "call-2",
        ),
    ]


def _other_content() -> list[Asked]:
    text = {"type": "text", "text": "r"}
    cited, output = {**text, "citations": [{"doc": "d"}]}, {"type": "function_call_output", "call_id": "k"}
    patched = {"type": "apply_patch_call_output", "call_id": "k"}
    thought, other = (said([{**THINKING, "thinking": t}, TEXT]) for t in ("hm", "other"))
    unhashed, unthought = user("u", name="bob"), said([TEXT])
    asked = []
    for what, opening, first, second in (
        ("a tool message, and its text with citations", user("u"), result("r"), result([cited])),
        ("a tool result, and its text with citations", user("u"), _tool_result("r"), _tool_result([cited])),
        (
            "a function_call_output, and its text with citations",
            user("u"),
            {**output, "output": "r"},
            {**output, "output": [cited]},
        ),
        (
            "a source in a marked tool message",
            user("u"),
            result([{**text, **MARK}]),
            result([{**text, "source": "s"}]),
        ),
        (
            "a source in a marked tool result",
            user("u"),
            _tool_result([{**text, **MARK, "source": "s"}]),
            _tool_result([{**text, "source": "t"}]),
        ),
        (
            "a patch that failed",
            user("u"),
            {**patched, "status": "completed"},
            {**patched, "status": "failed"},
        ),
        ("older thinking", user("u"), thought, other),
        ("older thinking left out", user("u"), thought, unthought),
        ("older thinking beside what version 2 leaves out", unhashed, thought, other),
        ("older thinking left out, beside what version 2 leaves out", unhashed, thought, unthought),
    ):
        for name, before, after in ((what, first, second), (f"{what}, the other way round", second, first)):
            context: Items = [opening, before, user("go on")]
            call = Call("call-1", context, HELLO)
            changed: Items = [opening, after, user("go on")]
            asked += [
                Asked(f"{name}: the same", [call], [*context, *HELLO, user("n")], "call-1"),
                Asked(f"{name}: another", [call], [*changed, *HELLO, user("n")], "no_match"),
            ]
    for what, made in (("tool message", result), ("tool result", _tool_result)):
        failed: Items = [user("u"), made("r", status="error")]
        worked: Items = [user("u"), made("r", status="success")]
        asked += [
            Asked(
                f"a {what} that failed, and then worked",
                [Call("call-1", failed, HELLO)],
                [*worked, *HELLO],
                "no_match",
            ),
            Asked(
                f"a {what} that worked, and then failed",
                [Call("call-1", worked, HELLO)],
                [*failed, *HELLO],
                "unhashed_items",
            ),
        ]
    for what, opening in (("", user("u")), (", beside what version 2 leaves out", unhashed)):
        call = Call("call-1", [opening], [thought])
        asked += [
            Asked(f"thinking of the answer{what}", [call], [opening, thought, user("n")], "call-1"),
            Asked(f"other thinking of the answer{what}", [call], [opening, other, user("n")], "no_match"),
            Asked(
                f"thinking echoed{what}",
                [Call("call-1", [opening, thought, user("v")], ANSWER)],
                [opening, thought, user("v"), said([THINKING, TEXT, USE]), _tool_result("files")],
                "call-1",
            ),
        ]
    return asked


ODD_ARGUMENTS = {
    "a lone surrogate, escaped": '{"t":"\\ud83d"}',
    "an integer of 22 digits": f'{{"n": {2**70}}}',
    "2 to the 64": f'{{"n":{2**64}}}',
    "below 64 bits": f'{{"n":{-(2**63) - 1}}}',
    "an integer of 5000 digits": '{"n":' + "9" * 5000 + "}",
    "300 levels": '{"a":' + "[" * 300 + "]" * 300 + "}",
    "2000 levels": "[" * 2000 + "]" * 2000,
    "a huge exponent": '{"n":1e400}',
    "NaN": '{"n":NaN}',
    "a key twice": '{"a":1,"a":2}',
    "not JSON": '{"a":1}}',
}


def _odd_arguments() -> list[Asked]:
    return [
        Asked(
            f"arguments: {what}",
            [Call("call-1", CTX, [called(text)])],
            [*CTX, called(text), result("r")],
            "call-1",
        )
        for what, text in ODD_ARGUMENTS.items()
    ]


UNHASHED_BY_VERSION_2 = _unhashed_by_version_2()
DIALECTS = _dialects()
SCENARIOS = [
    *_empty_answers(),
    *_conflicts(),
    *_nothing_asked(),
    *_inserted(),
    *UNHASHED_BY_VERSION_2,
    *DIALECTS,
    *_other_content(),
    *_odd_arguments(),
]
