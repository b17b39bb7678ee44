"""What every store has: a database, a namespace, and a name to sign its rows with."""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime
from typing import Self

from tokencustody.sql.coalescing import Coalesce
from tokencustody.sql.engine import DEFAULT_DEADLINE, DEFAULT_POOL_SIZE
from tokencustody.sql.transactions import Database
from tokencustody.sql.url import parse_url
from tokencustody.store.ids import check_call_id, check_rollout_id


class DatabaseClient:
    """A client of one database and one run. Making it opens nothing.

    `url` names the database: `sqlite:///captures.db`, a path, or `postgresql://user@host/database`. `run` is the
    namespace of every rollout id, under the same rules as an id. `writer` signs rows instead of `host:pid`. `deadline`
    is the number of seconds after which retries end in `StoreUnavailableError`. `pool_size` is the number of
    connections (on SQLite: of readers) that the stores of one process and loop share; with many workers it multiplies.
    `coalesce` says which concurrent calls of one process may share a transaction: those of the whole "process", those
    of one "rollout" (for a database that is distributed by rollout), or none ("off").
    """

    _creates = True

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        run: str = "default",
        writer: str | None = None,
        deadline: float = DEFAULT_DEADLINE,
        pool_size: int = DEFAULT_POOL_SIZE,
        coalesce: str = Coalesce.PROCESS,
    ) -> None:
        self.run = check_rollout_id(run, "run")
        self._writer = writer if writer is None else check_call_id(writer, "writer")
        self._database = Database(
            parse_url(url),
            deadline=deadline,
            pool_size=pool_size,
            coalesce=coalesce,
            creates=self._creates,
        )

    @property
    def written_by(self) -> str:
        """The name that this store's rows carry."""
        # Not kept: a fork has another pid.
        return self._writer or f"{socket.gethostname()}:{os.getpid()}"

    def stats(self) -> dict[str, int]:
        """Return what the stores on this database did in this process, by the names of `tokencustody.sql.stats`."""
        return self._database.stats()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._database.url.display!r}, run={self.run!r})"


class SqlStore(DatabaseClient):
    """A client whose methods are coroutines, which may be used from any task of any event loop."""

    async def close(self) -> None:
        """Release resources. Idempotent; nothing is ever buffered."""
        await self._database.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


def now() -> datetime:
    """Return the present moment, read outside the functions that a transaction may repeat."""
    return datetime.now(UTC)
