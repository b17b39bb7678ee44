"""The conversation items of a request body, as parents are resolved and calls are stamped by them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokencustody.errors import InvalidRecordError

ENVELOPE_ROLE = "_ng_request_envelope"

# By these a server finds turns that are not in the body: of the Responses API, and of Completions as text or token ids.
_ELSEWHERE = ("previous_response_id", "conversation", "prompt")


def request_items(body: Mapping[str, Any] | Any) -> list[dict[str, Any]]:
    """Return the items of a Chat, Completions, Responses or Anthropic request body, for `resolve` and
    `stamp_continuation`.

    First comes an envelope of the instructions and the tools, if there are any, so that a call is no parent of a
    request with others; then the messages or input items as they are. They hash as those that Gym's server makes of
    the same body. Gym leaves an Anthropic `system` out of a bare body and converts the body to Responses first; here
    it counts as the instructions.

    There are no items, and no envelope, where they would not say what was asked: of a body without messages or input
    items (a bare text, token ids), and of one with `previous_response_id`, `conversation` or a `prompt`. `resolve`
    says of such a request that it is a root, and no other continues it.

    `body` is a mapping or a pydantic model of one. Raises InvalidRecordError for items that are no objects, and for
    instructions or tools that are no JSON.
    """
    turns = _field(body, "messages")
    if turns is None:
        turns = _field(body, "input")
    if not isinstance(turns, list) or not turns or any(_field(body, name) for name in _ELSEWHERE):
        return []
    return _envelope(body) + [_item(number, turn) for number, turn in enumerate(turns)]


def _envelope(body: Any) -> list[dict[str, Any]]:
    instructions, tools = _field(body, "instructions"), _field(body, "tools")
    if instructions is None:
        instructions = _system_text(_field(body, "system")) or None
    if not instructions and not tools:
        return []
    said = {"instructions": instructions, "tools": tools}
    try:
        content = json.dumps(said, sort_keys=True, default=_dumped)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidRecordError(f"the instructions or tools of the body are no JSON: {exc}") from None
    return [{"role": ENVELOPE_ROLE, "content": content}]


def _system_text(system: Any) -> Any:
    """Return an Anthropic system prompt as the one text that Gym makes of its blocks, which carry cache marks."""
    if not isinstance(system, list):
        return system
    texts: list[Any] = [block.get("text") if isinstance(block, Mapping) else block for block in system]
    return "\n".join(filter(None, texts)) if all(isinstance(text, str) for text in texts) else system


def _field(body: Any, name: str) -> Any:
    return body.get(name) if isinstance(body, Mapping) else getattr(body, name, None)


def _item(number: int, turn: Any) -> dict[str, Any]:
    if isinstance(turn, Mapping):
        return dict(turn)
    dumped = _dumped(turn) if hasattr(turn, "model_dump") else None
    if not isinstance(dumped, dict):
        raise InvalidRecordError(f"items[{number}] must be an object, not {type(turn).__name__}")
    return dumped


def _dumped(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump()
    raise TypeError(f"{type(value).__name__} is not JSON serializable")
