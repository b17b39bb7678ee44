"""The two conversation hashes (fingerprint version 2) that find a call's parent among its rollout's calls.

Both read message lists in the Chat, Responses and Anthropic dialects and hash the same turn to the same value
in each. A hashed field is one tag byte, the UTF-8 length as 64 bits big-endian, and the UTF-8 bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import orjson

FINGERPRINT_VERSION = 2
ASSISTANT_DOMAIN = b"nemo-gym-lineage"
CONTEXT_DOMAIN = b"nemo-gym-lineage-context"

_TAGS = [bytes((tag,)) for tag in range(8)]
_TEXT_TYPES = ("", "text", "input_text", "output_text")


def assistant_fingerprint(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the SHA-256 (hex) of the model-authored items alone, or "" when there are none.

    Raises ValueError for a message that is not an object or has content of no known shape.
    """
    hasher = _FieldHasher(ASSISTANT_DOMAIN)
    authored = False
    for message in messages:
        _require_object(message)
        if message.get("role") != "assistant" and message.get("type") != "function_call":
            continue
        authored = True
        for kind, payload in _content_parts(message.get("content")):
            hasher.add(0, kind)
            hasher.add(1, payload)
        if _is_plain(message):
            continue
        for call_id, name, arguments in _tool_calls(message):
            hasher.add(2, call_id)
            hasher.add(3, name)
            hasher.add(4, arguments)
    return hasher.hexdigest() if authored else ""


