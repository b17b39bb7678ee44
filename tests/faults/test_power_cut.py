"""The short version of scripts/power-cut, and cuts while a SQLite file comes into being."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from campaigns import power_cut
from campaigns.disks import PowerDisk
from campaigns.servers import free_port
from tests.support.machine import needs_mounts
from tokencustody import open_store
from tokencustody.schema import migrate
from tokencustody.spill.marks import spilled_files

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _can_mount() -> None:
    needs_mounts()


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_power_cut_loses_no_acknowledged_call(database: str) -> None:
    summary = power_cut.run(database, cuts=1, seed=3)
    assert summary.cuts == 1
    assert summary.acknowledged > 0
    assert summary.lost == 0


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_the_cut_is_one_that_loses_what_a_database_has_not_synced(database: str) -> None:
    # In a process of its own, whose stores have their protection taken out.
    command = [sys.executable, "-m", "campaigns.power_cut", "--unsafe", "--database", database]
    done = subprocess.run(
        [*command, "--cuts", "1", "--seed", "3", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"lost": 0' not in done.stdout


# Stops while it creates a file, as soon as that has a given size.
_STOP_AT = """
import asyncio, os, signal, sys
from tokencustody import open_store

async def main():
    async with open_store(sys.argv[1]) as store:
        await store.source.freeze("warm-up")

async def stop_soon():
    path = sys.argv[1]
    creating = asyncio.ensure_future(main())
    while not creating.done() and not (os.path.exists(path) and os.path.getsize(path) >= int(sys.argv[2])):
        await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGSTOP)

asyncio.run(stop_soon())
"""


def test_a_file_whose_creation_was_acknowledged_outlives_a_cut() -> None:
    with PowerDisk(1 << 26) as disk:
        url = f"sqlite:///{disk.folder / 'captures.db'}"
        migrate.upgrade(url)
        disk.cut()
        disk.remount()
        assert migrate.current(url) == migrate.HEAD


@pytest.mark.parametrize("size", [0, 100_000])
def test_a_cut_while_a_file_is_created_leaves_one_that_a_store_can_use(size: int) -> None:
    with PowerDisk(1 << 26) as disk:
        path = disk.folder / "captures.db"
        with subprocess.Popen([sys.executable, "-c", _STOP_AT, str(path), str(size)]) as creator:
            _, status = os.waitpid(creator.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            disk.cut()
            creator.send_signal(signal.SIGKILL)
        disk.remount()

        async def use() -> None:
            async with open_store(path) as store:
                await store.sink.put(power_cut.make_entry("rollout-1", "call-1"))
                assert len((await store.source.freeze("rollout-1")).entries) == 1

        asyncio.run(use())


async def test_a_mark_that_was_spilled_outlives_a_cut() -> None:
    with PowerDisk(1 << 26) as disk:
        folder = disk.folder / "new" / "spill"
        url = f"postgresql://127.0.0.1:{free_port()}/unreachable"
        async with open_store(url, deadline=0.2, spill=folder) as store:
            await store.sink.mark_incomplete("rollout-1", "call-1")
        disk.cut()
        disk.remount()
        assert [file.path.suffix for file in spilled_files(folder)] == [".mark1"]
