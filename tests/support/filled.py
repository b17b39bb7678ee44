"""A ready database that was filled once, for tests that each begin with a copy of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import databases
from tests.support.postgres import Server


@contextmanager
def filled_template(server: Server, template: str | None, fill: Callable[[str], object]) -> Iterator[str]:
    """Yield the name of a copy of `template`, or of an empty database, that `fill` was given the URL of."""
    name = databases.create(server, "filled", template)
    try:
        fill(server.url_of(name))
        yield name
    finally:
        databases.drop(server, name)


def filled_file(file: Path, template: Path, fill: Callable[[str], object]) -> Path:
    """Return `file`, a copy of the SQLite file `template` that `fill` was given the URL of."""
    shutil.copy(template, file)
    fill(f"sqlite:///{file}")
    return file
