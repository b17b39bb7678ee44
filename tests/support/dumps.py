"""Dumps of PostgreSQL databases, and their restores, by PostgreSQL's own programs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from tests.support.postgres import Server

FORMATS = ("plain", "custom", "directory")


def dump(server: Server, url: str, to: Path, form: str, *options: str) -> Path:
    """Dump a database, and return the file or folder."""
    _run(server, "pg_dump", url, f"--format={form}", f"--file={to}", *options)
    return to


def restore(server: Server, dumped: Path, url: str, *options: str) -> None:
    """Restore a dump into an empty database. Any error is one."""
    if dumped.is_file() and not dumped.read_bytes().startswith(b"PGDMP"):
        _run(server, "psql", url, "--quiet", "--no-psqlrc", "--set=ON_ERROR_STOP=1", f"--file={dumped}")
    else:
        _run(server, "pg_restore", url, "--exit-on-error", *options, str(dumped))


def _run(server: Server, program: str, url: str, *arguments: str) -> None:
    assert server.programs is not None
    parts = urlsplit(url)
    shown = urlunsplit(parts._replace(netloc=f"{parts.username}@{parts.hostname}:{parts.port}"))
    done = subprocess.run(
        [str(server.programs / program), f"--dbname={shown}", *arguments],
        env=os.environ | {"PGPASSWORD": parts.password or ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
