"""The command line itself: how it starts, and how it fails."""

from __future__ import annotations

import importlib
import re
import sqlite3
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest

from tokencustody.cli import main
from tokencustody.database.url import parse_url
from tokencustody.schema import migrate

# The package has the command of the same name.
rollouts = importlib.import_module("tokencustody.overview.command")

Failing = Callable[..., str]
COMMANDS = [["rollouts"], ["show", "rollout-1"]]
READING = [*COMMANDS, ["runs"], ["sql", "SELECT 1"], ["db", "current"]]
SCRIPT = str(Path(sysconfig.get_path("scripts")) / "tokencustody")
ENTRY_POINTS = [[sys.executable, "-m", "tokencustody"], [SCRIPT]]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Failing:
    """Run a command that must fail with exit code 1, no output and one line on stderr; returns that line."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["tokencustody", *arguments])
        with pytest.raises(SystemExit) as exited:
            main()
        out, err = capsys.readouterr()
        assert (exited.value.code, out) == (1, "")
        (line,) = err.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    return run


@pytest.mark.parametrize("entry_point", ENTRY_POINTS, ids=["module", "script"])
def test_each_way_to_start_it_prints_an_expected_error_as_one_line(
    entry_point: list[str], tmp_path: Path
) -> None:
    missing = tmp_path / "missing.db"
    done = subprocess.run(
        [*entry_point, "rollouts", "--url", str(missing)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"error: sqlite:///{re.escape(str(missing))} does not exist.*\n", done.stderr)


def test_the_help_names_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["tokencustody", "--help"])
    with pytest.raises(SystemExit, match="0"):
        main()
    out = capsys.readouterr().out
    assert all(command in out for command in ("db", "backup", "rollouts", "show", "conformance", "demo"))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_database_must_be_named(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENCUSTODY_URL", raising=False)
    monkeypatch.setattr(sys, "argv", ["tokencustody", *command])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "--url" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://me:s3cret@host/x", "scheme 'mysql' is not supported"),
        ("postgresql://me:s3cret@host:port/x", "malformed"),
        ("sqlite:///:memory:", "a SQLite file that outlives the process"),
        ("", "the URL is empty and names no database"),
    ],
)
def test_a_url_that_names_no_database_is_refused(
    failing: Failing, command: list[str], url: str, said: str
) -> None:
    line = failing(*command, "--url", url)
    assert said in line
    assert "s3cret" not in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rollouts", "--run", "a b"], "run 'a b' is not"),
        (["rollouts", "--prefix", "%"], "prefix '%' is not"),
        (["rollouts", "--prefix", "\udcff"], r"prefix '\udcff' is not"),
        (["show", "a\nb"], r"rollout_id 'a\nb' is not"),
        (["show", "a", "--run", "[red]"], "run '[red]' is not"),
    ],
)
def test_an_id_outside_the_rules_is_refused(
    failing: Failing, sqlite_url: str, arguments: list[str], said: str
) -> None:
    assert said in failing(*arguments, "--url", sqlite_url)


@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_a_missing_file_is_named_and_not_created(
    failing: Failing, command: list[str], tmp_path: Path
) -> None:
    missing = tmp_path / "missing.db"
    assert failing(*command, "--url", str(missing)).startswith(f"sqlite:///{missing} does not exist")
    assert not missing.exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_without_tables_is_left_as_it_is(failing: Failing, command: list[str], tmp_path: Path) -> None:
    empty, text = tmp_path / "empty.db", tmp_path / "text.db"
    empty.touch()
    text.write_text("no database, though longer than the header of one\n" * 9)
    before = text.read_bytes()
    assert "has no " in failing(*command, "--url", str(empty))
    assert "is not available: " in failing(*command, "--url", str(text))
    assert failing(*command, "--url", str(tmp_path)) == f"sqlite:///{tmp_path} is a folder: name a file in it"
    assert failing(*command, "--url", "/dev/null") == "sqlite:////dev/null is not a regular file"
    assert (empty.read_bytes(), text.read_bytes()) == (b"", before)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_postgresql_database_without_tables_names_the_command_to_run(
    failing: Failing, command: list[str], empty_postgres_url: str
) -> None:
    line = failing(*command, "--url", empty_postgres_url)
    assert f"run `tokencustody db upgrade --url {parse_url(empty_postgres_url).display}`" in line


def test_a_newer_revision_that_shuts_this_library_out_is_named(failing: Failing, sqlite_url: str) -> None:
    migrate.upgrade(sqlite_url)
    connection = sqlite3.connect(parse_url(sqlite_url).dsn)
    with connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999_later'")
        connection.execute("UPDATE wire_schema SET version = 9999 WHERE name = 'tables'")
    connection.close()
    line = failing("rollouts", "--url", sqlite_url)
    assert "9999_later" in line
    assert line.endswith("upgrade tokencustody")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unreachable_server_is_named_within_the_deadline_without_its_password(
    failing: Failing, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "DEADLINE", 0.2)
    # Port 1 is reserved and nothing listens there.
    line = failing(*command, "--url", "postgresql://me:s3cret@127.0.0.1:1/captures")
    assert line.startswith("postgresql://me@127.0.0.1:1/captures is not available")
    assert "s3cret" not in line


def test_a_look_waits_for_an_unreachable_server_for_ten_seconds_at_most() -> None:
    assert rollouts.DEADLINE <= 10.0


def test_a_wrong_password_is_not_repeated(failing: Failing, postgres_url: str) -> None:
    parts = urlsplit(postgres_url)
    wrong = parts._replace(netloc=f"{parts.username}:s3cret@{parts.hostname}:{parts.port}")
    line = failing("rollouts", "--url", urlunsplit(wrong))
    assert f"{parts.hostname}:{parts.port}{parts.path} is not available" in line
    assert "s3cret" not in line


@pytest.mark.parametrize(
    "command",
    [
        *COMMANDS,
        ["backup", "backup.db"],
        ["conformance"],
        ["demo"],
        ["demo", "--staging"],
        ["serve"],
        ["db", "upgrade"],
        ["db", "downgrade", "--revision", "base", "--yes"],
        ["db", "current"],
        ["db", "check"],
        ["db", "sql"],
    ],
    ids=" ".join,
)
def test_every_command_takes_the_database_from_the_environment(
    failing: Failing, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENCUSTODY_AUTH_TOKEN", "token")
    monkeypatch.setenv("TOKENCUSTODY_URL", "mysql://me:s3cret@host/x")
    assert "scheme 'mysql' is not supported" in failing(*command)


@pytest.mark.parametrize("command", [[], *COMMANDS, ["demo"], ["conformance"], ["serve"], ["db", "check"]])
def test_help_loads_no_database_and_no_server(command: list[str]) -> None:
    program = """
import atexit, sys
from tokencustody.__main__ import main
heavy = ("sqlalchemy", "alembic", "asyncpg", "fastapi", "uvicorn", "httpx")
atexit.register(lambda: print(*sorted(sys.modules.keys() & set(heavy)), file=sys.stderr))
main()
"""
    arguments = [sys.executable, "-c", program, *(part for part in command if part != "rollout-1"), "--help"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert "Usage" in done.stdout
    assert done.stderr == "\n"


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, sqlite_url: str) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(rollouts, "_read_rollouts", broken)
    monkeypatch.setattr(sys, "argv", ["tokencustody", "rollouts", "--url", sqlite_url])
    with pytest.raises(KeyError, match="a bug"):
        main()
