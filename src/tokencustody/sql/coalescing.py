"""Coalescing: calls that wait at the same time share one transaction, and are answered after its commit.

A call that finds a free lane starts at once. While every lane is busy, calls gather; the next free lane takes what has
gathered. So a lone call is never delayed, and under load a commit is paid for by many.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Generic, TypeVar

from tokencustody.errors import StoreUnavailableError

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_MOST_CALLS = 128
_MOST_BYTES = 8 * 2**20
# What may wait, in all batches together, before further callers wait outside.
_MOST_WAITING_BYTES = 64 * 2**20


class Coalesce(StrEnum):
    """Which concurrent calls of one process may share a transaction."""

    PROCESS = "process"
    ROLLOUT = "rollout"
    OFF = "off"


@dataclass(eq=False, slots=True)
class _Call(Generic[Item, Answer]):
    item: Item
    size: int
    group: Hashable
    answer: asyncio.Future[Answer]
    batch: _Batch[Item, Answer] | None = None


@dataclass(eq=False, slots=True)
class _Batch(Generic[Item, Answer]):
    calls: list[_Call[Item, Answer]]
    task: asyncio.Task[Sequence[Answer | Exception]] | None = None
    abandoned: int = 0


@dataclass(eq=False)
class Gatherer(Generic[Item, Answer]):
    """Gathers the calls of one kind in one event loop.

    `run` answers a batch in the order of its items; what it raises is every call's answer, except that calls of a batch
    which failed for another reason than an unavailable database are run again one by one, so that a bad one fails
    alone. At most `lanes` batches run at a time.
    """

    run: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]]
    lanes: int
    coalesce: Coalesce
    _groups: dict[Hashable, deque[_Call[Item, Answer]]] = field(default_factory=dict)
    _running: set[_Batch[Item, Answer]] = field(default_factory=set)
    _bytes: int = 0
    _outside: deque[asyncio.Future[None]] = field(default_factory=deque)

    async def submit(self, item: Item, *, rollout: Hashable, size: int) -> Answer:
        """Return the answer for `item`, of `size` bytes. A cancelled call is over when this raises, unless others wait
        for the same transaction."""
        while self._bytes and self._bytes + size > _MOST_WAITING_BYTES:
            await self._room()
        group = {Coalesce.PROCESS: None, Coalesce.ROLLOUT: rollout, Coalesce.OFF: object()}[self.coalesce]
        call: _Call[Item, Answer] = _Call(item, size, group, asyncio.get_running_loop().create_future())
        self._groups.setdefault(group, deque()).append(call)
        self._bytes += size
        self._start()
        try:
            return await call.answer
        except asyncio.CancelledError:
            await self._abandon(call)
            raise

    async def _room(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._outside.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            # It may have been woken for room that it no longer wants.
            self._wake()
            raise

    def _wake(self) -> None:
        while self._outside:
            waiter = self._outside.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _start(self) -> None:
        while self._groups and len(self._running) < self.lanes:
            batch = self._take()
            self._running.add(batch)
            batch.task = asyncio.get_running_loop().create_task(self._answers(batch.calls))
            batch.task.add_done_callback(partial(self._end, batch))

    def _take(self) -> _Batch[Item, Answer]:
        group, waiting = next(iter(self._groups.items()))
        calls = [waiting.popleft()]
        size = calls[0].size
        while waiting and len(calls) < _MOST_CALLS and size + waiting[0].size <= _MOST_BYTES:
            calls.append(waiting.popleft())
            size += calls[-1].size
        # The rest of a rollout that has more waits behind the others.
        del self._groups[group]
        if waiting:
            self._groups[group] = waiting
        batch = _Batch(calls)
        for call in calls:
            call.batch = batch
        return batch

    async def _answers(self, calls: Sequence[_Call[Item, Answer]]) -> Sequence[Answer | Exception]:
        try:
            return await self.run([call.item for call in calls])
        except StoreUnavailableError as exc:
            return [exc for _ in calls]
        except Exception as exc:
            if len(calls) == 1:
                return [exc]
            return [(await self._answers([call]))[0] for call in calls]

    def _end(self, batch: _Batch[Item, Answer], task: asyncio.Task[Sequence[Answer | Exception]]) -> None:
        self._running.discard(batch)
        self._bytes -= sum(call.size for call in batch.calls)
        # Before the callers go on: what they do next should not keep the lane waiting.
        self._start()
        if task.cancelled():
            return
        for call, answer in zip(batch.calls, task.result(), strict=True):
            if call.answer.done():
                continue
            if isinstance(answer, Exception):
                call.answer.set_exception(answer)
            else:
                call.answer.set_result(answer)
        for _ in batch.calls:
            self._wake()

    async def _abandon(self, call: _Call[Item, Answer]) -> None:
        batch = call.batch
        if batch is None:
            waiting = self._groups[call.group]
            waiting.remove(call)
            if not waiting:
                del self._groups[call.group]
            self._bytes -= call.size
            self._wake()
            return
        batch.abandoned += 1
        if batch.abandoned == len(batch.calls) and batch.task is not None:
            batch.task.cancel()
            while not batch.task.done():
                try:
                    await asyncio.wait([batch.task])
                except asyncio.CancelledError:
                    continue
