"""Whether what a connection to SQLite has open is still what lies at its path.

SQLite goes on reading and writing a file that was deleted, moved away or replaced, and whoever opens the path meanwhile
finds something else. With only its log or the log's index gone, others would write to the same file without a lock in
common. So each transaction compares device and inode of the file, of its log and of the log's index with the path.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from typing import NamedTuple
from weakref import WeakSet

from tokencustody.errors import StoreUnavailableError
from tokencustody.sql.url import DatabaseUrl

# Device and inode.
File = tuple[int, int]


class OpenedConnection(sqlite3.Connection):
    """Ends its transaction when it is closed, and no longer keeps the file's log in place.

    SQLite keeps a closed connection, and the lock of its transaction, for as long as a cursor is unread.
    """

    _is_closed = False
    _kept: WeakSet[OpenedConnection] | None = None

    def keep(self, log: _Log) -> None:
        """Know that nobody may delete this log until this connection is closed."""
        log.connections.add(self)
        self._kept = log.connections

    def close(self) -> None:
        # The pool closes again what could not be configured.
        if not self._is_closed and self.in_transaction:
            self.rollback()
        self._is_closed = True
        if self._kept is not None:
            # Before: the last of all connections deletes the log.
            self._kept.discard(self)
        super().close()


class _Log(NamedTuple):
    """The log of a file and the log's index, None for what is not there, and the connections that have them open."""

    log: File | None
    log_index: File | None
    connections: WeakSet[OpenedConnection]


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
        self.log_size = 0
        self.users: WeakSet[object] = WeakSet()

    def look(self) -> File | None:
        """Return what is at the path, before it is opened. Raises StoreUnavailableError for another file, or none."""
        found = _file(self._url.dsn)
        if self.file not in (None, found):
            raise gone(self._url)
        return found

    def opened(self, before: File | None) -> None:
        """Remember what has just been opened; `before` is what was at the path before that."""
        found = self.look()
        if found is None or found != before:
            raise gone(self._url)
        self.file = found

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
        if self.file is None or _file(self._url.dsn) != self.file:
            return gone(self._url)
        log_status = _status(_log_path(self._url))
        self.log_size = 0 if log_status is None else log_status.st_size
        found = _Log(_identity(log_status), _file(f"{os.path.realpath(self._url.dsn)}-shm"), WeakSet())
        with _lock:
            log = _logs.get(self.file)
            if log is None or not log.connections:
                log = _logs[self.file] = found
            is_same = log[:2] == found[:2]
            if connection is not None and is_same and None not in found[:2]:
                connection.keep(log)
        if is_same:
            return None
        return gone(self._url, "log" if log.log != found.log else "index of the log")


def opened_file(url: DatabaseUrl, user: object) -> OpenedFile:
    """Return the one of this process, for as long as it has a user: then no store changes over to another file."""
    with _lock:
        opened = _opened.get(url)
        if opened is None or not opened.users:
            opened = _opened[url] = OpenedFile(url)
        opened.users.add(user)
        return opened


_opened: dict[DatabaseUrl, OpenedFile] = {}


def gone(url: DatabaseUrl, what: str = "file") -> StoreUnavailableError:
    """Return the error for a file whose path leads elsewhere now."""
    return StoreUnavailableError(
        f"{url.display} is not available: the {what} that was opened was deleted, moved away or replaced, so what was "
        "being written counts as not stored, and what was read as not read; put it back beside the rest of the "
        "database, or close every store on it in this process, look at what lies there now, and open them anew"
    )


def log_size(url: DatabaseUrl) -> int:
    """Return how many bytes the log of a SQLite file has, 0 where there is none or nobody may look."""
    try:
        status = _status(_log_path(url))
    except OSError:
        return 0
    return 0 if status is None else status.st_size


def _log_path(url: DatabaseUrl) -> str:
    return f"{os.path.realpath(url.dsn)}-wal"


def _file(path: str) -> File | None:
    return _identity(_status(path))


def _identity(status: os.stat_result | None) -> File | None:
    return None if status is None else (status.st_dev, status.st_ino)


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)  # noqa: PTH116 - asked at every commit
    except (FileNotFoundError, NotADirectoryError):
        return None
