"""`tokencustody db`, as a person or a script uses it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.support import probes
from tests.support.rollouts import linear_rollout
from tokencustody import open_store
from tokencustody.database.url import parse_url
from tokencustody.errors import SchemaMismatchError, StoreUnavailableError
from tokencustody.schema import migrate
from tokencustody.schema.command import db


def run(*arguments: str, code: int = 0, typed: str | None = None, **environment: str) -> Result:
    result = CliRunner().invoke(db, arguments, input=typed, env={"TOKENCUSTODY_URL": None, **environment})
    assert result.exit_code == code, (result.output, result.exception)
    return result


def make_file(url: str) -> None:
    """Make the file of a SQLite database, without a table."""
    if url.startswith("sqlite"):
        Path(parse_url(url).dsn).touch()


def test_upgrade_says_from_where_to_where(empty_url: str) -> None:
    shown = parse_url(empty_url).display
    assert run("upgrade", "--url", empty_url).output.splitlines() == [
        *(f"applied {revision}" for revision in migrate.REVISIONS),
        f"{shown}: base → {migrate.HEAD}",
    ]
    assert run("upgrade", "--url", empty_url).output == f"{shown}: already at {migrate.HEAD}\n"


def test_current_and_check_follow_the_database(empty_url: str) -> None:
    shown = parse_url(empty_url).display
    make_file(empty_url)
    assert "no tokencustody tables" in run("current", "--url", empty_url).output
    assert shown in run("check", "--url", empty_url, code=1).output
    run("upgrade", TOKENCUSTODY_URL=empty_url)
    assert (
        run("current", "--url", empty_url).output
        == f"{shown}: {migrate.HEAD} (this library: {migrate.HEAD})\n"
    )
    said = run("check", "--url", empty_url).output.splitlines()
    assert said[0] == f"{shown}: at {migrate.HEAD}, tables and wire schemas equal"
    if not empty_url.startswith("sqlite"):
        assert "no synchronous standby is named" in said.pop()
    assert len(said) == 1


def test_check_lists_every_difference(empty_url: str) -> None:
    migrate.upgrade(empty_url)
    probes.run_script(empty_url, "ALTER TABLE intents ADD COLUMN extra TEXT; DELETE FROM wire_schema")
    lines = run("check", "--url", empty_url, code=1).output.splitlines()[1:]
    if not empty_url.startswith("sqlite"):
        assert "no synchronous standby is named" in lines.pop()
    assert [line.strip() for line in lines] == migrate.check(empty_url)
    assert len(lines) == 1 + len(migrate.WIRE_SCHEMAS)


def test_json_says_the_same(empty_url: str) -> None:
    shown = parse_url(empty_url).display
    make_file(empty_url)
    before = json.loads(run("current", "--json", "--url", empty_url).output)
    assert (before["url"], before["revision"], before["head"]) == (shown, None, migrate.HEAD)
    assert (*before["before"], *before["after"]) == migrate.REVISIONS
    assert not before["works"]
    refused = json.loads(run("check", "--json", "--url", empty_url, code=1).output)
    standbys = None if empty_url.startswith("sqlite") else {"names": "", "connected": 0}
    assert refused == {
        "url": shown,
        "head": migrate.HEAD,
        "ok": False,
        "problems": migrate.check(empty_url),
        "synchronous_standbys": standbys,
    }
    run("upgrade", "--url", empty_url)
    assert json.loads(run("current", "--json", "--url", empty_url).output)["revision"] == migrate.HEAD
    accepted = json.loads(run("check", "--json", "--url", empty_url).output)
    assert (accepted["ok"], accepted["problems"]) == (True, [])


def test_downgrade_drops_data_only_when_confirmed(empty_url: str) -> None:
    migrate.upgrade(empty_url)
    arguments = ("downgrade", "--url", empty_url, "--revision", "base")
    for typed in ("n\n", "\n", ""):
        run(*arguments, code=1, typed=typed)
        assert migrate.current(empty_url) == migrate.HEAD
    run(*arguments, typed="y\n")
    assert probes.objects(empty_url) == []
    migrate.upgrade(empty_url)
    assert f"{migrate.HEAD} → base" in run(*arguments, "--yes").output
    assert probes.objects(empty_url) == []


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
def test_sql_is_written_without_a_database(dialect: str) -> None:
    assert run("sql", "--dialect", dialect).output == migrate.sql(dialect)
    url = "postgresql://nobody@127.0.0.1:1/never" if dialect == "postgresql" else "never.db"
    assert run("sql", "--url", url).output == migrate.sql(dialect)


def test_wrong_arguments_are_usage_errors() -> None:
    assert "--url" in run("upgrade", code=2).output
    assert "--dialect" in run("sql", code=2).output
    assert (
        "'0000_never' is unknown"
        in run("upgrade", "--url", "x.db", "--revision", "0000_never", code=2).output
    )
    assert "--revision" in run("downgrade", "--url", "x.db", code=2).output


def test_an_unreachable_database_is_an_expected_error() -> None:
    result = CliRunner().invoke(
        db, ["upgrade", "--url", "postgresql://u:not-to-be-seen@127.0.0.1:1/captures"]
    )
    assert isinstance(result.exception, StoreUnavailableError)
    assert "not-to-be-seen" not in result.output + str(result.exception)


def test_a_downgrade_that_is_refused_on_its_way_says_that_no_step_is_kept(empty_url: str) -> None:
    async def fill() -> None:
        async with open_store(empty_url) as store:
            for turn in linear_rollout(3):
                await store.sink.put(turn.entry)

    migrate.upgrade(empty_url)
    asyncio.run(fill())
    before = probes.catalogue(empty_url), probes.routines(empty_url)
    refused = run("downgrade", "--url", empty_url, "--revision", "0001_capture", "--yes", code=1)
    assert "undid 0004_audit" in refused.output
    assert "steps above not kept" in refused.output
    assert isinstance(refused.exception, SchemaMismatchError)
    assert (
        f"nothing was changed, {parse_url(empty_url).display} is on revision {migrate.HEAD} as before"
        in str(refused.exception)
    )
    assert migrate.check(empty_url) == []
    assert (probes.catalogue(empty_url), probes.routines(empty_url)) == before


@pytest.mark.parametrize("step", [1, 3])
def test_a_downgrade_that_is_killed_on_its_way_leaves_all_as_it_was(empty_url: str, step: int) -> None:
    migrate.upgrade(empty_url)
    before = probes.catalogue(empty_url), probes.routines(empty_url)
    killed = """
import os, signal, sys
from tokencustody.schema import migrate
steps = []
def progress(step):
    steps.append(step)
    if len(steps) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
migrate.downgrade(sys.argv[1], "base", progress=progress)
"""
    done = subprocess.run([sys.executable, "-c", killed, empty_url, str(step)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert migrate.check(empty_url) == []
    assert (probes.catalogue(empty_url), probes.routines(empty_url)) == before


def test_an_upgrade_at_head_makes_a_lost_view_anew(empty_url: str) -> None:
    migrate.upgrade(empty_url)
    before = probes.routines(empty_url)
    probes.run_script(empty_url, "DROP VIEW audit_calls; DROP VIEW audit_staging")
    mended = f"`tokencustody db upgrade --url {parse_url(empty_url).display}` mends this"
    assert mended in run("check", "--url", empty_url, code=1).output.splitlines()
    assert run("upgrade", "--url", empty_url).output.splitlines()[:2] == [
        "made anew: view audit_calls",
        "made anew: view audit_staging",
    ]
    assert migrate.check(empty_url) == []
    assert probes.routines(empty_url) == before
