"""The folder of an export as others meet it: readers of whole folders, and folders of an earlier version."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.export.exports import manifest, put_linear
from tests.export.test_resume import stopping_at
from tokencustody import open_store
from tokencustody.errors import InvalidRecordError
from tokencustody.export import ExportError, ExportOptions, export
from tokencustody.gym_import import GymImporter

OLD_NAMES = {"_manifest.json": "manifest.json", "_progress.jsonl": "progress.jsonl"}


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
async def test_pandas_pyarrow_and_datasets_read_the_folder_as_it_is(
    store_url: str, tmp_path: Path, finished: bool
) -> None:
    import datasets
    import pandas
    import pyarrow.dataset
    import pyarrow.parquet

    await put_linear(store_url, 4)
    out = tmp_path / "out"
    if finished:
        await export(store_url, out, ExportOptions(rows_per_file=2))
    else:
        with stopping_at("an export noted a part", times=2), pytest.raises(asyncio.CancelledError):
            await export(store_url, out, ExportOptions(rows_per_file=2))
    assert len(list(out.iterdir())) == 3
    ids = [f"rollout-{number:03}" for number in range(4)]
    assert list(pandas.read_parquet(out)["rollout_id"]) == ids
    assert pyarrow.parquet.read_table(out)["rollout_id"].to_pylist() == ids
    assert pyarrow.dataset.dataset(out).to_table()["rollout_id"].to_pylist() == ids
    loaded = datasets.load_dataset(str(out), cache_dir=str(tmp_path / "cache"))["train"]
    assert loaded["rollout_id"][:] == ids


async def test_pyarrow_reads_the_lines_of_calls_as_they_are(store_url: str, tmp_path: Path) -> None:
    import pyarrow.dataset

    await put_linear(store_url, 2)
    await export(store_url, tmp_path / "out", ExportOptions(format="calls"))  # type: ignore[arg-type]
    lines = pyarrow.dataset.dataset(tmp_path / "out", format="json").to_table()
    assert lines["rollout_id"].to_pylist() == ["rollout-000"] * 3 + ["rollout-001"] * 3


STRAY = {"parquet": "part-00099.parquet", "calls": "part-00099.jsonl", "gym": "other.tokens.jsonl"}


@pytest.mark.parametrize("form", STRAY)
async def test_a_finished_folder_with_a_file_that_is_not_of_the_export_hands_nothing_over(
    store_url: str, tmp_path: Path, form: Any
) -> None:
    await put_linear(store_url, 2)
    out, how = tmp_path / "out", ExportOptions(format=form, run="run-1")
    await export(store_url, out, how, mark=False)
    for stray in (STRAY[form], "notes.txt"):
        (out / stray).write_bytes(b"of somebody else")
        for retire in (False, True):
            with pytest.raises(ExportError, match=stray) as refused:
                await export(store_url, out, how, mark=retire, retire=retire)
            assert "\n" not in str(refused.value)
        (out / stray).unlink()
    # Readers pass over these.
    for name in (".DS_Store", ".nfs0001", "_SUCCESS", "rollout-000.tokens.lock"):
        (out / name).touch()
    assert (await export(store_url, out, how, retire=True)).retired == 2


@pytest.mark.parametrize("form", ["parquet", "calls"])
async def test_an_unfinished_folder_with_such_a_file_is_refused_and_the_file_left(
    store_url: str, tmp_path: Path, form: Any
) -> None:
    await put_linear(store_url, 4)
    out, how = tmp_path / "out", ExportOptions(format=form, rows_per_file=1)
    with (
        stopping_at("an export renamed a part, and did not note it", times=2),
        pytest.raises(asyncio.CancelledError),
    ):
        await export(store_url, out, how)
    for stray in (STRAY[form], "notes.txt"):
        (out / stray).write_bytes(b"of somebody else")
        with pytest.raises(ExportError, match=stray):
            await export(store_url, out, how)
        assert (out / stray).read_bytes() == b"of somebody else"
        (out / stray).unlink()
    (out / ".DS_Store").touch()
    assert (await export(store_url, out, how, retire=True)).retired == 4


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def rename_to_old(out: Path) -> None:
    for path in list(out.iterdir()):
        path.rename(out / OLD_NAMES.get(path.name, path.name))


async def test_a_finished_folder_of_before_is_handed_over_under_its_old_name(
    store_url: str, tmp_path: Path
) -> None:
    await put_linear(store_url, 2)
    out = tmp_path / "out"
    first = await export(store_url, out)
    rename_to_old(out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    again = await export(store_url, out, retire=True)
    assert (again.already_finished, again.export_id, again.retired) == (True, first.export_id, 2)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert before.keys() == {"manifest.json", "part-00000.parquet"}


async def test_a_folder_of_before_whose_rows_were_made_by_other_rules_is_known_and_left_as_it_is(
    store_url: str, tmp_path: Path
) -> None:
    await put_linear(store_url, 2)
    out = tmp_path / "out"
    await export(store_url, out, mark=False)
    (out / "_manifest.json").write_text(json.dumps(manifest(out) | {"manifest_version": 2}))
    rename_to_old(out)
    with pytest.raises(ExportError, match=r"holds an export of tokencustody .* made rows by other rules"):
        await export(store_url, out, retire=True)
    assert names_in(out) == {"manifest.json", "part-00000.parquet"}


async def test_an_unfinished_folder_of_before_is_gone_on_with(store_url: str, tmp_path: Path) -> None:
    await put_linear(store_url, 4)
    out, options = tmp_path / "out", ExportOptions(rows_per_file=2)
    with stopping_at("an export noted a part", times=1), pytest.raises(asyncio.CancelledError):
        await export(store_url, out, options)
    rename_to_old(out)
    report = await export(store_url, out, options)
    assert (report.resumed, report.rollouts) == (True, 4)
    assert {path.name for path in out.iterdir()} == {
        "_manifest.json",
        "part-00000.parquet",
        "part-00001.parquet",
    }


ADDRESSES = [
    "s3://bucket/run-42",
    "S3://bucket",
    "gs://bucket/run-42",
    "hf://datasets/me/run-42",
    "file:///tmp/run-42",
    "abfss://container@account/run-42",
    "postgresql://user:secret@host/captures",
    "s3:/bucket/run-42",
    Path("s3://bucket/run-42"),
]


@pytest.mark.parametrize("address", ADDRESSES, ids=str)
async def test_an_address_is_no_place_for_files_and_none_is_made(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str | Path
) -> None:
    await put_linear(store_url, 1)
    monkeypatch.chdir(tmp_path)
    before = names_in(tmp_path)
    scheme = str(address).partition(":")[0]
    said = rf"^{scheme}://… is an address, and \S+ .* needs a file system.*: name a local path, and copy"
    with pytest.raises(InvalidRecordError, match=said) as caught:
        await export(store_url, address)
    with pytest.raises(InvalidRecordError, match=said):
        await export(store_url, tmp_path / "out", rewards=address)
    async with GymImporter(store_url) as importer:
        with pytest.raises(InvalidRecordError, match=said):
            await importer.import_folder(Path(address))
    with pytest.raises(InvalidRecordError, match=said):
        open_store(store_url, spill=address)
    assert "secret" not in str(caught.value)
    assert names_in(tmp_path) == before


@pytest.mark.parametrize("name", ["a:b", "s3:", "run-42", "a/s3:/b"])
async def test_names_with_a_colon_that_are_no_address_are_paths(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    await put_linear(sqlite_url, 1)
    monkeypatch.chdir(tmp_path)
    assert (await export(sqlite_url, name)).rollouts == 1
    assert (tmp_path / name / "_manifest.json").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "s3://bucket/key"),
        ("export", "out", "--rewards", "s3://bucket/r.csv"),
        ("import", "s3://bucket/key"),
    ],
)
async def test_a_command_refuses_an_address_in_one_line(
    sqlite_url: str, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    await put_linear(sqlite_url, 1)
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "tokencustody", *arguments, "--url", sqlite_url],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    assert "s3://… is an address" in line
    assert not names_in(tmp_path) & {"s3:", "out"}
