"""`tokencustody copy` as a person and a script use it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.support.entries import make_entry
from tests.support.rich import fill_richly, rows
from tokencustody import open_store
from tokencustody.cli import main


class Ended:
    """How a command ended."""

    def __init__(self, code: object, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def command(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["tokencustody", "copy", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            main()
        return Ended(exited.value.code, *capsys.readouterr())

    return command


@pytest.fixture
def target(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'target.db'}"


def test_a_copy_says_what_it_did_and_what_it_left_out(run, store_url: str, target: str) -> None:
    asyncio.run(fill_richly(store_url))
    dry = run("--from", store_url, "--to", target, "--dry-run")
    assert dry.code == 0
    assert dry.out.splitlines()[-1] == "it would be: 8 rollouts (7 copied, 1 left out)"
    ended = run("--from", store_url, "--to", target)
    assert (ended.code, ended.err) == (0, "")
    assert "open" in ended.out
    assert "it is open" in ended.out
    assert "8 rollouts (7 copied, 1 left out), " in ended.out
    found = json.loads(run("--from", store_url, "--to", target, "--include-open", "--json").out)
    assert (found["clean"], found["outcomes"]) == (True, {"already_there": 7, "copied": 1})
    assert asyncio.run(rows(target)) == asyncio.run(rows(store_url))


def test_a_conflict_is_told_with_exit_code_1(run, store_url: str, target: str) -> None:
    async def fill(url: str) -> None:
        async with open_store(url) as store:
            await store.sink.put(make_entry("rollout"))

    for url in (store_url, target):
        asyncio.run(fill(url))
    ended = run("--from", store_url, "--to", target, "--include-open")
    assert ended.code == 1
    assert "the target's history of the rollout is another one" in ended.out
    assert "1 rollout (1 conflict), 0 rows written" in ended.out


def test_expected_errors_are_one_line(
    run, new_sqlite_url: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENCUSTODY_URL", new_sqlite_url)
    missing = run("--to", target)
    assert (missing.code, len(missing.err.splitlines())) == (1, 1)
    assert "does not exist" in missing.err
    asyncio.run(fill_richly(new_sqlite_url))
    same = run("--to", new_sqlite_url)
    assert (same.code, len(same.err.splitlines())) == (1, 1)
    assert "are the same database" in same.err
    assert run("--from", new_sqlite_url).code == 2
