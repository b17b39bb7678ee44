"""Exports that were killed, stopped or repeated, and folders that are not theirs."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from tests.export.exports import RUN, json_lines, manifest, put_linear, put_rollout, run_sql
from tests.support.entries import make_entry
from tokencustody import open_store
from tokencustody.database.faults import FAULT_POINTS
from tokencustody.export import ExportError, ExportOptions, export
from tokencustody.schema import tables

POINTS = [
    "an export wrote a part under temporary names",
    "an export renamed a part, and did not note it",
    "an export noted a part",
    "an export wrote all parts, and no manifest",
    "an export wrote its manifest, and marked nothing",
    "an exported rollout was handed over",
]

# Exports, and kills itself when it comes to the point for the nth time.
KILLED = """
import asyncio, os, signal, sys
from tokencustody.export import ExportOptions, export
from tokencustody.database.faults import FAULT_POINTS

url, out, format, point, times = sys.argv[1:]
left = int(times)

async def die():
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

FAULT_POINTS[point] = die
options = ExportOptions(format=format, run="run-1", max_bytes=1 if format == "gym" else 2**30, rows_per_file=3)
asyncio.run(export(url, out, options, retire=True))
"""


def options(form: str) -> ExportOptions:
    return ExportOptions(format=form, run=RUN, max_bytes=1 if form == "gym" else 2**30, rows_per_file=3)  # type: ignore[arg-type]


def contents(out: Path) -> dict[str, str]:
    """Return the SHA-256 of each file but the manifest, which names times and the export."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in out.iterdir()
        if path.name != "_manifest.json"
    }


async def states(url: str) -> list[str]:
    (rows,) = await run_sql(url, select(tables.fences.c.state).order_by(tables.fences.c.rollout_id))
    return [row.state for row in rows]


@pytest.mark.parametrize("point", POINTS)
async def test_a_killed_export_lists_no_torn_file_and_the_next_run_completes_it_with_equal_bytes(
    store_url: str, tmp_path: Path, point: str
) -> None:
    await kill_and_complete(store_url, tmp_path, "parquet", point)


@pytest.mark.parametrize(
    ("form", "point"), [("gym", POINTS[0]), ("gym", POINTS[1]), ("gym", POINTS[3]), ("calls", POINTS[1])]
)
async def test_so_it_is_with_the_other_formats(
    sqlite_url: str, tmp_path: Path, form: str, point: str
) -> None:
    await kill_and_complete(sqlite_url, tmp_path, form, point)


