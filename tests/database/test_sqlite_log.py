"""The log beside a SQLite file stays small: a read that lasts lets it grow, and it is made small again."""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.entries import make_entry
from tokencustody import CaptureStore, open_store
from tokencustody.database import sqlite

LIMIT = 256 * 2**10


@pytest.fixture(autouse=True)
def _small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "LARGEST_LOG", LIMIT)
    monkeypatch.setattr(sqlite, "_SHRINKING_PAUSE", 0.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "captures.db"


@contextlib.contextmanager
def reading(file: Path) -> Iterator[None]:
    """Hold a read transaction of another program."""
    with contextlib.closing(sqlite3.connect(file, isolation_level=None, check_same_thread=False)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM entries").fetchall()
        yield


def log_size(file: Path) -> int:
    return os.stat(f"{file}-wal").st_size  # noqa: PTH116 - as the store names it


async def put(store: CaptureStore, number: int) -> None:
    await store.sink.put(make_entry(model_call_id=f"call-{number}", prompt=list(range(number, number + 500))))


async def test_a_log_that_a_long_read_lets_grow_is_small_again_soon_after_the_read_ends(file: Path) -> None:
    numbers = itertools.count()
    async with open_store(file) as store:
        await put(store, next(numbers))
        with reading(file):
            while log_size(file) <= 8 * LIMIT:
                await put(store, next(numbers))
            assert store.stats()["log_bytes"] == log_size(file)
        for _ in range(5):
            await put(store, next(numbers))
        assert store.stats()["log_bytes"] == log_size(file) <= LIMIT
        count = next(numbers)
        assert len((await store.source.freeze("rollout-1")).entries) == count


async def test_reads_that_always_overlap_do_not_let_the_log_grow_for_ever(file: Path) -> None:
    numbers = itertools.count()
    ended = threading.Event()

    def read_on() -> None:
        while not ended.is_set():
            with reading(file):
                pass

    async with open_store(file) as store:
        await put(store, next(numbers))
        readers = [threading.Thread(target=read_on) for _ in range(3)]
        for reader in readers:
            reader.start()
        try:
            with reading(file):
                while log_size(file) <= 2 * LIMIT:
                    await put(store, next(numbers))
            while log_size(file) > LIMIT:
                await put(store, next(numbers))
                assert next(numbers) < 20_000
        finally:
            ended.set()
            for reader in readers:
                reader.join()


async def test_a_log_is_left_alone_while_it_is_small(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite._Threads, "_shrink_soon", lambda self: pytest.fail("the log is small"))
    async with open_store(file) as store:
        for number in range(5):
            await put(store, number)
        assert log_size(file) <= LIMIT
    assert not file.with_name("captures.db-wal").exists()
