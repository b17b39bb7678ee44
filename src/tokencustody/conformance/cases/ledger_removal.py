"""Retiring and deleting ledgers, under the one fence that a rollout has."""

from __future__ import annotations

from typing import Any

from tokencustody.conformance.case import Case
from tokencustody.conformance.cases.ledger import expect_manifest
from tokencustody.conformance.cases.ledger_lineage import expect_staged_parent
from tokencustody.conformance.cases.lineage import expect_unresolved
from tokencustody.conformance.cases.removal import expect_removal
from tokencustody.conformance.cases.retirement import expect_retired
from tokencustody.conformance.expect import expect, expect_entries, expect_error
from tokencustody.conformance.fixtures import record, staged_turn
from tokencustody.conformance.registry import check
from tokencustody.errors import RolloutRetiredError
from tokencustody.lineage import NO_MATCH


@check("ledger", "ledger_retire")
async def ledger_retirement(case: Case) -> None:
    """`retire` removes the rows of open, frozen, failed and unknown rollouts: late rows are discarded without an
    error, reading raises RolloutRetiredError, and no call is a parent.
    """
    opened, frozen, failed, unknown = (case.rollout() for _ in range(4))
    ledger = case.ledger()
    for rollout in (opened, frozen):
        await ledger.record(staged_turn(rollout).commit)
    await ledger.record_failure(failed, "call-1", "worker_capture_failed")
    await case.source().freeze(frozen)
    result = await ledger.retire([unknown, failed, frozen, opened])
    expect_removal(result, removed=[failed, frozen, opened], absent=[unknown])
    for rollout in (opened, frozen, failed, unknown):
        await expect_retired_ledger(ledger, rollout)
        await expect_retired_ledger(case.ledger(), rollout)


@check("ledger", "ledger_retire")
async def ledger_repeated_retirement(case: Case) -> None:
    """Retired again, ids are absent and stay retired; an id given twice counts once, in input order."""
    first, second, unknown = (case.rollout() for _ in range(3))
    ledger = case.ledger()
    for rollout in (first, second):
        await ledger.record(staged_turn(rollout).commit)
    result = await ledger.retire((second, unknown, first, second, unknown))
    expect_removal(result, removed=[second, first], absent=[unknown])
    # Discarded: it must not make the rollout one that has records.
    await ledger.record(staged_turn(first, "call-late").commit)
    again = await case.ledger().retire([first, second, unknown])
    expect_removal(again, removed=[], absent=[first, second, unknown])
    expect_removal(await ledger.retire([]), removed=[], absent=[])
    await expect_retired_ledger(ledger, first)


@check("ledger", "ledger_delete")
async def ledger_deletion(case: Case) -> None:
    """`delete` removes rows and fences, after which the ids read as unused and record again; again it is a no-op."""
    recorded, failed, retired, unknown = (case.rollout() for _ in range(4))
    ledger = case.ledger()
    for rollout in (recorded, retired):
        await ledger.record(staged_turn(rollout).commit)
    await ledger.record_failure(failed, "call-1", "worker_capture_failed")
    if case.offers("ledger_retire"):
        await ledger.retire([retired])
    else:
        await ledger.delete([retired])
    every = [unknown, failed, recorded, retired]
    result = await ledger.delete([*every, failed])
    expect_removal(result, removed=[failed, recorded], absent=[unknown, retired])
    expect_removal(await case.ledger().delete(every), removed=[], absent=every)
    for rollout in every:
        turn = staged_turn(rollout, weight_version=9)
        for client in (ledger, case.ledger()):
            expect(await client.has_rows(rollout) is False, "a deleted rollout has rows")
            expect_manifest(await client.manifest(rollout), rollout, [])
            found = await client.resolve(rollout, turn.following())
            expect_unresolved(found, NO_MATCH, "a parent that was deleted")
        await case.ledger().record(turn.commit)
        expect_manifest(await case.ledger().manifest(rollout), rollout, [turn])


@check("ledger", "ledger_retire")
async def ledger_retire_validation(case: Case) -> None:
    """A bare string is a TypeError, one bad id among good ones a ValueError, before any ledger changes."""
    await _refused_batches(case, "retire")


@check("ledger", "ledger_delete")
async def ledger_delete_validation(case: Case) -> None:
    """A bare string is a TypeError, one bad id among good ones a ValueError, before any ledger changes."""
    await _refused_batches(case, "delete")


