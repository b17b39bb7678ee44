"""The race: many writers against one freeze."""

from __future__ import annotations

import asyncio
import pickle
import time
from typing import Any

from tokencustody.conformance.case import PROCESSES, Case
from tokencustody.conformance.expect import (
    PromiseBrokenError,
    call_ids,
    describe,
    expect,
    expect_same_snapshot,
    refusals,
)
from tokencustody.conformance.registry import check
from tokencustody.conformance.writers import Operation, Order, Round, Writers

WRITERS = 3
ROUNDS = 9
LATEST_MOMENT = 60


@check()
async def strict_fence(case: Case) -> str:
    """Of many writers that race one freeze, exactly those whose put returned are in the snapshot, for good.

    Intents and refusals race likewise. The writers are processes, or threads where the factories or the
    backend do not reach another process.
    """
    writers, where = await _writers(case)
    kinds: list[tuple[Operation, ...]] = [("put",)]
    if case.offers("begin_call"):
        kinds.append(("begin_call", "put"))
    if case.offers("begin_call") and case.offers("refuse_call"):
        kinds.append(("begin_call", "refuse_call"))
    returned = fenced = 0
    slowest = 0.0
    try:
        for number in range(ROUNDS):
            moment = case.random.randrange(LATEST_MOMENT)
            round_ = await _race(case, writers, kinds[number % len(kinds)], moment)
            returned += round_.count(round_.returned)
            fenced += round_.count(round_.frozen)
            slowest = max(slowest, round_.freeze_seconds)
    finally:
        await asyncio.to_thread(writers.stop)
    expect(fenced, "no writer met the fence: all had ended before the freeze, so nothing was raced")
    return (
        f"{ROUNDS} rounds against {where}: {returned} writes returned, {fenced} met the fence, "
        f"the slowest freeze took {slowest:.3f} s"
    )


async def _race(case: Case, writers: Writers, operations: tuple[Operation, ...], moment: int) -> Round:
    rollout = case.rollout()
    source, round_ = case.source(), Round()
    await source.freeze(case.rollout())
    await asyncio.to_thread(writers.prepare, Order(rollout, case.rollout(), operations))
    await asyncio.to_thread(writers.start)
    await asyncio.to_thread(writers.collect, round_, moment)
    # Reports are taken in during the freeze too: a writer blocked on a full pipe may hold what it waits for.
    rest = asyncio.create_task(asyncio.to_thread(writers.collect, round_))
    try:
        started = time.perf_counter()
        first = await source.freeze(rollout)
        round_.freeze_seconds = time.perf_counter() - started
    finally:
        await rest
    _judge(first, round_)
    for client in (source, case.source()):
        last = await client.freeze(rollout)
        expect_same_snapshot(first, last, "after the writers ended")
        _judge(last, round_)
    return round_


def _judge(snapshot: Any, round_: Round) -> None:
    expect(
        not round_.errors,
        f"{len(round_.errors)} writes neither returned nor met the fence: {round_.errors[:1]}",
    )
    for operation, found in (("put", call_ids(snapshot.entries)), ("refuse_call", set(refusals(snapshot)))):
        acknowledged = round_.returned.get(operation, set())
        lost, surplus = acknowledged - found, found - acknowledged
        expect(
            not lost,
            f"{len(lost)} of {len(acknowledged)} calls whose {operation} returned are not in the snapshot",
        )
        expect(
            not surplus, f"{len(surplus)} calls are in the snapshot although their {operation} met the fence"
        )
    settled = round_.returned.get("put", set()) | round_.returned.get("refuse_call", set())
    dangling = round_.returned.get("begin_call", set()) - settled
    expect(
        snapshot.incomplete is bool(dangling),
        f"incomplete is {snapshot.incomplete} with {len(dangling)} acknowledged intents that dangle",
    )


async def _writers(case: Case) -> tuple[Writers, str]:
    """Return ready writers: processes if what one puts is seen here, else threads, and a text that says
    which.
    """
    try:
        pickle.dumps(case.transport.sink_factory)
    except Exception as exc:
        reason = f"the sink factory cannot be pickled ({describe(exc)})"
    else:
        writers = await asyncio.to_thread(Writers, case.transport.sink_factory, WRITERS, processes=True)
        try:
            await _probe(case, writers)
        except BaseException as exc:
            await asyncio.to_thread(writers.stop)
            if not isinstance(exc, PromiseBrokenError) or _claims_processes(case):
                raise
            reason = str(exc)
        else:
            case.transport.note(
                PROCESSES, True, "a record that another process put is in the snapshot frozen here"
            )
            return writers, f"{WRITERS} processes"
    case.transport.note(PROCESSES, False, f"{reason}: the strict fence was raced by threads")
    writers = await asyncio.to_thread(Writers, case.transport.sink_factory, WRITERS, processes=False)
    return writers, f"{WRITERS} threads, not processes: {reason}"


async def _probe(case: Case, writers: Writers) -> None:
    rollout, round_ = case.rollout(), Round()
    await asyncio.to_thread(writers.prepare, Order(rollout, case.rollout(), ("put",), calls=1))
    await asyncio.to_thread(writers.start)
    await asyncio.to_thread(writers.collect, round_)
    seen = call_ids((await case.source().freeze(rollout)).entries)
    expect(not round_.errors, f"another process could not put: {round_.errors[:1]}")
    expect(
        seen == round_.returned.get("put"),
        "records that other processes put are not in the snapshot frozen here",
    )


def _claims_processes(case: Case) -> bool:
    return case.transport.lineage_factory is not None and case.lineage().is_process_shared() is True
