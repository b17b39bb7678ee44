"""The waits for a database that last at the moment, so that whoever has a person before it can tell of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from tokencustody.database.url import DatabaseUrl

Using = TypeVar("Using")
Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class Wait:
    """A transaction that has not begun, for want of a connection or a lock. It waits for `seconds` at most."""

    url: DatabaseUrl
    seconds: float | None
    since: float = field(default_factory=time.monotonic)

    def until(self, work: Callable[[Using], Result]) -> Callable[[Using], Result]:
        """Return `work`, with whose beginning the wait is over."""

        def begun(using: Using) -> Result:
            current.discard(self)
            return work(using)

        return begun


current: set[Wait] = set()


@contextmanager
def waiting(url: DatabaseUrl, seconds: float | None = None) -> Iterator[Wait]:
    """Let a wait last until its work begins, or at most while this is open."""
    wait = Wait(url, seconds)
    current.add(wait)
    try:
        yield wait
    finally:
        current.discard(wait)
