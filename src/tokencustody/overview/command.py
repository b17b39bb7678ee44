"""`tokencustody rollouts` and `tokencustody show`: a look at what a database holds, which changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tokencustody.schema.command import Url
from tokencustody.states import FenceState
from tokencustody.terminal.printing import as_json, console, print_json

if TYPE_CHECKING:
    from tokencustody.overview.summaries import RolloutDetail, RolloutPage
    from tokencustody.txn.selection import RolloutFilter

DEADLINE = 10.0
_ROWS_FOR_A_PERSON = 50


def rollouts(
    url: Url,
    run: Annotated[str | None, typer.Option(help="Only this run; without it, all runs.")] = None,
    state: Annotated[FenceState | None, typer.Option(help="Only rollouts in this state.")] = None,
    incomplete: Annotated[
        bool | None, typer.Option("--incomplete/--complete", help="Only rollouts with this verdict.")
    ] = None,
    prefix: Annotated[str | None, typer.Option(help="Only rollouts whose id begins with this.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help=f"The newest N. Default: {_ROWS_FOR_A_PERSON} in the table, all in JSON."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON list with an object for each rollout.")
    ] = False,
) -> None:
    """List rollouts, newest first: state, calls, tokens, calls in the ledger, version, why incomplete.

    Changes nothing.
    """
    import asyncio

    from tokencustody.overview.rollout_views import footer, narrow_table, rollouts_table, whys
    from tokencustody.txn.selection import RolloutFilter

    wanted = RolloutFilter(run=run, state=state, incomplete=incomplete, prefix=prefix)
    if limit is None and not json:
        limit = _ROWS_FOR_A_PERSON
    page = asyncio.run(_read_rollouts(url, wanted, limit))
    if json:
        print_json([as_json(rollout) for rollout in page.rollouts])
        return
    out = console(folds=True)
    if page.rollouts and out.is_terminal:
        out.print(narrow_table(page.rollouts), whys(page.rollouts), sep="\n")
    elif page.rollouts:
        out.print(rollouts_table(page.rollouts))
    out.print(footer(page))


def show(
    rollout: Annotated[str, typer.Argument(help="The rollout's id.")],
    url: Url,
    run: Annotated[
        str | None, typer.Option(help="Its run; needed only when several runs have the id.")
    ] = None,
    json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object: summary, calls, intents, versions, and what the ledger holds.",
        ),
    ] = False,
) -> None:
    """Show one rollout: its calls as a tree by parent, its ledger, and what made each version. Changes nothing."""
    import asyncio

    from tokencustody.overview.rollout_views import shown

    detail = asyncio.run(_read_rollout(url, rollout, run))
    if json:
        print_json(as_json(detail))
        return
    console(folds=False).print(*shown(detail), sep="\n")


async def _read_rollouts(url: str, wanted: RolloutFilter, limit: int | None) -> RolloutPage:
    from tokencustody.overview.reading import RolloutReader

    async with RolloutReader(url, deadline=DEADLINE) as reader:
        return await reader.rollouts(wanted, limit=limit)


async def _read_rollout(url: str, rollout_id: str, run: str | None) -> RolloutDetail:
    from tokencustody.overview.reading import RolloutReader

    async with RolloutReader(url, deadline=DEADLINE) as reader:
        return await reader.rollout(rollout_id, run)
