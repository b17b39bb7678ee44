"""Statements over many rows of values, as text for the driver: to build them anew costs more than to write a row.

The source of such a statement is `asked`, a common table expression with one row for each list of values.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, repeat
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Connection,
    Double,
    LargeBinary,
    SmallInteger,
    Table,
    Text,
)

from tokencustody.database.utc_time import UtcTime

_TYPES: dict[type[Any], str] = {
    Text: "text",
    BigInteger: "bigint",
    SmallInteger: "smallint",
    Boolean: "boolean",
    Double: "double precision",
    LargeBinary: "bytea",
    UtcTime: "timestamptz",
}
# SQLite prepares a statement for each number of rows, so there are only these; the last row is repeated to fill one up.
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def type_names(table: Table) -> list[str]:
    """Return PostgreSQL's names for the types of the table's columns."""
    return [_TYPES[type(column.type)] for column in table.columns]


def from_arrays(columns: Sequence[str], types: Sequence[str]) -> str:
    """Return `asked` for PostgreSQL: its parameters are one array for each column."""
    arrays = ", ".join(f"${number}::{kind}[]" for number, kind in enumerate(types, 1))
    return f"asked AS MATERIALIZED (SELECT * FROM unnest({arrays}) AS asked ({', '.join(columns)}))"


def from_parameters(columns: Sequence[str], types: Sequence[str]) -> str:
    """Return `asked` for PostgreSQL with a single row: its parameters are the values.

    Unlike arrays, which may be of any length, they let the server keep its plan, so it takes half the time.
    """
    numbered = enumerate(zip(columns, types, strict=True), 1)
    row = ", ".join(f"${number}::{kind} AS {column}" for number, (column, kind) in numbered)
    return f"asked AS MATERIALIZED (SELECT {row})"


@lru_cache(maxsize=256)
def _from_values(template: str, columns: tuple[str, ...], rows: int) -> str:
    row = f"({', '.join('?' * len(columns))})"
    return template.format(asked=f"asked ({', '.join(columns)}) AS (VALUES {', '.join([row] * rows)})")


def execute_in_pieces(
    connection: Connection,
    template: str,
    columns: tuple[str, ...],
    rows: Sequence[Sequence[Any]],
) -> Iterator[sqlite3.Cursor]:
    """Execute, on SQLite, a statement for all rows, piece by piece; `{asked}` in `template` stands for its source.

    A row may be in `asked` more than once, so the statement must be one that repeating it changes nothing.
    """
    for start in range(0, len(rows), _SIZES[-1]):
        piece = rows[start : start + _SIZES[-1]]
        size = next(size for size in _SIZES if size >= len(piece))
        filled = chain(piece, repeat(piece[-1], size - len(piece)))
        values = tuple(chain.from_iterable(filled))
        yield _execute(connection, _from_values(template, columns, size), values)


def _execute(connection: Connection, text: str, values: tuple[Any, ...]) -> sqlite3.Cursor:
    # Not through SQLAlchemy, which would take longer for it than SQLite does for a row.
    driver: sqlite3.Connection = connection.connection.driver_connection  # type: ignore[assignment]
    return driver.execute(text, values)


class ValueAdapter:
    """Turns the values of a table's columns into those that SQLite's driver binds."""

    def __init__(self, table: Table) -> None:
        self._types = [column.type for column in table.columns]
        self._processors: list[tuple[int, Callable[[Any], Any]]] | None = None

    def adapt(self, connection: Connection, values: list[Any]) -> list[Any]:
        """Change `values`, one for each column, in place and return them."""
        if self._processors is None:
            adapted = [kind.dialect_impl(connection.dialect) for kind in self._types]
            found = [kind.bind_processor(connection.dialect) for kind in adapted]
            self._processors = [(index, each) for index, each in enumerate(found) if each is not None]
        for index, process in self._processors:
            values[index] = process(values[index])
        return values
