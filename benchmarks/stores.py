"""The stores that are compared, and fresh places for them."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import nemo_gym.token_id_capture as gym

from benchmarks.others import TABLE, JsonLines, create_plain_table, plain_table
from tests.support import databases
from tests.support.postgres import Server, fetch
from tokencustody import TokenEntry, open_store
from tokencustody.database.url import parse_url
from tokencustody.schema import migrate, tables

GYM, SQLITE, POSTGRESQL = "Gym files", "SQLite", "PostgreSQL"
DATABASES = (SQLITE, POSTGRESQL)
STORES = (GYM, *DATABASES)
# What people write instead: see others.py.
JSONL = "JSON lines"
PLAIN = {SQLITE: "SQLite, plain table", POSTGRESQL: "PostgreSQL, plain table"}
OTHERS = (JSONL, *PLAIN.values())
COMPARED = (*STORES, *OTHERS)
# The driver under each database, with nothing above it.
BARE = {SQLITE: "sqlite3", POSTGRESQL: "asyncpg"}
RUN = "bench"
WARM_UP = "warm-up"


@dataclass(frozen=True)
class Counters:
    """What a store of ours counted in this process."""

    transactions: int = 0
    retries: int = 0

    def __sub__(self, other: Counters) -> Counters:
        return Counters(self.transactions - other.transactions, self.retries - other.retries)


@dataclass(frozen=True)
class Capture:
    """An open store. `store` is ours as a whole, which others have none of; `lineage` is ours and Gym's."""

    sink: Any
    source: Any
    lineage: Any = None
    store: Any = None

    def counters(self) -> Counters:
        """Return what the store has counted; nothing for one that is not ours."""
        if self.store is None:
            return Counters()
        stats = self.store.stats()
        return Counters(stats["transactions"], stats["retries"])


@dataclass
class Arena:
    """Where the stores are measured: a folder, and databases made by one migration each.

    `options` go to every store of ours.
    """

    folder: Path
    server: Server
    options: Mapping[str, Any] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Arena:
        self._template_file = self.folder / "template.db"
        migrate.upgrade(str(self._template_file))
        self._template = databases.create(self.server, "bench")
        self._stack.callback(databases.drop, self.server, self._template)
        migrate.upgrade(self.server.url_of(self._template))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @contextmanager
    def fresh(self, store: str) -> Iterator[str]:
        """Yield a new place for a store: the URL of a database with its tables, or the path of an empty folder."""
        if store in (POSTGRESQL, PLAIN[POSTGRESQL]):
            with databases.fresh(self.server, self._template if store == POSTGRESQL else None) as url:
                if store != POSTGRESQL:
                    asyncio.run(create_plain_table(url))
                yield url
            return
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            if store in (GYM, JSONL):
                yield name
                return
            url = f"sqlite:///{name}/captures.db"
            if store == SQLITE:
                shutil.copy(self._template_file, sqlite_path(url))
            else:
                asyncio.run(create_plain_table(url))
            yield url

    @contextmanager
    def copied(self, store: str, place: str) -> Iterator[str]:
        """Yield a copy of one of our databases, which no store may have open."""
        if store == POSTGRESQL:
            with databases.fresh(self.server, urlsplit(place).path.removeprefix("/")) as url:
                yield url
            return
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            bytes_on_disk(store, place)  # nothing is left in the log
            shutil.copy(sqlite_path(place), Path(name) / "captures.db")
            yield f"sqlite:///{name}/captures.db"


@asynccontextmanager
async def opened(
    store: str, place: str, options: Mapping[str, Any], run: str = RUN
) -> AsyncIterator[Capture]:
    """Yield a store that has connected and written a rollout, so that only its daily work is left."""
    if store == GYM:
        files = gym.TokenCaptureStore(place)
        capture = Capture(files, files, gym.FileLineageStore(place))
        try:
            yield await _warmed(store, capture)
        finally:
            await capture.lineage.close()
            await files.close()
        return
    if store in OTHERS:
        other = JsonLines(place) if store == JSONL else plain_table(place)
        try:
            yield await _warmed(store, Capture(other, other))
        finally:
            await other.close()
        return
    async with open_store(place, run=run, **options) as ours:
        yield await _warmed(store, Capture(ours.sink, ours.source, ours.lineage, ours))


async def _warmed(store: str, capture: Capture) -> Capture:
    """Use each way once."""
    rollout_id = f"{WARM_UP}-{uuid4().hex}"
    entry = TokenEntry(
        rollout_id=rollout_id,
        model_call_id="call",
        prompt_token_ids=[1],
        generation_token_ids=[],
        generation_log_probs=[],
    )
    await capture.sink.put(native(store, entry))
    if capture.lineage is not None:
        await capture.lineage.resolve(rollout_id, [{"role": "assistant", "content": "nothing"}])
    await capture.source.freeze(rollout_id)
    return capture


def native(store: str, entry: TokenEntry) -> Any:
    """Return an entry in the store's own type."""
    if store != GYM:
        return entry
    resolution = entry.parent_resolution
    fields = dict(entry) | {"parent_resolution": None if resolution is None else str(resolution)}
    return gym.TokenEntry.model_validate(fields)


def bytes_on_disk(store: str, place: str) -> int:
    """Return what a store's place takes on disk, what an empty one takes included. No store may be open.

    Files: their sizes. SQLite: the size of the file after a checkpoint. PostgreSQL: the total relation size of the
    tables, indexes and out-of-line values.
    """
    if store in (GYM, JSONL):
        return sum(file.stat().st_size for file in Path(place).rglob("*") if file.is_file())
    if store in (POSTGRESQL, PLAIN[POSTGRESQL]):
        names = ", ".join(f"'{name}'" for name in (*tables.metadata.tables, TABLE))
        sizes = f"SELECT sum(pg_total_relation_size(to_regclass(name))) FROM unnest(ARRAY[{names}]) AS name"
        return int(fetch(place, sizes)[0][0] or 0)
    path = sqlite_path(place)
    _on_sqlite(path, "PRAGMA wal_checkpoint(TRUNCATE)")  # nothing is left in the log
    return path.stat().st_size


def payload_bytes(store: str, place: str) -> int:
    """Return the bytes of the payloads of every call in a database."""
    total = "SELECT coalesce(sum(length(payload)), 0) FROM entries"
    if store == POSTGRESQL:
        return int(fetch(place, total)[0][0])
    return int(_on_sqlite(sqlite_path(place), total))


def sqlite_path(url: str) -> Path:
    """Return the file of a SQLite URL."""
    return Path(parse_url(url).dsn)


def _on_sqlite(path: Path, statement: str) -> Any:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(statement).fetchone()[0]
