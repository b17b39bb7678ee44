"""What a campaign is told to do, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from campaigns.checker import Violation
from campaigns.history import Outcome
from tokencustody.states import Isolation

_MOST_SHOWN = 10


@dataclass(frozen=True)
class Campaign:
    """What is to be done. The seed decides what the workers send and when and where faults strike.

    `fault_every` is the mean number of operations between two faults. `kill_every` bounds how often a worker reaches
    the fault point at which it dies. `minutes` ends the campaign though operations are left. `isolation` are the levels
    of the workers' stores, two workers at each in turn.
    """

    database: str
    seed: int
    operations: int
    faults: Sequence[str]
    minutes: float | None = None
    workers: int = 4
    tasks: int = 4
    rollouts: int = 8
    fault_every: int = 200
    kill_every: int = 400
    deadline: float = 4.0
    isolation: Sequence[str] = (Isolation.READ_COMMITTED,)


@dataclass
class Summary:
    """What came of a campaign. It passed when nothing stands in `violations`, `undecided` and `crashes`.

    `outcomes` counts operations by name and outcome, `struck` faults, `killed` the deaths of workers by fault point,
    `allowed` the exceptions of `campaigns.checker` that were needed. `stats` are those of all workers; one that is
    killed takes its last ones along.
    """

    campaign: Campaign
    # The history alone does not tell the faults, and what the stores counted.
    checked_again: bool = False
    seconds: float = 0.0
    rollouts: int = 0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    stats: Counter[str] = field(default_factory=Counter)
    allowed: int = 0
    crashes: list[str] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every rollout was decided and no promise was broken."""
        return not (self.violations or self.undecided or self.crashes)

    @property
    def operations(self) -> int:
        """How many operations the history holds."""
        return sum(self.outcomes.values())

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "campaign": asdict(self.campaign),
            "passed": self.passed,
            "seconds": round(self.seconds, 1),
            "rollouts": self.rollouts,
            "operations": self.operations,
            "outcomes": {
                name: {str(outcome): self.outcomes[name, outcome] for outcome in Outcome}
                for name in sorted({name for name, _ in self.outcomes})
            },
            "errors": dict(sorted(self.errors.items())),
            "faults": dict(sorted(self.struck.items())),
            "workers_killed": dict(sorted(self.killed.items())),
            "stats": dict(sorted(self.stats.items())),
            "crashes": self.crashes,
            "allowed_exceptions": self.allowed,
            "undecided": self.undecided,
            "violations": [
                {
                    "rule": violation.rule,
                    "rollout": violation.rollout,
                    "text": violation.text,
                    "operations": [str(operation) for operation in violation.operations],
                }
                for violation in self.violations
            ],
        }

    def print(self, console: Console) -> None:
        """Print tables for a person."""
        table = Table(title="Operations")
        table.add_column("operation")
        for outcome in Outcome:
            table.add_column(str(outcome), justify="right")
        for name in sorted({name for name, _ in self.outcomes}):
            table.add_row(name, *(f"{self.outcomes[name, outcome]:,}" for outcome in Outcome))
        totals = [
            sum(self.outcomes[key] for key in self.outcomes if key[1] == outcome) for outcome in Outcome
        ]
        table.add_section()
        table.add_row("all", *(f"{total:,}" for total in totals))
        console.print(table)
        console.print(f"[bold]exceptions allowed by the checker[/]: {self.allowed}")
        told = [("refused with", self.errors)]
        if not self.checked_again:
            told += [
                ("faults", self.struck),
                ("workers killed", self.killed),
                ("stats of the stores", self.stats),
            ]
        for title, counted in told:
            said = ", ".join(f"{escape(name)} {count:,}" for name, count in sorted(counted.items()) if count)
            console.print(f"[bold]{title}[/]: {said or 'none'}", soft_wrap=True)
        for text in self.crashes[:_MOST_SHOWN]:
            console.print(f"[red]{escape(text)}[/]", soft_wrap=True)
        for violation in self.violations[:_MOST_SHOWN]:
            console.print(
                f"[red]{escape(violation.rule)}[/] {escape(violation.rollout)}: {escape(violation.text)}",
                soft_wrap=True,
            )
            for operation in violation.operations:
                console.print(f"    {escape(str(operation))}", soft_wrap=True)
        for rollout in self.undecided[:_MOST_SHOWN]:
            console.print(
                f"[red]undecided[/] {escape(rollout)}: the search for an order of its operations was given up",
                soft_wrap=True,
            )
        if len(self.violations) > _MOST_SHOWN:
            console.print(f"and {len(self.violations) - _MOST_SHOWN:,} more violations")
        colour = "green" if self.passed else "red"
        console.print(
            f"[bold {colour}]{self.campaign.database}, seed {self.campaign.seed}: {self.operations:,} operations on "
            f"{self.rollouts:,} rollouts in {self.seconds:,.0f} s, {len(self.violations)} violations, "
            f"{len(self.undecided)} undecided, {len(self.crashes)} crashed workers[/]",
            soft_wrap=True,
        )
