"""`tokencustody conformance`: the kit against the SQL stores of one database."""

from __future__ import annotations

import json as json_module
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tokencustody.schema.command import Url
from tokencustody.terminal import interrupts
from tokencustody.terminal.printing import console, printable
from tokencustody.terminal.progress import progress

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from tokencustody.conformance import Check, ConformanceReport

DELETE_SECONDS = 60.0
_STYLES = {"passed": "green", "failed": "bold red", "not applicable": "dim"}


def conformance(
    url: Url,
    check: Annotated[
        list[str] | None, typer.Option(help="Run this check only; may be given several times.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check that the stores of a database keep every promise; what the checks wrote is deleted afterwards.

    A new SQLite file is created. Exit code 1 when a check failed or none was run, or when what was written could not
    be deleted.
    """
    from tokencustody.conformance import registered_checks

    checks = registered_checks()
    names = [each.name for each in checks]
    unknown = sorted(set(check or ()) - set(names))
    if unknown:
        raise typer.BadParameter(f"no check is named {', '.join(unknown)}; there are {', '.join(names)}")
    with progress("conformance", len(set(check or names))) as done, _without_warnings():
        # Of its own, so that it can be deleted whole.
        run = f"conformance-{secrets.token_hex(4)}"
        report, deleted = interrupts.run(
            _run(url, run, check, lambda _: done(1)),
            notice="deleting what the checks wrote; Ctrl-C again leaves it there",
            at_once=lambda: _left(url, run),
        )
    if json:
        typer.echo(json_module.dumps(report.as_dict(), indent=2))
    else:
        _print(console(folds=True), report)
    if not (report.ok and deleted):
        raise typer.Exit(1)


async def _run(
    url: str, run: str, only: list[str] | None, on_start: Callable[[Check], None]
) -> tuple[ConformanceReport, bool]:
    """Return the report, and whether what the checks wrote is deleted."""
    from tokencustody.conformance import check_conformance
    from tokencustody.store import SqlLineageStore, SqlStagingStore, SqlTokenSink, SqlTokenSource

    other = _other(run)
    # Before the first check: a database that is unreachable, outdated or not this user's is one error, not many.
    await _delete_runs(url, run)
    try:
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
    finally:
        deleted = await _delete(url, run)
    return report, deleted


def _other(run: str) -> str:
    return f"{run}-other"


async def _delete(url: str, run: str) -> bool:
    """Delete what the checks wrote, or say what is left and return False."""
    import asyncio

    try:
        await _delete_runs(url, run)
    except (Exception, asyncio.CancelledError) as exc:
        if why := str(exc):
            typer.echo(f"error: {printable(why)}", err=True)
        typer.echo(printable(_left(url, run)), err=True)
        if not isinstance(exc, Exception):
            raise
        return False
    return True


async def _delete_runs(url: str, run: str) -> None:
    """Delete every row of the two runs of the checks, which PostgreSQL denies to all but the owner of the tables."""
    from tokencustody.database.url import parse_url
    from tokencustody.schema.opening import CaptureDatabase

    def delete(connection: Connection) -> None:
        for statement in _deleting(run):
            connection.exec_driver_sql(statement)

    database = CaptureDatabase(parse_url(url), pool_size=1, deadline=DELETE_SECONDS)
    try:
        await database.write(delete)
    finally:
        await database.close()


def _deleting(run: str) -> list[str]:
    from tokencustody.schema.tables import OF_ROLLOUTS

    return [
        f"DELETE FROM {table.name} WHERE run IN ('{run}', '{_other(run)}')"  # noqa: S608 - the name is ours
        # What refers to another table first.
        for table in reversed(OF_ROLLOUTS)
    ]


def _left(url: str, run: str) -> str:
    """Return what to say when the checks' rows stay behind."""
    from tokencustody.database.url import parse_url

    return (
        f"What the checks wrote is left in the runs {run} and {_other(run)} of {parse_url(url).display}. "
        f"To remove it: {'; '.join(_deleting(run))};"
    )


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


def _print(out: Console, report: ConformanceReport) -> None:
    table = Table("check", "result", "time", "detail")
    # The name is what a person looks up or passes to --check: never cut short.
    table.columns[0].min_width = max((len(result.name) for result in report.results), default=0)
    table.columns[2].justify = "right"
    for result in report.results:
        seconds = "" if result.status == "not applicable" else f"{result.seconds:.2f} s"
        table.add_row(result.name, Text(result.status, _STYLES[result.status]), seconds, result.detail)
    out.print(table)
    for capability in report.capabilities:
        mark = Text("yes", "green") if capability.present else Text("no", "dim")
        out.print(Text.assemble(f"  {capability.name}: ", mark, f" ({capability.detected})"), soft_wrap=True)
    verdict, *_ = report.summary().splitlines()
    out.print(Text(verdict, "green" if report.ok else "bold red"))
