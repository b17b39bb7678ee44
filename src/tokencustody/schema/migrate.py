"""Revisions of the schema: which one a database is on, how it gets to another, what a store demands of it.

Opening a store costs two SELECTs and imports no Alembic. Migrations run in one transaction on both databases,
version stamp included, and one at a time: on PostgreSQL behind an advisory lock of the transaction, on SQLite
behind BEGIN IMMEDIATE, both taken before the current revision is read.
"""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Connection, func, select, text
from sqlalchemy.pool import NullPool

from tokencustody.codec.calls import SHARED_CODEC_VERSION
from tokencustody.codec.staged import STAGED_CODEC_VERSION
from tokencustody.database import engine, postgresql, sqlite
from tokencustody.database.faults import classify, damage, unavailable
from tokencustody.database.remedies import missing
from tokencustody.database.url import DatabaseUrl, parse_url
from tokencustody.errors import SchemaMismatchError, StoreUnavailableError
from tokencustody.fingerprint import FINGERPRINT_VERSION
from tokencustody.records import DIGEST_VERSION, SCHEMA_VERSION
from tokencustody.schema import catalogue, tables
from tokencustody.schema.migrations import configuration
from tokencustody.staging.digest import (
    EXTRAS_DIGEST_VERSION,
    STAGING_DIGEST_VERSION,
    STAGING_SCHEMA_VERSION,
)
from tokencustody.waits import waiting

if TYPE_CHECKING:
    from alembic.config import Config

Result = TypeVar("Result")
Url = str | os.PathLike[str] | DatabaseUrl
Progress = Callable[[str], None]
# Before and after.
Revisions = tuple[str | None, str | None]
Work = Callable[[Connection], Revisions]

# Every released revision, oldest first. Kept here so that opening a store does not import Alembic.
REVISIONS = ("0001_capture", "0002_staging", "0003_prefix_sharing", "0004_audit", "0005_late_ledger")
HEAD = REVISIONS[-1]

WIRE_SCHEMAS = {
    "token_entry": SCHEMA_VERSION,
    "token_digest": DIGEST_VERSION,
    "fingerprint": FINGERPRINT_VERSION,
    "payload_codec": SHARED_CODEC_VERSION,
    "staging": STAGING_SCHEMA_VERSION,
    "staging_digest": STAGING_DIGEST_VERSION,
    "staging_extras_digest": EXTRAS_DIGEST_VERSION,
    "staged_payload_codec": STAGED_CODEC_VERSION,
}

# The advisory lock of migrations: "custody" in ASCII, as a 64-bit integer.
LOCK_KEY = int.from_bytes(b"custody", "big")

# Alembic's `context` and `op` are global to the process, so its runs take turns, each in a thread of its own. A fork
# waits for its turn too: a child would find Alembic, its import and the locks inside SQLite in use for ever.
_turn = threading.RLock()
os.register_at_fork(before=_turn.acquire, after_in_parent=_turn.release, after_in_child=_turn.release)


class UnknownRevisionError(ValueError):
    """A revision was asked for that this library does not have. The message names those it has."""


@dataclass(frozen=True)
class _Stored:
    """What a database says of its schema. `revision` is None where nothing was migrated."""

    revision: str | None
    wire_schemas: dict[str, int] | None


def upgrade(url: Url, revision: str = "head", progress: Progress | None = None) -> Revisions:
    """Bring a database to `revision` and return the revisions before and after; creates a SQLite file.

    It happens whole or not at all, and of several at once one does the work. At head, views and functions that are
    missing or differ are made anew. `progress` gets a line for each of them, and for each revision as it is applied.
    Raises SchemaMismatchError when the database is on a revision that this library does not know,
    StoreUnavailableError when it is out of reach, UnknownRevisionError.
    """
    _check_known(revision)
    return _run(_parsed(url), lambda command, config: command.upgrade(config, revision), progress)


def downgrade(url: Url, revision: str, progress: Progress | None = None) -> Revisions:
    """Take a database back to `revision` and return the revisions before and after. Errors as in `upgrade`.

    Rows that the older revision has no place for are lost: "base" drops every table of tokencustody. Raises
    SchemaMismatchError, and changes nothing, where the older revision would misread a row that stays.
    """
    _check_known(revision)
    target = _parsed(url)
    if _is_missing(target):
        raise StoreUnavailableError(missing(target))
    return _run(target, lambda command, config: command.downgrade(config, revision), progress)


def current(url: Url) -> str | None:
    """Return the revision a database is on, or None where nothing was migrated. Creates nothing.

    A SQLite file that does not exist is a StoreUnavailableError.
    """
    target = _parsed(url)
    if _is_missing(target):
        raise StoreUnavailableError(missing(target))
    return _connected(target, _stored, writes=False).revision


def check(url: Url) -> list[str]:
    """Return everything in which a database differs from this library, empty when it is at head and equal.

    Compares the revision, the wire schemas, each column, constraint and index of the tables, and the text of the views
    and functions; what else is in the database is not looked at. Creates nothing.
    """
    target = _parsed(url)
    return ["the file does not exist"] if _is_missing(target) else _connected(target, _problems, writes=False)


def sql(url_or_dialect: Url, revisions: str = "base:head") -> str:
    """Return the SQL that takes a database from one revision to another, without connecting to any.

    `url_or_dialect` is a URL or one of "sqlite" and "postgresql"; `revisions` is "from:to", older first.
    Raises UnknownRevisionError.
    """
    older, _, newer = revisions.partition(":")
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
        command.upgrade(config, revisions, sql=True)
    return buffer.getvalue()


