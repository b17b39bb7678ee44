"""A name that nothing has, and a server that is not there, are told by every command before it does anything."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.entries import make_entry
from tests.support.rich import rows
from tests.support.staged import stage
from tokencustody import open_store
from tokencustody.cli import main
from tokencustody.database.transactions import Database
from tokencustody.store import SqlStagingStore
from tokencustody.txn import asked

Shell = Callable[..., tuple[object, str, str]]
OF_RUNS = {
    "verify": ["verify"],
    "export": ["export", "OUT"],
    "retire": ["retire", "--yes"],
    "delete": ["delete", "--state", "frozen", "--yes"],
    "delete a run": ["delete", "--confirm", "typo"],
    "delete a run, asking": ["delete"],
    "gc": ["gc", "--staged-older-than", "0s"],
    "gc of fences": ["gc", "--fences-older-than", "0s", "--dry-run"],
    "copy": ["copy", "--to", "TARGET"],
}


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Shell:
    def run(url: str, *arguments: str) -> tuple[object, str, str]:
        places = {"OUT": str(tmp_path / "out"), "TARGET": str(tmp_path / "target.db")}
        monkeypatch.setenv("TOKENCUSTODY_URL", url)
        monkeypatch.setattr(sys, "argv", ["tokencustody", *(places.get(each, each) for each in arguments)])
        with pytest.raises(SystemExit) as exited:
            main()
        return exited.value.code, *capsys.readouterr()

    return run


async def _fill(url: str, runs: int) -> None:
    for number in range(runs):
        async with open_store(url, run=f"run-{number:02}") as store:
            await store.sink.put(make_entry("rollout"))
            await store.source.freeze("rollout")


@pytest.mark.parametrize("command", OF_RUNS.values(), ids=OF_RUNS)
def test_a_run_that_is_not_there_is_an_error_that_lists_the_runs(
    shell: Shell, store_url: str, tmp_path: Path, command: list[str]
) -> None:
    asyncio.run(_fill(store_url, 2))
    with SqlStagingStore(store_url, run="only-staged") as staging:
        assert staging.stage(stage("call", rollout="staged").snapshot).ok
    before = asyncio.run(rows(store_url))

    code, out, err = shell(store_url, *command, "--run", "typo")

    assert (code, out) == (2 if command == ["verify"] else 1, "")
    assert err.startswith("error: there is no run typo in ")
    assert err.endswith(", which has the runs only-staged, run-00, run-01\n")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "target.db").exists()
    assert asyncio.run(rows(store_url)) == before


@pytest.mark.parametrize("command", ["verify", "export", "copy"])
def test_a_prefix_with_which_nothing_begins_is_an_error(
    shell: Shell, store_url: str, tmp_path: Path, command: str
) -> None:
    asyncio.run(_fill(store_url, 1))
    for more in ([], ["--run", "run-00"]):
        code, out, err = shell(store_url, *OF_RUNS[command], "--prefix", "Roll", *more)
        assert (code, out, err.count("\n")) == (2 if command == "verify" else 1, "", 1)
        assert err.endswith(" has an id that begins with Roll\n")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "target.db").exists()


def test_of_many_runs_ten_are_listed_and_of_none_that_there_is_none(shell: Shell, store_url: str) -> None:
    assert shell(store_url, "retire", "--run", "typo")[2].endswith(", which has no run at all\n")
    asyncio.run(_fill(store_url, 11))
    first_ten = ", ".join(f"run-{number:02}" for number in range(10))
    assert shell(store_url, "retire", "--run", "typo")[2].endswith(f", which has the runs {first_ten}, …\n")


@pytest.mark.parametrize("command", [*OF_RUNS.values(), ["runs"]], ids=[*OF_RUNS, "runs"])
def test_a_server_that_refuses_connections_is_told_within_one_short_deadline(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr(asked, "REACH_DEADLINE", 0.3)
    deadlines: list[float] = []
    begin = Database.end_of_patience

    def end_of_patience(database: Database) -> float:
        deadlines.append(database._key.deadline)
        return begin(database)

    monkeypatch.setattr(Database, "end_of_patience", end_of_patience)
    run = ["--run", "typo"] if command != ["runs"] else []
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        url = f"postgresql://user@127.0.0.1:{bound.getsockname()[1]}/database"
        code, out, err = shell(url, *command, *run)
    # Its own, and only one: another would be that of the store, or that of the next run.
    assert deadlines == [0.3]
    assert (code, out, err.count("\n")) == (2 if command == ["verify"] else 1, "", 1)
    assert "is not available" in err
    assert list(tmp_path.iterdir()) == []
