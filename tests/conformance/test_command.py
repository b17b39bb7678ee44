"""`tokencustody conformance` as a person or a script uses it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from sqlalchemy import Connection, func, select
from typer.testing import CliRunner

from tokencustody.cli import app
from tokencustody.conformance import registered_checks
from tokencustody.database.url import parse_url
from tokencustody.errors import SchemaMismatchError
from tokencustody.schema import tables
from tokencustody.schema.migrate import in_transaction
from tokencustody.store import SqlTokenSource

COMMAND = [
    "conformance",
    "--check",
    "put_then_freeze",
    "--check",
    "namespace_isolation",
    "--check",
    "deletion",
]


def run(*arguments: str, code: int = 0, **environment: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100"} | environment)
    assert result.exit_code == code, result.output
    return result.output


def test_the_table_names_each_check_its_result_and_the_capabilities(store_url: str) -> None:
    output = run(*COMMAND, "--url", store_url)
    rows = [line.split("│") for line in output.splitlines() if line.startswith("│")]
    assert [(row[1].strip(), row[2].strip()) for row in rows] == [
        ("put_then_freeze", "passed"),
        ("deletion", "passed"),
        ("namespace_isolation", "passed"),
    ]
    assert "refuse_call: yes (SqlTokenSink has method refuse_call)" in output
    assert "3 checks passed, 0 failed, 0 not applicable" in output


def test_json_is_the_whole_report_and_nothing_else(sqlite_url: str) -> None:
    report = json.loads(run(*COMMAND, "--url", sqlite_url, "--json"))
    assert report["ok"] is True
    assert [result["name"] for result in report["results"]] == [
        "put_then_freeze",
        "deletion",
        "namespace_isolation",
    ]


async def broken_drop(self: SqlTokenSource, rollout_id: str, snapshot_id: str, version: int) -> bool:
    return False


def test_a_failed_check_is_exit_code_1_and_shows_why(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SqlTokenSource, "drop", broken_drop)
    output = run(*COMMAND, "--check", "conditional_retirement", "--url", sqlite_url, code=1)
    assert "drop of the frozen snapshot" in output
    assert "1 checks passed, 3 failed" in output


def test_a_pipe_gets_whole_lines(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "a reason of many words, " * 9 + "the last of [red]them[/red]"

    async def fails(self: SqlTokenSource, *arguments: object, **named: object) -> bool:
        raise RuntimeError(reason)

    monkeypatch.setattr(SqlTokenSource, "drop", fails)
    output = run(
        *COMMAND, "--check", "conditional_retirement", "--url", sqlite_url, code=1, COLUMNS="80"
    ).splitlines()
    table = [line for line in output if line.startswith(("┏", "┃", "┡", "│", "└"))]
    assert len({len(line) for line in table}) == 1
    assert all(line.endswith(("┓", "┃", "┩", "│", "┘")) for line in table)
    assert any(reason in line for line in table)


def test_the_ledger_and_the_staging_store_are_checked_without_a_word_on_what_they_warn_of(
    sqlite_url: str,
) -> None:
    command = [sys.executable, "-m", "tokencustody", "conformance", "--url", sqlite_url]
    chosen = (
        "--check",
        "ledger_retirement",
        "--check",
        "staged_prefix",
        "--check",
        "ledger_keeps_staged_calls",
    )
    done = subprocess.run([*command, *chosen], capture_output=True, text=True, check=True)
    assert "3 checks passed, 0 failed, 0 not applicable" in done.stdout
    assert done.stderr == ""


def test_an_unknown_check_is_refused_with_the_names_there_are(sqlite_url: str) -> None:
    output = run("conformance", "--url", sqlite_url, "--check", "put_then_thaw", code=2)
    assert "put_then_thaw" in output
    for check in registered_checks():
        assert check.name in output


def test_the_database_is_left_as_it_was(store_url: str) -> None:
    more = ("mark_incomplete", "refused_intent", "ledger_failures", "ledger_retirement", "concurrent_stages")
    attached = ("attachments_round_trip", "attachments_all_or_nothing")
    chosen = [argument for check in (*more, *attached) for argument in ("--check", check)]
    output = run(*COMMAND, *chosen, "--url", store_url)
    assert "10 checks passed, 0 failed, 0 not applicable" in output

    def rows(connection: Connection) -> dict[str, int]:
        captured = [table for table in tables.metadata.sorted_tables if table.name != "wire_schema"]
        return {
            t.name: connection.execute(select(func.count()).select_from(t)).scalar_one() for t in captured
        }

    assert set(in_transaction(parse_url(store_url), rows).values()) == {0}


def test_an_outdated_database_is_one_error_that_names_the_command_to_run(empty_postgres_url: str) -> None:
    result = CliRunner().invoke(app, ["conformance", "--url", empty_postgres_url])
    assert result.exit_code == 1
    assert isinstance(result.exception, SchemaMismatchError)
    assert "tokencustody db upgrade" in str(result.exception)