def conversation_digest(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the SHA-256 (hex) of every item: roles, content, tool calls and tool results, in order.

    Raises ValueError for a message that is not an object or has content of no known shape.
    """
    return prefix_digests(messages, {len(messages)})[len(messages)]


def prefix_digests(messages: Sequence[Mapping[str, Any]], lengths: Collection[int]) -> dict[int, str]:
    """Return the `conversation_digest` of the first n items for each n of `lengths`, in one pass.

    Raises ValueError as `conversation_digest` for the items it reads; a length beyond the items has no digest.
    """
    hasher = _FieldHasher(CONTEXT_DOMAIN)
    digests = {0: hasher.hexdigest()} if 0 in lengths else {}
    for length, message in enumerate(messages[: max(lengths, default=0)], start=1):
        _require_object(message)
        hasher.add(0, _text(message.get("role") or message.get("type")))
        for kind, payload in _content_parts(message.get("content")):
            hasher.add(1, kind)
            hasher.add(2, payload)
        if not _is_plain(message):
            for call_id, name, arguments in _tool_calls(message):
                hasher.add(3, call_id)
                hasher.add(4, name)
                hasher.add(5, arguments)
            for call_id, output in _tool_results(message):
                hasher.add(6, call_id)
                hasher.add(7, output)
        if length in lengths:
            digests[length] = hasher.hexdigest()
    return digests


def canonicalize_tool_arguments(value: Any) -> str:
    """Return tool arguments as canonical JSON: None is "", a string that is not JSON is itself without margins."""
    if value is None:
        return ""
    if not isinstance(value, str):
        return canonical_json(value)
    try:
        # The standard parser also takes NaN and Infinity, which canonical JSON then prints as null.
        parsed = json.loads(value)
    except RecursionError:
        raise ValueError("tool arguments are nested too deeply") from None
    except ValueError:
        return value.strip()
    return canonical_json(parsed)


def canonical_json(value: Any) -> str:
    """Return sorted, compact, unescaped JSON as orjson prints it. Raises ValueError for what JSON cannot carry."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except TypeError as exc:
        raise ValueError(f"{type(value).__name__} in a message is not canonical JSON: {exc}") from None


class _FieldHasher:
    def __init__(self, domain: bytes) -> None:
        self._sha256 = hashlib.sha256(domain)
        # Hashed together: conversations have thousands of short fields.
        self._fields: list[bytes] = []

    def add(self, tag: int, text: str) -> None:
        data = text.encode()
        self._fields += (_TAGS[tag], len(data).to_bytes(8, "big"), data)

    def hexdigest(self) -> str:
        self._sha256.update(b"".join(self._fields))
        self._fields.clear()
        return self._sha256.hexdigest()


def _is_plain(message: Mapping[str, Any]) -> bool:
    # Most messages are: a role and a text, which have neither tool calls nor results.
    return (
        isinstance(message.get("content"), str)
        and message.get("role") != "tool"
        and message.get("type") in (None, "message")
        and not message.get("tool_calls")
    )


def _require_object(message: Any) -> None:
    if type(message) is not dict and not isinstance(message, Mapping):
        raise ValueError(f"a message must be an object, not {type(message).__name__}")


def _text(value: Any) -> str:
    # Every empty value reads as absent: peers hash null, "", 0 and {} alike.
    return _printed(value) if value else ""


def _name(item: Mapping[str, Any]) -> str:
    # Only an absent name is empty: peers hash a null name as its Python text.
    return _printed(item.get("name", ""))


def _printed(value: Any) -> str:
    try:
        return str(value)
    except RecursionError:
        raise ValueError("a value in a message is nested too deeply") from None


def _content_parts(content: Any) -> Iterable[tuple[str, str]]:
    if isinstance(content, str):
        return (("text", content),) if content else ()
    return () if content is None else _block_parts(content)


def _block_parts(content: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(content, list):
        raise ValueError(f"message content must be a string or a list, not {type(content).__name__}")
    for block in content:
        if isinstance(block, str):
            if block:
                yield "text", block
            continue
        if not isinstance(block, Mapping):
            raise ValueError(f"a content block must be a string or an object, not {type(block).__name__}")
        kind = _text(block.get("type"))
        text = block.get("text")
        if kind in ("tool_use", "tool_result"):
            continue
        if isinstance(text, str) and kind in _TEXT_TYPES:
            if text:
                yield "text", text
        elif kind:
            yield kind, canonical_json(block)
        else:
            raise ValueError("a content block has neither a type nor a text string")


def _tool_calls(message: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    if message.get("type") == "function_call":
        name = _name(message)
        if message.get("namespace"):
            name = f"{_printed(message['namespace'])}__{name}"
        yield (
            _text(message.get("call_id") or message.get("id")),
            name,
            canonicalize_tool_arguments(message.get("arguments")),
        )
    for block in _blocks(message, "tool_use"):
        yield _text(block.get("id")), _name(block), canonicalize_tool_arguments(block.get("input"))
    tool_calls = message.get("tool_calls") or []
    if not isinstance(tool_calls, list):
        raise ValueError(f"tool_calls must be a list, not {type(tool_calls).__name__}")
    for call in tool_calls:
        if call and not isinstance(call, Mapping):
            raise ValueError(f"a tool call must be an object, not {type(call).__name__}")
        function = (call or {}).get("function") or {}
        if not isinstance(function, Mapping):
            raise ValueError(f"the function of a tool call must be an object, not {type(function).__name__}")
        yield (
            _text((call or {}).get("id")),
            _name(function),
            canonicalize_tool_arguments(function.get("arguments")),
        )


def _tool_results(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if message.get("type") == "function_call_output":
        yield _text(message.get("call_id") or message.get("id")), _output_text(message.get("output"))
    elif message.get("role") == "tool":
        yield _text(message.get("tool_call_id")), _output_text(message.get("content"))
    for block in _blocks(message, "tool_result"):
        yield _text(block.get("tool_use_id") or block.get("id")), _output_text(block.get("content"))


def _output_text(value: Any) -> str:
    return value if isinstance(value, str) else canonical_json(value)


def _blocks(message: Mapping[str, Any], kind: str) -> Iterator[Mapping[str, Any]]:
    content = message.get("content")
    if isinstance(content, list):
        for block in content:
            if isinstance(block, Mapping) and block.get("type") == kind:
                yield block
