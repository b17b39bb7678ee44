"""`tokencustody runs`: what each run of a database amounts to."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from tokencustody.schema.command import Url
from tokencustody.terminal.printing import as_json, console, moment, plural, print_json, printable

if TYPE_CHECKING:
    from rich.table import Table

    from tokencustody.overview.runs import RunSummary

# It counts every row once.
DEADLINE = 60.0


def runs(
    url: Url,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: the runs, and the totals of all.")
    ] = False,
) -> None:
    """List the runs: rollouts by state, incomplete, exported, calls, tokens, bytes, ledger, staged calls, times.

    Runs that have only staged calls are among them. Changes nothing.
    """
    import asyncio

    from tokencustody.overview.runs import total

    found = asyncio.run(_read(url))
    if json:
        totals = as_json(total(found))
        del totals["run"]
        print_json({"runs": [as_json(run) for run in found], "totals": totals})
        return
    out = console(folds=True)
    if found:
        out.print(_table([*found, total(found)] if len(found) > 1 else found, whole=not out.is_terminal))
    out.print(plural(len(found), "run") if found else "no run")


async def _read(url: str) -> list[RunSummary]:
    from tokencustody.database.url import parse_url
    from tokencustody.overview.runs import summarize_runs
    from tokencustody.schema.opening import CaptureDatabase
    from tokencustody.txn.asked import reach

    await reach(url)
    database = CaptureDatabase(parse_url(url), deadline=DEADLINE, read_only=True)
    try:
        return await summarize_runs(database)
    finally:
        await database.close()


def _table(found: list[RunSummary], *, whole: bool) -> Table:
    """Return one line for each run; unless `whole`, without columns that would say nothing about any of them."""
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    from tokencustody.overview.runs import RunSummary

    def said(name: str, run: RunSummary) -> str:
        match getattr(run, name):
            case datetime() as at:
                return moment(at) if whole else f"{at.astimezone(UTC):%m-%d %H:%M}"
            case None:
                return "?" if name == "stored_bytes" else ""
            case int() as number:
                return decimal(number) if name == "stored_bytes" else f"{number:,}"
            case text:
                return printable(text) or "all runs"

    columns = {name: [said(name, run) for run in found] for name in RunSummary.__dataclass_fields__}
    if not whole:
        columns = {name: cells for name, cells in columns.items() if set(cells) - {"0", ""}}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        heading = name.removesuffix("_tokens").removesuffix("_bytes").replace("_", " ")
        is_figure = name not in ("run", "first_opened", "last_activity")
        # The names give way where a terminal is too narrow; nothing is ever cut.
        table.add_column(
            heading, justify="right" if is_figure else "left", overflow="fold", no_wrap=name != "run"
        )
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, row))
    return table
