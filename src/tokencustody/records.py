"""Complete records: one model call with the exact token ids and log probabilities that the engine sampled.

Wire format and digests: record schema 1, token encoding 1 of the NeMo Gym token-capture protocols.
"""

from __future__ import annotations

import hashlib
import reprlib
import sys
from array import array
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    model_validator,
)

from tokencustody.columns import ColumnModel, Floats, Ids, ids_of, uint64s

if TYPE_CHECKING:
    from typing_extensions import Buffer

SCHEMA_VERSION = 1
DIGEST_VERSION = 1
TOKEN_DIGEST_DOMAIN = b"nemo-gym-tokens"
TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


def shown(value: Any) -> str:
    """Return the repr of a refused value for a message: not long, however large or deep the value is."""
    return _SHORT.repr(value)


def _text(value: Any) -> Any:
    # The enumeration's own complaint prints the whole value.
    if not isinstance(value, str | None):
        raise ValueError(f"must be text, not {type(value).__name__}")
    return value


class ParentResolutionStatus(StrEnum):
    """What the lineage resolver decided about a call's parent when the request came in."""

    ROOT = "root"
    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"


class TokenEntry(ColumnModel):
    """One complete record. Unknown fields are kept and round-trip.

    `prompt_token_ids` (ids of the whole prompt, or of its part after the parent when `prompt_is_delta`),
    `generation_token_ids` and `generation_log_probs` (natural logarithms, one per generated id) are lists of
    plain Python numbers, or one-dimensional arrays with the buffer protocol, such as NumPy's: integers of 1, 2, 4 or
    8 bytes, float64 or float32, in any byte order; not bytes, of which nothing says how wide a number is, and no masked
    arrays. The entry keeps a copy of an array, made when the entry is, as an `array.array`; it is stored, hashed,
    dumped and compared like the list of the same numbers. `created_at` is in seconds since the epoch.
    """

    model_config = ConfigDict(extra="allow", hide_input_in_errors=True)

    schema_version: StrictInt = SCHEMA_VERSION
    rollout_id: StrictStr
    model_call_id: StrictStr
    model: StrictStr = ""
    prompt_token_ids: Ids
    generation_token_ids: Ids
    generation_log_probs: Floats
    routed_experts: Any | None = None
    output_items: list[dict[str, Any]] = Field(default_factory=list)
    token_item_index: StrictInt | None = None
    response_id: StrictStr | None = None
    created_at: Annotated[float, Field(strict=True)] = 0.0
    parent_call_id: StrictStr | None = None
    cum_len: StrictInt | None = None
    digest: StrictStr | None = None
    parent_resolution: Annotated[ParentResolutionStatus | None, BeforeValidator(_text)] = None
    continuation_fingerprint: StrictStr = ""
    continuation_context_len: StrictInt = 0
    continuation_context_digest: StrictStr = ""
    parent_resolution_reason: StrictStr = ""
    fingerprint_version: StrictInt | None = None
    prompt_is_delta: StrictBool = False
    prefix_requested: StrictBool = False
    prefix_supplied: StrictBool = False

    @model_validator(mode="after")
    def _consistent(self) -> TokenEntry:
        check_consistency(self)
        return self


def check_consistency(entry: Any) -> None:
    """Raise ValueError unless the fields of `entry` agree with one another, as record schema 1 demands."""
    if entry.schema_version > SCHEMA_VERSION:
        raise ValueError(
            f"schema_version {entry.schema_version} is newer than {SCHEMA_VERSION}, the newest this library reads: "
            "upgrade tokencustody"
        )
    if entry.schema_version < SCHEMA_VERSION:
        raise ValueError(
            f"schema_version {entry.schema_version} is older than {SCHEMA_VERSION}: rewrite the record"
        )
    if len(entry.generation_token_ids) != len(entry.generation_log_probs):
        raise ValueError(
            f"generation_log_probs has {len(entry.generation_log_probs)} values for "
            f"{len(entry.generation_token_ids)} generation_token_ids"
        )
    index = entry.token_item_index
    if index is not None and not 0 <= index < len(entry.output_items):
        raise ValueError(
            f"token_item_index {index} lies outside output_items, which has {len(entry.output_items)} items"
        )
    check_parent(entry.parent_call_id, entry.parent_resolution)
    if entry.prompt_is_delta and entry.parent_resolution != ParentResolutionStatus.RESOLVED:
        raise ValueError(
            "prompt_is_delta needs a resolved parent_call_id: a suffix alone cannot be read back in full"
        )


