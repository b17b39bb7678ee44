"""The hash of a row whose columns no digest of the protocols covers, so that a changed value in any of them is found.

It is the SHA-256 of one line of JSON, in ASCII and without spaces: a list of [column, value] for each column of the
table in the order of their names, but for the hash itself and for columns of bytes, which have a hash of their own
beside them. A column that came after the hashes, in revision 0005, is left out where it is null, so that older rows
keep theirs. A time is what SQLite stores, `YYYY-MM-DD HH:MM:SS.ffffff` in UTC, a float its hexadecimal form.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import LargeBinary, Table

HASH_COLUMN = "row_sha256"
_LATER = {"recorded_fingerprint", "recorded_fingerprint_version"}


def row_sha256(table: Table, row: Mapping[str, Any]) -> str:
    """Return the hash (hex) of a row of `table`. A column that `row` lacks is null."""
    columns = sorted(
        column.name
        for column in table.columns
        if column.name != HASH_COLUMN and not isinstance(column.type, LargeBinary)
    )
    values = [
        [name, _hashable(row.get(name))]
        for name in columns
        if name not in _LATER or row.get(name) is not None
    ]
    return hashlib.sha256(json.dumps(values, separators=(",", ":")).encode()).hexdigest()


def is_proven(table: Table, row: Any) -> bool:
    """Return whether a row, with all its columns, has its hash. One that is older than the hashes has none to prove."""
    return row.row_sha256 is None or row.row_sha256 == row_sha256(table, row._mapping)


def _hashable(value: Any) -> Any:
    match value:
        case datetime():
            return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
        case float():
            return value.hex()
        case _:
            return value
