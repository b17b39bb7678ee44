"""A ready database that was filled once, for tests that each begin with a copy of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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


class Originals:
    """Ready databases, each of them filled when a test first asks for a copy of it."""

    def __init__(self, server: Server, template: str, file: Path, folder: Path) -> None:
        self._server, self._template, self._file, self._folder = server, template, file, folder
        self._filled: dict[tuple[str, str], str] = {}
        self._stack = ExitStack()

    @contextmanager
    def copy(self, dialect: str, name: str, fill: Callable[[str], object], to: Path) -> Iterator[str]:
        """Yield the URL of a copy of the database `name`; `to` is the folder for that of a SQLite file."""
        if (dialect, name) not in self._filled:
            self._filled[dialect, name] = self._fill(dialect, fill)
        original = self._filled[dialect, name]
        if dialect == "sqlite":
            yield f"sqlite:///{shutil.copy(original, to / 'captures.db')}"
        else:
            with databases.fresh(self._server, original) as url:
                yield url

    def _fill(self, dialect: str, fill: Callable[[str], object]) -> str:
        if dialect == "sqlite":
            return str(filled_file(self._folder / f"{len(self._filled)}.db", self._file, fill))
        return self._stack.enter_context(filled_template(self._server, self._template, fill))

    def close(self) -> None:
        """Drop them."""
        self._stack.close()
