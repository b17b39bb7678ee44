"""What every adapter demands of token columns: the exact numbers that the engine returned, or a refusal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

PREFIX_IDS_FIELD = "required_prefix_token_ids"


def with_required_prefix(request_payload: Mapping[str, Any], prefix_ids: Sequence[int]) -> dict[str, Any]:
    """Return a copy of the request whose `required_prefix_token_ids` is this prefix.

    Raises ValueError for anything but a sequence of token ids.
    """
    return dict(request_payload) | {PREFIX_IDS_FIELD: token_ids(prefix_ids, PREFIX_IDS_FIELD)}


def token_ids(value: Any, field: str) -> list[int]:
    """Return the ids as a new list. Raises ValueError, naming `field`, unless all are integers from 0 to 2^64-1."""
    ids = _column(value, field)
    if not set(map(type, ids)) <= {int}:
        raise ValueError(f"{field}: every token id must be an integer")
    if min(ids, default=0) < 0 or max(ids, default=0) >= 1 << 64:
        raise ValueError(f"{field}: every token id must lie from 0 to 2^64-1")
    return ids


def log_probs(value: Any, field: str) -> list[float]:
    """Return the log probabilities (natural logarithms) as a new list of floats.

    JSON has one type of number, so a whole number without a fraction counts. Raises ValueError, naming `field`, for
    any other value: null, a bool, text, NaN or an infinity.
    """
    column = _column(value, field)
    if not set(map(type, column)) <= {float, int}:
        raise ValueError(f"{field}: every log probability must be a number")
    try:
        floats = list(map(float, column))
    except OverflowError:
        floats = [math.inf]
    if not all(map(math.isfinite, floats)):
        raise ValueError(f"{field}: every log probability must be finite")
    return floats


def require_same_length(ids: Sequence[int], ids_field: str, values: Sequence[float], field: str) -> None:
    """Raise ValueError unless there is one log probability for each generated id."""
    if len(ids) != len(values):
        raise ValueError(f"{field} has {len(values)} values for the {len(ids)} ids of {ids_field}")


def _column(value: Any, field: str) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
        raise ValueError(f"{field} must be a list, not {type(value).__name__}")
    return list(value)
