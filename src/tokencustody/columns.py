"""Columns of numbers that come as buffers (PEP 3118): `array.array`, NumPy arrays, memory views.

What is kept of a buffer is a copy, an `array.array`: ids in the narrowest of the type codes H, I and Q that holds them
all, floats as d. It is made by whole columns; no list is made on the way.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    FailFast,
    PlainSerializer,
    StrictFloat,
    StrictInt,
    WrapValidator,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Of token ids, by the bytes of one.
TYPECODES = {array(code).itemsize: code for code in "HIQ"}

_IDS = frozenset(TYPECODES.values())
_UNSIGNED = {array(code).itemsize: code for code in "BHIQ"}
_FLOATS = {array(code).itemsize: code for code in "fd"}
# Byte order and code, as the struct module writes them.
_INTEGER = re.compile("([@=<>!^]?)([bhilqnBHILQN])")
_FLOAT = re.compile("([@=<>!^]?)([fd])")
# Which of the two halves of a number is which, on this machine.
_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)
_FOREIGN_ORDERS = (">", "!") if sys.byteorder == "little" else ("<",)
_OUT_OF_RANGE = "every id must lie between 0 and 2^64-1"


class ColumnModel(BaseModel):
    """A model whose columns may be arrays. It equals the one whose columns are the same numbers in lists."""

    def __eq__(self, other: object) -> bool:
        return BaseModel.__eq__(with_lists(self), with_lists(other))


def ids_of(values: Any, field: str) -> Any:
    """Return ids that came as a buffer as the narrowest array, and those of any other sequence as a list.

    Such an array, or a list, is returned as it is, and no element of a list is looked at. Raises ValueError, naming
    `field`, for what is no sequence, text and bytes included, for a buffer that is no column of integers of 1, 2, 4 or
    8 bytes, and for a negative id in one.
    """
    column = _ids(values, field)
    return _listed(values, field=field) if column is None else column


def floats_of(values: Any, field: str) -> Any:
    """Return float64 or float32 numbers that came as a buffer as an array of float64, and others as a list.

    Such an array, or a list, is returned as it is. Raises ValueError as `ids_of` does.
    """
    column = _floats(values, field)
    return _listed(values, field=field) if column is None else column


def as_list(values: Any) -> Any:
    """Return the numbers of an array, of any kind that a column may be, as a list, and anything else as it is."""
    for column_of in (_ids, _floats):
        try:
            column = column_of(values)
        except ValueError:
            continue
        if column is not None:
            return column.tolist()
    return values


def with_lists(value: Any) -> Any:
    """Return a copy of a `ColumnModel` whose arrays are lists; one without arrays, and anything else, as it is."""
    if not isinstance(value, ColumnModel):
        return value
    lists = {
        name: column
        for name, given in value.__dict__.items()
        # Most fields are none of the columns, and to find no buffer takes long.
        if not isinstance(given, list | str | int | float | None) and (column := as_list(given)) is not given
    }
    return value.model_copy(update=lists) if lists else value


def _keep_ids(values: Any, as_a_list: Callable[[Any], Any]) -> Any:
    return _kept(values, _ids(values), as_a_list)


def _keep_floats(values: Any, as_a_list: Callable[[Any], Any]) -> Any:
    return _kept(values, _floats(values), as_a_list)


def _kept(given: Any, column: array[Any] | None, as_a_list: Callable[[Any], Any]) -> Any:
    """Return what a model keeps: an array of its own, or what pydantic makes of anything else."""
    if column is None:
        return as_a_list(given)
    return column[:] if column is given else column


def _listed(values: Any, *, field: str = "") -> list[Any]:
    if isinstance(values, list):
        return values
    if not isinstance(values, Sequence) or isinstance(values, str | bytes | bytearray):
        instead = "; it has .tolist()" if hasattr(values, "tolist") else ""
        raise _refusal(
            field,
            f"must be a list of plain numbers or an array of them, not {type(values).__name__}{instead}",
        )
    return list(values)


_Number = TypeVar("_Number")
# One complaint is enough: a list of 200,000 wrong ids would fill a log.
_List = Annotated[list[_Number], FailFast(), BeforeValidator(_listed)]
Ids = Annotated[_List[StrictInt], WrapValidator(_keep_ids), PlainSerializer(as_list, return_type=list[int])]
Floats = Annotated[
    _List[StrictFloat], WrapValidator(_keep_floats), PlainSerializer(as_list, return_type=list[float])
]


def narrowest(ids: Sequence[int]) -> array[int]:
    """Return the ids in the narrowest array that holds them. Raises OverflowError outside 0 … 2^64-1.

    It may be the array that was given.
    """
    if isinstance(ids, array):
        return _narrowed(ids)
    for code in "HI":
        try:
            return array(code, ids)
        except OverflowError:
            continue  # at the first id that does not fit: far cheaper than asking for the highest
    return array("Q", ids)


def widened(column: array[int], width: int) -> array[int]:
    """Return an array of unsigned ids at a width of at least its own. It may be the array that was given."""
    if column.itemsize == width:
        return column
    wide = array(TYPECODES[width], [0]) * len(column)
    ratio = width // column.itemsize
    parts: Any = memoryview(wide).cast("B")
    parts = parts.cast(column.typecode)
    parts[_LOW * (ratio - 1) :: ratio] = memoryview(column)
    return wide


def uint64s(ids: Sequence[int] | Buffer, field: str) -> array[int]:
    """Return ids as an array of 64 bits each, which shares nothing with them.

    Raises ValueError, naming `field`, for anything but integers from 0 to 2^64-1; in a list they are Python's own.
    """
    values = ids_of(ids, field)
    if type(values) is not array:
        return _packed(values, field, "Q")
    wide = widened(values, 8)
    return wide[:] if wide is ids else wide


def joined(first: Any, second: Any, field: str) -> Any:
    """Return the ids of two columns as one: two lists as a list, anything else as an array.

    Raises ValueError as `uint64s` does, but for two lists.
    """
    if isinstance(first, list) and isinstance(second, list):
        return first + second
    columns = _array(first, field), _array(second, field)
    width = max(column.itemsize for column in columns)
    return widened(columns[0], width) + widened(columns[1], width)


def are_same(first: Any, second: Any, field: str) -> bool:
    """Return whether two columns hold the same ids. Raises ValueError as `uint64s` does, but for two lists."""
    if isinstance(first, list) and isinstance(second, list):
        return first == second
    return _array(first, field) == _array(second, field)


def _ids(values: Any, field: str = "") -> array[int] | None:
    """Return ids that came as a buffer as the narrowest array, which may be the one given, and None for others."""
    if type(values) is array and values.typecode in _IDS:
        return narrowest(values)
    if (view := _view(values, field)) is None:
        return None
    order, code = _format(view, _INTEGER, "integers of 1, 2, 4 or 8 bytes", field)
    width = view.itemsize
    # What has elements says how large they are; the format of plain memory is that of bytes.
    if width == 1 and not order and not hasattr(view.obj, "itemsize"):
        raise _refusal(
            field, "bytes do not say how wide an id is: cast them first, as memoryview(...).cast('I') does"
        )
    column = _native(view, _UNSIGNED[width], order)
    ids = narrowest(column)
    # Of a negative number the highest bit is set: its column did not become narrower, its highest byte is not in ASCII.
    if (
        code.islower()
        and ids.itemsize >= width
        and not column.tobytes()[_HIGH * (width - 1) :: width].isascii()
    ):
        raise _refusal(field, _OUT_OF_RANGE)
    return ids


def _floats(values: Any, field: str = "") -> array[float] | None:
    if type(values) is array and values.typecode == "d":
        return values
    if (view := _view(values, field)) is None:
        return None
    order, _ = _format(view, _FLOAT, "float64 or float32", field)
    column = _native(view, _FLOATS[view.itemsize], order)
    return column if column.typecode == "d" else array("d", column)


def _view(values: Any, field: str) -> memoryview | None:
    # Bytes do not say how wide an id is.
    if isinstance(values, list | tuple | bytes | bytearray):
        return None
    try:
        view = memoryview(values)
    except TypeError:
        return None
    except (ValueError, BufferError) as exc:
        raise _refusal(field, f"{type(values).__name__} gives no buffer: {exc}") from None
    # Its buffer has the numbers that it hides.
    if hasattr(values, "mask"):
        raise _refusal(
            field, "a masked array hides numbers: hand over what .filled() or .compressed() returns"
        )
    if view.ndim != 1:
        raise _refusal(field, f"an array must have one dimension, not {view.ndim}")
    return view


def _format(view: memoryview, known: re.Pattern[str], wanted: str, field: str) -> tuple[str, str]:
    match = known.fullmatch(view.format)
    if match is None:
        raise _refusal(
            field, f"the elements of an array must be {wanted}, not of the format {view.format[:40]!r}"
        )
    return match[1], match[2]


def _native(view: memoryview, code: str, order: str) -> array[Any]:
    """Return a copy of a buffer, whose numbers stand in the byte order `order`, as an array of type code `code`."""
    column: array[Any] = array(code, view.tobytes())
    if order in _FOREIGN_ORDERS:
        column.byteswap()
    return column


def _narrowed(column: array[int]) -> array[int]:
    if column.itemsize == 1:
        return array("H", column)
    while column.itemsize > 2:
        halves = array(_UNSIGNED[column.itemsize // 2], column.tobytes())
        high = halves[_HIGH::2].tobytes()
        if high != bytes(len(high)):
            break
        column = halves[_LOW::2]
    return column


def _array(ids: Any, field: str) -> array[int]:
    values = ids_of(ids, field)
    return values if type(values) is array else _packed(values, field)


def _packed(ids: Sequence[int], field: str, code: str = "") -> array[int]:
    """Return ids of no buffer as an array of type code `code`, or the narrowest."""
    # An array takes whatever can be made an integer, such as True.
    if not set(map(type, ids)) <= {int}:
        raise _refusal(field, "every id must be an integer")
    try:
        return array(code, ids) if code else narrowest(ids)
    except OverflowError:
        raise _refusal(field, _OUT_OF_RANGE) from None


def _refusal(field: str, message: str) -> ValueError:
    return ValueError(f"{field}: {message}" if field else message)
