"""Files of rewards that are not what they should be: one line that says what, no guess, and never much memory."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.export.exports import put_linear
from tokencustody.export import ExportError, export
from tokencustody.export import rewards as reading
from tokencustody.export.rewards import read_rewards
from tokencustody.txn.fence import RolloutKey

A = RolloutKey("run-1", "a")


def written(folder: Path, kind: str, value: Any, text: str | None = None) -> Path:
    """Write one reward, as JSON or CSV text where Python's is not that."""
    path = folder / f"rewards.{kind}"
    match kind:
        case "csv":
            path.write_text(f"rollout_id,reward\na,{value if text is None else text}\n")
        case "jsonl":
            path.write_text(
                f'{{"rollout_id": "a", "reward": {json.dumps(value) if text is None else text}}}\n'
            )
        case _:
            pq.write_table(pa.table({"rollout_id": ["a"], "reward": pa.array([value])}), path)
    return path


def refusal(path: Path) -> str:
    """Return the one line that refuses a file."""
    with pytest.raises(ExportError) as caught:
        read_rewards(path)
    said = str(caught.value)
    assert said.startswith(str(path))
    assert "\n" not in said
    assert len(said) < len(str(path)) + 400
    return said


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_what_is_not_finite_is_refused_in_every_format(tmp_path: Path, kind: str, value: float) -> None:
    assert "row 1: the reward of a is no number that is finite" in refusal(written(tmp_path, kind, value))


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize(
    "text", ["nan", "Infinity", "1e999", "1_000", "0x1", "\u0661", "1 2", "good", "--1", ".", "e5", "9" * 500]
)
def test_text_that_writes_no_finite_number_is_refused_in_every_format(
    tmp_path: Path, kind: str, text: str
) -> None:
    assert "no number that is finite" in refusal(written(tmp_path, kind, text))


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize(
    ("value", "number"),
    [("1", 1.0), ("-0.5", -0.5), (" +.5e1 ", 5.0), ("1.", 1.0), ("9" * 300, float("9" * 300))],
)
def test_numbers_may_be_written_as_text_in_every_format(
    tmp_path: Path, kind: str, value: str, number: float
) -> None:
    assert read_rewards(written(tmp_path, kind, value)).of(A) == number


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_an_empty_reward_is_none(tmp_path: Path, kind: str) -> None:
    assert read_rewards(written(tmp_path, kind, "")).of(A) is None


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "1" + "0" * 400, "true", "[1]", '{"a": 1}'])
def test_json_that_is_no_finite_number_is_refused(tmp_path: Path, text: str) -> None:
    assert "row 1: the reward of a is no number" in refusal(written(tmp_path, "jsonl", None, text))


