"""The rows of the capture ledger: what a manifest says after calls were recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pydantic import ValidationError

from tokencustody.conformance.case import Case
from tokencustody.conformance.cases.records import BAD_CALL_IDS, BAD_ROLLOUT_IDS
from tokencustody.conformance.expect import PromiseBrokenError, describe, difference, expect, expect_error
from tokencustody.conformance.fixtures import StagedTurn, message, staged_turn
from tokencustody.conformance.registry import check
from tokencustody.staging.records import CallRecord, CaptureLedgerCommit, RolloutManifest


@check("ledger")
async def record_then_manifest(case: Case) -> None:
    """The manifest of any client is plain wire data that holds each recorded call once, in commit order."""
    rollout = case.rollout()
    turns = [staged_turn(rollout, call, reply=call) for call in ("call-3", "call-1", "call-2")]
    ledger = case.ledger()
    expect_manifest(await ledger.manifest(rollout), rollout, [])
    for turn in turns:
        await ledger.record(turn.commit)
    for client in (ledger, case.ledger()):
        expect_manifest(await client.manifest(rollout), rollout, turns)


@check("ledger")
async def exact_ledger_rows(case: Case) -> None:
    """Every field of a row comes back as it was: text, times, large numbers, and what is None."""
    rollout = case.rollout()
    root = staged_turn(rollout, "call-root", weight_version=2**63 - 1, admitted_at=0.1 + 0.2)
    texts = ("\u00e9 e\u0301", "\U0001f9ea\U0010ffff", "\ufeff\r\n\t\\\"'", "a/b c", "r" * 512)
    turns = [
        root,
        staged_turn(rollout, "call-child", parent=root, token_ids=[2**64 - 1], admitted_at=None),
        staged_turn(rollout, "call-bare", output_fingerprint=None, continuation_fingerprint=None),
        *(staged_turn(rollout, text, response_id=text, staging_key=text) for text in texts),
    ]
    for turn in turns:
        await case.ledger().record(turn.commit)
    expect_manifest(await case.ledger().manifest(rollout), rollout, turns)


@check("ledger")
async def ledger_capture_key(case: Case) -> None:
    """A row that names another rollout as the one that staged it keeps that name."""
    rollout = case.rollout()
    turn = staged_turn(rollout, capture_key="other")
    await case.ledger().record(turn.commit)
    expect_manifest(await case.ledger().manifest(rollout), rollout, [turn])


@check("ledger")
async def identical_record(case: Case) -> None:
    """Recording the same commit again, from the same or another client, changes nothing."""
    rollout = case.rollout()
    first, second = staged_turn(rollout, "call-1"), staged_turn(rollout, "call-2")
    ledger = case.ledger()
    await ledger.record(first.commit)
    await ledger.record(second.commit)
    for client in (ledger, case.ledger()):
        await client.record(CaptureLedgerCommit.model_validate(first.commit.model_dump()))
    expect_manifest(await case.ledger().manifest(rollout), rollout, [first, second])


@check("ledger")
async def repeated_conversation(case: Case) -> None:
    """A commit whose items have other ids, or say more where nothing is hashed, is the same commit again."""
    rollout = case.rollout()
    first = staged_turn(rollout)
    request, response = first.commit.request_items, first.commit.response_items
    changes: dict[str, dict[str, Any]] = {
        "ids": {"request_items": [item | {"id": "m-2"} for item in request]},
        "types": {"response_items": [item | {"type": "message"} for item in response]},
        "thinking": {"response_items": [{"type": "reasoning", "summary": []}, *response]},
    }
    await case.ledger().record(first.commit)
    for change in changes.values():
        await case.ledger().record(first.commit.model_copy(update=change))
    expect_manifest(await case.ledger().manifest(rollout), rollout, [first])
    other = first.commit.model_copy(update={"request_items": [*request, message("user", "And?")]})
    await expect_error(case.ledger().record(other), ValueError, "a second record of another conversation")


@check("ledger")
async def conflicting_record(case: Case) -> None:
    """Other data under a recorded call id, down to the staging chain, is a ValueError, and the first row stays."""
    rollout = case.rollout()
    first = staged_turn(rollout)
    changes: dict[str, CaptureLedgerCommit] = {
        "weight_version": staged_turn(rollout, weight_version=4).commit,
        "tokens": staged_turn(rollout, token_ids=[7, 8]).commit,
        "response_id": staged_turn(rollout, response_id="another").commit,
        "admitted_at": staged_turn(rollout, admitted_at=1_700_000_000.25).commit,
        "staging_chain": first.commit.model_copy(update={"staging_chain": ("another/call", first.key)}),
    }
    ledger = case.ledger()
    await ledger.record(first.commit)
    for what, other in changes.items():
        for client in (ledger, case.ledger()):
            await expect_error(client.record(other), ValueError, f"a second record with another {what}")
    await case.ledger().record(first.commit)
    expect_manifest(await case.ledger().manifest(rollout), rollout, [first])


@check("ledger")
async def ledger_failures(case: Case) -> None:
    """Failed calls stand in the manifest with each reason that was given, once, in commit order."""
    rollout = case.rollout()
    turn = staged_turn(rollout, "call-1")
    ledger = case.ledger()
    await ledger.record_failure(rollout, "call-2", "worker_capture_failed")
    await ledger.record(turn.commit)
    await ledger.record_failure(rollout, "call-0", "unresolved_parent")
    for client in (ledger, case.ledger()):
        await client.record_failure(rollout, "call-2", "worker_capture_failed")
        await client.record_failure(rollout, "call-2", "another reason")
    failures = [
        ("call-2", "worker_capture_failed"),
        ("call-0", "unresolved_parent"),
        ("call-2", "another reason"),
    ]
    expect_manifest(await case.ledger().manifest(rollout), rollout, [turn], failures)


@check("ledger")
async def record_after_failure(case: Case) -> None:
    """A call that was recorded as failed takes no record (ValueError); a recorded one that fails is listed as both."""
    rollout = case.rollout()
    failed, recorded = staged_turn(rollout, "call-1"), staged_turn(rollout, "call-2")
    ledger = case.ledger()
    await ledger.record_failure(rollout, "call-1", "worker_capture_failed")
    for client in (ledger, case.ledger()):
        await expect_error(client.record(failed.commit), ValueError, "the record of a failed call")
    await ledger.record(recorded.commit)
    await ledger.record_failure(rollout, "call-2", "late trouble")
    failures = [("call-1", "worker_capture_failed"), ("call-2", "late trouble")]
    expect_manifest(await case.ledger().manifest(rollout), rollout, [recorded], failures)


@check("ledger")
async def ledger_has_rows(case: Case) -> None:
    """`has_rows` is False for an unknown rollout, True as soon as a call was recorded or failed, for any client."""
    recorded, failed, unknown = case.rollout(), case.rollout(), case.rollout()
    ledger = case.ledger()
    for rollout in (recorded, failed):
        expect(await ledger.has_rows(rollout) is False, "a rollout has rows before anything was recorded")
    await ledger.record(staged_turn(recorded).commit)
    await ledger.record_failure(failed, "call-1", "worker_capture_failed")
    for client in (ledger, case.ledger()):
        for rollout, what in ((recorded, "a recorded call"), (failed, "a failed call")):
            expect(await client.has_rows(rollout) is True, f"a rollout with {what} has no rows")
        expect(await client.has_rows(unknown) is False, "a rollout that nobody wrote to has rows")


@check("ledger")
async def ledger_isolation(case: Case) -> None:
    """The rows of one rollout are not in the manifest of another, even if their ids differ only in case."""
    upper, lower = case.claim(f"{(rollout := case.rollout())}-A"), case.claim(f"{rollout}-a")
    here, there = staged_turn(upper, weight_version=1), staged_turn(lower, weight_version=2)
    await case.ledger().record(here.commit)
    await case.ledger().record(there.commit)
    await case.ledger().record_failure(lower, "call-2", "worker_capture_failed")
    expect_manifest(await case.ledger().manifest(upper), upper, [here])
    failures = [("call-2", "worker_capture_failed")]
    expect_manifest(await case.ledger().manifest(lower), lower, [there], failures)


@check("ledger")
async def ledger_invalid_ids(case: Case) -> None:
    """Ids outside the rules are a ValueError in every method of a ledger, and nothing is written."""
    rollout = case.rollout()
    commit = staged_turn(rollout).commit
    ledger = case.ledger()
    for bad in BAD_ROLLOUT_IDS:
        what = f"the rollout id {bad!r:.20}"
        await expect_error(ledger.record(commit.model_copy(update={"rollout_id": bad})), ValueError, what)
        await expect_error(ledger.record_failure(bad, "call-1", "unresolved_parent"), ValueError, what)
        await expect_error(ledger.manifest(bad), ValueError, what)
        await expect_error(ledger.has_rows(bad), ValueError, what)
    for bad in BAD_CALL_IDS:
        what = f"the model call id {bad!r:.20}"
        row = commit.record.model_copy(update={"model_call_id": bad})
        await expect_error(ledger.record(commit.model_copy(update={"record": row})), ValueError, what)
        await expect_error(ledger.record_failure(rollout, bad, "unresolved_parent"), ValueError, what)
    expect_manifest(await case.ledger().manifest(rollout), rollout, [])


@check("ledger")
async def record_after_freeze(case: Case) -> None:
    """A frozen rollout still records calls and failures: the fence of a freeze is the sink's."""
    rollout = case.rollout()
    before, after = staged_turn(rollout, "call-1"), staged_turn(rollout, "call-2")
    await case.ledger().record(before.commit)
    await case.source().freeze(rollout)
    await case.ledger().record(after.commit)
    await case.ledger().record_failure(rollout, "call-3", "worker_capture_failed")
    failures = [("call-3", "worker_capture_failed")]
    expect_manifest(await case.ledger().manifest(rollout), rollout, [before, after], failures)
    expect(await case.ledger().has_rows(rollout) is True, "a frozen rollout has lost its rows")


