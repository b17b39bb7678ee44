"""The packed payload of a staged call and its attachments: exact in every bit, and refused when they cannot be."""

from __future__ import annotations

import array
import ctypes
import hashlib
import math
import struct
from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.staged import stage
from tokencustody.codec import staged as staged_codec
from tokencustody.codec.attachments import AttachedBuffer, pack_attachments, unpack_attachment
from tokencustody.codec.staged import CALL_COLUMNS, pack_call, unpack_call, unpack_extras, validated_call
from tokencustody.errors import CorruptEntryError, InvalidRecordError
from tokencustody.staging.records import StagedCallRecord, StagedCallSnapshot

IDS = st.one_of(st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
LOG_PROBS = st.floats(allow_nan=False, allow_infinity=False, width=64, min_value=-3e38, max_value=3e38)
EXTRAS = st.none() | st.dictionaries(
    st.text(),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text() | LOG_PROBS,
        lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    ),
    max_size=4,
)
TOKENS = st.lists(st.tuples(IDS, st.sampled_from([1.0, 0.0, -0.0]), LOG_PROBS), min_size=1, max_size=20)


def row_of(record: StagedCallRecord, **changes: Any) -> Any:
    """Return the row that would be stored, as the database gives it back."""
    packed = pack_call(record)
    columns = {name: getattr(record, name) for name in CALL_COLUMNS}
    row = columns | {"payload": packed.payload, "payload_sha256": packed.sha256, "extras": packed.extras}
    return SimpleNamespace(**(row | changes))


def rebuilt(snapshot: StagedCallSnapshot, **columns: Any) -> StagedCallSnapshot:
    """Return a record with other columns and the digest for them."""
    fields = {name: value for name, value in dict(snapshot).items() if not name.endswith("_version")}
    del fields["digest"]
    return StagedCallSnapshot.from_components(
        **(fields | {"weight_version": snapshot.weight_version} | columns)
    )


@given(tokens=TOKENS, extras=EXTRAS)
def test_what_was_packed_comes_back_in_every_bit(
    tokens: list[tuple[int, float, float]], extras: dict[str, Any] | None
) -> None:
    ids, mask, log_probs = (list(column) for column in zip(*tokens, strict=True))
    log_probs = [
        value if sampled else math.copysign(0.0, value)
        for value, sampled in zip(log_probs, mask, strict=True)
    ]
    record = rebuilt(
        stage("call-1", added=ids, sampled=[], extras=extras).snapshot,
        token_mask_delta=mask,
        generation_log_probs_delta=log_probs,
    )
    row = row_of(record)
    assert repr(unpack_call(row)) == repr(
        unpack_call(row).model_validate(record.model_dump(exclude={"extras"}))
    )
    assert repr(unpack_extras(row)) == repr(extras)


@pytest.mark.parametrize(
    ("highest", "width"),
    [(0, 2), (2**16 - 1, 2), (2**16, 4), (2**32 - 1, 4), (2**32, 8), (2**64 - 1, 8)],
)
def test_token_ids_take_the_narrowest_width_that_fits_the_call(highest: int, width: int) -> None:
    packed = pack_call(stage("call-1", added=[7], sampled=[highest]).snapshot)
    assert (packed.payload[1], packed.token_width) == (width, width)
    assert len(packed.payload) == 16 + 2 * (width + 8 + 1)


def test_the_layout_is_the_documented_one() -> None:
    record = stage("call-1", added=[258], sampled=[3]).snapshot
    assert record.generation_log_probs_delta == [0.0, -0.5]
    packed = pack_call(record)
    assert packed.payload == (
        bytes([1, 2, 0, 0, 0, 0, 0, 0])
        + struct.pack("<Q", 2)
        + struct.pack("<2H", 258, 3)
        + struct.pack("<2d", 0.0, -0.5)
        + bytes([0x00, 0x3F])
    )


DAMAGES: dict[str, dict[str, Any]] = {
    "another codec": {"payload": b"\x02" + pack_call(stage("call-1").snapshot).payload[1:]},
    "an unknown width": {"payload": b"\x01\x03" + pack_call(stage("call-1").snapshot).payload[2:]},
    "a cut header": {"payload": b"\x01\x02"},
    "a cut column": {"payload": pack_call(stage("call-1").snapshot).payload[:-1]},
    "a byte too many": {"payload": pack_call(stage("call-1").snapshot).payload + b"\0"},
    "a strange mask": {"payload": pack_call(stage("call-1").snapshot).payload[:-1] + b"\x40"},
    "another token": {"payload": pack_call(stage("call-1", sampled=[4]).snapshot).payload},
    "another weight version": {"weight_version": 2},
    "another call": {"model_call_id": "call-2"},
    "another chain hash": {"chain_hash": "0" * 64},
}


