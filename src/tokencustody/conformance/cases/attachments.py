"""Attachments of staged calls: opaque values that come back as they were, or the call is rejected."""

from __future__ import annotations

from array import array
from typing import Any

from tokencustody.conformance.case import ATTACHMENTS, Case
from tokencustody.conformance.cases.staging import attempt, expect_calls, stage
from tokencustody.conformance.expect import describe, difference, expect, expect_error
from tokencustody.conformance.fixtures import staged_turn
from tokencustody.conformance.registry import check
from tokencustody.conformance.threads import in_thread

PLAIN: dict[str, Any] = {
    "bytes": bytes(range(256)),
    "no bytes": b"",
    "text": "\u0000 e\u0301 \U0001f9ea \ufeff",
    "no text": "",
    "null": None,
    "list": [1, 1.0, True, None, "1", 2**53 + 1, -0.0, 0.1, [], {}],
    "object": {"": "", "a": {"b": [[1, 2], [3.5, None]]}, "10": 1, "9": 2},
    "integer": 7,
    "number": 7.0,
    "truth": False,
    "name \u00e9/\U0001f9ea": "kept under its name",
}
# The names that an element type has as a buffer's format or as NumPy's type, without its byte order.
ELEMENTS = {"f": ("f", "f4", "float32"), "q": ("q", "l", "i8", "int64"), "B": ("B", "u1", "uint8")}
OPAQUE: dict[str, Any] = {
    "a function": describe,
    "an object": object(),
    "a set": {1, 2},
    "a tuple": (1, 2),
    "a key that is no text": {1: "one"},
    "an object in a list": [1, object()],
}


@check("staging", ATTACHMENTS, "fetch_attachments")
async def attachments_round_trip(case: Case) -> None:
    """Bytes, text, JSON values and buffers come back under their names as what they were; without any, none do."""
    rollout = case.rollout()
    values = PLAIN | buffers()
    store = case.staging()
    record = staged_turn(rollout).staged
    key = await stage(case, store, record, attachments=values)
    for client in (store, case.staging()):
        expect_attachments(await in_thread(client.fetch_attachments, key), values)
    expect_calls(await in_thread(case.staging().fetch, [key]), record)
    without: tuple[dict[str, Any], ...] = ({}, {"attachments": None}, {"attachments": {}})
    for number, options in enumerate(without):
        bare = await stage(case, store, staged_turn(rollout, f"bare-{number}").staged, **options)
        expect_attachments(await in_thread(case.staging().fetch_attachments, bare), {})
    never = staged_turn(rollout, "call-never").key
    await expect_error(
        in_thread(store.fetch_attachments, never), Exception, "attachments of a key without a record"
    )


@check("staging", ATTACHMENTS, "fetch_attachments")
async def attachments_are_part_of_the_call(case: Case) -> None:
    """The same record with the same attachments again is a success, with others it is a failed result; the first
    stay.
    """
    rollout = case.rollout()
    record = staged_turn(rollout).staged
    values: dict[str, Any] = {"a": b"\x00\x01", "b": [1, 2.0]} | buffers()
    store = case.staging()
    key = await stage(case, store, record, attachments=values)
    others: dict[str, dict[str, Any]] = {
        "other bytes": values | {"a": b"\x00\x02"},
        "another type": values | {"b": [1, 2]},
        "one more": values | {"c": None},
        "one less": {name: value for name, value in values.items() if name != "a"},
    }
    for client in (store, case.staging()):
        await stage(case, client, record, attachments=values)
        for what, other in others.items():
            result = await attempt(case, client, record, attachments=other)
            expect(not result.ok, f"a repeat with attachments that have {what} was a success")
    expect_attachments(await in_thread(case.staging().fetch_attachments, key), values)


@check("staging", ATTACHMENTS, "fetch_attachments")
async def attachments_all_or_nothing(case: Case) -> None:
    """A call whose attachments cannot all be kept is rejected as a whole; nothing is dropped in silence."""
    rollout = case.rollout()
    store, reader = case.staging(), case.staging()
    for number, (what, value) in enumerate(OPAQUE.items()):
        record = staged_turn(rollout, f"call-{number}").staged
        values = {"first": b"kept", "opaque": value, "last": "kept"}
        try:
            accepted = (await attempt(case, store, record, attachments=values)).ok
        except Exception:
            accepted = False
        if accepted:
            expect_attachments(await in_thread(store.fetch_attachments, record.staging_key), values)
            continue
        rejected = f"fetch of a call that was rejected with {what} as attachment"
        await expect_error(in_thread(reader.fetch, [record.staging_key]), Exception, rejected)
        kept = {"first": b"kept"}
        key = await stage(case, store, record, attachments=kept)
        expect_attachments(await in_thread(reader.fetch_attachments, key), kept)


def buffers() -> dict[str, Any]:
    """Return one buffer of each kind: a vector, a matrix, one without elements and one that can change."""
    numbers = array("q", [-(2**63), -1, 0, 1, 2**53 + 1, 2**63 - 1])
    return {
        "vector": array("f", [0.1, -0.0, float("inf"), float("nan")]),
        "matrix": memoryview(numbers).cast("B").cast("q", (2, 3)),
        "no elements": array("f"),
        "bytearray": bytearray(b"\x00\xff"),
    }


def expect_attachments(found: Any, values: dict[str, Any]) -> None:
    """Require that `found` are `values` under the same names, each as what it was."""
    expect(
        set(found) == set(values), f"the attachments are {sorted(found)!r:.150}, not {sorted(values)!r:.150}"
    )
    for name, value in values.items():
        where = _changed(value, found[name])
        expect(where is None, f"attachment {name!r} came back changed: {where}")


def _changed(given: Any, read: Any) -> str | None:
    """Return how `read` differs from `given`. A buffer comes back as a buffer, or as `data`, `dtype` and `shape`."""
    if not isinstance(given, array | memoryview | bytearray):
        return difference(given, read)
    view = memoryview(given)
    try:
        apart = hasattr(read, "dtype") and hasattr(read, "shape") and hasattr(read, "data")
        data = memoryview(read.data if apart else read)
        dtype, shape = (str(read.dtype), tuple(read.shape)) if apart else (data.format, data.shape)
    except TypeError as exc:
        return f"{type(read).__name__} is no buffer and has no data, dtype and shape ({exc})"
    if shape != view.shape:
        return f"its shape is {shape}, not {view.shape}"
    if dtype.lstrip("@=<>|!") not in ELEMENTS[view.format]:
        return f"its elements are {dtype}, not {view.format}"
    return None if data.tobytes() == view.tobytes() else "its elements have other bits"
