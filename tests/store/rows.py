"""Looking at a store's tables behind its back."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Table, select, text

from tokencustody.sql.engine import migration_engine
from tokencustody.sql.url import parse_url


async def rows_of(url: str, table: Table) -> list[dict[str, Any]]:
    """Return every row of a table, in the order of its primary key."""
    engine = migration_engine(parse_url(url))
    try:
        async with engine.connect() as connection:
            found = await connection.execute(select(table).order_by(*table.primary_key.columns))
            return [dict(row._mapping) for row in found]
    finally:
        await engine.dispose()


async def run_sql(url: str, statement: str, **values: Any) -> None:
    """Run one statement and commit it."""
    engine = migration_engine(parse_url(url))
    try:
        async with engine.begin() as connection:
            await connection.execute(text(statement), values)
    finally:
        await engine.dispose()
