"""What a run of the kit found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class CheckStatus(StrEnum):
    """The verdict of one check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class CheckResult:
    """The verdict of one check; `needs` are the capabilities it asks for, `seconds` how long it took."""

    name: str
    needs: tuple[str, ...]
    status: CheckStatus
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Capability:
    """Whether the transport offers something, and what was looked at to tell."""

    name: str
    present: bool
    detected: str


@dataclass(frozen=True)
class ConformanceReport:
    """The results of one run.

    `rollout_ids` are those that the run wrote to, in both namespaces if there were two, and `staging_keys` those
    that it staged calls under: delete them when done.
    """

    results: tuple[CheckResult, ...]
    capabilities: tuple[Capability, ...]
    rollout_ids: tuple[str, ...]
    staging_keys: tuple[str, ...] = ()

    @property
    def passed(self) -> list[str]:
        """The names of the checks that passed."""
        return [result.name for result in self.results if result.status == CheckStatus.PASSED]

    @property
    def failed(self) -> list[CheckResult]:
        """The results that failed."""
        return [result for result in self.results if result.status == CheckStatus.FAILED]

    @property
    def ok(self) -> bool:
        """Whether something was run and nothing failed."""
        return bool(self.passed) and not self.failed

    def summary(self) -> str:
        """Return one line with the counts, and a line for each failed check."""
        skipped = len(self.results) - len(self.passed) - len(self.failed)
        line = f"{len(self.passed)} checks passed, {len(self.failed)} failed, {skipped} not applicable"
        if not self.passed and not self.failed:
            line += ": no check was run, which proves nothing"
        return "\n".join([line, *(f"  {result.name}: {result.detail}" for result in self.failed)])

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON data."""
        return {"ok": self.ok} | asdict(self)


class ConformanceError(AssertionError):
    """A transport breaks a promise, or no check was run. `report` holds every result."""

    def __init__(self, report: ConformanceReport) -> None:
        super().__init__(report.summary())
        self.report = report
