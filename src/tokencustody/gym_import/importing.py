"""Importing the rollouts of a folder, each in one transaction."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from uuid import uuid4

from sqlalchemy import Connection, select
from sqlalchemy.exc import DBAPIError

from tokencustody.database.folders import local_path
from tokencustody.errors import CorruptEntryError, DamagedMarkError, InvalidRecordError, RolloutNotFoundError
from tokencustody.gym_import.files import RolloutFiles, UnreadableFileError, scan
from tokencustody.gym_import.report import FindingKind, ImportedRollout, ImportOutcome, ImportReport
from tokencustody.gym_import.walking import RefusedError, Walk
from tokencustody.schema import migrate
from tokencustody.schema.tables import fences
from tokencustody.store.base import SqlStore, now
from tokencustody.txn.asked import reach
from tokencustody.txn.fence import RolloutKey, Stamp, of_rollout
from tokencustody.watching import Watch, unwatched

# Seconds that the transaction of one rollout may take.
_LONGEST_TRANSACTION = 3600.0

_FENCE = select(fences.c.state).where(of_rollout(fences))


class GymImporter(SqlStore):
    """Brings folders of NeMo Gym's file store into one run of a database.

    Of a rollout that the database holds already, what the files have besides is added while that is open; whatever is
    different is a conflict, and the rollout stays as it is. A rollout is imported in one transaction: whole or not at
    all. `deadline` is for how many seconds the database may be out of reach, ten unless given.
    """

    def __init__(
        self, url: str | os.PathLike[str], *, run: str = "default", deadline: float | None = None
    ) -> None:
        super().__init__(url, run=run, deadline=_LONGEST_TRANSACTION, pool_size=1)
        self._address = url
        self._deadline = deadline

    async def import_folder(
        self,
        folder: Path,
        *,
        rollout_ids: Collection[str] | None = None,
        prefix: str = "",
        dry_run: bool = False,
        watch: Watch = unwatched,
    ) -> ImportReport:
        """Import the rollouts of a folder, of which `rollout_ids` and `prefix` leave out the others.

        With `dry_run` it only looks, and says what would be done. `watch` sees the rollouts go by. Raises
        StoreUnavailableError, also for a folder that cannot be read, InvalidRecordError for an address as `s3://…`,
        SchemaMismatchError, and RolloutNotFoundError for a folder without a file of Gym's store, or without a rollout
        whose id begins with `prefix`.
        """
        rollouts, strangers = scan(
            local_path(folder, "an import"),
            lambda name: name.startswith(prefix) and (rollout_ids is None or name in rollout_ids),
        )
        if prefix and not rollouts and not rollout_ids:
            raise RolloutNotFoundError(f"no rollout in {folder} has an id that begins with {prefix}")
        is_new = dry_run and self._database.url.is_sqlite and await migrate.is_new_sqlite(self._database.url)
        if not is_new:
            await reach(self._address, deadline=self._deadline, read_only=False)
        found = [
            _failed(name, "the folder has no such rollout")
            for name in sorted({*(rollout_ids or ())} - {files.rollout_id for files in rollouts})
        ]
        with watch("importing", len(rollouts)) as advance:
            for files in rollouts:
                found.append(await self._import(files, dry_run=dry_run, is_new=is_new))
                advance(1)
        return ImportReport(found, strangers)

    async def _import(self, files: RolloutFiles, *, dry_run: bool, is_new: bool) -> ImportedRollout:
        key = RolloutKey(self.run, files.rollout_id)
        stamp = Stamp(now(), self.written_by, uuid4().hex)

        def walk(connection: Connection | None, *, writes: bool) -> ImportedRollout:
            # Anew for each try, for a walk counts what it found.
            walking = Walk(key, files, stamp, writes=writes, max_entry_bytes=self._max_entry_bytes)
            return walking.run_txn(connection)

        def look(connection: Connection) -> ImportedRollout | None:
            if not dry_run and connection.execute(_FENCE, key.named()).first() is None:
                return None
            return walk(connection, writes=False)

        try:
            async with files.locked():
                if is_new:
                    return walk(None, writes=False)
                found = await self._database.read(look)
                if found is not None and (dry_run or found.outcome is not ImportOutcome.ADDED):
                    return found
                return await self._write_after_marks(key, lambda connection: walk(connection, writes=True))
        except RefusedError as exc:
            return exc.found
        except (UnreadableFileError, CorruptEntryError, InvalidRecordError, DamagedMarkError) as exc:
            return _failed(files.rollout_id, f"nothing of it was imported: {exc}")
        except (DBAPIError, ArithmeticError) as exc:
            # Not what the driver says of it: that may quote a value.
            what = type(exc.orig if isinstance(exc, DBAPIError) else exc).__name__
            return _failed(
                files.rollout_id,
                f"nothing of it was imported, for the database refuses a value of it: {what}",
            )


def _failed(rollout_id: str, reason: str) -> ImportedRollout:
    failed = ImportedRollout(rollout_id, ImportOutcome.FAILED)
    failed.find(FindingKind.LOST, "", None, None, reason)
    return failed
