"""Databases that hold many calls, filled in SQL itself: a million entries within some seconds.

    python -m tests.support.filling URL [ENTRIES]

The rows satisfy every constraint, but nobody put them: their payloads decode to nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import asyncpg

from tokencustody.database.url import parse_url
from tokencustody.schema import migrate

CALLS_PER_ROLLOUT = 10

_MOMENT = "'2026-01-01 00:00:00.000000'"
_HASH = f"'{'0' * 64}'"
_ROLLOUT = f"'{{run}}', 'filled-' || (n / {CALLS_PER_ROLLOUT})"
_CALL = f"{_ROLLOUT}, 'call-' || (n % {CALLS_PER_ROLLOUT})"
_FIRST_OF_ROLLOUT = f"n % {CALLS_PER_ROLLOUT} = 0"
_KEY = "run, rollout_id, model_call_id"

# Table, columns, values for number n of a call, and which numbers have a row.
_ROWS = (
    (
        "fences",
        "run, rollout_id, state, version, incomplete, opened_at",
        f"{_ROLLOUT}, 'open', 0, {{no}}, {_MOMENT}",
        _FIRST_OF_ROLLOUT,
    ),
    (
        "snapshot_versions",
        "run, rollout_id, version, event, event_id, model_call_id, recorded_at, written_by",
        f"{_ROLLOUT}, 0, 'open', 'filled-' || n, '', {_MOMENT}, 'filler'",
        _FIRST_OF_ROLLOUT,
    ),
    (
        "entries",
        f"{_KEY}, model, prompt_len, generation_len, cum_len, token_width, digest, parent_resolution,"
        " parent_resolution_reason, prompt_is_delta, continuation_fingerprint, continuation_context_len,"
        " continuation_context_digest, fingerprint_version, committed_at, written_by, payload_sha256, payload",
        f"{_CALL}, 'a-model', 4, 3, 7, 2, {_HASH}, 'root', '', {{no}}, 'fingerprint-' || n, 1, {_HASH}, 2, {_MOMENT},"
        f" 'filler', {_HASH}, {{payload}}",
        "n = n",
    ),
    ("intents", f"{_KEY}, begun_at, written_by", f"{_CALL}, {_MOMENT}, 'filler'", "n = n"),
    (
        "failures",
        "run, rollout_id, version, kind, model_call_id, differing_fields, recorded_at, written_by",
        f"{_ROLLOUT}, 1, 'conflict', 'call-1', 'model', {_MOMENT}, 'filler'",
        _FIRST_OF_ROLLOUT,
    ),
    (
        "exports",
        "run, rollout_id, export_id, snapshot_id, version, destination, manifest_sha256, exported_at, written_by",
        f"{_ROLLOUT}, 'export-' || n, 'snapshot-' || n, 1, 'out', {_HASH}, {_MOMENT}, 'filler'",
        _FIRST_OF_ROLLOUT,
    ),
    (
        "ledger_calls",
        f"{_KEY}, position, staging_key, response_id, mode, prev_len, delta_len, cum_len, weight_version, digest,"
        " extras_digest, chain_hash, cumulative_hash, continuation_fingerprint, fingerprint_version,"
        " continuation_context_len, continuation_context_digest, staging_chain, committed_at, written_by,"
        " payload_sha256",
        f"{_CALL}, 1 + n % {CALLS_PER_ROLLOUT}, 'key-' || n, 'response-' || n, 'text', 0, 3, 3, 1, {_HASH}, {_HASH},"
        f" {_HASH}, {_HASH}, 'fingerprint-' || n, 2, 1, {_HASH}, '[]', {_MOMENT}, 'filler', {_HASH}",
        f"n % {10 * CALLS_PER_ROLLOUT} < {CALLS_PER_ROLLOUT}",
    ),
    (
        "ledger_failures",
        f"{_KEY}, position, reason, recorded_at, written_by",
        f"{_ROLLOUT}, 'lost', {CALLS_PER_ROLLOUT + 1}, 'worker_capture_failed', {_MOMENT}, 'filler'",
        _FIRST_OF_ROLLOUT,
    ),
    (
        "staged_calls",
        f"{_KEY}, mode, prev_len, delta_len, cum_len, weight_version, digest, extras_digest, chain_hash,"
        " cumulative_hash, token_width, staged_at, written_by, payload, payload_sha256",
        f"{_CALL}, 'text', 0, 3, 3, 1, {_HASH}, {_HASH}, {_HASH}, {_HASH}, 2, {_MOMENT}, 'filler', {{payload}},"
        f" {_HASH}",
        f"n % {10 * CALLS_PER_ROLLOUT} < {CALLS_PER_ROLLOUT}",
    ),
    (
        "staged_attachments",
        f"{_KEY}, name, kind, data, data_sha256",
        f"{_CALL}, 'routes', 'bytes', {{payload}}, {_HASH}",
        f"n % {10 * CALLS_PER_ROLLOUT} < {CALLS_PER_ROLLOUT}",
    ),
)
TABLES = tuple(table for table, *_ in _ROWS)


def fill(
    url: str,
    entries: int,
    *,
    start: int = 0,
    run: str = "filled",
    payload: bytes = bytes(32),
    tables: Sequence[str] = TABLES,
) -> None:
    """Add the calls number `start` up to `start + entries`, ten a rollout, to a database, in one transaction.

    Every call has an entry and an intent; every rollout its fence, first version, a conflict, an export mark and a
    ledger failure; one rollout in ten a ledger and staged calls with attachments. `tables` takes some of these alone.
    """
    migrate.upgrade(url)
    if url.startswith("postgresql"):
        numbers = f"SELECT n FROM generate_series({start}, {start + entries - 1}) AS numbers (n)"
        literals = {"no": "false", "payload": f"decode('{payload.hex()}', 'hex')"}
    else:
        numbers = (
            f"WITH RECURSIVE numbers (n) AS (SELECT {start} UNION ALL SELECT n + 1 FROM numbers"
            f" WHERE n < {start + entries - 1}) SELECT n FROM numbers"
        )
        literals = {"no": "0", "payload": f"x'{payload.hex()}'"}
    _run(
        url,
        [
            f"INSERT INTO {table} ({columns}) SELECT {values.format(run=run, **literals)} FROM ({numbers}) AS calls"
            f" WHERE {which}"
            for table, columns, values, which in _ROWS
            if table in tables
        ],
    )


def analyze(url: str) -> None:
    """Let the database gather the statistics by which it plans."""
    _run(url, ["ANALYZE"])


def keep_statistics(url: str) -> None:
    """Create the tables, and keep the database from gathering statistics by itself."""
    migrate.upgrade(url)
    if url.startswith("postgresql"):
        _run(url, [f"ALTER TABLE {table} SET (autovacuum_enabled = false)" for table in TABLES])


def _run(url: str, statements: Sequence[str]) -> None:
    if url.startswith("postgresql"):
        # In a thread, so that it works inside a running event loop too.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, _run_postgresql(url, statements)).result()
        return
    with closing(sqlite3.connect(parse_url(url).dsn, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN IMMEDIATE")
        for statement in statements:
            connection.execute(statement)
        connection.execute("COMMIT")


async def _run_postgresql(url: str, statements: Sequence[str]) -> None:
    connection = await asyncpg.connect(url)
    try:
        # Foreign keys hold by construction; checking each would take as long as the rest.
        with contextlib.suppress(asyncpg.InsufficientPrivilegeError):
            await connection.execute("SET session_replication_role = replica")
        async with connection.transaction():
            for statement in statements:
                await connection.execute(statement)
    finally:
        await connection.close()


if __name__ == "__main__":
    fill(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 1_000_000)
