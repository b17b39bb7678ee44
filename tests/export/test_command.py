"""`tokencustody export` as a person or a script uses it."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.export.exports import RUN, manifest, parquet_rows, put_linear, put_rollout
from tests.support.entries import make_entry
from tokencustody import open_store
from tokencustody.chains.reasons import REMEDIES, Why
from tokencustody.cli import main


class Ended:
    """How a command ended."""

    def __init__(self, code: object, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    # Wide enough that no message is folded.
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["tokencustody", "export", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            main()
        return Ended(exited.value.code, *capsys.readouterr())

    return run


def test_a_person_reads_what_was_exported_and_what_was_left_out(
    store_url: str, tmp_path: Path, run: Any
) -> None:
    asyncio.run(put_linear(store_url, 3))
    asyncio.run(put_rollout(store_url, [make_entry("open")], freeze=False))
    rewards = tmp_path / "rewards.csv"
    rewards.write_text("rollout_id,reward\nrollout-000,1\nstranger,2\n")
    ended = run(tmp_path / "out", "--url", store_url, "--rewards", rewards)
    assert (ended.code, ended.err) == (0, "")
    assert f"{tmp_path / 'out'}: parquet, written" in ended.out
    lines = [" ".join(line.split()) for line in ended.out.splitlines()]
    assert {"rollouts 3", "rows 3", "calls 9", "marked 3", "retired 0", "left out: not_frozen 1"} <= set(
        lines
    )
    assert "rollouts without reward: 2 (rollout-001, rollout-002)" in lines
    assert "rewards without rollout: 1 (stranger)" in lines
    assert "was finished before" in run(tmp_path / "out", "--url", store_url, "--rewards", rewards).out


def test_a_script_reads_json_and_the_url_of_the_environment(
    store_url: str, tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(put_linear(store_url, 2))
    monkeypatch.setenv("TOKENCUSTODY_URL", store_url)
    ended = run(tmp_path / "out", "--format", "calls", "--json", "--retire")
    found = json.loads(ended.out)
    assert (ended.code, found["ok"], found["rollouts"], found["retired"]) == (0, True, 2, 2)
    assert found["export_id"] == manifest(tmp_path / "out")["export_id"]
    assert found["destination"] == str(tmp_path / "out")


def test_options_choose_rollouts(store_url: str, tmp_path: Path, run: Any) -> None:
    asyncio.run(put_linear(store_url, 3))
    asyncio.run(put_linear(store_url, 1, run="run-2"))
    chosen = {
        ("--run", "run-2"): 1,
        ("--prefix", "rollout-00"): 4,
        ("--rollout", "rollout-001", "--rollout", "rollout-002"): 2,
        ("--before", "2020-01-01"): 0,
        ("--run", RUN, "--unexported", "--shared-calls", "every", "--include-incomplete"): 3,
    }
    for number, (options, rows) in enumerate(chosen.items()):
        out = tmp_path / str(number)
        assert run(out, "--url", store_url, "--no-mark", *options).code == 0
        assert len(parquet_rows(out)) == rows


def test_what_asks_for_a_person_gives_exit_code_1(store_url: str, tmp_path: Path, run: Any) -> None:
    asyncio.run(put_linear(store_url, 2))
    unknown = run(tmp_path / "unknown", "--url", store_url, "--rollout", "typo")
    told = "rollout typo is not there, or not with what else was asked for\n"
    assert (unknown.code, unknown.err) == (1, told)
    assert "nothing to export" in unknown.out
    assert not (tmp_path / "unknown").exists()
    partly = run(
        tmp_path / "partly", "--url", store_url, "--no-mark", "--rollout", "typo", "--rollout", "rollout-001"
    )
    assert (partly.code, partly.err) == (1, told)
    assert len(parquet_rows(tmp_path / "partly")) == 1
    assert json.loads(run(tmp_path / "x", "--url", store_url, "--rollout", "typo", "--json").out)[
        "unknown"
    ] == ["typo"]
    assert run(tmp_path / "out", "--url", store_url, "--no-mark").code == 0

    async def mark() -> None:
        async with open_store(store_url, run=RUN) as store:
            await store.sink.mark_incomplete("rollout-001")

    asyncio.run(mark())
    ended = run(tmp_path / "out", "--url", store_url, "--retire")
    assert ended.code == 1
    assert "kept: rollout rollout-001 of run run-1: changed_since" in ended.out


def test_an_export_of_which_everything_is_left_out_ends_with_1_says_what_to_do_and_leaves_no_folder(
    store_url: str, tmp_path: Path, run: Any
) -> None:
    for name in ("a", "b"):
        asyncio.run(
            put_rollout(
                store_url,
                [make_entry(name, "one", generation=[1]), make_entry(name, "two", generation=[2])],
            )
        )
    (tmp_path / "mine").mkdir()
    for out in ("new/out", "mine"):
        ended = run(tmp_path / out, "--url", store_url)
        assert (ended.code, ended.err) == (1, "")
        assert f"everything was left out: nothing was written to {tmp_path / out}" in ended.out
        assert "left out: ambiguous_retry" in ended.out
        assert f"ambiguous_retry: {REMEDIES['ambiguous_retry']}" in ended.out
        assert "left out: rollout b of run run-1, call two: ambiguous_retry" in ended.out
    assert not (tmp_path / "new").exists()
    # Only what was made for it goes.
    assert list((tmp_path / "mine").iterdir()) == []
    found = json.loads(run(tmp_path / "new/out", "--url", store_url, "--json").out)
    assert (found["ok"], found["all_left_out"], found["export_id"]) == (False, True, "")
    assert {(each["rollout_id"], each["model_call_id"]) for each in found["listed"]} == {
        (name, call) for name in ("a", "b") for call in ("one", "two")
    }
    # The remedy that was named.
    kept = run(tmp_path / "mine", "--url", store_url, "--siblings", "keep")
    assert (kept.code, len(parquet_rows(tmp_path / "mine"))) == (0, 4)


def test_a_person_reads_where_rows_begin_and_what_a_loss_must_mask(
    store_url: str, tmp_path: Path, run: Any
) -> None:
    first = make_entry(model_call_id="first", prompt=[1], generation=[2, 3], log_probs=[math.nan, -0.5])
    second = make_entry(model_call_id="second", prompt=[9], generation=[4], parent="first")
    asyncio.run(put_rollout(store_url, [first, second]))
    split = run(tmp_path / "split", "--url", store_url)
    lines = [" ".join(line.split()) for line in split.out.splitlines()]
    assert {"rows 2", "new row: prompt_does_not_begin_with_parent 1"} <= set(lines)
    assert "1 trained token without a finite log probability" in split.out
    cut = run(tmp_path / "cut", "--url", store_url, "--on-break", "first")
    assert "left out: prompt_does_not_begin_with_parent" in cut.out
    assert (cut.code, len(parquet_rows(tmp_path / "cut"))) == (0, 1)
    masked = run(tmp_path / "masked", "--url", store_url, "--on-break", "mask")
    assert (masked.code, "left out: broken" in masked.out) == (1, True)


def test_every_reason_has_a_remedy_and_stands_in_the_documentation() -> None:
    document = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    for why in Why:
        assert why in REMEDIES, why
        assert f"\n| `{why}` | " in document, why


def test_an_export_with_nothing_new_ends_with_0_and_leaves_no_folder_that_stops_the_next(
    store_url: str, tmp_path: Path, run: Any
) -> None:
    asyncio.run(put_linear(store_url, 1))
    asyncio.run(put_rollout(store_url, [make_entry("open")], freeze=False))
    assert run(tmp_path / "first", "--url", store_url, "--unexported").code == 0
    for options in (["--unexported"], ["--before", "2020-01-01"], ["--rollout", "open"]):
        nothing = run(tmp_path / "nightly" / "out", "--url", store_url, *options)
        assert (nothing.code, nothing.err) == (0, "")
        assert "nothing to export" in nothing.out
        assert not (tmp_path / "nightly").exists()
    asyncio.run(put_rollout(store_url, [make_entry("new")]))
    assert run(tmp_path / "nightly" / "out", "--url", store_url, "--unexported").code == 0
    assert [row["rollout_id"] for row in parquet_rows(tmp_path / "nightly" / "out")] == ["new"]


def test_a_finished_export_of_a_run_that_is_deleted_since_says_so(
    store_url: str, tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(put_linear(store_url, 1))
    assert run(tmp_path / "out", "--url", store_url, "--run", RUN).code == 0
    delete = ["tokencustody", "delete", "--url", store_url, "--run", RUN, "--confirm", RUN]
    monkeypatch.setattr(sys, "argv", delete)
    with pytest.raises(SystemExit):
        main()
    again = run(tmp_path / "out", "--url", store_url, "--run", RUN)
    assert (again.code, "deleted_since" in again.out) == (1, True)


@pytest.mark.parametrize("form", ["parquet", "calls", "gym"])
def test_files_and_folders_of_an_export_are_their_owners_alone(
    sqlite_url: str, tmp_path: Path, run: Any, form: str
) -> None:
    asyncio.run(put_linear(sqlite_url, 1))
    before = os.umask(0)
    try:
        run(tmp_path / "new" / "out", "--url", sqlite_url, "--format", form)
    finally:
        os.umask(before)
    made = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o600}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--retire", "--no-mark"], "--no-mark"),
        (["--format", "calls", "--rewards", "x.csv"], "parquet"),
        (["--format", "gym", "--rows-per-file", "3"], "one for each rollout"),
        (["--format", "calls", "--on-break", "mask"], "parquet"),
        (["--format", "gym", "--siblings", "keep"], "parquet"),
        (["--format", "csv"], "csv"),
        (["--before", "7d"], "duration"),
        (["--rows-per-file", "0"], "rows-per-file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_gives_exit_code_2_and_no_folder(
    sqlite_url: str, tmp_path: Path, run: Any, arguments: list[str], message: str
) -> None:
    ended = run(tmp_path / "out", "--url", sqlite_url, *arguments)
    assert ended.code == 2
    assert message in ended.err
    assert not (tmp_path / "out").exists()


def test_an_expected_error_is_one_line(new_sqlite_url: str, tmp_path: Path, run: Any) -> None:
    missing = run(tmp_path / "out", "--url", new_sqlite_url)
    assert (missing.code, missing.out, missing.err.count("\n")) == (1, "", 1)
    assert "does not exist" in missing.err
    assert not (tmp_path / "out").exists()
    asyncio.run(put_linear(new_sqlite_url, 1))
    (tmp_path / "thesis.txt").touch()
    refused = run(tmp_path, "--url", new_sqlite_url)
    assert (refused.code, refused.err.count("\n")) == (1, 1)
    assert "holds other files" in refused.err
    badly_named = run(tmp_path / "out", "--url", new_sqlite_url, "--run", "a b")
    assert (badly_named.code, badly_named.err.count("\n")) == (1, 1)


def test_no_password_is_in_the_files_or_in_what_is_printed(
    postgres_url: str, tmp_path: Path, run: Any
) -> None:
    password = postgres_url.split(":")[2].split("@")[0]
    asyncio.run(put_linear(postgres_url, 1))
    ended = run(tmp_path / "out", "--url", postgres_url, "--json")
    again = run(tmp_path / "out", "--url", postgres_url, "--format", "calls")
    assert (ended.code, again.code) == (0, 1)
    assert password not in ended.out + ended.err + again.out + again.err
    for path in (tmp_path / "out").iterdir():
        assert password.encode() not in path.read_bytes()


# Interrupts itself where a part is noted, then waits like somebody who does not know it.
INTERRUPTED = """
import asyncio, os, signal, sys
from tokencustody.cli import main
from tokencustody.database.faults import FAULT_POINTS

async def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(30)

FAULT_POINTS["an export noted a part"] = interrupt
main()
"""


def test_ctrl_c_keeps_finished_files_and_the_same_command_goes_on(
    sqlite_url: str, tmp_path: Path, run: Any
) -> None:
    asyncio.run(put_linear(sqlite_url, 3))
    out = tmp_path / "out"
    arguments = [str(out), "--url", sqlite_url, "--rows-per-file", "1"]
    stopped = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "export", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert stopped.returncode != 0
    assert "interrupted: finished files stay" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert sorted(path.name for path in out.iterdir()) == ["_progress.jsonl", "part-00000.parquet"]
    ended = run(*arguments)
    assert (ended.code, "resumed" in ended.out) == (0, True)
    assert [row["rollout_id"] for row in parquet_rows(out)] == ["rollout-000", "rollout-001", "rollout-002"]