async def kill_and_complete(store_url: str, tmp_path: Path, form: str, point: str) -> None:
    await put_linear(store_url, 5)
    whole, out = tmp_path / "whole", tmp_path / "out"
    await export(store_url, whole, options(form), mark=False)
    times = "1" if "manifest" in point else "2"
    killed = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", KILLED, store_url, str(out), form, point, times], timeout=60
    )
    assert killed.returncode == -signal.SIGKILL
    named = {path.name for path in out.iterdir() if not path.name.endswith(".partial")}
    assert named - {"_manifest.json", "_progress.jsonl"} <= contents(whole).keys()
    assert {name: contents(out)[name] for name in named & contents(whole).keys()}.items() <= contents(
        whole
    ).items()
    assert ("_manifest.json" in named) is (point in POINTS[-2:])
    retired_before = (await states(store_url)).count("retired")
    assert retired_before == (2 if point == POINTS[-1] else 0)

    report = await export(store_url, out, options(form), retire=True)
    assert contents(out) == contents(whole)
    assert {"export_id", "parts"} <= manifest(out).keys()
    assert (report.resumed, report.already_finished) == (point not in POINTS[-2:], point in POINTS[-2:])
    assert (report.rollouts, report.marked, report.retired, report.ok) == (5, 5, 5, True)
    assert await states(store_url) == ["retired"] * 5
    for part in manifest(out)["parts"]:
        for file in part["files"]:
            data = (out / file["name"]).read_bytes()
            assert (file["bytes"], file["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())


async def test_a_finished_export_says_so_and_changes_nothing(store_url: str, tmp_path: Path) -> None:
    await put_linear(store_url, 2)
    first = await export(store_url, tmp_path / "out")
    before = {
        path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in (tmp_path / "out").iterdir()
    }
    marks_before = await run_sql(store_url, select(tables.exports))
    await put_linear(store_url, 0)
    again = await export(store_url, tmp_path / "out")
    assert (first.already_finished, again.already_finished) == (False, True)
    assert (again.export_id, again.rows, again.marked) == (first.export_id, 2, 2)
    assert before == {
        path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in (tmp_path / "out").iterdir()
    }
    assert await run_sql(store_url, select(tables.exports)) == marks_before


async def test_a_torn_line_of_the_progress_is_forgotten(store_url: str, tmp_path: Path) -> None:
    await put_linear(store_url, 4)
    out = tmp_path / "out"
    with stopping_at("an export noted a part", times=1), pytest.raises(asyncio.CancelledError):
        await export(store_url, out, options("calls"))
    progress = out / "_progress.jsonl"
    noted = progress.read_bytes()
    progress.write_bytes(noted + noted.splitlines()[-1][:40])
    report = await export(store_url, out, options("calls"))
    assert (report.rollouts, report.resumed) == (4, True)
    assert [line["rollout_id"] for line in json_lines(out)] == [
        f"rollout-{n:03}" for n in range(4) for _ in "abc"
    ]


class stopping_at:  # noqa: N801 - reads as what it does
    """Cancel the export when it comes to the point."""

    def __init__(self, point: str, *, times: int) -> None:
        self.point, self.left = point, times

    def __enter__(self) -> None:
        FAULT_POINTS[self.point] = self._stop

    def __exit__(self, *_: object) -> None:
        del FAULT_POINTS[self.point]

    async def _stop(self) -> None:
        self.left -= 1
        if not self.left:
            raise asyncio.CancelledError


async def test_a_stopped_export_leaves_no_temporary_file(store_url: str, tmp_path: Path) -> None:
    await put_linear(store_url, 4)
    with stopping_at("an export noted a part", times=1), pytest.raises(asyncio.CancelledError):
        await export(store_url, tmp_path / "out", options("parquet"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "_progress.jsonl",
        "part-00000.parquet",
    ]


async def test_what_is_frozen_and_retired_meanwhile_does_not_disturb_the_next_run(
    store_url: str, tmp_path: Path
) -> None:
    await put_linear(store_url, 4)
    out = tmp_path / "out"
    with stopping_at("an export renamed a part, and did not note it", times=1):
        with pytest.raises(asyncio.CancelledError):
            await export(store_url, out, options("gym"))
        assert (out / "rollout-000.tokens.jsonl").exists()
    async with open_store(store_url, run=RUN) as store:
        await store.source.retire(["rollout-000"])
        await store.sink.put(make_entry("zz"))
        await store.source.freeze("zz")
    report = await export(store_url, out, options("gym"))
    assert report.rollouts == 4
    # Its files were never noted, so that they are not of this export.
    assert not (out / "rollout-000.tokens.jsonl").exists()
    assert (out / "zz.tokens.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": "calls"}, "format"),
        ({"run": RUN}, "run"),
        ({"include_incomplete": True}, "include_incomplete"),
        ({"shared_calls": "every"}, "shared_calls"),
        ({"rows_per_file": 7}, "rows_per_file"),
        ({"rollout_ids": ("rollout-000",)}, "rollout_ids"),
    ],
    ids=str,
)
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
async def test_a_folder_of_an_export_with_other_options_is_refused(
    sqlite_url: str, tmp_path: Path, change: dict[str, Any], named: str, finished: bool
) -> None:
    await put_linear(sqlite_url, 1)
    await half_done(sqlite_url, tmp_path / "out", finished)
    before = contents(tmp_path / "out")
    with pytest.raises(ExportError, match=rf"other options \({named}\)"):
        await export(sqlite_url, tmp_path / "out", ExportOptions(**change))
    assert contents(tmp_path / "out") == before


async def half_done(url: str, out: Path, finished: bool) -> None:
    if finished:
        await export(url, out)
        return
    with stopping_at("an export noted a part", times=1), pytest.raises(asyncio.CancelledError):
        await export(url, out)


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
async def test_a_folder_of_another_database_is_refused_and_the_same_one_by_another_address_is_not(
    store_url: str, sqlite_url: str, tmp_path: Path, finished: bool
) -> None:
    await put_linear(store_url, 1)
    await half_done(store_url, tmp_path / "out", finished)
    other = f"sqlite:///{tmp_path / 'other.db'}"
    await put_linear(other, 1)
    with pytest.raises(ExportError, match="is of another database"):
        await export(other, tmp_path / "out")
    same = store_url.replace("127.0.0.1", "localhost").removeprefix("sqlite:///")
    assert same != store_url
    assert (await export(same, tmp_path / "out")).rollouts == 1


async def test_a_folder_with_other_files_is_refused_and_left_as_it_is(
    sqlite_url: str, tmp_path: Path
) -> None:
    await put_linear(sqlite_url, 1)
    for name in ("thesis.txt", "part-00000.parquet", "_manifest.json", "manifest.json"):
        out = tmp_path / f"with-{name}"
        out.mkdir()
        (out / name).write_text("{}")
        with pytest.raises(ExportError, match="name a new folder"):
            await export(sqlite_url, out)
        assert [path.name for path in out.iterdir()] == [name]
    (tmp_path / "file").touch()
    with pytest.raises(ExportError, match="file"):
        await export(sqlite_url, tmp_path / "file")


