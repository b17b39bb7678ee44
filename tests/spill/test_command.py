"""`tokencustody spill`: what waits on this host, and the way to bring it into its database."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.entries import make_entry
from tests.support.rows import rows_of
from tokencustody import open_store
from tokencustody.cli import app, main
from tokencustody.database.url import parse_url
from tokencustody.errors import StoreUnavailableError
from tokencustody.schema import tables
from tokencustody.spill.marks import Mark, Spill
from tokencustody.txn.fence import RolloutKey, Stamp

HOSTILE = "call \x1b[31m[bold]\u202e"


class Ended:
    """How a command ended."""

    def __init__(self, code: object, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def spill(store_url: str, spill_folder: Path) -> Spill:
    return Spill(spill_folder, parse_url(store_url))


def keep(spill: Spill, call: str = "call-1", rollout: str = "rollout-1") -> Path:
    stamp = Stamp.make(datetime.now(UTC), "test-writer")
    return spill.keep(Mark(RolloutKey("run-1", rollout), call, stamp))


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Ended:
    monkeypatch.setattr(sys, "argv", ["tokencustody", "spill", *arguments])
    with pytest.raises(SystemExit) as exited:
        main()
    return Ended(exited.value.code, *capsys.readouterr())


def test_an_empty_spill_is_listed_as_empty_with_exit_code_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, spill_folder: Path
) -> None:
    ended = run(capsys, monkeypatch, "list")
    assert (ended.code, ended.out, ended.err) == (0, f"no mark waits in {spill_folder}\n", "")
    assert json.loads(run(capsys, monkeypatch, "list", "--json").out) == {
        "folder": str(spill_folder),
        "files": [],
    }


def test_what_waits_is_listed_with_exit_code_1_whatever_its_names_hold(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, spill: Spill
) -> None:
    first, corrupt = keep(spill, HOSTILE), keep(spill, "")
    corrupt.write_bytes(b"torn")
    shown = run(capsys, monkeypatch, "list")
    assert (shown.code, shown.err) == (1, "")
    assert "call \\x1b[31m[bold]\\u202e" in shown.out
    assert "1 mark and 1 corrupt file in" in shown.out
    heading, row, damage = shown.out.splitlines()[:3]
    assert heading.split() == ["at", "database", "run", "rollout", "call"]
    assert spill.address in row
    assert damage == f"corrupt: {corrupt}"
    listed = run(capsys, monkeypatch, "list", "--json")
    assert listed.code == 1
    mark, torn = json.loads(listed.out)["files"]
    assert torn == {"file": str(corrupt), "corrupt": True}
    expected = {
        "file": str(first),
        "corrupt": False,
        "database": spill.address,
        "run": "run-1",
        "rollout_id": "rollout-1",
        "model_call_id": HOSTILE,
        "written_by": "test-writer",
    }
    assert {name: mark[name] for name in expected} == expected
    assert datetime.fromisoformat(mark["at"]).tzinfo is not None


def test_replaying_brings_every_run_into_the_database_and_says_what_was_discarded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, store_url: str, spill: Spill
) -> None:
    async def retire() -> None:
        async with open_store(store_url, run="run-1") as store:
            await store.source.retire(["retired"])

    asyncio.run(retire())
    for number in range(3):
        keep(spill, f"call-{number}")
    keep(spill, rollout="retired")
    ended = run(capsys, monkeypatch, "replay", "--url", store_url, "--json")
    assert ended.code == 0
    assert json.loads(ended.out) == {"replayed": 3, "discarded": 1, "waiting": 0, "corrupt": 0}
    marks = [row["model_call_id"] for row in asyncio.run(rows_of(store_url, tables.failures))]
    assert marks == ["call-0", "call-1", "call-2"]
    again = run(capsys, monkeypatch, "replay", "--url", store_url)
    assert (again.code, again.out) == (0, f"{spill.address}: 0 marks replayed\n")


def test_a_corrupt_file_is_replayed_past_and_ends_in_exit_code_1(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    store_url: str,
    spill: Spill,
) -> None:
    torn = keep(spill)
    torn.write_bytes(b"torn")
    keep(spill)
    ended = run(capsys, monkeypatch, "replay", "--url", store_url)
    assert ended.code == 1
    assert ended.out == f"{spill.address}: 1 mark replayed; 1 corrupt file in {spill.folder}\n"
    assert f"{torn}.corrupt" in caplog.text


def test_a_database_that_is_not_there_leaves_every_mark_where_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spill_folder: Path
) -> None:
    spill = Spill(spill_folder, parse_url(tmp_path / "missing.db"))
    file = keep(spill)
    ended = run(capsys, monkeypatch, "replay", "--url", str(tmp_path / "missing.db"))
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("error: sqlite:///")
    assert spill.waiting() == [file]
    assert not (tmp_path / "missing.db").exists()


def test_the_folder_can_be_named_and_must_be_when_the_environment_turns_the_spill_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TOKENCUSTODY_SPILL", "")
    refused = run(capsys, monkeypatch, "list")
    assert (refused.code, refused.out) == (2, "")
    assert "--spill" in refused.err
    keep(Spill(tmp_path / "named", parse_url(tmp_path / "some.db")))
    named = run(capsys, monkeypatch, "list", "--spill", str(tmp_path / "named"), "--json")
    assert (named.code, len(json.loads(named.out)["files"])) == (1, 1)


def test_an_address_that_leads_nowhere_is_no_success(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended = run(capsys, monkeypatch, "replay", "--url", str(tmp_path / "missing.db"))
    assert (ended.code, ended.out) == (1, "")
    assert "does not exist" in ended.err


def test_marks_of_a_database_that_was_moved_are_replayed_from_its_old_address(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, store_url: str, spill_folder: Path
) -> None:
    old = "postgresql://trainer:secret@old-host/captures"
    keep(Spill(spill_folder, parse_url(old)))
    here = run(capsys, monkeypatch, "replay", "--url", store_url)
    assert (here.code, here.out.endswith(": 0 marks replayed\n")) == (0, True)
    moved = run(capsys, monkeypatch, "replay", "--url", store_url, "--of", old, "--json")
    assert (moved.code, json.loads(moved.out)["replayed"]) == (0, 1)
    assert [row["model_call_id"] for row in asyncio.run(rows_of(store_url, tables.failures))] == ["call-1"]


def test_a_folder_that_is_not_there_is_no_empty_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended = run(capsys, monkeypatch, "list", "--spill", str(tmp_path / "misspelt"))
    assert (ended.code, ended.out) == (2, "")
    assert "--spill" in ended.err


def damaged(spill: Spill) -> Path:
    file = keep(spill)
    file.write_bytes(b"torn")
    return file


async def freeze(url: str, rollout: str = "rollout-1") -> bool:
    async with open_store(url, run="run-1") as store:
        return (await store.source.freeze(rollout)).incomplete


def test_the_rollout_of_a_damaged_file_is_marked_when_a_person_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, store_url: str, spill: Spill
) -> None:
    damaged(spill)
    with pytest.raises(StoreUnavailableError) as refused:
        asyncio.run(freeze(store_url))
    # As the error says it.
    said = str(refused.value).partition("`tokencustody spill ")[2].partition("`")[0]
    ended = run(capsys, monkeypatch, *shlex.split(said.replace("URL", store_url)))
    assert (ended.code, ended.err) == (0, "")
    assert asyncio.run(freeze(store_url))
    assert run(capsys, monkeypatch, "list").code == 0


def test_a_damaged_file_is_discarded_when_a_person_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, store_url: str, spill: Spill
) -> None:
    file = damaged(spill)
    with pytest.raises(StoreUnavailableError):
        asyncio.run(freeze(store_url))
    file = file.with_name(f"{file.name}.corrupt")
    assert CliRunner().invoke(app, ["spill", "discard", str(file)], input="n\n").exit_code == 1
    assert run(capsys, monkeypatch, "discard", str(file), "--yes").code == 0
    assert not asyncio.run(freeze(store_url))


def test_a_damaged_file_marks_its_rollout_from_wherever_it_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, store_url: str, spill: Spill
) -> None:
    file = damaged(spill)
    monkeypatch.chdir(spill.folder)
    ended = run(capsys, monkeypatch, "mark", file.name, "rollout-1", "--run", "run-1", "--url", store_url)
    assert (ended.code, file.exists()) == (0, False)
    assert asyncio.run(freeze(store_url))


async def put(url: str, rollout: str) -> None:
    async with open_store(url, run="run-1") as store:
        await store.sink.put(make_entry(rollout))


def test_a_damaged_file_marks_nothing_in_another_database(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    store_url: str,
    spill: Spill,
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    other = f"sqlite:///{tmp_path / 'other.db'}"
    for url, rollout in ((store_url, "rollout-1"), (other, "rollout-2")):
        asyncio.run(put(url, rollout))
    file = damaged(spill)
    marking = ("mark", str(file), "rollout-1", "--run", "run-1", "--url", other)
    wrong = run(capsys, monkeypatch, *marking)
    assert (wrong.code, "is not of sqlite:///" in wrong.err, "--of" in wrong.err) == (2, True, True)
    unknown = run(capsys, monkeypatch, *marking, "--of", store_url)
    assert (unknown.code, "has no rollout rollout-1 of run run-1" in unknown.err) == (2, True)
    for url in (store_url, other):
        assert asyncio.run(rows_of(url, tables.failures)) == []
    assert [row["rollout_id"] for row in asyncio.run(rows_of(other, tables.fences))] == ["rollout-2"]
    with pytest.raises(StoreUnavailableError, match="is damaged"):
        asyncio.run(freeze(store_url))
    # As for a database that was moved, with the rollout in it.
    file = file.with_name(f"{file.name}.corrupt")
    asyncio.run(put(other, "rollout-1"))
    moved = ("mark", str(file), "rollout-1", "--run", "run-1", "--url", other, "--of", store_url)
    assert run(capsys, monkeypatch, *moved).code == 0
    assert asyncio.run(freeze(other))
    assert not file.exists()


def test_what_is_not_the_rollouts_or_not_damaged_is_not_decided(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, store_url: str, spill: Spill
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    file, good = damaged(spill), keep(spill)
    other = run(capsys, monkeypatch, "mark", str(file), "rollout-2", "--run", "run-1", "--url", store_url)
    assert (other.code, "was no mark of rollout rollout-2" in other.err) == (2, True)
    discarded = run(capsys, monkeypatch, "discard", str(good), "--yes")
    assert (discarded.code, "is not a damaged mark" in discarded.err) == (2, True)
    marking = ("rollout-1", "--run", "run-1", "--url", store_url)
    for path, why in (
        (good, "is not a damaged mark"),
        (file.with_name(f"{file.name}.corrupt"), "there is no file"),
    ):
        marked = run(capsys, monkeypatch, "mark", str(path), *marking)
        assert (marked.code, why in marked.err) == (2, True)
    another_run = run(
        capsys, monkeypatch, "mark", str(file), "rollout-1", "--run", "run-2", "--url", store_url
    )
    assert (another_run.code, "was no mark of rollout rollout-1 of run run-2" in another_run.err) == (2, True)
    assert asyncio.run(rows_of(store_url, tables.fences)) == []
    assert file.exists()
    assert good.exists()
