"""Compiled statements that the engines of a process share, whatever database they are of.

SQLAlchemy keeps what it compiled by the dialect object, and each engine has its own. Here those that compile alike are
equal, and their engines keep what they compiled in one place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy.dialects import registry
from sqlalchemy.dialects.postgresql.asyncpg import PGDialect_asyncpg
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.util import LRUCache

if TYPE_CHECKING:
    from sqlalchemy import Engine

_compiled: Any = LRUCache(5000)


class _Shared:
    """What makes a dialect equal to those that compile alike."""

    # Those of a statement hold for each dialect that is equal.
    supports_statement_cache = True

    def _like(self) -> tuple[object, ...]:
        # The version is known only after the first connection: what was compiled before that is no other's.
        dialect: Any = self
        version = getattr(dialect, "server_version_info", None)
        return (type(self), version or id(self), dialect.paramstyle, dialect.default_schema_name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shared) and self._like() == other._like()

    def __hash__(self) -> int:
        return hash(self._like())

    @classmethod
    def engine_created(cls, engine: Engine) -> None:
        engine.update_execution_options(compiled_cache=_compiled)


class Sqlite(_Shared, SQLiteDialect_pysqlite):
    """That of a SQLite file."""

    supports_statement_cache = True


class Postgresql(_Shared, PGDialect_asyncpg):
    """That of a PostgreSQL server."""

    supports_statement_cache = True


def share() -> None:
    """Let the engines that are made from now on share what they compile."""
    registry.register("sqlite", __name__, Sqlite.__name__)
    registry.register("postgresql.asyncpg", __name__, Postgresql.__name__)
