"""The command line: one file per command group.

The files hold signatures, which `--help` needs, and import what does the work when a command runs.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from tokencustody.cli.backup import backup
from tokencustody.cli.conformance import conformance
from tokencustody.cli.copy import copy
from tokencustody.cli.db import db
from tokencustody.cli.demo import demo
from tokencustody.cli.export import export
from tokencustody.cli.imports import import_
from tokencustody.cli.output import OutputError, checked_output
from tokencustody.cli.printing import print_error
from tokencustody.cli.retention import delete, gc, retire
from tokencustody.cli.roles import grant, revoke, roles
from tokencustody.cli.rollouts import rollouts, show
from tokencustody.cli.runs import runs
from tokencustody.cli.serve import serve
from tokencustody.cli.spill import spill
from tokencustody.cli.sql import sql
from tokencustody.cli.verify import verify
from tokencustody.cli.waiting import told

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


def is_expected(exc: Exception) -> bool:
    """Return whether a person can do something about it; anything else is a fault of ours and keeps its traceback."""
    from tokencustody import errors
    from tokencustody.audit import ExportError, RolloutNotFoundError

    return isinstance(
        exc,
        errors.BackupError
        | errors.CorruptEntryError
        | errors.DurabilityError
        | errors.InvalidRecordError
        | errors.RoleError
        | errors.SchemaMismatchError
        | errors.StoreUnavailableError
        | ExportError
        | RolloutNotFoundError,
    )
