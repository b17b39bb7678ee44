"""What the engines of SQLite and PostgreSQL have in common: how transactions run, and how they are counted."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection

from tokencustody.database.coalescing import Gatherer
from tokencustody.database.stats import none_counted
from tokencustody.database.url import DatabaseUrl
from tokencustody.states import Isolation

Using = TypeVar("Using")
Result = TypeVar("Result")
Work = Callable[[Connection], Result]

DEFAULT_POOL_SIZE = 4
LOGGING_NAME = "tokencustody"
# At DEBUG, SQLAlchemy logs the rows that it reads, token data included.
logging.getLogger(f"sqlalchemy.engine.Engine.{LOGGING_NAME}").addFilter(
    lambda record: record.levelno > logging.DEBUG
)
DEFAULT_DEADLINE = 30.0


class HeldError(Exception):
    """A lane came upon what another transaction holds; nothing of it was written."""


@dataclass(frozen=True)
class EngineKey:
    """What stores must have in common to share engines."""

    url: DatabaseUrl
    pool_size: int
    deadline: float
    read_only: bool = False
    isolation: Isolation = Isolation.READ_COMMITTED


@dataclass(eq=False, slots=True)
class Attempt(Generic[Using, Result]):
    """One try of a transaction: its function, and how far it came."""

    work: Callable[[Using], Result]
    started: bool = False
    committing: bool = False

    def __call__(self, using: Using) -> Result:
        """Run the function, as the engine does once it has a connection."""
        self.started = True
        return self.work(using)


class Engines(ABC):
    """The connections of one database in one process and event loop, shared by the stores that use it.

    Nothing is opened before the first transaction. `running` counts the uses; the last user waits for them before it
    closes the connections. `stats` counts what happened since the engines were made. `kept` is what the
    stores share beside the connections, by what it is for. `checking` are the checks of the schema that were begun, by
    whether they may create it.
    """

    def __init__(self) -> None:
        self.users = 0
        self.running = 0
        self.checked = False
        self.checking: dict[bool, asyncio.Task[None]] = {}
        self.stats: Counter[str] = none_counted()
        self.kept: dict[Any, Any] = {}
        self._idle = asyncio.Event()

    @abstractmethod
    async def read(self, work: Work[Result]) -> Result:
        """Run `work` in one transaction that sees one snapshot and cannot write."""

    @abstractmethod
    async def write(self, attempt: Attempt[Connection, Result]) -> Result:
        """Run `attempt` in one transaction and return once it is durable. It is over when this returns or raises.

        `attempt.committing` is set when the database may have committed although this raises.
        """

    @property
    def file(self) -> Hashable:
        """What tells the file that is open from any that is put in its place, or None where there is no such file."""
        return None

    async def identify(self) -> str | None:
        """Return what tells this database from all others, however it is addressed, if the address does not."""
        return None

    def count_waiting(self) -> dict[str, int]:
        """Return the figures of `database.stats` that say how it is now."""
        queues = [kept for kept in list(self.kept.values()) if isinstance(kept, Gatherer)]
        return {
            "queue_depth": sum(queue.waiting for queue in queues),
            "queued_bytes": sum(queue.waiting_bytes for queue in queues),
        }

    @abstractmethod
    def checked_out(self) -> int:
        """Return how many connections are in use."""

    @abstractmethod
    async def close_connections(self) -> None:
        """Close every connection; none is in use."""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Count a use while it lasts."""
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    async def dispose(self) -> None:
        """Let the transactions that are running finish, then close every connection."""
        while self.running:
            await self._idle.wait()
        if left := [check for check in self.checking.values() if check.cancel()]:
            await asyncio.wait(left)
        await self.close_connections()


def forget_error(task: asyncio.Task[Any]) -> None:
    """Take the error of a task for which nobody may wait any more: it would be logged, though the next caller meets it
    himself."""
    if not task.cancelled():
        task.exception()
