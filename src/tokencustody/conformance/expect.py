"""How a check states what it expects, and how two values are compared bit by bit."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Sequence
from enum import Enum
from typing import Any


class PromiseBrokenError(AssertionError):
    """A transport did something else than a check expects."""


def expect(condition: object, otherwise: str) -> None:
    """Raise `PromiseBrokenError` with the text `otherwise` unless `condition` is true."""
    if not condition:
        raise PromiseBrokenError(otherwise)


async def expect_error(
    operation: Awaitable[object], expected: type[Exception] | tuple[type[Exception], ...], what: str
) -> Exception:
    """Await `operation` and return the error of class `expected` that it must raise."""
    kinds = expected if isinstance(expected, tuple) else (expected,)
    names = " or ".join(kind.__name__ for kind in kinds)
    try:
        result = await operation
    except kinds as exc:
        return exc
    except Exception as exc:
        raise PromiseBrokenError(f"{what} raised {describe(exc)} instead of {names}") from exc
    raise PromiseBrokenError(f"{what} returned {result!r:.80} instead of raising {names}")


def describe(exc: BaseException) -> str:
    """Return the class and the first 300 characters of an error's message."""
    return f"{type(exc).__name__}: {exc}"[:300]


def expect_entries(snapshot: Any, *expected: Any) -> None:
    """Require that `snapshot` holds exactly the `expected` records, equal in every bit, in any order."""
    found = {entry.model_call_id: entry for entry in snapshot.entries}
    expect(len(found) == len(snapshot.entries), "the snapshot holds a model call id more than once")
    wanted = {entry.model_call_id: entry for entry in expected}
    missing = sorted(wanted.keys() - found.keys())
    extra = sorted(found.keys() - wanted.keys())
    expect(
        not missing and not extra,
        f"the snapshot lacks calls {missing[:5]!r:.200} and has too many {extra[:5]!r:.200}",
    )
    for call_id, entry in wanted.items():
        where = difference(entry.model_dump(), found[call_id].model_dump())
        expect(where is None, f"model call {call_id!r:.60} came back changed: {where}")


def difference(put: Any, read: Any, path: str = "") -> str | None:
    """Return where and how `read` differs from `put` in type or bits, or None.

    Floats are compared by their 64 bits, so NaN equals the same NaN and 0.0 differs from -0.0; an int differs
    from a float of the same value and from a bool; the order of an object's keys carries no meaning.
    """
    if put is read:
        return None
    put, read = (value.value if isinstance(value, Enum) else value for value in (put, read))
    if type(put) is not type(read):
        return f"{path} is a {type(read).__name__}, not a {type(put).__name__}"
    if isinstance(put, dict):
        if put.keys() != read.keys():
            return f"{path} has other keys: {sorted(put.keys() ^ read.keys(), key=repr)!r:.100}"
        return _first(difference(put[key], read[key], f"{path}.{key}".lstrip(".")) for key in put)
    if isinstance(put, list | tuple):
        if len(put) != len(read):
            return f"{path} has {len(read)} items, not {len(put)}"
        types = {*map(type, put), *map(type, read)}
        if (types == {int} and put == read) or (types == {float} and _bits(put) == _bits(read)):
            return None
        return _first(
            difference(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(put, read, strict=True))
        )
    if isinstance(put, float):
        bits, found = (struct.pack(">d", value).hex() for value in (put, read))
        return None if bits == found else f"{path} has the bits {found}, not {bits}"
    return None if put == read else f"{path} is {read!r:.60}, not {put!r:.60}"


def _bits(numbers: Sequence[float]) -> bytes:
    return struct.pack(f">{len(numbers)}d", *numbers)


def _first(differences: Any) -> str | None:
    return next((found for found in differences if found is not None), None)


def expect_same_snapshot(first: Any, second: Any, what: str) -> None:
    """Require that two snapshots of one rollout have the same id, version, verdict and calls."""
    for field in ("snapshot_id", "version", "incomplete"):
        before, after = getattr(first, field), getattr(second, field)
        expect(before == after, f"{what}: {field} was {before!r} and is {after!r}")
    expect(call_ids(first.entries) == call_ids(second.entries), f"{what}: the snapshot holds other calls")
    expect(refusals(first) == refusals(second), f"{what}: the snapshot holds other refusals")


def call_ids(entries: Sequence[Any]) -> set[str]:
    """Return the model call ids of records."""
    return {entry.model_call_id for entry in entries}


def refusals(snapshot: Any) -> dict[str, str]:
    """Return model call id -> refusal code. A transport without refusals may leave the field out."""
    return {refusal.model_call_id: refusal.code for refusal in getattr(snapshot, "refusals", ())}
