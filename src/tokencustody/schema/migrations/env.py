"""Runs the revisions online or offline, for `tokencustody.schema.migrate` and for Alembic's own command line.

From the command line the URL comes from `-x url=…` or the variable TOKENCUSTODY_URL.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from alembic import context

from tokencustody.database.url import parse_url
from tokencustody.schema import migrate, tables

if TYPE_CHECKING:
    from sqlalchemy import Connection

config = context.config


def configure(**target: Any) -> None:
    """Configure the context for a connection or, offline, for a dialect."""
    context.configure(
        target_metadata=tables.metadata,
        # SQLite's DDL is transactional too, once the driver leaves BEGIN and COMMIT to us.
        transactional_ddl=True,
        render_as_batch=True,
        on_version_apply=config.attributes.get("on_version_apply"),
        **target,
    )


def run_online(connection: Connection) -> None:
    """Run the revisions in the transaction that `connection` is in."""
    configure(connection=connection)
    context.run_migrations()


def run_offline(dialect: str) -> None:
    """Write the revisions as SQL text."""
    # Of the other styles of parameters, some double each percent sign.
    configure(dialect_name=dialect, literal_binds=True, dialect_opts={"paramstyle": "named"})
    with context.begin_transaction():
        context.run_migrations()


def given_url() -> str:
    """Return the URL from the command line or the environment."""
    url = context.get_x_argument(as_dictionary=True).get("url") or os.environ.get("TOKENCUSTODY_URL")
    if not url:
        raise SystemExit("no database: give `-x url=…` or set TOKENCUSTODY_URL")
    return url


if config.config_file_name is not None:
    from logging.config import fileConfig

    fileConfig(config.config_file_name, disable_existing_loggers=False)

if context.is_offline_mode():
    run_offline(config.attributes.get("dialect") or parse_url(given_url()).dialect)
elif "connection" in config.attributes:
    run_online(config.attributes["connection"])
else:
    migrate.in_transaction(parse_url(given_url()), run_online)
