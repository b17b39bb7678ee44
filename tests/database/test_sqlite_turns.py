"""Several processes write one SQLite file: who waits for another's lock asks for it as often as who came just now."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.entries import make_entry
from tokencustody import open_store
from tokencustody.database import sqlite

WAITS = 300


@contextlib.contextmanager
def another_writer(file: Path) -> Iterator[sqlite3.Connection]:
    """Hold the lock of another program, until the connection that is yielded rolls back."""
    with contextlib.closing(sqlite3.connect(file, isolation_level=None, check_same_thread=False)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        yield writer


async def test_however_long_a_writer_waited_it_asks_for_its_turn_as_often_as_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async with open_store(tmp_path / "captures.db", deadline=600) as store:
        await store.sink.put(make_entry())
        with another_writer(tmp_path / "captures.db") as other:

            def pause(seconds: float) -> None:
                pauses.append(seconds)
                if len(pauses) == WAITS:
                    other.execute("ROLLBACK")

            # The clock stands still, so that the patience of one try does not end.
            monkeypatch.setattr(sqlite, "time", SimpleNamespace(sleep=pause, monotonic=lambda: 0.0))
            await store.sink.put(make_entry(model_call_id="call-2"))
        snapshot = await store.source.freeze("rollout-1")
    assert {entry.model_call_id for entry in snapshot.entries} == {"call-1", "call-2"}
    assert pauses == [0.001] * WAITS
