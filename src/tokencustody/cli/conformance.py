"""`tokencustody conformance`: the kit against the SQL stores of one database."""

from __future__ import annotations

import asyncio
import json as json_module
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tokencustody.conformance import (
    Check,
    CheckStatus,
    ConformanceReport,
    check_conformance,
    registered_checks,
)

_STYLES = {CheckStatus.PASSED: "green", CheckStatus.FAILED: "bold red", CheckStatus.NOT_APPLICABLE: "dim"}


def conformance(
    url: Annotated[str, typer.Option(help="Database URL or SQLite path. A new SQLite file is created.")],
    run: Annotated[
        str | None,
        typer.Option(help="Namespace to write to; a second one is NAME-other. Default: a fresh one."),
    ] = None,
    check: Annotated[
        list[str] | None, typer.Option(help="Run this check only; may be given several times.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check that the stores of a database keep every promise; what the checks wrote is deleted afterwards.

    Exit code 1 when a check failed or none was run.
    """
    checks = registered_checks()
    names = [each.name for each in checks]
    unknown = sorted(set(check or ()) - set(names))
    if unknown:
        raise typer.BadParameter(f"no check is named {', '.join(unknown)}; there are {', '.join(names)}")
    console = Console()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    progress.disable = not progress.console.is_terminal
    with progress:
        task = progress.add_task("conformance", total=len(set(check or names)))
        finished = count()

        def on_start(started: Check) -> None:
            progress.update(task, description=started.name, completed=next(finished))

        namespace = run or f"conformance-{secrets.token_hex(4)}"
        with _without_warnings():
            report = asyncio.run(_run(url, namespace, check, on_start))
    if json:
        typer.echo(json_module.dumps(report.as_dict(), indent=2))
    else:
        _print(console, report)
    if not report.ok:
        raise typer.Exit(1)


async def _run(
    url: str, run: str, only: list[str] | None, on_start: Callable[[Check], None]
) -> ConformanceReport:
    from tokencustody.store import SqlLineageStore, SqlStagingStore, SqlTokenSink, SqlTokenSource

    other = f"{run}-other"
    sources = [SqlTokenSource(url=url, run=namespace) for namespace in (run, other)]
    try:
        # Before the first check: an unreachable or outdated database is one error, not one per check.
        await sources[0].delete(["conformance-reachable"])
        report = await check_conformance(
            partial(SqlTokenSink, url=url, run=run),
            partial(SqlTokenSource, url=url, run=run),
            partial(SqlLineageStore, url=url, run=run),
            other_namespace=(
                partial(SqlTokenSink, url=url, run=other),
                partial(SqlTokenSource, url=url, run=other),
            ),
            ledger_factory=partial(SqlLineageStore, url=url, run=run),
            staging_factory=partial(SqlStagingStore, url=url, run=run),
            only=only,
            on_start=on_start,
        )
        for source in sources:
            await source.delete(report.rollout_ids)
        await asyncio.to_thread(_delete_staged, url, run, report.staging_keys)
    finally:
        for source in sources:
            await source.close()
    return report


def _delete_staged(url: str, run: str, staging_keys: Sequence[str]) -> None:
    from tokencustody.store import SqlStagingStore

    with SqlStagingStore(url=url, run=run) as store:
        store.delete(staging_keys)


@contextmanager
def _without_warnings() -> Iterator[None]:
    # The checks write to retired rollouts on purpose, and the ledger warns of each row that it discards.
    logger = logging.getLogger("tokencustody.store")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _print(console: Console, report: ConformanceReport) -> None:
    table = Table("check", "result", "time", "detail")
    # The name is what a person looks up or passes to --check: never cut short.
    table.columns[0].min_width = max((len(result.name) for result in report.results), default=0)
    table.columns[2].justify = "right"
    for result in report.results:
        style = _STYLES[result.status]
        seconds = "" if result.status == CheckStatus.NOT_APPLICABLE else f"{result.seconds:.2f} s"
        table.add_row(result.name, f"[{style}]{result.status}[/]", seconds, escape(result.detail))
    console.print(table)
    for capability in report.capabilities:
        mark = "[green]yes[/]" if capability.present else "[dim]no[/]"
        console.print(f"  {capability.name}: {mark} ({escape(capability.detected)})", soft_wrap=True)
    verdict, *_ = report.summary().splitlines()
    console.print(f"[{'green' if report.ok else 'bold red'}]{verdict}[/]")
