"""Retiring exactly the snapshot that was consumed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tokencustody.conformance.case import Case
from tokencustody.conformance.expect import expect, expect_entries, expect_error, expect_same_snapshot
from tokencustody.conformance.fixtures import record
from tokencustody.conformance.registry import check
from tokencustody.errors import TokenCaptureFrozenError, TokenCaptureRetiredError


@check()
async def conditional_retirement(case: Case) -> None:
    """`drop` of the frozen snapshot, by keywords as some stores want it, is True once consumed, and the fence stays."""
    rollout = case.rollout()
    entry = record(rollout)
    await case.sink().put(entry)
    source = case.source()
    snapshot = await source.freeze(rollout)
    expect_entries(snapshot, entry)
    dropped = await source.drop(rollout, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    expect(dropped is True, f"drop of the frozen snapshot returned {dropped!r}")
    for late in (entry, record(rollout, "call-2")):
        await expect_error(case.sink().put(late), TokenCaptureFrozenError, "put after the drop")


@check()
async def stale_drop_loses_nothing(case: Case) -> None:
    """`drop` with a wrong snapshot id, a wrong version, or of an open rollout is False and loses nothing."""
    rollout, other, unknown = case.rollout(), case.rollout(), case.rollout()
    entry = record(rollout)
    sink, source = case.sink(), case.source()
    await sink.put(entry)
    expect(
        await source.drop(rollout, snapshot_id="no-snapshot", version=0) is False,
        "drop of an open rollout was not False",
    )
    expect(
        await source.drop(unknown, snapshot_id="no-snapshot", version=0) is False,
        "drop of an unknown rollout was not False",
    )
    second = record(rollout, "call-2")
    await sink.put(second)
    snapshot = await source.freeze(rollout)
    foreign = await source.freeze(other)
    wrong = (
        (snapshot.snapshot_id, snapshot.version + 1),
        (snapshot.snapshot_id, snapshot.version - 1),
        (f"{snapshot.snapshot_id}x", snapshot.version),
        (foreign.snapshot_id, snapshot.version),
    )
    for snapshot_id, version in wrong:
        expect(
            await source.drop(rollout, snapshot_id=snapshot_id, version=version) is False,
            "drop of another snapshot was not False",
        )
    after = await source.freeze(rollout)
    expect_same_snapshot(snapshot, after, "after drops of other snapshots")
    expect_entries(after, entry, second)
    expect(
        await source.drop(rollout, snapshot_id=snapshot.snapshot_id, version=snapshot.version),
        "the right snapshot was not dropped",
    )


@check()
async def drop_of_dropped_rollout(case: Case) -> None:
    """Dropping the consumed snapshot again, or many times at once, is True for exactly that snapshot, else
    False.
    """
    rollout = case.rollout()
    await case.sink().put(record(rollout))
    sources = [case.source() for _ in range(4)]
    snapshot = await sources[0].freeze(rollout)
    exact = [
        source.drop(rollout, snapshot_id=snapshot.snapshot_id, version=snapshot.version) for source in sources
    ]
    expect(
        await asyncio.gather(*exact) == [True] * 4,
        "concurrent drops of the consumed snapshot were not all True",
    )
    again = await case.source().drop(rollout, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    expect(again is True, f"dropping the consumed snapshot again returned {again!r}")
    for snapshot_id, version in ((snapshot.snapshot_id, snapshot.version + 1), ("other", snapshot.version)):
        other = await case.source().drop(rollout, snapshot_id=snapshot_id, version=version)
        expect(other is False, f"dropping another snapshot of a retired rollout returned {other!r}")


@check("retire")
async def late_use_of_dropped_rollout(case: Case) -> None:
    """Every write to a dropped rollout, and freezing it, raises TokenCaptureRetiredError, a
    TokenCaptureFrozenError.
    """
    rollout = case.rollout()
    entry = record(rollout)
    await case.sink().put(entry)
    source = case.source()
    snapshot = await source.freeze(rollout)
    expect(
        await source.drop(rollout, snapshot_id=snapshot.snapshot_id, version=snapshot.version),
        "the snapshot was not dropped",
    )
    await expect_retired(case, rollout, entry)


async def expect_retired(case: Case, rollout: str, *late: object) -> None:
    """Require that `rollout` refuses every use as a retired one does; `late` are records to try as well."""
    for entry in (*late, record(rollout, "call-late")):
        await expect_error(case.sink().put(entry), TokenCaptureRetiredError, "put into a retired rollout")
    sink = case.sink()
    uses: dict[str, Callable[[], Awaitable[object]]] = {
        "mark_incomplete": lambda: sink.mark_incomplete(rollout),
        "freeze": lambda: case.source().freeze(rollout),
    }
    if case.offers("begin_call"):
        uses["begin_call"] = lambda: sink.begin_call(rollout, "call-late")
    if case.offers("refuse_call"):
        uses["refuse_call"] = lambda: sink.refuse_call(rollout, model_call_id="call-late", code="overloaded")
    for name, use in uses.items():
        await expect_error(use(), TokenCaptureRetiredError, f"{name} of a retired rollout")
