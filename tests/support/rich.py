"""A database with some of everything, and all its rows in a form that is the same on every database."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

from sqlalchemy import Connection, insert, select

from tests.support.entries import make_entry
from tests.support.ledger import make_commit
from tests.support.rollouts import linear_rollout
from tests.support.staged import stage
from tokencustody import open_store
from tokencustody.database.url import parse_url
from tokencustody.errors import PayloadConflictError
from tokencustody.schema.opening import CaptureDatabase
from tokencustody.schema.tables import exports, metadata
from tokencustody.staging.records import StagedCallRecord
from tokencustody.store.base import now

ODD_CALL = "call \x1b[31m é\u2028 \U0001f600"


async def fill_richly(url: str, run: str = "run-1") -> None:
    """Add rollouts in every state, with shared and delta prompts, conflicts, refusals, ledgers, staged calls, exports.

    `frozen`, `deltas`, `marked` and `empty` are frozen, `dropped` and `retired` are retired, `open` is open; `alone`
    has staged calls and no fence.
    """
    await fill_frozen(url, "frozen", run=run)
    async with open_store(url, run=run) as store:
        for name, deltas in {"deltas": (1, 2), "open": (), "dropped": (), "retired": ()}.items():
            for turn in linear_rollout(4, deltas=deltas, rollout_id=name):
                await store.sink.put(turn.entry)
        await store.sink.put(make_entry("marked"))
        await store.sink.begin_call("marked", "dangling")
        await store.sink.begin_call("open", "on-its-way")
        await store.sink.mark_incomplete("marked", "lost")
        for name in ("deltas", "marked", "empty"):
            await store.source.freeze(name)
        dropped = await store.source.freeze("dropped")
        await store.source.drop("dropped", dropped.snapshot_id, dropped.version)
        await store.source.retire(["retired"])
        await asyncio.to_thread(_stage, store, "alone")


async def fill_frozen(url: str, *names: str, run: str = "run-1") -> None:
    """Add frozen rollouts that have a row in every table."""
    marks = []
    async with open_store(url, run=run) as store:
        for name in names:
            for turn in linear_rollout(4, rollout_id=name):
                await store.sink.put(turn.entry)
            odd = make_entry(
                name,
                ODD_CALL,
                log_probs=[-0.0, float("-inf"), float("nan")],
                model="a\0b",
                z_first={"b": 2**80, "a": [-0.0, None, "\0"]},
                a_last=2**64 - 1,
            )
            await store.sink.put(odd)
            await store.sink.begin_call(name, "refused")
            await store.sink.refuse_call(name, model_call_id="refused", code="length")
            with contextlib.suppress(PayloadConflictError):
                await store.sink.put(make_entry(name, ODD_CALL))
            root = make_commit(name, "call-1")
            for commit in (root, make_commit(name, "call-2", parent=root, text="And Rome.")):
                await store.lineage.record(commit)
            await store.lineage.record_failure(name, "call-3", "worker_capture_failed")
            await asyncio.to_thread(_stage, store, name)
            snapshot = await store.source.freeze(name)
            marks.append(
                {
                    "run": run,
                    "rollout_id": name,
                    "export_id": "export-1",
                    "snapshot_id": snapshot.snapshot_id,
                    "version": snapshot.version,
                    "destination": "out.parquet",
                    "manifest_sha256": "0" * 64,
                    "exported_at": now(),
                    "written_by": "test",
                }
            )
    await execute(url, insert(exports).values(marks))


def _stage(store: Any, rollout: str) -> None:
    first = stage("staged-1", rollout=rollout, extras={"logits": [1.5, -0.0], "é": None})
    for staged in (first, stage("staged-2", first, rollout=rollout)):
        record = StagedCallRecord.model_validate(staged.snapshot.model_dump())
        result = store.staging.stage(record, attachments={"blob": bytes(range(256)), "note": "text \0 é"})
        assert result.ok, result


async def rows(url: str, run: str | None = None) -> dict[str, Counter[str]]:
    """Return every row of every table of rollouts, in one form on both databases."""

    def read(connection: Connection) -> dict[str, Counter[str]]:
        found = {}
        for table in metadata.sorted_tables:
            if "run" in table.c:
                statement = select(table) if run is None else select(table).where(table.c.run == run)
                found[table.name] = Counter(repr(tuple(row)) for row in connection.execute(statement))
        return found

    database = CaptureDatabase(parse_url(url), creates=False)
    try:
        return await database.read(read)
    finally:
        await database.close()


async def execute(url: str, *statements: Any) -> None:
    """Execute statements in one transaction."""

    def work(connection: Connection) -> None:
        for statement in statements:
            connection.execute(statement)

    database = CaptureDatabase(parse_url(url))
    try:
        await database.write(work)
    finally:
        await database.close()
