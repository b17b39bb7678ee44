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
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tokencustody.schema.command import Url
from tokencustody.terminal import interrupts
from tokencustody.terminal.printing import console, printable

if TYPE_CHECKING:
    from tokencustody.conformance import Check, ConformanceReport, Written
    from tokencustody.store import SqlTokenSource

DELETE_SECONDS = 60.0
_ROLLOUT_ID = "conformance-rollout"
_STYLES = {"passed": "green", "failed": "bold red", "not applicable": "dim"}


def conformance(
    url: Url,
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

    A new SQLite file is created. Exit code 1 when a check failed or none was run, or when what was written could not
    be deleted.
    """
    from tokencustody.conformance import Written, registered_checks

    checks = registered_checks()
    names = [each.name for each in checks]
    unknown = sorted(set(check or ()) - set(names))
    if unknown:
        raise typer.BadParameter(f"no check is named {', '.join(unknown)}; there are {', '.join(names)}")
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

        namespace, written = run or f"conformance-{secrets.token_hex(4)}", Written()
        with _without_warnings():
            report, deleted = interrupts.run(
                _run(url, namespace, check, on_start, written),
                notice="deleting what the checks wrote; Ctrl-C again leaves it there",
                at_once=lambda: _left(url, namespace) if written.rollout_ids else "",
            )
    if json:
        typer.echo(json_module.dumps(report.as_dict(), indent=2))
    else:
        _print(console(folds=True), report)
    if not (report.ok and deleted):
        raise typer.Exit(1)


async def _run(
    url: str, run: str, only: list[str] | None, on_start: Callable[[Check], None], written: Written
) -> tuple[ConformanceReport, bool]:
    """Return the report, and whether what the checks wrote is deleted."""
    from tokencustody.conformance import check_conformance
    from tokencustody.store import SqlLineageStore, SqlStagingStore, SqlTokenSink, SqlTokenSource

    other = f"{run}-other"
    sources = [SqlTokenSource(url=url, run=namespace) for namespace in (run, other)]
    try:
        # Before the first check: a database that is unreachable, outdated or not this user's is one error, not one per
        # check.
        await _reach_as_owner(url, run)
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
                rollout_id=_ROLLOUT_ID,
                only=only,
                on_start=on_start,
                written=written,
            )
        finally:
            deleted = await _delete(url, run, sources, written)
    finally:
        for source in sources:
            await source.close()
    return report, deleted


async def _reach_as_owner(url: str, run: str) -> None:
    """Delete a rollout that is not there, which PostgreSQL denies to whoever may not delete what the checks write."""
    from tokencustody.database.url import parse_url
    from tokencustody.schema.opening import CaptureDatabase
    from tokencustody.store.removal import delete_txn
    from tokencustody.txn.fence import RolloutKey

    database = CaptureDatabase(parse_url(url), pool_size=1)
    try:
        await database.write(lambda connection: delete_txn(connection, RolloutKey(run, _ROLLOUT_ID)))
    finally:
        await database.close()


async def _delete(url: str, run: str, sources: Sequence[SqlTokenSource], written: Written) -> bool:
    """Delete what the checks wrote, or say what is left and return False."""
    try:
        async with asyncio.timeout(DELETE_SECONDS):
            for source in sources:
                await source.delete(written.rollout_ids)
            await asyncio.to_thread(_delete_staged, url, run, written.staging_keys)
    except (Exception, asyncio.CancelledError) as exc:
        why = f"not finished after {DELETE_SECONDS:g} s" if isinstance(exc, TimeoutError) else str(exc)
        if why:
            typer.echo(f"error: {printable(why)}", err=True)
        typer.echo(printable(_left(url, run)), err=True)
        if not isinstance(exc, Exception):
            raise
        return False
    return True


def _delete_staged(url: str, run: str, staging_keys: Sequence[str]) -> None:
    from tokencustody.store import SqlStagingStore

    with SqlStagingStore(url=url, run=run, deadline=DELETE_SECONDS) as store:
        store.delete(staging_keys)


def _left(url: str, run: str) -> str:
    """Return what to say when the checks' rows stay behind."""
    from tokencustody.database.url import parse_url
    from tokencustody.schema.tables import metadata

    # What refers to another table first. Ids are compared in lower case, for a check writes some in upper case.
    statements = " ".join(
        f"DELETE FROM {table.name} WHERE run IN ('{run}', '{run}-other')"  # noqa: S608 - to be read, and ids have no quote
        f" AND lower(rollout_id) LIKE '{_ROLLOUT_ID}-%';"
        for table in reversed(metadata.sorted_tables)
        if "run" in table.c
    )
    return (
        f"What the checks wrote is left in the runs {run} and {run}-other of {parse_url(url).display}. "
        f"To remove it: {statements}"
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
