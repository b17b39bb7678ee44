"""Which checks must fail on which broken transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tests.conformance.transport import Client

BROKEN: dict[type[Client], set[str]] = {}

Broken = TypeVar("Broken", bound=Client)


def fails(*checks: str) -> Callable[[type[Broken]], type[Broken]]:
    """Name the checks that must fail on the decorated transport; all others must pass."""

    def register(client: type[Broken]) -> type[Broken]:
        BROKEN[client] = set(checks)
        return client

    return register
