"""What only a process of its own shows: arguments that are no UTF-8, and a pipe that closes"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from campaigns.fuzzing.rows import Written
from tokencustody.store import open_store

_COMMAND = [sys.executable, "-m", "tokencustody"]


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A database with a rollout."""

    async def fill() -> None:
        async with open_store(tmp_path / "one.db") as store:
            await Written(random.Random(0)).write(store)

    asyncio.run(fill())
    return tmp_path / "one.db"


def test_arguments_that_are_no_utf8_are_an_error_of_one_line(tmp_path: Path) -> None:
    for arguments in (
        [b"show", b"\xff\xfe", b"--url", os.fsencode(tmp_path / "none.db")],
        [b"rollouts", b"--url", b"\xff.db"],
    ):
        ended = subprocess.run(
            [*map(os.fsencode, _COMMAND), *arguments], capture_output=True, cwd=tmp_path, timeout=60
        )
        assert b"Traceback" not in ended.stderr
        assert ended.returncode in (0, 1, 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["rollouts", "--json"]])
def test_a_pipe_that_closes_ends_a_command_without_a_word(filled: Path, arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        ended = subprocess.run(
            [*_COMMAND, *arguments, "--url", str(filled)], stdout=closed, stderr=subprocess.PIPE, timeout=60
        )
    assert ended.stderr == b""
    assert ended.returncode in (0, 1)
