"""JSON from which every value comes back as it was given.

Two dialects: 0 is strict JSON; 1 has NaN, Infinity and integers beyond 64 bits, as Python prints them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from tokencustody.errors import InvalidRecordError
from tokencustody.records import shown

_STRICT_JSON, _PYTHON_JSON = 0, 1
# What every JSON parser of this library reads back, whatever the interpreter's recursion limit.
_DEEPEST_NEST = 250
# Python refuses to print or parse decimal numbers of more than 4,300 digits.
_LONGEST_INT_BITS = 14_000
# Whatever has fewer digits fits into 64 bits.
_LONG = b"0" * 19
_TO_ZERO = bytes.maketrans(b"0123456789", b"0" * 10)
_BEFORE_A_NUMBER = b"-,:[ \t\r\n"


def encode_json(fields: dict[str, Any]) -> tuple[int, bytes]:
    """Return a dialect and the text of an object in it, from which `decode_json` gives the same object.

    Raises InvalidRecordError as `require_json`.
    """
    try:
        data = orjson.dumps(fields)
        # orjson writes NaN as null, a tuple as a list and a UUID as text. What comes back differs then.
        if orjson.loads(data) == fields:
            return _STRICT_JSON, data
    except (TypeError, ValueError):
        pass  # an integer beyond 64 bits, or a value that the next line names
    for name, value in fields.items():
        require_json(value, name)
    return _PYTHON_JSON, json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


def decode_json(dialect: int, text: bytes) -> dict[str, Any]:
    """Return the object that `encode_json` encoded. Raises ValueError for another dialect or what is no JSON."""
    if dialect not in (_STRICT_JSON, _PYTHON_JSON):
        raise ValueError(f"unknown JSON dialect {dialect}")
    fields: dict[str, Any] = (orjson.loads if dialect == _STRICT_JSON else json.loads)(text)
    return fields


def parse_json(text: bytes) -> Any:
    """Return what `json.loads` returns for any text, and raise what it raises, in a third of the time.

    Whatever orjson refuses (NaN, Infinity, a lone surrogate, UTF-16) or would round (an integer beyond 64 bits) is left
    to `json.loads`; of all else both read the same value.
    """
    if not _may_have_long_integer(text):
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError:
            pass
    return json.loads(text)


def _may_have_long_integer(text: bytes) -> bool:
    shape = text.translate(_TO_ZERO)
    at = shape.find(_LONG)
    while at >= 0:
        # Not among the digits of a fraction, of which a float has as many.
        if at == 0 or shape[at - 1] in _BEFORE_A_NUMBER:
            return True
        at = shape.find(_LONG, at + 1)
    return False


def require_json(value: Any, name: str) -> None:
    """Raise InvalidRecordError, naming the place, unless `value` comes back from JSON text as it was given."""
    # One iterator for each level, so that no more is held than where the walk stands.
    levels: list[Iterable[tuple[str | int, Any]]] = [iter([(name, value)])]
    place: list[str | int] = []
    while levels:
        for part, each in levels[-1]:
            place[len(levels) - 1 :] = [part]
            if len(levels) > _DEEPEST_NEST:
                raise _refused(place, f"nested too deeply, more than {_DEEPEST_NEST} levels")
            match each:
                case int() if each.bit_length() > _LONGEST_INT_BITS:
                    raise _refused(place, f"an integer of more than {_LONGEST_INT_BITS} bits")
                case None | bool() | int() | float():
                    pass
                case str():
                    _require_utf8(each, place)
                case list():
                    levels.append(enumerate(each))
                    break
                case dict():
                    for key in each:
                        if not isinstance(key, str):
                            raise _refused(
                                place, f"the key {shown(key)} is {type(key).__name__}; JSON keys are strings"
                            )
                        _require_utf8(key, place, " key")
                    levels.append(iter(each.items()))
                    break
                case _:
                    raise _refused(
                        place,
                        f"{type(each).__name__} would not come back from JSON as it was given; pass lists, dicts, "
                        "strings and numbers",
                    )
        else:
            levels.pop()


def _require_utf8(text: str, place: Sequence[str | int], part: str = "") -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _refused(place, "the text has a lone surrogate, which UTF-8 cannot carry", part) from None


def _refused(place: Sequence[str | int], problem: str, part: str = "") -> InvalidRecordError:
    name, *parts = place
    path = str(name) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return InvalidRecordError(f"{path if len(path) <= 200 else path[:199] + '…'}{part}: {problem}")
