"""The rows of one rollout in every table, known by their keys and digests, and read some at a time."""

from __future__ import annotations

import hashlib
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import TracebackType
from typing import Any, Self

from sqlalchemy import (
    Column,
    CompoundSelect,
    Connection,
    LargeBinary,
    Row,
    Select,
    Table,
    bindparam,
    cast,
    exists,
    func,
    literal,
    select,
    tuple_,
    union_all,
)

from tokencustody.schema.tables import (
    OF_ROLLOUTS,
    entries,
    fences,
    snapshot_versions,
    staged_attachments,
    staged_calls,
)
from tokencustody.txn.fence import RolloutKey, of_rollout

STAGED = (staged_calls, staged_attachments)
BY_NAME = {table.name: table for table in OF_ROLLOUTS}

_PAGE_ROWS = 256
_PAGE_BYTES = 8 * 2**20
_BYTES_IN_MEMORY = 8 * 2**20

# Bytes whose SHA-256 another column of the row holds.
_PROVEN = {
    entries: (entries.c.payload, func.coalesce(entries.c.stored_sha256, entries.c.payload_sha256)),
    staged_calls: (staged_calls.c.payload, staged_calls.c.payload_sha256),
    staged_attachments: (staged_attachments.c.data, staged_attachments.c.data_sha256),
}

# The table's name, then what of the primary key tells the rows of a rollout apart.
RowKey = tuple[Any, ...]


class DamagedRowError(Exception):
    """A row does not hold the bytes whose hash it has. The message names it."""


@dataclass
class Image:
    """What a database holds of one rollout: the digest of each row, which covers all columns.

    `state` is None without a fence.
    """

    state: str | None = None
    rows: dict[RowKey, bytes] = field(default_factory=dict)

    def of(self, *tables: Table) -> dict[RowKey, bytes]:
        """Return the rows of these tables."""
        names = {table.name for table in tables}
        return {key: digest for key, digest in self.rows.items() if key[0] in names}

    @property
    def versions(self) -> dict[RowKey, bytes]:
        """The history of the fence."""
        return self.of(snapshot_versions)


class Spool:
    """Rows on their way: in memory while they are few, else in a file that has no name."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(_BYTES_IN_MEMORY)  # noqa: SIM115 - closed by __exit__
        self.bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def empty(self) -> None:
        """Forget what was added."""
        self._file.seek(0)
        self._file.truncate()

    def add(self, table: Table, rows: Sequence[dict[str, Any]]) -> None:
        """Add rows of one table."""
        pickle.dump((table.name, rows), self._file, pickle.HIGHEST_PROTOCOL)
        self.bytes = self._file.tell()

    def pages(self) -> Iterator[tuple[Table, list[dict[str, Any]]]]:
        """Yield what was added, in that order."""
        end = self._file.seek(0, 2)
        self._file.seek(0)
        while self._file.tell() < end:
            name, rows = pickle.load(self._file)  # noqa: S301 - this process wrote it, where nobody else can
            yield BY_NAME[name], rows


def image_txn(connection: Connection, key: RolloutKey, spool: Spool | None = None) -> Image:
    """Return what is held of a rollout. With `spool` all bytes are read, proven by their hashes, and kept there.

    Raises DamagedRowError.
    """
    return _image(connection, key, spool, with_bytes=spool is not None)


def proven_image_txn(connection: Connection, key: RolloutKey) -> Image:
    """Return what is held of a rollout, after all bytes were read and proven by their hashes.

    Raises DamagedRowError.
    """
    return _image(connection, key, None, with_bytes=True)


def _image(connection: Connection, key: RolloutKey, spool: Spool | None, *, with_bytes: bool) -> Image:
    image = Image()
    if spool is not None:
        spool.empty()  # of an earlier try
    for table in _tables_txn(connection, key):
        key_of, values_of = _key_of(table, with_bytes), _digested(table, with_bytes)
        names = [column.name for column in table.columns]
        for page in _pages_txn(connection, key, table, with_bytes=with_bytes):
            for row in page:
                row_key = (table.name, *key_of(row))
                if with_bytes:
                    _prove(key, table, row, row_key)
                # Of plain values, which print on every database alike: numbers exactly, times in UTC.
                printed = repr(values_of(row)).encode(errors="surrogatepass")
                image.rows[row_key] = hashlib.sha256(printed).digest()
                if table is fences:
                    image.state = row.state
            if spool is not None:
                # What is read beside the columns stands behind them.
                spool.add(table, [dict(zip(names, row, strict=False)) for row in page])
    return image


def row_key(table: Table, row: Mapping[str, Any]) -> RowKey:
    """Return the key of a row."""
    return (table.name, *(row[column.name] for column in _own_key(table)))


def _own_key(table: Table) -> list[Column[Any]]:
    return [column for column in table.primary_key if column.name not in ("run", "rollout_id")]


def _pages_txn(
    connection: Connection, key: RolloutKey, table: Table, *, with_bytes: bool
) -> Iterator[Sequence[Row[Any]]]:
    own_key = _own_key(table)
    if not own_key:
        yield connection.execute(_rows_of(table, with_bytes=with_bytes), key.named()).all()
        return
    found = connection.execute(_keys_of(table, with_bytes=with_bytes), key.named())
    groups = list(_groups([tuple(row) for row in found]))
    if len(groups) == 1:
        # All there are; to name each takes longer than to read it.
        yield connection.execute(_rows_of(table, with_bytes=with_bytes), key.named()).all()
        return
    chosen_rows = _chosen_rows_of(table, with_bytes=with_bytes)
    for group in groups:
        chosen = [each[0] for each in group] if len(own_key) == 1 else group
        yield connection.execute(chosen_rows, key.named(chosen=chosen)).all()


@cache
def _holding() -> CompoundSelect[Any]:
    held = [(table, exists().where(of_rollout(table))) for table in OF_ROLLOUTS]
    return union_all(*(select(literal(table.name)).where(is_held) for table, is_held in held))


def _tables_txn(connection: Connection, key: RolloutKey) -> list[Table]:
    """Return the tables that hold anything of a rollout."""
    names = set(connection.scalars(_holding(), key.named()))
    return [table for table in OF_ROLLOUTS if table.name in names]


@cache
def _keys_of(table: Table, *, with_bytes: bool) -> Select[Any]:
    """Return the statement for the keys of a rollout's rows, each with how many bytes the row has."""
    large = [column for column in _read(table, with_bytes) if isinstance(column.type, LargeBinary)]
    size = sum((func.coalesce(func.length(column), 0) for column in large), literal(0))
    own_key = _own_key(table)
    return select(*own_key, size).where(of_rollout(table)).order_by(*own_key)


