"""`tokencustody import` as a person and a script use it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gym_import.gym_folders import line_of, write_rollout
from tests.support.rollouts import linear_rollout
from tokencustody.cli import main

HOSTILE = "call \x1b[31m[bold]\u202e"
ENTRIES = [turn.entry for turn in linear_rollout(2)]
LINES = [line_of(entry) for entry in ENTRIES]


class Ended:
    """How a command ended."""

    def __init__(self, code: object, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    # Wide enough that no message is folded.
    monkeypatch.setenv("COLUMNS", "400")

    def command(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["tokencustody", "import", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            main()
        return Ended(exited.value.code, *capsys.readouterr())

    return command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "gym"


def test_a_clean_folder_is_imported_with_exit_code_0_and_a_repeat_says_that_it_is_there(
    run, store_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rollout(folder, LINES)
    dry = run(folder, "--url", store_url, "--dry-run")
    assert (dry.code, dry.out) == (0, "it would be: 1 rollout (1 imported), 2 calls added\n")
    monkeypatch.setenv("TOKENCUSTODY_URL", store_url)
    ended = run(folder, "--run", "run-1")
    assert (ended.code, ended.out, ended.err) == (0, "1 rollout (1 imported), 2 calls added\n", "")
    assert run(folder, "--run", "run-1").out == "1 rollout (1 already there), 0 calls added\n"


def test_what_is_lost_is_told_with_exit_code_1_and_cannot_steer_a_terminal(
    run, store_url: str, folder: Path
) -> None:
    write_rollout(folder, [LINES[0], line_of(ENTRIES[1], model_call_id=HOSTILE, digest="0" * 64)])
    ended = run(folder, "--url", store_url)
    assert ended.code == 1
    assert "\x1b" not in ended.out
    assert "call \\x1b[31m[bold]\\u202e" in ended.out
    assert "rollout.tokens.jsonl  2" in ended.out
    assert "1 masked, for something of them was lost" in ended.out
    found = json.loads(run(folder, "--url", store_url, "--json").out)
    assert (found["clean"], found["dry_run"], found["strangers"]) == (False, False, [])
    (rollout,) = found["rollouts"]
    assert (rollout["outcome"], rollout["counts"]) == ("already_there", {"lost": 1})
    assert rollout["findings"][0]["model_call_id"] == HOSTILE


def test_wrong_usage_and_expected_errors_are_one_line(run, sqlite_url: str, folder: Path) -> None:
    missing = run(folder, "--url", sqlite_url)
    assert missing.code == 2
    assert "does not" in missing.err
    folder.mkdir()
    (folder / "notes.txt").touch()
    stranger = run(folder, "--url", sqlite_url)
    assert (stranger.code, stranger.out, stranger.err.count("\n")) == (1, "", 1)
    assert "there is no file of Gym's store in" in stranger.err
    write_rollout(folder, LINES)
    nothing = run(folder, "--url", sqlite_url, "--prefix", "typo")
    assert (nothing.code, nothing.out, nothing.err.count("\n")) == (1, "", 1)
    assert "begins with typo" in nothing.err
    for arguments in (("--run", "no run"), ("--url", "mysql://nowhere")):
        ended = run(folder, "--url", sqlite_url, *arguments)
        assert (ended.code, len(ended.err.splitlines())) == (1, 1), ended.err


@pytest.mark.parametrize("findings", [3, 150])
def test_a_person_is_not_shown_more_findings_than_can_be_read(
    run, sqlite_url: str, folder: Path, findings: int
) -> None:
    write_rollout(folder, [b"nonsense"] * findings)
    out = run(folder, "--url", sqlite_url).out
    assert out.count("the line is no JSON") == min(findings, 100)
    assert ("and 50 more" in out) == (findings > 100)


def test_ctrl_c_leaves_whole_rollouts_and_says_how_to_go_on(sqlite_url: str, folder: Path) -> None:
    for number in range(3):
        name = f"rollout-{number}"
        write_rollout(folder, [line_of(entry, rollout_id=name) for entry in ENTRIES], rollout_id=name)
    # The signal comes in the transaction of the second rollout.
    program = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from tokencustody.gym_import.verdict import Verdict
lock, calls = Verdict.lock_txn, []
def interrupted(self, connection):
    calls.append(lock(self, connection))
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGINT)
Verdict.lock_txn = interrupted
from tokencustody.cli import main
main()
"""
    command = [sys.executable, "-c", program, "import", str(folder), "--url", sqlite_url]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode in (1, 130, -signal.SIGINT), ended
    assert "interrupted: what was imported stays; run the command again to go on" in ended.stderr
    assert "Traceback" not in ended.stderr
    again = subprocess.run(
        [sys.executable, "-m", "tokencustody", "import", str(folder), "--url", sqlite_url],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    # Whether the transaction at hand was committed is SQLite's to say; none is half.
    assert "3 rollouts" in again.stdout
    assert any(f"{count} already there" in again.stdout for count in (1, 2))
