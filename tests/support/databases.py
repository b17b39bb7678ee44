"""Fresh databases on a test server: empty ones, and copies of one that was migrated once."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg

from tests.support.postgres import Server

# Text that sorts as people expect shows every query that forgot to sort by code points.
_COLLATION = "TEMPLATE template0 LOCALE_PROVIDER icu ICU_LOCALE 'en-US'"


def _copying(server: Server) -> str:
    """Return the option by which a server copies files, which older ones always did: half of what its log costs."""
    return "STRATEGY file_copy" if int(server.version.partition(".")[0]) >= 15 else ""


class LeakedConnectionError(AssertionError):
    """A test ended with connections to its database still open."""


def create(server: Server, prefix: str, template: str | None = None, owner: str | None = None) -> str:
    """Create a database and return its name. Without a template it is empty, sorted by ICU if it can."""
    name = f"tokencustody_{prefix}_{secrets.token_hex(6)}"
    creation = f'CREATE DATABASE "{name}"' + (f' OWNER "{owner}"' if owner else "")
    if template is not None:
        server.fetch(f'{creation} TEMPLATE "{template}" {_copying(server)}')
        return name
    try:
        server.fetch(f"{creation} {_COLLATION}")
    except (
        asyncpg.FeatureNotSupportedError,
        asyncpg.PostgresSyntaxError,
        asyncpg.InvalidParameterValueError,
    ):
        server.fetch(creation)
    return name


def drop(server: Server, name: str) -> None:
    """Drop a database. Raises LeakedConnectionError, once it is gone, when connections to it were open."""
    try:
        server.fetch(f'DROP DATABASE "{name}"')
    except asyncpg.ObjectInUseError:
        sessions = server.fetch(
            f"SELECT pid, state, left(query, 80) AS query FROM pg_stat_activity WHERE datname = '{name}'",
        )
        server.fetch(f'DROP DATABASE "{name}" WITH (FORCE)')
        listing = "\n".join(f"  {row['pid']} {row['state']}: {row['query']}" for row in sessions)
        raise LeakedConnectionError(f"the test left connections to its database open:\n{listing}") from None


@contextmanager
def fresh(server: Server, template: str | None = None) -> Iterator[str]:
    """Yield the URL of a new database, which is dropped at the end."""
    name = create(server, "test", template)
    try:
        yield server.url_of(name)
    finally:
        drop(server, name)
