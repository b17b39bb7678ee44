"""A relay between clients and a PostgreSQL server that does to their connections what networks do."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Self, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

Result = TypeVar("Result")

_CHUNK = 1 << 16


class Request(Enum):
    """What a cut waits for: how a client asks for it, and the tags with which a server answers."""

    COMMIT = (rb"Q....COMMIT", rb"COMMIT")
    # The extended protocol's Execute and Sync.
    STATEMENT = (rb"E\0\0\0\x09\0....S\0\0\0\x04$", rb"(?!BEGIN|COMMIT|ROLLBACK|SET)")

    def is_in(self, seen: bytes, *, asked: bool) -> bool:
        """Return whether a client's data asks for it, or a server's tag answers it."""
        asking, answering = self.value
        return bool(re.search(asking, seen, re.DOTALL) if asked else re.match(answering, seen))


class Cut(Enum):
    """Where a connection is cut."""

    REQUEST = "before the request reaches the server"
    ANSWER = "before the answer reaches the client"
    AFTERWARDS = "after the answer has reached the client"


@dataclass(eq=False)
class _Strike:
    cut: Cut
    request: Request
    is_black_hole: bool = False


@dataclass(eq=False)
class _Connection:
    client: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    server: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    is_forgotten: bool = False

    def reset(self) -> None:
        for _, writer in (self.client, self.server):
            connected: socket.socket = writer.get_extra_info("socket")
            # The socket of a connection that was closed meanwhile has no number any more.
            with contextlib.suppress(OSError):
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class ChaosRelay:
    """Relays TCP from a port of its own, in a thread of its own, to a PostgreSQL server. A context manager.

    `counts` has the number of connections, resets (of connections), forgotten, cuts and black_holes. The methods may be
    called from any thread, also from one whose event loop is running.
    """

    def __init__(self, target_host: str, target_port: int) -> None:
        self._target = (target_host, target_port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._connections: set[_Connection] = set()
        self._armed: list[_Strike] = []
        self._passable = asyncio.Event()
        self._passable.set()
        self._healing: asyncio.TimerHandle | None = None
        self._ending = False
        self.counts: Counter[str] = Counter()
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._run(lambda: asyncio.start_server(self._relay, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *exc_info: object) -> None:
        async def end() -> None:
            self._ending = True
            self._server.close()
            self._passable.set()
            # Not cancelled, for the streams of Python 3.11 would log that as an error.
            while running := asyncio.all_tasks() - {asyncio.current_task()}:
                for connection in self._connections:
                    connection.reset()
                await asyncio.wait(running)

        self._run(end)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def url(self, url: str) -> str:
        """Return the URL of the same database by way of this relay, without TLS, which would hide what is cut."""
        parts = urlsplit(url)
        netloc = f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{self.port}"
        query = urlencode(dict(parse_qsl(parts.query)) | {"sslmode": "disable"})
        return urlunsplit(parts._replace(netloc=netloc.removeprefix("@"), query=query))

    def reset_all(self) -> int:
        """Reset every connection; return how many there were."""

        async def reset() -> int:
            for connection in self._connections:
                connection.reset()
            self.counts["resets"] += len(self._connections)
            return len(self._connections)

        return self._run(reset)

    def forget_all(self) -> int:
        """Pass nothing on any more for the connections there are; return how many there were.

        Neither side is told, as by a firewall that has forgotten them. New ones pass.
        """

        def forget() -> int:
            for connection in self._connections:
                connection.is_forgotten = True
            self.counts["forgotten"] += len(self._connections)
            return len(self._connections)

        return self._run(lambda: _now(forget))

    def cut_next(self, cut: Cut, request: Request) -> None:
        """Reset, once, the connection on which such a request is the next to come to this point."""
        self._run(lambda: _now(lambda: self._armed.append(_Strike(cut, request))))

    def black_hole_next(self, cut: Cut, request: Request) -> None:
        """Let nothing through any more, until `heal`, once such a request is the next to come to this point."""
        self._run(lambda: _now(lambda: self._armed.append(_Strike(cut, request, is_black_hole=True))))

    def black_hole(self, seconds: float | None = None) -> None:
        """Let nothing through, in either direction, for that long or until `heal`.

        What was sent meanwhile arrives afterwards, a client's farewell too: neither side learns anything before.
        """

        def swallow() -> None:
            self.counts["black_holes"] += 1
            self._swallow()
            self._healing = None if seconds is None else self._loop.call_later(seconds, self._passable.set)

        self._run(lambda: _now(swallow))

    def heal(self) -> None:
        """Let everything through again."""
        self._run(lambda: _now(self._passable.set))

    def _run(self, work: Callable[[], Awaitable[Result]]) -> Result:
        async def call() -> Result:
            return await work()

        running: Future[Result] = asyncio.run_coroutine_threadsafe(call(), self._loop)
        return running.result()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.counts["connections"] += 1
        await self._passable.wait()
        try:
            if self._ending:
                raise ConnectionResetError
            server = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection((reader, writer), server)
        self._connections.add(connection)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._ask(connection))
                group.create_task(self._answer(connection))
        except* (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections.discard(connection)
            for _, each in (connection.client, connection.server):
                each.close()
                with contextlib.suppress(OSError):
                    await each.wait_closed()

    async def _ask(self, connection: _Connection) -> None:
        (reader, _), (_, writer) = connection.client, connection.server
        while data := await reader.read(_CHUNK):
            if connection.is_forgotten:
                continue
            self._strike(connection, self._taken(Cut.REQUEST, data))
            await self._passable.wait()
            writer.write(data)
            await writer.drain()
        await self._passable.wait()
        # The server hears of it, and ends its own side.
        writer.write_eof()

    async def _answer(self, connection: _Connection) -> None:
        (reader, _), (_, writer) = connection.server, connection.client
        tag = b""
        while True:
            # A type, a length that counts itself, and the rest.
            header = await reader.readexactly(5)
            body = await reader.readexactly(int.from_bytes(header[1:], "big") - 4)
            if connection.is_forgotten:
                continue
            afterwards = None
            if header[:1] == b"C":
                tag = body
                self._strike(connection, self._taken(Cut.ANSWER, tag))
            elif header[:1] == b"Z" and tag:
                # Counted before the client can know.
                afterwards = self._taken(Cut.AFTERWARDS, tag)
                tag = b""
            await self._passable.wait()
            writer.write(header + body)
            await writer.drain()
            self._strike(connection, afterwards)

    def _taken(self, cut: Cut, seen: bytes) -> _Strike | None:
        """Return, and count, the strike that waits for what passes: a client's data, or the tag of an answer."""
        for strike in self._armed:
            if strike.cut is cut and strike.request.is_in(seen, asked=cut is Cut.REQUEST):
                self._armed.remove(strike)
                self.counts["black_holes" if strike.is_black_hole else "cuts"] += 1
                return strike
        return None

    def _strike(self, connection: _Connection, strike: _Strike | None) -> None:
        if strike is None:
            return
        if strike.is_black_hole:
            self._swallow()
        else:
            connection.reset()

    def _swallow(self) -> None:
        self._passable.clear()
        if self._healing is not None:
            self._healing.cancel()


async def _now(work: Callable[[], Result]) -> Result:
    return work()
