from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tokencustody.store import SqlLineageStore


@pytest.fixture
async def ledger(store_url: str) -> AsyncIterator[SqlLineageStore]:
    """The ledger of a new database, once on SQLite and once on PostgreSQL."""
    async with SqlLineageStore(store_url, run="run-1") as opened:
        yield opened
