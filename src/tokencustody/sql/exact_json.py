"""JSON from which every value comes back as it was given.

Two dialects: 0 is strict JSON; 1 has NaN, Infinity and integers beyond 64 bits, as Python prints them.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

from tokencustody.errors import InvalidRecordError

_STRICT_JSON, _PYTHON_JSON = 0, 1
# What every JSON parser of this library reads back, whatever the interpreter's recursion limit.
_DEEPEST_NEST = 250
# Python refuses to print or parse decimal numbers of more than 4,300 digits.
_LONGEST_INT_BITS = 14_000


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


def require_json(value: Any, path: str) -> None:
    """Raise InvalidRecordError, naming the place, unless `value` comes back from JSON text as it was given."""
    pending = [(path, value, 1)]
    while pending:
        path, value, depth = pending.pop()
        if depth > _DEEPEST_NEST:
            raise InvalidRecordError(f"{path[:80]}: nested too deeply, more than {_DEEPEST_NEST} levels")
        match value:
            case int() if value.bit_length() > _LONGEST_INT_BITS:
                raise InvalidRecordError(f"{path}: an integer of more than {_LONGEST_INT_BITS} bits")
            case None | bool() | int() | float():
                pass
            case str():
                try:
                    value.encode()
                except UnicodeEncodeError:
                    raise InvalidRecordError(
                        f"{path}: the text has a lone surrogate, which UTF-8 cannot carry"
                    ) from None
            case list():
                pending += [(f"{path}[{index}]", item, depth + 1) for index, item in enumerate(value)]
            case dict():
                for key, item in value.items():
                    if not isinstance(key, str):
                        raise InvalidRecordError(
                            f"{path}: the key {key!r} is {type(key).__name__}; JSON keys are strings"
                        )
                    pending += [(f"{path} key", key, depth), (f"{path}.{key}", item, depth + 1)]
            case _:
                raise InvalidRecordError(
                    f"{path}: {type(value).__name__} would not come back from JSON as it was given; pass lists, dicts, "
                    "strings and numbers"
                )
