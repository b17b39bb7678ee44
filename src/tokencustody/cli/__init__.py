"""The command line: it puts the commands together, each of which lies in the room of what it runs.

The module of a command holds its signature, which `--help` needs, and imports what does the work when it runs.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from tokencustody.backup.command import backup
from tokencustody.conformance.command import conformance
from tokencustody.control.command import serve
from tokencustody.copying.command import copy
from tokencustody.demo.command import demo
from tokencustody.export.command import export
from tokencustody.gym_import.command import import_
from tokencustody.overview.command import rollouts, show
from tokencustody.overview.runs_command import runs
from tokencustody.retention.command import delete, gc, retire
from tokencustody.roles.command import grant, revoke, roles
from tokencustody.schema.command import db
from tokencustody.spill.command import spill
from tokencustody.sql_prompt.command import sql
from tokencustody.terminal.output import OutputError, checked_output
from tokencustody.terminal.printing import is_expected, print_error
from tokencustody.terminal.waiting import told
from tokencustody.verify.command import verify

app = typer.Typer(
    name="tokencustody",
    help="Transactional custody of the training tokens of reinforcement-learning rollouts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tokencustody {version('tokencustody')}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself."""


db.command()(grant)
db.command()(revoke)
db.command()(roles)
app.add_typer(db, name="db")
app.add_typer(spill, name="spill")
app.command()(runs)
app.command()(rollouts)
app.command()(show)
app.command()(verify)
app.command()(sql)
app.command()(backup)
app.command()(retire)
app.command()(delete)
app.command()(gc)
app.command()(export)
app.command()(serve)
app.command("import")(import_)
app.command()(copy)
app.command()(conformance)
app.command()(demo)


def main() -> None:
    """Run the command line; an expected error is one line on stderr and exit code 1."""
    try:
        with told(), checked_output():
            app()
    except Exception as exc:
        if not isinstance(exc, OutputError) and not is_expected(exc):
            raise
        print_error(exc)
        raise SystemExit(1) from None
