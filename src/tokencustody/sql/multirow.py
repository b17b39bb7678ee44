"""Statements over many rows of values, as text for the driver: to build them anew costs more than to write a row.

The source of such a statement is `asked`, a common table expression with one row for each list of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Connection,
    CursorResult,
    Double,
    LargeBinary,
    SmallInteger,
    Table,
    Text,
)

from tokencustody.sql.tables import UtcTime

_TYPES: dict[type[Any], str] = {
    Text: "text",
    BigInteger: "bigint",
    SmallInteger: "smallint",
    Boolean: "boolean",
    Double: "double precision",
    LargeBinary: "bytea",
    UtcTime: "timestamptz",
}
# SQLite prepares a statement for each number of rows. With these there are few, and seldom more than two for a batch.
_PIECE = 16
_LONGEST_PIECE = 64


def type_names(table: Table) -> list[str]:
    """Return PostgreSQL's names for the types of the table's columns."""
    return [_TYPES[type(column.type)] for column in table.columns]


def from_arrays(columns: Sequence[str], types: Sequence[str]) -> str:
    """Return `asked` for PostgreSQL: its parameters are one array for each column."""
    arrays = ", ".join(f"${number}::{kind}[]" for number, kind in enumerate(types, 1))
    return f"asked AS MATERIALIZED (SELECT * FROM unnest({arrays}) AS asked ({', '.join(columns)}))"


@lru_cache(maxsize=256)
def from_values(columns: tuple[str, ...], rows: int) -> str:
    """Return `asked` for SQLite: its parameters are the rows, one after the other."""
    row = f"({', '.join('?' * len(columns))})"
    return f"asked ({', '.join(columns)}) AS (VALUES {', '.join([row] * rows)})"


def execute_in_pieces(
    connection: Connection,
    statement: Callable[[str], str],
    columns: tuple[str, ...],
    rows: Sequence[Sequence[Any]],
) -> Iterator[CursorResult[Any]]:
    """Execute, on SQLite, `statement` of `asked` for all rows, piece by piece."""
    done = 0
    while done < len(rows):
        left = len(rows) - done
        size = left if left < _PIECE else min(left - left % _PIECE, _LONGEST_PIECE)
        values = tuple(chain.from_iterable(rows[done : done + size]))
        yield connection.exec_driver_sql(statement(from_values(columns, size)), values)
        done += size


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
