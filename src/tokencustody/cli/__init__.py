"""The command line: it puts the commands together, each of which lies in the room of what it runs.

The module of a command holds its signature, which its `--help` needs, and imports what does the work when it runs.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from tokencustody.terminal.output import OutputError, checked_output
from tokencustody.terminal.printing import is_expected, print_error
from tokencustody.terminal.waiting import told

# In the order of the help. The room of roles is the last that adds commands to `db`.
_MODULES = {
    "runs": "overview.runs_command",
    "rollouts": "overview.command",
    "show": "overview.command",
    "verify": "verify.command",
    "sql": "sql_prompt.command",
    "backup": "backup.command",
    "retire": "retention.command",
    "delete": "retention.command",
    "gc": "retention.command",
    "export": "export.command",
    "serve": "control.command",
    "import": "gym_import.command",
    "copy": "copying.command",
    "conformance": "conformance.command",
    "demo": "demo.command",
    "db": "roles.command",
    "spill": "spill.command",
}


class _Commands(TyperGroup):
    """The commands, of which only those are imported and built that are asked for."""

    def __init__(self, **attrs: Any) -> None:
        # The names alone say what there is, and what somebody may have meant.
        super().__init__(**attrs | {"commands": dict.fromkeys(_MODULES)})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _command(cmd_name) if cmd_name in _MODULES else None


@cache
def _command(name: str) -> Any:
    found = getattr(import_module(f"tokencustody.{_MODULES[name]}"), "import_" if name == "import" else name)
    alone = typer.Typer()
    if isinstance(found, typer.Typer):
        alone.add_typer(found, name=name)
    else:
        alone.command(name)(found)
    return get_group(alone).commands[name]


app = typer.Typer(
    name="tokencustody",
    help="Transactional custody of the training tokens of reinforcement-learning rollouts.",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tokencustody {version('tokencustody')}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself."""


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
