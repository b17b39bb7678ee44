"""Which of several candidates is the parent, and with which token sequence."""

from __future__ import annotations

from typing import Any

from tokencustody.conformance.case import Case
from tokencustody.conformance.cases.lineage import expect_no_parent, expect_parent, expect_unresolved
from tokencustody.conformance.expect import expect_entries, expect_error
from tokencustody.conformance.fixtures import EMPTY_ANSWERS, child_turn, continued, message, opening, turn
from tokencustody.conformance.registry import check
from tokencustody.fingerprint import FINGERPRINT_VERSION
from tokencustody.lineage import AMBIGUOUS, NO_MATCH, stamp_continuation
from tokencustody.records import compute_digest, cumulative_tokens


@check("lineage")
async def lineage_ambiguous_twins(case: Case) -> None:
    """Two calls with the same conversation and different tokens are never chosen between: unresolved,
    ambiguous.
    """
    rollout, request = case.rollout(), opening()
    first = turn(rollout, "call-1", request, prompt_token_ids=[1, 2])
    await case.sink().put(first)
    await case.sink().put(turn(rollout, "call-2", request, prompt_token_ids=[1, 3]))
    resolution = await case.lineage().resolve(rollout, continued(request, first))
    expect_unresolved(resolution, AMBIGUOUS, "a request that two different calls lead to")


@check("lineage")
async def lineage_equal_twins(case: Case) -> None:
    """Calls with the same conversation and the same tokens stand for one another: the smallest call id is
    named.

    Ids are ordered by code point, so "call-B" comes before "call-a" in every locale.
    """
    rollout, request = case.rollout(), opening()
    same: dict[str, Any] = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 4]}
    twins = [
        turn(rollout, call, request, **same)
        for call in ("call-a", "call-c", "call-B", "call-b", "call-\U0001f9ea")
    ]
    for twin in twins:
        await case.sink().put(twin)
    resolution = await case.lineage().resolve(rollout, continued(request, twins[0]))
    expect_parent(resolution, twins[2], [1, 2, 3, 4])


@check("lineage")
async def lineage_conflicting_twin(case: Case) -> None:
    """A call that was put with two payloads is no parent, and leaves its twin as no parent either: unresolved,
    ambiguous.
    """
    same: dict[str, Any] = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 4]}
    for conflicting, twin in (("call-1", "call-2"), ("call-2", "call-1")):
        rollout, request = case.rollout(), opening()
        parent = turn(rollout, twin, request, **same)
        await case.sink().put(parent)
        await case.sink().put(turn(rollout, conflicting, request, **same))
        second = turn(rollout, conflicting, request, **(same | {"prompt_token_ids": [9, 9]}))
        await expect_error(case.sink().put(second), ValueError, "a conflict")
        resolution = await case.lineage().resolve(rollout, continued(request, parent))
        expect_unresolved(resolution, AMBIGUOUS, "a request that a conflicting call and its twin lead to")


@check("lineage")
async def lineage_empty_answer(case: Case) -> None:
    """A call whose answer has no text and no tool call is no parent of its own request, when that is made again, nor
    of one that goes on without it.
    """
    for what, answer in EMPTY_ANSWERS.items():
        rollout, request = case.rollout(), opening()
        first = turn(rollout, "call-1", request)
        again = continued(request, first)
        empty = child_turn(cumulative_tokens(first), first, "call-2", again, delta=False)
        empty.output_items = [*answer]
        await case.sink().put(stamp_continuation(empty, again))
        for items in (again, [*again, message("user", "Go on.")]):
            resolution = await case.lineage().resolve(rollout, items)
            expect_unresolved(
                resolution, NO_MATCH, f"a request after an answer of {what} that it does not hold"
            )


@check("lineage")
async def lineage_edited_item(case: Case) -> None:
    """An item that fingerprint version 2 does not hash, edited, is no context that a call was made in."""
    rollout, request = case.rollout(), opening()
    call = {"type": "custom_tool_call", "call_id": "tool-1", "name": "patch", "input": "a"}
    result = {"type": "custom_tool_call_output", "call_id": "tool-1", "output": "long"}
    request = [*request, message("assistant", "Editing."), call, result]
    parent = turn(rollout, "call-1", request)
    await case.sink().put(parent)
    for edited in (call | {"input": "b"}, result | {"output": "removed"}):
        context = [edited if item["type"] == edited["type"] else item for item in request]
        await expect_no_parent(
            case.lineage(), rollout, continued(context, parent), "a request with an edited item"
        )


@check("lineage")
async def lineage_odd_arguments(case: Case) -> None:
    """A call whose tool arguments are JSON that few libraries print is a parent like any other."""
    for arguments in (f'{{"n": {2**70}}}', '{"t": "\\ud83d"}', "[" * 300 + "]" * 300, '{"n": NaN}', "{"):
        rollout, request = case.rollout(), opening()
        parent = turn(rollout, "call-1", request)
        called = {"type": "function_call", "call_id": "tool-1", "name": "f", "arguments": arguments}
        parent.output_items = [called]
        await case.sink().put(stamp_continuation(parent, request))
        found = await case.lineage().resolve(rollout, continued(request, parent))
        expect_parent(found, parent, cumulative_tokens(parent))


@check("lineage")
async def lineage_fingerprint_version(case: Case) -> None:
    """A record stamped by another fingerprint version is no candidate; one that names no version is."""
    request = opening()
    for version in (None, FINGERPRINT_VERSION - 1, FINGERPRINT_VERSION + 1):
        rollout = case.rollout()
        parent = turn(rollout, "call-1", request)
        parent.fingerprint_version = version
        await case.sink().put(parent)
        resolution = await case.lineage().resolve(rollout, continued(request, parent))
        if version is None:
            expect_parent(resolution, parent, cumulative_tokens(parent))
        else:
            expect_unresolved(resolution, NO_MATCH, f"a parent of fingerprint version {version}")


@check("lineage")
async def lineage_delta_chain(case: Case) -> None:
    """A parent whose prompt was sent as a delta on its own parent is named with its whole sequence, chain
    after chain.
    """
    rollout = case.rollout()
    sink, resolver = case.sink(), case.lineage()
    request = opening()
    parent = turn(rollout, "call-0", request)
    tokens = cumulative_tokens(parent)
    entries = [parent]
    await sink.put(parent)
    for number in range(1, 5):
        request = continued(request, parent, f"question {number}")
        expect_parent(await resolver.resolve(rollout, request), parent, tokens)
        parent = child_turn(tokens, parent, f"call-{number}", request, delta=number != 3)
        tokens = [*tokens, 71, 72, *parent.generation_token_ids]
        entries.append(parent)
        await sink.put(parent)
    expect_parent(await case.lineage().resolve(rollout, continued(request, parent)), parent, tokens)
    expect_entries(await case.source().freeze(rollout), *entries)


@check("lineage")
async def lineage_unproven_chain(case: Case) -> None:
    """A parent whose chain does not have its recorded digest, or lacks a link, is never named: an error or
    unresolved.
    """
    for broken in ("digest", "link"):
        rollout, request = case.rollout(), opening()
        root = turn(rollout, "call-1", request)
        following = continued(request, root)
        child = child_turn(cumulative_tokens(root), root, "call-2", following, delta=True)
        if broken == "digest":
            await case.sink().put(root)
            child.digest = compute_digest([1, 2, 3])
        try:
            await case.sink().put(child)
        except ValueError:
            continue
        last = continued(following, child)
        await expect_no_parent(
            case.lineage(), rollout, last, f"the continuation of a chain with a false {broken}"
        )
