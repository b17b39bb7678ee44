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


class Originals:
    """Databases that were each filled when a test first asked for one, by the function that filled them."""

    def __init__(self) -> None:
        self._templates: dict[Callable[[str], object], str] = {}
        self._files: dict[Callable[[str], object], Path] = {}
        self._stack = ExitStack()

    def template(self, server: Server, template: str, fill: Callable[[str], object]) -> str:
        """Return the name of a copy of the PostgreSQL database `template` that was filled."""
        if fill not in self._templates:
            self._templates[fill] = self._stack.enter_context(filled_template(server, template, fill))
        return self._templates[fill]

    def file(self, folder: Path, template: Path, fill: Callable[[str], object]) -> Path:
        """Return a copy of the SQLite file `template` that was filled; it lies in `folder`."""
        if fill not in self._files:
            file = Path(shutil.copy(template, folder / f"{len(self._files)}.db"))
            fill(f"sqlite:///{file}")
            self._files[fill] = file
        return self._files[fill]

    def close(self) -> None:
        """Drop those of the server."""
        self._stack.close()
