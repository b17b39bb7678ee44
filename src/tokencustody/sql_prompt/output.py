"""How `tokencustody sql` shows what a statement returns, alike for both databases."""

from __future__ import annotations

import csv
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Any

import typer

from tokencustody.terminal.printing import console, literal, plural, printable

if TYPE_CHECKING:
    from tokencustody.sql_prompt.queries import Rows

_ROWS_FOR_A_PERSON = 500
_VALUES_FOR_A_PERSON = 8
_BYTES_FOR_A_PERSON = 16
# What a column costs beside its text.
_GAP = 2

Show = Callable[[Sequence[str], "Rows"], None]


class Expanded(StrEnum):
    """Whether each row is shown as lines of names and values, instead of as a line of a table."""

    AUTO = "auto"  # where the table is wider than the terminal
    ON = "on"
    OFF = "off"


class Table:
    """Shows rows to a person: the first of many, arrays shortened, unless `full`."""

    def __init__(self, *, full: bool, expanded: Expanded = Expanded.AUTO) -> None:
        self.expanded = expanded
        self._full = full

    def __call__(self, columns: Sequence[str], rows: Rows) -> None:
        """Show what a statement returned."""
        shown = list(rows if self._full else islice(rows, _ROWS_FOR_A_PERSON))
        rest = not self._full and next(rows, None) is not None
        names = [printable(column) for column in columns]
        cells = [[printable(_cell(value, full=self._full)) for value in row] for row in shown]
        if self._is_vertical(names, cells):
            self._print_lines(names, cells)
        else:
            self._print_table(names, cells)
        console(folds=not self._full).print(
            f"the first {plural(len(shown), 'row')}; --full, --csv and --json give all"
            if rest
            else plural(len(shown), "row")
        )

    def _is_vertical(self, names: Sequence[str], cells: Sequence[Sequence[str]]) -> bool:
        if self.expanded is not Expanded.AUTO or not cells or not sys.stdout.isatty():
            return self.expanded is Expanded.ON and bool(cells)
        widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
        return sum(widths) + _GAP * len(widths) > shutil.get_terminal_size().columns

    def _print_table(self, names: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
        from rich import table

        shown = table.Table(*(table.Column(literal(name)) for name in names), box=None)
        for row in cells:
            shown.add_row(*map(literal, row))
        console(folds=not self._full).print(shown)

    def _print_lines(self, names: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
        width = max(map(len, names))
        for number, row in enumerate(cells, 1):
            typer.echo(f"-[ {number} ]-".ljust(width + 3, "-"))
            for name, cell in zip(names, row, strict=True):
                typer.echo(f"{name.ljust(width)} | {cell}".rstrip())


def show_json(columns: Sequence[str], rows: Rows) -> None:
    """Print a list of one object for each row."""
    if len(set(columns)) < len(columns):
        from tokencustody.sql_prompt.queries import QueryError

        raise QueryError("two columns have the same name; name them apart with AS")
    separator = "["
    for row in rows:
        typer.echo(f"{separator}\n  {json.dumps(dict(zip(columns, map(plain, row), strict=True)))}", nl=False)
        separator = ","
    typer.echo("[]" if separator == "[" else "\n]")


def show_csv(columns: Sequence[str], rows: Rows) -> None:
    """Print CSV with a header."""
    # A terminal would obey what a call id may hold; a file gets the exact text.
    safe = printable if sys.stdout.isatty() else str
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(map(safe, columns))
    writer.writerows(map(safe, _texts(row)) for row in rows)


def _texts(row: Sequence[Any]) -> Iterator[str]:
    for value in row:
        shown = plain(value)
        yield "" if shown is None else json.dumps(shown) if isinstance(shown, list | dict) else str(shown)


def plain(value: Any) -> Any:
    """Return a value of either database as JSON has it; both give a time in UTC, and a boolean as 1 or 0."""
    match value:
        case bool():
            return int(value)
        case float() if not math.isfinite(value):
            return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
        case bytes():
            return value.hex()
        case Decimal():
            # A sum of integers has no digits after the point; an average has, and is a float on SQLite.
            return int(value) if value.is_finite() and value.as_tuple().exponent == 0 else plain(float(value))
        case datetime():
            at = value if value.tzinfo is None else value.astimezone(UTC)
            return at.strftime("%Y-%m-%d %H:%M:%S.%f")
        case list() | tuple():
            return [plain(each) for each in value]
        case dict():
            return {name: plain(each) for name, each in value.items()}
        case None | int() | float() | str():
            return value
        case _:
            return str(value)


def _cell(value: Any, *, full: bool) -> str:
    if isinstance(value, bytes) and not full and len(value) > _BYTES_FOR_A_PERSON:
        return f"{value[:_BYTES_FOR_A_PERSON].hex()}… {len(value):,} bytes in all"
    shown = plain(value)
    values = _array(shown)
    if values is not None and not full and len(values) > _VALUES_FOR_A_PERSON:
        return f"{json.dumps(values[:_VALUES_FOR_A_PERSON])[:-1]}, … {len(values):,} in all]"
    return "" if shown is None else json.dumps(shown) if isinstance(shown, list | dict) else str(shown)


def _array(shown: Any) -> list[Any] | None:
    """Return the values of an array, which on SQLite is JSON text."""
    if isinstance(shown, str) and shown.startswith("["):
        with suppress(ValueError, RecursionError):
            shown = json.loads(shown)
    return shown if isinstance(shown, list) else None
