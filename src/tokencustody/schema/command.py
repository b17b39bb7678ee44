"""`tokencustody db …`: the revisions of a database's schema."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, TypeVar

import typer

from tokencustody.terminal.printing import plural

Result = TypeVar("Result")
# What of a check an upgrade mends. Where it is the revision, further lines say which upgrade and when.
_MENDED = re.compile(r"(missing|unexpected): (view|function) |revision: none instead of ")

db = typer.Typer(help="Create, upgrade and check the tables of a database.", no_args_is_help=True)

Url = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="TOKENCUSTODY_URL",
        help="sqlite:///captures.db, a path, or postgresql://user@host/database",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


class Dialect(StrEnum):
    """The databases whose SQL can be written without a connection."""

    SQLITE = "sqlite"
    POSTGRESQL = "postgresql"


@db.command()
def upgrade(
    url: Url,
    revision: Annotated[str, typer.Option(help="The revision to bring the database to.")] = "head",
    before: Annotated[
        bool, typer.Option("--before", help="Only what this release must find; older workers go on.")
    ] = False,
    after: Annotated[
        bool, typer.Option("--after", help="The rest, once the last worker of an older release has ended.")
    ] = False,
) -> None:
    """Bring a database to the newest revision, in one transaction, or in two around the restart of its workers."""
    from tokencustody.schema import migrate

    if before + after + (revision != "head") > 1:
        raise typer.BadParameter("give one of --before, --after and --revision")
    part: migrate.Part | None = "before" if before else "after" if after else None
    was, now = _in_steps(lambda progress: migrate.upgrade(url, revision, progress=progress, part=part))
    _say_change(url, was, now)
    _say_what_is_missing(url)


@db.command()
def downgrade(
    url: Url,
    revision: Annotated[str, typer.Option(help="The revision to go back to; base drops every table.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Take a database back to an older revision. Drops what that one has no place for."""
    from tokencustody.schema import migrate

    shown = _shown(url)
    if not yes:
        typer.confirm(
            f"Downgrade {shown} to {revision} and lose what it has no place for?", abort=True, err=True
        )
    before, after = _in_steps(lambda progress: migrate.downgrade(url, revision, progress=progress))
    _say_change(url, before, after)


@db.command()
def current(url: Url, as_json: Json = False) -> None:
    """Print the revision that a database is on, what it lacks, and whether this library works with it meanwhile.

    Exit code 1 for a SQLite file that does not exist.
    """
    from tokencustody.schema import migrate

    found = migrate.standing(url)
    shown = _shown(url)
    if as_json:
        said = {"url": shown, "head": migrate.HEAD, **dataclasses.asdict(found)}
        typer.echo(json.dumps(said | {"works": not said.pop("refusal")}))
    else:
        typer.echo(f"{shown}: {found.revision or 'no tokencustody tables'} (this library: {migrate.HEAD})")
        _say_what_is_missing(url)


@db.command()
def check(url: Url, as_json: Json = False) -> None:
    """Compare a database with this library, without changing it. Exit code 1 if anything differs.

    Of another revision it also says what is missing, and whether this library works meanwhile; of PostgreSQL, whether
    commits wait for a synchronous standby.
    """
    from tokencustody.database import standby
    from tokencustody.database.url import parse_url
    from tokencustody.schema import migrate

    problems = migrate.check(url)
    standbys = standby.synchronous_standbys(parse_url(url))
    shown = _shown(url)
    if as_json:
        found = {"url": shown, "head": migrate.HEAD, "ok": not problems, "problems": problems}
        typer.echo(json.dumps(found | {"synchronous_standbys": standbys and dataclasses.asdict(standbys)}))
    elif problems:
        typer.echo(
            "\n".join([f"{shown} differs from this library:", *(f"  {problem}" for problem in problems)])
        )
        if all(_MENDED.match(problem) for problem in problems):
            typer.echo(f"`tokencustody db upgrade --url {shown}` mends this")
    else:
        typer.echo(f"{shown}: at {migrate.HEAD}, tables and wire schemas equal")
    if standbys is not None and not as_json:
        typer.echo(f"{shown}: {standbys}")
    if problems:
        raise typer.Exit(1)


@db.command()
def sql(
    url: Annotated[
        str | None, typer.Option("--url", envvar="TOKENCUSTODY_URL", help="A URL, for its dialect.")
    ] = None,
    dialect: Annotated[Dialect | None, typer.Option(help="The dialect, without a URL.")] = None,
    revision: Annotated[str, typer.Option(help="From which revision to which.")] = "base:head",
) -> None:
    """Print the SQL that an upgrade would run, without connecting to anything."""
    from tokencustody.schema import migrate

    target = dialect.value if dialect is not None else url
    if target is None:
        raise typer.BadParameter("give --dialect or --url")
    typer.echo(_known(lambda: migrate.sql(target, revision)), nl=False)


def _in_steps(work: Callable[[Callable[[str], None]], Result]) -> Result:
    """Print each step of a migration as it is made, and that none is kept when one of them fails."""
    made: list[str] = []

    def progress(step: str) -> None:
        made.append(step)
        typer.echo(step)

    try:
        return _known(lambda: work(progress))
    except BaseException:
        if made:
            typer.echo(
                f"{plural(len(made), 'step')} above not kept, for a migration happens whole or not at all; "
                "`tokencustody db current` tells the revision",
                err=True,
            )
        raise


def _known(work: Callable[[], Result]) -> Result:
    from tokencustody.schema import migrate

    try:
        return work()
    except migrate.UnknownRevisionError as exc:
        raise typer.BadParameter(str(exc), param_hint="--revision") from None


def _say_change(url: str, before: str | None, after: str | None) -> None:
    shown = _shown(url)
    if before == after:
        typer.echo(f"{shown}: already at {after or 'base'}")
    else:
        typer.echo(f"{shown}: {before or 'base'} → {after or 'base'}")


def _say_what_is_missing(url: str) -> None:
    from tokencustody.schema import migrate

    for line in migrate.standing(url).lines(_shown(url)):
        typer.echo(line)


def _shown(url: str) -> str:
    from tokencustody.database.url import parse_url

    return parse_url(url).display
