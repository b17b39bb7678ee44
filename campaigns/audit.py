"""Reads a run by plain SQL, beside every store and beside `verify`, and names what contradicts itself in it."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import asyncpg

from campaigns.rules import Violation
from tokencustody.database.url import DatabaseUrl, parse_url

# Each finds the rollouts, and what it is about, of which it is true.
RULES = {
    "versions have a gap": """
        SELECT rollout_id, 'versions ' || min(version) || ' to ' || max(version) || ' in ' || count(*) || ' rows'
          FROM snapshot_versions WHERE run = $1 GROUP BY rollout_id
        HAVING min(version) <> 0 OR count(*) <> max(version) + 1 OR count(DISTINCT version) <> count(*)""",
    "fence at another version": """
        SELECT rollout_id, 'the fence is at version ' || version FROM fences AS f
         WHERE run = $1 AND version <> coalesce((SELECT max(version) FROM {history}), -1)""",
    "fence in another state": """
        SELECT rollout_id, 'the fence is ' || state FROM fences AS f
         WHERE run = $1 AND state <> CASE
               WHEN EXISTS (SELECT 1 FROM {history} AND v.event IN ('drop', 'retire')) THEN 'retired'
               WHEN EXISTS (SELECT 1 FROM {history} AND v.event = 'freeze') THEN 'frozen' ELSE 'open' END""",
    "event after the fence": """
        SELECT rollout_id, 'version ' || version || ' is a ' || event FROM snapshot_versions AS f
         WHERE run = $1 AND ((event = 'open') <> (version = 0) OR EXISTS (
               SELECT 1 FROM {history} AND v.version < f.version AND (v.event IN ('drop', 'retire')
                  OR v.event = 'freeze'
                 AND f.event NOT IN ('mark', 'drop', 'retire', 'late_ledger', 'late_stage'))))""",
    "snapshot id changed": """
        SELECT rollout_id, 'version ' || version || ' has the snapshot id ' || coalesce(snapshot_id, 'none')
          FROM (SELECT run, rollout_id, version, snapshot_id FROM snapshot_versions
                 UNION ALL SELECT run, rollout_id, version, snapshot_id FROM fences) AS f
         WHERE run = $1 AND coalesce(snapshot_id, '') <> (
               SELECT CASE count(*) WHEN 0 THEN '' ELSE coalesce(max(v.snapshot_id), 'none') END
                 FROM {history} AND v.event = 'freeze' AND v.version <= f.version)""",
    "rows without a fence": """
        SELECT rollout_id, 'rows of ' || what FROM ({records}
                UNION SELECT run, rollout_id, 'versions' FROM snapshot_versions) AS r
         WHERE run = $1 AND NOT EXISTS (SELECT 1 FROM {fence})""",
    "records of a retired rollout": """
        SELECT rollout_id, 'rows of ' || what FROM ({records}) AS r
         WHERE run = $1 AND EXISTS (SELECT 1 FROM {fence} AND f.state = 'retired')""",
    "evidence missing": """
        SELECT r.rollout_id, 'version ' || r.version || ' without its evidence' FROM snapshot_versions AS r
          LEFT JOIN failures AS e ON e.run = r.run AND e.rollout_id = r.rollout_id AND e.version = r.version
           AND e.model_call_id = r.model_call_id
           AND r.event = CASE e.kind WHEN 'mark' THEN 'mark' ELSE 'conflict' END
         WHERE r.run = $1 AND r.event IN ('conflict', 'mark') AND e.version IS NULL
           AND NOT EXISTS (SELECT 1 FROM {fence} AND f.state = 'retired')
         UNION ALL
        SELECT e.rollout_id, 'the evidence of version ' || e.version FROM failures AS e
          LEFT JOIN snapshot_versions AS r ON e.run = r.run AND e.rollout_id = r.rollout_id
           AND e.version = r.version AND r.event IN ('conflict', 'mark')
         WHERE e.run = $1 AND r.version IS NULL""",
    "verdict wrong": """
        SELECT rollout_id, 'the fence is ' || CASE WHEN incomplete THEN 'incomplete' ELSE 'complete' END
          FROM fences AS f
         WHERE run = $1 AND state <> 'retired' AND incomplete <> (
               EXISTS (SELECT 1 FROM failures AS v WHERE {same})
            OR state = 'frozen' AND EXISTS (
               SELECT 1 FROM intents AS v WHERE {same} AND refused_at IS NULL AND NOT EXISTS (
               SELECT 1 FROM entries AS e WHERE e.run = v.run AND e.rollout_id = v.rollout_id
                  AND e.model_call_id = v.model_call_id)))""",
    "refusals without versions": """
        SELECT f.rollout_id, 'call ' || r.model_call_id FROM fences AS f JOIN (
               SELECT run, rollout_id, model_call_id FROM intents WHERE refused_at IS NOT NULL
                UNION ALL SELECT run, rollout_id, model_call_id FROM snapshot_versions WHERE event = 'refusal'
               ) AS r ON r.run = f.run AND r.rollout_id = f.rollout_id
         WHERE f.run = $1 AND f.state <> 'retired' GROUP BY f.rollout_id, r.model_call_id HAVING count(*) <> 2""",
    "ledger positions have a gap": """
        SELECT rollout_id, 'positions ' || min(position) || ' to ' || max(position) || ' in ' || count(*) || ' rows'
          FROM (SELECT run, rollout_id, position FROM ledger_calls
                 UNION ALL SELECT run, rollout_id, position FROM ledger_failures) AS r
         WHERE run = $1 GROUP BY rollout_id
        HAVING min(position) <> 1 OR count(*) <> max(position) OR count(DISTINCT position) <> count(*)""",
    "prefix missing": """
        SELECT c.rollout_id, 'call ' || c.model_call_id || ' leaves out ids of ' || c.parent_call_id
          FROM entries AS c LEFT JOIN entries AS p
            ON p.run = c.run AND p.rollout_id = c.rollout_id AND p.model_call_id = c.parent_call_id
         WHERE c.run = $1 AND c.shared_len > 0 AND (p.run IS NULL
               OR NOT p.prompt_is_delta AND p.prompt_len + p.generation_len <> c.shared_len)""",
    "payload corrupt": """
        SELECT rollout_id, 'call ' || model_call_id FROM (
               SELECT run, rollout_id, model_call_id, payload AS data,
                      coalesce(stored_sha256, payload_sha256) AS sha256 FROM entries
                UNION ALL SELECT run, rollout_id, model_call_id, payload, payload_sha256 FROM staged_calls
                UNION ALL SELECT run, rollout_id, model_call_id, data, data_sha256 FROM staged_attachments) AS r
         WHERE run = $1 AND {sha256} <> sha256""",
    "attachment without a call": """
        SELECT rollout_id, 'call ' || model_call_id FROM staged_attachments AS a
         WHERE run = $1 AND NOT EXISTS (SELECT 1 FROM staged_calls AS c WHERE c.run = a.run
                   AND c.rollout_id = a.rollout_id AND c.model_call_id = a.model_call_id)""",
}
_SAME = "v.run = f.run AND v.rollout_id = f.rollout_id"
_PIECES = {
    "same": _SAME,
    "history": f"snapshot_versions AS v WHERE {_SAME}",
    "fence": "fences AS f WHERE f.run = r.run AND f.rollout_id = r.rollout_id",
    "records": " UNION ".join(
        f"SELECT run, rollout_id, '{table}' AS what FROM {table}"
        for table in ("failures", "intents", "entries", "ledger_calls", "ledger_failures")
    ),
}
_SHA256 = {True: "sha256_hex(data)", False: "encode(sha256(data), 'hex')"}


def audit(url: str, run: str) -> list[Violation]:
    """Return what is wrong with the rows of a run: see `RULES`. May be called where an event loop runs."""
    parsed = parse_url(url)
    queries = {name: sql.format(**_PIECES, sha256=_SHA256[parsed.is_sqlite]) for name, sql in RULES.items()}
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(_read, parsed, queries, run).result()
    return [Violation(name, rollout, text) for name, rows in found.items() for rollout, text in rows]


def _read(url: DatabaseUrl, queries: Mapping[str, str], run: str) -> Mapping[str, Sequence[Any]]:
    if not url.is_sqlite:
        return asyncio.run(_read_postgresql(url.dsn, queries, run))
    with closing(sqlite3.connect(f"{Path(url.dsn).as_uri()}?mode=ro", uri=True)) as connection:
        connection.create_function("sha256_hex", 1, _sha256, deterministic=True)
        connection.execute("BEGIN")
        return {name: connection.execute(sql, {"1": run}).fetchall() for name, sql in queries.items()}


def _sha256(data: bytes | str) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


async def _read_postgresql(dsn: str, queries: Mapping[str, str], run: str) -> Mapping[str, Sequence[Any]]:
    connection = await asyncpg.connect(dsn, statement_cache_size=0)
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            return {name: await connection.fetch(sql, run) for name, sql in queries.items()}
    finally:
        await connection.close()
