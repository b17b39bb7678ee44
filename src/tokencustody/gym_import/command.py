"""`tokencustody import`: the files of NeMo Gym's own store, brought into a database."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokencustody.schema.command import Url
from tokencustody.terminal import interrupts
from tokencustody.terminal.printing import as_json, console, literal, plural, print_json

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from tokencustody.gym_import import ImportFinding, ImportReport

_ROWS_FOR_A_PERSON = 100
_INTERRUPTED = "what was imported stays; run the command again to go on"


def import_(
    folder: Annotated[Path, typer.Argument(help="The folder of the file store.")],
    url: Url,
    run: Annotated[str, typer.Option(help="The run that the rollouts become part of.")] = "default",
    rollout: Annotated[
        list[str] | None, typer.Option("--rollout", help="Only this rollout; may be given more than once.")
    ] = None,
    prefix: Annotated[str, typer.Option(help="Only rollouts whose id begins with this.")] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only look, and say what would be done.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: what became of each rollout, and why.")
    ] = False,
) -> None:
    """Import a folder of NeMo Gym's file store: records, fences, intents, marks and the ledger.

    Each rollout is imported whole or not at all. What the database holds already is skipped, so the command may be
    repeated; what it holds otherwise stays, and is reported. A rollout of which something was lost is masked. Exit code
    1 if anything was lost or conflicting.
    """
    from tokencustody.database.folders import local_path

    if not local_path(folder, "an import").is_dir():
        raise typer.BadParameter(f"Directory {str(folder)!r} does not exist.", param_hint="FOLDER")
    report = interrupts.run(
        _import(url, run, folder, rollout, prefix, dry_run=dry_run),
        notice=_INTERRUPTED,
        at_once=lambda: _INTERRUPTED,
    )
    if json:
        print_json(
            {
                "dry_run": dry_run,
                "clean": report.is_clean,
                "rollouts": [as_json(each) for each in report.rollouts],
                "strangers": [as_json(each) for each in report.strangers],
            }
        )
    else:
        if any(each.findings for each in report.rollouts) or report.strangers:
            console(folds=True).print(_findings(report))
        typer.echo(_summary(report, dry_run=dry_run))
    if not report.is_clean:
        raise typer.Exit(1)


async def _import(
    url: str, run: str, folder: Path, rollouts: list[str] | None, prefix: str, *, dry_run: bool
) -> ImportReport:
    from tokencustody.gym_import import GymImporter
    from tokencustody.terminal.progress import progress

    async with GymImporter(url, run=run) as importer:
        return await importer.import_folder(
            folder, rollout_ids=rollouts, prefix=prefix, dry_run=dry_run, watch=progress
        )


def _findings(report: ImportReport) -> Table:
    from rich.table import Table

    from tokencustody.gym_import import FindingKind

    table = Table("file", "line", "call", "kind", "what", box=None, pad_edge=False)
    found = [(finding, each.rollout_id) for each in report.rollouts for finding in each.findings]
    found += [(finding, "") for finding in report.strangers]
    found.sort(key=lambda each: each[0].kind is FindingKind.NOTE)
    for finding, rollout_id in found[:_ROWS_FOR_A_PERSON]:
        table.add_row(*_cells(finding, rollout_id))
    all_found = sum(sum(each.counts.values()) for each in report.rollouts) + len(report.strangers)
    if all_found > _ROWS_FOR_A_PERSON:
        table.add_row(
            "",
            "",
            "",
            "",
            f"and {all_found - _ROWS_FOR_A_PERSON:,} more; --json has the first of each rollout",
        )
    return table


def _cells(finding: ImportFinding, rollout_id: str) -> list[Text]:
    line = "" if finding.line is None else f"{finding.line:,}"
    cells = (finding.file or rollout_id, line, finding.model_call_id or "", finding.kind, finding.reason)
    return [literal(cell) for cell in cells]


def _summary(report: ImportReport, *, dry_run: bool) -> str:
    from tokencustody.gym_import import FindingKind, ImportOutcome

    outcomes = Counter(each.outcome for each in report.rollouts)
    words = ", ".join(f"{count:,} {outcome.replace('_', ' ')}" for outcome, count in sorted(outcomes.items()))
    calls = plural(sum(each.added for each in report.rollouts), "call")
    lost = sum(
        FindingKind.LOST in each.counts and each.outcome is not ImportOutcome.FAILED
        for each in report.rollouts
    )
    masked = f"; {lost:,} masked, for something of them was lost" if lost else ""
    would = "it would be: " if dry_run else ""
    return f"{would}{plural(len(report.rollouts), 'rollout')} ({words or 'none'}), {calls} added{masked}"
