"""`tokencustody verify`: what a database has recorded, computed again."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokencustody.schema.command import Url
from tokencustody.states import FenceState
from tokencustody.terminal import interrupts
from tokencustody.terminal.printing import console, literal, plural, print_error, print_json
from tokencustody.terminal.progress import progress

if TYPE_CHECKING:
    from tokencustody.verify import VerifyReport

_SHOWN = 50
_FOUND, _NOT_VERIFIED = 1, 2


def verify(
    url: Url,
    run: Annotated[str | None, typer.Option(help="Only this run; without it, all runs.")] = None,
    rollout: Annotated[
        list[str] | None, typer.Option(help="Only the rollout with this id; may be repeated.")
    ] = None,
    state: Annotated[FenceState | None, typer.Option(help="Only rollouts in this state.")] = None,
    prefix: Annotated[str | None, typer.Option(help="Only rollouts whose id begins with this.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes, each with a connection. Default: one per core.")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Keep in this file how far it came; the same command then goes on after an interruption.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Write the findings to this file, one JSON object a line."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: what was looked at, and the findings.")
    ] = False,
) -> None:
    """Compute hashes, digests, parent links, fences, ledger and staged calls again, and report every bad call.

    Changes nothing. Exit code 0: nothing was found; 1: something was; 2: it could not be verified, also because there
    is no rollout of the kind that was asked for.
    """
    import asyncio

    from tokencustody.terminal.printing import is_expected
    from tokencustody.txn.asked import reach
    from tokencustody.txn.selection import RolloutFilter
    from tokencustody.verify import verify as verify_database

    _try_file(report, "--report")
    _try_file(checkpoint, "--checkpoint")
    try:
        wanted = RolloutFilter(
            run=run,
            state=state,
            prefix=prefix,
            rollout_ids=tuple(rollout) if rollout else None,
        )
        with interrupts.raised():
            asyncio.run(reach(url))
            found = verify_database(url, wanted, jobs=jobs or _cores(), checkpoint=checkpoint, watch=progress)
        if json:
            print_json(found.as_json())
        else:
            _print(found)
        if report is not None:
            _write(found, report)
    except KeyboardInterrupt:
        how = (
            "the same command goes on" if checkpoint else "with --checkpoint FILE it would go on where it was"
        )
        typer.echo(f"interrupted: nothing was changed; {how}", err=True)
        raise
    except Exception as exc:
        if not is_expected(exc) and not isinstance(exc, OSError):
            raise
        print_error(exc)
        raise typer.Exit(_NOT_VERIFIED) from None
    if not found.ok:
        raise typer.Exit(_FOUND)


def _try_file(file: Path | None, option: str) -> None:
    """Refuse now a file that could not be written when the work is done, or that is a database."""
    from tokencustody.database.sqlite_files import is_of_database

    if file is None:
        return
    try:
        is_database = is_of_database(file)
    except OSError:  # as of one that this user may replace and not read
        is_database = False
    if is_database:
        raise typer.BadParameter(f"{file} is a database, or the log of one", param_hint=option)
    folder = file.absolute().parent
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as exc:
        raise typer.BadParameter(
            f"no file can be written in {folder}: {exc.strerror}", param_hint=option
        ) from None


def _cores() -> int:
    # Those that this process may use, where the system tells.
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _print(found: VerifyReport) -> None:
    from rich.table import Table

    out = console(folds=True)
    if found.findings:
        table = Table("rule", "run", "rollout", "call", "what is wrong", box=None, pad_edge=False)
        for finding in found.findings[:_SHOWN]:
            parts = (finding.run, finding.rollout_id, finding.model_call_id, finding.text)
            table.add_row(finding.rule.value, *map(literal, parts))
        out.print(table)
        if len(found.findings) > _SHOWN:
            out.print(f"… and {len(found.findings) - _SHOWN:,} more: use --json or --report FILE")
        out.print()
    counts = found.counts
    summary = Table(box=None, pad_edge=False, show_header=False)
    for name, value in (
        ("database", found.database),
        ("rollouts", f"{counts.rollouts:,}"),
        ("complete records", f"{counts.calls:,}"),
        ("  retokenized", f"{counts.retokenized:,}" if counts.retokenized else ""),
        (
            "  without a recorded parent",
            f"{counts.parents_not_recorded:,}" if counts.parents_not_recorded else "",
        ),
        ("ledger rows", f"{counts.ledger_rows:,}"),
        ("staged calls", f"{counts.staged_calls:,}"),
        ("attachments", f"{counts.attachments:,}"),
        ("hashed", f"{counts.bytes / 1e6:,.1f} MB"),
        ("time", f"{found.seconds:,.1f} s"),
        *((f"findings {rule}", f"{times:,}") for rule, times in found.by_rule().items()),
    ):
        if value:
            summary.add_row(name, literal(value))
    out.print(summary)
    if found.ok:
        out.print(
            "nothing is wrong" if counts.rollouts else "0 rollouts were looked at: the database has none"
        )
    else:
        bad = {(finding.run, finding.rollout_id) for finding in found.findings}
        out.print(f"{plural(len(found.findings), 'finding')} in {plural(len(bad), 'rollout')}")


def _write(found: VerifyReport, path: Path) -> None:
    from tokencustody.verify.checkpoint import replace_file

    replace_file(path, "".join(json.dumps(asdict(finding)) + "\n" for finding in found.findings))
