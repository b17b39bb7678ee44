"""Where SQLite and PostgreSQL differ in the statements that the stores build."""

from __future__ import annotations

from sqlalchemy import Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection


def insert_if_absent(connection: AsyncConnection, table: Table) -> postgresql.Insert | sqlite.Insert:
    """Return an INSERT into `table` that does nothing when the primary key exists; its row count tells which."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing()
    return sqlite.insert(table).on_conflict_do_nothing()
