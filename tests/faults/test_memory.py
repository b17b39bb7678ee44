"""Freezing a rollout of 10,000 calls takes the memory of the snapshot and little more; resolving in it takes little.

Measured in a process of its own. Each packed row is let go as soon as it is read, so that Python holds no more than the
snapshot at any time. The C library does not give back the room of the rows before the end, so the process holds them
too: a tenth or two of the snapshot.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

from sqlalchemy import insert

from tests.support.entries import REQUEST, make_entry
from tests.support.machine import needs_linux
from tokencustody import TokenEntry, open_store
from tokencustody.codec.calls import pack_entry, validated
from tokencustody.codec.id_columns import PackedIds
from tokencustody.schema.tables import entries
from tokencustody.store.base import now
from tokencustody.txn.fence import RolloutKey, Stamp
from tokencustody.txn.putting import new_call
from tokencustody.txn.sequences import KnownSequence

CALLS = 10_000
# Beside the snapshot: what Python may hold, and what the process may hold with the packed rows.
MOST_HELD = 8 * 2**20
MOST_RESIDENT = 24 * 2**20
TEXT = "." * 2000

MEASURE = """
import asyncio, ctypes, gc, json, sys, tracemalloc
from pathlib import Path
from tests.support.entries import REQUEST
from tokencustody import open_store

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

async def measured(call):
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the most that was resident counts from now
    result = await call
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return result, {"peak": resident("VmHWM") - before, "kept": resident("VmRSS") - before}

async def main():
    async with open_store(sys.argv[1], deadline=600) as store:
        await store.source.freeze("warm-up")
        request = [*REQUEST, {"role": "assistant", "content": "answer 9998" + "." * 2000}]
        resolution, resolving = await measured(store.lineage.resolve("rollout-1", request))
        snapshot, freezing = await measured(store.source.freeze("rollout-1"))
        del snapshot
        tracemalloc.start(1)
        snapshot = await store.source.freeze("rollout-1")
        gc.collect()
        held, most = tracemalloc.get_traced_memory()
        print(json.dumps({
            "calls": len(snapshot.entries), "status": resolution.status, "resolve": resolving, "freeze": freezing,
            "held": held, "most": most,
        }))

asyncio.run(main())
"""


def long_call(number: int) -> TokenEntry:
    """Return a call of 60 or 90 tokens; the prompts of the odd ones begin with all of the first."""
    prompt = list(range(70_000, 70_060 if number % 2 else 70_030))
    return make_entry(
        model_call_id=f"call-{number:05}",
        prompt=prompt,
        request=REQUEST,
        generation=list(range(70_030, 70_060)),
        text=f"answer {number}{TEXT}",
        parent="call-00000" if number % 2 else None,
    )


@cache
def rows() -> tuple[list[dict[str, object]], int]:
    """Return the rows of 10,000 calls, half of them without their prefix, and how many bytes they hold packed."""
    key, stamp = RolloutKey("default", "rollout-1"), Stamp.make(now(), "test-writer")
    first = pack_entry(validated(long_call(0)))
    base = KnownSequence(first.sha256, PackedIds.of(list(range(70_000, 70_060))))
    made = []
    for number in range(CALLS):
        entry = validated(long_call(number))
        made.append(new_call(key, entry, pack_entry(entry), stamp, base if number % 2 else None).row)
    return made, sum(len(row["payload"]) for row in made)


async def test_a_freeze_of_ten_thousand_calls_holds_the_snapshot_and_not_the_packed_rows_beside_it(
    store_url: str,
) -> None:
    needs_linux("/proc, which tells what is resident")
    made, packed = rows()
    assert packed > 3 * MOST_HELD
    async with open_store(store_url, deadline=600) as store:
        await store.sink.begin_call("rollout-1", "call-00000")
        await store.sink._database.write(lambda connection: connection.execute(insert(entries), made))
    command = [sys.executable, "-c", MEASURE, store_url]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)  # noqa: ASYNC221
    measured = json.loads(ended.stdout)
    assert (measured["calls"], measured["status"]) == (CALLS, "resolved")
    assert measured["most"] - measured["held"] < MOST_HELD, measured
    freezing, resolving = measured["freeze"], measured["resolve"]
    assert freezing["peak"] - freezing["kept"] < packed + MOST_RESIDENT, measured
    assert resolving["peak"] < MOST_RESIDENT, measured
