"""What a walk through the files of a rollout finds."""

from __future__ import annotations

from pathlib import Path

from tokencustody.gym_import.files import Line
from tokencustody.gym_import.records import UnreadableLineError
from tokencustody.gym_import.report import FindingKind, ImportedRollout


class Findings:
    """Findings of one rollout. `lost` are the calls of which something was lost; the empty one has no name."""

    def __init__(self, rollout_id: str) -> None:
        self.rollout = ImportedRollout(rollout_id)
        self.lost: dict[str, None] = {}

    def find(
        self, kind: FindingKind, path: Path | None, line: Line | None, call: str | None, reason: str
    ) -> None:
        """Add a finding at a line of a file, or at the file."""
        name, number = path.name if path else "", line.number if line else None
        self.rollout.find(kind, name, number, call or None, reason)

    def lose(self, path: Path | None, line: Line | None, call: str, reason: str) -> None:
        """Add what masks the rollout."""
        self.find(FindingKind.LOST, path, line, call, reason)
        self.lost[call] = None

    def lose_line(self, path: Path | None, line: Line, exc: UnreadableLineError) -> None:
        """Add a line that cannot be read."""
        torn = "" if line.is_ended else "the last line is torn: "
        self.lose(path, line, exc.model_call_id or "", f"{torn}{exc}")

    def conflict(
        self, path: Path | None, reason: str, line: Line | None = None, call: str | None = None
    ) -> None:
        """Add what the database holds otherwise."""
        self.find(FindingKind.CONFLICT, path, line, call, f"{reason}, which stays as it is")
