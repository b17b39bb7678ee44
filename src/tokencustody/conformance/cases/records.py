"""Writing records and reading them back."""

from __future__ import annotations

import asyncio
from typing import Any

from tokencustody.conformance.case import Case
from tokencustody.conformance.expect import expect, expect_entries, expect_error, expect_same_snapshot
from tokencustody.conformance.fixtures import record
from tokencustody.conformance.registry import check

BAD_ROLLOUT_IDS = ("", "a/b", "a b", "a\n", "caf\u00e9", "r" * 256)
BAD_CALL_IDS = ("", "c" * 513, "call\u0000", "call\ud800")


@check()
async def put_then_freeze(case: Case) -> None:
    """Records that were put are in the snapshot that another client freezes, which is complete."""
    rollout = case.rollout()
    first, second = record(rollout, "call-1"), record(rollout, "call-2")
    sink = case.sink()
    await sink.put(first)
    await sink.put(second)
    snapshot = await case.source().freeze(rollout)
    expect(snapshot.rollout_id == rollout, f"the snapshot is of rollout {snapshot.rollout_id}")
    expect_entries(snapshot, first, second)
    expect(not snapshot.incomplete, "the rollout is incomplete although every record arrived")
    expect(isinstance(snapshot.snapshot_id, str) and snapshot.snapshot_id, "the snapshot has no id")
    expect(type(snapshot.version) is int, f"the version is a {type(snapshot.version).__name__}, not an int")


@check()
async def idempotent_reput(case: Case) -> None:
    """Putting the same bytes again, from the same or another client, changes nothing."""
    rollout = case.rollout()
    entry = record(rollout)
    sink = case.sink()
    await sink.put(entry)
    await sink.put(entry)
    await case.sink().put(entry.model_copy(deep=True))
    snapshot = await case.source().freeze(rollout)
    expect_entries(snapshot, entry)
    expect(not snapshot.incomplete, "an identical repeat made the rollout incomplete")


@check()
async def conflicting_reput(case: Case) -> None:
    """Other bytes under a used call id are a ValueError; the first record stays and the rollout is
    incomplete.
    """
    first = record(case.rollout())
    changes: tuple[dict[str, Any], ...] = (
        {"generation_token_ids": [7, 8]},
        {"generation_log_probs": [-0.25, -1.5000000000000002]},
        {"created_at": 1_700_000_000.25},
        {"unknown_field": 1},
    )
    for change in changes:
        rollout = case.rollout()
        first = record(rollout)
        await case.sink().put(first)
        what = f"a second record that differs in {', '.join(change)}"
        await expect_error(case.sink().put(record(rollout, **change)), ValueError, what)
        await case.sink().put(first)
        snapshot = await case.source().freeze(rollout)
        expect_entries(snapshot, first)
        expect(snapshot.incomplete, f"{what} left the rollout complete")


@check()
async def mark_incomplete(case: Case) -> None:
    """A marked rollout is incomplete for every client, with a call id or without, and keeps its records."""
    for call_id in ("", "call-1", "call-lost"):
        rollout = case.rollout()
        entry = record(rollout)
        sink = case.sink()
        await sink.put(entry)
        await sink.mark_incomplete(rollout, call_id)
        await sink.mark_incomplete(rollout, model_call_id=call_id)
        snapshot = await case.source().freeze(rollout)
        expect(snapshot.incomplete, f"a mark with the call id {call_id!r} left the rollout complete")
        expect_entries(snapshot, entry)
    rollout = case.rollout()
    await case.sink().mark_incomplete(rollout)
    snapshot = await case.source().freeze(rollout)
    expect(snapshot.incomplete, "a mark on a rollout without records was lost")


@check()
async def concurrent_identical_put(case: Case) -> None:
    """Many clients that put the same bytes at once all succeed, and one record is there."""
    for _ in range(5):
        rollout = case.rollout()
        entry = record(rollout)
        sinks = [case.sink() for _ in range(4)]
        await asyncio.gather(*(sink.put(entry) for sink in sinks for _ in range(3)))
        snapshot = await case.source().freeze(rollout)
        expect_entries(snapshot, entry)
        expect(not snapshot.incomplete, "concurrent identical records made the rollout incomplete")


