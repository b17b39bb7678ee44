"""What became of the rollouts that were to be copied."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokencustody.copying.deciding import CopyOutcome


@dataclass(frozen=True, slots=True)
class CopiedRollout:
    """One rollout, and why, where that needs saying. `rows` and `bytes` are what was written of it."""

    run: str
    rollout_id: str
    outcome: CopyOutcome
    reason: str = ""
    rows: int = 0
    bytes: int = 0


@dataclass
class CopyReport:
    """Counts over all rollouts, and those of which a person should know."""

    outcomes: dict[CopyOutcome, int] = field(default_factory=dict)
    rows: int = 0
    bytes: int = 0
    notable: list[CopiedRollout] = field(default_factory=list)

    def add(self, copied: CopiedRollout) -> None:
        """Count one rollout."""
        self.outcomes[copied.outcome] = self.outcomes.get(copied.outcome, 0) + 1
        self.rows += copied.rows
        self.bytes += copied.bytes
        if copied.outcome in (CopyOutcome.CONFLICT, CopyOutcome.FAILED, CopyOutcome.LEFT_OUT):
            self.notable.append(copied)

    @property
    def is_clean(self) -> bool:
        """Whether there was no conflict and no failure; rollouts that are open may have been left out."""
        return not self.outcomes.keys() & {CopyOutcome.CONFLICT, CopyOutcome.FAILED}