@cache
def _rows_of(table: Table, *, with_bytes: bool) -> Select[Any]:
    """Return the statement for the rows of a rollout."""
    wanted: list[Any] = [
        # As bytes even where SQLite holds text, so that its hash tells.
        cast(column, LargeBinary).label(column.name) if isinstance(column.type, LargeBinary) else column
        for column in _read(table, with_bytes)
    ]
    if with_bytes and table in _PROVEN:
        wanted.append(_PROVEN[table][1].label("_sha256"))
    return select(*wanted).where(of_rollout(table))


@cache
def _chosen_rows_of(table: Table, *, with_bytes: bool) -> Select[Any]:
    """Return the statement for those of them with the keys `chosen`."""
    own_key = _own_key(table)
    keys = own_key[0] if len(own_key) == 1 else tuple_(*own_key)
    return _rows_of(table, with_bytes=with_bytes).where(keys.in_(bindparam("chosen", expanding=True)))


def _read(table: Table, with_bytes: bool) -> list[Column[Any]]:
    return [
        column
        for column in table.columns
        if with_bytes or table not in _PROVEN or column is not _PROVEN[table][0]
    ]


def _groups(found: Sequence[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    group: list[tuple[Any, ...]] = []
    size = 0
    for *own_key, length in found:
        if group and (len(group) == _PAGE_ROWS or size + length > _PAGE_BYTES):
            yield group
            group, size = [], 0
        group.append((*own_key,))
        size += length
    if group:
        yield group


def _prove(key: RolloutKey, table: Table, row: Row[Any], row_key: RowKey) -> None:
    if table not in _PROVEN:
        return
    data, sha256 = row._mapping[_PROVEN[table][0].name], row._mapping["_sha256"]
    if data is None or hashlib.sha256(data).hexdigest() != sha256:
        where = " ".join(str(part) for part in row_key[1:])
        raise DamagedRowError(
            f"{table.name} of call {where} of rollout {key.rollout_id} of run {key.run} does not match its SHA-256"
        )


@cache
def _key_of(table: Table, with_bytes: bool) -> Callable[[Row[Any]], list[Any]]:
    return _taking(_own_key(table), _read(table, with_bytes))


@cache
def _digested(table: Table, with_bytes: bool) -> Callable[[Row[Any]], list[Any]]:
    """Return what takes the values of a row that its digest covers: of bytes that are proven, their hash is another."""
    proven = _PROVEN[table][0] if table in _PROVEN else None
    return _taking([column for column in table.columns if column is not proven], _read(table, with_bytes))


def _taking(wanted: Sequence[Column[Any]], read: Sequence[Column[Any]]) -> Callable[[Row[Any]], list[Any]]:
    """Return what takes these columns out of a row in which those were read."""
    names = [column.name for column in read]
    places = [names.index(column.name) for column in wanted]
    return lambda row: [row[place] for place in places]
