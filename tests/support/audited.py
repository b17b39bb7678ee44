"""One rollout of each kind that a person may look into, and asking what a database says of it."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

from sqlalchemy import Connection, Executable, insert, update

from tests.support import postgres
from tests.support.entries import make_entry
from tests.support.ledger import make_commit
from tests.support.older import refuse_with_another_code
from tests.support.rollouts import linear_rollout
from tests.support.staged import stage
from tokencustody import ParentResolutionStatus, open_store
from tokencustody.database.url import parse_url
from tokencustody.errors import PayloadConflictError
from tokencustody.schema import migrate
from tokencustody.schema.tables import entries, exports, ledger_calls
from tokencustody.store import CaptureStore, SqlStagingStore
from tokencustody.store.base import now

RUN = "run-1"
CHAIN = linear_rollout(6, deltas={3, 4}, rollout_id="chain")


def fill(url: str) -> None:
    """Write the rollouts."""

    async def write() -> None:
        async with open_store(url, run=RUN, writer="writer-1") as store:
            await _complete_records(store)
            await _ledger(store)
        async with open_store(url, run=RUN, writer="writer-2") as store:
            with contextlib.suppress(PayloadConflictError):
                await store.sink.put(make_entry("bad", "call-1", model="n"))
            await store.source.freeze("bad")
            frozen = await store.source.freeze("clean")
        mark = insert(exports).values(
            run=RUN,
            rollout_id="clean",
            export_id="export-1",
            snapshot_id=frozen.snapshot_id,
            version=frozen.version,
            destination="exported",
            manifest_sha256="e" * 64,
            exported_at=now(),
            written_by="exporter",
            is_held=True,
        )
        # As a ledger of before answers had ids may say it.
        unanswered = (
            update(ledger_calls).where(ledger_calls.c.model_call_id == "call-3").values(response_id=None)
        )
        for change in (mark, unanswered):
            await asyncio.to_thread(migrate.in_transaction, parse_url(url), _executing(change))

    asyncio.run(write())
    with SqlStagingStore(url, run=RUN, writer="worker-1") as staging:
        for rollout, call in (
            ("ledger", "call-1"),
            ("ledger", "call-9"),
            ("nowhere", "call-1"),
            ("open", "call-1"),
        ):
            staged = stage(call, rollout=rollout, extras={"k": 1}).snapshot
            assert staging.stage(staged, attachments={"raw": b"\0\1", "note": "text"}).ok

    async def freeze() -> None:
        async with open_store(url, run=RUN, writer="writer-1") as store:
            await store.source.freeze("ledger")

    asyncio.run(freeze())


def _executing(statement: Executable) -> Callable[[Connection], object]:
    return lambda connection: connection.execute(statement)


async def _complete_records(store: CaptureStore) -> None:
    sink, source = store.sink, store.source
    await sink.begin_call("open", "call-1")
    await sink.put(make_entry("open", "call-1"))
    await sink.begin_call("open", "call-2")
    await sink.put(make_entry("clean", "call-1"))
    await sink.put(make_entry("bad", "call-1", model="m"))
    await sink.refuse_call("bad", model_call_id="call-5", code="too_long")
    await refuse_with_another_code(store, "bad", "call-5")
    for call in ("call-3", "", "call-3"):
        await sink.mark_incomplete("bad", call)
    await sink.begin_call("bad", "call-9")
    await sink.put(make_entry("consumed", "call-1"))
    consumed = await source.freeze("consumed")
    assert await source.drop("consumed", consumed.snapshot_id, consumed.version)
    await sink.mark_incomplete("abandoned", "call-1")
    await source.retire(["abandoned"])
    await sink.begin_call("dangled", "call-1")
    dangled = await source.freeze("dangled")
    assert await source.drop("dangled", dangled.snapshot_id, dangled.version)
    for turn in CHAIN:
        await sink.put(turn.entry)
    lost = make_entry("chain", "lost", parent_resolution_reason="no_match")
    lost.parent_resolution = ParentResolutionStatus.UNRESOLVED
    await sink.put(lost)


async def _ledger(store: CaptureStore) -> None:
    root = make_commit("ledger")
    await store.lineage.record(root)
    await store.lineage.record_failure("ledger", "call-2", "worker_capture_failed")
    await store.lineage.record(make_commit("ledger", "call-3", tokens=[4], parent=root))


def set_parent(url: str, rollout_id: str, parents: dict[str, str | None]) -> None:
    """Overwrite which parents the rows of calls name."""

    def write(connection: Connection) -> None:
        for call, parent in parents.items():
            this = (entries.c.rollout_id == rollout_id) & (entries.c.model_call_id == call)
            connection.execute(update(entries).where(this).values(parent_call_id=parent))

    migrate.in_transaction(parse_url(url), write)


def ask(url: str, statement: str) -> list[dict[str, Any]]:
    """Return what the database itself answers, through its driver alone."""
    if not url.startswith("sqlite"):
        return [dict(row) for row in postgres.fetch(url, statement)]
    with closing(sqlite3.connect(parse_url(url).dsn)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(statement)]
