"""`tokencustody verify`, as a shell and as a script see it, on both databases."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from tests.support import commands
from tests.support.filling import fill as fill_rows
from tests.support.machine import needs_linux
from tests.verify.verifying import RUN, change, fill
from tokencustody.cli import main
from tokencustody.verify import running
from tokencustody.verify.checkpoint import Checkpoint, Position

HOSTILE = "[red]x[/red]\x1b[31m"


def _run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, url: str, *args: str
) -> tuple[Any, str, str]:
    monkeypatch.setenv("TOKENCUSTODY_URL", url)
    monkeypatch.setattr(sys, "argv", ["tokencustody", "verify", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_a_sound_database_ends_with_0_and_says_what_was_looked_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, store_url: str
) -> None:
    fill(store_url)

    code, out, err = _run(capsys, monkeypatch, store_url)

    assert (code, err) == (0, "")
    figures = dict(re.findall(r"^(\w[\w ]*?\w) {2,}(\S+)", out, re.MULTILINE))
    assert figures["rollouts"] == "18"
    assert figures["complete records"] == "34"
    assert figures["ledger rows"] == "13"
    assert figures["staged calls"] == "9"
    assert out.endswith("nothing is wrong\n")


def test_findings_end_with_1_and_stand_in_table_json_and_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, store_url: str, tmp_path: Path
) -> None:
    fill(store_url)
    change(store_url, "intents", "model_call_id", lambda _: HOSTILE, rollout_id="dangling")
    change(store_url, "fences", "incomplete", lambda _: False, rollout_id="dangling")
    # As one that was frozen before there were seals.
    for column in ("sealed_sha256", "seal_version"):
        change(store_url, "snapshot_versions", column, lambda _: None, rollout_id="dangling", version=1)
    report = tmp_path / "report.jsonl"

    code, table, err = _run(capsys, monkeypatch, store_url, "--report", str(report), "--run", RUN)
    json_code, document, _ = _run(capsys, monkeypatch, store_url, "--json", "--jobs", "1")

    assert (code, json_code, err) == (1, 1, "")
    assert r"[red]x[/red]\x1b[31m" in table
    assert "\x1b" not in table + document
    assert "1 finding in 1 rollout" in table
    found = json.loads(document)
    (finding,) = found["findings"]
    assert (finding["rule"], finding["rollout_id"], finding["model_call_id"]) == (
        "fence_incomplete",
        "dangling",
        HOSTILE,
    )
    assert (found["ok"], found["findings_by_rule"], found["calls"]) == (False, {"fence_incomplete": 1}, 34)
    assert [json.loads(line) for line in report.read_text().splitlines()] == [finding]


def test_what_cannot_be_verified_ends_with_2_and_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, store_url: str, tmp_path: Path
) -> None:
    fill(store_url)
    missing, checkpoint = tmp_path / "missing.db", tmp_path / "checkpoint.json"
    checkpoint.write_text("{}")

    for url, args in (
        (str(missing), ()),
        (store_url, ("--rollout", "nobody")),
        (store_url, ("--run", "no/run")),
        (store_url, ("--checkpoint", str(checkpoint))),
    ):
        code, out, err = _run(capsys, monkeypatch, url, *args)
        assert (code, out) == (2, "")
        assert re.fullmatch(r"error: [^\n]+\n", err)
    assert not missing.exists()
    for option in ("--report", "--checkpoint"):
        # Not even the superuser makes a file in the second.
        for folder in (tmp_path / "none", Path("/proc")):
            code, out, err = _run(capsys, monkeypatch, store_url, option, str(folder / "file"))
            assert (code, out) == (2, "")
            assert option in err


def test_an_empty_database_is_not_said_to_be_sound(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, store_url: str
) -> None:
    code, out, err = _run(capsys, monkeypatch, store_url)
    assert (code, err) == (0, "")
    assert out.endswith("0 rollouts were looked at: the database has none\n")


def _leave_all_to_other_processes_and_save_every_step() -> None:
    os.setsid()
    running._SOON = running._SAVE_EVERY = 0.0
    running._is_up = lambda first: first.result() > 0
    save = Checkpoint.save

    def save_and_wait(checkpoint: Checkpoint, position: Position) -> None:
        save(checkpoint, position)
        # Until it is stopped, which may come late; on its way out it saves too.
        while sys.exc_info()[1] is None:
            time.sleep(0.05)

    Checkpoint.save = save_and_wait  # type: ignore[method-assign]


def _children(process: ForkServerProcess) -> list[int]:
    """Return the processes that any thread of a process has started."""
    listed = [each.read_text() for each in Path(f"/proc/{process.pid}/task").glob("*/children")]
    return [int(child) for child in " ".join(listed).split()]


def _is_verifying(pid: int) -> bool:
    """Return whether a worker has the threads of its database besides its own two."""
    try:
        return len(list(Path(f"/proc/{pid}/task").iterdir())) > 2
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "SIGKILL"])
def test_what_was_stopped_leaves_no_process_and_goes_on(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    store_url: str,
    tmp_path: Path,
    stop: signal.Signals,
) -> None:
    needs_linux("/proc, which tells the children of a process")
    fill(store_url)
    # Rows without sense: each is a finding, of which none may be lost or come twice.
    fill_rows(store_url, 4_000)
    checkpoint, report = tmp_path / "checkpoint.json", tmp_path / "report.jsonl"
    said = tmp_path / "said"
    with said.open("wb") as file:
        process = commands.start(
            ["verify", "--url", store_url, "--jobs", "2", "--checkpoint", str(checkpoint)],
            file.fileno(),
            file.fileno(),
            before=_leave_all_to_other_processes_and_save_every_step,
        )
    while not checkpoint.exists() or not any(map(_is_verifying, workers := _children(process))):
        assert process.exitcode is None, said.read_text()
        time.sleep(0.01)

    assert process.pid is not None
    if stop is signal.SIGINT:
        os.killpg(process.pid, stop)
    else:
        process.kill()
    process.join()

    if stop is signal.SIGINT:
        assert process.exitcode == 130
        assert said.read_text() == "interrupted: nothing was changed; the same command goes on\n"
    for worker in workers:
        _wait_for_end(worker)
    done = json.loads(checkpoint.read_text())
    assert 0 < done["counts"]["rollouts"] < 418
    monkeypatch.setattr(running, "_SOON", 0.0)
    goes_on = ("--checkpoint", str(checkpoint), "--json", "--report", str(report), "--jobs", "2")
    code, out, err = _run(capsys, monkeypatch, store_url, *goes_on)
    assert (code, err) == (1, "")
    found = json.loads(out)
    assert found["rollouts"] == 418
    names = [(each["rule"], each["rollout_id"], each["model_call_id"]) for each in found["findings"]]
    assert len(set(names)) == len(names) == len(report.read_text().splitlines())
    assert not checkpoint.exists()


def _wait_for_end(pid: int) -> None:
    give_up = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < give_up:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()
