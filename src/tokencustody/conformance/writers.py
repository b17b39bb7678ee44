"""Writers in other processes, or where that cannot be in threads, that race one freeze.

A writer obeys orders that come through its pipe: it gets ready, waits for the start, then reports each
operation of each of its streams as soon as it knows the outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from tokencustody.conformance.case import Factory
from tokencustody.conformance.expect import PromiseBrokenError, describe
from tokencustody.conformance.fixtures import record
from tokencustody.errors import TokenCaptureFrozenError

Operation = Literal["put", "begin_call", "refuse_call"]
Outcome = Literal["returned", "frozen", "error"]

STREAMS = 4
CALLS = 400
PATIENCE = 60.0


@dataclass(frozen=True)
class Order:
    """One round: each stream runs `operations` on call after call, until it meets the fence or after `calls`
    calls.
    """

    rollout_id: str
    warm_up_id: str
    operations: tuple[Operation, ...]
    calls: int = CALLS


@dataclass
class Round:
    """What all writers of one round reported, by operation: the call ids of each outcome, and texts of
    errors.
    """

    returned: dict[str, set[str]] = field(default_factory=dict)
    frozen: dict[str, set[str]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    freeze_seconds: float = 0.0

    def add(self, operation: str, call_id: str, outcome: Outcome, detail: str) -> None:
        """Take in one report."""
        if outcome == "error":
            self.errors.append(f"{operation} of {call_id}: {detail}")
        else:
            (self.returned if outcome == "returned" else self.frozen).setdefault(operation, set()).add(
                call_id
            )

    def count(self, outcomes: dict[str, set[str]]) -> int:
        """Return how many operations had one of `outcomes`."""
        return sum(map(len, outcomes.values()))


def write_streams(pickled_factory: bytes | Factory, connection: Connection, name: str) -> None:
    """Run one writer until its pipe ends. The entry point of its process or thread."""
    with connection:
        try:
            factory = pickle.loads(pickled_factory) if isinstance(pickled_factory, bytes) else pickled_factory  # noqa: S301
            asyncio.run(_obey(factory(), connection, name))
        except (EOFError, BrokenPipeError):
            return  # The other end gave up, and knows why.
        except Exception as exc:
            with contextlib.suppress(OSError):
                _send(connection, ("failed", describe(exc)))


def _send(connection: Connection, message: object) -> None:
    # Not `connection.send`: to a pipe whose other end is gone, Python 3.13 has it complain of a buffer besides.
    connection.send_bytes(pickle.dumps(message))


async def _obey(sink: Any, connection: Connection, name: str) -> None:
    try:
        while True:
            order: Order | None = await asyncio.to_thread(connection.recv)
            if order is None:
                return
            # A client's first write opens its connections: a writer that starts late would miss the race.
            warm_up = (
                sink.put(record(order.warm_up_id, f"{name}-{order.rollout_id}-{n}")) for n in range(STREAMS)
            )
            await asyncio.gather(*warm_up)
            _send(connection, ("ready",))
            await asyncio.to_thread(connection.recv)
            streams = (_stream(sink, connection, order, f"{name}-{n}") for n in range(STREAMS))
            await asyncio.gather(*streams)
            _send(connection, ("done",))
    finally:
        await sink.close()


async def _stream(sink: Any, connection: Connection, order: Order, name: str) -> None:
    for number in range(order.calls):
        call_id = f"{name}-{number}"
        for operation in order.operations:
            outcome, detail = await _attempt(sink, order.rollout_id, call_id, operation)
            _send(connection, ("outcome", operation, call_id, outcome, detail))
            if outcome != "returned":
                return


async def _attempt(sink: Any, rollout_id: str, call_id: str, operation: Operation) -> tuple[Outcome, str]:
    try:
        match operation:
            case "put":
                await sink.put(record(rollout_id, call_id))
            case "begin_call":
                await sink.begin_call(rollout_id, call_id)
            case "refuse_call":
                await sink.refuse_call(rollout_id, model_call_id=call_id, code="overloaded")
    except TokenCaptureFrozenError:
        return "frozen", ""
    except Exception as exc:
        return "error", describe(exc)
    return "returned", ""


class Writers:
    """The parent's side: writers that run round after round. Its methods block: call them in a thread."""

    def __init__(self, sink_factory: Factory, count: int, *, processes: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._workers: list[Any] = []
        factory = pickle.dumps(sink_factory) if processes else sink_factory
        for number in range(count):
            ours, theirs = context.Pipe()
            args = (factory, theirs, f"writer-{number}")
            if processes:
                worker: Any = context.Process(target=write_streams, args=args, daemon=True)
            else:
                worker = threading.Thread(target=write_streams, args=args, daemon=True)
            self._connections.append(ours)
            self._workers.append(worker)
            with _interrupts_blocked() if processes else contextlib.nullcontext():
                worker.start()
            if processes:
                theirs.close()

    def prepare(self, order: Order) -> None:
        """Give the order and return when every writer is ready."""
        self._send(order)
        pending = set(self._connections)
        while pending:
            pending -= {connection for connection, message in self._receive(pending) if message[0] == "ready"}

    def start(self) -> None:
        """Let the writers go."""
        self._send("go")
        self._running = set(self._connections)

    def collect(self, round_: Round, returned: int | None = None) -> None:
        """Add reports to `round_` until that many operations returned, or all writers are done if None."""
        while self._running and (returned is None or round_.count(round_.returned) < returned):
            for connection, message in self._receive(self._running):
                if message[0] == "done":
                    self._running.discard(connection)
                else:
                    round_.add(*message[1:])

    def stop(self) -> None:
        """End the writers, and those that do not end by themselves if they are processes."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                _send(connection, None)
            connection.close()
        for worker in self._workers:
            worker.join(10.0)
            if worker.is_alive() and not isinstance(worker, threading.Thread):
                worker.kill()
                worker.join()

    def _send(self, message: object) -> None:
        for connection in self._connections:
            try:
                _send(connection, message)
            except OSError as exc:
                self._receive({connection})
                raise PromiseBrokenError("a writer ended before the race") from exc

    def _receive(self, connections: set[Connection]) -> list[tuple[Connection, Any]]:
        deadline = time.monotonic() + PATIENCE
        received: list[tuple[Connection, Any]] = []
        ready = wait(list(connections), timeout=deadline - time.monotonic())
        if not ready:
            raise PromiseBrokenError(f"{len(connections)} writers were silent for {PATIENCE:g} s")
        for connection in ready:
            assert isinstance(connection, Connection)  # noqa: S101 - only connections were waited for
            try:
                message = connection.recv()
            except (EOFError, ConnectionResetError):
                raise PromiseBrokenError(
                    "a writer ended without a word; a script must start the kit in `if __name__ == '__main__':`"
                ) from None
            if message[0] == "failed":
                raise PromiseBrokenError(f"a writer failed: {message[1]}")
            received.append((connection, message))
        return received


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Start processes that never see a SIGINT: Ctrl-C is for this process, which then stops them in order."""
    resource_tracker.ensure_running()  # starting it with the first process would unblock the signal
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
