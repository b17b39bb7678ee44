"""What every store has: a database, a namespace, and a name to sign its rows with."""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime
from functools import cache
from typing import Self, TypedDict

from tokencustody.database.coalescing import Coalesce
from tokencustody.database.engine import DEFAULT_DEADLINE, DEFAULT_POOL_SIZE, Result, Work
from tokencustody.database.url import parse_url
from tokencustody.errors import EntryTooLargeError, InvalidRecordError
from tokencustody.ids import check_call_id, check_rollout_id
from tokencustody.schema.opening import CaptureDatabase
from tokencustody.spill.files import spill_root
from tokencustody.spill.marks import Spill
from tokencustody.spill.replaying import Replayer, write_after_marks
from tokencustody.states import Isolation
from tokencustody.txn.fence import RolloutKey

DEFAULT_MAX_ENTRY_BYTES = 256 * 2**20
# What every database can hold in one value, with room for what stands beside it in the same message.
_LARGEST_MAX_ENTRY_BYTES = 900 * 2**20


class Options(TypedDict):
    """The options of every store but its URL: see `open_store`."""

    run: str
    writer: str | None
    deadline: float
    pool_size: int
    coalesce: str
    isolation: str
    spill: str | os.PathLike[str] | None
    max_entry_bytes: int


class DatabaseClient:
    """A client of one database and one run. Making it opens nothing.

    `url` names the database: `sqlite:///captures.db`, a path, or `postgresql://user@host/database`. The options are
    those of `open_store`.
    """

    # Whether a SQLite file that does not exist is made, and whether nothing at all is written.
    _creates = True
    _read_only = False

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
        if type(max_entry_bytes) is not int or not 1 <= max_entry_bytes <= _LARGEST_MAX_ENTRY_BYTES:
            raise InvalidRecordError(
                f"max_entry_bytes must be an integer between 1 and {_LARGEST_MAX_ENTRY_BYTES}, not {max_entry_bytes!r}"
            )
        self._max_entry_bytes = max_entry_bytes
        self.run = check_rollout_id(run, "run")
        self._writer = writer if writer is None else check_call_id(writer, "writer")
        self._database = CaptureDatabase(
            parse_url(url),
            deadline=deadline,
            pool_size=pool_size,
            coalesce=coalesce,
            isolation=isolation,
            creates=self._creates,
            read_only=self._read_only,
        )
        root = spill_root(spill)
        self._replayer = None if root is None else Replayer(self._database, Spill(root, self._database.url))

    @property
    def written_by(self) -> str:
        """The name that this store's rows carry."""
        return self._writer or _name_of(os.getpid())

    def stats(self) -> dict[str, int]:
        """Return what the stores on this database did in this process, by the names of `database.stats`."""
        return self._database.stats()

    def _check_size(self, size: int, rollout_id: str, model_call_id: str) -> None:
        if size > self._max_entry_bytes:
            raise EntryTooLargeError(
                f"model call {model_call_id} of rollout {rollout_id} takes {size} bytes, more than the "
                f"{self._max_entry_bytes} that this store accepts; open the store with a larger max_entry_bytes"
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._database.url.display!r}, run={self.run!r})"


@cache
def _name_of(pid: int) -> str:
    # By the pid, for a fork has another.
    return f"{socket.gethostname()}:{pid}"


class SqlStore(DatabaseClient):
    """A client whose methods are coroutines, which may be used from any task of any event loop."""

    async def close(self) -> None:
        """Release resources. Idempotent; nothing is ever buffered, and marks that wait on this host go on waiting."""
        if self._replayer is not None:
            await self._replayer.stop()
        await self._database.close()
        if self._replayer is not None:
            await self._replayer.report()

    def _replay_once(self) -> None:
        """Begin to replay what waits on this host, if this is the first use in this process and loop."""
        if self._replayer is not None:
            self._replayer.look_once()

    async def _write_after_marks(self, key: RolloutKey, work: Work[Result]) -> Result:
        """Run `work` in one transaction, after the rollout's marks that wait on this host.

        It must not overtake them: each was acknowledged. Raises StoreUnavailableError where one is damaged.
        """
        self._replay_once()
        with self._database.doors() as doors:
            if self._replayer is None:
                return await doors.write(work, rollout=key)
            give_up = self._database.end_of_patience()
            return await write_after_marks(doors, self._replayer, key, work, give_up)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


def now() -> datetime:
    """Return the present moment, read outside the functions that a transaction may repeat."""
    return datetime.now(UTC)
