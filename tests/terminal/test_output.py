"""Standard output that cannot be written: one line where it is a fault, and none where the reader has left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.machine import needs_linux

FULL = Path("/dev/full")
SERIES = {
    "sqlite": "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 100000) SELECT * FROM n",
    "postgresql": "SELECT * FROM generate_series(1, 100000)",
}


def run(words: Sequence[str], url: str, **options: Any) -> subprocess.CompletedProcess[str]:
    # Which would leave nothing for the last flush.
    environment = os.environ | {"TOKENCUSTODY_URL": url, "PYTHONUNBUFFERED": ""}
    command = [sys.executable, *options.pop("flags", ()), "-m", "tokencustody", *words]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, env=environment, **options)


@pytest.mark.parametrize(
    "words",
    [
        ["runs"],
        ["verify"],
        ["db", "check"],
        ["sql", "--csv", "SELECT 1"],
        ["sql", "--csv", SERIES["sqlite"]],
        ["--help"],
    ],
    ids=lambda words: " ".join(words)[:20],
)
def test_a_full_disk_is_told_in_one_line(sqlite_url: str, words: list[str]) -> None:
    needs_linux("a device that is always full")
    with FULL.open("w") as full:
        done = run(words, sqlite_url, stdout=full)
    assert (done.returncode, done.stderr) == (1, "error: cannot write the output: No space left on device\n")


def test_rows_of_a_server_that_find_no_room_are_told_in_one_line(postgres_url: str) -> None:
    needs_linux("a device that is always full")
    with FULL.open("w") as full:
        done = run(["sql", "--json", SERIES["postgresql"]], postgres_url, stdout=full, flags=["-u"])
    assert (done.returncode, done.stderr) == (1, "error: cannot write the output: No space left on device\n")


@pytest.mark.parametrize(
    "words",
    [["runs"], ["sql", "--csv", "SELECT 1"], ["sql", "--csv", SERIES["sqlite"]]],
    ids=["printed", "in a buffer", "more than a buffer"],
)
def test_a_reader_that_has_left_is_no_matter(sqlite_url: str, words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run(words, sqlite_url, stdout=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_closed_output_is_no_fault(sqlite_url: str) -> None:
    done = run(["sql", "--csv", "SELECT 1"], sqlite_url, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")
