"""Whether what a connection to SQLite has open is still what lies at its path.

SQLite goes on reading and writing a file that was deleted, moved away or replaced, and whoever opens the path meanwhile
finds something else. With only its log or the log's index gone, others would write to the same file without a lock in
common. So each transaction compares device and inode of the file, of its log and of the log's index with the path.
"""

from __future__ import annotations

import ctypes
import os
import sqlite3
import threading
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

from tokencustody.database.url import DatabaseUrl
from tokencustody.errors import StoreUnavailableError

# Device and inode.
File = tuple[int, int]

# What SQLite calls the log of a file, the log's index, and the journal of a file that is in no log.
_LOGS = ("-wal", "-shm", "-journal")


class OpenedConnection(sqlite3.Connection):
    """Ends its transaction when it is closed, and no longer keeps the file's log in place.

    SQLite keeps a closed connection, and the lock of its transaction, for as long as a cursor is unread.
    """

    _is_closed = False
    _log: _Log | None = None

    @property
    def keeps_log(self) -> bool:
        """Whether nobody may delete the file's log because of this connection."""
        return self._log is not None

    def keep(self, log: _Log) -> None:
        """Know that nobody may delete this log until this connection is closed."""
        log.connections.add(self)
        self._log = log

    def close(self) -> None:
        if self._is_closed:  # the pool closes again what could not be configured
            return
        self._is_closed = True
        if self.in_transaction:
            self.rollback()
        if self._log is not None:
            if self._log.is_all_there_is():
                # To close it may delete the log, and with it what others have written by an index of their own, or the
                # only copy of calls. It stays open until the process ends, which deletes nothing.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
                return
            # Before: the last of all connections deletes the log.
            self._log.connections.discard(self)
        super().close()


class _Log(NamedTuple):
    """The log of a file and the log's index, None for what is not there, and the connections that have them open."""

    log: File | None
    log_index: File | None
    connections: WeakSet[OpenedConnection]
    path: str

    def is_all_there_is(self) -> bool:
        """Return whether the log is where it was, and its index is not, or the file itself was emptied."""
        try:
            if _file(f"{self.path}-wal") != self.log:
                return False
            file = _status(self.path)
            return _file(f"{self.path}-shm") != self.log_index or (file is not None and file.st_size == 0)
        except OSError:
            return False


# The logs that connections of this process have open, by the file. A child process inherits them, as it inherits what
# SQLite itself knows of its parent's files.
_logs: dict[File, _Log] = {}
_lock = threading.Lock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class OpenedFile:
    """The file that the connections of this process have open under one URL, from the first of them on."""

    def __init__(self, url: DatabaseUrl) -> None:
        self._url = url
        self.file: File | None = None
        self._path = ""
        self.log_size = 0
        self.users: WeakSet[object] = WeakSet()

    def look(self) -> File | None:
        """Return what is at the path, before it is opened. Raises StoreUnavailableError for another file, or none."""
        if self.file is not None and not self._is_there():
            raise gone(self._url)
        return _file(self._url.dsn)

    def opened(self, before: File | None) -> None:
        """Remember what has just been opened; `before` is what was at the path before that."""
        found = self.look()
        if found is None or found != before:
            raise gone(self._url)
        self.file = found
        # Where SQLite puts its log, whatever links lead to the file. To ask at every commit would take longer than it.
        self._path = os.path.realpath(self._url.dsn)

    def check(self, connection: OpenedConnection) -> None:
        """Raise StoreUnavailableError unless the path leads to what this connection has open.

        The first check of a connection is in a transaction that has the file's lock: then its log is the one at the
        path, or the file has none.
        """
        lost = self.loss(connection)
        if lost is not None:
            raise lost

    def loss(self, connection: OpenedConnection | None = None) -> StoreUnavailableError | None:
        """Return the error for what is no longer at the path, or None."""
        if self.file is None or not self._is_there():
            return gone(self._url)
        status = _status(f"{self._path}-wal")
        self.log_size = 0 if status is None else status.st_size
        found = _identity(status), _file(f"{self._path}-shm")
        with _lock:
            log = _logs.get(self.file)
            if log is None or not log.connections:
                log = _logs[self.file] = _Log(*found, WeakSet(), self._path)
            is_same = log[:2] == found
            if connection is not None and not connection.keeps_log and is_same and None not in found:
                connection.keep(log)
        if is_same:
            return None
        if log.log != found[0]:
            return gone(self._url, "log")
        return gone(self._url, "index of the log", "end this process and begin it anew")

    def _is_there(self) -> bool:
        # A file with a log is never empty: somebody cut it off, and who opened it now would throw the log away.
        status = _status(self._url.dsn)
        return status is not None and _identity(status) == self.file and status.st_size > 0


