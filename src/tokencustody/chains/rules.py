"""What a person decides about rows where a rollout alone does not."""

from __future__ import annotations

from dataclasses import dataclass

from tokencustody.states import OnBreak, SharedCalls, Siblings


@dataclass(frozen=True, slots=True)
class RowRules:
    """How rows are made of calls."""

    shared_calls: SharedCalls = SharedCalls.FIRST
    on_break: OnBreak = OnBreak.SPLIT
    siblings: Siblings = Siblings.SETTLE
