"""Every constraint that is declared really holds in a migrated database."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest
from sqlalchemy import (
    CheckConstraint,
    Connection,
    ForeignKeyConstraint,
    PrimaryKeyConstraint,
    Table,
    UniqueConstraint,
    insert,
)
from sqlalchemy.exc import IntegrityError

from tokencustody.database.url import parse_url
from tokencustody.errors import CorruptEntryError
from tokencustody.schema import tables
from tokencustody.schema.opening import CaptureDatabase

MOMENT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
KEY = {"run": "run", "rollout_id": "rollout"}
CALL = {**KEY, "model_call_id": "call"}

# One valid row of each table, in an order that foreign keys allow.
VALID: dict[str, dict[str, Any]] = {
    "fences": {**KEY, "state": "open", "version": 0, "incomplete": False, "opened_at": MOMENT},
    "entries": {
        **CALL,
        "model": "model",
        "prompt_len": 0,
        "generation_len": 0,
        "token_width": 2,
        "parent_resolution_reason": "",
        "prompt_is_delta": False,
        "continuation_fingerprint": "",
        "continuation_context_len": 0,
        "continuation_context_digest": "",
        "committed_at": MOMENT,
        "written_by": "writer",
        "payload": b"",
        "payload_sha256": "0" * 64,
    },
    "intents": {**CALL, "begun_at": MOMENT, "written_by": "writer"},
    "failures": {
        **CALL,
        "version": 1,
        "kind": "mark",
        "differing_fields": "",
        "recorded_at": MOMENT,
        "written_by": "writer",
    },
    "snapshot_versions": {
        **CALL,
        "version": 0,
        "event": "open",
        "event_id": "event",
        "recorded_at": MOMENT,
        "written_by": "writer",
    },
    "exports": {
        **KEY,
        "export_id": "export",
        "snapshot_id": "snapshot",
        "version": 1,
        "destination": "folder",
        "manifest_sha256": "0" * 64,
        "exported_at": MOMENT,
        "written_by": "writer",
    },
    "ledger_calls": {
        **CALL,
        "position": 1,
        "staging_key": "rollout/call",
        "mode": "text",
        "prev_len": 0,
        "delta_len": 2,
        "cum_len": 2,
        "weight_version": 0,
        "digest": "0" * 64,
        "extras_digest": "0" * 64,
        "cumulative_hash": "0" * 64,
        "fingerprint_version": 2,
        "continuation_context_len": 0,
        "continuation_context_digest": "",
        "staging_chain": "[]",
        "committed_at": MOMENT,
        "written_by": "writer",
        "payload_sha256": "0" * 64,
    },
    "ledger_failures": {
        **CALL,
        "position": 1,
        "reason": "worker_capture_failed",
        "recorded_at": MOMENT,
        "written_by": "writer",
    },
    "staged_calls": {
        **CALL,
        "mode": "text",
        "prev_len": 0,
        "delta_len": 2,
        "cum_len": 2,
        "weight_version": 0,
        "digest": "0" * 64,
        "extras_digest": "0" * 64,
        "chain_hash": "0" * 64,
        "cumulative_hash": "0" * 64,
        "token_width": 2,
        "staged_at": MOMENT,
        "written_by": "writer",
        "payload": b"",
        "payload_sha256": "0" * 64,
    },
    "staged_attachments": {
        **CALL,
        "name": "routes",
        "kind": "bytes",
        "data": b"",
        "data_sha256": "0" * 64,
    },
    # Stamped by the migrations, so it is there from the start.
    "wire_schema": {"name": "fingerprint", "version": 2},
}

STORED = [row for row in VALID.items() if row[0] != "wire_schema"]

ELSEWHERE = {"rollout_id": "rollout-without-a-fence"}
SECOND = {"model_call_id": "other", "position": 2}
OTHER = {"model_call_id": "other"}
# What a call that leaves out its parent's sequencehas besides.
SHARED = {"prompt_len": 3, "shared_len": 3, "parent_call_id": "call", "stored_sha256": "1" * 64}

# Constraint, and what turns the table's valid row into one that it must refuse.
VIOLATIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("fences", "pk_fences", {}),
    ("fences", "ck_fences_state", {"rollout_id": "other", "state": "closed"}),
    ("fences", "ck_fences_state", {"rollout_id": "other", "state": "OPEN"}),
    ("fences", "ck_fences_version", {"rollout_id": "other", "version": -1}),
    ("fences", "ck_fences_frozen_has_snapshot", {"rollout_id": "other", "state": "frozen"}),
    ("entries", "pk_entries", {}),
    ("entries", "fk_entries_fence", ELSEWHERE),
    ("entries", "fk_entries_fence", {"run": "other-run"}),
    ("entries", "ck_entries_prompt_len", {"model_call_id": "other", "prompt_len": -1}),
    ("entries", "ck_entries_generation_len", {"model_call_id": "other", "generation_len": -1}),
    ("entries", "ck_entries_cum_len", {"model_call_id": "other", "cum_len": -1}),
    (
        "entries",
        "ck_entries_continuation_context_len",
        {"model_call_id": "other", "continuation_context_len": -1},
    ),
    ("entries", "ck_entries_token_width", {"model_call_id": "other", "token_width": 3}),
    ("entries", "ck_entries_parent_resolution", {"model_call_id": "other", "parent_resolution": "guessed"}),
    ("entries", "ck_entries_payload_sha256", {"model_call_id": "other", "payload_sha256": "0" * 63}),
    ("entries", "ck_entries_shared_len", OTHER | SHARED | {"shared_len": -1}),
    ("entries", "ck_entries_shared_len_in_prompt", OTHER | SHARED | {"shared_len": 4}),
    ("entries", "ck_entries_shared_has_parent", OTHER | SHARED | {"parent_call_id": None}),
    ("entries", "ck_entries_shared_has_stored_sha256", OTHER | SHARED | {"stored_sha256": None}),
    ("entries", "ck_entries_shared_has_stored_sha256", OTHER | SHARED | {"shared_len": 0}),
    ("entries", "ck_entries_stored_sha256", OTHER | SHARED | {"stored_sha256": ""}),
    ("intents", "pk_intents", {}),
    ("intents", "fk_intents_fence", ELSEWHERE),
    ("intents", "ck_intents_refusal", {"model_call_id": "other", "refusal_code": "code"}),
    ("failures", "pk_failures", {}),
    ("failures", "fk_failures_fence", ELSEWHERE),
    ("failures", "ck_failures_kind", {"version": 2, "kind": "open"}),
    ("failures", "ck_failures_version", {"version": 0}),
    ("snapshot_versions", "pk_snapshot_versions", {"event_id": "other"}),
    ("snapshot_versions", "uq_snapshot_versions_event_id", {"version": 1}),
    ("snapshot_versions", "fk_snapshot_versions_fence", ELSEWHERE),
    ("snapshot_versions", "ck_snapshot_versions_event", {"version": 1, "event_id": "other", "event": "put"}),
    ("snapshot_versions", "ck_snapshot_versions_version", {"version": -1, "event_id": "other"}),
    ("exports", "pk_exports", {}),
    ("exports", "fk_exports_fence", ELSEWHERE),
    ("exports", "ck_exports_version", {"export_id": "other", "version": 0}),
    ("exports", "ck_exports_manifest_sha256", {"export_id": "other", "manifest_sha256": ""}),
    (
        "snapshot_versions",
        "ck_snapshot_versions_sealed_sha256",
        {"version": 1, "event_id": "other", "sealed_sha256": ""},
    ),
    ("ledger_calls", "pk_ledger_calls", {"position": 2}),
    ("ledger_calls", "uq_ledger_calls_position", OTHER),
    ("ledger_calls", "fk_ledger_calls_fence", ELSEWHERE),
    ("ledger_calls", "ck_ledger_calls_mode", SECOND | {"mode": "guess"}),
    ("ledger_calls", "ck_ledger_calls_position", SECOND | {"position": 0}),
    ("ledger_calls", "ck_ledger_calls_prev_len", SECOND | {"prev_len": -1, "cum_len": 1}),
    ("ledger_calls", "ck_ledger_calls_delta_len", SECOND | {"delta_len": -1, "cum_len": -1}),
    ("ledger_calls", "ck_ledger_calls_cum_len", SECOND | {"cum_len": 3}),
    ("ledger_calls", "ck_ledger_calls_weight_version", SECOND | {"weight_version": -1}),
    (
        "ledger_calls",
        "ck_ledger_calls_continuation_context_len",
        SECOND | {"continuation_context_len": -1},
    ),
    ("ledger_calls", "ck_ledger_calls_payload_sha256", SECOND | {"payload_sha256": ""}),
    ("ledger_calls", "ck_ledger_calls_row_sha256", SECOND | {"row_sha256": ""}),
    ("ledger_failures", "pk_ledger_failures", OTHER),
    ("ledger_failures", "fk_ledger_failures_fence", ELSEWHERE),
    ("ledger_failures", "ck_ledger_failures_position", SECOND | {"position": 0}),
    ("ledger_failures", "ck_ledger_failures_reason", SECOND | {"reason": ""}),
    ("ledger_failures", "ck_ledger_failures_row_sha256", SECOND | {"row_sha256": ""}),
    ("staged_calls", "pk_staged_calls", {}),
    ("staged_calls", "ck_staged_calls_mode", OTHER | {"mode": "guess"}),
    ("staged_calls", "ck_staged_calls_prev_len", OTHER | {"prev_len": -1, "cum_len": 1}),
    ("staged_calls", "ck_staged_calls_delta_len", OTHER | {"delta_len": 0, "cum_len": 0}),
    ("staged_calls", "ck_staged_calls_cum_len", OTHER | {"cum_len": 3}),
    ("staged_calls", "ck_staged_calls_weight_version", OTHER | {"weight_version": -1}),
    ("staged_calls", "ck_staged_calls_token_width", OTHER | {"token_width": 3}),
    ("staged_calls", "ck_staged_calls_payload_sha256", OTHER | {"payload_sha256": ""}),
    ("staged_calls", "ck_staged_calls_attachments_sha256", OTHER | {"attachments_sha256": ""}),
    ("staged_attachments", "pk_staged_attachments", {}),
    ("staged_attachments", "fk_staged_attachments_call", OTHER),
    ("staged_attachments", "ck_staged_attachments_kind", {"name": "other", "kind": "pickle"}),
    ("staged_attachments", "ck_staged_attachments_dtype", {"name": "other", "dtype": "<f4"}),
    ("staged_attachments", "ck_staged_attachments_shape", {"name": "other", "shape": "[1]"}),
    ("staged_attachments", "ck_staged_attachments_data_sha256", {"name": "other", "data_sha256": ""}),
    ("staged_attachments", "ck_staged_attachments_row_sha256", {"name": "other", "row_sha256": ""}),
    ("wire_schema", "pk_wire_schema", {}),
    ("wire_schema", "ck_wire_schema_version", {"name": "other", "version": 0}),
]

REQUIRED = [
    (table.name, column.name)
    for table in tables.metadata.tables.values()
    for column in table.columns
    if not column.nullable
]


# The valid row of each table.
FILLED = pytest.mark.filled(by=lambda url: asyncio.run(insert_rows(url, *STORED)))


async def insert_rows(url: str, *rows: tuple[str, dict[str, Any]]) -> None:
    """Insert rows in one transaction, by the door that the stores use."""
    async with opened(url) as database:
        await database.write(inserting(*rows))


def inserting(*rows: tuple[str, dict[str, Any]]) -> Callable[[Connection], None]:
    def work(connection: Connection) -> None:
        for name, row in rows:
            connection.execute(insert(tables.metadata.tables[name]), row)

    return work


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[CaptureDatabase]:
    database = CaptureDatabase(parse_url(url))
    try:
        yield database
    finally:
        await database.close()


@contextmanager
def raised_by_driver() -> Iterator[None]:
    """Raise what the driver said, which a store takes for damage: it sends no row that a constraint refuses."""
    try:
        yield
    except CorruptEntryError as exc:
        raise (exc.__cause__ or exc) from None


def refused_by(error: IntegrityError) -> str:
    """Return what the driver says of the constraint that refused a row."""
    cause = error.orig
    if isinstance(cause, sqlite3.Error):
        return str(cause)
    native = getattr(cause, "__cause__", None)
    assert isinstance(native, asyncpg.PostgresError)
    return f"{native.constraint_name} {native.column_name}"


def sqlite_wording(table: Table, constraint: str) -> str:
    """Return SQLite's wording, which has no names of foreign keys and of unique constraints."""
    found = next(each for each in table.constraints if each.name == constraint)
    match found:
        case CheckConstraint():
            return f"CHECK constraint failed: {constraint}"
        case ForeignKeyConstraint():
            return "FOREIGN KEY constraint failed"
        case PrimaryKeyConstraint() | UniqueConstraint():
            columns = ", ".join(f"{table.name}.{name}" for name in found.columns.keys())  # noqa: SIM118 - a collection of columns
            return f"UNIQUE constraint failed: {columns}"
    raise AssertionError(found)