@pytest.mark.parametrize("changes", DAMAGES.values(), ids=DAMAGES)
def test_a_row_that_was_changed_is_refused_by_name_even_with_the_right_payload_hash(
    changes: dict[str, Any],
) -> None:
    row = row_of(stage("call-1").snapshot, **changes)
    row.payload_sha256 = hashlib.sha256(row.payload).hexdigest()
    with pytest.raises(CorruptEntryError, match=f"staged call {row.model_call_id} of rollout r: "):
        unpack_call(row)


def test_a_log_probability_that_changed_below_float32_is_seen_by_the_payload_hash() -> None:
    record = stage("call-1").snapshot
    near = [math.nextafter(value, 0) for value in record.generation_log_probs_delta]
    changed = rebuilt(record, generation_log_probs_delta=near)
    assert changed.digest == record.digest
    with pytest.raises(CorruptEntryError, match="does not match its SHA-256"):
        unpack_call(row_of(record, payload=pack_call(changed).payload))


@pytest.mark.parametrize("extras", [b'{"k":2}', b"{", b"[1]", b'{"k":1e999}', None])
def test_extras_that_were_changed_are_refused(extras: bytes | None) -> None:
    with pytest.raises(CorruptEntryError, match="staged call call-1 of rollout r: the stored extras"):
        unpack_extras(row_of(stage("call-1", extras={"k": 1}).snapshot, extras=extras))


def test_fields_that_were_assigned_after_validation_are_checked_again() -> None:
    record = stage("call-1").snapshot
    record.weight_version = 2
    with pytest.raises(InvalidRecordError, match="digest does not match"):
        validated_call(record)
    with pytest.raises(InvalidRecordError, match=r"weight_version: 9223372036854775808 does not lie between"):
        validated_call(stage("call-1", weight_version=2**63).snapshot)
    validated_call(stage("call-1", weight_version=2**63 - 1).snapshot)


def test_extras_deeper_than_json_parsers_read_are_refused() -> None:
    nested: dict[str, Any] = {}
    for _ in range(300):
        nested = {"k": nested}
    with pytest.raises(InvalidRecordError, match="extras: nested too deeply"):
        pack_call(stage("call-1", extras=nested).snapshot)


@pytest.mark.parametrize("limit", [30, 60])
def test_what_no_database_value_can_hold_is_refused(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_codec, "LARGEST_VALUE", limit)
    with pytest.raises(InvalidRecordError, match=f"bytes are more than the {limit}"):
        pack_call(stage("call-1", extras={"k": "x" * 60}).snapshot)
    with pytest.raises(InvalidRecordError, match=r"attachment 'a': 61 bytes are more"):
        pack_attachments({"a": b"x" * 61})


# Attachments


def returned(value: Any) -> Any:
    """Return an attachment as it comes back from its row."""
    (packed,) = pack_attachments({"a": value})
    return unpack_attachment(SimpleNamespace(rollout_id="r", model_call_id="call-1", **packed))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
)


@given(value=JSON_VALUES | st.binary())
def test_bytes_text_and_json_values_come_back_as_they_were_given(value: Any) -> None:
    assert repr(returned(value)) == repr(value)


class Point(ctypes.Structure):
    _fields_ = (("O", ctypes.c_double), ("y", ctypes.c_double))


class NumpyLike(ctypes.c_uint16 * 2):  # type: ignore[misc]
    __array_interface__ = {"typestr": "<f2"}  # noqa: RUF012 - a class attribute that nobody changes


class NumpyLikeStructure(Point):
    __array_interface__ = {"typestr": "|V16"}  # noqa: RUF012


