"""Which checks must fail on which broken transport."""

from __future__ import annotations

from collections.abc import Callable

from tests.conformance.memory import Memory

BROKEN: dict[type[Memory], set[str]] = {}


def fails(*checks: str) -> Callable[[type[Memory]], type[Memory]]:
    """Name the checks that must fail on the decorated transport; all others must pass."""

    def register(client: type[Memory]) -> type[Memory]:
        BROKEN[client] = set(checks)
        return client

    return register
