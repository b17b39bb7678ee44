"""What else a staging store may offer: extras, prefixes and deletion; and that no retirement touches what it holds."""

from __future__ import annotations

import contextlib
from typing import Any

from tokencustody.conformance.case import Case
from tokencustody.conformance.cases.exactness import EDGE_TEXTS
from tokencustody.conformance.cases.staging import attempt, expect_calls, stage
from tokencustody.conformance.expect import difference, expect, expect_error
from tokencustody.conformance.fixtures import StagedTurn, record, staged_turn
from tokencustody.conformance.registry import check
from tokencustody.conformance.threads import in_thread

EXTRAS: tuple[dict[str, Any] | None, ...] = (
    None,
    {},
    {"": "", "a": {"b": [1, 1.0, True, "1", None]}, "10": 1, "9": 2},
    {"numbers": [0, -1, 2**63 - 1, -(2**63), 2**53 + 1, 0.1, -0.0, 100.0, 1e16, 1e300, 5e-324]},
    {"texts": list(EDGE_TEXTS)},
    {"empty": [[], {}, [[], {}, None]], "key \u0000 \U0001f9ea": 1},
    {"routes": [[[3, 1], [2, 0]]] * 50},
)


@check("staging", "fetch_extras")
async def staged_extras(case: Case) -> None:
    """Extras come back per key with value and type, None apart from {}; none are returned that their digest denies."""
    rollout = case.rollout()
    records = [staged_turn(rollout, f"call-{n}", extras=extras).staged for n, extras in enumerate(EXTRAS)]
    store = case.staging()
    keys = [await stage(case, store, each) for each in records]
    expect_calls(await in_thread(case.staging().fetch, keys), *records)
    for order in (range(len(keys)), range(len(keys) - 1, -1, -1)):
        found = await in_thread(case.staging().fetch_extras, [keys[n] for n in order])
        where = difference([EXTRAS[n] for n in order], list(found), "extras")
        expect(where is None, f"extras came back changed: {where}")
    never = staged_turn(rollout, "call-never").staged
    await expect_error(
        in_thread(store.fetch_extras, [keys[0], never.staging_key]),
        Exception,
        "extras of a key without a record",
    )
    case.claim_key(never.staging_key)
    with contextlib.suppress(Exception):  # refusing it is one of the two right answers
        await in_thread(store.stage, never.model_copy(update={"extras": {"added": 1}}))
    await expect_error(
        in_thread(case.staging().fetch_extras, [never.staging_key]), Exception, "extras without their digest"
    )


@check("staging", "fetch_prefix")
async def staged_prefix(case: Case) -> None:
    """`fetch_prefix_token_ids` of a staging chain is the whole sequence; of a chain with a gap, out of order or with
    a missing link it is an error, never another sequence.
    """
    rollout = case.rollout()
    root = staged_turn(rollout, "call-1", token_ids=[1, 2**64 - 1, 3])
    child = staged_turn(rollout, "call-2", parent=root, token_ids=[4, 5, 6])
    last = staged_turn(rollout, "call-3", parent=child, token_ids=[7])
    other = staged_turn(rollout, "call-0", token_ids=[8, 9, 10])
    store = case.staging()
    keys = {
        turn.staged.model_call_id: await stage(case, store, turn.staged)
        for turn in (last, other, child, root)
    }

    async def read(*turns: StagedTurn) -> list[int]:
        chain = [keys[turn.staged.model_call_id] for turn in turns]
        return list(await in_thread(case.staging().fetch_prefix_token_ids, chain))

    for chain in ([root], [root, child], [root, child, last]):
        ids = await read(*chain)
        expect(ids == chain[-1].token_ids, f"the prefix of {len(chain)} staged calls has other token ids")
    wrong = {
        "with a gap": (root, last),
        "without its root": (child, last),
        "out of order": (child, root),
        "with a call twice": (root, root),
        "with another root": (other, child),
    }
    for what, broken in wrong.items():
        await expect_error(read(*broken), Exception, f"the prefix of a chain {what}")
    keys["call-never"] = staged_turn(rollout, "call-never").key
    never = staged_turn(rollout, "call-never", parent=root)
    await expect_error(read(root, never), Exception, "the prefix of a chain with a missing link")


@check("staging", "staging_delete")
async def staged_deletion(case: Case) -> None:
    """A deleted call is gone for every client and its key takes another record; other calls stay; again it is a
    no-op.
    """
    rollout = case.rollout()
    gone, kept = staged_turn(rollout, "call-1").staged, staged_turn(rollout, "call-2").staged
    store = case.staging()
    keys = [await stage(case, store, each) for each in (gone, kept)]
    for client in (store, case.staging()):
        await in_thread(client.delete, keys[:1])
    await in_thread(store.delete, [])
    for client in (store, case.staging()):
        await expect_error(in_thread(client.fetch, keys[:1]), Exception, "fetch of a deleted call")
        expect_calls(await in_thread(client.fetch, keys[1:]), kept)
    other = staged_turn(rollout, "call-1", token_ids=[7, 8]).staged
    again = await stage(case, case.staging(), other)
    expect_calls(await in_thread(case.staging().fetch, [again, keys[1]]), other, kept)


@check("staging", "retire", "delete")
async def source_keeps_staged_calls(case: Case) -> None:
    """Dropping, retiring and deleting rollouts through the source leaves what was staged for them as it was."""
    dropped, retired, deleted = (case.rollout() for _ in range(3))
    source, store = case.source(), case.staging()
    turns = [staged_turn(rollout) for rollout in (dropped, retired, deleted)]
    keys = [await stage(case, store, turn.staged) for turn in turns]
    for rollout in (dropped, retired, deleted):
        await case.sink().put(record(rollout))
    snapshot = await source.freeze(dropped)
    expect(
        await source.drop(dropped, snapshot_id=snapshot.snapshot_id, version=snapshot.version),
        "the snapshot was not dropped",
    )
    await source.retire([retired])
    await source.delete([deleted])
    expect_calls(await in_thread(case.staging().fetch, keys), *(turn.staged for turn in turns))


@check("staging", "ledger", "ledger_retire", "ledger_delete")
async def ledger_keeps_staged_calls(case: Case) -> None:
    """Retiring and deleting rollouts through the ledger leaves what was staged for them as it was."""
    retired, deleted = case.rollout(), case.rollout()
    ledger, store = case.ledger(), case.staging()
    turns = [staged_turn(rollout) for rollout in (retired, deleted)]
    keys = [await stage(case, store, turn.staged) for turn in turns]
    for turn in turns:
        await ledger.record(turn.commit)
    await ledger.retire([retired])
    await ledger.delete([deleted])
    expect_calls(await in_thread(case.staging().fetch, keys), *(turn.staged for turn in turns))
    again = await attempt(case, case.staging(), turns[1].staged)
    expect(again.ok, f"the same record after its rollout was deleted is a failure: {again.error}")
