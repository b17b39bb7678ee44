"""What tables, views and functions a database has and what it should have, as lines of text that can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sqlalchemy import (
    CheckConstraint,
    Connection,
    Dialect,
    ForeignKeyConstraint,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    UniqueConstraint,
    inspect,
    text,
)

from tokencustody.migrations import functions_0004, views_0004, views_0005


def declared(metadata: MetaData, dialect: Dialect) -> set[str]:
    """Return one line for each column, constraint and index that `metadata` declares."""
    return {line for table in metadata.tables.values() for line in _declared_table(table, dialect)}


def found(connection: Connection, metadata: MetaData) -> set[str]:
    """Return the same lines, read from the database, for those tables of `metadata` that it has.

    Check constraints are compared by name: PostgreSQL keeps its own wording of their expressions.
    """
    present = set(inspect(connection).get_table_names())
    return {line for name in metadata.tables if name in present for line in _found_table(connection, name)}


def declared_routines(dialect: Dialect) -> set[str]:
    """Return one line for each view, and on PostgreSQL each function, of the newest revision."""
    views = {f"view {name}" for name in views_0005.views(dialect.name)}
    if dialect.name == "sqlite":
        return views
    return views | {f"function {name}" for name in functions_0004.functions()}


def found_routines(connection: Connection) -> set[str]:
    """Return the same lines, read from the database, for those that it has; one that was altered says so."""
    if connection.dialect.name == "sqlite":
        created = connection.execute(text("SELECT name, sql FROM sqlite_master WHERE type = 'view'"))
        views = views_0005.views("sqlite")
        same = {name: statement == views.get(name) for name, statement in created if name in views}
        return {_routine("view", name, same[name]) for name in same}
    found = set()
    for name, same in connection.execute(text(_POSTGRESQL_VIEWS)):
        if name in views_0005.views("postgresql"):
            found.add(_routine("view", name, same))
    functions = functions_0004.functions()
    for name, body, as_created in connection.execute(text(_POSTGRESQL_FUNCTIONS)):
        if name in functions:
            found.add(_routine("function", name, as_created and body.strip() == functions[name].strip()))
    return found


# Of another release of the server, whose wording may differ, a view is only known to be there.
_POSTGRESQL_VIEWS = f"""
SELECT c.relname,
       CASE WHEN obj_description(c.oid, 'pg_class') LIKE {views_0004.RELEASE} || ' %'
            THEN obj_description(c.oid, 'pg_class') = {views_0004.RELEASE} || ' ' || md5(pg_get_viewdef(c.oid))
            ELSE obj_description(c.oid, 'pg_class') LIKE 'tokencustody %' END IS TRUE
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.relkind = 'v' AND n.nspname = current_schema()
"""  # noqa: S608 - constants

_POSTGRESQL_FUNCTIONS = """
SELECT p.proname, p.prosrc,
       NOT p.prosecdef AND p.proconfig = ARRAY[format('search_path=pg_catalog, %I, pg_temp', current_schema())]
  FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
 WHERE n.nspname = current_schema()
"""


def _routine(kind: str, name: str, same: bool) -> str:
    return f"{kind} {name}" if same else f"{kind} {name}, altered"


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


def _found_table(connection: Connection, table: str) -> Iterator[str]:
    inspector = inspect(connection)
    for column in inspector.get_columns(table):
        yield _column(table, column["name"], column["type"].compile(connection.dialect), column["nullable"])
    primary = inspector.get_pk_constraint(table)
    yield _key(table, "PRIMARY KEY", primary["name"], primary["constrained_columns"])
    for unique in inspector.get_unique_constraints(table):
        yield _key(table, "UNIQUE", unique["name"], unique["column_names"])
    for check in inspector.get_check_constraints(table):
        yield f"{table}: CHECK {check['name']}"
    for foreign in inspector.get_foreign_keys(table):
        yield _foreign_key(
            table,
            foreign["name"],
            foreign["constrained_columns"],
            foreign["referred_table"],
            foreign["referred_columns"],
        )
    for index in inspector.get_indexes(table):
        # PostgreSQL lists the index behind each unique constraint once more.
        if "duplicates_constraint" not in index:
            yield _key(
                table, "UNIQUE INDEX" if index["unique"] else "INDEX", index["name"], index["column_names"]
            )


def _column(table: str, name: str, type_: str, nullable: bool | None) -> str:
    return f"{table}.{name} {type_}{'' if nullable else ' NOT NULL'}"


def _key(table: str, kind: str, name: Any, columns: Iterable[str | None]) -> str:
    return f"{table}: {kind} {name} ({', '.join(map(str, columns))})"


def _foreign_key(
    table: str, name: Any, columns: Iterable[str], referred: str, referred_columns: Iterable[str]
) -> str:
    return f"{_key(table, 'FOREIGN KEY', name, columns)} -> {referred} ({', '.join(referred_columns)})"
