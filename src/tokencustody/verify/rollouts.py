"""Verifying rollouts one by one over a connection that cannot write."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from sqlalchemy import Connection, select

from tokencustody.database.portal import BackgroundLoop
from tokencustody.database.url import DatabaseUrl
from tokencustody.errors import CorruptEntryError, StoreUnavailableError
from tokencustody.schema.opening import CaptureDatabase
from tokencustody.schema.tables import (
    entries,
    ledger_calls,
    ledger_failures,
    staged_attachments,
    staged_calls,
)
from tokencustody.txn.fence import RolloutKey, of_call
from tokencustody.verify.calls import check_calls
from tokencustody.verify.fences import check_fence
from tokencustody.verify.findings import Found, Rule
from tokencustody.verify.ledger import SHARED_COLUMNS, check_ledger, staged_under
from tokencustody.verify.rows import Rows, is_utf8, read_rollout_txn, sound_rows
from tokencustody.verify.staged import check_attachments, check_staged

Result = TypeVar("Result")

_STAGED = select(*(staged_calls.c[name] for name in SHARED_COLUMNS)).where(of_call(staged_calls))


class Verifier:
    """Reads one database, each rollout on one consistent snapshot, and writes nothing."""

    def __init__(self, url: DatabaseUrl, deadline: float) -> None:
        self._database = CaptureDatabase(url, deadline=deadline, pool_size=1, read_only=True)
        self._background = BackgroundLoop(f"the verification of {url.display}", self._database.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _exc: BaseException | None, _tb: TracebackType | None
    ) -> None:
        self._background.close()

    def read(self, work: Callable[[Connection], Result]) -> Result:
        """Return the result of `work`, run in one transaction that cannot write."""
        return self._background.run(lambda: self._database.read(work))

    def verify(self, keys: Sequence[RolloutKey]) -> Found:
        """Return what is found in these rollouts, in their order."""
        found = Found()
        for key in keys:
            found.counts.rollouts += 1
            if not is_utf8(key.run + key.rollout_id):
                text = (
                    "the run or the id is not UTF-8, so its rows cannot be read; restore them from a backup"
                )
                found.add(key, Rule.UNREADABLE, text)
                continue
            try:
                rows, elsewhere = self.read(partial(_read_txn, key=key))
            except (CorruptEntryError, StoreUnavailableError) as exc:
                if not _is_damage(exc):
                    raise
                found.add(key, Rule.UNREADABLE, f"its rows cannot be read: {exc}; restore it from a backup")
                continue
            _check(key, rows, elsewhere, found)
        return found


_Elsewhere = dict[tuple[str, str], Any]


def _read_txn(connection: Connection, key: RolloutKey) -> tuple[Rows, _Elsewhere]:
    """Return the rows of a rollout, and the staged calls of others that its ledger names."""
    rows = read_rollout_txn(connection, key)
    elsewhere: _Elsewhere = {}
    for row in rows[ledger_calls]:
        if isinstance(row.staging_key, str) and is_utf8(row.staging_key):
            rollout_id, call_id = staged_under(row)
            if rollout_id != key.rollout_id:
                other = RolloutKey(key.run, rollout_id).named(call_id)
                elsewhere[rollout_id, call_id] = connection.execute(_STAGED, other).one_or_none()
    return rows, elsewhere


def _check(key: RolloutKey, rows: Rows, elsewhere: _Elsewhere, found: Found) -> None:
    first = len(found.findings)
    there = {table: {row.model_call_id for row in rows[table]} for table in (ledger_calls, staged_calls)}
    rows, malformed = sound_rows(key, rows, found)
    check_fence(key, rows, malformed, found)
    recorded = {row.model_call_id: row for row in rows[ledger_calls]}
    proven = check_calls(
        key, rows[entries], malformed[entries], there[ledger_calls] | there[staged_calls], recorded, found
    )
    staged = {(key.rollout_id, row.model_call_id): row for row in rows[staged_calls]}
    check_ledger(
        key,
        rows[ledger_calls],
        rows[ledger_failures],
        malformed[ledger_calls] | malformed[ledger_failures],
        lambda place: staged.get(place) or elsewhere.get(place),
        proven,
        found,
    )
    check_staged(key, rows[staged_calls], malformed[staged_calls], recorded, found)
    hashes = {row.model_call_id: row.attachments_sha256 for row in rows[staged_calls]}
    check_attachments(key, rows[staged_attachments], there[staged_calls], hashes, found)
    # By call, so that what is wrong with one stands together; databases differ in how they order text.
    found.findings[first:] = sorted(found.findings[first:], key=lambda finding: finding.model_call_id)


def _is_damage(exc: Exception) -> bool:
    """Return whether the database itself found damage in what it was asked for, so that others can be read."""
    cause = getattr(exc.__cause__, "orig", None) or exc.__cause__
    code, sqlstate = getattr(cause, "sqlite_errorcode", 0), getattr(cause, "sqlstate", "")
    # Class XX: PostgreSQL contradicts itself, as about a damaged page.
    return bool(code and code & 0xFF == sqlite3.SQLITE_CORRUPT) or str(sqlstate).startswith("XX")
