from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tokencustody.database.faults import FAULT_POINTS
from tokencustody.store import CaptureStore, open_store


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[CaptureStore]:
    """An open store on a new database, once on SQLite and once on PostgreSQL."""
    async with open_store(store_url, run="run-1", writer="test-writer") as opened:
        yield opened


@pytest.fixture
def faults() -> Iterator[dict[str, object]]:
    """The table of fault points, empty again afterwards."""
    yield FAULT_POINTS  # type: ignore[misc]
    FAULT_POINTS.clear()
