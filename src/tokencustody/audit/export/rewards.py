"""Rewards to join: a CSV, JSONL or Parquet file with the columns `rollout_id`, `reward` and, if need be, `run`."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokencustody.audit.export.report import ExportError
from tokencustody.store.fence import RolloutKey

_ENOUGH = 20


@dataclass(slots=True)
class Rewards:
    """Rewards by (run, rollout id); the run is None in a file without that column, and then means the only one.

    `repeated` are the rollouts that the file has more than once, each time with the same reward.
    """

    sha256: str | None = None
    has_runs: bool = True
    repeated: list[str] = field(default_factory=list)
    _by_rollout: dict[tuple[str | None, str], float] = field(default_factory=dict)

    def of(self, key: RolloutKey) -> float | None:
        """Return the reward of a rollout, or None when the file has none."""
        return self._by_rollout.get((key.run if self.has_runs else None, key.rollout_id))

    def summary(self, exported: Iterable[RolloutKey]) -> dict[str, Any]:
        """Return how the file and the exported rollouts fit: counts, and the first rollouts that do not."""
        unknown = dict.fromkeys(self._by_rollout)
        without = []
        joined = 0
        for key in exported:
            name = (key.run if self.has_runs else None, key.rollout_id)
            if name in self._by_rollout:
                unknown.pop(name, None)
                joined += 1
            else:
                without.append(key.rollout_id)
        return {
            "file_sha256": self.sha256,
            "joined": joined,
            "rollouts_without_reward": _some(without),
            "rewards_without_rollout": _some([rollout_id for _, rollout_id in unknown]),
            "repeated": _some(self.repeated),
        }


def read_rewards(path: Path) -> Rewards:
    """Return the rewards of a file. An empty or null reward is none.

    Raises ExportError, naming the line or row, for a file that cannot be read, a value that is no number, and a
    rollout with two different rewards: which one is meant is not guessed.
    """
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise ExportError(f"{path}: rewards are read from .csv, .jsonl or .parquet files")
    try:
        with path.open("rb") as stream:
            rewards = Rewards(hashlib.file_digest(stream, "sha256").hexdigest())
        for number, row in read(path):
            _add(rewards, path, number, row)
    except OSError as exc:
        raise ExportError(f"{path}: {exc.strerror or exc}") from None
    except (ValueError, csv.Error) as exc:
        raise ExportError(f"{path}: {str(exc)[:200]}") from None
    return rewards


def _add(rewards: Rewards, path: Path, number: int, row: Mapping[str, Any]) -> None:
    rollout_id, run, value = row.get("rollout_id"), row.get("run"), row.get("reward")
    if not isinstance(rollout_id, str) or not rollout_id or "reward" not in row:
        raise ExportError(f"{path}: row {number} needs a rollout_id, which is text, and a reward")
    if value is None or value == "":
        return
    try:
        if isinstance(value, bool):
            raise TypeError
        reward = float(value)
    except (TypeError, ValueError):
        raise ExportError(f"{path}: row {number}: the reward of {rollout_id} is no number") from None
    has_run = isinstance(run, str) and bool(run)
    if rewards._by_rollout and has_run is not rewards.has_runs:
        raise ExportError(f"{path}: row {number}: every row has a run, or none")
    rewards.has_runs = has_run
    name = (run if has_run else None, rollout_id)
    if name not in rewards._by_rollout:
        rewards._by_rollout[name] = reward
    elif rewards._by_rollout[name] == reward:
        rewards.repeated.append(rollout_id)
    else:
        raise ExportError(f"{path}: row {number}: {rollout_id} has another reward in a row before; keep one")


def _of_csv(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open(newline="", encoding="utf-8-sig") as stream:
        yield from enumerate(csv.DictReader(stream), start=1)


def _of_jsonl(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ExportError(f"{path}: row {number} is no JSON object")
                yield number, row


def _of_parquet(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    from tokencustody.audit.export.parquet import require_pyarrow

    _, parquet = require_pyarrow()
    with parquet.ParquetFile(path) as file:
        names = [name for name in ("run", "rollout_id", "reward") if name in file.schema_arrow.names]
        number = 0
        for batch in file.iter_batches(columns=names):
            for row in batch.to_pylist():
                number += 1
                yield number, row


_READERS = {".csv": _of_csv, ".jsonl": _of_jsonl, ".parquet": _of_parquet}


def _some(rollouts: list[str]) -> dict[str, Any]:
    return {"count": len(rollouts), "first": rollouts[:_ENOUGH]}