BUFFERS: list[tuple[Any, AttachedBuffer]] = [
    (bytearray(b"abc"), AttachedBuffer("|u1", (3,), b"abc")),
    (memoryview(b"abc"), AttachedBuffer("|u1", (3,), b"abc")),
    (memoryview(b"abcdef")[::2], AttachedBuffer("|u1", (3,), b"ace")),
    (
        memoryview(b"abcdef").cast("B", (2, 3)),
        AttachedBuffer("|u1", (2, 3), b"abcdef"),
    ),
    (memoryview(b"\1\0").cast("?"), AttachedBuffer("|b1", (2,), b"\1\0")),
    (array.array("d"), AttachedBuffer("<f8", (0,), b"")),
    *(
        (array.array(code, [1, 2]), AttachedBuffer(dtype, (2,), struct.pack(f"<2{packing}", 1, 2)))
        for code, dtype, packing in [
            ("b", "|i1", "b"),
            ("H", "<u2", "H"),
            ("i", "<i4", "i"),
            ("L", "<u8", "Q"),
            ("q", "<i8", "q"),
            ("f", "<f4", "f"),
            ("d", "<f8", "d"),
        ]
    ),
    (ctypes.c_int32(5), AttachedBuffer("<i4", (), struct.pack("<i", 5))),
    ((ctypes.c_int16.__ctype_be__ * 1)(5), AttachedBuffer(">i2", (1,), struct.pack(">h", 5))),
    (((ctypes.c_float * 2) * 1)((1, 2)), AttachedBuffer("<f4", (1, 2), struct.pack("<2f", 1, 2))),
    (NumpyLike(1, 2), AttachedBuffer("<f2", (2,), struct.pack("<2H", 1, 2))),
    (Point(1.0, 2.0), AttachedBuffer("T{<d:O:<d:y:}", (), bytes(Point(1.0, 2.0)))),
    (
        NumpyLikeStructure(1.0, 2.0),
        AttachedBuffer("T{<d:O:<d:y:}", (), bytes(Point(1.0, 2.0))),
    ),
]


@pytest.mark.parametrize(("value", "expected"), BUFFERS)
def test_a_buffer_comes_back_with_its_type_its_shape_and_its_elements_in_c_order(
    value: Any, expected: AttachedBuffer
) -> None:
    assert returned(value) == expected


def cyclic() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


class Colour(IntEnum):
    RED = 1


REFUSED: dict[str, Any] = {
    "a tuple": (1, 2),
    "a tuple inside": [(1, 2)],
    "a set": {1},
    "bytes inside": {"k": b"x"},
    "a key that is no text": {1: 2},
    "an object": object(),
    "an enumeration": Colour.RED,
    "an iterator": iter([1]),
    "a lone surrogate": "\ud800",
    "a lone surrogate inside": ["\ud800"],
    "a circle": cyclic(),
    "an integer that Python does not print": 10**5000,
    "Python objects in a buffer": (ctypes.py_object * 1)(object()),
    "pointers in a buffer": (ctypes.c_void_p * 1)(0),
    "pointers to numbers in a buffer": (ctypes.POINTER(ctypes.c_int) * 1)(),
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_an_attachment_that_would_not_come_back_as_it_is_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidRecordError, match=r"^attachment 'a'"):
        pack_attachments({"fine": b"x", "a": value})


def test_a_released_buffer_is_refused() -> None:
    view = memoryview(b"abc")
    view.release()
    with pytest.raises(InvalidRecordError, match=r"^attachment 'a'"):
        pack_attachments({"a": view})


@pytest.mark.parametrize("name", ["", "a\0", "\ud800", "x" * 513, 7])
def test_the_name_of_an_attachment_is_text_that_a_database_can_hold(name: Any) -> None:
    with pytest.raises(InvalidRecordError, match="the name of an attachment"):
        pack_attachments({name: b"x"})


@pytest.mark.parametrize("attachments", [[("a", b"x")], b"x", "a", 1])
def test_attachments_that_are_no_mapping_are_the_callers_error(attachments: Any) -> None:
    with pytest.raises(TypeError, match="attachments must be a mapping"):
        pack_attachments(attachments)
    empty: Mapping[str, Any] = MappingProxyType({})
    assert pack_attachments(empty) == pack_attachments(None) == []


@pytest.mark.parametrize(
    ("value", "changes", "said"),
    [
        (b"x", {"data": b"y"}, "does not match its SHA-256"),
        (b"\xff", {"kind": "text"}, "does not decode"),
        (b"{", {"kind": "json"}, "does not decode"),
        (b"x", {"kind": "pickle"}, "does not decode"),
        (bytearray(b"x"), {"shape": "{"}, "does not decode"),
    ],
)
def test_an_attachment_that_was_changed_is_refused_by_name(
    value: Any, changes: dict[str, Any], said: str
) -> None:
    (packed,) = pack_attachments({"a": value})
    with pytest.raises(CorruptEntryError, match=f"staged call call-1 of rollout r: attachment 'a' {said}"):
        unpack_attachment(SimpleNamespace(rollout_id="r", model_call_id="call-1", **(packed | changes)))
