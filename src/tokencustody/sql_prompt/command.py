"""`tokencustody sql`: a prompt for a person's own questions, which only reads."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from tokencustody.schema.command import Url
from tokencustody.sql_prompt.output import Expanded, Show, Table, show_csv, show_json


def sql(
    url: Url,
    query: Annotated[
        str | None,
        typer.Argument(help="Statements to run, separated by semicolons. Default: those on standard input."),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Run the statements and commands of a file, - for standard input, up to the first that fails.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list of one object for each row.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="In the table, show all rows and whole arrays.")
    ] = False,
    expanded: Annotated[
        bool,
        typer.Option(
            "--expanded",
            "-x",
            help="Show each row as lines of names and values, as a table wider than the terminal always is.",
        ),
    ] = False,
) -> None:
    """Ask a database in SQL, at a prompt or from a script. Nothing that is asked can change it.

    The views named audit_ are described in docs/audit.md. At the prompt, \\? tells what there is.
    """
    from tokencustody.database.url import parse_url
    from tokencustody.sql_prompt.queries import open_queries
    from tokencustody.sql_prompt.session import Session, prompt

    if as_json and as_csv:
        raise typer.BadParameter("give one of --json and --csv")
    if query is not None and file is not None:
        raise typer.BadParameter("give statements or a file of them, not both")
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # Ctrl-C cancels a query instead of ending the program.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    table = Table(full=full, expanded=Expanded.ON if expanded else Expanded.AUTO)
    show: Show = show_json if as_json else show_csv if as_csv else table
    script = _read(file) if file is not None and file != "-" else query
    queries = open_queries(parse_url(url))
    session = Session(queries, show)
    try:
        if script is None and file is None and sys.stdin.isatty():
            typer.echo("Only reading. \\? tells what there is.")
            if (warning := queries.warning()) is not None:
                typer.echo(f"warning: {warning}", err=True)
            prompt(session)
            return
        where = file if file not in (None, "-") else ""
        for line in (sys.stdin.read() if script is None else script).split("\n"):
            if not session.feed(line, where=where or ""):
                raise typer.Exit(1)
            if session.ended:
                return
        if not session.finish(where=where or ""):
            raise typer.Exit(1)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None
    finally:
        queries.close()


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8-sig")
    except OSError as exc:
        raise typer.BadParameter(f"{file} cannot be read: {exc.strerror}") from None
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{file} is not text in UTF-8") from None
