"""Reads a database by plain SQL and names what contradicts itself in it."""

from __future__ import annotations

from campaigns.rules import Violation


def audit(url: str, run: str) -> list[Violation]:
    """Return what is wrong with the rows of a run."""
    return []
