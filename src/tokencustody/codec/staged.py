"""The packed payload of one staged call: its three columns as bytes, exact in every bit.

Layout, staged codec version 1, all integers little-endian:

    byte 0      codec version (1)
    byte 1      width of a token id in bytes: 2, 4 or 8, the narrowest that fits the call
    6 bytes     0
    8 bytes     number of tokens
    then        token ids, log probabilities (float64), and one byte per mask value

The mask byte is the highest byte of the value's float64: 3F for 1.0, 00 for 0.0 and 80 for -0.0. Extras are JSON
text in a column of their own; everything else about the call stands in columns that its digest covers.
"""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import BaseModel, ValidationError

from tokencustody.codec.calls import first_problem
from tokencustody.codec.id_columns import little_endian, numbers
from tokencustody.columns import TYPECODES, narrowest
from tokencustody.errors import CorruptEntryError, InvalidRecordError
from tokencustody.staging.digest import compute_extras_digest
from tokencustody.staging.records import StagedCallBaseSnapshot, StagedCallRecord

STAGED_CODEC_VERSION = 1

# The fields of a staged call that are columns of its row.
CALL_COLUMNS = (
    "rollout_id",
    "model_call_id",
    "parent_call_id",
    "mode",
    "prev_len",
    "delta_len",
    "cum_len",
    "weight_version",
    "digest",
    "extras_digest",
    "chain_hash",
    "cumulative_hash",
)

_HEADER = struct.Struct("<BB6xQ")
_MASK_VALUES = {0x00: 0.0, 0x3F: 1.0, 0x80: -0.0}
_MAX_COLUMN_INT = 2**63 - 1
# SQLite's limit for a value and, within a byte or so, PostgreSQL's.
LARGEST_VALUE = 10**9


@dataclass(frozen=True, slots=True)
class PackedCall:
    """One staged call ready to be stored: its payload, the payload's SHA-256 (hex), the width of its token ids, and
    its extras as JSON."""

    payload: bytes
    sha256: str
    token_width: int
    extras: bytes | None


def validated_call(record: BaseModel) -> StagedCallRecord:
    """Return a checked copy of `record`, ours or another implementation's, whose fields may have been assigned since
    it was made.

    Raises InvalidRecordError that names the field.
    """
    try:
        checked = StagedCallRecord.model_validate(dict(record))
    except ValidationError as exc:
        raise InvalidRecordError(first_problem(exc)) from None
    for field in ("cum_len", "weight_version"):
        value = getattr(checked, field)
        if value > _MAX_COLUMN_INT:
            raise InvalidRecordError(f"{field}: {value} does not lie between 0 and 2^63-1")
    return checked


def pack_call(record: StagedCallRecord) -> PackedCall:
    """Return the packed form of a validated record.

    Raises InvalidRecordError for extras that are nested deeper than JSON parsers read, and for a call that is larger
    than a database value.
    """
    ids = narrowest(record.token_ids_delta)
    payload = b"".join(
        (
            _HEADER.pack(STAGED_CODEC_VERSION, ids.itemsize, len(ids)),
            little_endian(ids),
            little_endian(array("d", record.generation_log_probs_delta)),
            little_endian(array("d", record.token_mask_delta))[7::8],
        )
    )
    try:
        # Its digest admits only values that orjson writes exactly.
        extras = None if record.extras is None else orjson.dumps(record.extras)
    except orjson.JSONEncodeError:
        raise InvalidRecordError("extras: nested too deeply") from None
    for name, value in (("the token columns", payload), ("extras", extras)):
        check_size(value, name)
    return PackedCall(payload, hashlib.sha256(payload).hexdigest(), ids.itemsize, extras)


def check_size(value: bytes | None, name: str) -> None:
    """Raise InvalidRecordError, naming the value, when no database can hold it."""
    if value is not None and len(value) > LARGEST_VALUE:
        raise InvalidRecordError(
            f"{name}: {len(value)} bytes are more than the {LARGEST_VALUE} of a database value"
        )


