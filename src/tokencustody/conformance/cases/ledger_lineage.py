"""Which rows of the capture ledger a request can continue."""

from __future__ import annotations

import contextlib
from typing import Any

from tokencustody.conformance.case import Case
from tokencustody.conformance.cases.lineage import expect_parent, expect_root, expect_unresolved
from tokencustody.conformance.expect import expect
from tokencustody.conformance.fixtures import EMPTY_ANSWERS, StagedTurn, message, opening, staged_turn, turn
from tokencustody.conformance.registry import check
from tokencustody.fingerprint import FINGERPRINT_VERSION, assistant_fingerprint
from tokencustody.lineage import AMBIGUOUS, NO_MATCH
from tokencustody.records import ParentResolutionStatus, cumulative_tokens


@check("ledger")
async def ledger_visibility(case: Case) -> None:
    """A ledger that was in use before a record names the call as parent as soon as the record returned."""
    rollout = case.rollout()
    resolver, recorder = case.ledger(), case.ledger()
    parent = staged_turn(rollout)
    expect(isinstance(resolver.is_process_shared(), bool), "is_process_shared returned no bool")
    before = await resolver.resolve(rollout, parent.following())
    expect_unresolved(before, NO_MATCH, "a request before its parent was recorded")
    await recorder.record(parent.commit)
    expect_staged_parent(await resolver.resolve(rollout, parent.following()), parent)
    child = staged_turn(rollout, "call-2", parent=parent)
    await recorder.record(child.commit)
    expect_staged_parent(await resolver.resolve(rollout, child.following()), child)


@check("ledger")
async def ledger_visibility_fresh_client(case: Case) -> None:
    """A ledger opened after the records names the call with its whole staging chain, also once it is frozen."""
    rollout = case.rollout()
    root = staged_turn(rollout)
    child = staged_turn(rollout, "call-2", parent=root)
    grandchild = staged_turn(rollout, "call-3", parent=child)
    for recorded in (root, child, grandchild):
        await case.ledger().record(recorded.commit)
    for parent in (grandchild, root, child):
        expect_staged_parent(await case.ledger().resolve(rollout, parent.following()), parent)
    await case.source().freeze(rollout)
    expect_staged_parent(await case.ledger().resolve(rollout, child.following()), child)


@check("ledger")
async def ledger_no_match(case: Case) -> None:
    """A first request is a root; one with another reply, an edited or a shortened context, or of another rollout
    has no parent.
    """
    rollout, other = case.rollout(), case.rollout()
    parent = staged_turn(rollout)
    following = parent.following()
    ledger = case.ledger()
    await ledger.record(parent.commit)
    await expect_root(ledger, rollout, opening())
    requests = {
        "another reply": [*opening(), message("assistant", "Something else."), following[-1]],
        "an edited system prompt": [message("system", "You are long."), *following[1:]],
        "a shortened context": following[2:],
    }
    for what, items in requests.items():
        expect_unresolved(await ledger.resolve(rollout, items), NO_MATCH, f"a request with {what}")
    expect_unresolved(await ledger.resolve(other, following), NO_MATCH, "a parent in another rollout")


@check("ledger")
async def failed_call_is_no_parent(case: Case) -> None:
    """A call that was recorded as failed is no parent, also when a record was tried afterwards."""
    rollout = case.rollout()
    failed = staged_turn(rollout)
    ledger = case.ledger()
    await ledger.record_failure(rollout, "call-1", "worker_capture_failed")
    for resolver in (ledger, case.ledger()):
        found = await resolver.resolve(rollout, failed.following())
        expect_unresolved(found, NO_MATCH, "a request after a failed call")
    with contextlib.suppress(ValueError):  # which it must be, as `record_after_failure` says
        await ledger.record(failed.commit)
    found = await case.ledger().resolve(rollout, failed.following())
    expect_unresolved(found, NO_MATCH, "a request after a failed call that was then recorded")


@check("ledger")
async def ledger_unversioned_rows(case: Case) -> None:
    """Rows without a fingerprint version, or with another one, are no candidates."""
    for version in (0, FINGERPRINT_VERSION - 1, FINGERPRINT_VERSION + 1):
        rollout = case.rollout()
        parent = staged_turn(rollout, fingerprint_version=version)
        await case.ledger().record(parent.commit)
        found = await case.ledger().resolve(rollout, parent.following())
        expect_unresolved(found, NO_MATCH, f"a parent with fingerprint version {version}")


