"""What stands before the work of a command: the database can be reached, and what a person named is in it."""

from __future__ import annotations

import os
from functools import partial

from sqlalchemy import Connection, exists, func, or_, select, true

from tokencustody.database.transactions import Database
from tokencustody.database.url import parse_url
from tokencustody.errors import RolloutNotFoundError
from tokencustody.schema.opening import CaptureDatabase
from tokencustody.schema.tables import fences, staged_calls
from tokencustody.txn.selection import RolloutFilter

# Seconds that a person waits for a database that does not answer.
REACH_DEADLINE = 10.0
DEFAULT_RUN = "default"
_RUNS_SHOWN = 10
_HOLDERS = (fences, staged_calls)


async def reach(
    url: str | os.PathLike[str], *, deadline: float | None = None, read_only: bool = True
) -> None:
    """Find the database there and on a revision that works, within ten seconds unless `deadline` says otherwise.

    Unless `read_only`, a SQLite file that does not exist is made. Raises StoreUnavailableError, SchemaMismatchError.
    """
    database = CaptureDatabase(
        parse_url(url), deadline=deadline or REACH_DEADLINE, pool_size=1, read_only=read_only
    )
    try:
        await database.read(lambda _: None)
    finally:
        await database.close()


async def check_asked(database: Database, wanted: RolloutFilter) -> None:
    """Raise RolloutNotFoundError for a run that is not there, or a prefix with which no rollout of it begins.

    A name that was mistyped would otherwise look like one with which there is nothing to do.
    """
    if missing := await database.read(partial(missing_txn, wanted=wanted, address=database.url.display)):
        raise RolloutNotFoundError(missing)


async def run_to_serve(url: str | os.PathLike[str], run: str | None, *, deadline: float) -> tuple[str, str]:
    """Return the run that a server of one run is for, and what a person should know of it, or nothing.

    Without a name it is `default`, if the database has no other run. One that is not there yet may come; a SQLite file
    that does not exist is not made. Raises RolloutNotFoundError where a name is needed, and what `reach` raises.
    """
    database = CaptureDatabase(parse_url(url), deadline=deadline, pool_size=1, creates=False)
    try:
        runs = await database.read(runs_txn)
        if run is None:
            if set(runs) - {DEFAULT_RUN}:
                raise RolloutNotFoundError(
                    f"{database.url.display} has the runs {_listed(runs)}: name the one to serve with --run"
                )
            return DEFAULT_RUN, ""
        missing = await database.read(
            partial(missing_txn, wanted=RolloutFilter(run=run), address=database.url.display)
        )
        return run, f"{missing}; it is served once something is written to it" if missing and runs else ""
    finally:
        await database.close()


def missing_txn(connection: Connection, wanted: RolloutFilter, address: str) -> str:
    """Return what `check_asked` says of the database with this address for people, or nothing.

    A run is there that has a rollout or a staged call; of one that is not, it lists those that are.
    """
    held = or_(*(exists().where(table.c.run == wanted.run) for table in _HOLDERS))
    if wanted.run is not None and not connection.scalar(select(held)):
        runs = runs_txn(connection)
        has = f"the runs {_listed(runs)}" if runs else "no run at all"
        return f"there is no run {wanted.run} in {address}, which has {has}"
    if wanted.prefix is None:
        return ""
    for table in _HOLDERS:
        found = select(table.c.run).where(
            func.substr(table.c.rollout_id, 1, len(wanted.prefix)) == wanted.prefix,
            true() if wanted.run is None else table.c.run == wanted.run,
        )
        if connection.execute(found.limit(1)).first() is not None:
            return ""
    where = address if wanted.run is None else f"run {wanted.run} of {address}"
    return f"no rollout of {where} has an id that begins with {wanted.prefix}"


def _listed(runs: list[str]) -> str:
    return ", ".join(runs[:_RUNS_SHOWN]) + (", …" if len(runs) > _RUNS_SHOWN else "")


def runs_txn(connection: Connection) -> list[str]:
    """Return the first runs by name, one more than are shown, each by a look into an index: there may be many rows."""
    runs: set[str] = set()
    for table in _HOLDERS:
        after: str | None = None
        for _ in range(_RUNS_SHOWN + 1):
            least = select(func.min(table.c.run))
            after = connection.scalar(least if after is None else least.where(table.c.run > after))
            if after is None:
                break
            runs.add(after)
    return sorted(runs)[: _RUNS_SHOWN + 1]
