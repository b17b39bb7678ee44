"""Values that nobody sends on purpose: of every JSON type, and of types that only look like one."""

from __future__ import annotations

import enum
import importlib
import random
from collections import OrderedDict, UserDict
from collections.abc import Callable
from decimal import Decimal
from types import MappingProxyType
from typing import Any


class _Text(str):
    __slots__ = ()


class _Int(int):
    pass


class _Float(float):
    pass


class _Color(enum.StrEnum):
    RED = "red"


class _Mode(str, enum.Enum):  # noqa: UP042 - its text is not its value
    TEXT = "text"


class _Number(enum.IntEnum):
    ONE = 1


_TEXTS = (
    "",
    " ",
    "assistant",
    "user",
    "tool",
    "function_call",
    "text",
    "resolved",
    "token_in",
    "null",
    "NaN",
    '{"a":1}',
    "[" * 5000,
    "9" * 5000,
    "\0",
    "\ud800",
    "\U0001f600",
    "é" * 600,
    "0" * 64,
    "a/b",
    "../..",
    "x" * 70_000,
)
_INTS = (
    0,
    1,
    -1,
    2**16,
    2**31,
    2**32,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    -(2**63) - 1,
    10**400,
    1 << 20_000,
)
_FLOATS = (0.0, -0.0, 1.0, 0.5, -1.5, 1e39, 1e308, 5e-324, float("nan"), float("inf"), float("-inf"))
_KEYS = (
    "role",
    "content",
    "type",
    "text",
    "id",
    "name",
    "tool_calls",
    "function",
    "arguments",
    "input",
    "output",
    "call_id",
    "tool_call_id",
    "tool_use_id",
    "namespace",
    "prompt_token_ids",
    "",
    "a",
    "\0",
)
_TYPES = (
    "function_call",
    "function_call_output",
    "tool_use",
    "tool_result",
    "thinking",
    "redacted_thinking",
    "message",
    "reasoning",
    "text",
    "output_text",
    "image",
)


def nested(depth: int, kind: Callable[[Any], Any]) -> Any:
    """Return a value with `depth` levels."""
    value: Any = None
    for _ in range(depth):
        value = kind(value)
    return value


def _cyclic_list(_rng: random.Random) -> Any:
    value: list[Any] = [1]
    value += [value, value]
    return value


def _cyclic_dict(_rng: random.Random) -> Any:
    value: dict[str, Any] = {}
    value["content"] = [value]
    value["a"] = value
    return value


def _deep(rng: random.Random) -> Any:
    kind = rng.choice((lambda v: [v], lambda v: {"a": v}, lambda v: {"content": [v]}))
    return nested(rng.choice((200, 249, 250, 251, 255, 300, 990, 1100, 30_000)), kind)


def _odd(rng: random.Random) -> Any:
    makers: tuple[Callable[[], Any], ...] = (
        lambda: _Text("user"),
        lambda: _Int(7),
        lambda: _Float(0.5),
        lambda: _Color.RED,
        lambda: _Mode.TEXT,
        lambda: _Number.ONE,
        lambda: (1, 2),
        lambda: {1, 2},
        lambda: b"bytes",
        lambda: bytearray(b"bytes"),
        lambda: range(3),
        lambda: iter([1, 2]),
        lambda: (each for each in (1, 2)),
        lambda: Decimal("1.5"),
        lambda: 1j,
        lambda: object(),
        lambda: print,
        lambda: int,
        lambda: ...,
        lambda: memoryview(b"12"),
        lambda: UserDict({"role": "assistant"}),
        lambda: MappingProxyType({"role": "assistant"}),
        lambda: OrderedDict(role="assistant", content="x"),
        lambda: {1: "one"},
        lambda: {None: 1, (1, 2): 2},
        lambda: {float("nan"): 1},
        lambda: {_Text("role"): "user"},
        *_numpy_makers(),
    )
    return rng.choice(makers)()


def _numpy_makers() -> tuple[Callable[[], Any], ...]:
    try:
        np: Any = importlib.import_module("numpy")
    except ImportError:
        return ()
    return (
        lambda: np.int64(7),
        lambda: np.float64(-0.5),
        lambda: np.float32(-0.5),
        lambda: np.bool_(True),
        lambda: np.str_("user"),
        lambda: np.arange(3),
        lambda: np.array(["assistant"]),
        lambda: [np.int32(1), np.int32(2)],
    )


def hostile(rng: random.Random, *, plain: bool = False, depth: int = 3) -> Any:
    """Return some value; a `plain` one is what JSON text can bring."""
    kind = rng.randrange(12 if plain else 15)
    if depth and kind < 3:
        return [hostile(rng, plain=plain, depth=depth - 1) for _ in range(rng.randint(0, 3))]
    if depth and kind < 6:
        return _object(rng, plain, depth)
    if kind < 8:
        text = rng.choice(_TEXTS)
        return "\\ud800" if plain and text == "\ud800" else text
    if kind == 8:
        return rng.choice(_INTS)
    if kind == 9:
        return rng.choice(_FLOATS)
    if kind == 10:
        return rng.choice((None, True, False))
    if kind == 11:
        return _deep(rng) if rng.random() < 0.3 else rng.randrange(-5, 300)
    if kind == 12:
        return rng.choice((_cyclic_list, _cyclic_dict))(rng)
    return _odd(rng)


def _object(rng: random.Random, plain: bool, depth: int) -> dict[str, Any]:
    made = {rng.choice(_KEYS): hostile(rng, plain=plain, depth=depth - 1) for _ in range(rng.randint(0, 4))}
    if rng.random() < 0.5:
        made["type"] = rng.choice(_TYPES)
    if not plain and rng.random() < 0.05:
        made["\ud800"] = 1
    return made


def messages(rng: random.Random) -> list[Any]:
    """Return a conversation in which each message has something wrong, or nothing."""
    return [_message(rng) for _ in range(rng.randint(0, 4))]


def _message(rng: random.Random) -> Any:
    if rng.random() < 0.1:
        return hostile(rng)
    made: dict[str, Any] = {"role": rng.choice(("user", "assistant", "tool", "system")), "content": "hello"}
    for _ in range(rng.randint(0, 3)):
        made[rng.choice(_KEYS)] = hostile(rng)
    if rng.random() < 0.3:
        made["type"] = rng.choice(_TYPES)
    if rng.random() < 0.3:
        made["content"] = [_object(rng, False, 2) for _ in range(rng.randint(0, 3))]
    if rng.random() < 0.3:
        function = {"name": hostile(rng), "arguments": hostile(rng)}
        made["tool_calls"] = [{"id": hostile(rng), "function": function}]
    return made
