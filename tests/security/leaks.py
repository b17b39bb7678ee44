"""What an error says, in every way that a log, a person or a tool may take it."""

from __future__ import annotations

import struct
import traceback
from collections.abc import Iterable


def chain_of(exc: BaseException) -> list[BaseException]:
    """Return the error and all that it came from, whether a traceback would show them or not."""
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [exc]
    while waiting:
        each = waiting.pop()
        if each is None or each in found:
            continue
        found.append(each)
        waiting += [each.__cause__, each.__context__, getattr(each, "orig", None)]
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions
    return found


def said_by(exc: BaseException) -> str:
    """Return the text, repr, notes and traceback of an error and all that it came from."""
    parts: list[str] = []
    for each in chain_of(exc):
        parts += [str(each), repr(each), repr(each.args), *getattr(each, "__notes__", [])]
        parts += ["".join(traceback.format_exception(each))]
        parts += [repr(getattr(each, name, None)) for name in ("detail", "hint", "context", "internal_query")]
    return "\n".join(parts)


def forms_of(token_ids: Iterable[int], log_probs: Iterable[float]) -> list[str]:
    """Return the texts in which token ids and log probabilities may show: as numbers, packed, and packed in hex."""
    forms: list[str] = []
    for token_id in token_ids:
        packed = [struct.pack("<I", token_id), struct.pack("<Q", token_id)]
        forms += [str(token_id), *(each.hex() for each in packed), *(repr(each)[2:-1] for each in packed)]
    for log_prob in log_probs:
        whole = struct.pack("<d", log_prob)
        forms += [repr(log_prob), whole.hex(), repr(whole)[2:-1], struct.pack("<f", log_prob).hex()]
    return forms
