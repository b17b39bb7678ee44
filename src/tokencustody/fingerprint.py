"""The two conversation hashes (fingerprint version 2) that find a call's parent among its rollout's calls.

Both read message lists in the Chat, Responses and Anthropic dialects. What a model wrote as text and tool calls has one
fingerprint in each; the digest also knows which items there are, so it is that of one dialect. What else a client may
change, what these hashes leave out, and what they take for a change that is none, is listed in docs/lineage.md.

A hashed field is one tag byte, the UTF-8 length as 64 bits big-endian, and the UTF-8 bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from tokencustody.errors import InvalidRecordError, LoneSurrogateError

FINGERPRINT_VERSION = 2
ASSISTANT_DOMAIN = b"nemo-gym-lineage"
CONTEXT_DOMAIN = b"nemo-gym-lineage-context"

_TAGS = [bytes((tag,)) for tag in range(9)]
_TEXT_TYPES = ("", "text", "input_text", "output_text")


def assistant_fingerprint(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the SHA-256 (hex) of the model-authored items alone, or "" when there are none.

    Raises InvalidRecordError (a ValueError) that names the item: one that is no object or has content of no known
    shape, and as LoneSurrogateError text that UTF-8 cannot carry.
    """
    hasher = FieldHasher(ASSISTANT_DOMAIN)
    return hasher.hexdigest() if add_turns(hasher, messages, _is_authored, add_authored) else ""


def echoed_fingerprint(context: Sequence[Mapping[str, Any]], answer: Sequence[Mapping[str, Any]]) -> str:
    """Return the `assistant_fingerprint` of both, the answer's calls with an empty object of arguments having none."""
    hasher = FieldHasher(ASSISTANT_DOMAIN)
    before = add_turns(hasher, context, _is_authored, add_authored)
    hasher.is_plain = True
    return hasher.hexdigest() if add_turns(hasher, answer, _is_authored, add_authored) or before else ""


