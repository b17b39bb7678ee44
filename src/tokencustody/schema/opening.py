"""A database whose tables are this library's: made where a SQLite file is new, refused where they are others."""

from __future__ import annotations

from tokencustody.database.engine import Engines
from tokencustody.database.remedies import missing
from tokencustody.database.transactions import Database
from tokencustody.errors import StoreUnavailableError
from tokencustody.schema import migrate, revisions
from tokencustody.schema.migrations import prepare


class CaptureDatabase(Database):
    """The way to a database of captures; the first call finds its tables there, on a revision that it works with."""

    def _make_ready(self) -> None:
        if self.url.is_sqlite and self._creates:
            prepare()

    async def _find_tables(self, engines: Engines) -> None:
        if self.url.is_sqlite and await migrate.is_new_sqlite(self.url, read_only=self._key.read_only):
            if not self._creates:
                raise StoreUnavailableError(missing(self.url))
            await migrate.create_sqlite(self.url)
        await engines.read(lambda connection: revisions.ensure_current(connection, self.url.display))
