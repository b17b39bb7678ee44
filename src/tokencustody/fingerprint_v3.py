"""The two conversation hashes of version 3, for items whose content version 2 leaves out.

It hashes what version 2 hashes of an item in its plainest form, and then what that leaves out, as canonical JSON.
docs/lineage.md says when it is used, and what that costs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from tokencustody.fingerprint import (
    ASSISTANT_DOMAIN,
    FieldHasher,
    add_authored,
    add_whole,
    canonical_json,
    item_error,
    require_object,
)

FINGERPRINT_VERSION_3 = 3
_ASSISTANT_DOMAIN = b"tokencustody-lineage-3"
_CONTEXT_DOMAIN = b"tokencustody-lineage-context-3"
_LEFT_OUT_TAG = 8

# Types of items that version 2 knows. What else there is, it hashes by its type and `content` alone.
_KNOWN_TYPES = (None, "", "message", "function_call", "function_call_output", "reasoning")
# Fields that a server or a client adds to an item, and changes from one request to the next.
_NOISE = ("id", "status", "cache_control")
_HASHED = {
    "message": {"role", "type", "content", "tool_calls", *_NOISE},
    "tool": {"role", "type", "content", "tool_calls", "tool_call_id", *_NOISE},
    "function_call_output": {"role", "type", "content", "tool_calls", "call_id", "output", *_NOISE},
    "tool_result": {"type", "tool_use_id", "content", *_NOISE},
}
# What else a model's own message says. Its other fields come and go with the client that echoes it.
_AUTHORED_FIELDS = ("name", "function_call", "refusal", "audio", "tool_plan")
# A model's thinking is no part of its turn in any version: clients keep, drop and rename it.
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
        # An id is content where it is how the item is known: a reference, or a result that has no call id.
        noise = _NOISE[1:] if _is_known_by_id(item) else _NOISE
        return {name: value for name, value in item.items() if name not in noise and value is not None}
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
        results = [
            _other_than(_HASHED["tool_result"], block)
            for block in content
            if isinstance(block, Mapping) and block.get("type") == "tool_result"
        ]
        if any(results):
            rest["tool_results"] = results
    return rest


def hashes_noise(items: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether version 2 would hash a cache mark of an item, which moves on with the next request."""
    return any(block.get("cache_control") for item in items for block in _blocks_hashed_whole(item))


def plain(item: Mapping[str, Any], *, keep_arguments: bool = False) -> Mapping[str, Any]:
    """Return an item in the form that all dialects share; itself, if it has that.

    Without thinking and cache marks, a tool result of one text as that text, and unless the arguments of calls are to
    be kept, "" where a call has none.
    """
    kind, role, content = item.get("type"), item.get("role"), item.get("content")
    if isinstance(content, str) and role in ("user", "system") and not item.get("tool_calls"):
        return item
    changed: dict[str, Any] = {}
    if isinstance(content, list):
        if role == "tool":
            changed["content"] = _plain_result(content)
        else:
            changed["content"] = [
                _plain_block(block, keep_arguments)
                for block in content
                if role != "assistant" or not isinstance(block, Mapping) or block.get("type") not in _THINKING
            ]
    if kind == "function_call_output":
        changed["output"] = _plain_result(item.get("output"))
    if kind == "function_call" and not keep_arguments:
        changed["arguments"] = _plain_arguments(item.get("arguments"))
    calls = item.get("tool_calls")
    if isinstance(calls, list) and not keep_arguments:
        changed["tool_calls"] = [_plain_call(call) for call in calls]
    if all(item.get(name) == value for name, value in changed.items()):
        return item
    return {**item, **changed}


def assistant_fingerprint_v3(items: Sequence[Mapping[str, Any]]) -> str:
    """Return the SHA-256 (hex) of what the model wrote, or "" when it wrote nothing.

    Raises InvalidRecordError as `fingerprint.assistant_fingerprint` does.
    """
    hasher = FieldHasher(_ASSISTANT_DOMAIN)
    authored = False
    for index, item in enumerate(items):
        require_object(index, item)
        if is_authored(item):
            authored = True
            _add(hasher, index, item, add_authored)
    return hasher.hexdigest() if authored else ""


