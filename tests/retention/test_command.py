"""`tokencustody retire`, `delete`, `gc` and `runs`, on both databases."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from select import select as ready_of
from typing import Any

import pytest
import typer

from tests.support.entries import make_entry
from tests.support.rows import rows_of, run_sql
from tests.support.staged import stage
from tokencustody import open_store
from tokencustody.cli import main
from tokencustody.schema import tables
from tokencustody.terminal.ages import moment_of

BEFORE = {"clean": "frozen", "bad": "frozen", "open": "open", "old": "retired"}
Shell = Callable[..., tuple[object, str, str]]
WAIT = 60.0


pytestmark = pytest.mark.filled(by=lambda url: asyncio.run(fill(url)))


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store_url: str) -> Shell:
    """Run a command on a filled database as from a shell; returns its exit code, output and error output."""
    monkeypatch.setenv("TOKENCUSTODY_URL", store_url)

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["tokencustody", *arguments])
        with pytest.raises(SystemExit) as exited:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return exited.value.code, out, err

    return run


async def fill(url: str) -> None:
    for run in ("run-1", "run-2"):
        async with open_store(url, run=run) as store:
            await asyncio.gather(*(store.sink.put(make_entry(rollout)) for rollout in BEFORE))
            await store.sink.mark_incomplete("bad", "lost")
            for rollout in ("clean", "only-staged"):
                staged = stage("a", rollout=rollout).snapshot
                assert (await asyncio.to_thread(store.staging.stage, staged)).ok
            for rollout in ("clean", "bad"):
                await store.source.freeze(rollout)
            await store.source.retire(["old"])


def states(url: str, run: str = "run-1") -> dict[str, str]:
    rows = asyncio.run(rows_of(url, tables.fences))
    return {row["rollout_id"]: row["state"] for row in rows if row["run"] == run}


@pytest.mark.parametrize("command", ["retire", "delete", "gc"])
def test_without_saying_what_nothing_is_removed(shell: Shell, store_url: str, command: str) -> None:
    code, out, err = shell(command, *(["--yes"] if command != "gc" else []))
    assert (code, out) == (2, "")
    assert "say wh" in err
    assert states(store_url) == BEFORE


@pytest.mark.parametrize(
    "arguments",
    [["retire", "--run", "run-1"], ["delete", "clean", "--run", "run-1"], ["delete", "--run", "run-1"]],
)
def test_with_nobody_to_ask_nothing_is_removed(shell: Shell, store_url: str, arguments: list[str]) -> None:
    code, out, err = shell(*arguments)
    assert (code, out) == (2, "")
    assert "nobody to ask" in err
    assert states(store_url) == BEFORE


def test_every_option_says_which_rollouts_and_a_dry_run_tells_them(shell: Shell, store_url: str) -> None:
    of_both_runs = {
        ("--state", "open"): 2,
        ("--incomplete",): 2,
        ("--complete",): 2,
        ("--prefix", "cl"): 2,
        ("--not-exported",): 4,
        ("--exported",): 0,
        ("--partly-exported",): 0,
        ("--older-than", "0s"): 4,
        ("--older-than", "1h"): 0,
        ("--older-than", "2020-01-01"): 0,
    }
    for arguments, expected in of_both_runs.items():
        for run, rollouts in (([], expected), (["--run", "run-1"], expected // 2)):
            code, out, err = shell("retire", *arguments, *run, "--dry-run", "--json")
            assert (code, err) == (0, "")
            assert json.loads(out)["matched"]["rollouts"] == rollouts, arguments
    assert states(store_url) == BEFORE == states(store_url, "run-2")


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (["--state", "open"], {"open": "retired"}),
        (["clean", "--complete"], {"clean": "retired"}),
    ],
)
def test_what_is_asked_for_is_retired_and_nothing_else(
    shell: Shell, store_url: str, arguments: list[str], changes: dict[str, str]
) -> None:
    code, out, err = shell("retire", *arguments, "--run", "run-1", "--yes", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["removed"]["rollouts"] == len(changes)
    assert (document["left"], document["missed"], document["dry_run"]) == ([], {}, False)
    assert states(store_url) == BEFORE | changes
    assert states(store_url, "run-2") == BEFORE


def test_a_person_is_told_what_would_go(shell: Shell) -> None:
    code, out, err = shell("retire", "--run", "run-1", "--dry-run")
    assert (code, err) == (0, "")
    assert out.startswith(
        "would retire 2 rollouts (2 frozen, 1 incomplete, 2 never exported, 0 partly exported) with 2 calls of "
    )
    code, out, err = shell("retire", "--run", "run-1", "--yes")
    assert out.startswith("retired 2 rollouts (3 rows) in ")
    code, out, err = shell("retire", "--run", "run-1", "--yes")
    assert (code, err) == (0, "")
    assert out.startswith("retired 0 rollouts in ")


def test_what_is_exported_in_part_is_told_and_goes_only_when_it_is_asked_for(
    shell: Shell, store_url: str, tmp_path: Path
) -> None:
    async def fill_more() -> None:
        async with open_store(store_url, run="run-3") as store:
            for call, answer in (("a", 2), ("b", 3)):
                await store.sink.put(make_entry("part", call, prompt=[1], generation=[answer]))
                child = make_entry("part", f"{call}-2", prompt=[1, answer, 4], generation=[5], parent=call)
                await store.sink.put(child)
            await store.sink.put(make_entry("part", "other", prompt=[7], generation=[8]))
            await store.source.freeze("part")

    asyncio.run(fill_more())
    assert shell("export", str(tmp_path / "out"), "--run", "run-3")[0] == 0
    for how in ("--dry-run", "--yes"):
        code, out, err = shell("retire", "--run", "run-3", "--exported", how)
        assert (code, " 0 rollouts " in out) == (0, True)
        assert err == "1 rollout left, exported in part: --partly-exported asks for such\n"
        assert states(store_url, "run-3") == {"part": "frozen"}
    code, out, err = shell("retire", "--run", "run-3", "--dry-run")
    assert "0 never exported, 1 partly exported)" in out
    assert shell("retire", "--exported", "--partly-exported", "--yes")[0] == 2
    code, out, err = shell("retire", "--run", "run-3", "--partly-exported", "--yes")
    assert (code, out.startswith("retired 1 rollout ("), err) == (0, True, "")
    assert states(store_url, "run-3") == {"part": "retired"}


def test_named_rollouts_that_are_left_are_told_with_the_reason(shell: Shell, store_url: str) -> None:
    code, out, err = shell("retire", "clean", "open", "old", "nobody", "--run", "run-1", "--yes")
    assert code == 1
    assert out.startswith("retired 1 rollout")
    assert err.splitlines() == [
        "left open: it is open, and such a one goes only by --state open",
        "left nobody: there is no such rollout",
    ]
    assert states(store_url) == BEFORE | {"clean": "retired"}
    code, out, err = shell("delete", "clean", "open", "old", "nobody", "--run", "run-1", "--yes", "--json")
    assert code == 1
    assert json.loads(out)["missed"] == {"open": "it is open, and such a one goes only by --state open"}
    assert states(store_url) == {"bad": "frozen", "open": "open"}
    code, out, err = shell("retire", "bad", "--incomplete", "--complete", "--run", "run-1", "--yes")
    assert (code, err) == (1, "left bad: it is frozen, and something else was asked for\n")


@pytest.mark.parametrize("command", [["retire"], ["delete"], ["retire", "--complete"]], ids=" ".join)
def test_a_dry_run_tells_what_would_be_left_as_the_command_does(shell: Shell, command: list[str]) -> None:
    assert shell(*command, "clean", "--run", "run-1", "--dry-run")[0] == 0
    asked = [*command, "bad", "clean", "open", "old", "nobody", "--run", "run-1"]
    dry, listed, real = (shell(*asked, *how) for how in (["--dry-run"], ["--dry-run", "--json"], ["--yes"]))
    assert (dry[0], dry[2]) == (listed[0], real[2]) == (real[0], real[2]) == (1, real[2])
    assert {f"left {name}: {why}" for name, why in json.loads(listed[1])["missed"].items()} == set(
        real[2].splitlines()
    )


def test_ids_that_are_in_several_runs_need_the_run(shell: Shell, store_url: str) -> None:
    code, _, err = shell("retire", "clean", "--yes")
    assert code == 2
    assert "run-1, run-2" in err
    assert states(store_url) == BEFORE == states(store_url, "run-2")


def test_by_default_delete_takes_frozen_and_retired_rollouts(shell: Shell, store_url: str) -> None:
    code, out, _ = shell("delete", "--run", "run-1", "--older-than", "0s", "--yes")
    assert code == 0
    assert out.startswith("deleted 3 rollouts")
    assert states(store_url) == {"open": "open"}
    assert states(store_url, "run-2") == BEFORE
    code, out, _ = shell("delete", "--run", "run-1", "--state", "open", "--yes")
    assert states(store_url) == {}


def test_a_whole_run_goes_only_by_its_name(shell: Shell, store_url: str) -> None:
    for wrong in (["--yes"], ["--confirm", "run-2"]):
        assert shell("delete", "--run", "run-1", *wrong)[0] == 2
    assert shell("delete", "--state", "frozen", "--run", "run-1", "--confirm", "run-1")[0] == 2
    assert states(store_url) == BEFORE
    code, out, _ = shell("delete", "--run", "run-1", "--dry-run")
    assert code == 0
    assert out.startswith(
        "would delete run run-1: 4 rollouts (1 open, 2 frozen, 1 retired, 4 never exported, 0 partly exported), 3 calls"
    )
    code, out, err = shell("delete", "--run", "run-1", "--confirm", "run-1")
    assert (code, err) == (0, "")
    assert out.startswith("deleted 4 rollouts (4 rows) and 2 staged calls in ")
    assert states(store_url) == {}
    assert states(store_url, "run-2") == BEFORE
    assert [run["run"] for run in json.loads(shell("runs", "--json")[1])["runs"]] == ["run-2"]
    code, _, err = shell("delete", "--run", "run-1", "--confirm", "run-1")
    assert (code, "which has the runs run-2" in err) == (1, True)


def test_gc_collects_staged_calls_and_old_fences(shell: Shell, store_url: str) -> None:
    code, out, err = shell(
        "gc", "--staged-older-than", "0s", "--fences-older-than", "0s", "--dry-run", "--json"
    )
    assert (code, err) == (0, "")
    assert json.loads(out)["matched"] == {"staged_calls": 4, "fences": 2}
    assert shell("gc", "--staged-older-than", "1h", "--fences-older-than", "1h")[1].startswith(
        "collected 0 fences in"
    )
    assert states(store_url) == BEFORE
    code, out, err = shell("gc", "--staged-older-than", "0s", "--run", "run-1")
    assert (code, err) == (0, "")
    assert out.startswith("collected 0 fences and 2 staged calls in ")
    assert {row["run"] for row in asyncio.run(rows_of(store_url, tables.staged_calls))} == {"run-2"}
    code, out, err = shell("gc", "--fences-older-than", "0s", "--json")
    assert json.loads(out)["removed"] == {"rollouts": 2, "rows": 0, "staged_calls": 0}
    assert "old" not in states(store_url)


def test_vacuum_is_for_sqlite(shell: Shell, store_url: str) -> None:
    code, out, err = shell("gc", "--vacuum")
    if store_url.startswith("sqlite"):
        assert (code, err) == (0, "")
        assert "the file shrank from " in out
    else:
        assert (code, out) == (2, "")
        assert "autovacuum" in err


def test_the_runs_are_a_table_for_a_person(shell: Shell) -> None:
    code, out, err = shell("runs")
    assert (code, err) == (0, "")
    heading, *rows, last = out.splitlines()
    assert heading.split()[:7] == ["run", "rollouts", "open", "frozen", "retired", "incomplete", "exported"]
    assert [row.split()[:7] for row in rows] == [
        ["run-1", "4", "1", "2", "1", "1", "0"],
        ["run-2", "4", "1", "2", "1", "1", "0"],
        ["all", "runs", "8", "2", "4", "2", "2"],
    ]
    assert last == "2 runs"
    document = json.loads(shell("runs", "--json")[1])
    assert document["totals"]["rollouts"] == 8
    assert document["totals"]["orphans"] == 4


def test_text_of_the_database_cannot_steer_the_terminal(shell: Shell, store_url: str) -> None:
    statement = "UPDATE staged_calls SET run = :run WHERE run = 'run-1' AND rollout_id = 'only-staged'"
    asyncio.run(run_sql(store_url, statement, run="\x1b[31m"))
    out = shell("runs")[1]
    assert r"\x1b[31m" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("age", "seconds"),
    [("90s", 90), ("30m", 1800), ("12h", 43_200), ("7d", 604_800), ("2w", 1_209_600), (" 0s ", 0)],
)
def test_an_age_is_a_duration(age: str, seconds: int) -> None:
    before = datetime.now(UTC) - timedelta(seconds=seconds)
    assert before <= moment_of(age, "--older-than") <= before + timedelta(seconds=10)


@pytest.mark.parametrize(
    ("age", "moment"),
    [
        ("2026-01-31", "2026-01-31T00:00:00+00:00"),
        ("2026-01-31T12:00", "2026-01-31T12:00:00+00:00"),
        ("2026-01-31T12:00:00+02:00", "2026-01-31T10:00:00+00:00"),
    ],
)
def test_an_age_is_a_date_in_utc_unless_it_says_otherwise(age: str, moment: str) -> None:
    assert moment_of(age, "--older-than") == datetime.fromisoformat(moment)


@pytest.mark.parametrize(
    ("age", "said"),
    [
        ("", "is not a duration"),
        ("7", "is not a duration"),
        ("-7d", "is not a duration"),
        ("7y", "is not a duration"),
        ("\u0667d", "is not a duration"),
        ("1.5h", "is not a duration"),
        ("2026-13-01", "is not a duration"),
        ("2999-01-01", "is in the future"),
        ("999999999w", "longer ago than dates go"),
        ("0001-01-01T00:00+14:00", "longer ago than dates go"),
    ],
)
def test_what_is_no_age_is_refused_with_the_option_and_what_to_give(age: str, said: str) -> None:
    with pytest.raises(typer.BadParameter, match=said) as refused:
        moment_of(age, "--older-than")
    assert refused.value.param_hint == "--older-than"


class Terminal:
    """A terminal in which a command runs."""

    def __init__(self, *arguments: str, program: str = "") -> None:
        heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        command = [
            sys.executable,
            "-c",
            heard + program + "from tokencustody.__main__ import main\nmain()",
            *arguments,
        ]
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self.shown = ""

    def until(self, words: str) -> None:
        while words not in self.shown:
            assert ready_of([self._ours], [], [], WAIT)[0], self.shown
            self.shown += os.read(self._ours, 65_536).decode(errors="replace")

    def type(self, words: str) -> None:
        os.write(self._ours, words.encode() + b"\n")

    def ended(self) -> int:
        """Return the exit code, once all that it shows is read."""
        try:
            while more := os.read(self._ours, 65_536):
                self.shown += more.decode(errors="replace")
        except OSError:
            pass  # nobody writes to it any more
        return self.process.wait(WAIT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.mark.parametrize(
    ("arguments", "question", "answer", "goes"),
    [
        (
            ["retire", "--run", "run-1"],
            "Retire 2 rollouts (2 frozen, 1 incomplete, 2 never exported, 0 partly exported)",
            "y",
            True,
        ),
        (["retire", "--run", "run-1"], "Retire 2 rollouts", "n", False),
        (["delete", "--run", "run-1"], "Type the run's name", "run-1", True),
        (["delete", "--run", "run-1"], "Type the run's name", "y", False),
    ],
)
def test_a_person_is_asked_before_anything_goes(
    sqlite_url: str, arguments: list[str], question: str, answer: str, goes: bool
) -> None:
    with closing(Terminal(*arguments, "--url", sqlite_url)) as terminal:
        terminal.until(question)
        terminal.until(": ")
        assert states(sqlite_url) == BEFORE
        terminal.type(answer)
        assert terminal.ended() == (0 if goes else 1)
    assert (states(sqlite_url) == BEFORE) is not goes


# The second transaction waits for a line before it commits.
HELD = """
import asyncio, sys
from tokencustody.database.faults import FAULT_POINTS
done = 0
async def hold():
    global done
    done += 1
    if done == 2:
        print("holding", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
FAULT_POINTS["before commit"] = hold
"""


def test_ctrl_c_ends_it_after_the_rollout_that_is_being_removed_and_says_what_was_done(
    store_url: str,
) -> None:
    arguments = ["retire", "--not-exported", "--yes", "--url", store_url]
    with closing(Terminal(*arguments, program=HELD)) as terminal:
        terminal.until("holding")
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("interrupted: stopping after the rollout that is being removed")
        terminal.type("go on")
        assert terminal.ended() == 130
    assert "retired 2 rollouts (3 rows); run it again to go on" in terminal.shown
    assert "Traceback" not in terminal.shown
    assert [*states(store_url).values(), *states(store_url, "run-2").values()].count("retired") == 2 + 2


def test_a_second_ctrl_c_ends_it_at_once_and_leaves_that_rollout_whole(store_url: str) -> None:
    arguments = ["retire", "--not-exported", "--yes", "--url", store_url]
    with closing(Terminal(*arguments, program=HELD)) as terminal:
        terminal.until("holding")
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("interrupted: stopping")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.ended() == 130
    assert "retired 1 rollout (" in terminal.shown
    assert [*states(store_url).values(), *states(store_url, "run-2").values()].count("retired") == 1 + 2
    calls: dict[Any, int] = {}
    for row in asyncio.run(rows_of(store_url, tables.entries)):
        key = (row["run"], row["rollout_id"])
        calls[key] = calls.get(key, 0) + 1
    assert len(calls) == 5


def test_a_database_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = str(tmp_path / "none.db")
    for arguments in (
        ["runs"],
        ["retire", "--run", "r", "--yes"],
        ["delete", "--run", "r", "--confirm", "r"],
        ["gc", "--staged-older-than", "1h"],
        ["gc", "--vacuum"],
    ):
        monkeypatch.setattr(sys, "argv", ["tokencustody", *arguments, "--url", url])
        with pytest.raises(SystemExit, match="1"):
            main()
        out, err = capsys.readouterr()
        assert out == ""
        assert len(err.splitlines()) == 1, err
        assert err.startswith("error: ")
    assert not list(tmp_path.iterdir())