@pytest.mark.parametrize(
    ("point", "name"),
    [
        (POINTS[2], "stranger.tokens.jsonl"),
        (POINTS[2], "rollout-002.tokens.jsonl"),
        (POINTS[2], "thesis.partial"),
        (POINTS[1], "rollout-001.tokens.jsonl"),
    ],
)
async def test_a_begun_folder_with_a_file_of_somebody_else_is_refused_and_loses_none(
    store_url: str, tmp_path: Path, point: str, name: str
) -> None:
    await put_linear(store_url, 3)
    out = tmp_path / "out"
    with stopping_at(point, times=2), pytest.raises(asyncio.CancelledError):
        await export(store_url, out, options("gym"))
    theirs = out / name
    theirs.write_text("theirs")
    with pytest.raises(ExportError, match=f"holds other files: '{name}'"):
        await export(store_url, out, options("gym"))
    assert theirs.read_text() == "theirs"
    theirs.unlink()
    report = await export(store_url, out, options("gym"))
    assert (report.rollouts, report.resumed) == (3, True)


async def test_two_exports_do_not_fill_the_same_folder_at_once(sqlite_url: str, tmp_path: Path) -> None:
    await put_linear(sqlite_url, 1)

    async def another() -> None:
        with pytest.raises(ExportError, match="another export is writing"):
            await export(sqlite_url, tmp_path / "out")

    FAULT_POINTS["an export noted a part"] = another
    try:
        assert (await export(sqlite_url, tmp_path / "out")).rollouts == 1
    finally:
        FAULT_POINTS.clear()


@pytest.mark.parametrize("form", ["parquet", "gym", "calls"])
async def test_a_full_disk_is_named_and_leaves_what_can_be_resumed(
    postgres_url: str, tmp_path: Path, form: str
) -> None:
    await put_linear(postgres_url, 3)
    out = tmp_path / "out"
    code = (
        "import asyncio, resource, signal, sys\n"
        "from tokencustody.export import ExportError, ExportOptions, export\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2500, 2500))\n"
        "try:\n"
        "    asyncio.run(export(sys.argv[1], sys.argv[2], ExportOptions(format=sys.argv[3]), mark=False))\n"
        "except ExportError as exc:\n"
        "    print(exc)\n"
    )
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", code, postgres_url, str(out), form],
        capture_output=True,
        text=True,
    )
    assert re.search("out.*: File too large", ended.stdout), ended
    assert not ended.stderr
    assert [path.name for path in out.iterdir()] == ["_progress.jsonl"]
    assert (await export(postgres_url, out, ExportOptions(format=form))).rollouts == 3  # type: ignore[arg-type]


async def test_an_export_of_which_everything_is_left_out_leaves_no_folder_after_a_stop_either(
    store_url: str, tmp_path: Path
) -> None:
    await put_rollout(store_url, [make_entry(generation=[])])
    out = tmp_path / "new" / "out"
    with stopping_at("an export noted a part", times=1), pytest.raises(asyncio.CancelledError):
        await export(store_url, out)
    assert [path.name for path in out.iterdir()] == ["_progress.jsonl"]
    report = await export(store_url, out)
    assert (report.all_left_out, report.left_out, report.ok) == (True, {"no_generated_tokens": 1}, False)
    assert not out.exists()


async def test_what_another_version_exported_or_began_is_refused_and_named(
    sqlite_url: str, tmp_path: Path
) -> None:
    await put_linear(sqlite_url, 2)
    await export(sqlite_url, tmp_path / "done")
    path = tmp_path / "done" / "_manifest.json"
    path.write_text(json.dumps({**manifest(tmp_path / "done"), "manifest_version": 2}))
    with pytest.raises(ExportError, match="made rows by other rules"):
        await export(sqlite_url, tmp_path / "done", retire=True)
    with stopping_at("an export noted a part", times=1), pytest.raises(asyncio.CancelledError):
        await export(sqlite_url, tmp_path / "begun", ExportOptions(rows_per_file=1))
    path = tmp_path / "begun" / "_progress.jsonl"
    path.write_text(path.read_text().replace('"is_held": true, ', ""))
    with pytest.raises(ExportError, match="begun by another version"):
        await export(sqlite_url, tmp_path / "begun", ExportOptions(rows_per_file=1))
    assert set(await states(sqlite_url)) == {"frozen"}