def assistant_fingerprints(items: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the assistant fingerprints of versions 2 and 3, of which most items are hashed alike, in one pass.

    Raises InvalidRecordError as `fingerprint.assistant_fingerprint` does.
    """
    hashers = second, third = FieldHasher(ASSISTANT_DOMAIN), FieldHasher(_ASSISTANT_DOMAIN)
    authored = [False, False]
    for index, item in enumerate(items):
        require_object(index, item)
        if not is_authored(item):
            continue
        authored[1] = True
        if item.get("role") != "assistant" and item.get("type") != "function_call":
            _add(third, index, item, add_authored)
            continue
        authored[0] = True
        before = len(second.fields)
        try:
            add_authored(second, item)
        except ValueError as exc:
            raise item_error(index, item, exc) from None
        if plain(item) is item and not left_out(item):
            third.fields += second.fields[before:]
        else:
            _add(third, index, item, add_authored)
    found = [hasher.hexdigest() if has else "" for hasher, has in zip(hashers, authored, strict=True)]
    return found[0], found[1]


def prefix_digests_v3(items: Sequence[Mapping[str, Any]], lengths: Collection[int]) -> dict[int, str]:
    """Return the hash of all of the first n items for each n of `lengths`, in one pass.

    Raises InvalidRecordError as `fingerprint.prefix_digests` does.
    """
    hasher = FieldHasher(_CONTEXT_DOMAIN)
    digests = {0: hasher.hexdigest()} if 0 in lengths else {}
    for length, item in enumerate(items[: max(lengths, default=0)], start=1):
        require_object(length - 1, item)
        _add(hasher, length - 1, item, add_whole)
        if length in lengths:
            digests[length] = hasher.hexdigest()
    return digests


def _add(hasher: FieldHasher, index: int, item: Mapping[str, Any], add_fields: Any) -> None:
    try:
        rest = left_out(item)
        if item.get("type") in _KNOWN_TYPES:
            add_fields(hasher, plain(item))
        if rest:
            hasher.add(_LEFT_OUT_TAG, canonical_json(rest))
    except ValueError as exc:
        raise item_error(index, item, exc) from None


def _is_known_by_id(item: Mapping[str, Any]) -> bool:
    kind = item.get("type")
    return kind == "item_reference" or (
        isinstance(kind, str) and kind.endswith("_output") and not item.get("call_id")
    )


def _is_odd_call(call: Any) -> bool:
    return isinstance(call, Mapping) and (call.get("type") or "function") != "function"


def _other_than(hashed: Collection[str], item: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in hashed and value}


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


def _plain_block(block: Any, keep_arguments: bool = False) -> Any:
    if not isinstance(block, Mapping):
        return block
    if block.get("type") == "tool_result":
        return {**block, "content": _plain_result(block.get("content"))}
    if block.get("type") == "tool_use" and not keep_arguments:
        return {**block, "input": _plain_arguments(block.get("input"))}
    return {name: value for name, value in block.items() if name != "cache_control"}


def _plain_result(value: Any) -> Any:
    if not isinstance(value, list):
        return "" if value is None else value
    blocks = [
        {"type": "text", "text": block["text"]}
        if isinstance(block, Mapping) and _is_text(block)
        else _plain_block(block)
        for block in value
    ]
    if not blocks:
        return ""
    only = blocks[0]
    is_one_text = len(blocks) == 1 and isinstance(only, Mapping) and only.keys() == {"type", "text"}
    return only["text"] if is_one_text else blocks


def _plain_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": _plain_arguments(function.get("arguments"))}}


def _plain_arguments(value: Any) -> Any:
    is_empty = value in (None, "", {}) or (isinstance(value, str) and value.strip() in ("", "{}"))
    return "" if is_empty else value
