"""Databases without any table, of both kinds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support import databases
from tests.support.postgres import Server


@pytest.fixture(params=["sqlite", "postgresql"])
def dialect(request: pytest.FixtureRequest) -> str:
    """The database that a test runs on; each runs on both."""
    name: str = request.param
    return name


@pytest.fixture
def new_database(dialect: str, tmp_path: Path, postgres: Server) -> Iterator[Callable[[], str]]:
    """A function that returns the URL of one more database without any table."""
    numbers = itertools.count(1)
    with ExitStack() as stack:

        def make() -> str:
            if dialect == "sqlite":
                return f"sqlite:///{tmp_path / f'database-{next(numbers)}.db'}"
            return stack.enter_context(databases.fresh(postgres))

        yield make


@pytest.fixture
def empty_url(new_database: Callable[[], str]) -> str:
    """The URL of a database without any table; the SQLite file does not exist yet."""
    return new_database()


@pytest.fixture
def migrated_url(dialect: str, request: pytest.FixtureRequest) -> str:
    """The URL of a database on the newest revision."""
    url: str = request.getfixturevalue("sqlite_url" if dialect == "sqlite" else "postgres_url")
    return url
