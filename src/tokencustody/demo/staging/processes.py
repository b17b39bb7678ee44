"""The processes of the demo, and how they talk.

A role reads its orders as one line of JSON from standard input, reports events as lines of JSON on standard output,
and ends when its standard input does, so it never outlives the process that started it. Orders hold secrets, which a
command line would show to everyone on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import IO, Any, Self

from tokencustody.demo.children import child

# The trainer's orders hold the last answer of every rollout.
_LINE_BYTES = 64 * 1024 * 1024
_STOP_SECONDS = 15.0

Report = Callable[[dict[str, Any]], None]
Role = Callable[[dict[str, Any], Report], Awaitable[None]]


class RoleFailedError(RuntimeError):
    """One of the demo's processes failed. The message names its role and says why."""


def run_role(role: Role) -> None:
    """Run `role` as this process until it returns or standard input ends; exit with 1 when it fails."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(_run_until_stdin_ends(role))
    except Exception as failure:
        logging.getLogger(__name__).exception("this process failed")
        exc = failure
        while isinstance(exc, ExceptionGroup):  # of tasks, of which the first stopped the others
            exc = exc.exceptions[0]
        _report({"failed": " ".join(str(exc).split()) or type(exc).__name__})
        sys.exit(1)


async def _run_until_stdin_ends(role: Role) -> None:
    orders = asyncio.StreamReader(_LINE_BYTES)
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), sys.stdin
    )
    with contextlib.closing(pipe):
        line = await orders.readline()
        if not line:
            return
        working = asyncio.ensure_future(role(json.loads(line), _report))
        stopped = asyncio.create_task(orders.read())
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
        stopped.cancel()
        if not working.cancelled():
            working.result()


def _report(event: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # who listened is gone, and standard input tells so
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()


class Crew:
    """The running processes. Leaving the context stops them, the last that was started first."""

    def __init__(self) -> None:
        self._exits = contextlib.AsyncExitStack()
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def start(self, role: str, orders: dict[str, Any], sockets: Sequence[socket.socket] = ()) -> None:
        """Start `tokencustody.demo.staging.<role>`, which inherits the sockets under their file numbers."""
        async with contextlib.AsyncExitStack() as exits:
            log = exits.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
            process = await exits.enter_async_context(
                child(
                    f"tokencustody.demo.staging.{role}",
                    log=log,
                    stop_seconds=_STOP_SECONDS,
                    line_bytes=_LINE_BYTES,
                    pass_fds=[each.fileno() for each in sockets],
                )
            )
            assert process.stdin is not None  # noqa: S101 - a pipe was asked for
            process.stdin.write(json.dumps(orders).encode() + b"\n")
            with contextlib.suppress(ConnectionError):  # it ended at once; its log says why
                await process.stdin.drain()
            listening = asyncio.create_task(self._listen(role, process, log))
            exits.callback(listening.cancel)
            self._exits.push_async_exit(exits.pop_all())

    async def hear(self) -> dict[str, Any]:
        """Return the next event of any process. Raises RoleFailedError when one failed instead."""
        event = await self._events.get()
        if "failed" in event:
            raise RoleFailedError(event["failed"])
        return event

    async def _listen(self, role: str, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        assert process.stdout is not None  # noqa: S101 - a pipe was asked for
        failed = ""
        async for line in process.stdout:
            event = json.loads(line)
            if "failed" in event:
                failed = event["failed"]
                break
            self._events.put_nowait(event)
        else:
            code = await process.wait()
            if code < 0:
                failed = f"it was killed by signal {-code}"
            elif code > 0:
                log.seek(0)
                last = log.read().decode(errors="replace").strip().rpartition("\n")[2]
                why = f"the last line of its log is: {last}" if last else "its log is empty"
                failed = f"it ended with {code}; {why}"
        if failed:
            self._events.put_nowait({"failed": f"the {role} process: {failed}"})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exits.aclose()


class Line:
    """One end of a socket between serving process and worker: lines of JSON, one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, sock: socket.socket) -> Self:
        """Return the line over a connected socket, which it closes."""
        return cls(*await asyncio.open_connection(sock=sock, limit=_LINE_BYTES))

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return its answer. Raises ConnectionError when the worker is gone."""
        try:
            self._writer.write(json.dumps(request).encode() + b"\n")
            await self._writer.drain()
            answer = await self._reader.readline()
        except ConnectionError:
            answer = b""
        if not answer:
            raise ConnectionError("the worker closed its line before it answered")
        document: dict[str, Any] = json.loads(answer)
        return document

    async def answer_all(self, answer: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]) -> None:
        """Answer every request until the other end closes the line."""
        while request := await self._reader.readline():
            self._writer.write(json.dumps(await answer(json.loads(request))).encode() + b"\n")
            await self._writer.drain()

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._writer.close()
