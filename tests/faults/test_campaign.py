"""Short campaigns: what scripts/campaign does for half an hour, bounded by operations."""

from __future__ import annotations

from pathlib import Path

from campaigns import driver
from campaigns.history import Outcome
from campaigns.report import Campaign, Summary
from tests.support.machine import needs_mounts, needs_program

_POINTS = {"before commit", "after commit, before acknowledgement", "inside a coalesced batch"}


def _run(database: str, folder: Path, faults: list[str], **options: int) -> Summary:
    campaign = Campaign(database=database, faults=["kill", "points", *faults], **options)
    summary = driver.run(campaign, folder)
    assert summary.passed, summary.as_json()
    return summary


def _assert_everything_happened(summary: Summary) -> None:
    names = {name for name in summary.campaign.faults if name != "points"}
    assert not names - {name for name, count in summary.struck.items() if count}
    assert set(summary.killed) == {*_POINTS, "from outside"}
    answered = {
        outcome: sum(count for (_, each), count in summary.outcomes.items() if each == outcome)
        for outcome in Outcome
    }
    # A campaign in which most is unknown proves little.
    assert answered[Outcome.OK] > answered[Outcome.UNKNOWN] > 0
    assert answered[Outcome.ERROR]


def test_no_promise_is_broken_on_sqlite_by_kills_a_held_lock_and_a_full_disk(tmp_path: Path) -> None:
    needs_mounts()
    summary = _run(
        "sqlite", tmp_path, ["lock", "disk"], seed=1, operations=1200, fault_every=120, kill_every=32
    )
    _assert_everything_happened(summary)


def test_no_promise_is_broken_on_postgresql_by_kills_crashes_and_a_bad_network(tmp_path: Path) -> None:
    faults = ["restart", "crash", "terminate", "reset", "cut", "black-hole"]
    summary = _run("postgresql", tmp_path, faults, seed=1, operations=1200, fault_every=110, kill_every=32)
    _assert_everything_happened(summary)
    assert summary.struck["cuts"]
    assert summary.stats["retries"]


def test_no_promise_is_broken_behind_pgbouncer_by_kills_crashes_and_its_own_end(tmp_path: Path) -> None:
    needs_program("pgbouncer", package="pgbouncer")
    faults = ["restart", "crash", "terminate", "bouncer"]
    summary = _run("pgbouncer", tmp_path, faults, seed=1, operations=1200, fault_every=120, kill_every=32)
    _assert_everything_happened(summary)
