"""A database whose tables are this library's: made where a SQLite file is new, refused where they are others."""

from __future__ import annotations

from pathlib import Path

from tokencustody.database.engine import Engines
from tokencustody.database.remedies import missing
from tokencustody.database.transactions import Database
from tokencustody.database.url import DatabaseUrl
from tokencustody.errors import StoreUnavailableError
from tokencustody.schema import migrate, revisions
from tokencustody.schema.migrations import prepare


class CaptureDatabase(Database):
    """The way to a database of captures; the first call finds its tables there, on a revision that it works with."""

    def _make_ready(self) -> None:
        if self.url.is_sqlite and self._creates and _is_new(self.url):
            prepare()

    async def _find_tables(self, engines: Engines) -> None:
        if self.url.is_sqlite and await migrate.is_new_sqlite(self.url, read_only=self._key.read_only):
            if not self._creates:
                raise StoreUnavailableError(missing(self.url))
            await migrate.create_sqlite(self.url)
        await engines.read(lambda connection: revisions.ensure_current(connection, self.url.display))


def _is_new(url: DatabaseUrl) -> bool:
    # One that holds something and yet no table imports later what makes the tables, while a fork waits for it.
    try:
        return not Path(url.dsn).stat().st_size
    except OSError:
        return True
