"""Opening the whole store at once."""

from __future__ import annotations

import asyncio
import os
from typing import Self

from tokencustody.database.coalescing import Coalesce
from tokencustody.database.engine import DEFAULT_DEADLINE, DEFAULT_POOL_SIZE
from tokencustody.states import Isolation
from tokencustody.store.base import DEFAULT_MAX_ENTRY_BYTES, Options
from tokencustody.store.ledger import SqlLineageStore
from tokencustody.store.sink import SqlTokenSink
from tokencustody.store.source import SqlTokenSource
from tokencustody.store.staging import SqlStagingStore


class CaptureStore:
    """The stores of one database and run: `sink`, `source` and `lineage`, which share one engine, and `staging`, which
    is synchronous and has its own. The parameters are those of `open_store`."""

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        run: str = "default",
        writer: str | None = None,
        deadline: float = DEFAULT_DEADLINE,
        pool_size: int = DEFAULT_POOL_SIZE,
        coalesce: str = Coalesce.PROCESS,
        isolation: str = Isolation.READ_COMMITTED,
        spill: str | os.PathLike[str] | None = "",
        max_entry_bytes: int = DEFAULT_MAX_ENTRY_BYTES,
    ) -> None:
        options = Options(
            run=run,
            writer=writer,
            deadline=deadline,
            pool_size=pool_size,
            coalesce=coalesce,
            isolation=isolation,
            spill=spill,
            max_entry_bytes=max_entry_bytes,
        )
        self.sink = SqlTokenSink(url, **options)
        self.source = SqlTokenSource(url, **options)
        self.lineage = SqlLineageStore(url, **options)
        self.staging = SqlStagingStore(url, **options)

    @property
    def run(self) -> str:
        """The namespace of the rollout ids."""
        return self.sink.run

    def stats(self) -> dict[str, int]:
        """Return what the stores on this database did in this process, by the names of `database.stats`."""
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


def open_store(
    url: str | os.PathLike[str],
    *,
    run: str = "default",
    writer: str | None = None,
    deadline: float = DEFAULT_DEADLINE,
    pool_size: int = DEFAULT_POOL_SIZE,
    coalesce: str = Coalesce.PROCESS,
    isolation: str = Isolation.READ_COMMITTED,
    spill: str | os.PathLike[str] | None = "",
    max_entry_bytes: int = DEFAULT_MAX_ENTRY_BYTES,
) -> CaptureStore:
    """Return the stores of `run` in the database at `url`, to be used in `async with` or closed with `close()`.

    Opening is lazy: the first call connects, creates the tables of a SQLite file that is new, and raises
    SchemaMismatchError when this library does not work with its revision. Raises InvalidRecordError for an option that
    makes no sense. The options are those of every store:

    - `run`: the namespace of every rollout id, under the same rules as an id.
    - `writer`: signs rows instead of `host:pid`.
    - `deadline`: seconds after which retries end in StoreUnavailableError.
    - `pool_size`: connections (on SQLite: readers) that the stores of one process and event loop share. One is left for
      calls that gather, and from 3 on another one for calls that wait for nobody; of the rest, calls wait for rollouts
      that somebody holds. With 1 or 2, such waits are cut short and tried again.
    - `coalesce`: which concurrent calls of one process may share a transaction: those of the whole "process", or none
      ("off"). With "rollout", for a PostgreSQL that is distributed by rollout, each has one of plain statements on its
      rollout alone; on SQLite that is as "process".
    - `isolation`: at which level of PostgreSQL each transaction runs. At "read committed" the lock of the rollout makes
      them serializable. With "serializable" the server itself says so of each, for which no calls are gathered, a
      failure to serialize is tried again, and PostgreSQL 14 without a pooler is needed. Stores of both levels may share
      a database. On SQLite every transaction is serializable anyway.
    - `spill`: the folder on this host where marks wait while they cannot be stored, None for none; unless given it is
      TOKENCUSTODY_SPILL, or `tokencustody/spill` in the XDG state folder.
    - `max_entry_bytes`: a call whose packed bytes, attachments included, are more is refused with EntryTooLargeError.
    """
    return CaptureStore(
        url,
        run=run,
        writer=writer,
        deadline=deadline,
        pool_size=pool_size,
        coalesce=coalesce,
        isolation=isolation,
        spill=spill,
        max_entry_bytes=max_entry_bytes,
    )
