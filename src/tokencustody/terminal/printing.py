"""How the commands print what they read: text of the database is shown, never obeyed."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# Wider than any line: nothing is folded or cut.
_UNFOLDED = 1_000_000


def console(*, folds: bool) -> Console:
    """Return a console for standard output that folds lines only where `folds`, and never in a pipe."""
    from rich.console import Console

    found = Console(highlight=False, markup=False, emoji=False)
    if not (folds and found.is_terminal):
        found.width = _UNFOLDED
    return found


def printable(text: str) -> str:
    """Return `text` with whatever a terminal would not show as itself, line breaks included, as escapes."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def literal(text: str, style: str = "") -> Text:
    """Return text of the database for Rich, safe to show."""
    from rich.text import Text

    return Text(printable(text), style=style)


def moment(at: datetime | None, timespec: str = "seconds") -> str:
    """Return a time in UTC, or nothing for None."""
    return "" if at is None else at.astimezone(UTC).isoformat(" ", timespec).replace("+00:00", "Z")


def print_error(exc: Exception) -> None:
    """Print an expected error as one line on standard error; one that PostgreSQL denied names the role needed."""
    from rich.console import Console

    from tokencustody.terminal.needs import denied

    Console(stderr=True).print("error:", style="bold red", end=" ")
    print(printable(denied(exc) or str(exc)), file=sys.stderr)  # noqa: T201 - Rich would read brackets as markup


def program() -> str:
    """Return how a person starts this program in the shell that it was started from."""
    script = Path(sys.executable).with_name("tokencustody")
    if shutil.which("tokencustody") == str(script):
        return "tokencustody"
    if not script.exists():
        return f"{shlex.quote(sys.executable)} -m tokencustody"
    here = Path.cwd()
    # In a folder of its own, or the shell would look for it on the path.
    is_below = here != script.parent and script.is_relative_to(here)
    return shlex.quote(str(script.relative_to(here) if is_below else script))


def plural(count: int, noun: str) -> str:
    """Return the count with its noun, which takes an s."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def as_json(found: Any) -> dict[str, Any]:
    """Return a dataclass as plain data, times as ISO 8601."""
    return {name: _plain(value) for name, value in asdict(found).items()}


def print_json(document: Any) -> None:
    """Print one JSON document, in ASCII, so that it too cannot steer a terminal."""
    typer.echo(json.dumps(document, indent=2))


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def is_expected(exc: Exception) -> bool:
    """Return whether a person can do something about it; anything else is a fault of ours and keeps its traceback."""
    from tokencustody import errors

    return isinstance(
        exc,
        errors.BackupError
        | errors.CorruptEntryError
        | errors.DurabilityError
        | errors.InvalidRecordError
        | errors.RoleError
        | errors.SchemaMismatchError
        | errors.StoreUnavailableError
        | errors.ExportError
        | errors.RolloutNotFoundError,
    )
