"""`tokencustody sql`: a prompt for a person's own questions, which only reads."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokencustody.cli.db import Url
from tokencustody.cli.printing import console, literal, plural, printable

if TYPE_CHECKING:
    from tokencustody.audit.queries import Queries, Rows

_ROWS_FOR_A_PERSON = 500
_VALUES_FOR_A_PERSON = 8
_BYTES_FOR_A_PERSON = 16
_REMEMBERED = 1000

_HELP = """\
A statement ends with a semicolon. Ctrl-C cancels a query, Ctrl-D leaves.
.tables        the tables and views; those named audit_ are for reading
.schema NAME   the columns of one
.quit          leave
Functions: audit_prompt_token_ids(run, rollout_id, model_call_id), audit_generation_token_ids(…),
audit_generation_log_probs(…), audit_staged_token_ids(…), audit_staged_log_probs(…), audit_staged_token_mask(…)"""

Show = Callable[[Sequence[str], "Rows"], None]


def sql(
    url: Url,
    query: Annotated[
        str | None,
        typer.Argument(help="Statements to run, separated by semicolons. Default: those on standard input."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list of one object for each row.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="In the table, show all rows and whole arrays.")
    ] = False,
) -> None:
    """Ask a database in SQL, at a prompt or from a script. Nothing that is asked can change it.

    The views named audit_ are described in docs/audit.md.
    """
    from tokencustody.audit.queries import open_queries
    from tokencustody.sql.url import parse_url

    if as_json and as_csv:
        raise typer.BadParameter("give one of --json and --csv")
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # Ctrl-C cancels a query instead of ending the program.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    show: Show = _json if as_json else _csv if as_csv else _table(full=full)
    queries = open_queries(parse_url(url))
    try:
        if query is None and sys.stdin.isatty():
            _prompt(queries, show)
            return
        found, rest = queries.statements(sys.stdin.read() if query is None else query)
        for statement in [*found, rest] if rest else found:
            if not _ask(queries, statement, show):
                raise typer.Exit(1)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None
    finally:
        queries.close()


def _ask(queries: Queries, statement: str, show: Show) -> bool:
    """Run one statement and return whether it was right."""
    from tokencustody.audit.queries import QueryError

    try:
        queries.run(statement, show)
    except QueryError as exc:
        typer.echo(f"error: {printable(str(exc))}", err=True)
        return False
    return True


def _prompt(queries: Queries, show: Show) -> None:
    typer.echo("Only reading. .help tells what there is.")
    with _history():
        typed = ""
        while True:
            try:
                line = input("   ...> " if typed else "tokencustody> ")
                if not typed and line.strip().startswith("."):
                    if line.strip().rstrip(";") in (".quit", ".exit"):
                        return
                    _command(queries, line.strip(), show)
                    continue
                typed += f"{line}\n"
                found, rest = queries.statements(typed)
                typed = f"{rest}\n" if rest else ""
                for statement in found:
                    _ask(queries, statement, show)
            except KeyboardInterrupt:
                typed = ""
                typer.echo("\ncancelled")
            except EOFError:
                typer.echo("")
                return


def _command(queries: Queries, line: str, show: Show) -> None:
    command, _, name = line.rstrip(";").partition(" ")
    if command == ".tables":
        _ask(queries, queries.listing, show)
    elif command == ".schema" and name.strip():
        quoted = "'" + name.strip().replace("'", "''") + "'"
        _ask(queries, queries.describing.format(quoted), show)
    else:
        typer.echo(_HELP)


@contextmanager
def _history() -> Iterator[None]:
    """Line editing, with what was typed kept for the next time in the person's state folder."""
    try:
        import readline
    except ImportError:  # a Python without it
        yield
        return
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    with suppress(OSError, RuntimeError):
        file = Path(state).expanduser() / "tokencustody" / "sql_history"
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Before there is a word in it.
        file.touch(mode=0o600)
        readline.read_history_file(file)
    readline.set_history_length(_REMEMBERED)
    try:
        yield
    finally:
        with suppress(OSError, NameError):
            readline.write_history_file(file)


def _table(*, full: bool) -> Show:
    def show(columns: Sequence[str], rows: Rows) -> None:
        from rich.table import Column, Table

        shown = list(rows if full else islice(rows, _ROWS_FOR_A_PERSON))
        rest = not full and next(rows, None) is not None
        table = Table(*(Column(literal(column)) for column in columns), box=None)
        for row in shown:
            table.add_row(*(literal(_cell(value, full=full)) for value in row))
        out = console(folds=not full)
        out.print(table)
        out.print(
            f"the first {plural(len(shown), 'row')}; --full, --csv and --json give all"
            if rest
            else plural(len(shown), "row")
        )

    return show


def _json(columns: Sequence[str], rows: Rows) -> None:
    if len(set(columns)) < len(columns):
        from tokencustody.audit.queries import QueryError

        raise QueryError("two columns have the same name; name them apart with AS")
    separator = "["
    for row in rows:
        typer.echo(
            f"{separator}\n  {json.dumps(dict(zip(columns, map(_plain, row), strict=True)))}", nl=False
        )
        separator = ","
    typer.echo("[]" if separator == "[" else "\n]")


def _csv(columns: Sequence[str], rows: Rows) -> None:
    # A terminal would obey what a call id may hold; a file gets the exact text.
    safe = printable if sys.stdout.isatty() else str
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(map(safe, columns))
    writer.writerows(map(safe, _texts(row)) for row in rows)


def _texts(row: Sequence[Any]) -> Iterator[str]:
    for value in row:
        plain = _plain(value)
        yield "" if plain is None else json.dumps(plain) if isinstance(plain, list | dict) else str(plain)


def _plain(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
        case bytes():
            return value.hex()
        case Decimal():
            return int(value) if value.is_finite() and value == value.to_integral_value() else str(value)
        case datetime():
            return value.isoformat(" ")
        case list() | tuple():
            return [_plain(each) for each in value]
        case dict():
            return {name: _plain(each) for name, each in value.items()}
        case None | bool() | int() | float() | str():
            return value
        case _:
            return str(value)


def _cell(value: Any, *, full: bool) -> str:
    if isinstance(value, bytes) and not full and len(value) > _BYTES_FOR_A_PERSON:
        return f"{value[:_BYTES_FOR_A_PERSON].hex()}… {len(value):,} bytes in all"
    plain = _plain(value)
    values = _array(plain)
    if values is not None and not full and len(values) > _VALUES_FOR_A_PERSON:
        return f"{json.dumps(values[:_VALUES_FOR_A_PERSON])[:-1]}, … {len(values):,} in all]"
    return "" if plain is None else json.dumps(plain) if isinstance(plain, list | dict) else str(plain)


def _array(plain: Any) -> list[Any] | None:
    """Return the values of an array, which on SQLite is JSON text."""
    if isinstance(plain, str) and plain.startswith("["):
        with suppress(ValueError, RecursionError):
            plain = json.loads(plain)
    return plain if isinstance(plain, list) else None
