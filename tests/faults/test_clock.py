"""A clock that jumps changes moments in the rows, and nothing else: no order, no fence, no deadline."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import pytest

from tests.support.entries import make_entry
from tests.support.ledger import make_commit
from tests.support.machine import needs_program
from tests.support.rows import rows_of
from tokencustody import TokenCaptureFrozenError, open_store
from tokencustody.database.faults import FAULT_POINTS
from tokencustody.schema import tables
from tokencustody.store import base, ledger, removal, sink, source, staging

Points = dict[str, Callable[[], Awaitable[None]]]
START = datetime(2026, 6, 1, 12, tzinfo=UTC)


@pytest.fixture
def faults() -> Iterator[Points]:
    """The table of fault points, empty again afterwards."""
    yield FAULT_POINTS
    FAULT_POINTS.clear()


class Clock:
    """The moment that every store reads, set by hand."""

    def __init__(self) -> None:
        self.moment = START

    def __call__(self) -> datetime:
        return self.moment


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock in place of `now` wherever a store reads it."""
    clock = Clock()
    for module in (base, sink, source, removal, ledger, staging):
        if hasattr(module, "now"):
            monkeypatch.setattr(module, "now", clock)
    return clock


JUMPS = [
    timedelta(hours=-3),
    timedelta(days=400),
    timedelta(days=-20_000),
    timedelta(days=90_000),
    timedelta(0),
]


async def test_versions_and_the_ledger_keep_their_order_whatever_the_clock_does(
    store_url: str, clock: Clock
) -> None:
    async with open_store(store_url) as store:
        for number, jump in enumerate(JUMPS):
            clock.moment = START + jump
            await store.sink.put(make_entry(model_call_id=f"call-{number}"))
            await store.sink.mark_incomplete("rollout-1", f"call-{number}")
            await store.lineage.record(make_commit(model_call_id=f"call-{9 - number}"))
        manifest = await store.lineage.manifest("rollout-1")
        assert [record["model_call_id"] for record in manifest["records"]] == [
            f"call-{9 - number}" for number in range(len(JUMPS))
        ]
        snapshot = await store.source.freeze("rollout-1")
        assert snapshot.version == len(JUMPS) + 1
        clock.moment = START - timedelta(days=1)
        with pytest.raises(TokenCaptureFrozenError):
            await store.sink.put(make_entry(model_call_id="late"))
        clock.moment = START + timedelta(days=4000)
        assert (await store.source.freeze("rollout-1")).snapshot_id == snapshot.snapshot_id
        assert await store.source.drop("rollout-1", snapshot.snapshot_id, snapshot.version)
    history = await rows_of(store_url, tables.snapshot_versions)
    assert [row["version"] for row in history] == list(range(len(JUMPS) + 3))
    marks = [row["recorded_at"] for row in history if row["event"] == "mark"]
    assert [_aware(moment) for moment in marks] == [START + jump for jump in JUMPS]


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


@pytest.mark.parametrize("method", ["put", "begin_call", "mark_incomplete", "freeze"])
async def test_a_write_whose_answer_was_lost_is_recognised_though_the_clock_has_jumped_since(
    store_url: str, clock: Clock, faults: Points, method: str
) -> None:
    async with open_store(store_url) as store, open_store(store_url, pool_size=3) as trainer:

        async def jump_fence_and_lose() -> None:
            faults.clear()
            clock.moment = START - timedelta(days=1000)
            await trainer.source.freeze("rollout-1")
            raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")

        faults["after commit, before acknowledgement"] = jump_fence_and_lose
        calls = {
            "put": lambda: store.sink.put(make_entry()),
            "begin_call": lambda: store.sink.begin_call("rollout-1", "call-1"),
            "mark_incomplete": lambda: store.sink.mark_incomplete("rollout-1"),
            "freeze": lambda: store.source.freeze("rollout-1"),
        }
        await calls[method]()
        events = [row["event"] for row in await rows_of(store_url, tables.snapshot_versions)]
        assert events == ["open", *(["mark"] if method == "mark_incomplete" else []), "freeze"]


@pytest.mark.parametrize(
    "moment",
    [
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    ],
    ids=str,
)
async def test_the_first_and_the_last_moment_there_is_are_stored(
    store_url: str, clock: Clock, moment: datetime
) -> None:
    clock.moment = moment
    async with open_store(store_url) as store:
        await store.sink.put(make_entry())
        await store.sink.begin_call("rollout-1", "call-1")
        await store.sink.put(make_entry())
        assert len((await store.source.freeze("rollout-1")).entries) == 1
    (entry,) = await rows_of(store_url, tables.entries)
    assert _aware(entry["committed_at"]) == moment


@pytest.mark.parametrize(
    "created_at", [-1e300, -62_135_596_801.0, 0.0, 253_402_300_800.0, 1e300, float("inf")]
)
async def test_a_record_that_names_any_moment_comes_back_with_it(store_url: str, created_at: float) -> None:
    entry = make_entry()
    entry.created_at = created_at
    async with open_store(store_url) as store:
        await store.sink.put(entry)
        (read,) = (await store.source.freeze("rollout-1")).entries
    assert read.created_at == created_at


JUMPING = """
import asyncio, os, sys, time
from pathlib import Path
from tests.support.entries import make_entry
from tokencustody import TokenCaptureFrozenError, open_store
from tokencustody.errors import StoreUnavailableError

def set_clock(offset):
    Path(os.environ["FAKETIME_TIMESTAMP_FILE"]).write_text(offset)

async def main():
    async with open_store(sys.argv[1], deadline=60) as store:
        before = time.time()
        await store.sink.put(make_entry(model_call_id="now"))
        set_clock("+3650d")
        await store.sink.put(make_entry(model_call_id="in ten years"))
        assert time.time() - before > 3600 * 24 * 3000, "the clock did not jump"
        set_clock("-3650d")
        await store.sink.put(make_entry(model_call_id="ten years ago"))
        snapshot = await store.source.freeze("rollout-1")
        set_clock("-7300d")
        try:
            await store.sink.put(make_entry(model_call_id="late"))
        except TokenCaptureFrozenError:
            print(len(snapshot.entries), snapshot.version)
    # A deadline is one of the monotonic clock: it passes neither at once nor in decades.
    async with open_store("postgresql://127.0.0.1:1/none", deadline=1) as store:
        set_clock("-3650d")
        asyncio.get_running_loop().call_later(0.1, set_clock, "+3650d")
        asyncio.get_running_loop().call_later(0.2, set_clock, "-7300d")
        started = time.monotonic()
        try:
            await store.source.freeze("rollout-1")
        except StoreUnavailableError:
            print(0.3 < time.monotonic() - started)

asyncio.run(main())
"""
LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


def test_a_process_whose_clock_jumps_by_decades_keeps_its_fences_and_its_deadlines(
    store_url: str, tmp_path: Path
) -> None:
    if not LIBRARIES:
        needs_program("faketime", package="faketime")
    moment = tmp_path / "clock"
    moment.write_text("+0d")
    environment = os.environ | {
        "LD_PRELOAD": str(LIBRARIES[0]),
        "FAKETIME_TIMESTAMP_FILE": str(moment),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    command = [sys.executable, "-c", JUMPING, store_url]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "3 1\nTrue\n", "")
