"""Which committed calls a resolver sees."""

from __future__ import annotations

from typing import Any

from tokencustody.conformance.case import Case
from tokencustody.conformance.expect import describe, expect, expect_error
from tokencustody.conformance.fixtures import continued, message, opening, turn
from tokencustody.conformance.registry import check
from tokencustody.lineage import NO_MATCH
from tokencustody.records import ParentResolutionStatus, TokenEntry, cumulative_tokens


@check("lineage")
async def lineage_visibility(case: Case) -> None:
    """A resolver that was in use before a put names the call as parent as soon as the put returned."""
    rollout = case.rollout()
    resolver, request = case.lineage(), opening()
    expect(isinstance(resolver.is_process_shared(), bool), "is_process_shared returned no bool")
    parent = turn(rollout, "call-1", request)
    following = continued(request, parent)
    expect_unresolved(
        await resolver.resolve(rollout, following), NO_MATCH, "a request before its parent's put"
    )
    await case.sink().put(parent)
    expect_parent(await resolver.resolve(rollout, following), parent, cumulative_tokens(parent))


@check("lineage")
async def lineage_prev_len(case: Case) -> None:
    """A match says how many tokens the request continues."""
    rollout = case.rollout()
    parent = turn(rollout, "call-1", opening())
    await case.sink().put(parent)
    request = [*opening(), *parent.output_items, message("user", "And then?")]
    match = (await case.lineage().resolve(rollout, request)).match
    tokens = cumulative_tokens(parent)
    expect(match is not None, "the continuation of a call has no match")
    expect(match.prev_len == len(tokens), f"prev_len is {match.prev_len} for {len(tokens)} tokens")


@check("lineage")
async def lineage_visibility_fresh_client(case: Case) -> None:
    """A resolver opened after a put names the call as parent, before and after the rollout is frozen."""
    rollout, request = case.rollout(), opening()
    parent = turn(rollout, "call-1", request)
    await case.sink().put(parent)
    following = continued(request, parent)
    expect_parent(await case.lineage().resolve(rollout, following), parent, cumulative_tokens(parent))
    await case.source().freeze(rollout)
    expect_parent(await case.lineage().resolve(rollout, following), parent, cumulative_tokens(parent))


@check("lineage")
async def lineage_root(case: Case) -> None:
    """A request without anything that a model wrote is a root, whatever the rollout holds."""
    rollout, request = case.rollout(), opening()
    resolver = case.lineage()
    await expect_root(resolver, rollout, request)
    await case.sink().put(turn(rollout, "call-1", request))
    await expect_root(resolver, rollout, request)
    await expect_root(resolver, rollout, [])


@check("lineage")
async def lineage_no_match(case: Case) -> None:
    """A reply that was never recorded, an edited context or a shortened one has no parent: unresolved,
    no_match.
    """
    rollout, request = case.rollout(), opening()
    parent = turn(rollout, "call-1", request)
    await case.sink().put(parent)
    following = continued(request, parent)
    requests = {
        "another reply": [*request, message("assistant", "Something else."), following[-1]],
        "an edited system prompt": [message("system", "You are long."), *following[1:]],
        "a shortened context": following[2:],
    }
    for what, items in requests.items():
        expect_unresolved(await case.lineage().resolve(rollout, items), NO_MATCH, f"a request with {what}")


@check("lineage")
async def lineage_rollout_scope(case: Case) -> None:
    """Calls of another rollout are no candidates, neither as parent nor as a twin."""
    rollout, other, request = case.rollout(), case.rollout(), opening()
    elsewhere = turn(other, "call-1", request, prompt_token_ids=[1, 2])
    following = continued(request, elsewhere)
    await case.sink().put(elsewhere)
    resolver = case.lineage()
    expect_unresolved(await resolver.resolve(rollout, following), NO_MATCH, "a parent in another rollout")
    parent = turn(rollout, "call-2", request)
    await case.sink().put(parent)
    expect_parent(await resolver.resolve(rollout, following), parent, cumulative_tokens(parent))


