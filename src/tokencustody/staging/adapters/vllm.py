"""Tokens from the chat completions of vLLM, wherever its version and its request options put them.

The generated ids stand in one or more of three places: `generation_token_ids` on the message; `token_ids` on the
choice (`return_token_ids`); and `token_id:N` as the tokens of `logprobs.content` (`return_tokens_as_token_ids`). Their
log probabilities stand in `generation_log_probs` on the message, in `logprobs.content`, or in both. Places that
disagree make the payload malformed: nothing says which of them the engine sampled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from tokencustody.staging.adapters import payload
from tokencustody.staging.adapters.payload import PREFIX_IDS_FIELD as PREFIX_IDS_FIELD

PROMPT_IDS_FIELD = "prompt_token_ids"
ROUTED_EXPERTS_FIELD = "routed_experts"
MEDIA_SPANS_FIELD = "media_spans"

_GENERATED_IDS = "message.generation_token_ids"
_GENERATED_LOG_PROBS = "message.generation_log_probs"
_CHOICE_IDS = "choice.token_ids"
_CONTENT = "logprobs.content"
_Number = TypeVar("_Number", int, float)
_TOKEN_ID = re.compile("token_id:(0|[1-9][0-9]{0,19})")


class VLLMCaptureAdapter:
    """A `CaptureAdapter` for vLLM. A missing or malformed field is a ValueError that names it."""

    def enter_prefix(self, request_payload: dict[str, Any], prefix_ids: list[int]) -> dict[str, Any]:
        """Return a copy of the request that demands this exact prompt prefix."""
        return payload.with_required_prefix(request_payload, prefix_ids)

    def extract_prompt_ids(self, response_payload: Mapping[str, Any]) -> list[int]:
        """Return the ids of the whole prompt, from the body or the message."""
        message = _message(_single_choice(response_payload))
        places = {PROMPT_IDS_FIELD: response_payload, f"message.{PROMPT_IDS_FIELD}": message}
        found = {
            place: payload.token_ids(owner[PROMPT_IDS_FIELD], place)
            for place, owner in places.items()
            if owner.get(PROMPT_IDS_FIELD) is not None
        }
        if not found:
            raise ValueError(f"the vLLM response has no {PROMPT_IDS_FIELD}")
        return _agreed(found)

    def extract_generation(self, response_payload: Mapping[str, Any]) -> tuple[list[int], list[float]]:
        """Return the generated ids and their log probabilities, equally many."""
        return extract_generation_token_info(_single_choice(response_payload))

    def extract_extras(self, response_payload: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the message's `routed_experts` and the body's `media_spans`, or None without either."""
        extras: dict[str, Any] = {}
        routes = _message(_single_choice(response_payload)).get(ROUTED_EXPERTS_FIELD)
        if routes is not None:
            if not isinstance(routes, str | list | dict):
                raise ValueError(
                    f"message.{ROUTED_EXPERTS_FIELD} must be text, a list or an object, not {type(routes).__name__}"
                )
            extras[ROUTED_EXPERTS_FIELD] = routes
        if MEDIA_SPANS_FIELD in response_payload:
            spans = response_payload[MEDIA_SPANS_FIELD]
            if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
                raise ValueError(f"{MEDIA_SPANS_FIELD} must be a list of objects")
            extras[MEDIA_SPANS_FIELD] = spans
        return extras or None


def extract_generation_token_info(choice: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """Return the generated ids and log probabilities of one choice. Raises ValueError as the adapter does."""
    message = _message(choice)
    content = _logprobs_content(choice)
    found_ids: dict[str, list[int]] = {}
    if message.get("generation_token_ids") is not None:
        found_ids[_GENERATED_IDS] = payload.token_ids(message["generation_token_ids"], _GENERATED_IDS)
    if choice.get("token_ids") is not None:
        found_ids[_CHOICE_IDS] = payload.token_ids(choice["token_ids"], _CHOICE_IDS)
    # Beside ids of another place the tokens may be plain text; alone they must name the ids.
    if content is not None and (not found_ids or _names_ids(content)):
        found_ids[_CONTENT] = _content_token_ids(content)
    if not found_ids:
        raise ValueError(f"the vLLM response has none of {_GENERATED_IDS}, {_CHOICE_IDS} and {_CONTENT}")
    ids = _agreed(found_ids)

    found_values: dict[str, list[float]] = {}
    if message.get("generation_log_probs") is not None:
        field = _GENERATED_LOG_PROBS
        found_values[field] = payload.log_probs(message["generation_log_probs"], field)
    # Beside those of the message there may be entries without any.
    if content is not None and (
        not found_values or any(entry.get("logprob") is not None for entry in content)
    ):
        field = f"{_CONTENT}[].logprob"
        found_values[field] = payload.log_probs([entry.get("logprob") for entry in content], field)
    if not found_values:
        raise ValueError(f"the vLLM response has neither {_GENERATED_LOG_PROBS} nor {_CONTENT}")
    for field, values in found_values.items():
        payload.require_same_length(ids, next(iter(found_ids)), values, field)
    return ids, _agreed(found_values)


def _single_choice(response_payload: Any) -> Mapping[str, Any]:
    if not isinstance(response_payload, Mapping):
        raise ValueError(f"the vLLM response must be an object, not {type(response_payload).__name__}")
    choices = response_payload.get("choices")
    if not isinstance(choices, list | tuple):
        raise ValueError("the vLLM response has no list of choices")
    if len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise ValueError(f"the vLLM response must have one choice, an object; choices has {len(choices)}")
    return choices[0]


def _message(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    message = choice.get("message")
    if message is None:
        return {}
    if not isinstance(message, Mapping):
        raise ValueError(f"message must be an object, not {type(message).__name__}")
    return message


def _logprobs_content(choice: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    logprobs = choice.get("logprobs")
    if logprobs is None:
        return None
    if not isinstance(logprobs, Mapping):
        raise ValueError(f"logprobs must be an object, not {type(logprobs).__name__}")
    content = logprobs.get("content")
    if content is None:
        return None
    if not isinstance(content, list) or not all(isinstance(entry, Mapping) for entry in content):
        raise ValueError(f"{_CONTENT} must be a list of objects")
    return content


def _names_ids(content: list[Mapping[str, Any]]) -> bool:
    return bool(content) and all(
        isinstance(entry.get("token"), str) and _TOKEN_ID.fullmatch(entry["token"]) for entry in content
    )


def _content_token_ids(content: list[Mapping[str, Any]]) -> list[int]:
    ids = []
    for position, entry in enumerate(content):
        token = entry.get("token")
        match = _TOKEN_ID.fullmatch(token) if isinstance(token, str) else None
        if match is None:
            # The text of a token is not its id, not even when the text is a number.
            raise ValueError(f"{_CONTENT}[{position}].token must be token_id:N")
        ids.append(int(match[1]))
    return ids


def _agreed(found: dict[str, list[_Number]]) -> list[_Number]:
    (first, column), *others = found.items()
    for place, other in others:
        if other != column:
            raise ValueError(f"{place} differs from {first}")
    return column
