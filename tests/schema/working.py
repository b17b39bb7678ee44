"""A worker of whichever release is on its path: `python -m tests.schema.working URL NAME`.

Four tasks write rollouts, two through a store that stays open, two through a new one for each. For each line on
standard input it says "went on" when every task has written two rollouts that it began since. At the end of the input
it stops, and prints the ids of all rollouts that were acknowledged.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from contextlib import suppress

from tests.support.ledger import make_commit
from tests.support.rollouts import linear_rollout
from tokencustody import open_store
from tokencustody.errors import AccessDeniedError
from tokencustody.store import CaptureStore

TASKS = 4
CALLS = 3
# Seconds between two rollouts of a task: each step of an upgrade takes longer, and needs the machine too.
PAUSE = 0.5


async def write(store: CaptureStore, rollout: str) -> None:
    """Write a rollout of three calls, each of which continues the one before, and freeze it if that is allowed."""
    for turn in linear_rollout(CALLS, rollout_id=rollout):
        await store.sink.begin_call(rollout, turn.entry.model_call_id)
        await store.sink.put(turn.entry)
    await store.lineage.record(make_commit(rollout, "of-the-ledger"))
    with suppress(AccessDeniedError):
        assert len((await store.source.freeze(rollout)).entries) == CALLS


async def main(url: str, name: str) -> None:
    """Write until standard input ends."""
    written: list[list[str]] = [[] for _ in range(TASKS)]
    ended = asyncio.Event()
    wrote = asyncio.Condition()

    async def work(task: int, kept: CaptureStore) -> None:
        for number in itertools.count():
            if ended.is_set():
                return
            rollout = f"{name}-{task}-{number}"
            if task % 2:
                await write(kept, rollout)
            else:
                async with open_store(url, writer=name) as store:
                    await write(store, rollout)
            async with wrote:
                written[task].append(rollout)
                wrote.notify_all()
            await asyncio.sleep(PAUSE)

    async def answer() -> None:
        while await asyncio.to_thread(sys.stdin.readline):
            async with wrote:
                # The first may have begun before.
                enough = [len(each) + 3 for each in written]
                await wrote.wait_for(
                    lambda due=enough: all(len(each) >= many for each, many in zip(written, due, strict=True))
                )
            print("went on", flush=True)
        ended.set()

    async with open_store(url, writer=name) as kept, asyncio.TaskGroup() as group:
        group.create_task(answer())
        for task in range(TASKS):
            group.create_task(work(task, kept))
    print(json.dumps([rollout for each in written for rollout in each]))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
