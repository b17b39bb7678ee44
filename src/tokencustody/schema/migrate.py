"""Taking a database from one revision to another, and looking where it stands.

Migrations run in one transaction on both databases, version stamp included, and one at a time: on PostgreSQL behind an
advisory lock of the transaction, on SQLite behind BEGIN IMMEDIATE, both taken before the current revision is read.
"""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from sqlalchemy import Connection, func, select, text
from sqlalchemy.pool import NullPool

from tokencustody.database import engine, sqlite, sqlite_files
from tokencustody.database.faults import classify, damage, unavailable
from tokencustody.database.remedies import missing
from tokencustody.database.url import DatabaseUrl, parse_url
from tokencustody.errors import SchemaMismatchError, StoreUnavailableError
from tokencustody.schema import catalogue, revisions, tables
from tokencustody.schema.migrations import configuration
from tokencustody.schema.revisions import HEAD as HEAD
from tokencustody.schema.revisions import OLDEST, TABLES, WIRE_SCHEMAS, Standing, Stored
from tokencustody.schema.revisions import REVISIONS as REVISIONS
from tokencustody.waits import waiting

if TYPE_CHECKING:
    from alembic.config import Config

Result = TypeVar("Result")
Url = str | os.PathLike[str] | DatabaseUrl
Progress = Callable[[str], None]
# Before and after.
Revisions = tuple[str | None, str | None]
Work = Callable[[Connection], Revisions]
# What comes before the first worker of this release starts, and what after the last older one has ended.
Part = Literal["before", "after"]

# The advisory lock of migrations: "custody" in ASCII, as a 64-bit integer.
LOCK_KEY = int.from_bytes(b"custody", "big")

# Alembic's `context` and `op` are global to the process, so its runs take turns, each in a thread of its own. A fork
# waits for its turn too: a child would find Alembic, its import and the locks inside SQLite in use for ever.
_turn = threading.RLock()
os.register_at_fork(before=_turn.acquire, after_in_parent=_turn.release, after_in_child=_turn.release)


class UnknownRevisionError(ValueError):
    """A revision was asked for that this library does not have. The message names those it has."""


def upgrade(
    url: Url, revision: str = "head", progress: Progress | None = None, *, part: Part | None = None
) -> Revisions:
    """Bring a database to `revision` and return the revisions before and after; creates a SQLite file.

    It happens whole or not at all, and of several at once one does the work. At head, views and functions that are
    missing or differ are made anew. `progress` gets a line for each of them, and for each revision as it is applied.

    With `part` it ends elsewhere: "before" takes a database as far as this library needs and older ones go on, "after"
    the rest of the way, once workers of this library may run. Either changes nothing and raises SchemaMismatchError
    where it would stop workers.

    Raises SchemaMismatchError when the database is on a revision that this library does not know,
    StoreUnavailableError when it is out of reach, UnknownRevisionError.
    """
    _check_known(revision)
    target = _parsed(url)
    if part == "after" and _is_missing(target):
        raise StoreUnavailableError(missing(target))

    def run(command: Any, config: Config, found: Stored) -> None:
        if part is None:
            command.upgrade(config, revision)
            return
        refusal = revisions.refusal(found, target.display)
        if part == "after":
            if refusal:
                raise SchemaMismatchError(f"{refusal}; --after comes when workers of this release run on it")
            command.upgrade(config, HEAD)
        elif refusal:
            command.upgrade(config, OLDEST)
            _refuse_to_shut_out(found, revisions.stored(config.attributes["connection"]))

    return _run(target, run, progress)


def downgrade(url: Url, revision: str, progress: Progress | None = None) -> Revisions:
    """Take a database back to `revision` and return the revisions before and after. Errors as in `upgrade`.

    Rows that the older revision has no place for are lost: "base" drops every table of tokencustody. Raises
    SchemaMismatchError, and changes nothing, where the older revision would misread a row that stays.
    """
    _check_known(revision)
    target = _parsed(url)
    if _is_missing(target):
        raise StoreUnavailableError(missing(target))
    return _run(target, lambda command, config, _: command.downgrade(config, revision), progress)


def current(url: Url) -> str | None:
    """Return the revision a database is on, or None where nothing was migrated. Creates nothing.

    A SQLite file that does not exist is a StoreUnavailableError.
    """
    target = _parsed(url)
    if _is_missing(target):
        raise StoreUnavailableError(missing(target))
    return _connected(target, revisions.stored, writes=False).revision


