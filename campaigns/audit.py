"""Reads a run by plain SQL, beside every store, and names what contradicts itself in it."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import asyncpg

from campaigns.rules import Violation
from tokencustody.database.url import DatabaseUrl, parse_url

_QUERIES = {
    "fences": "SELECT rollout_id, state, version, snapshot_id, incomplete FROM fences WHERE run = $1 ORDER BY 1",
    "versions": "SELECT rollout_id, version, event, snapshot_id, model_call_id FROM snapshot_versions"
    " WHERE run = $1 ORDER BY 1, 2",
    "failures": "SELECT rollout_id, version, kind, model_call_id FROM failures WHERE run = $1",
    "intents": "SELECT rollout_id, model_call_id, refused_at FROM intents WHERE run = $1",
    "entries": "SELECT rollout_id, model_call_id, parent_call_id, shared_len, prompt_len + generation_len,"
    " prompt_is_delta, coalesce(stored_sha256, payload_sha256), {sha256} FROM entries WHERE run = $1",
    "ledger": "SELECT rollout_id, position, model_call_id FROM ledger_calls WHERE run = $1"
    " UNION ALL SELECT rollout_id, position, model_call_id FROM ledger_failures WHERE run = $1 ORDER BY 1, 2",
    "staged": "SELECT rollout_id, model_call_id, payload_sha256, {sha256} FROM staged_calls WHERE run = $1",
    "attachments": "SELECT a.rollout_id, a.model_call_id, c.rollout_id, a.data_sha256, {sha256_of_data}"
    " FROM staged_attachments AS a LEFT JOIN staged_calls AS c ON c.run = a.run AND c.rollout_id = a.rollout_id"
    " AND c.model_call_id = a.model_call_id WHERE a.run = $1",
}
_CONFLICTS = {"conflict": "conflict", "refusal_conflict": "conflict", "mark": "mark"}

Rows = Mapping[str, Sequence[Sequence[Any]]]
Broken = Iterator[tuple[str, str]]


def audit(url: str, run: str) -> list[Violation]:
    """Return what is wrong with the rows of a run: see `RULES`. May be called where an event loop runs."""
    parsed = parse_url(url)
    with ThreadPoolExecutor(1) as pool:
        rows = pool.submit(_read, parsed, run).result()
    book = _Book(rows)
    return [Violation(name, rollout, text) for name, rule in RULES.items() for rollout, text in rule(book)]


def _read(url: DatabaseUrl, run: str) -> Rows:
    if not url.is_sqlite:
        return asyncio.run(_read_postgresql(url.dsn, run))
    with closing(sqlite3.connect(f"{Path(url.dsn).as_uri()}?mode=ro", uri=True)) as connection:
        connection.create_function("sha256_hex", 1, _sha256, deterministic=True)
        names = {"sha256": "sha256_hex(payload)", "sha256_of_data": "sha256_hex(a.data)"}
        connection.execute("BEGIN")
        return {
            name: connection.execute(sql.format(**names), {"1": run}).fetchall()
            for name, sql in _QUERIES.items()
        }


def _sha256(data: bytes | str) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


async def _read_postgresql(dsn: str, run: str) -> Rows:
    names = {
        "sha256": "encode(sha256(payload), 'hex')",
        "sha256_of_data": "encode(sha256(a.data), 'hex')",
    }
    connection = await asyncpg.connect(dsn, statement_cache_size=0)
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            return {
                name: [tuple(row) for row in await connection.fetch(sql.format(**names), run)]
                for name, sql in _QUERIES.items()
            }
    finally:
        await connection.close()


@dataclass(frozen=True)
class _Fence:
    state: str
    version: int
    snapshot_id: str | None
    incomplete: bool


@dataclass(frozen=True)
class _Version:
    version: int
    event: str
    snapshot_id: str | None
    call: str


class _Book:
    """The rows of a run, by rollout."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.fences = {row[0]: _Fence(row[1], row[2], row[3], bool(row[4])) for row in rows["fences"]}
        self.versions: dict[str, list[_Version]] = defaultdict(list)
        for rollout, version, event, snapshot_id, call in rows["versions"]:
            self.versions[rollout].append(_Version(version, event, snapshot_id, call))
        self.calls: dict[str, dict[str, Sequence[Any]]] = defaultdict(dict)
        for row in rows["entries"]:
            self.calls[row[0]][row[1]] = row

    def state(self, rollout: str) -> str | None:
        fence = self.fences.get(rollout)
        return None if fence is None else fence.state


def _gap(book: _Book) -> Broken:
    for rollout, versions in book.versions.items():
        numbers = [each.version for each in versions]
        if len(set(numbers)) != len(numbers):
            yield rollout, f"a version stands there twice: {numbers}"
        elif numbers != list(range(len(numbers))):
            yield rollout, f"the versions {numbers} are not those from 0 without a gap"


def _fence_version(book: _Book) -> Broken:
    for rollout, fence in book.fences.items():
        last = max((each.version for each in book.versions[rollout]), default=None)
        if last != fence.version:
            yield rollout, f"the fence is at version {fence.version}, its last version is {last}"


def _fence_state(book: _Book) -> Broken:
    for rollout, fence in book.fences.items():
        events = [each.event for each in book.versions[rollout]]
        retired = any(event in ("drop", "retire") for event in events)
        state = "retired" if retired else "frozen" if "freeze" in events else "open"
        if fence.state != state:
            yield rollout, f"the fence is {fence.state} after {events}"