def test_every_constraint_has_a_row_that_violates_it() -> None:
    declared = {
        (table.name, constraint.name)
        for table in tables.metadata.tables.values()
        for constraint in table.constraints
    }
    assert {(table, constraint) for table, constraint, _ in VIOLATIONS} == declared
    assert VALID.keys() == tables.metadata.tables.keys()


@FILLED
@pytest.mark.parametrize(
    ("table", "constraint", "change"),
    VIOLATIONS,
    ids=[f"{constraint}-{'-'.join(change)}" for _, constraint, change in VIOLATIONS],
)
async def test_the_named_constraint_refuses_the_row(
    store_url: str, table: str, constraint: str, change: dict[str, Any]
) -> None:
    with pytest.raises(IntegrityError) as refused, raised_by_driver():
        await insert_rows(store_url, (table, VALID[table] | change))
    said = refused_by(refused.value)
    if store_url.startswith("sqlite"):
        assert said == sqlite_wording(tables.metadata.tables[table], constraint)
    else:
        assert said.startswith(f"{constraint} ")


@FILLED
async def test_a_call_that_shares_its_prompt_is_accepted(store_url: str) -> None:
    await insert_rows(store_url, ("entries", VALID["entries"] | OTHER | SHARED))


async def test_each_required_column_refuses_null(store_url: str) -> None:
    async with opened(store_url) as database:
        for table, column in REQUIRED:
            parents = {"fences", "staged_calls"} - {table}
            before = [row for row in VALID.items() if row[0] in parents]
            with pytest.raises(IntegrityError) as refused, raised_by_driver():
                await database.write(inserting(*before, (table, VALID[table] | {column: None})))
            said = refused_by(refused.value)
            assert said in (f"NOT NULL constraint failed: {table}.{column}", f"None {column}")


@FILLED
async def test_a_fence_stays_while_records_belong_to_it(store_url: str) -> None:
    def remove(connection: Connection) -> None:
        connection.execute(tables.fences.delete())

    async with opened(store_url) as database:
        with pytest.raises(IntegrityError), raised_by_driver():
            await database.write(remove)