@check("ledger")
async def late_rows_make_a_version(case: Case) -> None:
    """What a frozen rollout records makes a version, so that dropping the snapshot before it is False and loses
    nothing. A repeat makes none.
    """
    rollout = case.rollout()
    early, late = staged_turn(rollout, "call-1"), staged_turn(rollout, "call-2")
    await case.ledger().record(early.commit)
    source = case.source()
    before = held = await source.freeze(rollout)
    writes: list[Callable[[], Awaitable[None]]] = [
        lambda: case.ledger().record(late.commit),
        lambda: case.ledger().record_failure(rollout, "call-3", "worker_capture_failed"),
    ]
    for write in writes:
        for _ in range(2):
            await write()
        dropped = await source.drop(rollout, snapshot_id=held.snapshot_id, version=held.version)
        expect(dropped is False, f"dropping the snapshot before a late row returned {dropped!r}")
        after = await source.freeze(rollout)
        expect(
            (after.snapshot_id, after.version) == (held.snapshot_id, held.version + 1),
            f"after a late row version {held.version} became {after.version}",
        )
        expect(after.incomplete == before.incomplete, "a late row changed whether the rollout is complete")
        held = after
    failures = [("call-3", "worker_capture_failed")]
    expect_manifest(await case.ledger().manifest(rollout), rollout, [early, late], failures)
    expect(
        await source.drop(rollout, snapshot_id=held.snapshot_id, version=held.version),
        "the snapshot with the late rows was not dropped",
    )


