"""Attachments of a staged call: opaque values that come back as what they were, with nothing pickled."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokencustody.codec.exact_json import require_json
from tokencustody.codec.staged import check_size, staged_name
from tokencustody.errors import CorruptEntryError, InvalidRecordError
from tokencustody.ids import check_call_id
from tokencustody.states import AttachmentKind

# What a row of `staged_attachments` says about its value besides the value itself.
IDENTITY_COLUMNS = ("name", "kind", "dtype", "shape", "data_sha256")

_JSON_TYPES = {dict, list, int, float, bool, type(None)}
# One number, as the struct module and PEP 3118 write it: byte order, then the code, complex numbers with a Z.
_NUMBER = re.compile(r"([@=<>!^]?)([bhilqnBHILQN?efdg]|Z[fdg])")
_KINDS = dict.fromkeys("bhilqn", "i") | dict.fromkeys("BHILQN", "u") | dict.fromkeys("efdg", "f") | {"?": "b"}
_FIELD_NAME = re.compile(":[^:]*:")


@dataclass(frozen=True, slots=True)
class AttachedBuffer:
    """An attachment that was given as a buffer: a NumPy array, `array.array`, `bytearray` or the like.

    `data` holds the elements in C order, `shape` the length of each dimension, and `dtype` the element's type: NumPy's
    type string, such as `<f4`, or the buffer's own PEP 3118 format where NumPy has none. With NumPy,
    `np.frombuffer(b.data, b.dtype).reshape(b.shape)` is the array again.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def pack_attachments(attachments: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return one row, without its call, for each attachment.

    Takes bytes, text, JSON values of Python's own types (NaN and integers of any size included, tuples not), and
    anything else that has a buffer of plain values. Raises TypeError when `attachments` is no mapping, and
    InvalidRecordError that names the attachment which could not be stored as it is.
    """
    if attachments is None:
        return []
    if not isinstance(attachments, Mapping):
        raise TypeError(f"attachments must be a mapping of names, not {type(attachments).__name__}")
    return [_packed(name, value) for name, value in attachments.items()]


def attachments_sha256(rows: Iterable[tuple[str, str | None]]) -> str:
    """Return the hash (hex) of which attachments a call has, given each one's name and `row_sha256`.

    It is the SHA-256 of one line of JSON, in ASCII and without spaces: a list of [name, row_sha256] in order of names.
    """
    named = sorted([name, sha256] for name, sha256 in rows)
    return hashlib.sha256(json.dumps(named, separators=(",", ":")).encode()).hexdigest()


def unpack_attachment(row: Any) -> Any:
    """Return the value of a row: bytes, text, a JSON value or an `AttachedBuffer`.

    Raises CorruptEntryError that names the call and the attachment.
    """
    this = f"{staged_name(row)}: attachment {row.name!r}"
    # SQLite gives text where a damaged row says so.
    if type(row.data) is not bytes or hashlib.sha256(row.data).hexdigest() != row.data_sha256:
        raise CorruptEntryError(f"{this} does not match its SHA-256; restore it from a backup")
    try:
        match AttachmentKind(row.kind):
            case AttachmentKind.BYTES:
                data: bytes = row.data
                return data
            case AttachmentKind.TEXT:
                return row.data.decode()
            case AttachmentKind.JSON:
                return json.loads(row.data)
            case AttachmentKind.BUFFER:
                return AttachedBuffer(row.dtype, _shape(row.shape), row.data)
    except (ValueError, TypeError, RecursionError) as exc:
        raise CorruptEntryError(f"{this} does not decode: {exc}") from exc


def _shape(text: str) -> tuple[int, ...]:
    lengths = json.loads(text)
    if type(lengths) is not list or any(type(length) is not int for length in lengths):
        raise ValueError("its shape is no list of lengths")
    return tuple(lengths)


def _packed(name: str, value: Any) -> dict[str, Any]:
    check_call_id(name, "the name of an attachment")
    this = f"attachment {name!r}"
    dtype = shape = None
    if type(value) is bytes:
        kind, data = AttachmentKind.BYTES, value
    elif type(value) is str:
        kind, data = AttachmentKind.TEXT, _utf8(value, this)
    elif type(value) in _JSON_TYPES:
        kind, data = AttachmentKind.JSON, _json(value, this)
    else:
        kind, (dtype, lengths, data) = AttachmentKind.BUFFER, _buffer(value, this)
        shape = json.dumps(lengths)
    check_size(data, this)
    return {
        "name": name,
        "kind": kind,
        "dtype": dtype,
        "shape": shape,
        "data": data,
        "data_sha256": hashlib.sha256(data).hexdigest(),
    }


def _utf8(value: str, this: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise InvalidRecordError(f"{this}: the text has a lone surrogate, which UTF-8 cannot carry") from None


def _json(value: Any, this: str) -> bytes:
    require_json(value, this)
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except ValueError as exc:  # an integer of more digits than Python prints
        raise InvalidRecordError(f"{this}: {exc}") from None


def _buffer(value: Any, this: str) -> tuple[str, list[int], bytes]:
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError) as exc:
        raise InvalidRecordError(
            f"{this}: {type(value).__name__} is neither bytes, text, a JSON value nor a buffer ({exc}); give an array, "
            "such as tensor.cpu().numpy() for a torch tensor"
        ) from None
    with view:
        codes = set(_FIELD_NAME.sub("", view.format))
        if codes & set("OP&X"):
            raise InvalidRecordError(f"{this}: its elements are objects or pointers, not plain values")
        return _dtype(value, view), list(view.shape or ()), view.tobytes()


def _dtype(value: Any, view: memoryview) -> str:
    described = getattr(value, "__array_interface__", None)
    typestr = described.get("typestr") if isinstance(described, dict) else None
    # A structure's type string is only its size; its format names the fields.
    if isinstance(typestr, str) and typestr[1:2] != "V":
        return typestr
    number = _NUMBER.fullmatch(view.format)
    if number is None:
        return view.format
    order, code = number.groups()
    if view.itemsize == 1:
        order = "|"
    elif order not in ("<", ">"):
        order = ">" if order == "!" or sys.byteorder == "big" else "<"
    return f"{order}{_KINDS.get(code, 'c')}{view.itemsize}"
