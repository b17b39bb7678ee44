"""Looking at a store's tables behind its back."""

from __future__ import annotations

from typing import Any

from sqlalchemy import URL, NullPool, Table, make_url, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tokencustody.sql.url import parse_url


async def rows_of(url: str, table: Table) -> list[dict[str, Any]]:
    """Return every row of a table, in the order of its primary key."""
    engine = _engine(url)
    try:
        async with engine.connect() as connection:
            found = await connection.execute(select(table).order_by(*table.primary_key.columns))
            return [dict(row._mapping) for row in found]
    finally:
        await engine.dispose()


async def run_sql(url: str, statement: str, **values: Any) -> None:
    """Run one statement and commit it."""
    engine = _engine(url)
    try:
        async with engine.begin() as connection:
            await connection.execute(text(statement), values)
    finally:
        await engine.dispose()


def _engine(url: str) -> AsyncEngine:
    parsed = parse_url(url)
    if parsed.is_sqlite:
        return create_async_engine(URL.create("sqlite+aiosqlite", database=parsed.dsn), poolclass=NullPool)
    return create_async_engine(make_url(url).set(drivername="postgresql+asyncpg"), poolclass=NullPool)
