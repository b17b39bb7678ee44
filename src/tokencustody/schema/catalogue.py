"""What tables a database has and what it should have, as lines of text that can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import (
    CheckConstraint,
    Connection,
    Dialect,
    ForeignKeyConstraint,
    Inspector,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    UniqueConstraint,
    inspect,
)

from tokencustody.errors import SchemaMismatchError
from tokencustody.schema import routines


def differences(connection: Connection, metadata: MetaData) -> list[str]:
    """Return what the database lacks of the tables, views and functions of this library, and has otherwise."""
    routines.look_where_they_are(connection)
    wanted = declared(metadata, connection.dialect) | routines.declared(connection.dialect)
    present = found(connection, metadata) | routines.found(connection)
    return [
        *(f"missing: {line}" for line in sorted(wanted - present)),
        *(f"unexpected: {line}" for line in sorted(present - wanted)),
    ]


def make_anew(connection: Connection, metadata: MetaData, shown: str) -> list[str]:
    """Make views and functions anew that are not as they should be, if the tables under them are; see `routines`."""
    routines.look_where_they_are(connection)
    lines = routines.due(connection)
    # Last, for to read the tables takes longer than the rest of an upgrade that changes nothing.
    if not lines or declared(metadata, connection.dialect) - found(connection, metadata):
        return []
    return routines.make_anew(connection, lines, shown)


def refuse_strangers(connection: Connection, metadata: MetaData, shown: str) -> None:
    """Raise SchemaMismatchError when tables of another application have the names of ours."""
    taken = sorted(metadata.tables.keys() & set(inspect(connection).get_table_names()))
    if taken:
        raise SchemaMismatchError(
            f"{shown} has tables of another application under the names {', '.join(taken)}: give tokencustody a "
            "database or a PostgreSQL schema of its own"
        )


def declared(metadata: MetaData, dialect: Dialect) -> set[str]:
    """Return one line for each column, constraint and index that `metadata` declares."""
    return {line for table in metadata.tables.values() for line in _declared_table(table, dialect)}


def found(connection: Connection, metadata: MetaData) -> set[str]:
    """Return the same lines, read from the database, for those tables of `metadata` that it has.

    Check constraints are compared by name: PostgreSQL keeps its own wording of their expressions.
    """
    inspector = inspect(connection)
    # All tables at once: PostgreSQL answers for many as fast as for one.
    names = sorted(metadata.tables.keys() & set(inspector.get_table_names()))
    return set(_found_tables(inspector, names, connection.dialect)) if names else set()


def _declared_table(table: Table, dialect: Dialect) -> Iterator[str]:
    for column in table.columns:
        yield _column(table.name, column.name, column.type.compile(dialect), column.nullable)
    for constraint in table.constraints:
        match constraint:
            case PrimaryKeyConstraint():
                yield _key(table.name, "PRIMARY KEY", constraint.name, constraint.columns.keys())
            case UniqueConstraint():
                yield _key(table.name, "UNIQUE", constraint.name, constraint.columns.keys())
            case CheckConstraint():
                yield f"{table.name}: CHECK {constraint.name}"
            case ForeignKeyConstraint():
                referred = [element.column.name for element in constraint.elements]
                yield _foreign_key(
                    table.name,
                    constraint.name,
                    constraint.column_keys,
                    constraint.referred_table.name,
                    referred,
                )
    for index in table.indexes:
        yield _key(table.name, "UNIQUE INDEX" if index.unique else "INDEX", index.name, index.columns.keys())


def _found_tables(inspector: Inspector, names: Sequence[str], dialect: Dialect) -> Iterator[str]:
    for (_, table), columns in inspector.get_multi_columns(filter_names=names).items():
        for column in columns:
            yield _column(table, column["name"], column["type"].compile(dialect), column["nullable"])
    for (_, table), primary in inspector.get_multi_pk_constraint(filter_names=names).items():
        yield _key(table, "PRIMARY KEY", primary["name"], primary["constrained_columns"])
    for (_, table), uniques in inspector.get_multi_unique_constraints(filter_names=names).items():
        for unique in uniques:
            yield _key(table, "UNIQUE", unique["name"], unique["column_names"])
    for (_, table), checks in inspector.get_multi_check_constraints(filter_names=names).items():
        for check in checks:
            yield f"{table}: CHECK {check['name']}"
    for (_, table), foreigns in inspector.get_multi_foreign_keys(filter_names=names).items():
        for foreign in foreigns:
            yield _foreign_key(
                table,
                foreign["name"],
                foreign["constrained_columns"],
                foreign["referred_table"],
                foreign["referred_columns"],
            )
    for (_, table), indexes in inspector.get_multi_indexes(filter_names=names).items():
        for index in indexes:
            # PostgreSQL lists the index behind each unique constraint once more.
            if "duplicates_constraint" not in index:
                kind = "UNIQUE INDEX" if index["unique"] else "INDEX"
                yield _key(table, kind, index["name"], index["column_names"])


def _column(table: str, name: str, type_: str, nullable: bool | None) -> str:
    return f"{table}.{name} {type_}{'' if nullable else ' NOT NULL'}"


def _key(table: str, kind: str, name: Any, columns: Iterable[str | None]) -> str:
    return f"{table}: {kind} {name} ({', '.join(map(str, columns))})"


def _foreign_key(
    table: str, name: Any, columns: Iterable[str], referred: str, referred_columns: Iterable[str]
) -> str:
    return f"{_key(table, 'FOREIGN KEY', name, columns)} -> {referred} ({', '.join(referred_columns)})"
