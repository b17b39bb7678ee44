"""The two conversation hashes of version 3, for items whose content version 2 leaves out.

It hashes what version 2 hashes of an item in its plainest form, and then what that leaves out, as canonical JSON.
docs/lineage.md says when it is used, and what that costs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from tokencustody.fingerprint import (
    FieldHasher,
    add_authored,
    add_turns,
    add_whole,
    canonical_json,
    hash_prefixes,
)

FINGERPRINT_VERSION_3 = 3
_ASSISTANT_DOMAIN = b"tokencustody-lineage-3"
_CONTEXT_DOMAIN = b"tokencustody-lineage-context-3"
_LEFT_OUT_TAG = 8

# Types of items that version 2 knows. What else there is, it hashes by its type and `content` alone.
_KNOWN_TYPES = (None, "", "message", "function_call", "function_call_output", "reasoning")
# Fields that a server or a client adds to an item, and changes from one request to the next.
_NOISE = ("id", "status", "cache_control")
_FAILED = ("failed", "error")
_HASHED = {
    "message": ("role", "type", "content", "tool_calls"),
    "tool": ("role", "type", "content", "tool_calls", "tool_call_id"),
    "function_call_output": ("role", "type", "content", "tool_calls", "call_id", "output"),
    "tool_result": ("type", "tool_use_id", "content"),
    "text": ("type", "text"),
}
# What else a model's own message says. Its other fields come and go with the client that echoes it.
_AUTHORED_FIELDS = ("name", "function_call", "refusal", "audio", "tool_plan")
# Blocks of a model's thinking, which some clients put into the answer that they echo.
_THINKING = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")
_TEXTS = ("", "text", "input_text", "output_text")
# Items without a role that the model did not write. Of what is not known, it is taken for the author.
_INPUTS = (None, "", "message", "function_call_output", "reasoning", "mcp_approval_response")


def is_authored(item: Mapping[str, Any]) -> bool:
    """Return whether the model wrote an item, as version 3 sees it: more than version 2 does, never less."""
    role, kind = item.get("role"), item.get("type")
    if role == "assistant" or kind == "function_call":
        return True
    return not role and kind not in _INPUTS and not (isinstance(kind, str) and kind.endswith("_output"))


def is_input(item: Any) -> bool:
    """Return whether an item was certainly not written by the model: what a user, a system or a tool says."""
    if not isinstance(item, Mapping) or is_authored(item):
        return False
    kind = item.get("type")
    return bool(item.get("role")) or (isinstance(kind, str) and kind.endswith(("_output", "_response")))


def left_out(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of an item that version 2 does not hash; nothing, if it covers the item."""
    kind, role = item.get("type"), item.get("role")
    if kind not in _KNOWN_TYPES:
        # As version 2 does with calls: without a call id, an item is known by its id.
        known_by = "call_id" if item.get("call_id") else "id"
        return {
            name: value
            for name, value in item.items()
            if value is not None and (name == known_by or not _is_noise(name, value))
        }
    if kind == "reasoning" or (kind == "function_call" and role != "assistant"):
        return {}
    if role == "assistant":
        fields = _AUTHORED_FIELDS if kind != "function_call" else ()
        rest = {name: item[name] for name in fields if item.get(name)}
        calls = item.get("tool_calls")
        odd = [call for call in calls if _is_odd_call(call)] if isinstance(calls, list) else []
        if odd:
            rest["tool_calls"] = odd
    else:
        form = kind if kind == "function_call_output" else "tool" if role == "tool" else "message"
        rest = _other_than(_HASHED[form], item)
    content = item.get("content")
    if isinstance(content, list):
        blocks = [_left_out_of_block(block, role) for block in content]
        if any(blocks):
            rest["content"] = blocks
    return rest


