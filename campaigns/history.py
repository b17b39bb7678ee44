"""What the workers of a campaign asked for and were answered, in the order of one clock.

Each worker appends to a file of its own and syncs it at every line, so that the history of a worker that is killed ends
with the operation that was cut off. Times are CLOCK_MONOTONIC nanoseconds, which all processes of a host share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self


class Outcome(StrEnum):
    """What the worker learned of an operation."""

    OK = "ok"
    ERROR = "error"  # refused with a named error: the class is in `error`
    UNKNOWN = "unknown"  # cut off, or the store could not tell: done, not done, or done later


@dataclass(frozen=True)
class Operation:
    """One call of a protocol method. Without an answer, `returned_at` is None and the outcome unknown."""

    worker: str
    number: int
    name: str
    rollout: str
    arguments: Mapping[str, Any]
    invoked_at: int
    outcome: Outcome = Outcome.UNKNOWN
    returned_at: int | None = None
    value: Any = None
    error: str | None = None

    def __str__(self) -> str:
        answer = {
            Outcome.OK: f"ok {self.value!r}",
            Outcome.ERROR: str(self.error),
            Outcome.UNKNOWN: f"unknown ({self.error or 'cut off'})",
        }[self.outcome]
        return f"{self.worker}#{self.number} {self.name} {self.rollout} {dict(self.arguments)} -> {answer}"


@dataclass
class HistoryWriter:
    """Appends one worker's operations to a file. A line is on the disk before the operation goes on."""

    path: Path
    worker: str
    _number: int = 0
    _file: int = field(init=False)

    def __post_init__(self) -> None:
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def invoke(self, name: str, rollout: str, **arguments: Any) -> int:
        """Record that an operation begins; return its number for `answer`."""
        self._number += 1
        self._write(
            {
                "number": self._number,
                "name": name,
                "rollout": rollout,
                "arguments": arguments,
                "invoked_at": time.monotonic_ns(),
            }
        )
        return self._number

    def answer(self, number: int, outcome: Outcome, *, value: Any = None, error: str | None = None) -> None:
        """Record how the operation ended, after it has returned."""
        # Before the line is written: the effect lies before this moment.
        at = time.monotonic_ns()
        self._write(
            {"answers": number, "outcome": outcome, "returned_at": at, "value": value, "error": error}
        )

    def _write(self, line: Mapping[str, Any]) -> None:
        data = json.dumps({"worker": self.worker, **line}).encode() + b"\n"
        written = os.write(self._file, data)
        if written != len(data):
            raise OSError(f"{self.path} took {written} of {len(data)} bytes")
        os.fdatasync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_history(folder: Path) -> list[Operation]:
    """Return the operations of every `*.jsonl` of a folder, in the order in which they began."""
    operations: dict[tuple[str, int], Operation] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in _whole_lines(path):
            key = (line["worker"], line.get("number") or line["answers"])
            if "number" in line:
                operations[key] = Operation(**line)
            else:
                operations[key] = _answered(operations[key], line)
    return sorted(operations.values(), key=lambda operation: operation.invoked_at)


def _answered(operation: Operation, line: Mapping[str, Any]) -> Operation:
    return Operation(
        operation.worker,
        operation.number,
        operation.name,
        operation.rollout,
        operation.arguments,
        operation.invoked_at,
        Outcome(line["outcome"]),
        line["returned_at"],
        line["value"],
        line["error"],
    )


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    for data in path.read_bytes().splitlines(keepends=True):
        # A killed worker may leave a torn last line: an answer that it had not made known.
        if data.endswith(b"\n"):
            yield json.loads(data)
