"""Short campaigns: what scripts/campaign does for half an hour, bounded by operations."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
from collections import Counter
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from campaigns import driver
from campaigns.history import Outcome
from campaigns.report import Campaign
from tests.support import forked
from tests.support.machine import needs_mounts, needs_program

_POINTS = {"before commit", "after commit, before acknowledgement", "inside a coalesced batch"}


# On a loaded machine one campaign may end before every fault struck, so others follow.
_MOST_CAMPAIGNS = 5


def _run(database: str, folder: Path, faults: list[str], *also: str, **options: int) -> None:
    """Run campaigns that break no promise until everything has happened that can, and what `also` names."""
    struck, killed, stats, answered = (Counter[str]() for _ in range(4))
    wanted = {"kill", *faults, *also}
    points = {*_POINTS, "from outside"}
    for seed in range(1, _MOST_CAMPAIGNS + 1):
        campaign = Campaign(database=database, faults=["kill", "points", *faults], seed=seed, **options)
        here = folder / str(seed)
        here.mkdir()
        summary = driver.run(campaign, here)
        assert summary.passed, summary.as_json()
        struck += summary.struck
        killed += summary.killed
        stats += summary.stats
        for (_, outcome), count in summary.outcomes.items():
            answered[outcome] += count
        happened = {name for name, count in (struck + stats).items() if count}
        if wanted <= happened and set(killed) == points and answered[Outcome.ERROR]:
            break
    assert not wanted - happened
    assert set(killed) == points
    # Campaigns in which most is unknown prove little.
    assert answered[Outcome.OK] > answered[Outcome.UNKNOWN] > 0
    assert answered[Outcome.ERROR]


def test_no_promise_is_broken_on_sqlite_by_kills_a_held_lock_and_a_full_disk(tmp_path: Path) -> None:
    needs_mounts()
    _run("sqlite", tmp_path, ["lock", "disk"], operations=1200, fault_every=120, kill_every=32)


def test_no_promise_is_broken_on_postgresql_by_kills_crashes_and_a_bad_network(tmp_path: Path) -> None:
    faults = ["restart", "crash", "terminate", "reset", "cut", "black-hole"]
    _run("postgresql", tmp_path, faults, "cuts", "retries", operations=1200, fault_every=110, kill_every=32)


def test_no_promise_is_broken_behind_pgbouncer_by_kills_crashes_and_its_own_end(tmp_path: Path) -> None:
    needs_program("pgbouncer", package="pgbouncer")
    faults = ["restart", "crash", "terminate", "bouncer"]
    _run("pgbouncer", tmp_path, faults, operations=1200, fault_every=120, kill_every=32)


def drive(told: Connection, folder: Path) -> None:
    """Run a campaign, and tell at its first sign of life which processes are its workers."""

    def progress(*_: Any) -> None:
        if not told.closed:
            told.send([worker.pid for worker in multiprocessing.active_children()])
            told.close()

    driver.run(Campaign(database="sqlite", faults=[], seed=1, operations=10**6), folder, progress)


def test_no_worker_outlives_a_driver_that_is_killed(tmp_path: Path) -> None:
    here, there = forked.CONTEXT.Pipe()
    process = forked.process(drive, there, tmp_path)
    process.start()
    workers = [os.pidfd_open(pid) for pid in here.recv()]
    process.kill()
    process.join()
    try:
        assert len(workers) == 4
        assert all(select.select([worker], [], [], 60)[0] for worker in workers)
    finally:
        for worker in workers:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker, signal.SIGKILL)
            os.close(worker)
