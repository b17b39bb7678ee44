"""The conversation items of a request body, as parents are resolved and calls are stamped by them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokencustody.errors import InvalidRecordError

ENVELOPE_ROLE = "_ng_request_envelope"


def request_items(body: Mapping[str, Any] | Any) -> list[dict[str, Any]]:
    """Return the items of a Chat, Completions, Responses or Anthropic request body, for `resolve` and
    `stamp_continuation`.

    First comes an envelope of the instructions and the tools, if there are any, so that a call is no parent of a
    request with others; then the messages or input items as they are. They hash as those that Gym's server makes of
    the same body. Gym leaves an Anthropic `system` out of a bare body and converts the body to Responses first; here
    it counts as the instructions. A prompt or input that is a bare text or token ids has no items, as with Gym.

    `body` is a mapping or a pydantic model of one. Raises InvalidRecordError for items that are no objects, and for
    instructions or tools that are no JSON.
    """
    turns = _field(body, "messages")
    if turns is None:
        turns = _field(body, "input")
    items = [_item(number, turn) for number, turn in enumerate(turns)] if isinstance(turns, list) else []
    return _envelope(body) + items


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
    """Return an Anthropic system prompt as one text: its blocks carry cache marks that come and go."""
    if not isinstance(system, list):
        return system
    texts: list[Any] = [block.get("text") if isinstance(block, Mapping) else block for block in system]
    return "\n".join(texts) if all(isinstance(text, str) for text in texts) else system


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
