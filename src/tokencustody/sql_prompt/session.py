"""What is typed at `tokencustody sql`, or stands in a script: statements, and the commands that people expect."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tokencustody.sql_prompt.output import Expanded, Show, Table
from tokencustody.sql_prompt.splitting import split
from tokencustody.terminal.printing import printable

if TYPE_CHECKING:
    from tokencustody.sql_prompt.queries import Queries, Rows

_REMEMBERED = 1000

_HELP = """\
A statement ends with a semicolon and may take several lines. Ctrl-C cancels, Ctrl-D leaves, Tab completes.
\\d               the tables and views; those named audit_ are for reading (also .tables; \\dt, \\dv one kind)
\\d NAME          the columns of one (also .schema NAME)
\\x [on|off|auto] each row as lines of names and values; auto: where a table is wider than the terminal
\\timing [on|off] how long each statement takes
\\? or help       this
\\q, quit, exit   leave (also .quit)
Functions: audit_prompt_token_ids(run, rollout_id, model_call_id), audit_generation_token_ids(…),
audit_generation_log_probs(…), audit_staged_token_ids(…), audit_staged_log_probs(…), audit_staged_token_mask(…)"""

# Other names of a command, as SQLite's shell, PostgreSQL's and people have them.
_SAME = {
    "help": "\\?", ".help": "\\?", "\\h": "\\?", "?": "\\?",
    "quit": "\\q", "exit": "\\q", ".quit": "\\q", ".exit": "\\q", "\\quit": "\\q",
    ".tables": "\\d", "\\d+": "\\d", ".schema": "\\d", "\\dt+": "\\dt", "\\dv+": "\\dv",
}  # fmt: skip
# These take no backslash, and mean something only alone.
_WORDS = {"help", "?", "quit", "exit"}
# What begins like this is no SQL.
_MARKS = ("\\", ".")
_KEYWORDS = (
    "SELECT", "FROM", "WHERE", "GROUP", "ORDER", "BY", "HAVING", "LIMIT", "OFFSET", "WITH", "AS", "ON",
    "USING", "JOIN", "LEFT", "INNER", "CROSS", "UNION", "ALL", "EXCEPT", "INTERSECT", "DISTINCT", "AND", "OR",
    "NOT", "IN", "IS", "NULL", "LIKE", "BETWEEN", "EXISTS", "CASE", "WHEN", "THEN", "ELSE", "END", "DESC",
    "ASC", "VALUES", "EXPLAIN", "COUNT", "SUM", "AVG", "MIN", "MAX", "COALESCE", "LENGTH", "SUBSTR", "ROUND",
    "ABS", "CAST",
)  # fmt: skip
_COMMANDS = ("\\?", "\\d", "\\dt", "\\dv", "\\q", "\\timing", "\\x")


class Session:
    """Takes lines, runs what they say, and tells whether that was right."""

    def __init__(self, queries: Queries, show: Show) -> None:
        self._queries = queries
        self._show = show
        self._timed = False
        self._typed = ""
        self._begins = 0
        self._line = 0
        self.ended = False
        self._names: list[str] = []

    @property
    def goes_on(self) -> bool:
        """Whether a statement has begun and not ended."""
        return bool(self._typed)

    def feed(self, line: str, *, where: str = "") -> bool:
        """Take a line, without its end; return False at once when a statement in it fails.

        `where` is the script's name, for the error.
        """
        self._line += 1
        command = line.strip().rstrip(";").strip()
        if not self._typed and (command.startswith(_MARKS) or command.lower() in _WORDS):
            return self._command(command)
        goes_on = self.goes_on
        if not goes_on:
            self._begins = self._line
        self._typed += f"{line}\n"
        if goes_on and ";" not in line and "*/" not in line:
            return True
        found, rest = self._queries.statements(self._typed) if ";" in line else ([], self._typed)
        if rest.startswith(_MARKS):
            found, rest = [*found, rest], ""
        # Comments alone are no statement that goes on.
        self._typed = f"{rest.rstrip()}\n" if any(split(f"{rest}\n;")) else ""
        return all(self._run(statement, where) for statement in found)

    def finish(self, *, where: str = "") -> bool:
        """Run what stands after the last semicolon; return whether it was right."""
        found, rest = self._queries.statements(self._typed)
        self._typed = ""
        return all(self._run(statement, where) for statement in [*found, rest] if statement)

    def forget(self) -> None:
        """Forget the statement that has begun."""
        self._typed = ""

    def _run(self, statement: str, where: str) -> bool:
        if statement.startswith(_MARKS):
            return self._command(statement.rstrip(";").strip())
        return self._ask(statement, where)

    def _ask(self, statement: str, where: str = "", show: Show | None = None) -> bool:
        from tokencustody.sql_prompt.queries import QueryError

        began = time.perf_counter()
        try:
            self._queries.run(statement, show or self._show)
        except QueryError as exc:
            at = f"{printable(where)}, the statement that begins in line {self._begins}: " if where else ""
            typer.echo(f"error: {at}{printable(str(exc))}{_why(statement)}", err=True)
            return False
        if self._timed:
            typer.echo(f"{1000 * (time.perf_counter() - began):.1f} ms")
        return True

    def _command(self, line: str) -> bool:
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        command = _SAME.get(name.lower(), name)
        match command:
            case "\\?":
                typer.echo(_HELP)
            case "\\q":
                self.ended = True
            case "\\d" | "\\dt" | "\\dv" if not argument:
                return self._list({"\\dt": "table", "\\dv": "view"}.get(command, ""))
            case "\\d" | "\\dt" | "\\dv":
                return self._describe(argument.strip('"'))
            case "\\x" if isinstance(self._show, Table):
                on_or_off = Expanded.OFF if self._show.expanded is Expanded.ON else Expanded.ON
                return self._set_expanded(self._show, argument or on_or_off)
            case "\\x":
                return _wrong("\\x is for tables, not for --json and --csv")
            case "\\timing" if argument in ("", "on", "off"):
                self._timed = not self._timed if not argument else argument == "on"
                typer.echo(f"timing is {'on' if self._timed else 'off'}")
            case _:
                return _wrong(f"unknown command {line}: \\? tells what there is")
        return True

    def _list(self, kind: str) -> bool:
        def show(columns: Sequence[str], rows: Rows) -> None:
            self._show(columns, (row for row in rows if kind in ("", row[1])))

        return self._ask(self._queries.listing, show=show)

    def _describe(self, name: str) -> bool:
        is_there = True

        def show(columns: Sequence[str], rows: Rows) -> None:
            nonlocal is_there
            if found := list(rows):
                self._show(columns, iter(found))
            is_there = bool(found)

        # In quotes, as a name that is nobody's own word.
        quoted = "'" + name.replace("'", "''") + "'"
        if not self._ask(self._queries.describing.format(quoted), show=show):
            return False
        return is_there or _wrong(f"there is no table or view {name}: \\d lists them")

    def _set_expanded(self, table: Table, wanted: str) -> bool:
        if wanted not in list(Expanded):
            return _wrong(f"\\x takes {', '.join(Expanded)}, not {wanted}")
        table.expanded = Expanded(wanted)
        typer.echo(f"rows as lines: {table.expanded}")
        return True

    def completions(self, text: str) -> list[str]:
        """Return what a word that begins like this may become, in its own case."""
        if text.startswith("\\"):
            return [command for command in _COMMANDS if command.startswith(text)]
        if not self._names:
            self._names = sorted(self._queries.names())
        wanted = text.lower()
        keywords = [word if text[:1].isupper() else word.lower() for word in _KEYWORDS]
        return [word for word in [*self._names, *keywords] if word.lower().startswith(wanted)]


def _why(statement: str) -> str:
    command = re.search(r"^\s*([.\\][a-z?]+)", statement, re.MULTILINE)
    return f"; before {command[1]} the statement must end with a semicolon" if command else ""


def _wrong(said: str) -> bool:
    typer.echo(f"error: {printable(said)}", err=True)
    return False


def prompt(session: Session) -> None:
    """Take what a person types until that ends; what was wrong is told, and the next line is asked for."""
    with _line_editing(session):
        while not session.ended:
            try:
                session.feed(input("   ...> " if session.goes_on else "tokencustody> "))
            except KeyboardInterrupt:
                session.forget()
                typer.echo("\ncancelled")
            except EOFError:
                typer.echo("")
                return


@contextmanager
def _line_editing(session: Session) -> Iterator[None]:
    """Editing and completion of lines, with what was typed kept for the next time in the person's state folder."""
    try:
        import readline
    except ImportError:  # a Python without it
        yield
        return
    found: list[str] = []

    def complete(text: str, number: int) -> str | None:
        nonlocal found
        if number == 0:
            # An error here would vanish, and with it the line.
            with suppress(Exception):
                found = session.completions(text)
        return found[number] if number < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims(re.sub(r"[\\_.?]", "", readline.get_completer_delims()))
    is_libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
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
