"""The packed payload of one call: columns of numbers as bytes, everything else as JSON, exact in every bit.

Layout, codec version 1, all integers little-endian:

    byte 0      codec version (1)
    byte 1      width of a token id in bytes: 2, 4 or 8, the narrowest that fits the call
    byte 2      JSON dialect: 0 strict JSON, 1 with NaN, Infinity and integers beyond 64 bits, as Python prints them
    byte 3      0
    8 bytes     number of prompt ids
    8 bytes     number of generated ids, which is also the number of log probabilities
    then        prompt ids, generated ids, log probabilities (float64), and the other fields as one JSON object

JSON text knows one NaN: outside the log probabilities, which keep every bit, a NaN comes back without its sign and
payload bits. The SHA-256 of these bytes is the identity of the payload. The JSON keeps the order in
which the writer gave its keys, so what is read prints like what was written.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from tokencustody.errors import CorruptEntryError, InvalidRecordError
from tokencustody.records import TOKEN_FIELDS, ParentResolutionStatus, TokenEntry

Entry = TypeVar("Entry", bound=BaseModel)

CODEC_VERSION = 1
# The form that leaves out a prefix of the prompt which another call holds.
SHARED_CODEC_VERSION = 2

_HEADER = struct.Struct("<BBBxQQ")
_TYPECODES = {array(code).itemsize: code for code in "HIQ"}
_STRICT_JSON, _PYTHON_JSON = 0, 1
_MAX_COLUMN_INT = 2**63 - 1
# What every JSON parser of this library reads back, whatever the interpreter's recursion limit.
_DEEPEST_NEST = 250
# Python refuses to print or parse decimal numbers of more than 4,300 digits.
_LONGEST_INT_BITS = 14_000


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """One call ready to be stored: its payload, the payload's SHA-256 (hex) and the width of its token ids."""

    payload: bytes
    sha256: str
    token_width: int


def validated(entry: TokenEntry) -> TokenEntry:
    """Return a checked copy of `entry`, whose fields may have been assigned since it was made.

    Raises InvalidRecordError that names the field.
    """
    if not isinstance(entry, TokenEntry):
        raise InvalidRecordError(f"entry must be a TokenEntry, not {type(entry).__name__}")
    try:
        checked = TokenEntry.model_validate(dict(entry))
    except ValidationError as exc:
        raise InvalidRecordError(first_problem(exc)) from None
    for field in ("cum_len", "continuation_context_len", "fingerprint_version"):
        value = getattr(checked, field)
        if value is not None and not 0 <= value <= _MAX_COLUMN_INT:
            raise InvalidRecordError(f"{field} does not lie between 0 and 2^63-1")
    return checked


def pack_entry(entry: TokenEntry) -> PackedEntry:
    """Return the packed form of a validated entry.

    Raises InvalidRecordError, naming the field, for an id outside 0 … 2^64-1 and for a value that would not come
    back from JSON as it was given (a tuple, bytes, a lone surrogate, a key that is no string).
    """
    prompt = _id_column(entry.prompt_token_ids, "prompt_token_ids")
    generation = _id_column(entry.generation_token_ids, "generation_token_ids")
    width = max(_width(prompt), _width(generation))
    dialect, fields = _encode_fields({name: value for name, value in entry if name not in TOKEN_FIELDS})
    payload = b"".join(
        (
            _HEADER.pack(CODEC_VERSION, width, dialect, len(prompt), len(generation)),
            _narrow(prompt, width),
            _narrow(generation, width),
            _little_endian(array("d", entry.generation_log_probs)),
            fields,
        )
    )
    return PackedEntry(payload, hashlib.sha256(payload).hexdigest(), width)


