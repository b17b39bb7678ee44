"""A real uvicorn on a real socket, and a ledger that remembers what it was asked."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from tokencustody.control.server import bind, control_config
from tokencustody.protocols import RolloutRemovalPayload

TOKEN = "s3cret-token"  # noqa: S105
AUTH = {"Authorization": f"Bearer {TOKEN}"}
PREFIX = "/training-token-capture/control"
RETIRE = f"{PREFIX}/rollouts/retire"
DELETE = f"{PREFIX}/rollouts/delete"


def manifest_path(rollout_id: str) -> str:
    return f"{PREFIX}/rollouts/{rollout_id}/manifest"


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, *, send_buffer: int | None = None) -> AsyncIterator[str]:
    """Serve the app on a free port of this machine and yield its URL.

    `send_buffer` bounds the bytes that the system keeps for a client that does not read.
    """
    sock = bind("127.0.0.1", 0)
    if send_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = _Uvicorn(control_config(app))
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        await asyncio.wait_for(server.listening.wait(), 10)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 20)


async def exchange(
    url: str, *parts: bytes, before_next: Callable[[], Awaitable[None]] | None = None
) -> bytes:
    """Send raw bytes to a server, one part after the other, and return all it answers until it closes."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for number, part in enumerate(parts):
            if number and before_next is not None:
                await before_next()
            writer.write(part)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


class RememberingLedger:
    """Has one record for each rollout that it is told of, and remembers every question."""

    def __init__(self, *rollout_ids: str) -> None:
        self.held = set(rollout_ids)
        self.asked: list[Any] = []
        self.failure: Exception | None = None

    async def manifest(self, rollout_id: str) -> dict[str, Any]:
        self._ask(rollout_id)
        return {"schema_version": 2, "rollout_id": rollout_id, "records": [], "failures": []}

    async def has_rows(self, rollout_id: str) -> bool:
        self._ask(rollout_id)
        return rollout_id in self.held

    async def retire(self, rollout_ids: list[str]) -> RolloutRemovalPayload:
        self._ask(list(rollout_ids))
        removed = [rollout_id for rollout_id in rollout_ids if rollout_id in self.held]
        self.held.difference_update(removed)
        return {"removed": removed, "absent": [each for each in rollout_ids if each not in removed]}

    delete = retire

    def _ask(self, question: Any) -> None:
        self.asked.append(question)
        if self.failure is not None:
            raise self.failure
