"""Several imports of one folder at once: each rollout is imported by one of them, and there for the others."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy import func, select

from tests.export.exports import run_sql
from tests.gym_import.gym_folders import line_of, state_of, write_rollout
from tests.support.rollouts import linear_rollout
from tokencustody.database.faults import FAULT_POINTS
from tokencustody.database.url import parse_url
from tokencustody.gym_import import GymImporter, ImportOutcome, ImportReport
from tokencustody.schema import tables

ENTRIES = [turn.entry for turn in linear_rollout(3, deltas=[2])]


def write(folder: Path, name: str) -> None:
    lines = {entry.model_call_id: line_of(entry, rollout_id=name) for entry in ENTRIES}
    state = state_of(lines, frozen=True, snapshot_id=f"snapshot-{name}", version=4, incomplete=True)
    write_rollout(
        folder, lines.values(), rollout_id=name, intents=["call-0", "never"], marks=["lost"], state=state
    )


async def import_into(url: str, folder: Path) -> ImportReport:
    async with GymImporter(url) as importer:
        return await importer.import_folder(folder)


async def begin_import(url: str, folder: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tokencustody", "import", str(folder), "--url", url, "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


async def ended(processes: Sequence[asyncio.subprocess.Process]) -> list[dict[str, Any]]:
    """Return the reports of imports, all of which must find nothing lost and nothing conflicting."""
    outputs = await asyncio.gather(*(process.communicate() for process in processes))
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    reports = [json.loads(out) for out, _ in outputs]
    assert all(report["clean"] for report in reports)
    return reports


async def waits_for_a_lock(url: str) -> None:
    """Return when a session of the database waits for a lock."""
    connection = await asyncpg.connect(parse_url(url).dsn)
    try:
        waiting = 0
        while not waiting:
            waiting = await connection.fetchval(
                "SELECT count(*) FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database"
                " WHERE d.datname = current_database() AND NOT l.granted"
            )
    finally:
        await connection.close()


async def test_an_import_that_waited_for_another_finds_the_rollout_there(
    postgres_url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "gym"
    write(folder, "rollout")
    others: list[asyncio.subprocess.Process] = []

    async def begin_the_other() -> None:
        FAULT_POINTS.clear()
        others.append(await begin_import(postgres_url, folder))
        await waits_for_a_lock(postgres_url)

    FAULT_POINTS["before commit"] = begin_the_other
    try:
        first = await import_into(postgres_url, folder)
    finally:
        FAULT_POINTS.clear()
    assert ([each.outcome for each in first.rollouts], first.is_clean) == ([ImportOutcome.IMPORTED], True)
    (report,) = await ended(others)
    assert [each["outcome"] for each in report["rollouts"]] == ["already_there"]


async def test_an_import_whose_answer_was_lost_finds_what_it_did(store_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "gym"
    write(folder, "rollout")

    async def lose() -> None:
        FAULT_POINTS.clear()
        raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")

    FAULT_POINTS["after commit, before acknowledgement"] = lose
    try:
        report = await import_into(store_url, folder)
    finally:
        FAULT_POINTS.clear()
    assert [each.outcome for each in report.rollouts] == [ImportOutcome.IMPORTED]
    assert report.is_clean
    (versions,) = await run_sql(store_url, select(tables.snapshot_versions.c.event))
    assert sorted(row.event for row in versions) == ["freeze", "mark", "open"]


@pytest.mark.race
async def test_processes_that_import_one_folder_at_once_report_no_conflict(
    store_url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "gym"
    names = [f"rollout-{number:02}" for number in range(25)]
    for name in names:
        write(folder, name)
    reports = await ended([await begin_import(store_url, folder) for _ in range(4)])
    for index in range(len(names)):
        outcomes = sorted(report["rollouts"][index]["outcome"] for report in reports)
        assert outcomes == ["already_there"] * 3 + ["imported"]
    ((calls,),) = await run_sql(store_url, select(func.count()).select_from(tables.entries))
    assert calls[0] == 3 * len(names)
