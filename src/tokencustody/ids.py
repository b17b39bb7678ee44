"""The rules for ids, checked before any transaction starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeGuard

from tokencustody.errors import InvalidRecordError

_ROLLOUT_ID = re.compile(r"[A-Za-z0-9._-]{1,255}\Z")
_LONGEST_CALL_ID = 512


def check_rollout_id(rollout_id: str, field: str = "rollout_id") -> str:
    """Return the id if it is 1 to 255 characters of `A-Z a-z 0-9 . _ -`; raise InvalidRecordError otherwise."""
    if not isinstance(rollout_id, str):
        raise InvalidRecordError(f"{field} must be a string, not {type(rollout_id).__name__}")
    if not _ROLLOUT_ID.match(rollout_id):
        raise InvalidRecordError(
            f"{field} {_shown(rollout_id)} is not 1 to 255 characters out of A-Z a-z 0-9 . _ -"
        )
    return rollout_id


def check_call_id(model_call_id: str, field: str = "model_call_id") -> str:
    """Return the id if it is 1 to 512 characters without NUL or lone surrogates; InvalidRecordError otherwise."""
    check_text(model_call_id, field)
    if not 1 <= len(model_call_id) <= _LONGEST_CALL_ID:
        raise InvalidRecordError(
            f"{field} has {len(model_call_id)} characters; it must have 1 to {_LONGEST_CALL_ID}"
        )
    return model_call_id


def is_call_id(text: str | None) -> TypeGuard[str]:
    """Return whether a call can have this id."""
    try:
        return text is not None and bool(check_call_id(text))
    except InvalidRecordError:
        return False


def check_text(text: str, field: str) -> str:
    """Return the text if every SQL database can hold it; raise InvalidRecordError otherwise."""
    if not isinstance(text, str):
        raise InvalidRecordError(f"{field} must be a string, not {type(text).__name__}")
    if "\0" in text:
        raise InvalidRecordError(f"{field} {_shown(text)} contains NUL")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRecordError(f"{field} {_shown(text)} contains a lone surrogate") from None
    return text


def check_batch(rollout_ids: Sequence[str]) -> list[str]:
    """Return the ids of a batch in order, each once.

    Raises TypeError for a bare string or what is no sequence, InvalidRecordError for the first id outside the rules.
    """
    if isinstance(rollout_ids, str | bytes) or not isinstance(rollout_ids, Sequence):
        raise TypeError(f"rollout_ids must be a sequence of ids, not {type(rollout_ids).__name__}")
    return list(
        dict.fromkeys(check_rollout_id(rid, f"rollout_ids[{i}]") for i, rid in enumerate(rollout_ids))
    )


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