@check("ledger")
async def ledger_derived_fingerprint(case: Case) -> None:
    """A row is found by its conversation, whatever fingerprint its record claims or lacks, and never by the claim."""
    claims = {"no fingerprint": None, "a foreign fingerprint": "b" * 64}
    other = staged_turn(case.rollout(), reply="Something else.")
    claims["the fingerprint of another reply"] = other.commit.record.continuation_fingerprint
    for what, claim in claims.items():
        rollout = case.rollout()
        parent = staged_turn(rollout, continuation_fingerprint=claim)
        await case.ledger().record(parent.commit)
        expect_staged_parent(await case.ledger().resolve(rollout, parent.following()), parent)
        found = await case.ledger().resolve(rollout, other.following())
        expect_unresolved(found, NO_MATCH, f"a request after another reply, to a row with {what}")


@check("ledger")
async def ledger_equal_twins(case: Case) -> None:
    """Of rows with the same conversation and the same tokens, the smallest call id by code points is the parent."""
    rollout = case.rollout()
    twins = {call: staged_turn(rollout, call, token_ids=[1, 2, 3]) for call in ("b", "a", "B")}
    for recorded in twins.values():
        await case.ledger().record(recorded.commit)
    expect_staged_parent(await case.ledger().resolve(rollout, twins["a"].following()), twins["B"])


@check("ledger")
async def ledger_ambiguous_twins(case: Case) -> None:
    """Rows with the same conversation and different tokens are no proven parent: unresolved, ambiguous."""
    rollout = case.rollout()
    twins = [staged_turn(rollout, call, token_ids=[1, 2, ord(call)]) for call in "ab"]
    for recorded in twins:
        await case.ledger().record(recorded.commit)
    found = await case.ledger().resolve(rollout, twins[0].following())
    expect_unresolved(found, AMBIGUOUS, "a request with two possible parents")


@check("ledger")
async def ledger_empty_answer(case: Case) -> None:
    """A row whose answer is empty is no parent of its own request, nor of one that goes on without the answer."""
    for what, answer in EMPTY_ANSWERS.items():
        rollout = case.rollout()
        again = staged_turn(rollout).following()
        commit = staged_turn(rollout, "call-2", "").commit
        row = commit.record.model_copy(
            update={"continuation_fingerprint": assistant_fingerprint([*again, *answer])}
        )
        update = {"request_items": again, "response_items": [*answer], "record": row}
        await case.ledger().record(commit.model_copy(update=update))
        for items in (again, [*again, message("user", "Go on.")]):
            found = await case.ledger().resolve(rollout, items)
            expect_unresolved(found, NO_MATCH, f"a request after an answer of {what} that it does not hold")


@check("ledger")
async def complete_records_first(case: Case) -> None:
    """Complete records are asked before the ledger: one of them is the parent, several that differ are ambiguous."""
    single, several = case.rollout(), case.rollout()
    for rollout in (single, several):
        await case.ledger().record(staged_turn(rollout, "a-row").commit)
    following = staged_turn(single).following()
    entry = turn(single, "complete", opening())
    await case.sink().put(entry)
    expect_parent(await case.ledger().resolve(single, following), entry, cumulative_tokens(entry))
    for call in ("complete-1", "complete-2"):
        await case.sink().put(turn(several, call, opening()))
    found = await case.ledger().resolve(several, following)
    expect_unresolved(found, AMBIGUOUS, "a request with two possible complete parents and a ledger row")


def expect_staged_parent(resolution: Any, parent: StagedTurn) -> None:
    """Require that `resolution` names the row of `parent` and what its staged tokens are found and proven by."""
    call, row = parent.staged.model_call_id, parent.commit.record
    expect(
        resolution.status == ParentResolutionStatus.RESOLVED,
        f"the continuation of {call} is {resolution.status!s} {resolution.reason}",
    )
    match = resolution.match
    expect(match.model_call_id == call, f"{match.model_call_id} was named, not {call}")
    expect(tuple(match.cumulative_token_ids) == (), f"the row of {call} was named with token ids")
    for field, found, wanted in (
        ("staging_chain", tuple(match.staging_chain), parent.commit.staging_chain),
        ("prev_len", match.prev_len, row.cum_len),
        ("chain_hash", match.chain_hash, row.chain_hash),
        ("digest", match.digest, row.cumulative_hash),
    ):
        expect(found == wanted, f"{call} was named with {field} {found!r:.200}, not {wanted!r:.200}")