@check("lineage")
async def lineage_conflicting_call(case: Case) -> None:
    """A call id that was used with two payloads is no candidate, also for a resolver that knew the first."""
    rollout, request = case.rollout(), opening()
    parent = turn(rollout, "call-1", request)
    following = continued(request, parent)
    resolver = case.lineage()
    await case.sink().put(parent)
    expect_parent(await resolver.resolve(rollout, following), parent, cumulative_tokens(parent))
    await expect_error(
        case.sink().put(turn(rollout, "call-1", request, prompt_token_ids=[9])), ValueError, "a conflict"
    )
    for client in (resolver, case.lineage()):
        expect_unresolved(
            await client.resolve(rollout, following), NO_MATCH, "a parent with conflicting payloads"
        )


@check("lineage")
async def lineage_malformed_request(case: Case) -> None:
    """Items that cannot be hashed are unresolved or a ValueError, never a root and never a parent."""
    rollout, request = case.rollout(), opening()
    parent = turn(rollout, "call-1", request)
    await case.sink().put(parent)
    following = continued(request, parent)
    for bad in (
        "not an object",
        {"role": "assistant", "content": [{"no": "type"}]},
        {"role": "assistant", "content": 7},
    ):
        try:
            resolution = await case.lineage().resolve(rollout, [*following, bad])
        except ValueError:
            continue
        expect(
            resolution.status == ParentResolutionStatus.UNRESOLVED,
            f"a malformed request is {resolution.status!s}",
        )


@check("lineage", "retire")
async def lineage_retired_rollout(case: Case) -> None:
    """The calls of a retired rollout are gone for every resolver: unresolved, no_match."""
    rollout, request = case.rollout(), opening()
    parent = turn(rollout, "call-1", request)
    await case.sink().put(parent)
    following = continued(request, parent)
    resolver = case.lineage()
    expect_parent(await resolver.resolve(rollout, following), parent, cumulative_tokens(parent))
    await case.source().retire([rollout])
    for client in (resolver, case.lineage()):
        expect_unresolved(await client.resolve(rollout, following), NO_MATCH, "a parent that was retired")


async def expect_root(resolver: Any, rollout: str, items: list[dict[str, Any]]) -> None:
    """Require that `items` are a root."""
    resolution = await resolver.resolve(rollout, items)
    expect(
        resolution.status == ParentResolutionStatus.ROOT,
        f"a first request is {resolution.status!s}, not a root",
    )


def expect_unresolved(resolution: Any, reason: str, what: str) -> None:
    """Require that `resolution` names no parent for `reason`."""
    expect(
        resolution.status == ParentResolutionStatus.UNRESOLVED,
        f"{what} is {resolution.status!s}, not unresolved",
    )
    expect(resolution.match is None, f"{what} is unresolved and carries a match")
    expect(resolution.reason == reason, f"{what} is unresolved for {resolution.reason!r}, not {reason!r}")


def expect_parent(resolution: Any, parent: TokenEntry, tokens: list[int]) -> None:
    """Require that `resolution` names `parent` with its whole sequence `tokens`, digest and length."""
    expect(
        resolution.status == ParentResolutionStatus.RESOLVED,
        f"the continuation of {parent.model_call_id} is {resolution.status!s} {resolution.reason}",
    )
    match = resolution.match
    expect(
        match.model_call_id == parent.model_call_id,
        f"{match.model_call_id} was named, not {parent.model_call_id}",
    )
    expect(
        list(match.cumulative_token_ids) == tokens,
        f"{parent.model_call_id} was named with another token sequence",
    )
    expect(match.digest == parent.digest, f"{parent.model_call_id} was named with another digest")


async def expect_no_parent(resolver: Any, rollout: str, items: list[dict[str, Any]], what: str) -> str:
    """Require that `items` get no parent: unresolved or an error. Return which."""
    try:
        resolution = await resolver.resolve(rollout, items)
    except Exception as exc:
        return describe(exc)
    expect(resolution.status == ParentResolutionStatus.UNRESOLVED, f"{what} is {resolution.status!s}")
    return f"unresolved: {resolution.reason}"
