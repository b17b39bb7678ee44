"""Calls announced before dispatch, and calls that the engine refused."""

from __future__ import annotations

from tokencustody.conformance.case import Case
from tokencustody.conformance.expect import (
    expect,
    expect_entries,
    expect_error,
    expect_same_snapshot,
    refusals,
)
from tokencustody.conformance.fixtures import record
from tokencustody.conformance.registry import check
from tokencustody.errors import TokenCaptureFrozenError


@check("begin_call")
async def begin_call_custody(case: Case) -> None:
    """A call that began and left no record makes the rollout incomplete; one that has does not."""
    complete, dangling, empty = case.rollout(), case.rollout(), case.rollout()
    sink, source = case.sink(), case.source()
    entries = {}
    for rollout in (complete, dangling):
        await sink.begin_call(rollout, "call-1")
        await sink.begin_call(rollout, "call-1")
        entries[rollout] = record(rollout)
        await sink.put(entries[rollout])
        await case.sink().begin_call(rollout, "call-1")
    await sink.begin_call(dangling, "call-2")
    await sink.begin_call(empty, "call-1")
    for rollout, incomplete in ((complete, False), (dangling, True), (empty, True)):
        snapshot = await source.freeze(rollout)
        expect_entries(snapshot, *([entries[rollout]] if rollout in entries else []))
        what = (
            "a dangling intent left the rollout complete"
            if incomplete
            else "an intent with its record dangles"
        )
        expect(snapshot.incomplete is incomplete, what)


@check("begin_call")
async def post_freeze_intent(case: Case) -> None:
    """After a freeze a new or repeated intent raises TokenCaptureFrozenError and changes nothing."""
    rollout = case.rollout()
    sink, source = case.sink(), case.source()
    await sink.begin_call(rollout, "call-1")
    await sink.put(record(rollout))
    snapshot = await source.freeze(rollout)
    for call_id in ("call-1", "call-2"):
        for client in (sink, case.sink()):
            operation = client.begin_call(rollout, call_id)
            await expect_error(
                operation, TokenCaptureFrozenError, f"begin_call of {call_id} after the freeze"
            )
    expect_same_snapshot(snapshot, await source.freeze(rollout), "after late intents")


@check("begin_call", "refuse_call")
async def refused_intent(case: Case) -> None:
    """A refused call no longer dangles, and the snapshot shows it with its code; the others still dangle."""
    rollout, other = case.rollout(), case.rollout()
    sink, source = case.sink(), case.source()
    for name in (rollout, other):
        await sink.begin_call(name, "call-1")
        await sink.begin_call(name, "call-2")
        await sink.refuse_call(name, model_call_id="call-1", code="overloaded")
    await case.sink().refuse_call(rollout, model_call_id="call-2", code="context_length")
    snapshot = await source.freeze(rollout)
    expect(not snapshot.incomplete, "a refused call still dangles")
    expect(
        refusals(snapshot) == {"call-1": "overloaded", "call-2": "context_length"},
        f"the snapshot shows the refusals {refusals(snapshot)!r:.200}",
    )
    expect((await source.freeze(other)).incomplete, "refusing one call hid another that dangles")


@check("begin_call", "refuse_call")
async def repeated_refusal(case: Case) -> None:
    """The same refusal again changes nothing; another code for the same call is a ValueError, the first stays, and
    the rollout is none the worse.
    """
    rollout = case.rollout()
    sink = case.sink()
    await sink.begin_call(rollout, "call-1")
    await sink.refuse_call(rollout, model_call_id="call-1", code="overloaded")
    await case.sink().refuse_call(rollout, model_call_id="call-1", code="overloaded")
    other = case.sink().refuse_call(rollout, model_call_id="call-1", code="context_length")
    await expect_error(other, ValueError, "a refusal with another code")
    snapshot = await case.source().freeze(rollout)
    found = refusals(snapshot)
    expect(found == {"call-1": "overloaded"}, f"the snapshot shows the refusals {found!r:.200}")
    expect(not snapshot.incomplete, "a refusal with another code marked the rollout incomplete")


@check("begin_call", "refuse_call")
async def refusal_without_code(case: Case) -> None:
    """A call may be refused without a code, once or again; then no intent dangles, and the snapshot shows no code."""
    rollout = case.rollout()
    for call in ("call-1", "call-2"):
        await case.sink().begin_call(rollout, call)
    await case.sink().refuse_call(rollout, model_call_id="call-2", code="overloaded")
    for call in ("call-1", "call-1", "call-2"):
        await case.sink().refuse_call(rollout, model_call_id=call, code=None)
    snapshot = await case.source().freeze(rollout)
    expect(not snapshot.incomplete, "a call that was refused without a code still dangles")
    found = refusals(snapshot)
    expect(
        found == {"call-1": None, "call-2": "overloaded"}, f"the snapshot shows the refusals {found!r:.200}"
    )


@check("begin_call", "refuse_call")
async def post_freeze_refusal(case: Case) -> None:
    """After a freeze a new or repeated refusal raises TokenCaptureFrozenError and changes nothing."""
    rollout = case.rollout()
    sink, source = case.sink(), case.source()
    for call_id in ("call-1", "call-2"):
        await sink.begin_call(rollout, call_id)
    await sink.refuse_call(rollout, model_call_id="call-1", code="overloaded")
    snapshot = await source.freeze(rollout)
    for call_id in ("call-1", "call-2"):
        operation = sink.refuse_call(rollout, model_call_id=call_id, code="overloaded")
        await expect_error(operation, TokenCaptureFrozenError, f"refuse_call of {call_id} after the freeze")
    after = await source.freeze(rollout)
    expect_same_snapshot(snapshot, after, "after late refusals")
    expect(after.incomplete, "a late refusal made a dangling intent look judged")
