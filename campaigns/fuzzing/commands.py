"""Command lines that nobody types on purpose: an exit code and a line or two, never a traceback, and no change."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import random
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest import mock

from campaigns.fuzzing.cases import Case, Target, Violation
from campaigns.fuzzing.rows import Written
from tokencustody.cli import main
from tokencustody.store import open_store

_COMMANDS = (
    ("rollouts",),
    ("show",),
    ("db", "current"),
    ("db", "check"),
    ("db", "sql"),
    ("db", "upgrade"),
    ("db", "downgrade"),
    ("spill", "list"),
    ("spill", "replay"),
    ("conformance", "--check", "no such check"),
)
# `demo` and `serve` are left out: what they do after their arguments were taken is to go on.
_OPTIONS = (
    "--json",
    "--run",
    "--prefix",
    "--limit",
    "--state",
    "--complete",
    "--revision",
    "--yes",
    "--dialect",
    "--directory",
    "--spill",
    "--help",
    "--unknown",
    "-h",
    "--",
)
_TEXTS = (
    "",
    " ",
    "fuzz",
    "..",
    "a/b",
    "a\0b",
    "\udcff\udcfe",
    "\x1b[31m[red]x[/red]\n",
    "x" * 5000,
    "0",
    "-1",
    "9" * 30,
    "head",
    "base",
    "open",
    "nan",
    "é" * 300,
    "'; DROP TABLE fences; --",
)


@contextmanager
def _commands(seed: str) -> Iterator[Case]:
    with tempfile.TemporaryDirectory() as made, mock.patch.dict(os.environ), contextlib.ExitStack() as stack:
        folder = Path(made)
        # Some of the URLs are relative paths.
        stack.enter_context(contextlib.chdir(folder))
        os.environ["TOKENCUSTODY_SPILL"] = str(folder / "spill")
        os.environ.pop("TOKENCUSTODY_URL", None)
        urls = _urls(seed, folder)

        def case(rng: random.Random) -> str:
            arguments = [*rng.choice(_COMMANDS)]
            if rng.random() < 0.9:
                arguments += ["--url", rng.choice(urls)]
            for _ in range(rng.choice((0, 0, 1, 3))):
                arguments.append(rng.choice((rng.choice(_OPTIONS), rng.choice(_TEXTS))))
            if any(each in ("base", "downgrade") for each in arguments):
                # It would change the corpus, as it should.
                arguments = [
                    each.replace(str(folder / "good.db"), str(folder / "none.db")) for each in arguments
                ]
            try:
                return _end(arguments)
            except Violation as exc:
                raise Violation(f"{arguments!r:.800}: {exc}") from exc

        yield case


def _end(arguments: list[str]) -> str:
    """Run a command in this process, which is what `python -m tokencustody` does in another."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace") for _ in range(2))
    with (
        mock.patch.object(sys, "argv", ["tokencustody", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "stdin", io.StringIO("")),
    ):
        try:
            main()
            code: object = 0
        except SystemExit as exc:
            code = exc.code
        except Exception as exc:
            raise Violation(f"a traceback: {type(exc).__name__}: {str(exc)[:300]}") from exc
        out.flush()
        err.flush()
    said = err.buffer.getvalue().decode() if isinstance(err.buffer, io.BytesIO) else ""
    shown = out.buffer.getvalue().decode() if isinstance(out.buffer, io.BytesIO) else ""
    if "secret" in said + shown or "cret@" in said + shown:
        raise Violation(f"it shows the password: {said[-500:]}")
    if code not in (0, 1, 2, None):
        raise Violation(f"exit code {code}")
    if "Traceback" in said:
        raise Violation(f"a traceback: {said[-500:]}")
    if code in (1, 2) and not said and "check" not in arguments:
        raise Violation("it failed without a word")
    if "\x1b[31m[red]" in said:
        raise Violation("an argument steers the terminal")
    return f"{' '.join(arguments[: 2 if arguments[0] in ('db', 'spill') else 1])}: exit code {code or 0}"


def _urls(seed: str, folder: Path) -> list[str]:
    good = folder / "good.db"

    async def fill() -> None:
        async with open_store(good) as store:
            await Written(random.Random(seed)).write(store)

    asyncio.run(fill())
    (folder / "text.db").write_text("hello\n" * 100)
    (folder / "empty.db").touch()
    (folder / "folder.db").mkdir()
    (folder / "pipe").symlink_to("/dev/null")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "dangling").symlink_to(folder / "nowhere" / "x.db")
    (folder / "cut.db").write_bytes(good.read_bytes()[:5000])
    foreign = "CREATE TABLE fences (x); CREATE TABLE alembic_version (version_num TEXT);"
    foreign += "INSERT INTO alembic_version VALUES ('other')"
    with closing(sqlite3.connect(folder / "foreign.db")) as connection:
        connection.executescript(foreign)
    names = (
        "text.db",
        "empty.db",
        "folder.db",
        "pipe",
        "loop",
        "dangling",
        "cut.db",
        "foreign.db",
        "none.db",
    )
    # A port that nobody listens on; a host that is no name, so that nobody is asked for it.
    refused = "postgresql://u:secret@127.0.0.1:1"
    return [
        *(str(folder / name) for name in names),
        *[str(good)] * 4,
        f"sqlite:///{folder}/text.db",
        f"{folder}/text.db/below.db",
        f"{folder}/{'x' * 300}.db",
        f"{folder}/a\0b.db",
        f"{folder}/\udcff.db",
        "~no-such-user-here/x.db",
        "",
        " ",
        ":memory:",
        "sqlite://",
        "sqlite:///",
        "sqlite://host/x",
        "mysql://x",
        "://",
        "postgresql://",
        f"{refused}/db",
        f"{refused}/db?sslmode=nonsense",
        f"{refused}/db?sslmode=verify-full&sslrootcert=/nonexistent",
        f"{refused}/db?connect_timeout=nan",
        f"{refused}/db?connect_timeout=-1",
        f"{refused}/db?statement_cache_size=-5",
        f"{refused}/db?statement_cache_size={'9' * 30}",
        f"{refused}/db?host=/nonexistent",
        f"{refused}/db?host=127.0.0.1,127.0.0.2&port=1",
        f"{refused}/db?port=abc",
        f"{refused}/db?port=99999999",
        f"{refused}/db?service=none",
        f"{refused}/db?passfile=/nonexistent",
        f"{refused}/db?options=-cfoo",
        f"{refused}/d\0b",
        "postgresql://h\0st/db",
        "postgresql://[::1/db",
        "postgresql://u:secret@127.0.0.1:99999/db",
        "postgresql://u:secret@127.0.0.1:port/db",
        f"postgresql://{'x' * 100}:1/db",
        "postgresql://..:1/db",
        "postgresql://u:se@cret@127.0.0.1:1/db",
        "postgresql://u:se/cret@127.0.0.1:1/db",
    ]


TARGETS = (Target("command-lines", _commands),)