def hashes_noise(items: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether version 2 would hash a cache mark of an item, which moves on with the next request."""
    return any(block.get("cache_control") for item in items for block in _blocks_hashed_whole(item))


def plain(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an item without cache marks, and with a tool result of one text as that text; itself, if it is so."""
    content = item.get("content")
    changed: dict[str, Any] = {}
    if isinstance(content, list):
        is_result = item.get("role") == "tool"
        changed["content"] = _plain_result(content) if is_result else list(map(_plain_block, content))
    if item.get("type") == "function_call_output":
        changed["output"] = _plain_result(item.get("output"))
    if all(item.get(name) == value for name, value in changed.items()):
        return item
    return {**item, **changed}


def without_thinking(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an item that the model wrote without its blocks of thinking; itself, if it has none."""
    content = item.get("content")
    if item.get("role") != "assistant" or not isinstance(content, list):
        return item
    kept = [
        block for block in content if not isinstance(block, Mapping) or block.get("type") not in _THINKING
    ]
    return item if len(kept) == len(content) else {**item, "content": kept}


def assistant_fingerprint_v3(items: Sequence[Mapping[str, Any]]) -> str:
    """Return the SHA-256 (hex) of what the model wrote, or "" when it wrote nothing.

    Raises InvalidRecordError as `fingerprint.assistant_fingerprint` does.
    """
    hasher = FieldHasher(_ASSISTANT_DOMAIN, is_plain=True)
    return hasher.hexdigest() if add_turns(hasher, items, is_authored, _adding(add_authored)) else ""


def prefix_digests_v3(items: Sequence[Mapping[str, Any]], lengths: Collection[int]) -> dict[int, str]:
    """Return the hash of all of the first n items for each n of `lengths`, in one pass.

    Raises InvalidRecordError as `fingerprint.prefix_digests` does.
    """
    return hash_prefixes(FieldHasher(_CONTEXT_DOMAIN, is_plain=True), items, lengths, _adding(add_whole))


def _adding(add_fields: Callable[[FieldHasher, Mapping[str, Any]], None]) -> Any:
    def add(hasher: FieldHasher, item: Mapping[str, Any]) -> None:
        rest = left_out(item)
        if item.get("type") in _KNOWN_TYPES:
            add_fields(hasher, plain(item))
        if rest:
            hasher.add(_LEFT_OUT_TAG, canonical_json(rest))

    return add


def _is_noise(name: str, value: Any) -> bool:
    # Where something failed, its status says what nothing else may.
    return name in _NOISE and not (name == "status" and value in _FAILED)


def _is_odd_call(call: Any) -> bool:
    return isinstance(call, Mapping) and (call.get("type") or "function") != "function"


def _left_out_of_block(block: Any, role: Any) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "tool_result":
        return _other_than(_HASHED["tool_result"], block)
    # The annotations of a model's text come and go, and a tool's result is hashed as the JSON of its blocks.
    if role in ("assistant", "tool") or not isinstance(block, Mapping) or not _is_text(block):
        return {}
    return _other_than(_HASHED["text"], block)


def _other_than(hashed: Collection[str], item: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in item.items()
        if value and name not in hashed and not _is_noise(name, value)
    }


def _blocks_hashed_whole(item: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Return the blocks of an item of which version 2 hashes the whole JSON."""
    content = item.get("content")
    blocks = content if isinstance(content, list) else []
    results = [content, item.get("output")] if item.get("role") == "tool" else [item.get("output")]
    for block in blocks:
        if not isinstance(block, Mapping):
            continue
        if block.get("type") == "tool_result":
            results.append(block.get("content"))
        elif block.get("type") != "tool_use" and not _is_text(block):
            yield block
    for result in results:
        if isinstance(result, list):
            yield from (block for block in result if isinstance(block, Mapping))


def _is_text(block: Mapping[str, Any]) -> bool:
    return isinstance(block.get("text"), str) and (block.get("type") or "") in _TEXTS


def _plain_block(block: Any) -> Any:
    if not isinstance(block, Mapping):
        return block
    if block.get("type") == "tool_result":
        return {**block, "content": _plain_result(block.get("content"))}
    if block.get("type") == "tool_use":
        return block
    return {name: value for name, value in block.items() if name != "cache_control"}


def _plain_result(value: Any) -> Any:
    if not isinstance(value, list):
        return "" if value is None else value
    blocks = list(map(_plain_block, value))
    if not blocks:
        return ""
    only = blocks[0]
    is_one_text = len(blocks) == 1 and isinstance(only, Mapping) and only.keys() <= {"type", "text"}
    return only["text"] if is_one_text and _is_text(only) else blocks
