"""Columns of numbers as the payload holds them: token ids of 2, 4 or 8 bytes and float64, little-endian."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokencustody.columns import TYPECODES, narrowest, widened
from tokencustody.records import digest_of_uint64s


@dataclass(frozen=True, slots=True)
class PackedIds:
    """Token ids, each `width` bytes wide as in a payload."""

    width: int
    data: bytes

    @classmethod
    def of(cls, ids: Sequence[int]) -> PackedIds:
        """Return validated ids packed as narrow as they can be."""
        column = narrowest(ids)
        return cls(column.itemsize, little_endian(column))

    def __len__(self) -> int:
        return len(self.data) // self.width

    def token_ids(self) -> list[int]:
        """Return the ids."""
        return decoded(TYPECODES[self.width], self.data, 0, len(self))

    def column(self) -> array[int]:
        """Return the ids as a column of this machine."""
        return _swapped_on_big_endian(array(TYPECODES[self.width], self.data))

    def at_width(self, width: int) -> array[int]:
        """Return the ids as the payload holds them at a width of at least their own."""
        return _swapped_on_big_endian(widened(self.column(), width))

    def followed_by(self, more: PackedIds) -> PackedIds:
        """Return these ids and then `more`, as wide as the wider of the two."""
        width = max(self.width, more.width)
        return PackedIds(width, resized(self.data, self.width, width) + resized(more.data, more.width, width))


def pack_ids(ids: list[int], width: int) -> array[int]:
    """Return ids as the payload holds them at `width`; the array is right in its bytes, not in its values.

    Raises OverflowError for an id that does not fit.
    """
    return _swapped_on_big_endian(array(TYPECODES[width], ids))


def resized(data: bytes, width: int, to: int) -> bytes:
    """Return ids as a payload holds them at `width` bytes each, at the width `to`, without an integer of any of them.

    Raises OverflowError for an id that does not fit.
    """
    if width == to:
        return data
    for place in range(to, width):
        if data[place::width].strip(b"\0"):
            raise OverflowError(f"an id does not fit into {to} bytes")
    out = bytearray(len(data) // width * to)
    for place in range(min(width, to)):
        out[place::to] = data[place::width]
    return bytes(out)


def wide_ids(data: bytes, width: int) -> array[int]:
    """Return ids as a payload holds them, as a column of this machine of 64 bits."""
    column = array(TYPECODES[width])
    column.frombytes(data)
    return widened(_swapped_on_big_endian(column), 8)


def float64s(data: bytes) -> array[float]:
    """Return numbers as a payload holds them, as a column of this machine."""
    column = array("d")
    column.frombytes(data)
    return _swapped_on_big_endian(column)


def is_beyond_int64(ids: array[int]) -> bool:
    """Return whether an id of a column of 64 bits is 2^63 or more."""
    highest = 7 if sys.byteorder == "little" else 0
    return not memoryview(ids).cast("B")[highest::8].tobytes().isascii()


def big_endian(ids: array[int]) -> array[int]:
    """Return a copy of a column of 64 bits as digests read it; right in its bytes, not in its values."""
    column = ids[:]
    if sys.byteorder == "little":
        column.byteswap()
    return column


def digest_of_big_endian(column: array[int] | memoryview[int]) -> str:
    """Return what `compute_digest` does for the ids of a column as `big_endian` returns it."""
    with memoryview(column) as numbers, numbers.cast("B") as encoded:
        return digest_of_uint64s(encoded)


def digest_of_ids(ids: list[int]) -> str:
    """Return what `compute_digest` does for ids that were validated before, in half the time."""
    return digest_of_big_endian(big_endian(array("Q", ids)))


def _swapped_on_big_endian(column: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        column.byteswap()
    return column


def little_endian(column: array[Any]) -> bytes:
    """Return the bytes of a column that has the byte order of this machine, and keeps it."""
    return _swapped_on_big_endian(column[:]).tobytes() if sys.byteorder == "big" else column.tobytes()


def decoded(code: str, body: bytes, start: int, count: int) -> list[Any]:
    """Return `count` numbers of type code `code` that stand in `body` from `start` on."""
    return numbers(code, body[start : start + count * array(code).itemsize])


def numbers(code: str, data: bytes) -> list[Any]:
    """Return the numbers of type code `code` that `data` holds."""
    column = array(code)
    column.frombytes(data)
    return _swapped_on_big_endian(column).tolist()
