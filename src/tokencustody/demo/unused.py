"""The first look at the database: can it be used, and is the run new?"""

from __future__ import annotations

import contextlib

from tokencustody.errors import RolloutRetiredError
from tokencustody.overview.reading import RolloutReader
from tokencustody.store import SqlLineageStore
from tokencustody.txn.selection import RolloutFilter

DEADLINE = 10.0


class RunTakenError(ValueError):
    """The run already has rollouts."""

    def __init__(self, run: str) -> None:
        super().__init__(f"run {run} already has rollouts; name another --run")


async def check_unused(url: str, run: str) -> None:
    """Make a new SQLite file, and raise RunTakenError if `run` has rollouts, or a store's errors if there is no store.

    To be asked before anything is started that takes long.
    """
    async with (
        SqlLineageStore(url, run=run, deadline=DEADLINE) as ledger,
        RolloutReader(url, deadline=DEADLINE) as reader,
    ):
        with contextlib.suppress(RolloutRetiredError):
            await ledger.has_rows("rollout-000")
        page = await reader.rollouts(RolloutFilter(run=run), limit=1)
    if page.rollouts:
        raise RunTakenError(run)
