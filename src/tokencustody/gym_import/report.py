"""What an import found, rollout by rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

# Of one rollout; what is more is counted.
MOST_FINDINGS = 100


class FindingKind(StrEnum):
    """How much a finding matters.

    A `note` loses nothing. What is `lost` masks the rollout. A `conflict` is something else than the database holds,
    which keeps what it has.
    """

    NOTE = "note"
    LOST = "lost"
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class ImportFinding:
    """Something in a folder that was not imported as it stands: the file's name, the line from 1, the call, and why."""

    kind: FindingKind
    file: str
    line: int | None
    model_call_id: str | None
    reason: str


class ImportOutcome(StrEnum):
    """What became of a rollout. `added`: the rollout was there, and what it lacked was added."""

    IMPORTED = "imported"
    ADDED = "added"
    ALREADY_THERE = "already_there"
    CONFLICT = "conflict"
    FAILED = "failed"


@dataclass(slots=True)
class ImportedRollout:
    """One rollout of a folder. `calls` are those of the files, `added` those that were not in the database.

    `state` and `incomplete` are the files' verdict as the store's rules see it. `findings` are the first ones, `counts`
    counts all by their kind.
    """

    rollout_id: str
    outcome: ImportOutcome = ImportOutcome.ALREADY_THERE
    state: str = "open"
    incomplete: bool = False
    calls: int = 0
    added: int = 0
    ledger_rows: int = 0
    findings: list[ImportFinding] = field(default_factory=list)
    counts: dict[FindingKind, int] = field(default_factory=dict)

    def find(
        self, kind: FindingKind, file: str, line: int | None, model_call_id: str | None, reason: str
    ) -> None:
        """Add a finding."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append(ImportFinding(kind, file, line, model_call_id, reason))

    def has(self, kind: FindingKind) -> bool:
        """Return whether there was any finding of this kind."""
        return kind in self.counts

    @property
    def is_clean(self) -> bool:
        """Whether the database now holds all that the files hold, or with a dry run would."""
        return self.outcome is not ImportOutcome.FAILED and self.counts.keys() <= {FindingKind.NOTE}


@dataclass(frozen=True, slots=True)
class ImportReport:
    """All rollouts of a folder in the order of their ids, and what in it belongs to none."""

    rollouts: Sequence[ImportedRollout]
    strangers: Sequence[ImportFinding]

    @property
    def is_clean(self) -> bool:
        """Whether nothing was lost or conflicting."""
        return all(rollout.is_clean for rollout in self.rollouts) and all(
            finding.kind is FindingKind.NOTE for finding in self.strangers
        )
