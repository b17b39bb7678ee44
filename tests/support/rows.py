"""Looking at a store's tables behind its back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, NullPool, Table, create_engine, make_url, select, text
from sqlalchemy.ext.asyncio import create_async_engine

from tokencustody.database.url import parse_url

Result = TypeVar("Result")


async def rows_of(url: str, table: Table) -> list[dict[str, Any]]:
    """Return every row of a table, in the order of its primary key."""
    statement = select(table).order_by(*table.primary_key.columns)
    return await _run(url, lambda connection: [dict(row._mapping) for row in connection.execute(statement)])


async def run_sql(url: str, statement: str, **values: Any) -> None:
    """Run one statement and commit it."""
    await _run(url, lambda connection: connection.execute(text(statement), values))


async def _run(url: str, work: Callable[[Connection], Result]) -> Result:
    parsed = parse_url(url)
    if parsed.is_sqlite:
        file = create_engine(URL.create("sqlite", database=parsed.dsn), poolclass=NullPool)
        with file.begin() as connection:
            return work(connection)
    server = create_async_engine(make_url(url).set(drivername="postgresql+asyncpg"), poolclass=NullPool)
    try:
        async with server.begin() as connection:
            return await connection.run_sync(work)
    finally:
        await server.dispose()