@check("ledger", "retire", "delete")
async def source_fences_the_ledger(case: Case) -> None:
    """Dropping, retiring or deleting a rollout through the source does the same to its ledger, whose rows count."""
    dropped, retired, unknown, deleted = (case.rollout() for _ in range(4))
    source = case.source()
    for rollout in (dropped, retired, deleted):
        await case.ledger().record(staged_turn(rollout).commit)
    snapshot = await source.freeze(dropped)
    expect(
        await source.drop(dropped, snapshot_id=snapshot.snapshot_id, version=snapshot.version),
        "the snapshot was not dropped",
    )
    expect_removal(await source.retire([unknown, retired]), removed=[retired], absent=[unknown])
    expect_removal(await source.delete([deleted, unknown]), removed=[deleted], absent=[unknown])
    for rollout in (dropped, retired):
        await expect_retired_ledger(case.ledger(), rollout)
    expect_removal(await source.delete([retired]), removed=[], absent=[retired])
    for rollout in (deleted, retired, unknown):
        expect(await case.ledger().has_rows(rollout) is False, "a deleted rollout has ledger rows")
        turn = staged_turn(rollout, weight_version=9)
        await case.ledger().record(turn.commit)
        expect_manifest(await case.ledger().manifest(rollout), rollout, [turn])


@check("ledger", "ledger_retire", "ledger_delete")
async def ledger_fences_the_source(case: Case) -> None:
    """Retiring or deleting a rollout through the ledger does the same to its complete records, which count."""
    retired, unknown, deleted = (case.rollout() for _ in range(3))
    sink, ledger = case.sink(), case.ledger()
    for rollout in (retired, deleted):
        await sink.put(record(rollout))
    expect_removal(await ledger.retire([unknown, retired]), removed=[retired], absent=[unknown])
    for rollout in (retired, unknown):
        await expect_retired(case, rollout, record(rollout))
    expect_removal(
        await ledger.delete([deleted, unknown, retired]), removed=[deleted], absent=[unknown, retired]
    )
    for rollout in (deleted, unknown, retired):
        entry = record(rollout, prompt_token_ids=[1])
        await case.sink().put(entry)
        expect_entries(await case.source().freeze(rollout), entry)


@check("ledger", "namespaces", "retire", "delete")
async def namespace_ledger(case: Case) -> None:
    """What another namespace puts, freezes, retires or deletes under the same rollout id is apart from a ledger."""
    rollout = case.rollout()
    turn = staged_turn(rollout)
    ledger = case.ledger()
    await ledger.record(turn.commit)
    await case.other_sink().put(record(rollout))
    other = case.other_source()
    await other.freeze(rollout)
    expect_removal(await other.retire([rollout]), removed=[rollout], absent=[])
    expect_manifest(await ledger.manifest(rollout), rollout, [turn])
    expect_removal(await other.delete([rollout]), removed=[], absent=[rollout])
    second = staged_turn(rollout, "call-2", parent=turn)
    await case.ledger().record(second.commit)
    expect_manifest(await case.ledger().manifest(rollout), rollout, [turn, second])
    expect_staged_parent(await case.ledger().resolve(rollout, second.following()), second)


async def expect_retired_ledger(ledger: Any, rollout: str) -> None:
    """Require that `ledger` discards late rows of `rollout` in silence, cannot be read, and names no parent."""
    late = staged_turn(rollout, "call-late")
    await ledger.record(late.commit)
    await ledger.record(staged_turn(rollout).commit)
    await ledger.record_failure(rollout, "call-late-2", "worker_capture_failed")
    await expect_error(ledger.manifest(rollout), RolloutRetiredError, "the manifest of a retired rollout")
    await expect_error(ledger.has_rows(rollout), RolloutRetiredError, "has_rows of a retired rollout")
    found = await ledger.resolve(rollout, late.following())
    expect_unresolved(found, NO_MATCH, "a parent in a retired rollout")


async def _refused_batches(case: Case, method: str) -> None:
    rollout = case.rollout()
    first, second = staged_turn(rollout, "call-1"), staged_turn(rollout, "call-2")
    ledger = case.ledger()
    await ledger.record(first.commit)
    operation = getattr(ledger, method)
    await expect_error(operation(rollout), TypeError, f"{method} of a bare string")
    for bad in ("a/b", "", "r" * 256):
        for batch in ([rollout, bad], [bad, rollout]):
            await expect_error(operation(batch), ValueError, f"{method} of a batch with the id {bad!r:.20}")
    await expect_error(operation([rollout, 7]), (TypeError, ValueError), f"{method} of a batch with a number")
    await ledger.record(second.commit)
    expect_manifest(await case.ledger().manifest(rollout), rollout, [first, second])
