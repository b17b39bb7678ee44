"""`tokencustody db grant`, `db revoke` and `db roles`: who may do what with a PostgreSQL database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tokencustody.schema.command import Json, Url, db
from tokencustody.states import Role
from tokencustody.terminal.printing import as_json, console, literal, print_json, printable

if TYPE_CHECKING:
    from tokencustody.roles.catalogue import Granted
    from tokencustody.roles.granting import Change

Name = Annotated[str, typer.Argument(metavar="NAME", help="A role of the server, such as a login.")]
Print = Annotated[bool, typer.Option("--print", help="Print the SQL, and change nothing.")]


@db.command()
def grant(
    name: Name,
    role: Annotated[Role, typer.Option(help="What NAME is to be.")],
    url: Url,
    run: Annotated[
        list[str] | None,
        typer.Option(help="Only this run, besides those it has. Repeatable; a worker needs one."),
    ] = None,
    only_print: Print = False,
    force: Annotated[
        bool, typer.Option("--force", help="Even if roles with privileges granted by hand then see no rows.")
    ] = False,
    as_document: Json = False,
) -> None:
    """Let NAME write within its runs (worker), freeze, read and retire (trainer), or read all but tokens (auditor).

    Repeat it after `db upgrade`. Needs the owner of the tables, and holds up writers for a moment.
    """
    from tokencustody.roles.granting import grant

    if role is Role.WORKER and not run:
        raise typer.BadParameter("a worker writes within its runs: name one", param_hint="--run")
    if role is Role.AUDITOR and run:
        raise typer.BadParameter("an auditor reads every run", param_hint="--run")
    change = grant(url, role, name, _checked(run), force=force, dry_run=only_print)
    _say(change, only_print=only_print, as_document=as_document)


@db.command()
def revoke(
    name: Name,
    url: Url,
    run: Annotated[
        list[str] | None, typer.Option(help="Only this run; NAME keeps its others. Repeatable.")
    ] = None,
    only_print: Print = False,
    as_document: Json = False,
) -> None:
    """Take what NAME has away. Its sessions meet that with their next statement.

    Needs the owner of the tables, and holds up writers for a moment.
    """
    from tokencustody.roles.granting import revoke

    change = revoke(url, name, _checked(run), dry_run=only_print)
    _say(change, only_print=only_print, as_document=as_document)


@db.command()
def roles(url: Url, as_document: Json = False) -> None:
    """List who has what, and what is not as it was granted. Exit code 1 if anything is not."""
    from rich.table import Table

    from tokencustody.roles.granting import roles

    found = roles(url)
    problems = any(granted.problems for granted in found.granted)
    if as_document:
        print_json(as_json(found))
    else:
        out = console(folds=True)
        security = "on" if found.row_security else "off"
        out.print(literal(f"{found.url}: owned by {found.owner}, row security {security}"))
        if found.granted or found.others:
            table = Table(box=None, pad_edge=False)
            for title in ("name", "role", "runs", "state"):
                table.add_column(title, overflow="fold")
            for granted in found.granted:
                state = "; ".join(granted.problems) or "as granted"
                table.add_row(*map(literal, (granted.name, granted.role, _runs(granted), state)))
            for other in found.others:
                table.add_row(
                    literal(other), literal("-"), literal("-"), literal("privileges granted by hand")
                )
            out.print(table)
        else:
            out.print("No roles were granted.")
    if problems:
        raise typer.Exit(1)


def _checked(runs: list[str] | None) -> list[str]:
    from tokencustody.errors import InvalidRecordError
    from tokencustody.ids import check_rollout_id

    try:
        return [check_rollout_id(run, "run") for run in runs or ()]
    except InvalidRecordError as exc:
        raise typer.BadParameter(str(exc), param_hint="--run") from None


def _say(change: Change, *, only_print: bool, as_document: bool) -> None:
    if as_document:
        print_json(as_json(change))
        return
    for note in change.notes:
        typer.echo(f"note: {printable(note)}", err=True)
    if only_print and change.statements:
        typer.echo("\n".join(["BEGIN;", *(f"{statement};" for statement in change.statements), "COMMIT;"]))
    elif not change.statements:
        typer.echo(printable(f"{change.url}: {change.name} has nothing to revoke"))
    elif change.granted is None:
        typer.echo(printable(f"{change.url}: {change.name} has no role any more"))
    else:
        typer.echo(
            printable(f"{change.url}: {change.name} is {change.granted.role} of {_runs(change.granted)}")
        )


def _runs(granted: Granted) -> str:
    return "all runs" if granted.runs is None else ", ".join(granted.runs)
