"""A command that waits for a database says so, instead of nothing."""

from __future__ import annotations

import asyncio
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import asyncpg
import pytest

from tests.support.postgres import Server
from tokencustody.cli import main
from tokencustody.database.url import parse_url
from tokencustody.overview import command as overview
from tokencustody.schema import migrate
from tokencustody.schema.migrate import LOCK_KEY
from tokencustody.spill import command as spill
from tokencustody.terminal import waiting
from tokencustody.txn import asked


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tokencustody", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_locked_file_is_waited_for_aloud_and_then_the_command_goes_on(sqlite_url: str) -> None:
    with closing(sqlite3.connect(parse_url(sqlite_url).dsn, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        process = started("db", "upgrade", "--url", sqlite_url)
        assert process.stderr is not None
        said = process.stderr.readline()
        holder.execute("ROLLBACK")
    out, err = process.communicate()
    assert said == f"waiting for {sqlite_url} to be unlocked; Ctrl-C ends it\n"
    assert (process.returncode, err) == (0, "")
    assert out == f"{sqlite_url}: already at {migrate.HEAD}\n"


def test_an_upgrade_says_that_it_waits_for_another(postgres: Server, postgres_url: str) -> None:
    async def hold() -> tuple[str, int, str]:
        holder = await asyncpg.connect(postgres_url)
        try:
            await holder.execute(f"SELECT pg_advisory_lock({LOCK_KEY})")
            process = await asyncio.to_thread(started, "db", "upgrade", "--url", postgres_url)
            assert process.stderr is not None
            said = await asyncio.to_thread(process.stderr.readline)
        finally:
            await holder.close()
        _, err = await asyncio.to_thread(process.communicate)
        return said, process.returncode, err

    said, code, err = asyncio.run(hold())
    assert said == f"waiting for {parse_url(postgres_url).display} to answer; Ctrl-C ends it\n"
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    "command",
    [["rollouts"], ["runs"], ["verify"], ["retire", "r", "--yes"], ["spill", "replay"]],
    ids=" ".join,
)
def test_a_server_that_does_not_answer_is_named_once_on_standard_error(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting, "SILENCE", 0.0)
    # Port 1 is reserved and nothing listens there.
    monkeypatch.setattr(
        sys, "argv", ["tokencustody", *command, "--url", "postgresql://me:s3cret@127.0.0.1:1/captures"]
    )
    monkeypatch.setattr(asked, "REACH_DEADLINE", 1.0)
    for module in (overview, spill):
        monkeypatch.setattr(module, "DEADLINE", 1.0)
    with pytest.raises(SystemExit):
        main()
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert [line for line in lines if line.startswith("waiting for ")] == lines[:1]
    assert lines[0].startswith("waiting for postgresql://me@127.0.0.1:1/captures to answer, at most ")
    assert "s3cret" not in err
    assert "look whether the server runs and listens there" in lines[-1]


@pytest.mark.parametrize(
    "command",
    [
        ["db", "check"],
        ["sql", "SELECT 1"],
        ["export", "out"],
        ["copy", "--to", "copy.db"],
        ["serve", "--port", "0"],
    ],
    ids=" ".join,
)
def test_a_server_that_takes_a_connection_and_says_nothing_is_waited_for_aloud(
    command: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TOKENCUSTODY_AUTH_TOKEN", "a-token-of-sixteen-or-more-characters")
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://me@127.0.0.1:{silent.getsockname()[1]}/captures"
        process = started(*command, "--from" if command[0] == "copy" else "--url", url)
        assert process.stderr is not None
        said = process.stderr.readline()
        process.kill()
    process.communicate()
    assert said.startswith(f"waiting for {url} to answer")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("nodatabase", "name a database that the server has, or make it with `createdb`"),
        ("nouser", "give the password in PGPASSWORD"),
    ],
)
def test_a_refusal_of_the_server_comes_with_what_to_do(
    postgres: Server,
    place: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = (
        postgres.url_of("nowhere")
        if place == "nodatabase"
        else postgres.url.replace("://tokencustody", "://nobody")
    )
    monkeypatch.setattr(sys, "argv", ["tokencustody", "runs", "--url", url])
    with pytest.raises(SystemExit):
        main()
    assert said in capsys.readouterr().err
