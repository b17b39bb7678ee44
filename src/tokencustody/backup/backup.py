"""Copying a SQLite file while it is written: one consistent snapshot, proven before it gets its name."""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import NullPool

from tokencustody.database.faults import unavailable
from tokencustody.database.folders import sync_folder
from tokencustody.database.sqlite import file_engine
from tokencustody.database.sqlite_files import logs_of, owner_of_log, refuse_no_file
from tokencustody.database.url import DatabaseUrl, parse_url
from tokencustody.errors import BackupError, SchemaMismatchError, StoreUnavailableError
from tokencustody.waits import waiting
from tokencustody.watching import Watch, unwatched

_PATIENCE = 10.0
_PAGES_AT_ONCE = 1000
_COUNTED = {
    "rollouts": "fences",
    "calls": "entries",
    "ledger_calls": "ledger_calls",
    "staged_calls": "staged_calls",
}
_NO_ROOM = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE}


@dataclass(frozen=True, slots=True)
class Backup:
    """A backup that was written: where, how large, and what it holds."""

    database: str
    file: str
    bytes: int
    revision: str
    rollouts: int
    calls: int
    ledger_calls: int
    staged_calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Held:
    revision: str
    counts: dict[str, int]


def back_up(
    url: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    watch: Watch = unwatched,
) -> Backup:
    """Write a copy of a SQLite database to `file`, mode 0600, with every call that was acknowledged before this began.

    Writers go on. `file` is there once it is whole, is known to be sound (`PRAGMA quick_check`), to have the revision
    and the numbers of rows of the snapshot that was copied, and survives a power cut; else there is nothing, or what
    was there before. `watch` sees the pages go by. Raises BackupError, with what to do, also
    for PostgreSQL; StoreUnavailableError; SchemaMismatchError for a file that is no database of tokencustody.
    """
    started = time.monotonic()
    source = parse_url(url)
    if not source.is_sqlite:
        raise BackupError(
            f"{source.display} is PostgreSQL, which has programs for it: "
            f"`pg_dump --format=custom --file={file} --dbname='{source.display}'`, and pg_restore; docs/operating.md "
            "says how"
        )
    place = parse_url(file)
    if not place.is_sqlite:
        raise BackupError("a backup is a file: give a path")
    target = Path(place.dsn)
    refuse_no_file(source)
    if not Path(source.dsn).exists():
        raise StoreUnavailableError(f"{source.display} does not exist: there is nothing to back up")
    _check_target(source, target, overwrite=overwrite)
    with _temporary(target) as temporary:
        held = _copy(source, temporary, target, watch)
        _prove(temporary, held, source)
        size = temporary.stat().st_size
        _name(temporary, target, overwrite=overwrite)
    return Backup(
        source.display, str(target), size, held.revision, seconds=time.monotonic() - started, **held.counts
    )


def _check_target(source: DatabaseUrl, target: Path, *, overwrite: bool) -> None:
    if not target.parent.is_dir():
        raise BackupError(f"there is no folder {target.parent}: make it first")
    if target.exists() and target.samefile(source.dsn):
        raise BackupError(f"{target} is the database itself: name another file")
    owner = owner_of_log(target)
    if owner is not None:
        raise BackupError(f"{target} has the name of the log of {owner}: name another file")
    if target.exists() and any(log.exists() and target.samefile(log) for log in logs_of(Path(source.dsn))):
        raise BackupError(f"{target} is the log of the database: name another file")
    for log in (Path(f"{target}{suffix}") for suffix in ("-wal", "-journal")):
        if log.exists() and log.stat().st_size:
            raise BackupError(
                f"{log} is there, which SQLite would take for a part of the backup: name another file, or, if no "
                "process uses it, move it away"
            )
    if not os.path.lexists(target):
        return
    if not target.is_file():
        raise BackupError(
            f"{target} is {'a folder: name a file in it' if target.is_dir() else 'not a regular file'}"
        )
    if not overwrite:
        raise BackupError(f"{target} is there already: name another file, or overwrite it with --overwrite")


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """Yield an empty file beside the target that only its owner may read, gone at the end."""
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        yield temporary
    except OSError as exc:
        if isinstance(exc, StoreUnavailableError):
            raise
        raise _not_written(target, exc.strerror or str(exc)) from exc
    finally:
        for suffix in ("", "-wal", "-journal", "-shm"):
            with suppress(OSError):
                Path(f"{temporary}{suffix}").unlink(missing_ok=True)


def _copy(source: DatabaseUrl, temporary: Path, target: Path, watch: Watch) -> _Held:
    engine = file_engine(source, _PATIENCE, begin="BEGIN", read_only=True, poolclass=NullPool)
    try:
        with closing(engine.raw_connection()) as pooled, closing(sqlite3.connect(temporary)) as copy:
            connection = pooled.driver_connection
            assert isinstance(connection, sqlite3.Connection)  # noqa: S101 - the driver's own
            # Held until the end: SQLite would begin anew with each commit of another process.
            connection.execute("BEGIN").close()
            with waiting(source, _PATIENCE):
                held = _held(connection, source)
            # Synced once, when it is whole.
            copy.execute("PRAGMA synchronous = OFF").close()
            (total,) = connection.execute("PRAGMA page_count").fetchone()
            with watch("copying pages", total) as advance:
                done = 0

                def show(_status: int, remaining: int, _total: int) -> None:
                    nonlocal done
                    advance(total - remaining - done)
                    done = total - remaining

                connection.backup(copy, pages=_PAGES_AT_ONCE, progress=show)
            connection.rollback()
            return held
    except sqlite3.Error as exc:
        if exc.sqlite_errorcode in _NO_ROOM:
            raise _not_written(target, str(exc)) from exc
        raise unavailable(source, exc) from exc
    finally:
        engine.dispose()


def _held(connection: sqlite3.Connection, source: DatabaseUrl) -> _Held:
    """Return what a database holds, and so begin to read its snapshot."""
    present = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not {"alembic_version", "fences"} <= present:
        raise SchemaMismatchError(f"{source.display} has no tokencustody tables: there is nothing to back up")
    revisions = connection.execute("SELECT version_num FROM alembic_version ORDER BY version_num").fetchall()
    counts = {
        name: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] if table in present else 0  # noqa: S608
        for name, table in _COUNTED.items()
    }
    return _Held(", ".join(revision for (revision,) in revisions), counts)


def _prove(temporary: Path, held: _Held, source: DatabaseUrl) -> None:
    # Immutable, for it is nobody else's: nothing is created beside it.
    uri = f"file://{quote(os.fsencode(temporary))}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as copy:
            found = copy.execute("PRAGMA quick_check(1)").fetchone()[0]
            agrees = found == "ok" and _held(copy, source) == held
    except sqlite3.DatabaseError:
        agrees = False
    if not agrees:
        raise BackupError(
            f"the copy of {source.display} is damaged, so most likely the database is: nothing was kept. "
            f"`tokencustody verify --url {source.display}` names what can no longer be read"
        )


def _name(temporary: Path, target: Path, *, overwrite: bool) -> None:
    """Give the backup its name, and never take it from a file that came meanwhile."""
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if overwrite:
        temporary.replace(target)
    else:
        try:
            os.link(temporary, target)
        except FileExistsError:
            raise BackupError(f"{target} was made by somebody else meanwhile, and stays as it is") from None
        except OSError:  # a file system without links
            temporary.rename(target)
    sync_folder(target.parent)


def _not_written(target: Path, why: str) -> BackupError:
    return BackupError(f"{target} could not be written: {why}; nothing of it was left")
