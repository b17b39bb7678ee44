"""Whether the commits of a PostgreSQL database wait for a standby, so that a failover loses nothing acknowledged."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from tokencustody.database.connecting import connect
from tokencustody.database.engine import DEFAULT_DEADLINE
from tokencustody.database.faults import classify, unavailable
from tokencustody.database.url import DatabaseUrl

_ASKED = """
SELECT current_setting('synchronous_standby_names') AS names,
    CASE WHEN pg_has_role(current_user, 'pg_read_all_stats', 'USAGE') THEN
        (SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum')) END AS connected
"""


@dataclass(frozen=True)
class SynchronousStandbys:
    """What synchronous_standby_names says, and how many such standbys are connected: None if the role may not know."""

    names: str
    connected: int | None

    def __str__(self) -> str:
        if not self.names:
            return (
                "no synchronous standby is named: a failover may lose acknowledged calls and open fences again, see "
                "docs/operating.md"
            )
        waits = f"commits wait for a synchronous standby: synchronous_standby_names is {self.names!r}"
        if self.connected is None:
            return waits
        return f"{waits}, {self.connected or 'none'} connected" + (
            "" if self.connected else ", so no write is acknowledged"
        )


def synchronous_standbys(url: DatabaseUrl) -> SynchronousStandbys | None:
    """Return what a PostgreSQL database says of its synchronous standbys, and None for SQLite.

    Raises StoreUnavailableError.
    """
    return None if url.is_sqlite else asyncio.run(_ask(url))


async def _ask(url: DatabaseUrl) -> SynchronousStandbys:
    try:
        connection = await connect(url, DEFAULT_DEADLINE)
        try:
            row: Any = await connection.fetchrow(_ASKED, timeout=DEFAULT_DEADLINE)
        finally:
            await connection.close(timeout=DEFAULT_DEADLINE)
    except Exception as exc:
        if classify(exc) is not None:
            raise unavailable(url, exc) from exc
        raise
    return SynchronousStandbys(**row)
