"""Opening the whole store at once."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Self

from tokencustody.store.ledger import SqlLineageStore
from tokencustody.store.sink import SqlTokenSink
from tokencustody.store.source import SqlTokenSource
from tokencustody.store.staging import SqlStagingStore


class CaptureStore:
    """The stores of one database and run: `sink`, `source` and `lineage`, which share one engine, and `staging`, which
    is synchronous and has its own."""

    def __init__(self, url: str | os.PathLike[str], **options: Any) -> None:
        self.sink = SqlTokenSink(url, **options)
        self.source = SqlTokenSource(url, **options)
        self.lineage = SqlLineageStore(url, **options)
        self.staging = SqlStagingStore(url, **options)

    @property
    def run(self) -> str:
        """The namespace of the rollout ids."""
        return self.sink.run

    def stats(self) -> dict[str, int]:
        """Return what the stores on this database did in this process, by the names of `tokencustody.sql.stats`."""
        return self.sink.stats()

    async def close(self) -> None:
        """Release resources. Idempotent; nothing is ever buffered."""
        for store in (self.sink, self.source, self.lineage):
            await store.close()
        # It waits for calls in other threads, which need not stop this loop.
        await asyncio.to_thread(self.staging.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"CaptureStore({self.sink!r})"


def open_store(url: str | os.PathLike[str], *, run: str = "default", **options: Any) -> CaptureStore:
    """Return the stores of `run` in the database at `url`, to be used in `async with` or closed with `close()`.

    Opening is lazy: the first call connects, creates the tables of a SQLite file that is new, and raises
    SchemaMismatchError when the database is on another revision. Options as for `SqlStore`.
    """
    return CaptureStore(url, run=run, **options)