@check("ledger")
async def concurrent_records(case: Case) -> None:
    """Clients that record at once, some of them the same calls, lose nothing, and each call stands there once, the
    calls of each client in its order.
    """
    rollout = case.rollout()
    shared = [staged_turn(rollout, f"shared-{number}") for number in range(4)]
    own = [[staged_turn(rollout, f"own-{who}-{number}") for number in range(8)] for who in range(2)]

    async def stream(ledger: Any, turns: Sequence[StagedTurn]) -> None:
        for turn in turns:
            await ledger.record(turn.commit)

    ledgers = [case.ledger() for _ in own]
    streams = [stream(ledger, turns) for ledger, turns in zip(ledgers, own, strict=True)]
    streams += [stream(ledger, shared) for ledger in ledgers]
    failures = [
        ledger.record_failure(rollout, f"failed-{who}", "worker_capture_failed")
        for who, ledger in enumerate(ledgers)
    ]
    await asyncio.gather(*streams, *failures)
    manifest = read_manifest(await case.ledger().manifest(rollout))
    found = [row.model_call_id for row in manifest.records]
    wanted = [turn.staged.model_call_id for turns in (shared, *own) for turn in turns]
    lost, again = sorted(set(wanted) - set(found)), len(found) - len(set(found))
    expect(
        not lost, f"the manifest lacks {len(lost)} of {len(wanted)} calls whose record returned: {lost[:3]}"
    )
    expect(not again, f"{again} calls stand in the manifest more than once")
    for turns in (shared, *own):
        calls = [turn.staged.model_call_id for turn in turns]
        order = [call for call in found if call in calls]
        expect(order == calls, f"calls that were recorded one after the other stand as {order}")
    failed = sorted(failure.model_call_id for failure in manifest.failures)
    expect(failed == ["failed-0", "failed-1"], f"the manifest lists the failures {failed}")


