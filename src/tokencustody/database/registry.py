"""Engines by process and event loop: made for the first store that needs them, closed with the last."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from tokencustody.database.engine import EngineKey, Engines
from tokencustody.database.sqlite import SqliteEngines
from tokencustody.database.sqlite_files import log_size
from tokencustody.database.stats import none_counted
from tokencustody.database.url import DatabaseUrl

if TYPE_CHECKING:
    from tokencustody.database.postgresql import PostgresqlEngines


class _Registry:
    """The engines of this process, by loop, because a connection belongs to the loop that opened it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.of_loop: dict[asyncio.AbstractEventLoop, dict[EngineKey, Engines]] = {}
        # What was counted by engines that are gone, by their URL.
        self.counted: defaultdict[DatabaseUrl, Counter[str]] = defaultdict(none_counted)

    def forget(self, key: EngineKey, engines: Engines) -> None:
        self.counted[key.url].update(engines.stats)


_registry = _Registry()
# A child process must neither use nor close what it inherits: the sockets and file locks are the parent's.
_inherited: list[object] = []
_closing: set[asyncio.Future[None]] = set()
# Which database a URL led to when it was last reached. A child process inherits it.
_identities: dict[DatabaseUrl, str] = {}


def _start_anew() -> None:
    global _registry
    _inherited.append(_registry)
    _registry = _Registry()


os.register_at_fork(after_in_child=_start_anew)


def engines_class(url: DatabaseUrl) -> type[SqliteEngines | PostgresqlEngines]:
    """Return the class of the engines for a database; that of PostgreSQL takes long to import, and waits for this."""
    if url.is_sqlite:
        return SqliteEngines
    from tokencustody.database.postgresql import PostgresqlEngines

    return PostgresqlEngines


def acquire(key: EngineKey) -> Engines:
    """Return the engines of this process and loop for `key`, made now if need be. Pair with `release`."""
    loop = asyncio.get_running_loop()
    with _registry.lock:
        ended = [each for each in _registry.of_loop if each.is_closed()]
        for each in ended:
            for engine_key, engines in _registry.of_loop.pop(each).items():
                _registry.forget(engine_key, engines)
        of_loop = _registry.of_loop.setdefault(loop, {})
        if key not in of_loop:
            of_loop[key] = engines_class(key.url)(key)
        engines = of_loop[key]
        engines.users += 1
    if ended:
        # Their connections cannot be closed without their loop. Waiting for chance to collect them can exhaust a
        # server's connections.
        gc.collect()
    return engines


def release(key: EngineKey, engines: Engines) -> Awaitable[None]:
    """Give engines back in the loop that acquired them. The last user closes them, which may be awaited.

    They are closed also when whoever awaits it is cancelled.
    """
    closing = asyncio.ensure_future(_close(key, engines) if _let_go(key, engines) else asyncio.sleep(0))
    _closing.add(closing)
    closing.add_done_callback(_closing.discard)
    return asyncio.shield(closing)


def _let_go(key: EngineKey, engines: Engines) -> bool:
    loop = asyncio.get_running_loop()
    with _registry.lock:
        engines.users -= 1
        if engines.users:
            return False
        of_loop = _registry.of_loop[loop]
        del of_loop[key]
        if not of_loop:
            del _registry.of_loop[loop]
        return True


async def _close(key: EngineKey, engines: Engines) -> None:
    await engines.dispose()
    with _registry.lock:
        # What was running is counted too.
        _registry.forget(key, engines)


def stats_of(url: DatabaseUrl) -> dict[str, int]:
    """Return what was counted on a database in this process, by the names of `database.stats`."""
    with _registry.lock:
        counted = none_counted()
        if url in _registry.counted:
            counted.update(_registry.counted[url])
        for of_loop in _registry.of_loop.values():
            for key, engines in of_loop.items():
                if key.url == url:
                    counted.update(engines.stats)
                    counted.update(engines.count_waiting())
    if url.is_sqlite:
        counted["log_bytes"] = log_size(url)
    return dict(counted)


def remember(url: DatabaseUrl, identity: str | None) -> None:
    """Remember what a database said it is, however it is addressed."""
    if identity is not None:
        _identities[url] = identity


def identity_of(url: DatabaseUrl) -> str | None:
    """Return what the database said it is, or None when it was not reached yet or has nothing to say."""
    return _identities.get(url)


def databases() -> list[DatabaseUrl]:
    """Return the databases that stores of this process have used."""
    with _registry.lock:
        return list(
            {*_registry.counted, *(key.url for of_loop in _registry.of_loop.values() for key in of_loop)}
        )


def open_engines() -> list[Engines]:
    """Return the engines of this process that are open now, in any loop that has not ended."""
    with _registry.lock:
        return [
            engines
            for loop, of_loop in _registry.of_loop.items()
            if not loop.is_closed()
            for engines in of_loop.values()
        ]