def opened_file(url: DatabaseUrl, user: object) -> OpenedFile:
    """Return the one of this process, for as long as it has a user: then no store changes over to another file."""
    with _lock:
        opened = _opened.get(url)
        if opened is None or not opened.users:
            opened = _opened[url] = OpenedFile(url)
        opened.users.add(user)
        return opened


_opened: dict[DatabaseUrl, OpenedFile] = {}


def gone(
    url: DatabaseUrl,
    what: str = "file",
    remedy: str = "close every store on it in this process, look at what lies there now, and open them anew",
) -> StoreUnavailableError:
    """Return the error for a file whose path leads elsewhere now."""
    return StoreUnavailableError(
        f"{url.display} is not available: the {what} that was opened was deleted, moved away, emptied or replaced, so "
        "what was being written counts as not stored, and what was read as not read; put it back beside the rest of "
        f"the database, or {remedy}"
    )


def log_size(url: DatabaseUrl) -> int:
    """Return how many bytes the log of a SQLite file has, 0 where there is none or nobody may look."""
    try:
        status = _status(f"{os.path.realpath(url.dsn)}-wal")
    except OSError:
        return 0
    return 0 if status is None else status.st_size


def archive_stamp(url: DatabaseUrl) -> tuple[int, int] | None:
    """Return the time and size of a file that lies alone in a folder where nothing can be created, else None.

    SQLite reads such a file only as immutable, without locks: then this must stay the same. Beside its log, or the
    journal of a transaction that did not end, it is not all there is to read.
    """
    file, log = Path(url.dsn), Path(f"{url.dsn}-wal")
    try:
        if os.access(file.parent, os.W_OK) or log.exists() or has_journal(url):
            return None
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def has_journal(url: DatabaseUrl) -> bool:
    """Return whether a transaction with a rollback journal did not end."""
    journal = Path(f"{url.dsn}-journal")
    return journal.exists() and journal.stat().st_size > 0


def _file(path: str) -> File | None:
    return _identity(_status(path))


def _identity(status: os.stat_result | None) -> File | None:
    return None if status is None else (status.st_dev, status.st_ino)


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)  # noqa: PTH116 - asked at every commit
    except (FileNotFoundError, NotADirectoryError):
        return None


def logs_of(file: Path) -> list[Path]:
    """Return where SQLite keeps what belongs to a file, which is beside what links lead to."""
    return [Path(f"{os.path.realpath(file)}{suffix}") for suffix in _LOGS]


def owner_of_log(file: Path) -> Path | None:
    """Return the file whose log SQLite would take this one for by its name, None where there is no such file."""
    for path in (file, Path(os.path.realpath(file))):
        for suffix in _LOGS:
            owner = Path(str(path).removesuffix(suffix))
            if owner != path and owner.is_file():
                return owner
    return None


def is_of_database(file: Path) -> bool:
    """Return whether a file is a SQLite database, or the log of one. Raises OSError."""
    if owner_of_log(file) is not None:
        return True
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(16) == b"SQLite format 3\0"


def refuse_no_file(url: DatabaseUrl) -> None:
    """Raise StoreUnavailableError for what is no file, or the log of another one, or where only a log is left, which
    SQLite would delete.

    Nothing is raised for a file that does not exist at all.
    """
    file, log = Path(url.dsn), Path(f"{url.dsn}-wal")
    try:
        is_other = file.exists() and not file.is_file()
        owner = owner_of_log(file)
    except OSError:
        return
    if is_other:
        kind = "a folder: name a file in it" if file.is_dir() else "not a regular file"
        raise StoreUnavailableError(f"{url.display} is {kind}")
    if owner is not None:
        raise StoreUnavailableError(f"{url.display} has the name of the log of {owner}: name another file")
    try:
        is_lost = log.stat().st_size > 0 and not (file.exists() and file.stat().st_size)
    except OSError:
        return
    if is_lost:
        raise StoreUnavailableError(
            f"{url.display} is missing or empty, but its log {log.name} is there, and may hold calls: put the file "
            "back beside its log, or move the log away to begin anew"
        )


def create_file(url: DatabaseUrl) -> None:
    """Create the empty file, which nobody else may read, unless it exists. SQLite gives its log the same mode."""
    try:
        # Exclusively, for to close a file that is in use would let go of every lock that this process has on it.
        created = os.open(url.dsn, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except OSError:
        return  # it exists, or SQLite says what is wrong with the place
    try:
        os.fchmod(created, 0o600)  # whatever the umask took away
    finally:
        os.close(created)