@check()
async def concurrent_conflicting_put(case: Case) -> None:
    """Of many clients that put different bytes under one call id at once, exactly one succeeds and its record
    stays.
    """
    for _ in range(5):
        rollout = case.rollout()
        entries = [record(rollout, prompt_token_ids=[number]) for number in range(8)]
        sinks = [case.sink() for _ in range(4)]
        outcomes = await asyncio.gather(
            *(sinks[number % 4].put(entry) for number, entry in enumerate(entries)), return_exceptions=True
        )
        stored = [entry for entry, outcome in zip(entries, outcomes, strict=True) if outcome is None]
        other = [
            outcome for outcome in outcomes if outcome is not None and not isinstance(outcome, ValueError)
        ]
        expect(not other, f"a conflicting put raised {other[:1]} instead of ValueError")
        expect(
            len(stored) == 1,
            f"{len(stored)} of {len(entries)} conflicting records were acknowledged, not one",
        )
        snapshot = await case.source().freeze(rollout)
        expect_entries(snapshot, *stored)
        expect(snapshot.incomplete, "conflicting records left the rollout complete")


@check()
async def rollout_isolation(case: Case) -> None:
    """Rollouts share nothing: same call ids, a mark or a freeze of one leave the others alone, ids differ by
    case.
    """
    names = [case.rollout(), case.rollout(), case.rollout(255)]
    names.append(case.claim(names[0].swapcase()))
    sink, source = case.sink(), case.source()
    entries = [record(name, prompt_token_ids=[number]) for number, name in enumerate(names)]
    await sink.put(entries[0])
    await sink.mark_incomplete(names[0])
    marked = await source.freeze(names[0])
    for entry in entries[1:]:
        await sink.put(entry)
    for name, entry in zip(names[1:], entries[1:], strict=True):
        snapshot = await source.freeze(name)
        expect_entries(snapshot, entry)
        expect(not snapshot.incomplete, "the mark of one rollout made another incomplete")
        expect(snapshot.snapshot_id != marked.snapshot_id, "two rollouts have the same snapshot id")
    expect_same_snapshot(marked, await source.freeze(names[0]), "after records of other rollouts")


@check()
async def invalid_ids_refused(case: Case) -> None:
    """Rollout ids and model call ids outside the rules are a ValueError everywhere, and change nothing."""
    rollout = case.rollout()
    sink, source = case.sink(), case.source()
    for bad in BAD_ROLLOUT_IDS:
        what = f"with the rollout id {bad!r:.20}"
        await expect_error(sink.put(record(bad)), ValueError, f"put {what}")
        await expect_error(sink.mark_incomplete(bad), ValueError, f"mark_incomplete {what}")
        await expect_error(source.freeze(bad), ValueError, f"freeze {what}")
        await expect_error(source.drop(bad, snapshot_id="snapshot", version=0), ValueError, f"drop {what}")
    for bad in BAD_CALL_IDS:
        what = f"with the model call id {bad!r:.20}"
        await expect_error(
            sink.put(record(rollout, prompt_token_ids=[1]).model_copy(update={"model_call_id": bad})),
            ValueError,
            f"put {what}",
        )
        if case.offers("begin_call"):
            await expect_error(sink.begin_call(rollout, bad), ValueError, f"begin_call {what}")
        if case.offers("refuse_call"):
            refusal = sink.refuse_call(rollout, model_call_id=bad, code="overloaded")
            await expect_error(refusal, ValueError, f"refuse_call {what}")
    snapshot = await source.freeze(rollout)
    expect_entries(snapshot)
    expect(not snapshot.incomplete, "a refused value left a trace in the rollout")


@check()
async def close_idempotency(case: Case) -> None:
    """Closing a client again does nothing, and what it wrote stays."""
    rollout = case.rollout()
    entry = record(rollout)
    sink, source = case.sink(), case.source()
    await sink.put(entry)
    await sink.close()
    await sink.close()
    first = await source.freeze(rollout)
    expect_entries(first, entry)
    await source.close()
    await source.close()
    expect_same_snapshot(first, await case.source().freeze(rollout), "after its client was closed")
