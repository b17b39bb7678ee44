"""Giving the free space of a SQLite file back."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from sqlalchemy import NullPool

from tokencustody.database.faults import unavailable
from tokencustody.database.sqlite import file_engine
from tokencustody.database.url import DatabaseUrl, parse_url
from tokencustody.errors import StoreUnavailableError

_PATIENCE = 10.0


def vacuum(url: str | os.PathLike[str]) -> tuple[int, int]:
    """Give the free space of a SQLite file back to the file system; return its bytes before and after.

    The log counts. Raises StoreUnavailableError when the file is in use or cannot be written anew, which changes
    nothing.
    """
    file = parse_url(url)
    engine = file_engine(file, _PATIENCE, begin="BEGIN", poolclass=NullPool)
    try:
        # Not in a transaction, where SQLite would refuse.
        connection = engine.raw_connection()
        try:
            before = _bytes_of(file)
            cursor = connection.cursor()
            cursor.execute("VACUUM")
            # Nobody else may be reading, for the log could not be cut off then.
            if cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                raise StoreUnavailableError(
                    f"{file.display} is in use: close whatever else has it open, then vacuum it again"
                )
            return before, _bytes_of(file)
        finally:
            connection.close()
    except sqlite3.Error as exc:
        raise unavailable(file, exc) from exc
    finally:
        engine.dispose()


def _bytes_of(file: DatabaseUrl) -> int:
    return sum(path.stat().st_size for path in (Path(file.dsn), Path(f"{file.dsn}-wal")) if path.exists())