def _after_fence(book: _Book) -> Broken:
    for rollout, versions in book.versions.items():
        allowed: set[str] | None = None
        for each in versions:
            if (each.event == "open") != (each.version == 0):
                yield rollout, f"version {each.version} is by the event {each.event}"
            elif allowed is not None and each.event not in allowed:
                yield rollout, f"version {each.version} is a {each.event} that came after the fence"
            if each.event in ("drop", "retire"):
                allowed = set()
            elif each.event == "freeze":
                allowed = {"mark", "drop", "retire", "late_ledger", "late_stage"}


def _snapshot_id(book: _Book) -> Broken:
    for rollout, versions in book.versions.items():
        minted: str | None = None
        for each in versions:
            minted = each.snapshot_id if each.event == "freeze" else minted
            if each.snapshot_id != minted or (each.event == "freeze" and minted is None):
                yield rollout, f"version {each.version} has the snapshot id {each.snapshot_id}, not {minted}"
        fence = book.fences.get(rollout)
        if fence is not None and fence.snapshot_id != minted:
            yield rollout, f"the fence has the snapshot id {fence.snapshot_id}, its freeze {minted}"


def _no_fence(book: _Book) -> Broken:
    for table in ("versions", "failures", "intents", "entries", "ledger"):
        for rollout in sorted({row[0] for row in book.rows[table]} - set(book.fences)):
            yield rollout, f"there are {table} without a fence"


def _retired(book: _Book) -> Broken:
    for table in ("failures", "intents", "entries", "ledger"):
        for rollout in sorted({row[0] for row in book.rows[table]}):
            if book.state(rollout) == "retired":
                yield rollout, f"a retired rollout still has {table}"


def _evidence(book: _Book) -> Broken:
    failures = {
        (rollout, version): (_CONFLICTS[kind], call) for rollout, version, kind, call in book.rows["failures"]
    }
    for rollout, versions in book.versions.items():
        for each in versions:
            held = failures.pop((rollout, each.version), None)
            due = (each.event, each.call) if each.event in ("conflict", "mark") else None
            if held != due and book.state(rollout) != "retired":
                yield (
                    rollout,
                    f"version {each.version} is by {each.event} {each.call!r}, its evidence is {held}",
                )
    for (rollout, version), held in failures.items():
        yield rollout, f"the evidence {held} belongs to version {version}, which is not there"


def _incomplete(book: _Book) -> Broken:
    failed = {row[0] for row in book.rows["failures"]}
    dangling = {
        rollout
        for rollout, call, refused_at in book.rows["intents"]
        if refused_at is None and call not in book.calls[rollout]
    }
    for rollout, fence in book.fences.items():
        due = rollout in failed or (fence.state == "frozen" and rollout in dangling)
        if fence.state != "retired" and fence.incomplete != due:
            yield rollout, f"the fence says incomplete={fence.incomplete}, the rows say {due}"


def _refusals(book: _Book) -> Broken:
    refused: dict[str, list[str]] = defaultdict(list)
    for rollout, call, refused_at in book.rows["intents"]:
        if refused_at is not None:
            refused[rollout].append(call)
    for rollout, versions in book.versions.items():
        events = sorted(each.call for each in versions if each.event == "refusal")
        if book.state(rollout) != "retired" and events != sorted(refused[rollout]):
            yield rollout, f"calls {sorted(refused[rollout])} were refused, the versions say {events}"


def _positions(book: _Book) -> Broken:
    for rollout, rows in groupby(book.rows["ledger"], key=lambda row: row[0]):
        positions = [row[1] for row in rows]
        if positions != list(range(1, len(positions) + 1)):
            yield rollout, f"the ledger has the positions {positions}, not those from 1 without a gap"


def _prefixes(book: _Book) -> Broken:
    for rollout, calls in book.calls.items():
        for call, (_, _, parent, shared_len, *_) in calls.items():
            if not shared_len:
                continue
            held = calls.get(parent)
            if held is None:
                yield rollout, f"call {call} leaves out the sequence of {parent}, which is not there"
            elif not held[5] and held[4] != shared_len:
                yield rollout, f"call {call} leaves out {shared_len} ids, its parent {parent} has {held[4]}"


def _payloads(book: _Book) -> Broken:
    for table in ("entries", "staged", "attachments"):
        for row in book.rows[table]:
            if row[-1] != row[-2]:
                yield row[0], f"the {table} of call {row[1]} have not the hash that was recorded"


def _attachments(book: _Book) -> Broken:
    for rollout, call, owner, *_ in book.rows["attachments"]:
        if owner is None:
            yield rollout, f"an attachment of call {call}, which is not staged"


RULES: dict[str, Callable[[_Book], Broken]] = {
    "versions have a gap": _gap,
    "fence at another version": _fence_version,
    "fence in another state": _fence_state,
    "event after the fence": _after_fence,
    "snapshot id changed": _snapshot_id,
    "rows without a fence": _no_fence,
    "records of a retired rollout": _retired,
    "evidence missing": _evidence,
    "verdict wrong": _incomplete,
    "refusals without versions": _refusals,
    "ledger positions have a gap": _positions,
    "prefix missing": _prefixes,
    "payload corrupt": _payloads,
    "attachment without a call": _attachments,
}
