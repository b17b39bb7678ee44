"""`tokencustody export`: frozen rollouts as files for a trainer, and the hand-over to it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokencustody.schema.command import Url
from tokencustody.states import Format, OnBreak, SharedCalls, Siblings
from tokencustody.terminal.printing import console, literal, plural, print_json, printable

if TYPE_CHECKING:
    from tokencustody.export import ExportReport

_SHOWN = 20


def export(
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="The folder to write: new, empty, or of an export to go on with."),
    ],
    url: Url,
    format: Annotated[
        Format,
        typer.Option(
            help="parquet: one row per trainable chain. gym: NeMo Gym's token files. calls: one call per line, as JSON."
        ),
    ] = Format.PARQUET,
    run: Annotated[str | None, typer.Option(help="Only this run; without it, all runs.")] = None,
    rollout: Annotated[
        list[str] | None, typer.Option(help="Only this rollout; may be given more than once.")
    ] = None,
    prefix: Annotated[str | None, typer.Option(help="Only rollouts whose id begins with this.")] = None,
    before: Annotated[
        str | None,
        typer.Option(
            help="Only rollouts frozen before this date or time, in ISO 8601; UTC unless it says otherwise."
        ),
    ] = None,
    unexported: Annotated[
        bool, typer.Option("--unexported", help="Only rollouts that no export has marked yet.")
    ] = False,
    include_incomplete: Annotated[
        bool, typer.Option("--include-incomplete", help="Also rollouts that are masked as incomplete.")
    ] = False,
    shared_calls: Annotated[
        SharedCalls,
        typer.Option(
            help="Where chains branch, the calls that they share are trained in the first chain only, so that each "
            "sampled token is trained once, or in every chain."
        ),
    ] = SharedCalls.FIRST,
    on_break: Annotated[
        OnBreak,
        typer.Option(
            help="Where a prompt does not continue the call before: begin a new row there (split), leave the rollout "
            "out (mask), or export only what lies before (first)."
        ),
    ] = OnBreak.SPLIT,
    siblings: Annotated[
        Siblings,
        typer.Option(
            help="Several answers to one prompt: retries, of which only the one is trained that the agent went on from "
            "(settle), or samples that were asked for, which are all trained (keep)."
        ),
    ] = Siblings.SETTLE,
    rewards: Annotated[
        Path | None,
        typer.Option(
            help="A .csv, .jsonl or .parquet file with rollout_id, reward and, for several runs, run."
        ),
    ] = None,
    rows_per_file: Annotated[
        int | None, typer.Option(min=1, help="Begin a new file after this many rows.", show_default="50000")
    ] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Begin a new file after this many bytes, uncompressed.", show_default="1 GiB"
        ),
    ] = None,
    retire: Annotated[
        bool,
        typer.Option(
            "--retire",
            help="Then retire what the finished files hold whole, in one transaction with its mark.",
        ),
    ] = False,
    mark: Annotated[
        bool, typer.Option("--mark/--no-mark", help="Mark in the database what was exported.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write frozen rollouts to files: whole files only, the manifest last.

    The same command on the same folder goes on where it was stopped. What is left out stands in _manifest.json with its
    reason. While there is nothing to export, no folder is made. Exit code 1 when everything was left out, after which
    no folder stays either; when a run or prefix is not there; when a rollout is corrupt or unknown, changed since it
    was exported, or stays despite --retire.
    """
    from tokencustody.export import ExportOptions
    from tokencustody.export import Format as Formats
    from tokencustody.export import OnBreak as Breaking
    from tokencustody.export import SharedCalls as Sharing
    from tokencustody.export import Siblings as Answers
    from tokencustody.export import export as exported
    from tokencustody.terminal import interrupts
    from tokencustody.terminal.progress import progress
    from tokencustody.txn.asked import reach

    if retire and not mark:
        raise typer.BadParameter("--retire marks what it retires", param_hint="--no-mark")
    if format is not Format.PARQUET and rewards is not None:
        raise typer.BadParameter("rewards are joined to rows of parquet only", param_hint="--rewards")
    chosen = shared_calls, on_break, siblings
    if format is not Format.PARQUET and chosen != (SharedCalls.FIRST, OnBreak.SPLIT, Siblings.SETTLE):
        raise typer.BadParameter(
            "--shared-calls, --on-break and --siblings make rows of parquet only", param_hint="--format"
        )
    if format is Format.GYM and (rows_per_file or max_bytes):
        raise typer.BadParameter("Gym's files are one for each rollout", param_hint="--format")
    options = ExportOptions(
        format=Formats(format),
        run=run,
        rollout_ids=tuple(rollout) if rollout else None,
        prefix=prefix,
        before=_moment(before),
        unexported=unexported,
        include_incomplete=include_incomplete,
        shared_calls=Sharing(shared_calls),
        on_break=Breaking(on_break),
        siblings=Answers(siblings),
        **{
            name: value
            for name, value in {"rows_per_file": rows_per_file, "max_bytes": max_bytes}.items()
            if value is not None
        },
    )

    async def reached_and_exported() -> ExportReport:
        await reach(url)
        return await exported(url, out, options, rewards=rewards, mark=mark, retire=retire, watch=progress)

    report = interrupts.run(
        reached_and_exported(),
        notice="finished files stay; the same command goes on after them",
        at_once=lambda: "",
    )
    if json:
        print_json(_document(report))
    else:
        _print(report)
    for name in report.unknown[:_SHOWN]:
        typer.echo(printable(f"rollout {name} is not there, or not with what else was asked for"), err=True)
    if len(report.unknown) > _SHOWN:
        typer.echo(f"and {plural(len(report.unknown) - _SHOWN, 'more rollout')}; --json lists all", err=True)
    if not report.ok:
        raise typer.Exit(1)


