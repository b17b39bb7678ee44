"""The race is run by processes wherever they reach the backend, and by threads where they do not."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.conformance.files import LockedFiles, UnlockedFiles
from tests.conformance.memory import Backend, Memory
from tokencustody.conformance import CheckStatus, ConformanceReport, check_conformance
from tokencustody.conformance.case import PROCESSES

HERE_ONLY = Backend()


def memory_of_this_process() -> Memory:
    """A factory that pickles by name, although another process gets an empty backend."""
    return Memory(HERE_ONLY)


class ClaimsToBeShared(Memory):
    def is_process_shared(self) -> bool:
        return True


def capability(report: ConformanceReport) -> tuple[bool, str]:
    found = next(each for each in report.capabilities if each.name == PROCESSES)
    return found.present, found.detected


@pytest.mark.race
async def test_processes_that_share_files_under_a_lock_pass(tmp_path: Path) -> None:
    factory = partial(LockedFiles, tmp_path)
    report = await check_conformance(factory, factory, only=["strict_fence"])
    assert report.ok, report.summary()
    assert "against 3 processes" in report.results[0].detail
    assert capability(report)[0]


@pytest.mark.race
async def test_a_fence_without_a_lock_is_caught_across_processes(tmp_path: Path) -> None:
    factory = partial(UnlockedFiles, tmp_path)
    report = await check_conformance(factory, factory, only=["strict_fence"])
    assert [result.status for result in report.results] == [CheckStatus.FAILED], report.summary()
    assert "not in the snapshot" in report.results[0].detail or "is in" in report.results[0].detail
    assert capability(report)[0], "the processes did not take part"


@pytest.mark.race
async def test_a_backend_that_processes_do_not_reach_is_raced_by_threads_and_the_report_says_so() -> None:
    report = await check_conformance(memory_of_this_process, memory_of_this_process, only=["strict_fence"])
    assert report.ok, report.summary()
    assert "3 threads, not processes" in report.results[0].detail
    present, detected = capability(report)
    assert not present
    assert "not in the snapshot" in detected


@pytest.mark.race
async def test_a_transport_that_claims_to_be_shared_and_is_not_fails() -> None:
    report = await check_conformance(
        memory_of_this_process,
        memory_of_this_process,
        partial(ClaimsToBeShared, HERE_ONLY),
        only=["strict_fence"],
    )
    assert [result.status for result in report.results] == [CheckStatus.FAILED]
    assert "not in the snapshot" in report.results[0].detail
