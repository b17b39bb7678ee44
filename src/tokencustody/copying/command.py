"""`tokencustody copy`: rollouts from one database to another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tokencustody.terminal import interrupts
from tokencustody.terminal.printing import as_json, console, literal, plural, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from tokencustody.copying import CopyReport

_INTERRUPTED = "what was copied stays, in whole rollouts; run the command again to go on"
_ROWS_FOR_A_PERSON = 50


def copy(
    source: Annotated[
        str,
        typer.Option(
            "--from",
            envvar="TOKENCUSTODY_URL",
            help="The database to read: sqlite:///captures.db, a path, or postgresql://user@host/database",
        ),
    ],
    target: Annotated[str, typer.Option("--to", help="The database to write; a new SQLite file is made.")],
    run: Annotated[str | None, typer.Option(help="Only this run; without it, all runs.")] = None,
    rollout: Annotated[
        list[str] | None, typer.Option("--rollout", help="Only this rollout; may be given more than once.")
    ] = None,
    prefix: Annotated[str | None, typer.Option(help="Only rollouts whose id begins with this.")] = None,
    include_open: Annotated[
        bool, typer.Option("--include-open", help="Copy rollouts that are open too, as they are now.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only look, and say what would be done.")
    ] = False,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object: counts, and each rollout that was not copied."),
    ] = False,
) -> None:
    """Copy rollouts, with every row of theirs as it is, from one database to another.

    Each rollout is copied whole or not at all, and read back. What is there already is skipped, so the command may be
    repeated; what is there otherwise stays, and is reported. Rollouts that are open are left out, unless they are asked
    for. Exit code 1 if anything is conflicting or damaged.
    """
    report = interrupts.run(
        _copy(source, target, run, rollout, prefix, include_open=include_open, dry_run=dry_run),
        notice=_INTERRUPTED,
        at_once=lambda: _INTERRUPTED,
    )
    if json:
        print_json({"dry_run": dry_run, "clean": report.is_clean, **as_json(report)})
    else:
        if report.notable:
            console(folds=True).print(_notable(report))
        if (more := len(report.notable) - _ROWS_FOR_A_PERSON) > 0:
            typer.echo(f"and {more:,} more; --json has them all")
        typer.echo(_summary(report, dry_run=dry_run))
    if not report.is_clean:
        raise typer.Exit(1)


async def _copy(
    source: str,
    target: str,
    run: str | None,
    rollouts: list[str] | None,
    prefix: str | None,
    *,
    include_open: bool,
    dry_run: bool,
) -> CopyReport:
    from tokencustody.copying import Copier
    from tokencustody.terminal.progress import progress

    copier = Copier(source, target)
    try:
        return await copier.copy(
            run=run,
            rollout_ids=rollouts,
            prefix=prefix,
            include_open=include_open,
            dry_run=dry_run,
            watch=progress,
        )
    finally:
        await copier.close()


def _notable(report: CopyReport) -> Table:
    from rich.table import Table

    table = Table("run", "rollout", "outcome", "why", box=None, pad_edge=False)
    for copied in report.notable[:_ROWS_FOR_A_PERSON]:
        cells = (copied.run, copied.rollout_id, copied.outcome.replace("_", " "), copied.reason)
        table.add_row(*map(literal, cells))
    return table


def _summary(report: CopyReport, *, dry_run: bool) -> str:
    words = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in report.outcomes.items())
    total = plural(sum(report.outcomes.values()), "rollout")
    if dry_run:
        return f"it would be: {total} ({words or 'none'})"
    return f"{total} ({words or 'none'}), {plural(report.rows, 'row')} written"