def unpack_call(row: Any) -> StagedCallBaseSnapshot:
    """Return the call of a row, proven by the hash of its payload and by its digest.

    Raises CorruptEntryError that names the call.
    """
    check_payload(row)
    token_ids, mask, log_probs = unpack_columns(row)
    fields = {name: getattr(row, name) for name in CALL_COLUMNS}
    try:
        return StagedCallBaseSnapshot(
            **fields, token_ids_delta=token_ids, token_mask_delta=mask, generation_log_probs_delta=log_probs
        )
    except ValidationError as exc:
        raise CorruptEntryError(f"{staged_name(row)}: {first_problem(exc)}") from None


def check_payload(row: Any) -> None:
    """Raise CorruptEntryError, naming the call, unless the stored payload has the hash it was stored with."""
    # SQLite may give text, where a flipped bit in its file changed the type of a value.
    if type(row.payload) is not bytes or hashlib.sha256(row.payload).hexdigest() != row.payload_sha256:
        raise CorruptEntryError(
            f"{staged_name(row)}: the stored payload does not match its SHA-256; restore it from a backup"
        )


def unpack_token_ids(row: Any) -> list[int]:
    """Return the token ids of a row, unproven. Raises CorruptEntryError when they do not decode."""
    ids: list[int] = numbers(*_slices(row)[0])
    return ids


def unpack_extras(row: Any) -> dict[str, Any] | None:
    """Return the extras of a row, proven by their digest. Raises CorruptEntryError that names the call."""
    try:
        extras: dict[str, Any] | None = None if row.extras is None else json.loads(row.extras)
        digest = compute_extras_digest(extras)
    except (ValueError, TypeError, RecursionError) as exc:
        raise CorruptEntryError(f"{staged_name(row)}: the stored extras do not decode: {exc}") from exc
    if digest != row.extras_digest:
        raise CorruptEntryError(f"{staged_name(row)}: the stored extras do not match their digest")
    return extras


def differing_columns(first: Any, second: Any) -> list[str]:
    """Return the names of the token columns of two rows that are not the same in every bit."""
    names = ("token_ids_delta", "generation_log_probs_delta", "token_mask_delta")
    return [
        name for name, one, other in zip(names, _slices(first), _slices(second), strict=True) if one != other
    ]


def staged_name(row: Any) -> str:
    """Return the words that name the call of a row."""
    return f"staged call {row.model_call_id} of rollout {row.rollout_id}"


def _slices(row: Any) -> list[tuple[str, bytes]]:
    """Return the type code and bytes of the ids, the log probabilities and the mask."""
    try:
        version, width, count = _HEADER.unpack_from(row.payload)
        if version != STAGED_CODEC_VERSION:
            raise ValueError(
                f"staged codec {version} is not {STAGED_CODEC_VERSION}, the one this library reads"
            )
        slices, offset = [], _HEADER.size
        for code in (TYPECODES[width], "d", "B"):
            end = offset + count * array(code).itemsize
            slices.append((code, row.payload[offset:end]))
            offset = end
        if offset != len(row.payload):
            # Not the count itself: where bytes were moved, it is a token id.
            raise ValueError(f"{len(row.payload)} bytes are not those of the tokens that the header counts")
    except (ValueError, KeyError, TypeError, struct.error) as exc:
        raise CorruptEntryError(f"{staged_name(row)}: the stored payload does not decode: {exc}") from exc
    return slices


def unpack_columns(row: Any) -> tuple[list[int], list[float], list[float]]:
    """Return the token ids, mask and log probabilities of a row, unproven. Raises CorruptEntryError."""
    ids, log_probs, mask = _slices(row)
    try:
        values = list(map(_MASK_VALUES.__getitem__, mask[1]))
    except KeyError as exc:
        raise CorruptEntryError(f"{staged_name(row)}: the stored mask has the byte {exc}") from None
    return numbers(*ids), values, numbers(*log_probs)
