"""Staging calls and fetching them back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tokencustody.conformance.case import Case
from tokencustody.conformance.cases.exactness import EDGE_IDS
from tokencustody.conformance.expect import describe, difference, expect, expect_error
from tokencustody.conformance.fixtures import staged_turn
from tokencustody.conformance.registry import check
from tokencustody.conformance.threads import at_once, in_thread
from tokencustody.staging.records import StagedCallBaseSnapshot, StagedCallRecord

THREADS = 16
CALLS_PER_THREAD = 6
# Finite as float32 too, as the digest demands; most of them are no float32.
EDGE_LOG_PROBS = (-0.1, -1.0000000000000002, -0.0, 0.0, 5e-324, -1e-40, -3.4028234663852886e38, -0.25)


@check("staging")
async def stage_then_fetch(case: Case) -> None:
    """A staged call is there for every client as soon as `stage` returned success under its staging key."""
    rollout = case.rollout()
    store = case.staging()
    root = staged_turn(rollout)
    for turn in (root, staged_turn(rollout, "call-2", parent=root)):
        key = await stage(case, store, turn.staged)
        expect(isinstance(key, str) and key, f"the staging key of a success is {key!r}")
        for client in (store, case.staging()):
            expect_calls(await in_thread(client.fetch, [key]), turn.staged)


@check("staging")
async def fetch_order(case: Case) -> None:
    """`fetch` returns one call per key in the order of the keys, whatever the order of staging; of none, none."""
    rollouts = (case.rollout(), case.rollout())
    records = [staged_turn(rollout, f"call-{n}").staged for n in (3, 1, 2) for rollout in rollouts]
    store = case.staging()
    keys = [await stage(case, store, each) for each in records]
    orders = (range(6), range(5, -1, -1), (4, 0, 5), (2,), ())
    for order in orders:
        found = await in_thread(case.staging().fetch, [keys[n] for n in order])
        expect_calls(found, *(records[n] for n in order))


@check("staging")
async def identical_stage(case: Case) -> None:
    """The same record again, from the same or another client, is a success under the same key."""
    rollout = case.rollout()
    record = staged_turn(rollout, extras={"finish_reason": "stop"}).staged
    store = case.staging()
    key = await stage(case, store, record)
    for client in (store, case.staging()):
        again = await stage(case, client, StagedCallRecord.model_validate(record.model_dump()))
        expect(again == key, f"the same record was staged under {again!r:.60}, before under {key!r:.60}")
    expect_calls(await in_thread(case.staging().fetch, [key]), record)


@check("staging")
async def conflicting_stage(case: Case) -> None:
    """Another record under a used key is a failed result with an error, and the first record stays."""
    rollout = case.rollout()
    first = staged_turn(rollout).staged
    others = {
        "token ids": staged_turn(rollout, token_ids=[7, 8, 9]).staged,
        "log probabilities": staged_turn(rollout, log_probs=[0.0, -0.75, -0.5]).staged,
        "mask": staged_turn(rollout, mask=[0.0, 0.0, 1.0]).staged,
        "weight version": staged_turn(rollout, weight_version=4).staged,
        "extras": staged_turn(rollout, extras={"finish_reason": "length"}).staged,
    }
    store = case.staging()
    key = await stage(case, store, first)
    for what, other in others.items():
        for client in (store, case.staging()):
            result = await attempt(case, client, other)
            expect(not result.ok, f"a record with other {what} under a used key was a success")
            expect(isinstance(result.error, str) and result.error, "a failed result has no error")
    await stage(case, case.staging(), first)
    expect_calls(await in_thread(case.staging().fetch, [key]), first)


@check("staging")
async def missing_staged_call(case: Case) -> None:
    """A key under which nothing was staged is an error, alone and among others, never a shorter list."""
    rollout = case.rollout()
    record = staged_turn(rollout).staged
    never = staged_turn(rollout, "call-never").staged.staging_key
    store = case.staging()
    await expect_error(in_thread(store.fetch, [never]), Exception, "fetch of a key without a record")
    key = await stage(case, store, record)
    for keys in ([never], [key, never], [never, key]):
        await expect_error(in_thread(store.fetch, keys), Exception, "fetch of a key without a record")
    expect_calls(await in_thread(store.fetch, [key]), record)


@check("staging")
async def staged_call_identity(case: Case) -> None:
    """Ids that differ in case, form, slashes or rollout are different calls: none hides another."""
    upper, lower = case.claim(f"{(rollout := case.rollout())}-A"), case.claim(f"{rollout}-a")
    calls = (
        "call",
        "CALL",
        "\u00e9",
        "e\u0301",
        "a/b",
        "a",
        "b",
        "call ",
        "\U0001f9ea",
        "%2F",
        "..",
        "c" * 512,
    )
    names = [(upper, call) for call in calls] + [(lower, "call"), (lower, "a/b")]
    turns = [staged_turn(*name, token_ids=[n, n + 1]) for n, name in enumerate(names)]
    store = case.staging()
    keys = [await stage(case, store, turn.staged) for turn in turns]
    expect(len(set(keys)) == len(keys), "two calls were staged under one key")
    expect_calls(await in_thread(case.staging().fetch, keys), *(turn.staged for turn in turns))


@check("staging")
async def exact_staged_columns(case: Case) -> None:
    """Columns keep every bit: ids to 2^64-1, log probabilities as float64, the sign of 0.0, alone and in thousands."""
    rollout = case.rollout()
    root = staged_turn(rollout, "root", token_ids=EDGE_IDS, weight_version=2**53 + 1)
    sampled = [1.0] * len(EDGE_LOG_PROBS)
    turns = [
        root,
        *(staged_turn(rollout, f"id-{edge}", token_ids=[edge], mask=[1.0]) for edge in EDGE_IDS),
        staged_turn(
            rollout, "probs", token_ids=range(8), mask=sampled, log_probs=EDGE_LOG_PROBS, parent=root
        ),
        *(
            staged_turn(rollout, f"prob-{n}", token_ids=[1], mask=[1.0], log_probs=[value])
            for n, value in enumerate(EDGE_LOG_PROBS)
        ),
        staged_turn(
            rollout, "zeros", token_ids=[1, 2, 3, 4], mask=[0.0, -0.0] * 2, log_probs=[0.0, 0.0, -0.0, -0.0]
        ),
        staged_turn(
            rollout,
            "long",
            token_ids=[case.random.randrange(2**17) for _ in range(3000)],
            mask=[1.0] * 3000,
            log_probs=[case.random.uniform(-20.0, 0.0) for _ in range(3000)],
        ),
    ]
    store = case.staging()
    keys = [await stage(case, store, turn.staged) for turn in turns]
    expect_calls(await in_thread(case.staging().fetch, keys), *(turn.staged for turn in turns))


@check("staging")
async def unproven_record(case: Case) -> None:
    """A record whose contents do not have its digest is refused or never fetched, and its key stays usable."""
    rollout = case.rollout()
    record = staged_turn(rollout).staged
    changes: dict[str, Any] = {
        "token_ids_delta": [1, 2, 3],
        "token_mask_delta": [0.0, 0.0, 0.0],
        "generation_log_probs_delta": [0.0, -0.5, -0.5],
        "weight_version": 4,
        "chain_hash": "0" * 64,
    }
    store, reader = case.staging(), case.staging()
    for field, value in changes.items():
        tampered = record.model_copy(update={field: value})
        case.claim_key(tampered.staging_key)
        try:
            result = await in_thread(store.stage, tampered)
        except Exception as exc:
            outcome = f"refused with {describe(exc):.60}"
        else:
            outcome = "staged" if result.ok else "refused"
        what = f"fetch of a record with a changed {field} (it was {outcome})"
        await expect_error(in_thread(reader.fetch, [record.staging_key]), Exception, what)
    key = await stage(case, case.staging(), record)
    expect_calls(await in_thread(case.staging().fetch, [key]), record)


@check("staging")
async def concurrent_stages(case: Case) -> None:
    """Many threads that stage through shared clients, some the same call, lose nothing and mix nothing up."""
    rollout = case.rollout()
    stores = [case.staging(), case.staging()]
    shared = staged_turn(rollout, "shared").staged
    own = [
        [
            staged_turn(rollout, f"call-{who}-{n}", token_ids=[who, n, 7]).staged
            for n in range(CALLS_PER_THREAD)
        ]
        for who in range(THREADS)
    ]

    def stream(store: Any, records: Sequence[StagedCallRecord]) -> list[Any]:
        return [store.stage(record) for record in records]

    claimed = [shared, *(record for records in own for record in records)]
    for record in claimed:
        case.claim_key(record.staging_key)
    outcomes = await at_once(
        [partial(stream, stores[who % 2], [shared, *records]) for who, records in enumerate(own)]
    )
    keys: dict[str, str] = {}
    for outcome, records in zip(outcomes, own, strict=True):
        expect(not isinstance(outcome, BaseException), f"a thread that staged ended in {outcome!r:.200}")
        for record, result in zip([shared, *records], outcome, strict=True):
            expect(result.ok, f"{record.staging_key} was not staged: {result.error}")
            keys.setdefault(record.model_call_id, result.staging_key)
    expect(len(set(keys.values())) == len(claimed), "two calls were staged under one key")
    for client in (*stores, case.staging()):
        found = await in_thread(client.fetch, [keys[record.model_call_id] for record in claimed])
        expect_calls(found, *claimed)


@check("staging")
async def concurrent_conflicting_stages(case: Case) -> None:
    """Of many threads that stage different records under one key at once, exactly one succeeds and its record stays."""
    for _ in range(3):
        rollout = case.rollout()
        records = [staged_turn(rollout, token_ids=[n, n + 1]).staged for n in range(8)]
        stores = [case.staging(), case.staging()]
        case.claim_key(records[0].staging_key)
        results = await at_once([partial(stores[n % 2].stage, record) for n, record in enumerate(records)])
        for result in results:
            expect(not isinstance(result, BaseException), f"a conflicting stage ended in {result!r:.200}")
        winners = [record for record, result in zip(records, results, strict=True) if result.ok]
        expect(len(winners) == 1, f"{len(winners)} of {len(records)} conflicting stages succeeded, not one")
        key = next(result.staging_key for result in results if result.ok)
        expect_calls(await in_thread(case.staging().fetch, [key]), *winners)


async def attempt(case: Case, store: Any, record: StagedCallRecord, **options: Any) -> Any:
    """Return what `store` says about `record`."""
    case.claim_key(record.staging_key)
    result = await in_thread(store.stage, record, **options)
    if result.ok:
        case.claim_key(result.staging_key)
    return result


async def stage(case: Case, store: Any, record: StagedCallRecord, **options: Any) -> str:
    """Stage `record`, which must be a success, and return its key."""
    result = await attempt(case, store, record, **options)
    expect(result.ok, f"{record.staging_key:.60} was not staged: {result.error}")
    key: str = result.staging_key
    return key


def expect_calls(snapshots: Sequence[Any], *records: StagedCallRecord) -> None:
    """Require that `snapshots` are `records` in their order, equal in every bit; extras need not be with them."""
    calls = [snapshot.model_call_id for snapshot in snapshots]
    wanted = [record.model_call_id for record in records]
    expect(calls == wanted, f"fetch returned the calls {calls!r:.150}, not {wanted!r:.150}")
    for snapshot, record in zip(snapshots, records, strict=True):
        for field in StagedCallBaseSnapshot.model_fields:
            where = difference(getattr(record, field), getattr(snapshot, field), field)
            expect(where is None, f"staged call {record.staging_key!r:.80} came back changed: {where}")
        if hasattr(snapshot, "extras"):
            where = difference(record.extras, snapshot.extras, "extras")
            expect(where is None, f"staged call {record.staging_key!r:.80} came back changed: {where}")
