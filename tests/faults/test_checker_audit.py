"""The audit of a database by plain SQL: nothing on one that a store wrote, and each planted fault by its name."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import Table

from campaigns.audit import RULES
from campaigns.checker import audit
from campaigns.driver import verified
from tests.support.entries import make_entry
from tests.support.ledger import make_commit
from tests.support.rows import run_sql
from tests.support.staged import stage
from tokencustody import CaptureStore, TokenCaptureFrozenError, open_store
from tokencustody.errors import PayloadConflictError
from tokencustody.schema.tables import metadata

RUN = "run-1"


async def _write(store: CaptureStore) -> None:
    """Three rollouts: an open one with a conflict and a ledger, a frozen one, and one that was dropped."""
    parent = make_entry("open-1", "a")
    tokens = [*parent.prompt_token_ids, *parent.generation_token_ids]
    await store.sink.put(parent)
    await store.sink.put(
        make_entry("open-1", "b", parent="a", prompt=[*tokens, 5], cumulative=[*tokens, 5, 30, 31, 32])
    )
    with pytest.raises(PayloadConflictError):
        await store.sink.put(make_entry("open-1", "b", text="Rome."))
    await store.sink.mark_incomplete("open-1", "c")
    await store.sink.refuse_call("open-1", model_call_id="d", code="busy")
    await store.lineage.record(make_commit("open-1", "a"))
    await store.lineage.record_failure("open-1", "b", "unresolved_parent")
    await store.sink.put(make_entry("frozen-1", "a"))
    await store.sink.begin_call("frozen-1", "a")
    await store.source.freeze("frozen-1")
    with pytest.raises(TokenCaptureFrozenError):
        await store.sink.put(make_entry("frozen-1", "b"))
    await store.sink.put(make_entry("dropped-1", "a"))
    snapshot = await store.source.freeze("dropped-1")
    assert await store.source.drop("dropped-1", snapshot.snapshot_id, snapshot.version)
    await store.source.delete(["never-1"])
    staged = stage("a", rollout="dropped-1").snapshot
    assert store.staging.stage(staged, attachments={"note": b"text"}).ok


# The rule, the rollout, and what is planted in a run of its own.
_PLANTED = [
    (
        "versions have a gap",
        "open-1",
        "DELETE FROM snapshot_versions WHERE run = '{run}' AND rollout_id = 'open-1' AND version = 1",
    ),
    (
        "fence at another version",
        "open-1",
        "UPDATE fences SET version = 9 WHERE run = '{run}' AND rollout_id = 'open-1'",
    ),
    (
        "fence in another state",
        "frozen-1",
        "UPDATE fences SET state = 'open' WHERE run = '{run}' AND rollout_id = 'frozen-1'",
    ),
    (
        "fence in another state",
        "dropped-1",
        "UPDATE fences SET state = 'frozen' WHERE run = '{run}' AND rollout_id = 'dropped-1'",
    ),
    (
        "event after the fence",
        "frozen-1",
        "INSERT INTO snapshot_versions SELECT run, rollout_id, 2, 'refusal', 'late', 'b', snapshot_id,"
        " recorded_at, written_by, NULL, NULL FROM snapshot_versions"
        " WHERE run = '{run}' AND rollout_id = 'frozen-1' AND version = 1",
    ),
    (
        "event after the fence",
        "dropped-1",
        "UPDATE snapshot_versions SET event = 'conflict'"
        " WHERE run = '{run}' AND rollout_id = 'dropped-1' AND version = 0",
    ),
    (
        "snapshot id changed",
        "frozen-1",
        "UPDATE fences SET snapshot_id = 'another' WHERE run = '{run}' AND rollout_id = 'frozen-1'",
    ),
    (
        "snapshot id changed",
        "dropped-1",
        "UPDATE snapshot_versions SET snapshot_id = 'another'"
        " WHERE run = '{run}' AND rollout_id = 'dropped-1' AND version = 2",
    ),
    (
        "records of a retired rollout",
        "dropped-1",
        "INSERT INTO intents SELECT run, 'dropped-1', 'late', NULL, begun_at, NULL, written_by FROM intents"
        " WHERE run = '{run}' AND rollout_id = 'frozen-1'",
    ),
    (
        "evidence missing",
        "open-1",
        "DELETE FROM failures WHERE run = '{run}' AND rollout_id = 'open-1' AND kind = 'conflict'",
    ),
    ("evidence missing", "open-1", "UPDATE failures SET version = 77 WHERE run = '{run}' AND kind = 'mark'"),
    (
        "verdict wrong",
        "open-1",
        "UPDATE fences SET incomplete = NOT incomplete WHERE run = '{run}' AND rollout_id = 'open-1'",
    ),
    ("verdict wrong", "frozen-1", "DELETE FROM entries WHERE run = '{run}' AND rollout_id = 'frozen-1'"),
    (
        "refusals without versions",
        "open-1",
        "DELETE FROM intents WHERE run = '{run}' AND rollout_id = 'open-1'",
    ),
    ("ledger positions have a gap", "open-1", "UPDATE ledger_failures SET position = 5 WHERE run = '{run}'"),
    ("ledger positions have a gap", "open-1", "UPDATE ledger_failures SET position = 1 WHERE run = '{run}'"),
    (
        "prefix missing",
        "open-1",
        "DELETE FROM entries WHERE run = '{run}' AND rollout_id = 'open-1' AND model_call_id = 'a'",
    ),
    (
        "prefix missing",
        "open-1",
        "UPDATE entries SET shared_len = 3 WHERE run = '{run}' AND model_call_id = 'b'",
    ),
    (
        "payload corrupt",
        "frozen-1",
        "UPDATE entries SET payload = {bytes} WHERE run = '{run}' AND rollout_id = 'frozen-1'",
    ),
    (
        "payload corrupt",
        "open-1",
        "UPDATE entries SET payload = {bytes} WHERE run = '{run}' AND model_call_id = 'b'",
    ),
    ("payload corrupt", "dropped-1", "UPDATE staged_calls SET payload = {bytes} WHERE run = '{run}'"),
    ("payload corrupt", "dropped-1", "UPDATE staged_attachments SET data = {bytes} WHERE run = '{run}'"),
]
# What the database's own keys do not let happen while they are there.
_WITHOUT_KEYS = [
    (
        "versions have a gap",
        "open-1",
        "snapshot_versions",
        "pk_snapshot_versions",
        "UPDATE snapshot_versions SET version = 0 WHERE run = '{run}' AND rollout_id = 'open-1' AND version = 1",
    ),
    (
        "rows without a fence",
        "lost-1",
        "entries",
        "fk_entries_fence",
        "UPDATE entries SET rollout_id = 'lost-1' WHERE run = '{run}' AND rollout_id = 'frozen-1'",
    ),
    (
        "attachment without a call",
        "dropped-1",
        "staged_attachments",
        "fk_staged_attachments_call",
        "DELETE FROM staged_calls WHERE run = '{run}'",
    ),
]


def _copied(table: Table, runs: int) -> str:
    others = ", ".join(column.name for column in table.columns if column.name != "run")
    names = " UNION ALL ".join(f"SELECT '{RUN}-{number}' AS copy" for number in range(runs))
    return (
        f"INSERT INTO {table.name} (run, {others}) SELECT runs.copy, {others} FROM {table.name},"
        f" ({names}) AS runs WHERE run = '{RUN}'"
    )


async def _without(url: str, table: str, constraint: str) -> None:
    if url.startswith("postgresql"):
        await run_sql(url, f"ALTER TABLE {table} DROP CONSTRAINT {constraint}")
    elif constraint.startswith("pk"):
        # SQLite checks no foreign keys unless asked, and cannot let go of a primary key.
        await run_sql(url, f"CREATE TABLE copied AS SELECT * FROM {table}")
        await run_sql(url, f"DROP TABLE {table}")
        # Not by renaming, which SQLite refuses while views name the table.
        await run_sql(url, f"CREATE TABLE {table} AS SELECT * FROM copied")
        await run_sql(url, "DROP TABLE copied")


async def test_every_planted_contradiction_is_named_and_nothing_else_is(store_url: str) -> None:
    async with open_store(store_url, run=RUN) as store:
        await _write(store)
    planted = [*_PLANTED, *((rule, rollout, statement) for rule, rollout, _, _, statement in _WITHOUT_KEYS)]
    for table in metadata.sorted_tables:
        if "run" in table.c:
            await run_sql(store_url, _copied(table, len(planted)))
    for number in range(len(planted)):
        assert audit(store_url, f"{RUN}-{number}") == []
    for _, _, table_name, constraint, _ in _WITHOUT_KEYS:
        await _without(store_url, table_name, constraint)
    literal = "x'00'" if store_url.startswith("sqlite") else "decode('00', 'hex')"
    for number, (_, _, statement) in enumerate(planted):
        await run_sql(store_url, statement.replace("{bytes}", literal).replace("{run}", f"{RUN}-{number}"))
    unseen = []
    for number, (rule, rollout, statement) in enumerate(planted):
        named = {(violation.rule, violation.rollout) for violation in audit(store_url, f"{RUN}-{number}")}
        if (rule, rollout) not in named:
            unseen.append((rule, rollout, statement, named))
    assert unseen == []
    assert audit(store_url, RUN) == []


def test_every_rule_of_the_audit_has_a_planted_fault() -> None:
    assert {row[0] for row in [*_PLANTED, *_WITHOUT_KEYS]} == set(RULES)


async def test_what_verify_finds_counts_unless_a_writer_can_bring_it_about(store_url: str) -> None:
    async with open_store(store_url, run=RUN) as store:
        await _write(store)
        await store.sink.put(make_entry("open-1", "e", parent="never"))
    assert await asyncio.to_thread(verified, store_url, RUN) == []
    await run_sql(store_url, "UPDATE entries SET payload_sha256 = stored_sha256 WHERE shared_len > 0")
    await run_sql(
        store_url, f"UPDATE snapshot_versions SET sealed_sha256 = '{'0' * 64}' WHERE event = 'freeze'"
    )
    found = await asyncio.to_thread(verified, store_url, RUN)
    assert {violation.rule for violation in found} >= {"verify: whole_hash", "verify: seal"}
