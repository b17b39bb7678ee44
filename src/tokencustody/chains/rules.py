"""What a person decides about rows where a rollout alone does not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SharedCalls(StrEnum):
    """Which chains train the calls that several of them begin with."""

    FIRST = "first"
    EVERY = "every"


class OnBreak(StrEnum):
    """What becomes of a rollout where a prompt does not continue the sequence of the call before.

    `split`: a new row begins there. `mask`: the rollout is left out. `first`: only what lies before is exported.
    """

    SPLIT = "split"
    MASK = "mask"
    FIRST = "first"


class Siblings(StrEnum):
    """What several answers to one question are.

    `settle`: retries, of which the agent received one. `keep`: samples that were asked for, each of them trained.
    """

    SETTLE = "settle"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class RowRules:
    """How rows are made of calls."""

    shared_calls: SharedCalls = SharedCalls.FIRST
    on_break: OnBreak = OnBreak.SPLIT
    siblings: Siblings = Siblings.SETTLE