def _moment(before: str | None) -> datetime | None:
    from tokencustody.terminal.ages import moment_of

    if before is None:
        return None
    try:
        datetime.fromisoformat(before.strip())
    except ValueError:
        raise typer.BadParameter(
            f"{before!r} is no date or time in ISO 8601; a duration would be another moment when the export goes on",
            param_hint="--before",
        ) from None
    return moment_of(before, "--before")


def _document(report: ExportReport) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        **asdict(report),
        "destination": str(report.destination),
        "left_out": dict(sorted(report.left_out.items())),
        "breaks": dict(sorted(report.breaks.items())),
        "ok": report.ok,
    }


def _print(report: ExportReport) -> None:
    from rich.table import Table

    from tokencustody.chains.reasons import remedy

    out = console(folds=True)
    state = "was finished before" if report.already_finished else "resumed" if report.resumed else "written"
    if report.export_id:
        out.print(literal(f"{report.destination}: {report.format}, {state} (export {report.export_id})"))
    elif report.all_left_out:
        out.print(literal(f"everything was left out: nothing was written to {report.destination}"))
    else:
        out.print(literal(f"nothing to export: nothing was written to {report.destination}"))
    table = Table("", "", box=None, show_header=False)
    table.columns[1].justify = "right"
    for name, count in (
        ("rollouts", report.rollouts),
        ("rows", report.rows),
        ("calls", report.calls),
        ("tokens", report.tokens),
        ("trained tokens", report.trained_tokens),
        ("files", report.files),
        ("bytes", report.bytes),
        ("marked", report.marked),
        ("retired", report.retired),
    ):
        table.add_row(name, f"{count:,}")
    for reason, count in sorted(report.breaks.items()):
        table.add_row(literal(f"new row: {reason}"), f"{count:,}")
    for reason, count in sorted(report.left_out.items()):
        table.add_row(literal(f"left out: {reason}"), f"{count:,}")
    out.print(table)
    for reason in sorted(report.left_out):
        out.print(literal(f"{reason}: {remedy(reason)}"))
    for left in report.listed[:_SHOWN]:
        call = f", call {left.model_call_id}" if left.model_call_id else ""
        detail = f": {left.detail}" if left.detail else ""
        out.print(
            literal(f"left out: rollout {left.rollout_id} of run {left.run}{call}: {left.reason}{detail}")
        )
    if len(report.listed) > _SHOWN:
        out.print(literal(f"and {len(report.listed) - _SHOWN:,} more; --json lists all"))
    if report.not_finite_log_probs:
        counted = plural(report.not_finite_log_probs, "trained token")
        out.print(
            literal(f"{counted} without a finite log probability (NaN or infinite): mask them in training")
        )
    if report.routes_left_out:
        counted = plural(report.routes_left_out, "call")
        out.print(
            literal(f"the routed experts of {counted} are too large for a row; --format calls holds them")
        )
    if report.rewards is not None:
        for name in ("rollouts_without_reward", "rewards_without_rollout", "repeated"):
            found = report.rewards[name]
            if found["count"]:
                out.print(literal(f"{name.replace('_', ' ')}: {found['count']:,} ({_some(found['first'])})"))
    for kept in report.kept[:_SHOWN]:
        detail = f": {kept.detail}" if kept.detail else ""
        out.print(literal(f"kept: rollout {kept.rollout_id} of run {kept.run}: {kept.why}{detail}"))
    if len(report.kept) > _SHOWN:
        out.print(literal(f"kept: {plural(len(report.kept) - _SHOWN, 'more rollout')}"))


def _some(rollouts: list[str]) -> str:
    return ", ".join(rollouts[:5]) + (", …" if len(rollouts) > 5 else "")
