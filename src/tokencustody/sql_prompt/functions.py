"""A read-only connection to a SQLite file, with the SQL functions that migrations give PostgreSQL.

Arrays are JSON text, each number as Python prints it, so that a float comes back in every bit; NaN, Infinity and
-Infinity, which JSON has not, are strings. A call that is not there gives NULL, as a key that is NULL does.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from sqlalchemy.pool import NullPool

from tokencustody.codec.calls import StoredCall, read_call
from tokencustody.codec.chains import unpack_chain
from tokencustody.codec.staged import check_payload, unpack_columns
from tokencustody.database.sqlite import file_engine
from tokencustody.database.url import DatabaseUrl
from tokencustody.errors import CorruptEntryError, LineageError
from tokencustody.schema.migrations import views_0004

# How long a statement waits for a lock, in seconds.
_LONGEST_WAIT = 10.0
_OF_CALL = "FROM {} WHERE run = ? AND rollout_id = ? AND model_call_id = ?"
_STORED = "model_call_id, payload, payload_sha256, stored_sha256, parent_call_id, prompt_is_delta, shared_len"
_STAGED = "rollout_id, model_call_id, payload, payload_sha256"

_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
# Those that tell of what they are given, and set nothing.
_TELLING = {
    "table_info",
    "table_xinfo",
    "table_list",
    "index_list",
    "index_info",
    "foreign_key_list",
    "function_list",
}
# They hand out addresses and take them, load programs, and reach files, wherever a build has them.
_DENIED = {"fts3_tokenizer", "load_extension", "readfile", "writefile", "fsdir", "edit", "zipfile"}
# What reads as a table and is none; SQLite makes each at its first use, which would be denied.
_TABLE_FUNCTIONS = (
    "json_each('[]')",
    "json_tree('[]')",
    "generate_series(1, 1)",
    *(f"pragma_{name}" for name in sorted(_TELLING)),
)


class AuditFunctions:
    """The functions of one connection. `error` keeps why the last call of one failed, which SQLite does not pass on."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.error: Exception | None = None
        self._connection = connection
        for function in (
            self.audit_prompt_token_ids,
            self.audit_generation_token_ids,
            self.audit_generation_log_probs,
            self.audit_staged_token_ids,
            self.audit_staged_log_probs,
            self.audit_staged_token_mask,
        ):
            connection.create_function(function.__name__, 3, self._answering(function))
        connection.create_function("sha256", 1, _sha256, deterministic=True)

    def audit_prompt_token_ids(self, *key: str) -> list[int] | None:
        """Return the prompt ids of a call as its writer gave them, however they are stored."""
        if (call := self._call(key)) is None:
            return None
        if call.shared_len is None:
            return call.own_prompt()
        entry, _ = unpack_chain(key[1], self._chain(key), key[2], prove=False)
        return entry.prompt_token_ids

    def audit_generation_token_ids(self, *key: str) -> list[int] | None:
        """Return the ids that a call sampled."""
        return None if (call := self._call(key)) is None else call.generation()

    def audit_generation_log_probs(self, *key: str) -> list[float] | None:
        """Return the log probability of each id that a call sampled."""
        return None if (call := self._call(key)) is None else call.generation_log_probs()

    def audit_staged_token_ids(self, *key: str) -> list[int] | None:
        """Return the ids that a staged call adds to its parent's."""
        return None if (columns := self._staged(key)) is None else columns[0]

    def audit_staged_token_mask(self, *key: str) -> list[float] | None:
        """Return the mask of the ids that a staged call adds."""
        return None if (columns := self._staged(key)) is None else columns[1]

    def audit_staged_log_probs(self, *key: str) -> list[float] | None:
        """Return the log probabilities of the ids that a staged call adds."""
        return None if (columns := self._staged(key)) is None else columns[2]

    def _answering(self, function: Callable[..., Sequence[float] | None]) -> Callable[..., str | None]:
        def answer(*key: Any) -> str | None:
            try:
                values = None if None in key else function(*key)
            except (CorruptEntryError, LineageError) as exc:
                self.error = exc
                raise
            return None if values is None else json.dumps([_json_number(value) for value in values])

        return answer

    def _row(self, columns: str, table: str, key: Sequence[str]) -> Any:
        statement = f"SELECT {columns} {_OF_CALL.format(table)}"
        found = self._connection.execute(statement, key).fetchone()
        return found and SimpleNamespace(**dict(zip(columns.split(", "), found, strict=True)))

    def _call(self, key: Sequence[str]) -> StoredCall | None:
        row = self._row(_STORED, "entries", key)
        return row and read_call(
            row.payload, row.stored_sha256 or row.payload_sha256, rollout_id=key[1], model_call_id=key[2]
        )

    def _chain(self, key: Sequence[str]) -> list[Any]:
        run, rollout_id, wanted = key
        chain: dict[str, Any] = {}
        while wanted not in chain:
            row = self._row(_STORED, "entries", (run, rollout_id, wanted))
            if row is None:
                break
            chain[wanted] = row
            if not (row.shared_len or row.prompt_is_delta):
                break
            wanted = row.parent_call_id
        return list(chain.values())

    def _staged(self, key: Sequence[str]) -> tuple[list[int], list[float], list[float]] | None:
        row = self._row(_STAGED, "staged_calls", key)
        if row is None:
            return None
        check_payload(row)
        return unpack_columns(row)


def connect(url: DatabaseUrl) -> tuple[sqlite3.Connection, AuditFunctions]:
    """Return a connection on which nothing can be written, attached, set or loaded, and its functions.

    Its `audit_integrity` computes the hashes that SQLite itself does not. The file must exist.
    """
    engine = file_engine(url, _LONGEST_WAIT, begin="BEGIN", read_only=True, poolclass=NullPool)
    pooled = engine.raw_connection()
    connection: Any = pooled.driver_connection
    pooled.detach()
    functions = AuditFunctions(connection)
    # Loading an extension is off unless it is turned on.
    connection.execute(f"CREATE TEMP VIEW audit_integrity AS {views_0004.integrity('sha256({})')}")
    for function in _TABLE_FUNCTIONS:
        with suppress(sqlite3.OperationalError):  # a SQLite without it
            connection.execute(f"SELECT * FROM {function} LIMIT 0").close()  # noqa: S608 - of the names above
    connection.execute("PRAGMA query_only = ON")
    connection.set_authorizer(_authorize)
    return connection, functions


def _authorize(action: int, name: str | None, function: str | None, *_: str | None) -> int:
    if action == sqlite3.SQLITE_FUNCTION and str(function).lower() in _DENIED:
        return sqlite3.SQLITE_DENY
    if action in _READING or (action == sqlite3.SQLITE_PRAGMA and name in _TELLING):
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _sha256(value: Any) -> str | None:
    if value is None:
        return None
    return hashlib.sha256(value if isinstance(value, bytes) else str(value).encode()).hexdigest()


def _json_number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