@pytest.mark.parametrize(
    "text", ["1" * 5000, "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000]
)
def test_json_that_the_parser_gives_up_is_one_line_with_its_row(tmp_path: Path, text: str) -> None:
    assert "row 1 " in refusal(written(tmp_path, "jsonl", None, text))


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("r.csv", b"", "row 1 needs a rollout_id, which is text, and a reward: its columns are none"),
        ("r.csv", b"a,1\nb,2\n", "its columns are a, 1"),
        ("r.csv", b"rollout_id;reward\na;1\n", "its columns are rollout_id;reward"),
        ("r.csv", b"rollout_id,reward,reward\na,1,2\n", "several columns reward"),
        ("r.csv", b"rollout_id,reward\na\n", "row 1 has 1 fields, where the header has 2"),
        ("r.csv", b"rollout_id,reward\na,1\nb,1,2\n", "row 2 has 3 fields"),
        ("r.csv", b'rollout_id,reward\n"a,1\n', "unexpected end of data"),
        ("r.csv", b"rollout_id,reward\n" + b"a" * 200_000 + b",1\n", "field larger than field limit"),
        ("r.csv", b"rollout_id,reward\n" + b"a" * 256 + b",1\n", "at most 255 characters"),
        ("r.csv", b"rollout_id,reward\n\xff,1\n", "line 2 is no text in UTF-8"),
        ("r.csv", "rollout_id,reward\na,1\n".encode("utf-16"), "line 1 is no text in UTF-8"),
        ("r.jsonl", b"", "is empty"),
        ("r.jsonl", b'\n{"rollout_id": "a"', "row 2 is no JSON"),
        ("r.jsonl", b'{"rollout_id": "a", "reward": 1, "reward": 2}', "row 1 has a name twice"),
        ("r.jsonl", b'{"rollout_id": "a", "reward": 1}\n\xff\n', "line 2 is no text in UTF-8"),
        ("r.parquet", b"", "r.parquet: "),
        ("r.parquet", b"PAR1" + bytes(100) + b"PAR1", "r.parquet: "),
    ],
)
def test_a_file_of_another_form_is_one_line_that_says_so(
    tmp_path: Path, name: str, data: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(data)
    assert said in refusal(tmp_path / name)


@pytest.mark.parametrize("data", ["\ufeffrollout_id,reward\r\na,1\r\n", '\n"rollout_id",reward\n\na,1\n\n'])
def test_csv_may_have_a_mark_of_its_encoding_and_empty_lines(tmp_path: Path, data: str) -> None:
    (tmp_path / "r.csv").write_bytes(data.encode())
    assert read_rewards(tmp_path / "r.csv").of(A) == 1.0


def test_json_lines_may_have_a_mark_of_their_encoding(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_bytes('\ufeff{"rollout_id": "a", "reward": 1}'.encode())
    assert read_rewards(tmp_path / "r.jsonl").of(A) == 1.0


@pytest.mark.parametrize("name", ["r.csv", "r.jsonl", "r.parquet"])
def test_a_folder_and_a_pipe_are_no_files_and_nobody_waits_for_a_writer(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / name).mkdir()
    assert "is no file" in refusal(tmp_path / "folder" / name)
    os.mkfifo(tmp_path / name)
    assert "is no file" in refusal(tmp_path / name)


@pytest.mark.parametrize("name", ["r.csv", "r.jsonl"])
def test_a_line_is_never_read_whole_when_it_is_longer_than_any_should_be(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as stream:
        stream.truncate(2**26)  # a hole, which takes no room on the disk
    assert "line 1 is longer than 16,777,216 bytes" in refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("column", "reward"),
    [
        (pa.array([Decimal("1.25")]), 1.25),
        (pa.array([7], pa.uint64()), 7.0),
        (pa.array([0.5], pa.float32()), 0.5),
        (pa.array(["2.5"], pa.large_string()), 2.5),
        (pa.array(["2.5"]).dictionary_encode(), 2.5),
        (pa.array([3]).dictionary_encode(), 3.0),
        (pa.array([None]), None),
    ],
    ids=lambda value: str(getattr(value, "type", "")),
)
def test_parquet_may_have_any_type_of_number(tmp_path: Path, column: Any, reward: float | None) -> None:
    path = tmp_path / "r.parquet"
    names = pa.array(["a"]).dictionary_encode()
    pq.write_table(pa.table({"rollout_id": names, "reward": column, "beside": [b"x"]}), path)
    assert read_rewards(path).of(A) == reward


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("reward", pa.array([True])),
        ("reward", pa.array([[1.0]])),
        ("reward", pa.array([{"value": 1.0}])),
        ("reward", pa.array([b"1"])),
        ("reward", pa.array([0], pa.timestamp("s"))),
        ("rollout_id", pa.array([1])),
        ("rollout_id", pa.array([["a"]])),
        ("run", pa.array([1])),
    ],
    ids=lambda value: str(getattr(value, "type", value)),
)
def test_parquet_of_another_type_is_refused_with_the_type(tmp_path: Path, name: str, column: Any) -> None:
    path = tmp_path / "r.parquet"
    pq.write_table(pa.table({"rollout_id": ["a"], "reward": [1.0]} | {name: column}), path)
    assert f"needs a {name}, which is" in (said := refusal(path))
    assert str(column.type).partition("<")[0].partition("[")[0] in said


