"""A relay between a client and a PostgreSQL server that counts what the client waits for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit, urlunsplit

# Sync, Flush and Query: after each the client waits for the server's answer.
_ASKING = (b"S", b"H", b"Q")


class Relay:
    """Passes bytes on and counts, in `round_trips`, the messages after which a client waits."""

    def __init__(self, url: str, port: int) -> None:
        self.url = url
        self.round_trips = 0
        self._server_port = port
        self._server_host = ""
        self._running: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def to(cls, url: str) -> AsyncIterator[Relay]:
        """Relay to the server of a URL with a host and a port."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        relay = cls("", parts.port or 5432)
        relay._server_host = parts.hostname
        server = await asyncio.start_server(relay._serve, "127.0.0.1", 0)
        user = parts.netloc.rpartition("@")[0]
        port = server.sockets[0].getsockname()[1]
        query = f"{parts.query}&sslmode=disable".lstrip("&")
        relay.url = urlunsplit(parts._replace(netloc=f"{user}@127.0.0.1:{port}", query=query))
        try:
            yield relay
        finally:
            server.close()
            await asyncio.gather(*relay._running)

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        server, to_server = await asyncio.open_connection(self._server_host, self._server_port)
        try:
            await asyncio.gather(self._ask(client, to_server), self._answer(server, to_client))
        finally:
            self._running.discard(task)

    async def _ask(self, client: asyncio.StreamReader, to_server: asyncio.StreamWriter) -> None:
        kind = b""  # the first message has none
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                length = await client.readexactly(4)
                body = await client.readexactly(int.from_bytes(length, "big") - 4)
                if kind in _ASKING:
                    self.round_trips += 1
                to_server.write(kind + length + body)
                await to_server.drain()
                kind = await client.readexactly(1)
        await _close(to_server)

    async def _answer(self, server: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await server.read(2**16):
                to_client.write(data)
                await to_client.drain()
        await _close(to_client)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
