"""What the commands that remove have in common: they ask first, can be interrupted, and say what they did."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from tokencustody.states import FenceState
from tokencustody.terminal.printing import plural, print_json, printable

if TYPE_CHECKING:
    from tokencustody.overview.runs import RunSummary
    from tokencustody.retention.retention import Extent, Retention, Settled

_SHOWN = 20
_STOPPING = "stopping after the rollout that is being removed; Ctrl-C again stops at once"

Found = TypeVar("Found")


@dataclass
class Removal:
    """One command that removes: what it did so far, and what it says of it."""

    verb: str
    participle: str
    url: str
    json: bool
    noun: str = "rollout"
    rollouts: int = 0
    rows: int = 0
    staged_calls: int = 0
    left: list[Settled] = field(default_factory=list)
    missed: dict[str, str] = field(default_factory=dict)
    advance: Callable[[int], None] = lambda _: None

    @property
    def shown(self) -> str:
        """The database's address without a password."""
        from tokencustody.database.url import parse_url

        return parse_url(self.url).display

    def settled(self, of: Settled) -> None:
        """Count a rollout that is settled."""
        self.rollouts += of.removed
        self.rows += of.rows
        if of.left:
            self.left.append(of)
        self.advance(1)

    def staged(self, of: Settled) -> None:
        """Count the staged calls of a rollout that are gone."""
        self.staged_calls += of.rows
        self.advance(1)

    def look(self, run: str | None, work: Callable[[Retention], Coroutine[Any, Any, Found]]) -> Found:
        """Find the database there, and in it the run that was named; return what `work` finds before anything goes."""

        async def look(retention: Retention) -> Found:
            from tokencustody.txn.asked import reach

            await reach(self.url)
            if run is not None:
                await retention.check_run(run)
            return await work(retention)

        return asyncio.run(self._connected(look))

    def run(self, work: Callable[[Retention], Coroutine[Any, Any, None]], total: int | None) -> None:
        """Remove, with a progress bar. Ctrl-C ends it between two rollouts and says what was done."""
        from tokencustody.terminal import interrupts
        from tokencustody.terminal.progress import progress

        try:
            with progress(self.verb, total) as self.advance:
                interrupts.run(self._connected(work), notice=_STOPPING, at_once=self._so_far)
        except KeyboardInterrupt:
            typer.echo(self._so_far(), err=True)
            raise

    async def _connected(self, work: Callable[[Retention], Coroutine[Any, Any, Found]]) -> Found:
        from tokencustody.retention.retention import Retention

        async with Retention(self.url) as retention:
            return await work(retention)

    def _so_far(self) -> str:
        return f"{self._count()}; run it again to go on"

    def _count(self) -> str:
        staged = f" and {plural(self.staged_calls, 'staged call')}" if self.staged_calls else ""
        rows = f" ({plural(self.rows, 'row')})" if self.rows else ""
        return f"{self.participle} {plural(self.rollouts, self.noun)}{rows}{staged}"

    def say(self, matched: dict[str, Any], told: str) -> None:
        """Say what would go and what would be left; exit code 1 if anything would be that was named."""
        if self.json:
            document = {"database": self.shown, "dry_run": True, "matched": matched, "missed": self.missed}
            print_json(document)
        else:
            typer.echo(f"would {self.verb} {told}, in {self.shown}")
        self._say_left()

    def done(self, shrink: Callable[[], tuple[int, int] | None] = lambda: None) -> None:
        """Say what is gone and what is left, after `shrink` was called; exit code 1 if anything is left."""
        shrunk = shrink()
        if self.json:
            print_json(
                {
                    "database": self.shown,
                    "dry_run": False,
                    "removed": {
                        "rollouts": self.rollouts,
                        "rows": self.rows,
                        "staged_calls": self.staged_calls,
                    },
                    "left": [
                        {"run": of.key.run, "rollout_id": of.key.rollout_id, "why": of.left}
                        for of in self.left
                    ],
                    "missed": self.missed,
                    "file_bytes": shrunk and {"before": shrunk[0], "after": shrunk[1]},
                }
            )
        else:
            typer.echo(f"{self._count()} in {self.shown}")
            if shrunk:
                typer.echo(f"the file shrank from {shrunk[0]:,} to {shrunk[1]:,} bytes")
        self._say_left()

    def _say_left(self) -> None:
        if not self.json:
            left = [f"{of.key.rollout_id} of run {of.key.run}: {of.left}" for of in self.left]
            left += [f"{name}: {why}" for name, why in self.missed.items()]
            for line in left[:_SHOWN]:
                typer.echo(printable(f"left {line}"), err=True)
            if len(left) > _SHOWN:
                typer.echo(f"and {len(left) - _SHOWN:,} more; --json lists all", err=True)
        if self.left or self.missed:
            raise typer.Exit(1)


def ask(question: str, option: str) -> None:
    _refuse_without_terminal(option)
    typer.confirm(question, abort=True, err=True)


def ask_name(question: str, name: str) -> None:
    _refuse_without_terminal(f"--confirm {name}")
    if typer.prompt(question, err=True) != name:
        raise typer.Abort


def _refuse_without_terminal(option: str) -> None:
    if not sys.stdin.isatty():
        raise typer.BadParameter(f"there is nobody to ask here: if you are sure, give {option}")


def told(extent: Extent) -> str:
    from rich.filesize import decimal

    states = [f"{getattr(extent, state):,} {state}" for state in FenceState if getattr(extent, state)]
    notes = ", ".join(
        [
            *states,
            f"{extent.incomplete:,} incomplete",
            f"{extent.never_exported:,} never exported",
            f"{extent.partly_exported:,} partly exported",
        ]
    )
    runs = f" of {plural(len(extent.runs), 'run')}" if len(extent.runs) > 1 else ""
    ledger = f", {plural(extent.ledger_calls, 'call')} in the ledger" if extent.ledger_calls else ""
    calls = f"{plural(extent.calls, 'call')} of {decimal(extent.stored_bytes)}"
    return f"{plural(extent.rollouts, 'rollout')}{runs} ({notes}) with {calls}{ledger}"


def told_of_run(run: RunSummary) -> str:
    states = [f"{getattr(run, state):,} {state}" for state in FenceState if getattr(run, state)]
    exported = f"{run.rollouts - run.exported:,} never exported, {run.partly_exported:,} partly exported"
    notes = f" ({', '.join([*states, exported])})" if run.rollouts else ""
    calls = f"{plural(run.calls, 'call')}, {plural(run.staged_calls, 'staged call')}"
    return f"{plural(run.rollouts, 'rollout')}{notes}, {calls}"
