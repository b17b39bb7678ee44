"""Putting into a database that already holds many calls, beside an empty one."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import ExitStack, closing
from itertools import count

import asyncpg
from sqlalchemy import Table

from benchmarks.calls import CALLS, independent_rollouts, rollout_name
from benchmarks.stores import DATABASES, POSTGRESQL, RUN, WARM_UP, opened, sqlite_path
from benchmarks.timing import Stopwatch, settle, write_all
from benchmarks.workload import Bench, Workload
from tokencustody import TokenEntry
from tokencustody.sql.tables import entries, fences, snapshot_versions

_WRITERS = 16


class Growth(Workload):
    """Sixteen writers put calls of 2,000 and 500 tokens into an empty database and into one of `held` small calls,
    among whose rollouts the new ones lie."""

    name = "growth"
    stores = DATABASES

    def __init__(self, *, held: int, rollouts: int, rounds: int) -> None:
        self.rounds = rounds
        self.held = held
        self._count = rollouts
        self._stack = ExitStack()
        self._full: dict[str, str] = {}
        self._rollouts: list[list[TokenEntry]] = []
        self._numbers = count(held // CALLS)

    def prepare(self, bench: Bench) -> None:
        bench.results.note(
            f"growth: the full database holds {self.held:,} calls in {self.held // CALLS:,} rollouts"
        )
        self._rollouts = independent_rollouts(self._count, 2_000, 500)
        for store in self.stores:
            self._full[store] = self._stack.enter_context(bench.arena.fresh(store))
            asyncio.run(self._fill(bench, store))

    def measure(self, bench: Bench, store: str, turn: int) -> None:
        # Names that neither database has; the same for both.
        names = [rollout_name(next(self._numbers)) for _ in self._rollouts]
        for full in (False, True) if turn % 2 == 0 else (True, False):
            if full:
                bench.results.add(
                    self.name, store, full_rate=asyncio.run(self._put(bench, store, self._full[store], names))
                )
            else:
                with bench.arena.fresh(store) as place:
                    rate = asyncio.run(self._put(bench, store, place, names))
                bench.results.add(self.name, store, empty_rate=rate)

    def finish(self) -> None:
        self._stack.close()
        self._rollouts = []

    async def _put(self, bench: Bench, store: str, place: str, names: list[str]) -> float:
        rollouts = [
            [entry.model_copy(update={"rollout_id": name}) for entry in calls]
            for name, calls in zip(names, self._rollouts, strict=True)
        ]
        async with opened(store, place, bench.arena.options) as capture:
            settle()
            with Stopwatch() as watch:
                await write_all(rollouts, _WRITERS, capture.sink.put)
        return CALLS * len(rollouts) / watch.seconds

    async def _fill(self, bench: Bench, store: str) -> None:
        url = self._full[store]
        # What the warm-up writes is the pattern of each row, whatever columns there are.
        async with opened(store, url, bench.arena.options):
            pass
        if store != POSTGRESQL:
            await asyncio.to_thread(_fill_sqlite, url, self.held // CALLS)
            return
        connection = await asyncpg.connect(url)
        try:
            await connection.execute("SET session_replication_role = replica")  # the fences are right
            for table, calls in _TABLES:
                await connection.execute(_copies(store, table, self.held // CALLS, calls))
            await connection.execute("VACUUM (ANALYZE)")
            await connection.execute("CHECKPOINT")
        finally:
            await connection.close()


_TABLES: list[tuple[Table, int | None]] = [(fences, None), (snapshot_versions, None), (entries, CALLS)]


def _fill_sqlite(url: str, rollouts: int) -> None:
    with closing(sqlite3.connect(sqlite_path(url), isolation_level=None)) as connection:
        connection.execute("PRAGMA cache_size = -500000")
        for table, calls in _TABLES:
            connection.execute(_copies("", table, rollouts, calls))
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _copies(store: str, table: Table, rollouts: int, calls: int | None) -> str:
    """Return the statement that copies the pattern's row of `table` to `rollouts` rollouts of `calls` calls."""
    hashed = "(rollout * 2654435761) % 4294967296"
    if store == POSTGRESQL:
        name = f"lpad(to_hex({hashed}), 8, '0')"
        series = "generate_series(0::bigint, {last}) AS {name} ({name})"
        id_of_call = "'call-' || lpad(call::text, 3, '0')"
    else:
        name = f"printf('%08x', {hashed})"
        series = (
            "(WITH RECURSIVE n (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM n WHERE n < {last}) "
            "SELECT n AS {name} FROM n)"
        )
        id_of_call = "printf('call-%03d', call)"
    replaced = {"rollout_id": name}
    source = series.format(last=rollouts - 1, name="rollout")
    if calls is not None:
        replaced["model_call_id"] = id_of_call
        source += " CROSS JOIN " + series.format(last=calls - 1, name="call")
    columns = table.c.keys()
    values = ", ".join(replaced.get(column, f"pattern.{column}") for column in columns)
    pattern = f"(SELECT * FROM {table.name} WHERE run = '{RUN}' AND rollout_id LIKE '{WARM_UP}%' LIMIT 1) AS pattern"
    # By name, as the tree of the primary key is filled fastest.
    return (
        f"INSERT INTO {table.name} ({', '.join(columns)}) SELECT {values} FROM {pattern} CROSS JOIN {source} "
        f"ORDER BY {name}"
    )