@check("ledger")
async def concurrent_conflicting_records(case: Case) -> None:
    """Of many clients that record different data under one call id at once, exactly one succeeds and its row stays."""
    for _ in range(3):
        rollout = case.rollout()
        turns = [staged_turn(rollout, weight_version=number) for number in range(6)]
        ledgers = [case.ledger() for _ in range(3)]
        outcomes = await asyncio.gather(
            *(ledgers[number % 3].record(turn.commit) for number, turn in enumerate(turns)),
            return_exceptions=True,
        )
        winners = [turn for turn, outcome in zip(turns, outcomes, strict=True) if outcome is None]
        expect(len(winners) == 1, f"{len(winners)} of {len(turns)} conflicting records succeeded, not one")
        for outcome in outcomes:
            expected = outcome is None or isinstance(outcome, ValueError)
            expect(expected, f"a conflicting record ended in {outcome!r:.200}")
        expect_manifest(await case.ledger().manifest(rollout), rollout, winners)


def read_manifest(manifest: Any) -> RolloutManifest:
    """Return the manifest that plain wire data is."""
    try:
        plain = json.loads(json.dumps(manifest))
    except (TypeError, ValueError) as exc:
        raise PromiseBrokenError(f"the manifest is no plain data: {describe(exc)}") from None
    where = difference(plain, manifest)
    expect(where is None, f"the manifest is no plain data: {where}")
    try:
        return RolloutManifest.model_validate(manifest)
    except ValidationError as exc:
        raise PromiseBrokenError(f"the manifest is no RolloutManifest: {describe(exc)}") from None


def expect_manifest(
    manifest: Any,
    rollout: str,
    turns: Sequence[StagedTurn],
    failures: Sequence[tuple[str, str]] = (),
) -> None:
    """Require that `manifest` is wire data of `rollout` with exactly these rows and failures, in this order."""
    read = read_manifest(manifest)
    expect(read.rollout_id == rollout, f"the manifest is of rollout {read.rollout_id}")
    wanted = [turn.commit.record for turn in turns]
    found, calls = _ids(read.records), _ids(wanted)
    expect(found == calls, f"the manifest has the calls {found!r:.200}, not {calls!r:.200}")
    for row, record in zip(read.records, wanted, strict=True):
        where = difference(record.model_dump(), row.model_dump())
        expect(
            where is None, f"the row of model call {record.model_call_id!r:.60} came back changed: {where}"
        )
    listed = [(failure.model_call_id, failure.reason) for failure in read.failures]
    expect(
        listed == list(failures),
        f"the manifest has the failures {listed!r:.200}, not {list(failures)!r:.200}",
    )


def _ids(rows: Sequence[CallRecord]) -> list[str]:
    return [row.model_call_id for row in rows]