def test_parquet_with_a_column_twice_or_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    table = pa.table([["a"], [1.0], [2.0]], names=["rollout_id", "reward", "reward"])
    pq.write_table(table, path)
    assert "several columns reward" in refusal(path)
    pq.write_table(pa.table({"id": ["a"], "reward": [1.0]}), path)
    assert "its columns are id, reward" in refusal(path)


def bombs(folder: Path) -> dict[str, Path]:
    """Write small files that would decode to gigabytes."""
    number = 1000
    one_name = pa.DictionaryArray.from_arrays(pa.array([0] * number, pa.int32()), pa.array(["a" * 1_000_000]))
    tables = {
        "one long name for every row": (pa.table({"rollout_id": one_name, "reward": [1.0] * number}), {}),
        "one long reward for every row": (
            pa.table({"rollout_id": ["a"] * number, "reward": one_name}),
            {},
        ),
        "names that begin alike": (
            pa.table(
                {
                    "rollout_id": ["a" * 100_000 + str(row) for row in range(number)],
                    "reward": [1.0] * number,
                }
            ),
            {
                "use_dictionary": False,
                "column_encoding": {"rollout_id": "DELTA_BYTE_ARRAY", "reward": "PLAIN"},
            },
        ),
        "names that compress well": (
            pa.table({"rollout_id": ["a" * 100_000] * number, "reward": [1.0] * number}),
            {"use_dictionary": False},
        ),
    }
    paths = {}
    for name, (table, options) in tables.items():
        paths[name] = folder / f"{name}.parquet"
        pq.write_table(table, paths[name], compression="zstd", **options)
        assert paths[name].stat().st_size < 600_000
    return paths


# The most that the process took, in kB, with the libraries; not `ru_maxrss`, which begins with that of the parent.
MEASURED = """
import sys
from pathlib import Path
from tokencustody.errors import ExportError
from tokencustody.export.rewards import read_rewards
for path in sys.argv[1:]:
    try:
        read_rewards(Path(path))
    except ExportError as exc:
        print(exc)
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""


def test_a_small_parquet_file_never_takes_much_memory(tmp_path: Path) -> None:
    paths = bombs(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, paths.values())],
        capture_output=True,
        text=True,
        check=True,
    )
    *said, most = ended.stdout.splitlines()
    assert len(said) == len(paths), ended.stdout
    assert int(most) < 400_000


def test_more_rows_than_rollouts_can_be_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_MOST_ROWS", 3)
    path = tmp_path / "r.parquet"
    pq.write_table(pa.table({"rollout_id": ["a"] * 4, "reward": [1.0] * 4}), path)
    assert "more than 3 rows" in refusal(path)
    (tmp_path / "r.csv").write_text("rollout_id,reward\n" + "a,1\n" * 4)
    assert "more than 3 rows" in refusal(tmp_path / "r.csv")
    (tmp_path / "r.csv").write_text("rollout_id,reward\n" + "a,1\n" * 3)
    assert read_rewards(tmp_path / "r.csv").repeated.summary() == {"count": 2, "first": ["a", "a"]}


async def test_such_rewards_make_no_folder(sqlite_url: str, tmp_path: Path) -> None:
    await put_linear(sqlite_url, 1)
    with pytest.raises(ExportError, match="no number that is finite"):
        await export(sqlite_url, tmp_path / "out", rewards=written(tmp_path, "jsonl", float("nan")))
    assert not (tmp_path / "out").exists()


async def test_the_command_says_it_in_one_line(sqlite_url: str, tmp_path: Path) -> None:
    await put_linear(sqlite_url, 1)
    path = written(tmp_path, "jsonl", None, "[" * 100_000)
    command = [sys.executable, "-m", "tokencustody", "export", str(tmp_path / "out")]
    ended = await asyncio.to_thread(
        subprocess.run,
        [*command, "--url", sqlite_url, "--rewards", str(path)],
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert len(ended.stderr.splitlines()) == 1
    assert "row 1" in ended.stderr