def standing(url: Url) -> Standing:
    """Return where a database stands to this library. Creates nothing; errors as in `current`."""
    target = _parsed(url)
    if _is_missing(target):
        raise StoreUnavailableError(missing(target))
    return revisions.standing(_connected(target, revisions.stored, writes=False), target.display)


def check(url: Url) -> list[str]:
    """Return everything in which a database differs from this library, empty when it is at head and equal.

    Compares the revision, the wire schemas, each column, constraint and index of the tables, and the text of the views
    and functions; what else is in the database is not looked at. Creates nothing.
    """
    target = _parsed(url)
    return (
        ["the file does not exist"]
        if _is_missing(target)
        else _connected(target, lambda connection: _problems(connection, target.display), writes=False)
    )


def sql(url_or_dialect: Url, revision: str = "base:head") -> str:
    """Return the SQL that takes a database from one revision to another, without connecting to any.

    `url_or_dialect` is a URL or one of "sqlite" and "postgresql"; `revision` is "from:to", older first.
    Raises UnknownRevisionError.
    """
    older, _, newer = revision.partition(":")
    _check_known(older)
    _check_known(newer)
    dialect = (
        url_or_dialect if url_or_dialect in ("sqlite", "postgresql") else _parsed(url_or_dialect).dialect
    )
    buffer = io.StringIO()
    with _turn:
        from alembic import command

        config = configuration(output_buffer=buffer)
        config.attributes["dialect"] = dialect
        command.upgrade(config, revision, sql=True)
    return buffer.getvalue()


def require_current(url: Url) -> None:
    """Raise SchemaMismatchError, with what to do, unless this library works with a database. Creates nothing.

    A SQLite file that does not exist is a StoreUnavailableError.
    """
    target = _parsed(url)
    if _is_missing(target):
        raise StoreUnavailableError(missing(target))
    _connected(target, lambda connection: revisions.ensure_current(connection, target.display), writes=False)


async def is_new_sqlite(url: DatabaseUrl, *, read_only: bool = False) -> bool:
    """Return whether a SQLite file does not exist, is empty or holds no table yet. Creates nothing."""

    def has_no_table(connection: Connection) -> bool:
        return connection.scalar(text("SELECT 1 FROM sqlite_master")) is None

    return await sqlite.in_thread(
        lambda: _is_missing(url) or _soon_on_sqlite(url, has_no_table, writes=False, read_only=read_only)
    )


async def create_sqlite(url: DatabaseUrl) -> None:
    """Create a SQLite file, mode 0600, or give an empty one its tables. Any number of processes may do so at once.

    The driver's errors pass through, for the caller to try again. It is over when this returns or raises.
    """
    await sqlite.in_thread(
        lambda: _run(
            url,
            lambda command, config, _: command.upgrade(config, "head"),
            transact=partial(_soon_on_sqlite, writes=True),
        )
    )


def in_transaction(url: DatabaseUrl, work: Callable[[Connection], Result]) -> Result:
    """Run `work` in the one transaction in which a database may be migrated, and commit.

    Blocks, also when an event loop is running in this thread. Raises StoreUnavailableError.
    """
    return _connected(url, work, writes=True)


def _run(
    url: DatabaseUrl,
    run: Callable[[Any, Config, Stored], None],
    progress: Progress | None = None,
    *,
    transact: Callable[[DatabaseUrl, Work], Revisions] = in_transaction,
) -> Revisions:
    def work(connection: Connection) -> Revisions:
        from alembic import command

        before = revisions.stored(connection)
        if before.revision not in (None, *REVISIONS):
            raise SchemaMismatchError(revisions.unknown(before, url.display))
        if before.revision is None:
            catalogue.refuse_strangers(connection, tables.metadata, url.display)
        config = configuration()
        config.attributes["connection"] = connection
        if progress is not None:
            config.attributes["on_version_apply"] = lambda *, step, **_: progress(
                f"{'applied' if step.is_upgrade else 'undid'} {step.up_revision_id}"
            )
        try:
            run(command, config, before)
        except SchemaMismatchError as exc:
            raise SchemaMismatchError(
                f"{exc}; nothing was changed, {url.display} is on revision {before.revision} as before"
            ) from None
        after = revisions.stored(connection).revision
        if after is None:
            # Alembic leaves its own table behind, empty.
            connection.execute(text("DROP TABLE IF EXISTS alembic_version"))
        if after == HEAD:
            for line in catalogue.make_anew(connection, tables.metadata, url.display):
                if progress is not None:
                    progress(f"made anew: {line}")
        return before.revision, after

    with _turn:
        return transact(url, work)


