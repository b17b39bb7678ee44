"""Rewards to join: a CSV, JSONL or Parquet file with the columns `rollout_id`, `reward` and, if need be, `run`.

The file is somebody else's: whatever it holds, it takes a bounded amount of memory for each rollout that it names.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from tokencustody.errors import ExportError
from tokencustody.txn.fence import RolloutKey

_ENOUGH = 20
_COLUMNS = ("run", "rollout_id", "reward")
_LONGEST_LINE = 16 * 2**20
_LONGEST_NAME = 255
_MOST_ROWS = 10_000_000
# Rows of Parquet that are decoded at once, and the bytes that one column may take in a row (the longest name in UTF-8)
# and in a row group, with some to spare.
_BATCH = 1024
_ROW_BYTES = 4 * _LONGEST_NAME + 8
_MOST_BYTES = 2**29
_SPARE_BYTES = 2**20
# What a file may write as text: no underscores, no letters that Python would also read.
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
_LONGEST_NUMBER = 400


@dataclass(slots=True)
class Counted:
    """How many there were, and the first of them."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, rollout_id: str) -> None:
        """Count one more."""
        self.count += 1
        if len(self.first) < _ENOUGH:
            self.first.append(rollout_id)

    def summary(self) -> dict[str, Any]:
        """Return both as plain data."""
        return {"count": self.count, "first": self.first}


@dataclass(slots=True)
class Rewards:
    """Rewards by (run, rollout id); the run is None in a file without that column, and then means the only one.

    `repeated` counts the rows of rollouts that the file has had before, with the same reward, and names the first.
    """

    sha256: str | None = None
    has_runs: bool = True
    repeated: Counted = field(default_factory=Counted)
    _by_rollout: dict[tuple[str | None, str], float] = field(default_factory=dict)

    def of(self, key: RolloutKey) -> float | None:
        """Return the reward of a rollout, or None when the file has none."""
        return self._by_rollout.get((key.run if self.has_runs else None, key.rollout_id))

    def summary(self, exported: Iterable[RolloutKey]) -> dict[str, Any]:
        """Return how the file and the exported rollouts fit: counts, and the first rollouts that do not."""
        without, unknown, met = Counted(), Counted(), set()
        for key in exported:
            name = (key.run if self.has_runs else None, key.rollout_id)
            if name in self._by_rollout:
                met.add(name)
            else:
                without.add(key.rollout_id)
        for name in self._by_rollout:
            if name not in met:
                unknown.add(name[1])
        return {
            "file_sha256": self.sha256,
            "joined": len(met),
            "rollouts_without_reward": without.summary(),
            "rewards_without_rollout": unknown.summary(),
            "repeated": self.repeated.summary(),
        }


def read_rewards(path: Path) -> Rewards:
    """Return the rewards of a file. An empty or null reward is none.

    Raises ExportError, naming the line or row, for a file that cannot be read, a value that is no finite number, and a
    rollout with two different rewards: which one is meant is not guessed.
    """
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise ExportError(f"{path}: rewards are read from .csv, .jsonl or .parquet files")
    try:
        # Not opened, for a pipe would wait for its writer.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ExportError(f"{path} is no file; write the rewards to one")
        with path.open("rb") as stream:
            rewards = Rewards(hashlib.file_digest(stream, "sha256").hexdigest())
            stream.seek(0)
            for number, row in read(path, stream):
                if number > _MOST_ROWS:
                    raise ExportError(f"{path} has more than {_MOST_ROWS:,} rows; write one for each rollout")
                _add(rewards, path, number, row)
    except OSError as exc:
        raise ExportError(f"{path}: {exc.strerror or _in_a_line(exc)}") from None
    except (ValueError, csv.Error) as exc:
        raise ExportError(f"{path}: {_in_a_line(exc)}") from None
    return rewards


def _add(rewards: Rewards, path: Path, number: int, row: Mapping[str, Any]) -> None:
    rollout_id, run, value = row.get("rollout_id"), row.get("run"), row.get("reward")
    if not isinstance(rollout_id, str) or not rollout_id or "reward" not in row:
        raise ExportError(f"{path}: row {number} needs a rollout_id, which is text, and a reward")
    if len(rollout_id) > _LONGEST_NAME or (isinstance(run, str) and len(run) > _LONGEST_NAME):
        raise ExportError(f"{path}: row {number}: a rollout_id or run has at most {_LONGEST_NAME} characters")
    if value is None or value == "":
        return
    reward = _number(value)
    if reward is None:
        raise ExportError(f"{path}: row {number}: the reward of {rollout_id} is no number that is finite")
    has_run = isinstance(run, str) and bool(run)
    if rewards._by_rollout and has_run is not rewards.has_runs:
        raise ExportError(f"{path}: row {number}: every row has a run, or none")
    rewards.has_runs = has_run
    name = (run if has_run else None, rollout_id)
    if name not in rewards._by_rollout:
        rewards._by_rollout[name] = reward
    elif rewards._by_rollout[name] == reward:
        rewards.repeated.add(rollout_id)
    else:
        raise ExportError(f"{path}: row {number}: {rollout_id} has another reward in a row before; keep one")


def _number(value: Any) -> float | None:
    """Return the finite number that a value is or writes; None for any other."""
    if isinstance(value, str):
        value = value.strip()
        if len(value) > _LONGEST_NUMBER or not _NUMBER.fullmatch(value):
            return None
    elif isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _of_csv(path: Path, stream: BinaryIO) -> Iterator[tuple[int, Mapping[str, Any]]]:
    rows = csv.reader(_lines(path, stream), strict=True)
    header = next((row for row in rows if row), [])
    _check_columns(path, header)
    for number, row in enumerate(filter(None, rows), start=1):
        if len(row) != len(header):
            raise ExportError(
                f"{path}: row {number} has {len(row)} fields, where the header has {len(header)}"
            )
        yield number, dict(zip(header, row, strict=True))


