"""What becomes of a call that is settled alone: one of five answers, the same whenever a try is repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest

from tests.support.entries import make_entry
from tests.support.rows import rows_of, run_sql
from tests.support.staged import stage
from tokencustody import CaptureStore, open_store
from tokencustody.codec.attachments import pack_attachments
from tokencustody.codec.calls import pack_entry
from tokencustody.codec.staged import pack_call
from tokencustody.errors import PayloadConflictError
from tokencustody.schema import tables
from tokencustody.store.base import now
from tokencustody.txn.fence import RolloutKey, Stamp
from tokencustody.txn.putting import Put, new_call
from tokencustody.txn.settling import Call, Differing, Intent, Settled, new_intent, settle_txn
from tokencustody.txn.staged_calls import StagedCall, new_staged_call

KEY = RolloutKey("run-1", "rollout-1")


def put(by: str = "test-writer", **fields: Any) -> Call:
    entry = make_entry(**fields)
    packed = pack_entry(entry)
    return Put(new_call(KEY, entry, packed, Stamp.make(now(), by), None), entry, packed, None)


def intent(by: str = "test-writer") -> Call:
    return Intent(new_intent(KEY, "call-1", Stamp.make(now(), by)))


def staged(by: str = "test-writer", attachments: dict[str, Any] | None = None, **fields: Any) -> Call:
    record = stage("call-1", rollout="rollout-1", **fields).snapshot
    new, attached = new_staged_call(
        KEY, record, pack_call(record), pack_attachments(attachments), Stamp.make(now(), by)
    )
    return StagedCall(new, attached)


attached = partial(staged, attachments={"a": b"1"})

Make = Callable[..., Call]
KINDS: dict[str, Make] = {
    "record": put,
    "intent": intent,
    "staged call": staged,
    "with attachments": attached,
}
FENCED = {name: KINDS[name] for name in ("record", "intent")}
UNFENCED = {name: KINDS[name] for name in ("staged call", "with attachments")}
OTHERS: dict[str, tuple[Call, Call, list[str]]] = {
    "record": (put(), put(model="other", created_at_source="x"), ["created_at_source", "model"]),
    "staged call": (staged(), staged(weight_version=2), ["weight_version"]),
    "attachments": (staged(), attached(), ["attachment a"]),
    "other attachments": (
        attached(),
        staged(attachments={"a": b"2", "b": 1}),
        ["attachment a", "attachment b"],
    ),
}

every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
fenced_kinds = pytest.mark.parametrize("make", FENCED.values(), ids=FENCED)
fences = pytest.mark.parametrize("fence", [Settled.FROZEN, Settled.RETIRED])


async def settle(store: CaptureStore, call: Call) -> Settled | Differing:
    return await store.sink._database.write(partial(settle_txn, call=call))


async def close(store: CaptureStore, fence: Settled) -> None:
    if fence is Settled.FROZEN:
        await store.source.freeze("rollout-1")
    else:
        await store.source.retire(["rollout-1"])


async def events(url: str) -> list[tuple[Any, ...]]:
    found = await rows_of(url, tables.snapshot_versions)
    return sorted((row["version"], row["event"]) for row in found)


@every_kind
async def test_a_new_call_is_stored_and_again_for_whoever_tries_the_same_write_twice(
    store: CaptureStore, make: Make
) -> None:
    call = make()
    for _ in range(3):
        assert await settle(store, call) is Settled.STORED


@every_kind
async def test_a_call_that_somebody_stored_before_is_the_same_and_the_first_row_stays(
    store: CaptureStore, store_url: str, make: Make
) -> None:
    first = make()
    await settle(store, first)
    before = await rows_of(store_url, first.kind.table)
    assert await settle(store, make("another host")) is Settled.SAME
    assert await settle(store, make()) is Settled.SAME  # at another time
    assert await rows_of(store_url, first.kind.table) == before


@fences
@fenced_kinds
async def test_behind_a_fence_new_calls_and_repeats_are_refused_and_change_nothing(
    store: CaptureStore, store_url: str, make: Make, fence: Settled
) -> None:
    await settle(store, make())
    await close(store, fence)
    held, history = await rows_of(store_url, make().kind.table), await events(store_url)
    for late in (make(), make("another host"), put(model_call_id="late"), put(model="other")):
        assert await settle(store, late) is fence
    assert await rows_of(store_url, make().kind.table) == held
    assert await events(store_url) == history


@fenced_kinds
async def test_a_write_whose_answer_was_lost_before_a_freeze_has_still_succeeded(
    store: CaptureStore, make: Make
) -> None:
    call = make()
    await settle(store, call)
    await close(store, Settled.FROZEN)
    assert await settle(store, call) is Settled.STORED
    await close(store, Settled.RETIRED)
    assert await settle(store, call) is Settled.RETIRED  # its row is gone


@pytest.mark.parametrize(("first", "second", "fields"), OTHERS.values(), ids=OTHERS)
async def test_other_data_under_the_same_id_differs_in_named_fields_and_the_first_stays(
    store: CaptureStore, store_url: str, first: Call, second: Call, fields: list[str]
) -> None:
    assert await settle(store, first) is Settled.STORED
    held = [await rows_of(store_url, table) for table in (first.kind.table, tables.staged_attachments)]
    assert await settle(store, second) == Differing(fields)
    assert [
        await rows_of(store_url, table) for table in (first.kind.table, tables.staged_attachments)
    ] == held


async def test_the_evidence_of_a_conflict_has_both_hashes_once_however_often_the_write_is_tried(
    store: CaptureStore, store_url: str
) -> None:
    first, second = put(), put(model="other")
    await settle(store, first)
    for _ in range(2):
        assert await settle(store, second) == Differing(["model"])
    await close(store, Settled.FROZEN)
    assert await settle(store, second) == Differing(["model"])
    (evidence,) = await rows_of(store_url, tables.failures)
    assert evidence["first_payload_sha256"] == first.new.row["payload_sha256"]
    assert evidence["second_payload_sha256"] == second.new.row["payload_sha256"]
    assert await events(store_url) == [(0, "open"), (1, "conflict"), (2, "freeze")]
    assert (await store.source.freeze("rollout-1")).incomplete
    await close(store, Settled.RETIRED)
    assert await settle(store, second) is Settled.RETIRED


@pytest.mark.parametrize("make", UNFENCED.values(), ids=UNFENCED)
async def test_a_staged_call_opens_no_fence_and_makes_one_version_behind_a_freeze(
    store: CaptureStore, store_url: str, make: Make
) -> None:
    assert await settle(store, make()) is Settled.STORED
    assert await events(store_url) == []
    await run_sql(store_url, "DELETE FROM staged_attachments")
    await run_sql(store_url, "DELETE FROM staged_calls")
    await close(store, Settled.FROZEN)
    late = make()
    for call, settled in ((late, Settled.STORED), (late, Settled.STORED), (make(), Settled.SAME)):
        assert await settle(store, call) is settled
    assert await settle(store, staged(weight_version=2, attachments={"c": 1})) != Settled.SAME
    assert await events(store_url) == [(0, "open"), (1, "freeze"), (2, "late_stage")]


@pytest.mark.parametrize("make", UNFENCED.values(), ids=UNFENCED)
async def test_a_late_staged_call_that_was_deleted_before_it_is_tried_again_makes_no_second_version(
    store: CaptureStore, store_url: str, make: Make
) -> None:
    await close(store, Settled.FROZEN)
    late = make()
    for _ in range(2):
        assert await settle(store, late) is Settled.STORED
        await run_sql(store_url, "DELETE FROM staged_attachments")
        await run_sql(store_url, "DELETE FROM staged_calls")
    assert await events(store_url) == [(0, "open"), (1, "freeze"), (2, "late_stage")]


@pytest.mark.parametrize("make", UNFENCED.values(), ids=UNFENCED)
async def test_a_staged_call_is_stored_behind_a_retirement_too(store: CaptureStore, make: Make) -> None:
    await close(store, Settled.RETIRED)
    assert await settle(store, make()) is Settled.STORED


@pytest.mark.parametrize("mode", ["process", "off", "rollout"])
async def test_a_conflict_costs_two_transactions_at_most(store_url: str, mode: str) -> None:
    async with open_store(store_url, run="run-1", coalesce=mode) as store:
        await store.sink.put(make_entry())
        before = store.stats()["transactions"]
        with pytest.raises(PayloadConflictError, match="differing: model"):
            await store.sink.put(make_entry(model="other"))
        alone = mode == "rollout" and not store_url.startswith("sqlite")
        assert store.stats()["transactions"] - before == (1 if alone else 2)


@pytest.mark.serializable
async def test_writers_that_all_conflict_at_once_do_not_deadlock_and_each_leaves_its_evidence(
    store_url: str,
) -> None:
    async with AsyncExitStack() as opened:
        # Another pool each, as other processes have.
        stores = [
            await opened.enter_async_context(open_store(store_url, run="run-1", pool_size=size))
            for size in range(3, 9)
        ]
        await asyncio.gather(*(store.source.freeze("warm-up") for store in stores))
        calls = [put(model=f"model-{number}") for number in range(len(stores))]
        answers = await asyncio.gather(*map(settle, stores, calls))
        assert sorted(answers, key=str) == [Differing(["model"])] * 5 + [Settled.STORED]
        assert stores[0].stats().get("retries_deadlock", 0) == 0
        assert len(await rows_of(store_url, tables.failures)) == 5
