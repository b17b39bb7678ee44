"""Columns of numbers as the arrays that an engine may hand over, and as what cannot be made a list on the way."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


def id_arrays(ids: list[int]) -> dict[str, Any]:
    """Return the ids in every form of array that holds them, by a name for the form."""
    found: dict[str, Any] = {}
    highest = max(ids, default=0)
    for code in "bBhHiIlLqQ":
        if highest < 1 << 8 * array(code).itemsize - code.islower():
            found[f"array {code}"] = array(code, ids)
            found[f"view {code}"] = memoryview(array(code, [7, *ids, 7]))[1:-1]
    for dtype in (
        "i1",
        "u1",
        "<i2",
        ">i2",
        "<u2",
        ">u2",
        "<i4",
        ">i4",
        "<u4",
        ">u4",
        "<i8",
        ">i8",
        "<u8",
        ">u8",
    ):
        if highest <= np.iinfo(dtype).max:
            found |= strided(dtype, np.array(ids, dtype))
    return found


def float_arrays(values: list[float]) -> dict[str, Any]:
    """Return the values, of which float32 holds each, in every form of array, by a name for the form."""
    found: dict[str, Any] = {"array d": array("d", values), "array f": array("f", values)}
    for dtype in ("<f4", ">f4", "<f8", ">f8"):
        found |= strided(dtype, np.array(values, dtype))
    return found


def strided(name: str, column: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return an array as it is, as every third element of a longer one, and backwards in memory."""
    spread = np.zeros(3 * len(column), column.dtype)
    spread[::3] = column
    return {name: column, f"{name} strided": spread[::3], f"{name} backwards": column[::-1].copy()[::-1]}


class Untouchable(array):  # type: ignore[type-arg]
    """An array that refuses to hand out its elements one by one."""

    def _refuse(self, *_: object) -> Any:
        raise AssertionError("an element of an array was asked for")

    __iter__ = __getitem__ = tolist = __contains__ = count = index = _refuse


@contextmanager
def peak_below(limit: int) -> Iterator[None]:
    """Hold that what runs within never has `limit` bytes more in use than there were before."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < limit, f"{peak} bytes"
