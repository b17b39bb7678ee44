"""Retiring and deleting rollouts in batches, whatever their state."""

from __future__ import annotations

from typing import Any

from tokencustody.conformance.case import Case
from tokencustody.conformance.cases.retirement import expect_retired
from tokencustody.conformance.expect import expect, expect_entries, expect_error
from tokencustody.conformance.fixtures import record
from tokencustody.conformance.registry import check


@check("retire")
async def unconditional_retirement(case: Case) -> None:
    """`retire` removes the records of open, frozen, marked and unknown rollouts alike and fences them all."""
    opened, frozen, marked, unknown = (case.rollout() for _ in range(4))
    sink, source = case.sink(), case.source()
    for rollout in (opened, frozen, marked):
        await sink.put(record(rollout))
    await source.freeze(frozen)
    await sink.mark_incomplete(marked)
    result = await source.retire([unknown, frozen, opened, marked])
    expect_removal(result, removed=[frozen, opened, marked], absent=[unknown])
    for rollout in (opened, frozen, marked, unknown):
        await expect_retired(case, rollout, record(rollout))


@check("retire")
async def repeated_retirement(case: Case) -> None:
    """Retired again, ids are absent and nothing changes; an id given twice counts once, in input order."""
    first, second, unknown = (case.rollout() for _ in range(3))
    sink, source = case.sink(), case.source()
    await sink.put(record(first))
    await sink.put(record(second))
    result = await source.retire((second, unknown, first, second, unknown))
    expect_removal(result, removed=[second, first], absent=[unknown])
    expect_removal(
        await case.source().retire([first, second, unknown]), removed=[], absent=[first, second, unknown]
    )
    expect_removal(await source.retire([]), removed=[], absent=[])
    await expect_retired(case, first)


@check("delete")
async def deletion(case: Case) -> None:
    """`delete` removes records and fences in any state, after which the ids read as unused; again it is a
    no-op.
    """
    opened, frozen, marked, dropped, unknown = (case.rollout() for _ in range(5))
    sink, source = case.sink(), case.source()
    for rollout in (opened, frozen, marked, dropped):
        await sink.put(record(rollout))
        if case.offers("begin_call"):
            await sink.begin_call(rollout, "call-dangling")
    await source.freeze(frozen)
    await sink.mark_incomplete(marked)
    snapshot = await source.freeze(dropped)
    expect(
        await source.drop(dropped, snapshot_id=snapshot.snapshot_id, version=snapshot.version),
        "the snapshot was not dropped",
    )
    every = [unknown, marked, opened, frozen, dropped]
    result = await source.delete([*every, marked])
    expect_removal(result, removed=[marked, opened, frozen], absent=[unknown, dropped])
    expect_removal(await case.source().delete(every), removed=[], absent=every)
    for rollout in every:
        again = record(rollout, prompt_token_ids=[1])
        await case.sink().put(again)
        fresh = await case.source().freeze(rollout)
        expect_entries(fresh, again)
        expect(not fresh.incomplete, "a deleted rollout's past makes its new life incomplete")


@check("delete")
async def reused_id_is_a_new_rollout(case: Case) -> None:
    """The snapshot consumed before a delete cannot be dropped in the id's new life."""
    rollout = case.rollout()
    sink, source = case.sink(), case.source()
    await sink.put(record(rollout))
    before = await source.freeze(rollout)
    await source.delete([rollout])
    entry = record(rollout)
    await sink.put(entry)
    after = await source.freeze(rollout)
    expect(after.snapshot_id != before.snapshot_id, "the new life has the old snapshot id")
    expect(
        await source.drop(rollout, snapshot_id=before.snapshot_id, version=before.version) is False,
        "the old snapshot was dropped again",
    )
    expect_entries(await source.freeze(rollout), entry)


@check("retire", "delete")
async def deletion_after_retirement(case: Case) -> None:
    """Deleting a retired rollout removes its fence, after which its id takes records again."""
    rollout = case.rollout()
    sink, source = case.sink(), case.source()
    await sink.put(record(rollout))
    await source.retire([rollout])
    expect_removal(await source.delete([rollout]), removed=[], absent=[rollout])
    entry = record(rollout)
    await sink.put(entry)
    expect_entries(await source.freeze(rollout), entry)


@check("retire")
async def retire_batch_validation(case: Case) -> None:
    """A bare string is a TypeError, one bad id among good ones a ValueError, before any rollout changes."""
    await _refused_batches(case, "retire")


@check("delete")
async def delete_batch_validation(case: Case) -> None:
    """A bare string is a TypeError, one bad id among good ones a ValueError, before any rollout changes."""
    await _refused_batches(case, "delete")


async def _refused_batches(case: Case, method: str) -> None:
    rollout = case.rollout()
    entry, second = record(rollout), record(rollout, "call-2")
    sink, source = case.sink(), case.source()
    await sink.put(entry)
    operation = getattr(source, method)
    await expect_error(operation(rollout), TypeError, f"{method} of a bare string")
    for bad in ("a/b", "", "r" * 256):
        for batch in ([rollout, bad], [bad, rollout]):
            await expect_error(operation(batch), ValueError, f"{method} of a batch with the id {bad!r:.20}")
    await expect_error(operation([rollout, 7]), (TypeError, ValueError), f"{method} of a batch with a number")
    await sink.put(second)
    snapshot = await source.freeze(rollout)
    expect_entries(snapshot, entry, second)
    expect(not snapshot.incomplete, f"a refused {method} made the rollout incomplete")


def expect_removal(result: Any, *, removed: list[str], absent: list[str]) -> None:
    """Require the two lists of a removal's result, in order."""
    for name, wanted in (("removed", removed), ("absent", absent)):
        found = list(result[name])
        expect(found == wanted, f"{name} lists {found!r:.300}, not {wanted!r:.300}")
