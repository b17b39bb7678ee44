"""Tokens from the payload, an object or a mapping, that a Megatron inference engine hands over with a response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokencustody.staging.adapters import payload
from tokencustody.staging.adapters.payload import PREFIX_IDS_FIELD as PREFIX_IDS_FIELD

PROMPT_IDS_FIELD = "prompt_token_ids"
GENERATED_IDS_FIELD = "generated_token_ids"
GENERATED_LOGPROBS_FIELD = "generated_log_probs"


class MegatronCaptureAdapter:
    """A `CaptureAdapter` for Megatron. A missing or malformed field is a ValueError that names it."""

    def enter_prefix(self, request_payload: dict[str, Any], prefix_ids: list[int]) -> dict[str, Any]:
        """Return a copy of the request that demands this exact prompt prefix."""
        return payload.with_required_prefix(request_payload, prefix_ids)

    def extract_prompt_ids(self, response_payload: Any) -> list[int]:
        """Return the ids of the whole prompt."""
        return payload.token_ids(_field(response_payload, PROMPT_IDS_FIELD), PROMPT_IDS_FIELD)

    def extract_generation(self, response_payload: Any) -> tuple[list[int], list[float]]:
        """Return the generated ids and their log probabilities, equally many."""
        ids = payload.token_ids(_field(response_payload, GENERATED_IDS_FIELD), GENERATED_IDS_FIELD)
        values = payload.log_probs(
            _field(response_payload, GENERATED_LOGPROBS_FIELD), GENERATED_LOGPROBS_FIELD
        )
        payload.require_same_length(ids, GENERATED_IDS_FIELD, values, GENERATED_LOGPROBS_FIELD)
        return ids, values

    def extract_extras(self, response_payload: Any) -> dict[str, Any] | None:
        """Return None: the payload has no fields besides the token columns that the protocol stages."""
        return None


def _field(response_payload: Any, name: str) -> Any:
    if isinstance(response_payload, Mapping):
        value = response_payload.get(name)
    else:
        value = getattr(response_payload, name, None)
    if value is None:
        raise ValueError(f"the Megatron payload has no {name}")
    return value