def conversation_digest(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the SHA-256 (hex) of every item: roles, content, tool calls and tool results, in order.

    Raises InvalidRecordError as `assistant_fingerprint` does.
    """
    return prefix_digests(messages, {len(messages)})[len(messages)]


def prefix_digests(messages: Sequence[Mapping[str, Any]], lengths: Collection[int]) -> dict[int, str]:
    """Return the `conversation_digest` of the first n items for each n of `lengths`, in one pass.

    Raises InvalidRecordError as `conversation_digest` for the items it reads; a length beyond them has no digest.
    """
    return hash_prefixes(FieldHasher(CONTEXT_DOMAIN), messages, lengths, add_whole)


def canonicalize_tool_arguments(value: Any) -> str:
    """Return tool arguments as canonical JSON: None is "", a string that is not JSON is itself without margins.

    So is a string whose JSON orjson cannot print, such as integers of 20 digits, an escaped lone surrogate or 300
    levels: a model may write what it likes.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        return canonical_json(value)
    try:
        # The standard parser also takes NaN and Infinity, which canonical JSON then prints as null.
        return _orjson_text(json.loads(value))
    except (ValueError, TypeError, RecursionError):
        return value.strip()


def canonical_json(value: Any) -> str:
    """Return sorted, compact, unescaped JSON as orjson prints it. Raises ValueError for what JSON cannot carry.

    What only the standard library prints (integers beyond 64 bits, lone surrogates, 300 levels) is as that writes it.
    """
    try:
        return _orjson_text(value)
    except TypeError as exc:
        if (odd := _odd_json(value)) is not None:
            return odd
        raise ValueError(f"{type(value).__name__} in a message is not canonical JSON: {exc}") from None


class FieldHasher:
    """SHA-256 of a domain and of tagged fields.

    With `is_plain`, a tool call whose arguments are an empty object is one without arguments.
    """

    def __init__(self, domain: bytes, *, is_plain: bool = False) -> None:
        self._sha256 = hashlib.sha256(domain)
        # Added and not hashed yet: conversations have thousands of short fields.
        self._fields: list[bytes] = []
        self.is_plain = is_plain

    def add(self, tag: int, text: str) -> None:
        """Add a field. Raises UnicodeEncodeError for a lone surrogate."""
        data = text.encode()
        self._fields += (_TAGS[tag], len(data).to_bytes(8, "big"), data)

    def add_arguments(self, tag: int, text: str) -> None:
        """Add the arguments of a tool call, which may be any text that a model wrote."""
        data = b"" if self.is_plain and text == "{}" else text.encode("utf-8", "surrogatepass")
        self._fields += (_TAGS[tag], len(data).to_bytes(8, "big"), data)

    def hexdigest(self) -> str:
        """Return the hash of the fields so far; more may be added."""
        self._sha256.update(b"".join(self._fields))
        self._fields.clear()
        return self._sha256.hexdigest()


def add_turns(
    hasher: FieldHasher,
    items: Sequence[Mapping[str, Any]],
    is_authored: Callable[[Mapping[str, Any]], bool],
    add: Callable[[FieldHasher, Mapping[str, Any]], None],
) -> bool:
    """Add the items that the model wrote, and return whether there are any."""
    authored = False
    for index, item in enumerate(items):
        _require_object(index, item)
        if is_authored(item):
            authored = True
            _add_item(hasher, index, item, add)
    return authored


def hash_prefixes(
    hasher: FieldHasher,
    items: Sequence[Mapping[str, Any]],
    lengths: Collection[int],
    add: Callable[[FieldHasher, Mapping[str, Any]], None],
) -> dict[int, str]:
    """Return the hash of the first n items for each n of `lengths`, in one pass."""
    digests = {0: hasher.hexdigest()} if 0 in lengths else {}
    for length, item in enumerate(items[: max(lengths, default=0)], start=1):
        _require_object(length - 1, item)
        _add_item(hasher, length - 1, item, add)
        if length in lengths:
            digests[length] = hasher.hexdigest()
    return digests


def add_authored(hasher: FieldHasher, message: Mapping[str, Any]) -> None:
    """Add the content and the tool calls of an item that the model wrote."""
    for kind, payload in _content_parts(message.get("content")):
        hasher.add(0, kind)
        hasher.add(1, payload)
    if _is_plain(message):
        return
    for call_id, name, arguments in _tool_calls(message):
        hasher.add(2, call_id)
        hasher.add(3, name)
        hasher.add_arguments(4, arguments)


def add_whole(hasher: FieldHasher, message: Mapping[str, Any]) -> None:
    """Add who speaks in an item, its content, tool calls and tool results."""
    hasher.add(0, _text(message.get("role") or message.get("type")))
    for kind, payload in _content_parts(message.get("content")):
        hasher.add(1, kind)
        hasher.add(2, payload)
    if _is_plain(message):
        return
    for call_id, name, arguments in _tool_calls(message):
        hasher.add(3, call_id)
        hasher.add(4, name)
        hasher.add_arguments(5, arguments)
    for call_id, output in _tool_results(message):
        hasher.add(6, call_id)
        hasher.add(7, output)


def _is_authored(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant" or message.get("type") == "function_call"


def _require_object(index: int, item: Any) -> None:
    if type(item) is not dict and not isinstance(item, Mapping):
        raise InvalidRecordError(f"items[{index}] must be an object, not {type(item).__name__}")


def _add_item(
    hasher: FieldHasher,
    index: int,
    item: Mapping[str, Any],
    add: Callable[[FieldHasher, Mapping[str, Any]], None],
) -> None:
    try:
        add(hasher, item)
    except UnicodeEncodeError:
        place = _place_of_lone_surrogate(item)
        raise LoneSurrogateError(
            f"items[{index}]{place}: a lone surrogate, which UTF-8 cannot carry"
        ) from None
    except ValueError as exc:
        raise InvalidRecordError(f"items[{index}]: {exc}") from None


def _orjson_text(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def _odd_json(value: Any) -> str | None:
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        return None
    inside = [value]
    while inside:
        each = inside.pop()
        if isinstance(each, dict):
            # The standard library prints other keys as text, so that 1 and "1" would be one key.
            if not all(isinstance(key, str) for key in each):
                return None
            inside += each.values()
        elif isinstance(each, list | tuple):
            inside += each
    return text


_LONGEST_PLACE = 500


def _place_of_lone_surrogate(message: Any) -> str:
    inside = [("", message)]
    seen: set[int] = set()
    while inside:
        place, value = inside.pop()
        # Python's objects may hold themselves, and many times the same one.
        if isinstance(value, Mapping | list | tuple) and (id(value) in seen or len(place) > _LONGEST_PLACE):
            continue
        seen.add(id(value))
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                return place
        elif isinstance(value, Mapping):
            inside += [(f"{place}.{key}", each) for key, each in value.items() if key != "arguments"][::-1]
        elif isinstance(value, list | tuple):
            inside += [(f"{place}[{number}]", each) for number, each in enumerate(value)][::-1]
    return ""


def _is_plain(message: Mapping[str, Any]) -> bool:
    # Most messages are: a role and a text, which have neither tool calls nor results.
    return (
        isinstance(message.get("content"), str)
        and message.get("role") != "tool"
        and message.get("type") in (None, "message")
        and not message.get("tool_calls")
    )


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
