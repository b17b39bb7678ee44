"""Which revisions there are, which of them this library works with, and where a database stands.

A library works with a range, so that workers of two releases may use one database while it is upgraded. The older end
is `OLDEST`. The newer end is the database's to tell: a revision that older libraries do not work with puts its number
into the row "tables" of `wire_schema`, and as with any wire schema a library refuses a number above its own.

Looking costs two SELECTs and imports no Alembic.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sqlalchemy import Connection, text

from tokencustody.codec.calls import SHARED_CODEC_VERSION
from tokencustody.codec.staged import STAGED_CODEC_VERSION
from tokencustody.errors import SchemaMismatchError
from tokencustody.fingerprint import FINGERPRINT_VERSION
from tokencustody.records import DIGEST_VERSION, SCHEMA_VERSION
from tokencustody.staging.digest import (
    EXTRAS_DIGEST_VERSION,
    STAGING_DIGEST_VERSION,
    STAGING_SCHEMA_VERSION,
)

# Every released revision, oldest first. Kept here so that opening a store does not import Alembic.
REVISIONS = (
    "0001_capture",
    "0002_staging",
    "0003_prefix_sharing",
    "0004_audit",
    "0005_late_ledger",
    "0006_tables_version",
)
HEAD = REVISIONS[-1]
# What comes up to this one is applied *before* the first worker of this release starts, and leaves `wire_schema` as it
# is, so that older ones go on. What comes behind it is applied *after* the last older one has ended, and shuts it out.
OLDEST = "0005_late_ledger"

TABLES = "tables"
WIRE_SCHEMAS = {
    "token_entry": SCHEMA_VERSION,
    "token_digest": DIGEST_VERSION,
    "fingerprint": FINGERPRINT_VERSION,
    "payload_codec": SHARED_CODEC_VERSION,
    "staging": STAGING_SCHEMA_VERSION,
    "staging_digest": STAGING_DIGEST_VERSION,
    "staging_extras_digest": EXTRAS_DIGEST_VERSION,
    "staged_payload_codec": STAGED_CODEC_VERSION,
    # The number of the newest revision that shuts out libraries which do not know it.
    TABLES: 6,
}


@dataclass(frozen=True)
class Stored:
    """What a database says of its schema. `revision` is None where nothing was migrated."""

    revision: str | None
    wire_schemas: dict[str, int] | None


@dataclass(frozen=True)
class Standing:
    """Where a database stands to this library: its revision, what it lacks before and after, and why it is refused."""

    revision: str | None
    before: tuple[str, ...]
    after: tuple[str, ...]
    refusal: str

    def lines(self, shown: str) -> list[str]:
        """Return what to say of another revision than the newest."""
        if self.revision in (None, HEAD):
            return []
        upgrade = f"`tokencustody db upgrade --url {shown}"
        lines = []
        if self.before:
            lines.append(
                f"to apply before workers of this release start, by {upgrade} --before`: {_named(self.before)}"
            )
        if self.after:
            lines.append(
                f"to apply after the last older worker has ended, by {upgrade} --after`: {_named(self.after)}"
            )
        return [*lines, self.refusal or "this library works with it meanwhile"]


def ensure_current(connection: Connection, shown: str) -> None:
    """Raise SchemaMismatchError, with what to do, unless this library works with the database.

    Two SELECTs inside the caller's transaction.
    """
    if problem := refusal(stored(connection), shown):
        raise SchemaMismatchError(problem)


def ensure_known(connection: Connection, shown: str) -> str:
    """Return the revision of a database that this library works with and knows all of. Raises SchemaMismatchError."""
    found = stored(connection)
    if problem := refusal(found, shown):
        raise SchemaMismatchError(problem)
    if found.revision is None or found.revision not in REVISIONS:
        raise SchemaMismatchError(unknown(found, shown))
    return found.revision


def refusal(found: Stored, shown: str) -> str:
    """Return why this library does not work with a database and what to do, or nothing where it does."""
    command = f"run `tokencustody db upgrade --url {shown}`"
    if found.revision is None:
        return f"{shown} has no tokencustody tables (this library is on revision {HEAD}): {command}"
    versions = found.wire_schemas or {}
    newer = [name for name, version in versions.items() if version > WIRE_SCHEMAS.get(name, 0)]
    if found.revision not in REVISIONS:
        is_later = re.fullmatch(r"\d{4}_\w+", found.revision) and found.revision > HEAD
        return "" if is_later and TABLES in versions and not newer else unknown(found, shown)
    if REVISIONS.index(found.revision) < REVISIONS.index(OLDEST):
        return (
            f"{shown} is on revision {found.revision}, this library on {HEAD}, which works with {OLDEST} and later: "
            f"{command}, with --before while older workers run"
        )
    for name in newer:
        return (
            f"{shown} holds wire schema {name} version {versions[name]}, newer than this library's "
            f"version {WIRE_SCHEMAS.get(name, 0)}: upgrade tokencustody"
        )
    return ""


def unknown(found: Stored, shown: str) -> str:
    """Return what to do about a revision that is none of this library's."""
    if found.wire_schemas is None:
        return (
            f"{shown} is on revision {found.revision} of another application (this library is on "
            f"{HEAD}): give tokencustody a database or a PostgreSQL schema of its own"
        )
    return (
        f"{shown} is on revision {found.revision}, which this library, on {HEAD}, does not know: "
        "upgrade tokencustody"
    )


def standing(found: Stored, shown: str) -> Standing:
    """Return where a database stands to this library; of a revision that it does not know nothing is missing."""
    old = REVISIONS.index(OLDEST) + 1
    if found.revision is None:
        first = 0
    elif found.revision in REVISIONS:
        first = REVISIONS.index(found.revision) + 1
    else:
        first = len(REVISIONS)
    return Standing(found.revision, REVISIONS[first:old], REVISIONS[max(first, old) :], refusal(found, shown))


def _named(names: tuple[str, ...]) -> str:
    return ", ".join(names)


def stored(connection: Connection) -> Stored:
    """Return what a database says of its schema."""
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
        return Stored(None, None)
    if "wire_schema" not in present:
        revisions = connection.scalars(text("SELECT version_num FROM alembic_version")).all()
        return Stored(", ".join(sorted(revisions)) or None, None)
    rows = connection.execute(
        text("SELECT version_num, name, version FROM alembic_version LEFT JOIN wire_schema ON true")
    ).all()
    return Stored(
        ", ".join(sorted({row.version_num for row in rows})) or None,
        {row.name: row.version for row in rows if row.name is not None},
    )