def _connected(url: DatabaseUrl, work: Callable[[Connection], Result], *, writes: bool) -> Result:
    try:
        with waiting(url) as wait:
            if url.is_sqlite:
                return _on_sqlite(url, wait.until(work), writes=writes, read_only=not writes)
            return _blocking(_on_postgresql(url, wait.until(work), writes=writes))
    except Exception as exc:
        if classify(exc) is not None:
            raise unavailable(url, exc) from exc
        damaged = None if writes else damage(url, exc)
        if damaged is not None:
            raise damaged from exc
        raise


def _on_sqlite(
    url: DatabaseUrl,
    work: Callable[[Connection], Result],
    *,
    writes: bool,
    timeout: float = engine.DEFAULT_DEADLINE,
    read_only: bool = False,
) -> Result:
    with _turn:
        sqlite_files.refuse_no_file(url)
        if writes:
            sqlite_files.create_file(url)
        # Not the store's engine: that one sets the journal mode, and may find itself in someone else's file.
        begin = "BEGIN IMMEDIATE" if writes else "BEGIN"
        database = sqlite.file_engine(url, timeout, begin=begin, read_only=read_only, poolclass=NullPool)
        with database.begin() as connection:
            return work(connection)


_soon_on_sqlite = partial(_on_sqlite, timeout=sqlite.LONGEST_BUSY_WAIT)


async def _on_postgresql(url: DatabaseUrl, work: Callable[[Connection], Result], *, writes: bool) -> Result:
    from tokencustody.database import postgresql

    database = postgresql.migration_engine(url)
    try:
        async with database.connect() as connection:
            # A serializable snapshot would be older than the lock and show the revision of before.
            await connection.execution_options(
                isolation_level="READ COMMITTED", postgresql_readonly=not writes
            )
            async with connection.begin():
                if writes:
                    await connection.execute(select(func.pg_advisory_xact_lock(LOCK_KEY)))
                return await connection.run_sync(work)
    finally:
        await database.dispose()


def _blocking(work: Coroutine[Any, Any, Result]) -> Result:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def _refuse_to_shut_out(before: Stored, after: Stored) -> None:
    """Raise SchemaMismatchError if libraries that work with a database as it was would not as it is now."""
    versions = before.wire_schemas or {}
    if before.revision is not None and (TABLES not in versions or versions != after.wire_schemas):
        raise SchemaMismatchError(
            f"this library works with {OLDEST} and later, libraries that work with {before.revision} do not: end "
            "their workers and upgrade without --before, or upgrade with the releases between, one after the other"
        )


def _check_known(revision: str) -> None:
    if revision not in (*REVISIONS, "base", "head"):
        raise UnknownRevisionError(
            f"revision {revision!r} is unknown; this library knows base, {', '.join(REVISIONS)} and head"
        )


def _parsed(url: Url) -> DatabaseUrl:
    return url if isinstance(url, DatabaseUrl) else parse_url(url)


def _is_missing(url: DatabaseUrl) -> bool:
    if not url.is_sqlite:
        return False
    sqlite_files.refuse_no_file(url)
    try:
        return not Path(url.dsn).exists()
    except OSError as exc:
        raise StoreUnavailableError(f"{url.display} is not available: {exc.strerror}") from exc


def _problems(connection: Connection, shown: str) -> list[str]:
    found = revisions.stored(connection)
    if found.revision != HEAD:
        lines = revisions.standing(found, shown).lines(shown)
        return [f"revision: {found.revision or 'none'} instead of {HEAD}", *lines]
    versions = found.wire_schemas or {}
    problems = [
        f"wire schema {name}: {versions.get(name, 'missing')} instead of {WIRE_SCHEMAS.get(name, 'none')}"
        for name in sorted(WIRE_SCHEMAS.keys() | versions.keys())
        if versions.get(name) != WIRE_SCHEMAS.get(name)
    ]
    return problems + catalogue.differences(connection, tables.metadata)
