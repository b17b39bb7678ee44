"""The command line: one file per command group."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from tokencustody.cli.conformance import conformance
from tokencustody.cli.db import db
from tokencustody.cli.demo import demo
from tokencustody.cli.rollouts import rollouts, show
from tokencustody.errors import CorruptEntryError, InvalidRecordError, SchemaMismatchError, StoreUnavailableError

app = typer.Typer(
    name="tokencustody",
    help="Transactional custody of the training tokens of reinforcement-learning rollouts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(db, name="db")
app.command()(rollouts)
app.command()(show)
app.command()(conformance)
app.command()(demo)

# What a person can do something about; anything else is a fault of ours and keeps its traceback.
_EXPECTED = (CorruptEntryError, InvalidRecordError, SchemaMismatchError, StoreUnavailableError)


def main() -> None:
    """Run the command line; an expected error is one line on stderr and exit code 1."""
    try:
        app()
    except _EXPECTED as exc:
        Console(stderr=True, soft_wrap=True).print("error:", style="bold red", end=" ")
        print(exc, file=sys.stderr)  # noqa: T201 - verbatim: Rich would read brackets as markup
        raise SystemExit(1) from None