def _of_jsonl(path: Path, stream: BinaryIO) -> Iterator[tuple[int, Mapping[str, Any]]]:
    number = 0
    for number, line in enumerate(_lines(path, stream), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_once)
        except (ValueError, RecursionError) as exc:
            # Not what the parser says of it: that may quote the line.
            what = str(exc) if type(exc) is ValueError else "is nested too deeply"
            what = "is no JSON" if isinstance(exc, json.JSONDecodeError) else what
            raise ExportError(f"{path}: row {number} {what}") from None
        if not isinstance(row, dict):
            raise ExportError(f"{path}: row {number} is no JSON object")
        yield number, row
    if not number:
        raise ExportError(f"{path} is empty")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("has a name twice in an object")
    return found


def _lines(path: Path, stream: BinaryIO) -> Iterator[str]:
    """Yield the lines of a text in UTF-8, with their ends, none of which is read into memory when it is too long."""
    number = 0
    while data := stream.readline(_LONGEST_LINE + 1):
        number += 1
        if len(data) > _LONGEST_LINE:
            raise ExportError(f"{path}: line {number} is longer than {_LONGEST_LINE:,} bytes")
        try:
            yield data.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise ExportError(f"{path}: line {number} is no text in UTF-8") from None


def _of_parquet(path: Path, stream: BinaryIO) -> Iterator[tuple[int, Mapping[str, Any]]]:
    from tokencustody.export.parquet import require_pyarrow

    pa, parquet = require_pyarrow()
    try:
        with parquet.ParquetFile(stream) as file:
            metadata, schema = file.metadata, file.schema_arrow
        _check_columns(path, schema.names)
        wanted = [name for name in _COLUMNS if name in schema.names]
        texts = [name for name in wanted if _is_text(path, pa, name, schema.field(name).type)]
        _check_size(path, metadata, wanted)
        # As dictionaries, so that a text that is repeated is decoded once.
        with parquet.ParquetFile(stream, metadata=metadata, read_dictionary=texts, pre_buffer=False) as file:
            number = 0
            for batch in file.iter_batches(_BATCH, columns=wanted):
                columns = [_values(path, pa, name, batch.column(name)) for name in wanted]
                for values in zip(*columns, strict=True):
                    number += 1
                    yield number, dict(zip(wanted, values, strict=True))
    except pa.ArrowException as exc:
        raise ExportError(f"{path}: {_in_a_line(exc)}") from None


def _is_text(path: Path, pa: Any, name: str, kind: Any) -> bool:
    """Return whether a column has text. Raises ExportError for one of a type that it cannot have."""
    types = pa.types
    value = kind.value_type if types.is_dictionary(kind) else kind
    is_text = types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)
    is_number = types.is_integer(value) or types.is_floating(value) or types.is_decimal(value)
    if not (is_text or types.is_null(value) or (name == "reward" and is_number)):
        what = "a number" if name == "reward" else "text"
        raise ExportError(f"{path}: row 1 needs a {name}, which is {what}: the column is {kind!s:.80}")
    return bool(is_text)


def _check_size(path: Path, metadata: Any, wanted: Sequence[str]) -> None:
    """Refuse what would decode to much more than such a file needs."""
    if metadata.num_rows > _MOST_ROWS:
        raise ExportError(f"{path} has more than {_MOST_ROWS:,} rows; write one for each rollout")
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if column.path_in_schema not in wanted:
                continue
            if column.total_uncompressed_size > min(group.num_rows * _ROW_BYTES, _MOST_BYTES) + _SPARE_BYTES:
                raise ExportError(
                    f"{path}: a row group of the column {column.path_in_schema} takes "
                    f"{column.total_uncompressed_size:,} bytes, much more than names and rewards need"
                )
            if "DELTA_BYTE_ARRAY" in column.encodings:
                raise ExportError(
                    f"{path}: the column {column.path_in_schema} has the encoding DELTA_BYTE_ARRAY, whose size cannot "
                    "be known before it is read; write it with another"
                )


def _values(path: Path, pa: Any, name: str, column: Any) -> list[Any]:
    indices = column.indices.to_pylist() if isinstance(column, pa.DictionaryArray) else None
    values = column if indices is None else column.dictionary
    if not (
        pa.types.is_null(values.type)
        or pa.types.is_primitive(values.type)
        or pa.types.is_decimal(values.type)
    ):
        lengths = import_module("pyarrow.compute").binary_length(values).to_pylist()
        if max((length for length in lengths if length is not None), default=0) > _ROW_BYTES:
            raise ExportError(f"{path}: a value of the column {name} is longer than {_ROW_BYTES} bytes")
    plain: list[Any] = values.to_pylist()
    return plain if indices is None else [None if index is None else plain[index] for index in indices]


def _check_columns(path: Path, names: Sequence[str]) -> None:
    shown = ", ".join(names[:_ENOUGH])[:200] or "none"
    if not {"rollout_id", "reward"} <= set(names):
        raise ExportError(
            f"{path}: row 1 needs a rollout_id, which is text, and a reward: its columns are {_in_a_line(shown)}"
        )
    for name in _COLUMNS:
        if names.count(name) > 1:
            raise ExportError(f"{path} has several columns {name}; keep one")


def _in_a_line(text: object) -> str:
    return " ".join(str(text).split())[:200]


_READERS = {".csv": _of_csv, ".jsonl": _of_jsonl, ".parquet": _of_parquet}
