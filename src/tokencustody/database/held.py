"""The engines that one store holds, by process and event loop, and how it lets go of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from concurrent.futures import Future
from functools import partial

from tokencustody.database import registry
from tokencustody.database.engine import EngineKey, Engines
from tokencustody.errors import StoreClosedError

# In seconds, between two looks at whether another loop still runs.
_PAUSE = 0.25


class HeldEngines:
    """What a store took out of the registry under its key. Any thread may take or close."""

    def __init__(self, key: EngineKey) -> None:
        self._key = key
        self._held: dict[tuple[int, asyncio.AbstractEventLoop], Engines] = {}
        # What is told when those of a loop are released.
        self._leaving: dict[tuple[int, asyncio.AbstractEventLoop], Future[None]] = {}
        self._closed = False

    def take(self) -> Engines:
        """Return the engines of this process and the running loop. Raises StoreClosedError."""
        if self._closed:
            raise self._is_closed()
        here = (os.getpid(), asyncio.get_running_loop())
        engines = self._held.get(here)
        if engines is None:
            # Never replaced: another thread may be putting in the engines of its loop.
            for held in list(self._held):
                if held[1].is_closed():
                    self._held.pop(held, None)
            engines = self._held[here] = registry.acquire(self._key)
            if self._closed and self._held.pop(here, None) is not None:
                self._release_here(engines, self._leaving.setdefault(here, Future()))
                raise self._is_closed()
        return engines

    async def close(self) -> None:
        """Release all of them, in whichever running loop they were taken. Idempotent.

        Where a loop does not run, its engines are released by the next close in it.
        """
        self._closed = True
        for held in list(self._held):
            pid, loop = held
            # What another process opened is out of reach, and what a loop that does not run, until it is closed there.
            if pid != os.getpid() or not loop.is_running():
                continue
            released = self._leaving.setdefault(held, Future())
            # Another thread may close it too.
            engines = self._held.pop(held, None)
            if engines is not None:
                await self._release_in(loop, engines, released)
        # Which may be another thread that does so in this loop, and the loop must not end before. A caller who is
        # cancelled would cancel it for every other.
        if leaving := self._leaving.get((os.getpid(), asyncio.get_running_loop())):
            await asyncio.shield(asyncio.wrap_future(leaving))

    async def _release_in(
        self, loop: asyncio.AbstractEventLoop, engines: Engines, released: Future[None]
    ) -> None:
        if loop is asyncio.get_running_loop():
            self._release_here(engines, released)
            return
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._release_here, engines, released)
        # A loop that stops meanwhile releases nothing, and tells nobody.
        waiting = asyncio.wrap_future(released)
        while loop.is_running() and not waiting.done():
            await asyncio.wait([waiting], timeout=_PAUSE)
        if waiting.done():
            waiting.result()

    def _release_here(self, engines: Engines, released: Future[None]) -> None:
        releasing = asyncio.ensure_future(registry.release(self._key, engines))
        releasing.add_done_callback(partial(_tell, released))

    def _is_closed(self) -> StoreClosedError:
        return StoreClosedError(f"the store on {self._key.url.display} is closed")


def _tell(released: Future[None], releasing: asyncio.Future[None]) -> None:
    error = None if releasing.cancelled() else releasing.exception()
    if error is None:
        released.set_result(None)
    else:
        released.set_exception(error)
