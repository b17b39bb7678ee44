"""Calls that are their own ancestors, as only what a writer got wrong makes them."""

from __future__ import annotations

from collections.abc import Mapping


def circles(parents: Mapping[str, str | None]) -> list[list[str]]:
    """Return each circle of calls, given the parent that each call names, in the order of the first that leads there.

    A circle begins with the call at which that one enters it, each followed by its parent.
    """
    found: list[list[str]] = []
    settled: set[str] = set()
    for first in parents:
        path: dict[str, None] = {}
        call: str | None = first
        while call is not None and call in parents and call not in settled and call not in path:
            path[call] = None
            call = parents[call]
        if call is not None and call in path:
            above = list(path)
            found.append(above[above.index(call) :])
        settled.update(path)
    return found
