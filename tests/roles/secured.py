"""A PostgreSQL database whose owner is no superuser, and users of the server who may be granted roles in it."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

from tests.support.databases import create, drop
from tests.support.postgres import Server, fetch, verifier
from tokencustody.roles.roles import identifier
from tokencustody.schema import migrate
from tokencustody.store import SqlLineageStore, SqlStagingStore, SqlTokenSource


@dataclass(frozen=True)
class Secured:
    """A migrated database: `admin_url` connects as the superuser, `url` as its owner."""

    server: Server
    database: str
    owner: str

    @property
    def admin_url(self) -> str:
        return self.server.url_of(self.database)

    @property
    def url(self) -> str:
        return self.url_as(self.owner)

    def url_as(self, user: str) -> str:
        """Return the URL of the database for a user of `server_user`."""
        parts = urlsplit(self.admin_url)
        place = parts.netloc.rpartition("@")[2]
        return urlunsplit(parts._replace(netloc=f"{quote(user, safe='')}:{PASSWORD}@{place}"))


@dataclass(frozen=True)
class Users:
    """The URLs of a database for its owner, and for a worker and a trainer of the runs `here` and `there`."""

    owner: str
    worker: str
    trainer: str


class _Shared:
    """A store each of whose methods is called as the user whose it is: `workers`, `owners`, else the trainer's."""

    kind: Any
    workers: frozenset[str] = frozenset()

    def __init__(self, users: Users, **options: Any) -> None:
        self._owner, self._worker, self._trainer = self._stores = [
            self.kind(url, **options) for url in (users.owner, users.worker, users.trainer)
        ]

    def __getattr__(self, name: str) -> Any:
        if name == "delete" and self.kind is not SqlStagingStore:
            return getattr(self._owner, name)
        return getattr(self._worker if name in self.workers else self._trainer, name)


class _Asynchronous(_Shared):
    async def close(self) -> None:
        for store in self._stores:
            await store.close()


class Source(_Asynchronous):
    """A `TokenSource` of a trainer, whose owner deletes."""

    kind = SqlTokenSource


class Ledger(_Asynchronous):
    """A `CaptureLedger` that a worker writes and a trainer reads and retires."""

    kind = SqlLineageStore
    workers = frozenset({"record", "record_failure", "import_rows", "resolve"})


class Staging(_Shared):
    """A staging store in which a worker stages, and from which a trainer fetches and deletes."""

    kind = SqlStagingStore
    workers = frozenset({"stage"})

    def close(self) -> None:
        for store in self._stores:
            store.close()


PASSWORD = "not-a-secret"  # noqa: S105


@contextmanager
def server_user(server: Server, prefix: str, options: str = "LOGIN") -> Iterator[str]:
    """Yield a new user of the server, dropped at the end, when its databases must be gone."""
    name = f"{prefix}_{secrets.token_hex(4)}"
    server.fetch(f"CREATE ROLE {identifier(name)} {options} PASSWORD '{verifier(PASSWORD)}'")
    try:
        yield name
    finally:
        server.fetch(f"DROP ROLE {identifier(name)}")


@functools.cache
def _template(server: Server) -> tuple[str, str]:
    """Migrate a database once by a user that is no superuser, and return the names of both."""
    user = server.at_end.enter_context(server_user(server, "template_owner"))
    name = create(server, "owned_template", owner=user)
    server.at_end.callback(drop, server, name)
    migrate.upgrade(Secured(server, name, user).url)
    # Else whoever is given what the user owns would be given the template too.
    server.fetch(f'ALTER DATABASE "{name}" OWNER TO CURRENT_USER')
    return name, user


@contextmanager
def secured_database(server: Server, *prefixes: str) -> Iterator[tuple[Secured, list[str]]]:
    """Yield a database, and a user for each prefix, who has nothing yet."""
    with ExitStack() as stack:
        owner, *users = [stack.enter_context(server_user(server, prefix)) for prefix in ("owner", *prefixes)]
        template, its_owner = _template(server)
        name = create(server, "secured", template, owner)
        stack.callback(drop, server, name)
        database = Secured(server, name, owner)
        fetch(database.admin_url, f"REASSIGN OWNED BY {identifier(its_owner)} TO {identifier(owner)}")
        yield database, users