def require_head(url: Url) -> None:
    """Raise SchemaMismatchError, with the command to run, unless a database is on the newest revision. Creates nothing.

    A SQLite file that does not exist is a StoreUnavailableError.
    """
    target = _parsed(url)
    if _is_missing(target):
        raise StoreUnavailableError(missing(target))
    _connected(target, lambda connection: ensure_current(connection, target.display), writes=False)


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
            lambda command, config: command.upgrade(config, "head"),
            transact=partial(_soon_on_sqlite, writes=True),
        )
    )


def ensure_current(connection: Connection, display_url: str) -> None:
    """Raise SchemaMismatchError, with the command to run, unless the database fits this library.

    Two SELECTs inside the caller's transaction.
    """
    stored = _stored(connection)
    if problem := _revision_problem(stored, display_url):
        raise SchemaMismatchError(problem)
    for name, version in (stored.wire_schemas or {}).items():
        known = WIRE_SCHEMAS.get(name, 0)
        if version > known:
            raise SchemaMismatchError(
                f"{display_url} holds wire schema {name} version {version}, newer than this library's "
                f"version {known}: upgrade tokencustody"
            )


def in_transaction(url: DatabaseUrl, work: Callable[[Connection], Result]) -> Result:
    """Run `work` in the one transaction in which a database may be migrated, and commit.

    Blocks, also when an event loop is running in this thread. Raises StoreUnavailableError.
    """
    return _connected(url, work, writes=True)


def _run(
    url: DatabaseUrl,
    run: Callable[[Any, Config], None],
    progress: Progress | None = None,
    *,
    transact: Callable[[DatabaseUrl, Work], Revisions] = in_transaction,
) -> Revisions:
    def work(connection: Connection) -> Revisions:
        from alembic import command

        before = _stored(connection)
        if before.revision is not None and before.revision not in REVISIONS:
            raise SchemaMismatchError(_revision_problem(before, url.display))
        if before.revision is None:
            catalogue.refuse_strangers(connection, tables.metadata, url.display)
        config = configuration()
        config.attributes["connection"] = connection
        if progress is not None:
            config.attributes["on_version_apply"] = lambda *, step, **_: progress(
                f"{'applied' if step.is_upgrade else 'undid'} {step.up_revision_id}"
            )
        try:
            run(command, config)
        except SchemaMismatchError as exc:
            raise SchemaMismatchError(
                f"{exc}; nothing was changed, {url.display} is on revision {before.revision} as before"
            ) from None
        after = _stored(connection).revision
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
        sqlite.refuse_no_file(url)
        if writes:
            sqlite.create_file(url)
        # Not the store's engine: that one sets the journal mode, and may find itself in someone else's file.
        begin = "BEGIN IMMEDIATE" if writes else "BEGIN"
        database = sqlite.file_engine(url, timeout, begin=begin, read_only=read_only, poolclass=NullPool)
        with database.begin() as connection:
            return work(connection)


_soon_on_sqlite = partial(_on_sqlite, timeout=sqlite.LONGEST_BUSY_WAIT)


async def _on_postgresql(url: DatabaseUrl, work: Callable[[Connection], Result], *, writes: bool) -> Result:
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
    sqlite.refuse_no_file(url)
    try:
        return not Path(url.dsn).exists()
    except OSError as exc:
        raise StoreUnavailableError(f"{url.display} is not available: {exc.strerror}") from exc


def _stored(connection: Connection) -> _Stored:
    if connection.dialect.name == "sqlite":
        names = (
            "SELECT name FROM sqlite_master "
            "WHERE type = 'table' AND name IN ('alembic_version', 'wire_schema')"
        )
    else:
        names = (
            "SELECT name FROM (VALUES ('alembic_version'), ('wire_schema')) AS wanted (name) "
            "WHERE to_regclass(name) IS NOT NULL"
        )
    present = set(connection.scalars(text(names)))
    if "alembic_version" not in present:
        return _Stored(None, None)
    if "wire_schema" not in present:
        revisions = connection.scalars(text("SELECT version_num FROM alembic_version")).all()
        return _Stored(", ".join(sorted(revisions)) or None, None)
    rows = connection.execute(
        text("SELECT version_num, name, version FROM alembic_version LEFT JOIN wire_schema ON true")
    ).all()
    return _Stored(
        ", ".join(sorted({row.version_num for row in rows})) or None,
        {row.name: row.version for row in rows if row.name is not None},
    )


def _revision_problem(stored: _Stored, display_url: str) -> str:
    if stored.revision == HEAD:
        return ""
    command = f"run `tokencustody db upgrade --url {display_url}`"
    if stored.revision is None:
        return f"{display_url} has no tokencustody tables (this library is on revision {HEAD}): {command}"
    if stored.revision in REVISIONS:
        return f"{display_url} is on revision {stored.revision}, this library on {HEAD}: {command}"
    if stored.wire_schemas is None:
        return (
            f"{display_url} is on revision {stored.revision} of another application (this library is on "
            f"{HEAD}): give tokencustody a database or a PostgreSQL schema of its own"
        )
    return (
        f"{display_url} is on revision {stored.revision}, which this library, on {HEAD}, does not know: "
        "upgrade tokencustody"
    )


def _problems(connection: Connection) -> list[str]:
    stored = _stored(connection)
    if stored.revision != HEAD:
        return [f"revision: {stored.revision or 'none'} instead of {HEAD}"]
    versions = stored.wire_schemas or {}
    problems = [
        f"wire schema {name}: {versions.get(name, 'missing')} instead of {WIRE_SCHEMAS.get(name, 'none')}"
        for name in sorted(WIRE_SCHEMAS.keys() | versions.keys())
        if versions.get(name) != WIRE_SCHEMAS.get(name)
    ]
    return problems + catalogue.differences(connection, tables.metadata)