def check_parent(parent_call_id: str | None, resolution: ParentResolutionStatus | None) -> None:
    """Raise ValueError when a parent decision and a parent id contradict one another."""
    if resolution == ParentResolutionStatus.RESOLVED and not parent_call_id:
        raise ValueError("parent_resolution is 'resolved' but parent_call_id is missing")
    if (
        resolution in (ParentResolutionStatus.ROOT, ParentResolutionStatus.UNRESOLVED)
        and parent_call_id is not None
    ):
        raise ValueError(f"parent_resolution is {resolution!s} but parent_call_id is set")


def encode_uint64s(token_ids: Sequence[int] | Buffer, field: str = "token ids") -> bytes:
    """Return the ids, a sequence or an array, as consecutive big-endian unsigned 64-bit integers, without a count.

    Raises ValueError, naming `field`, for anything but integers from 0 to 2^64-1, in a sequence plain ones.
    """
    return _big_endian(uint64s(token_ids, field))


def encode_token_ids(token_ids: Sequence[int] | Buffer) -> bytes:
    """Return the canonical token encoding: version byte 1, the count, then each id (big-endian, 64 bits).

    Raises ValueError for a negative id or one of 2^64 and more.
    """
    encoded = encode_uint64s(token_ids)
    return bytes((DIGEST_VERSION,)) + (len(encoded) // 8).to_bytes(8, "big") + encoded


def compute_digest(token_ids: Sequence[int] | Buffer) -> str:
    """Return the SHA-256 (lowercase hex) that names a token sequence. No ids: the hash of the domain alone."""
    return digest_of_uint64s(encode_uint64s(token_ids))


def _big_endian(column: array[int]) -> bytes:
    if sys.byteorder == "little":
        column.byteswap()
    return column.tobytes()


def digest_of_uint64s(encoded: bytes | memoryview) -> str:
    """Return `compute_digest` of ids that `encode_uint64s` has encoded."""
    hasher = hashlib.sha256(TOKEN_DIGEST_DOMAIN)
    if encoded:
        hasher.update(bytes((DIGEST_VERSION,)) + (len(encoded) // 8).to_bytes(8, "big"))
        hasher.update(encoded)
    return hasher.hexdigest()


def cumulative_tokens(entry: Any) -> list[int]:
    """Return prompt plus generation, the sequence a continuation's prompt must begin with.

    Raises ValueError for a delta entry, whose prompt begins in its parent.
    """
    _refuse_delta(entry)
    return own_tokens(entry)


def own_tokens(entry: Any) -> list[int]:
    """Return the prompt ids that the entry itself holds, and its generated ones."""
    prompt, generation = (ids_of(getattr(entry, name), name) for name in TOKEN_FIELDS[:2])
    return [*prompt, *generation]


def _refuse_delta(entry: Any) -> None:
    if entry.prompt_is_delta:
        raise ValueError(
            f"model call {entry.model_call_id} has a delta prompt: its sequence needs its parent chain"
        )


def stamp_lineage(
    entry: TokenEntry,
    parent_call_id: str | None,
    *,
    parent_resolution: ParentResolutionStatus | None = None,
    cumulative: Sequence[int] | Buffer | None = None,
) -> TokenEntry:
    """Fill `cum_len`, `digest`, `parent_call_id` and `parent_resolution` of `entry` in place, and return it.

    `cumulative` is the whole sequence; a delta entry needs it, any other may leave it out.
    Raises ValueError when `cumulative` disagrees with the entry's own arrays, or the parent with its resolution.
    """
    check_parent(parent_call_id, parent_resolution)
    own = uint64s(entry.prompt_token_ids, "prompt_token_ids")
    own += uint64s(entry.generation_token_ids, "generation_token_ids")
    if cumulative is None:
        _refuse_delta(entry)
    sequence = own if cumulative is None else uint64s(cumulative, "cumulative")
    if not entry.prompt_is_delta:
        if sequence != own:
            raise ValueError(
                f"model call {entry.model_call_id}: cumulative disagrees with prompt and generation"
            )
    elif len(sequence) < len(own) or sequence[len(sequence) - len(own) :] != own:
        raise ValueError(
            f"model call {entry.model_call_id}: cumulative does not end with the entry's own arrays"
        )
    entry.cum_len = len(sequence)
    entry.digest = digest_of_uint64s(_big_endian(sequence))
    entry.parent_call_id = parent_call_id
    entry.parent_resolution = parent_resolution
    return entry


def response_to_output_items(payload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the output items of a Responses, Chat or Anthropic response, in the Responses dialect.

    Chat messages become `message` items; Anthropic `thinking` and `redacted_thinking` blocks become `reasoning`
    items and the remaining blocks one `message`. A payload of no known shape gives no items. Raises ValueError for
    a choice that is no object.
    """
    output, choices, content = payload.get("output"), payload.get("choices"), payload.get("content")
    if output and isinstance(output, list):
        return [item for item in output if isinstance(item, dict)]
    if payload.get("type") == "message" and payload.get("role") == "assistant" and isinstance(content, list):
        return _anthropic_items(content)
    return _chat_items(choices) if isinstance(choices, list) else []


def _chat_items(choices: list[Any]) -> list[dict[str, Any]]:
    items = []
    for choice in choices:
        if choice and not isinstance(choice, dict):
            raise ValueError(f"a choice must be an object, not {type(choice).__name__}")
        message = (choice or {}).get("message") or {}
        if isinstance(message, dict):
            items.append({"type": "message", "role": "assistant"} | message)
    return items


def _anthropic_items(blocks: list[Any]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    content: list[Any] = []
    for block in blocks:
        match block:
            case {"type": "thinking"}:
                text = block.get("thinking")
                summary = [{"type": "summary_text", "text": text}] if isinstance(text, str) else []
                items.append({"type": "reasoning", "summary": summary})
            case {"type": "redacted_thinking"}:
                encrypted = {"encrypted_content": block["data"]} if "data" in block else {}
                items.append({"type": "reasoning", "summary": [], **encrypted})
            case _:
                content.append(block)
    if content:
        items.append({"type": "message", "role": "assistant", "content": content})
    return items


def extract_token_fields(response_json: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the token fields of the one output item that carries them, or None when no item does.

    The result has `prompt_token_ids`, `generation_token_ids`, `generation_log_probs` and `routed_experts`.
    Raises ValueError when two items carry tokens, or one carries only part of the three lists.
    """
    carriers = [
        item
        for item in response_to_output_items(response_json)
        if any(item.get(field) is not None for field in TOKEN_FIELDS)
    ]
    if not carriers:
        return None
    if len(carriers) > 1:
        raise ValueError(
            f"{len(carriers)} output items carry token fields; one response has one token carrier"
        )
    carrier = carriers[0]
    missing = [field for field in TOKEN_FIELDS if carrier.get(field) is None]
    if missing:
        raise ValueError(f"the output item that carries tokens lacks {', '.join(missing)}")
    return {field: carrier[field] for field in TOKEN_FIELDS} | {
        "routed_experts": carrier.get("routed_experts")
    }


def strip_token_fields(items: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], int | None]:
    """Return copies of the items without token fields, and the index of the item that carried them (or None).

    Raises ValueError when two items carry generated ids.
    """
    dropped = {*TOKEN_FIELDS, "routed_experts"}
    carriers = [index for index, item in enumerate(items) if item.get("generation_token_ids") is not None]
    if len(carriers) > 1:
        raise ValueError(
            f"output items {carriers} all carry token fields; one response has one token carrier"
        )
    stripped = [{key: value for key, value in item.items() if key not in dropped} for item in items]
    return stripped, carriers[0] if carriers else None
