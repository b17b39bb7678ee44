"""What a person can do about a database that is not available, by the driver's error."""

from __future__ import annotations

import socket
import sqlite3
from pathlib import Path

from tokencustody.database.url import DatabaseUrl

_ENCODING = "give tokencustody a database whose encoding is UTF8"
_POOLER = (
    "add statement_cache_size=0 to the URL, for a pooler in transaction mode keeps no prepared statements"
)
_RIGHTS = "let this user write the file and its folder"
_HELD = "another process holds it: end that, or wait"
# By the SQLSTATE of PostgreSQL and the primary code of SQLite.
_REMEDIES: dict[object, str] = {
    "22021": _ENCODING,
    "22P05": _ENCODING,
    "26000": _POOLER,
    "28000": "name a user that the server has and its pg_hba.conf lets in",
    "34000": _POOLER,
    "28P01": "give the password in PGPASSWORD or a .pgpass file that only you may read",
    "3D000": "name a database that the server has, or make it with `createdb`",
    "42P05": _POOLER,
    "53300": "use a smaller pool_size or a pooler, or raise the server's max_connections",
    "55P03": "another transaction holds what this one needs, as a large freeze or a stopped client does: let it end",
    "57P03": "wait until the server has started",
    sqlite3.SQLITE_BUSY: _HELD,
    sqlite3.SQLITE_LOCKED: _HELD,
    sqlite3.SQLITE_FULL: "make room on its disk",
    sqlite3.SQLITE_PERM: _RIGHTS,
    sqlite3.SQLITE_READONLY: _RIGHTS,
    sqlite3.SQLITE_PROTOCOL: (
        "the locks of its -shm file stay taken: let no other program hold them, and keep the file on a local file "
        "system, for a network file system need not have true locks"
    ),
}


def remedy(url: DatabaseUrl, cause: BaseException) -> str:
    """Return what to do about a failure, with a semicolon before it, or nothing."""
    code = getattr(cause, "sqlstate", None) or (getattr(cause, "sqlite_errorcode", None) or 0) & 0xFF
    known = _REMEDIES.get(code, "") or _of_system(url, cause)
    if code == "08P01" and "prepared statement" in str(cause):
        known = _POOLER  # another client's has the name; what else has this code has nothing to do with it
    return known and f"; {known}"


def missing(url: DatabaseUrl) -> str:
    """Return what to say of a SQLite file that is not there or has no tables, and should be."""
    file = Path(url.dsn)
    if not file.parent.is_dir():
        return f"{url.display} does not exist: there is no folder {file.parent}; look at the path, or make the folder"
    what = "has no tokencustody tables" if file.exists() else "does not exist"
    begin = f"`tokencustody db upgrade --url {url.display}`"
    return f"{url.display} {what}: look at the path, or begin a new database with {begin}"


def _of_system(url: DatabaseUrl, cause: BaseException) -> str:
    if url.is_sqlite:
        folder = Path(url.dsn).parent
        if not folder.is_dir():
            return f"there is no folder {folder}: look at the path, or make the folder"
        is_closed = (getattr(cause, "sqlite_errorcode", None) or 0) & 0xFF == sqlite3.SQLITE_CANTOPEN
        return _RIGHTS if is_closed else ""
    if isinstance(cause, ConnectionRefusedError):
        return "look whether the server runs and listens there"
    if isinstance(cause, socket.gaierror):
        return "look at the name of the host"
    if isinstance(cause, FileNotFoundError):
        return "look whether the server runs and has its socket there"
    return ""