def unpack_entry(payload: bytes, sha256: str, *, rollout_id: str, model_call_id: str) -> TokenEntry:
    """Return the entry that was packed, proven by its hash and by the ids under which it was stored.

    Raises CorruptEntryError that names the call.
    """
    where = f"model call {model_call_id} of rollout {rollout_id}"
    if payload is None:
        raise CorruptEntryError(f"{where}: the stored payload is missing; restore it from a backup")
    if hashlib.sha256(payload).hexdigest() != sha256:
        raise CorruptEntryError(
            f"{where}: the stored payload does not match its SHA-256; restore it from a backup"
        )
    try:
        fields = _unpack_fields(payload)
        # The hash proves that these are the bytes of a validated entry; validating again proves nothing more.
        entry = construct(TokenEntry, fields)
    except (ValueError, struct.error, KeyError, TypeError, RecursionError) as exc:
        raise CorruptEntryError(f"{where}: the stored payload does not decode: {exc}") from exc
    if (entry.rollout_id, entry.model_call_id) != (rollout_id, model_call_id):
        raise CorruptEntryError(
            f"{where}: the stored payload belongs to another call; the row was copied or edited"
        )
    return entry


def differing_fields(first: TokenEntry, second: TokenEntry) -> list[str]:
    """Return the names of the fields whose values are not the same in every bit, sorted.

    The order of keys does not count: a client that prints its record again may sort them.
    """
    fields_of_first, fields_of_second = dict(first), dict(second)
    return sorted(
        name
        for name in fields_of_first.keys() | fields_of_second.keys()
        if _in_bits(fields_of_first.get(name, ...)) != _in_bits(fields_of_second.get(name, ...))
    )


def _in_bits(value: Any) -> Any:
    match value:
        case float():
            return struct.pack("<d", value)  # two NaN are never equal, and 0.0 equals -0.0
        case list():
            return [_in_bits(item) for item in value]
        case dict():
            return {key: _in_bits(item) for key, item in value.items()}
        case str():
            return str(value)
        case _:
            return type(value), value


def construct(model: type[Entry], fields: Mapping[str, Any]) -> Entry:
    """Return an unchecked instance of `model` that shares the values of `fields`, the unknown ones too."""
    declared = model.model_fields
    entry = model.model_construct(**{name: fields[name] for name in fields if name in declared})
    # Not as arguments: an unknown field may be called `cls`.
    if entry.model_extra is not None:
        entry.model_extra.update({name: fields[name] for name in fields if name not in declared})
    return entry


def first_problem(exc: ValidationError) -> str:
    """Return the first complaint of pydantic as "field: message", without the value."""
    problem = exc.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    return f"{field}: {message}" if field else message


def _id_column(ids: list[int], field: str) -> array[int]:
    try:
        return array("Q", ids)
    except OverflowError:
        raise InvalidRecordError(f"{field}: every id must lie between 0 and 2^64-1") from None


def _width(ids: array[int]) -> int:
    highest = max(ids, default=0)
    return 2 if highest < 1 << 16 else 4 if highest < 1 << 32 else 8


def _narrow(ids: array[int], width: int) -> bytes:
    return _little_endian(ids if width == 8 else array(_TYPECODES[width], ids))


def _little_endian(column: array[Any]) -> bytes:
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _encode_fields(fields: dict[str, Any]) -> tuple[int, bytes]:
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


def _unpack_fields(payload: bytes) -> dict[str, Any]:
    version, width, dialect, prompt_len, generation_len = _HEADER.unpack_from(payload)
    if version != CODEC_VERSION:
        raise ValueError(f"payload codec {version} is not {CODEC_VERSION}, the one this library reads")
    if dialect not in (_STRICT_JSON, _PYTHON_JSON):
        raise ValueError(f"unknown JSON dialect {dialect}")
    offset = _HEADER.size
    columns: list[list[Any]] = []
    for code, count in (
        (_TYPECODES[width], prompt_len),
        (_TYPECODES[width], generation_len),
        ("d", generation_len),
    ):
        column = array(code)
        end = offset + count * column.itemsize
        if end > len(payload):
            raise ValueError("the payload ends inside a column")
        column.frombytes(payload[offset:end])
        if sys.byteorder == "big":
            column.byteswap()
        columns.append(column.tolist())
        offset = end
    fields: Mapping[str, Any] = (orjson.loads if dialect == _STRICT_JSON else json.loads)(payload[offset:])
    resolution = fields["parent_resolution"]
    return {
        **fields,
        **dict(zip(TOKEN_FIELDS, columns, strict=True)),
        "parent_resolution": None if resolution is None else ParentResolutionStatus(resolution),
    }
