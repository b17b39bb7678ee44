"""The rows of one rollout as the database holds them, whatever an edit or a flipped bit made of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    LargeBinary,
    Select,
    SmallInteger,
    Subquery,
    Table,
    Text,
    cast,
    func,
    literal,
    select,
    tuple_,
    type_coerce,
    union,
)
from sqlalchemy.types import NullType

from tokencustody.database.dialects import is_postgresql
from tokencustody.errors import InvalidRecordError
from tokencustody.ids import check_rollout_id
from tokencustody.schema.tables import (
    OF_ROLLOUTS,
    failures,
    fences,
    ledger_calls,
    snapshot_versions,
    staged_attachments,
    staged_calls,
)
from tokencustody.states import AttachmentKind, FailureKind, FenceState, VersionEvent
from tokencustody.txn.fence import RolloutKey, of_rollout
from tokencustody.txn.selection import RolloutFilter, select_fences
from tokencustody.verify.findings import Found, Rule

_LIKE = {
    fences.c.state: FenceState,
    snapshot_versions.c.event: VersionEvent,
    failures.c.kind: FailureKind,
    staged_attachments.c.kind: AttachmentKind,
    ledger_calls.c.mode: ("text", "token_in"),
    staged_calls.c.mode: ("text", "token_in"),
}
_HASHES = {
    table.c[name]
    for table in (ledger_calls, staged_calls)
    for name in ("digest", "extras_digest", "chain_hash", "cumulative_hash")
}
_SHA256 = re.compile("[0-9a-f]{64}")
_SQLITE_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}")

Rows = dict[Table, list[Any]]


def _raw(columns: Sequence[Column[Any]]) -> list[Any]:
    # Without their types, for a value that is none of its type must not stop the reading.
    return [type_coerce(column, NullType()).label(column.name) for column in columns]


_SELECT = {
    table: select(*_raw(list(table.columns))).where(of_rollout(table)).order_by(*table.primary_key.columns)
    for table in OF_ROLLOUTS
}


def read_leniently(connection: Connection) -> None:
    """Let SQLite give bytes that are no UTF-8 as text with surrogates, which `check_forms` names."""
    if not is_postgresql(connection):
        driver: Any = connection.connection.dbapi_connection
        driver.text_factory = lambda data: data.decode(errors="surrogateescape")


def is_utf8(text: str) -> bool:
    """Return whether text that was read leniently is what it should be, so that the database can be asked for it."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bound(text: str) -> Any:
    if is_utf8(text):
        return literal(text)
    return cast(literal(text.encode(errors="surrogateescape"), LargeBinary), Text)


def read_rollout_txn(connection: Connection, key: RolloutKey) -> Rows:
    """Return every row of one rollout, by table, in the order of their keys."""
    read_leniently(connection)
    return {table: list(connection.execute(rows, key.named()).all()) for table, rows in _SELECT.items()}


def sound_rows(key: RolloutKey, rows: Rows, found: Found) -> tuple[Rows, dict[Table, set[str]]]:
    """Return the rows whose every value has the form of its column, and which calls have others, by table."""
    for name, value in key.columns().items():
        try:
            check_rollout_id(value, name)
        except InvalidRecordError as exc:
            found.add(key, Rule.COLUMN_FORM, f"{exc}; the row was edited or copied")
    sound: Rows = {}
    malformed: dict[Table, set[str]] = {}
    for table, of_table in rows.items():
        sound[table], malformed[table] = [], set()
        for row in of_table:
            problems = _problems(table, row)
            if not problems:
                sound[table].append(row)
                continue
            call = getattr(row, "model_call_id", "")
            malformed[table].add(call)
            found.add(
                key,
                Rule.COLUMN_FORM,
                f"{table.name}: {'; '.join(problems)}; restore the row from a backup",
                call if isinstance(call, str) else "",
            )
    return sound, malformed


def _problems(table: Table, row: Any) -> list[str]:
    problems = []
    for column, value in zip(table.columns, row, strict=True):
        problem = _problem(column, value)
        if problem:
            problems.append(f"{column.name} {problem}")
    return problems


def _problem(column: Column[Any], value: Any) -> str:
    if value is None:
        return "" if column.nullable else "is NULL"
    kind = column.type
    if isinstance(kind, Text):
        return _problem_of_text(column, value)
    if isinstance(kind, BigInteger | SmallInteger):
        if type(value) is not int:
            return "is no integer"
        return "is negative" if value < 0 else ""
    if isinstance(kind, Boolean):
        return "" if type(value) in (bool, int) and value in (0, 1) else "is neither true nor false"
    if isinstance(kind, Double):
        return "" if type(value) is float else "is no number"
    if isinstance(kind, LargeBinary):
        return "" if type(value) is bytes else "is no longer bytes"
    return "" if _is_time(value) else "is no time"


def _problem_of_text(column: Column[Any], value: Any) -> str:
    if type(value) is not str:
        return "is no text"
    if not is_utf8(value):
        return "is not UTF-8"
    allowed = _LIKE.get(column)
    if allowed is not None and value not in tuple(allowed):
        return "has a value that this library does not write"
    if (column.name.endswith("_sha256") or column in _HASHES) and not _SHA256.fullmatch(value):
        return "is no SHA-256"
    return ""


def _is_time(value: Any) -> bool:
    if isinstance(value, datetime):
        return True
    if not isinstance(value, str) or not _SQLITE_TIME.fullmatch(value):
        return False
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return True


def select_keys(wanted: RolloutFilter, after: RolloutKey | None = None, limit: int | None = None) -> Subquery:
    """Return the keys that are meant, from `after` on, at most `limit`: those of fences and of any row without one."""
    asks_fences = (wanted.state, wanted.incomplete, wanted.before, wanted.exported) != (None,) * 4
    each = []
    for table in (fences,) if asks_fences else OF_ROLLOUTS:
        if table is fences:
            keys = select_fences(wanted).with_only_columns(fences.c.run, fences.c.rollout_id)
        else:
            keys = _keys_of(table, wanted)
        if after is not None:
            reached = tuple_(_bound(after.run), _bound(after.rollout_id))
            keys = keys.where(tuple_(table.c.run, table.c.rollout_id) > reached)
        if limit is not None:
            keys = keys.order_by(table.c.run, table.c.rollout_id).limit(limit)
        # A subquery of its own, because SQLite takes no LIMIT inside a UNION.
        each.append(select(keys.subquery()))
    return union(*each).subquery("keys")


def _keys_of(table: Table, wanted: RolloutFilter) -> Select[Any]:
    run, rollout_id = table.c.run, table.c.rollout_id
    keys = select(run, rollout_id).distinct()
    if wanted.run is not None:
        keys = keys.where(run == wanted.run)
    if wanted.prefix is not None:
        keys = keys.where(func.substr(rollout_id, 1, len(wanted.prefix)) == wanted.prefix)
    if wanted.rollout_ids is not None:
        keys = keys.where(rollout_id.in_(wanted.rollout_ids))
    return keys


def count_txn(connection: Connection, wanted: RolloutFilter) -> int:
    """Return how many rollouts are meant."""
    return int(connection.scalar(select(func.count()).select_from(select_keys(wanted))) or 0)


def page_txn(
    connection: Connection, wanted: RolloutFilter, after: RolloutKey | None, limit: int
) -> list[RolloutKey]:
    """Return the keys of the next rollouts that are meant, in the order of the database."""
    read_leniently(connection)
    keys = select_keys(wanted, after, limit)
    ordered = select(keys).order_by(keys.c.run, keys.c.rollout_id).limit(limit)
    return [RolloutKey(*row) for row in connection.execute(ordered)]
