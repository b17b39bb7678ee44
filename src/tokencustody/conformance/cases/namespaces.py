"""Two training runs over one backend: rollout ids are deterministic, so they use the same ones."""

from __future__ import annotations

from tokencustody.conformance.case import Case
from tokencustody.conformance.cases.lineage import expect_unresolved
from tokencustody.conformance.cases.removal import expect_removal
from tokencustody.conformance.expect import expect, expect_entries, expect_same_snapshot
from tokencustody.conformance.fixtures import continued, opening, record, turn
from tokencustody.conformance.registry import check
from tokencustody.lineage import NO_MATCH


@check("namespaces")
async def namespace_isolation(case: Case) -> None:
    """The same rollout id in another namespace is another rollout: its records, marks, freezes and drops are
    apart.
    """
    rollout = case.rollout()
    here, there = record(rollout, prompt_token_ids=[1]), record(rollout, prompt_token_ids=[2])
    await case.sink().put(here)
    await case.other_sink().put(there)
    await case.other_sink().mark_incomplete(rollout)
    if case.offers("begin_call"):
        await case.other_sink().begin_call(rollout, "call-dangling")
    source, other = case.source(), case.other_source()
    ours = await source.freeze(rollout)
    expect_entries(ours, here)
    expect(not ours.incomplete, "a mark in the other namespace arrived here")
    second = record(rollout, "call-2")
    await case.other_sink().put(second)
    theirs = await other.freeze(rollout)
    expect_entries(theirs, there, second)
    expect(theirs.incomplete, "a mark was lost in its own namespace")
    expect(theirs.snapshot_id != ours.snapshot_id, "both namespaces have the same snapshot id")
    crossed = await source.drop(rollout, snapshot_id=theirs.snapshot_id, version=theirs.version)
    expect(crossed is False, "the other namespace's snapshot was dropped here")
    expect(
        await source.drop(rollout, snapshot_id=ours.snapshot_id, version=ours.version),
        "the snapshot was not dropped",
    )
    expect_same_snapshot(theirs, await other.freeze(rollout), "after a drop in the other namespace")


@check("namespaces", "retire", "delete")
async def namespace_removal(case: Case) -> None:
    """Retiring and deleting a rollout leaves the same id in another namespace as it was."""
    for method in ("retire", "delete"):
        rollout = case.rollout()
        there = record(rollout, prompt_token_ids=[2])
        await case.other_sink().put(there)
        expect_removal(await getattr(case.source(), method)([rollout]), removed=[], absent=[rollout])
        second = record(rollout, "call-2")
        await case.other_sink().put(second)
        expect_entries(await case.other_source().freeze(rollout), there, second)


@check("namespaces", "lineage")
async def namespace_lineage(case: Case) -> None:
    """A call in another namespace is never named as a parent."""
    rollout, request = case.rollout(), opening()
    elsewhere = turn(rollout, "call-1", request)
    await case.other_sink().put(elsewhere)
    resolution = await case.lineage().resolve(rollout, continued(request, elsewhere))
    expect_unresolved(resolution, NO_MATCH, "a parent in another namespace")
