"""Coalescing: calls that wait at the same time share one transaction, and are answered after its commit.

A call that finds a free lane starts at once. While every lane is busy, calls gather; the next free lane takes what has
gathered. So a lone call is never delayed, and under load a commit is paid for by many.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Generic, TypeVar

from tokencustody.errors import StoreUnavailableError

Item = TypeVar("Item")
Answer = TypeVar("Answer")

MOST_CALLS = 128
_MOST_BYTES = 8 * 2**20
_ANSWERS_AT_ONCE = 8
# In seconds: the batch that ran out of time knows why, so its answer is waited for.
_GRACE = 0.1
# What may wait, in all batches together, before further callers wait outside.
_MOST_WAITING_BYTES = 64 * 2**20


class Coalesce(StrEnum):
    """Which concurrent calls of one process may share a transaction: all, or none. On a PostgreSQL that is distributed
    by rollout each call has one of plain statements on its rollout; a SQLite file is not distributed.
    """

    PROCESS = "process"
    ROLLOUT = "rollout"
    OFF = "off"


@dataclass(eq=False, slots=True)
class _Call(Generic[Item, Answer]):
    item: Item
    size: int
    give_up: float
    answer: asyncio.Future[Answer]
    batch: _Batch[Item, Answer] | None = None


@dataclass(eq=False, slots=True)
class _Batch(Generic[Item, Answer]):
    calls: list[_Call[Item, Answer]]
    task: asyncio.Task[None] | None = None
    abandoned: int = 0


@dataclass(eq=False)
class Gatherer(Generic[Item, Answer]):
    """Gathers the calls of one kind in one event loop.

    `run` answers a batch in the order of its items before the loop's clock reads the given time. What it raises is
    every call's answer, except that the calls of a batch which failed for another reason than a database out of reach
    are run again one by one, so that a bad one fails alone. At most `lanes` batches run at a time, of at most
    `most_calls` each.
    """

    run: Callable[[Sequence[Item], float], Awaitable[Sequence[Answer]]]
    lanes: int
    most_calls: int = MOST_CALLS
    _queue: deque[_Call[Item, Answer]] = field(default_factory=deque)
    _running: set[_Batch[Item, Answer]] = field(default_factory=set)
    _bytes: int = 0
    _outside: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)

    async def submit(self, item: Item, *, size: int, give_up: float) -> Answer:
        """Return the answer for `item`, of `size` bytes.

        Raises TimeoutError soon after the loop's clock reads `give_up`. A call that is cancelled or out of time
        is over when this raises, unless others wait for the same transaction.
        """
        loop = asyncio.get_running_loop()
        if self._outside or not self._fits(size):
            async with asyncio.timeout_at(give_up):
                await self._let_in(size)
        else:
            self._bytes += size
        call: _Call[Item, Answer] = _Call(item, size, give_up, loop.create_future())
        if not self._queue and len(self._running) < self.lanes:
            return await self._alone(call)
        # Cheaper than asyncio.timeout, which every call would pay for.
        alarm = loop.call_at(give_up + _GRACE, _out_of_time, call.answer)
        self._queue.append(call)
        self._start()
        try:
            return await call.answer
        except (asyncio.CancelledError, TimeoutError):
            await self._abandon(call)
            raise
        finally:
            alarm.cancel()

    @property
    def waiting(self) -> int:
        """How many calls wait for a transaction."""
        return len(self._queue) + len(self._outside)

    @property
    def waiting_bytes(self) -> int:
        """How many bytes have the calls that wait, and those that are being written. Some may wait outside for room."""
        return self._bytes

    async def _alone(self, call: _Call[Item, Answer]) -> Answer:
        # In the caller's own task: another one would cost two turns of the loop.
        batch = _Batch([call])
        self._running.add(batch)
        try:
            (answer,) = await self._answers(batch.calls)
        finally:
            self._end(batch)
        if isinstance(answer, Exception):
            raise answer
        return answer

    # Room for bytes is given in the order in which callers came, and taken before they are woken.

    async def _let_in(self, size: int) -> None:
        let_in = asyncio.get_running_loop().create_future()
        place = (size, let_in)
        self._outside.append(place)
        try:
            await let_in
        except asyncio.CancelledError:
            if let_in.cancelled():
                with contextlib.suppress(ValueError):
                    self._outside.remove(place)
                # It may have stood before others for whom there is room.
                self._release(0)
            else:
                self._release(size)
            raise

    def _fits(self, size: int) -> bool:
        # However large, a call finds room where nothing else waits.
        return not self._bytes or self._bytes + size <= _MOST_WAITING_BYTES

    def _release(self, size: int) -> None:
        self._bytes -= size
        while self._outside and self._fits(self._outside[0][0]):
            needed, let_in = self._outside.popleft()
            if not let_in.cancelled():
                self._bytes += needed
                let_in.set_result(None)

    def _start(self) -> None:
        while self._queue and len(self._running) < self.lanes:
            batch = self._take()
            self._running.add(batch)
            batch.task = asyncio.get_running_loop().create_task(self._run(batch))
            batch.task.add_done_callback(partial(self._give_up, batch))

    def _take(self) -> _Batch[Item, Answer]:
        calls = [self._queue.popleft()]
        size = calls[0].size
        while self._queue and len(calls) < self.most_calls and size + self._queue[0].size <= _MOST_BYTES:
            calls.append(self._queue.popleft())
            size += calls[-1].size
        batch = _Batch(calls)
        for call in calls:
            call.batch = batch
        return batch

    async def _run(self, batch: _Batch[Item, Answer]) -> None:
        answers = await self._answers(batch.calls)
        # Before the callers go on: what they do next should not keep the lane waiting.
        self._end(batch)
        for number, (call, answer) in enumerate(zip(batch.calls, answers, strict=True), 1):
            if number % _ANSWERS_AT_ONCE == 0:
                # Else all callers would prepare their next call while the lane has nothing to do.
                await asyncio.sleep(0)
            if call.answer.done():
                continue
            if isinstance(answer, Exception):
                call.answer.set_exception(answer)
            else:
                call.answer.set_result(answer)

    async def _answers(self, calls: Sequence[_Call[Item, Answer]]) -> Sequence[Answer | Exception]:
        try:
            return await self.run([call.item for call in calls], max(call.give_up for call in calls))
        except Exception as exc:
            # What is denied to one call may be allowed to another, of another run; what is too large for the server, or
            # caught by somebody's trigger, is one call.
            if isinstance(exc, StoreUnavailableError) and not exc.is_refusal:
                return [_copy(exc) for _ in calls]
            if len(calls) == 1:
                return [exc]
            return [(await self._answers([call]))[0] for call in calls]

    def _give_up(self, batch: _Batch[Item, Answer], task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._end(batch)
            for call in batch.calls:
                # Nobody is left, unless somebody else cancelled the task: they must not wait for ever.
                call.answer.cancel()

    def _end(self, batch: _Batch[Item, Answer]) -> None:
        if batch in self._running:
            self._running.remove(batch)
            self._start()
            self._release(sum(call.size for call in batch.calls))

    async def _abandon(self, call: _Call[Item, Answer]) -> None:
        batch = call.batch
        if batch is None:
            self._queue.remove(call)
            self._release(call.size)
            return
        batch.abandoned += 1
        if batch.abandoned == len(batch.calls) and batch in self._running and batch.task is not None:
            batch.task.cancel()
            while not batch.task.done():
                try:
                    await asyncio.wait([batch.task])
                except asyncio.CancelledError:
                    continue


def _copy(exc: StoreUnavailableError) -> StoreUnavailableError:
    # Each caller gets its own: a traceback grows wherever an error is raised again.
    copy = StoreUnavailableError(*exc.args)
    copy.__cause__ = exc.__cause__
    return copy


def _out_of_time(answer: asyncio.Future[Any]) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError())
