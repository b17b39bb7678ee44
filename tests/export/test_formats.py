"""What is in the files of an export: Parquet as its readers see it, one call a line, and rewards."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.export.exports import (
    RUN,
    branching,
    json_lines,
    left_out,
    manifest,
    parquet_rows,
    put_linear,
    put_rollout,
    put_staged,
)
from tests.support.entries import make_entry
from tests.support.ledger import make_commit
from tests.support.staged import stage
from tokencustody import TokenEntry, open_store
from tokencustody.export import ExportError, ExportOptions, export
from tokencustody.export.parquet import _column

# Quiet NaNs with a sign and a payload, infinities, both zeros, and the smallest numbers.
BITS = [
    0x7FF8000000000000,
    0xFFF8000000000001,
    0x7FF0000000000000,
    0xFFF0000000000000,
    0,
    1 << 63,
    1,
    (1 << 63) | 1,
]


def floats() -> list[float]:
    return [struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in BITS]


def bits_of(values: Any) -> list[int]:
    return [struct.unpack("<Q", struct.pack("<d", value))[0] for value in values]


async def test_log_probabilities_are_exported_in_every_bit(store_url: str, tmp_path: Path) -> None:
    await put_rollout(store_url, [make_entry(prompt=[1], generation=[2] * len(BITS), log_probs=floats())])
    await export(store_url, tmp_path / "out")
    (row,) = parquet_rows(tmp_path / "out")
    assert bits_of(row["log_probs"]) == [0, *BITS]


async def test_datasets_reads_the_files_as_they_are(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # Not before: it reads the variable when it is imported.
    import datasets

    await put_rollout(store_url, branching())
    await put_rollout(store_url, [make_entry("rollout-2", response_id="resp-1", model="policy")])
    await export(store_url, tmp_path / "out", ExportOptions(rows_per_file=1))
    files = sorted(map(str, (tmp_path / "out").glob("*.parquet")))
    assert len(files) == 2
    loaded = datasets.load_dataset(
        "parquet", data_files=files, cache_dir=str(tmp_path / "cache"), split="train"
    )
    assert list(loaded) == parquet_rows(tmp_path / "out")
    assert str(loaded.features["token_ids"].feature.dtype) == "int64"
    assert str(loaded.features["loss_mask"].feature.dtype) == "int8"
    assert str(loaded.features["log_probs"].feature.dtype) == "float64"
    assert (loaded[2]["models"], loaded[2]["response_ids"]) == (["policy"], ["resp-1"])


async def test_the_loss_of_the_documentation_counts_each_sampled_token_once(
    store_url: str, tmp_path: Path
) -> None:
    document = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    code = document.split("```python\n", 1)[1].split("```", 1)[0]
    await put_rollout(store_url, branching())
    rewards = tmp_path / "rewards.csv"
    rewards.write_text("rollout_id,reward\nrollout-1,2.0\n")
    await export(store_url, tmp_path / "out", rewards=rewards)
    scope: dict[str, Any] = {}
    exec(code, scope)  # noqa: S102 - the documentation of this repository
    total = 0.0
    for row in parquet_rows(tmp_path / "out"):
        # A policy that gives every token the log probability that it had: each ratio is 1.
        total += scope["policy_loss"](row, np.asarray(row["log_probs"])) * sum(row["loss_mask"])
    assert total == pytest.approx(-2.0 * 6)


async def test_files_end_with_the_rollout_in_which_they_reach_their_bound(
    store_url: str, tmp_path: Path
) -> None:
    await put_linear(store_url, 5)
    for name, options in (
        ("rows", ExportOptions(rows_per_file=2)),
        ("bytes", ExportOptions(max_bytes=1)),
        ("lines", ExportOptions(format="calls", rows_per_file=4)),
    ):
        report = await export(store_url, tmp_path / name, options)
        assert report.files == {"rows": 3, "bytes": 5, "lines": 3}[name]
    for part in manifest(tmp_path / "rows")["parts"]:
        (file,) = part["files"]
        assert file["rows"] == sum(rollout["rows"] for rollout in part["rollouts"])
    assert len(parquet_rows(tmp_path / "rows")) == 5


async def test_every_field_of_every_call_is_in_its_line(store_url: str, tmp_path: Path) -> None:
    entry = TokenEntry(
        **make_entry(model_call_id="call \x1b[31m", generation=[2**64 - 1, 5, 6, 7]).model_dump()
        | {
            "generation_log_probs": [math.nan, math.inf, -math.inf, -0.0],
            "run": "a field of the writer",
            "far": 2**70,
            "deep": {"score": math.nan, "text": "\0\u2028é"},
        }
    )
    async with open_store(store_url, run=RUN) as store:
        await store.lineage.record(make_commit(model_call_id=entry.model_call_id))
    await put_rollout(store_url, [entry])
    await export(store_url, tmp_path / "out", ExportOptions(format="calls"))
    (line,) = json_lines(tmp_path / "out")
    assert line["entry"].pop("generation_log_probs")[:3] == ["NaN", "Infinity", "-Infinity"]
    assert line["entry"].pop("deep") == {"score": "NaN", "text": "\0\u2028é"}
    expected = entry.model_dump(mode="json", exclude={"generation_log_probs", "deep"})
    assert line["entry"] == expected
    assert (line["run"], line["source"], line["version"], line["conflicting"]) == (RUN, "records", 1, False)
    assert line["ledger"]["weight_version"] == 3
    text = (tmp_path / "out" / "part-00000.jsonl").read_bytes()
    assert text.count(b"\n") == 1
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


async def test_a_staged_call_is_a_line_too_and_a_missing_one_is_named(store_url: str, tmp_path: Path) -> None:
    calls = [stage("a"), stage("b")]
    await put_staged(store_url, calls, staged=calls[:1], failures=[("c", "worker_died")])
    await export(store_url, tmp_path / "out", ExportOptions(format="calls"))
    (line,) = json_lines(tmp_path / "out")
    assert (line["source"], line["staged"]["token_ids_delta"]) == ("ledger", [1, 2, 3])
    assert line["ledger"]["staging_key"] == "r/a"
    assert left_out(tmp_path / "out") == [("r", "b", "staged_call_missing"), ("r", "c", "worker_died")]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
async def test_rewards_are_joined_by_rollout_and_what_does_not_fit_is_reported(
    store_url: str, tmp_path: Path, kind: str
) -> None:
    await put_linear(store_url, 3)
    rows = [("rollout-000", 1.5), ("rollout-002", -0.1), ("rollout-002", -0.1), ("stranger", 1.0)]
    path = tmp_path / f"rewards.{kind}"
    write_rewards(path, [{"rollout_id": name, "reward": reward} for name, reward in rows])
    report = await export(store_url, tmp_path / "out", rewards=path)
    assert [row["reward"] for row in parquet_rows(tmp_path / "out")] == [1.5, None, -0.1]
    assert report.rewards is not None
    del report.rewards["file_sha256"]
    assert report.rewards == {
        "joined": 2,
        "rollouts_without_reward": {"count": 1, "first": ["rollout-001"]},
        "rewards_without_rollout": {"count": 1, "first": ["stranger"]},
        "repeated": {"count": 1, "first": ["rollout-002"]},
    }


def write_rewards(path: Path, rows: list[dict[str, Any]]) -> None:
    match path.suffix:
        case ".csv":
            lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
            path.write_text("\n".join(lines))
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case _:
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pylist(rows), path)


async def test_rewards_of_several_runs_need_the_run(store_url: str, tmp_path: Path) -> None:
    for run in ("run-1", "run-2"):
        await put_linear(store_url, 1, run=run)
    path = tmp_path / "rewards.jsonl"
    write_rewards(path, [{"rollout_id": "rollout-000", "reward": 1.0}])
    with pytest.raises(ExportError, match="--run"):
        await export(store_url, tmp_path / "out", rewards=path)
    assert not (tmp_path / "out").exists()
    await export(store_url, tmp_path / "one", ExportOptions(run="run-2"), rewards=path)
    assert [row["reward"] for row in parquet_rows(tmp_path / "one")] == [1.0]
    write_rewards(path, [{"run": "run-2", "rollout_id": "rollout-000", "reward": 2.0}])
    await export(store_url, tmp_path / "both", rewards=path)
    assert [row["reward"] for row in parquet_rows(tmp_path / "both")] == [None, 2.0]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("r.csv", "rollout_id,reward\na,1\na,2\n", "row 2: a has another reward in a row before"),
        ("r.csv", "rollout_id,reward\na,good\n", "row 1: the reward of a is no number"),
        ("r.csv", "id,reward\na,1\n", "row 1 needs a rollout_id"),
        ("r.jsonl", '{"rollout_id": "a", "reward": true}\n', "no number"),
        ("r.jsonl", '{"rollout_id": 7, "reward": 1}\n', "needs a rollout_id"),
        ("r.jsonl", "[1]\n", "row 1 is no JSON object"),
        ("r.jsonl", "{\n", "r.jsonl: "),
        (
            "r.jsonl",
            '{"rollout_id": "a", "reward": 1}\n{"rollout_id": "b", "run": "x", "reward": 1}\n',
            "row 2",
        ),
        ("r.parquet", "nonsense", "r.parquet: "),
        ("r.txt", "", "read from .csv, .jsonl or .parquet"),
        ("missing.csv", None, "No such file"),
    ],
    ids=lambda value: None if value is None or "\n" in value else value[:40],
)
async def test_rewards_that_cannot_be_read_are_refused_before_anything_is_written(
    sqlite_url: str, tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    await put_linear(sqlite_url, 1)
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ExportError, match=message):
        await export(sqlite_url, tmp_path / "out", rewards=tmp_path / name)
    assert not (tmp_path / "out").exists()


async def test_without_pyarrow_parquet_says_how_to_install_it_and_the_other_formats_work(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_linear(sqlite_url, 1)
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ExportError, match=r"pip install 'tokencustody\[export\]'"):
        await export(sqlite_url, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    await export(sqlite_url, tmp_path / "lines", ExportOptions(format="calls"))
    assert len(json_lines(tmp_path / "lines")) == 3


def test_pyarrow_is_imported_only_when_it_is_used() -> None:
    import subprocess

    code = "import sys, tokencustody.export, tokencustody.cli; print('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


# What a list of Python values may be in a column of each type that is used.
_VALUES = {
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "double": st.floats(allow_nan=False),
    "string": st.text(st.characters(exclude_categories=["Cs"])),
    "bool": st.booleans(),
}


@given(st.data())
def test_a_column_is_what_pyarrow_makes_of_the_same_values(data: st.DataObject) -> None:
    import pyarrow as pa

    name = data.draw(st.sampled_from(sorted(_VALUES)))
    kind, values = pa.type_for_alias(name), st.none() | _VALUES[name]
    if data.draw(st.booleans()):
        kind, values = pa.list_(kind), st.lists(values, max_size=5)
    drawn = data.draw(st.lists(values, max_size=20))
    made = _column(pa, kind, drawn)
    made.validate(full=True)
    assert made.equals(pa.array(drawn, kind))


def test_an_export_does_not_load_pandas_which_takes_more_memory_than_the_export(
    sqlite_url: str, tmp_path: Path
) -> None:
    assert importlib.util.find_spec("pandas") is not None
    asyncio.run(put_linear(sqlite_url, 2))
    program = (
        "import asyncio, sys\nfrom tokencustody.export import export\n"
        "asyncio.run(export(*sys.argv[1:]))\nassert 'pyarrow' in sys.modules\nassert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, sqlite_url, str(tmp_path / "out")], check=True, timeout=60)
