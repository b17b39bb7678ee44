"""The fence that a freeze raises, one step after the other. The race is in `strict_fence`."""

from __future__ import annotations

import asyncio

from tokencustody.conformance.case import Case
from tokencustody.conformance.expect import expect, expect_entries, expect_error, expect_same_snapshot
from tokencustody.conformance.fixtures import record
from tokencustody.conformance.registry import check
from tokencustody.errors import TokenCaptureFrozenError


@check()
async def freeze_idempotency(case: Case) -> None:
    """Freezing again, from any client or many at once, gives the same snapshot."""
    rollout = case.rollout()
    entry = record(rollout)
    await case.sink().put(entry)
    sources = [case.source() for _ in range(4)]
    first, *others = await asyncio.gather(*(source.freeze(rollout) for source in sources))
    expect_entries(first, entry)
    for other in [*others, await sources[0].freeze(rollout), await case.source().freeze(rollout)]:
        expect_same_snapshot(first, other, "frozen again")
        expect_entries(other, entry)


@check()
async def freeze_unknown_rollout(case: Case) -> None:
    """A rollout that nobody wrote to freezes as an empty, complete snapshot and is fenced from then on."""
    rollout = case.rollout()
    source = case.source()
    snapshot = await source.freeze(rollout)
    expect_entries(snapshot)
    expect(not snapshot.incomplete, "an unknown rollout is incomplete")
    await expect_error(
        case.sink().put(record(rollout)), TokenCaptureFrozenError, "put into a rollout frozen empty"
    )
    expect_same_snapshot(snapshot, await source.freeze(rollout), "after a late put")


@check()
async def post_freeze_write(case: Case) -> None:
    """After a freeze a new, an identical and a conflicting put raise TokenCaptureFrozenError and change
    nothing.
    """
    rollout = case.rollout()
    entry = record(rollout)
    sink = case.sink()
    await sink.put(entry)
    source = case.source()
    snapshot = await source.freeze(rollout)
    late = {
        "a new record": record(rollout, "call-2"),
        "the same record": entry,
        "a conflicting record": record(rollout, prompt_token_ids=[1]),
    }
    for what, value in late.items():
        for client in (sink, case.sink()):
            await expect_error(client.put(value), TokenCaptureFrozenError, f"put of {what} after the freeze")
    after = await source.freeze(rollout)
    expect_same_snapshot(snapshot, after, "after late puts")
    expect_entries(after, entry)


@check()
async def post_freeze_mark(case: Case) -> None:
    """A mark after the freeze keeps the snapshot id, raises the version, and the consumed version cannot be
    dropped.
    """
    rollout = case.rollout()
    entry = record(rollout)
    sink, source = case.sink(), case.source()
    await sink.put(entry)
    consumed = await source.freeze(rollout)
    await sink.mark_incomplete(rollout, "call-late")
    expect(
        not await source.drop(rollout, snapshot_id=consumed.snapshot_id, version=consumed.version),
        "a stale version was dropped",
    )
    marked = await source.freeze(rollout)
    expect(marked.snapshot_id == consumed.snapshot_id, "a mark changed the snapshot id")
    expect(marked.version > consumed.version, f"a mark left the version at {marked.version}")
    expect(marked.incomplete, "a mark after the freeze left the rollout complete")
    expect_entries(marked, entry)
    expect(
        await source.drop(rollout, snapshot_id=marked.snapshot_id, version=marked.version),
        "the marked snapshot could not be dropped",
    )
