"""The source of a trainer: rollouts frozen and read as arrays, several at a time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from tokencustody.chains.reading import RolloutRows, making_sense, rollout_txn
from tokencustody.chains.reasons import LeftOut, Why, why_not
from tokencustody.chains.rules import RowRules
from tokencustody.database.engine import forget_error
from tokencustody.database.portal import BackgroundLoop
from tokencustody.errors import InvalidRecordError, TokenCaptureRetiredError
from tokencustody.ids import check_rollout_id
from tokencustody.store.source import SqlTokenSource
from tokencustody.training.rows import TrainingRollout, require_numpy
from tokencustody.txn.fence import RolloutKey
from tokencustody.txn.reading import all_links_txn

DEFAULT_JOBS = 4


class TrainingSource(SqlTokenSource):
    """A `SqlTokenSource` that also reads rollouts as rows of arrays."""

    def read(
        self,
        rollout_ids: Iterable[str],
        *,
        rules: RowRules | None = None,
        ordered: bool = True,
        jobs: int = DEFAULT_JOBS,
    ) -> AsyncGenerator[TrainingRollout, None]:
        """Freeze each rollout, as `freeze` does, and yield its rows: those that an export writes to Parquet by `rules`.

        `jobs` rollouts are read at a time, and no more of them are held, however many there are: an id is taken when
        there is room for its rollout. They come in the order of their ids or, unless `ordered`, as they are ready.

        A rollout that is incomplete, retired or removed meanwhile has no rows, and says why in `left_out`; an id that
        nobody wrote is fenced, as by `freeze`, and has no calls. Every call is proven by its hashes, and the rollout by
        its seal; for no token is a Python number made, but where workers staged them, for digests of each.

        Raises ImportError that names the extra where NumPy is not installed, and InvalidRecordError for `jobs` below 1,
        for a single id in place of several and for `rules` of another type. What ends the reading is an id that no
        rollout can have (InvalidRecordError) and what `freeze` raises, but for a retired rollout: CorruptEntryError
        names the rollout.
        """
        require_numpy()
        if type(jobs) is not int or jobs < 1:
            raise InvalidRecordError(f"jobs must be an integer of at least 1, not {jobs!r}")
        if isinstance(rollout_ids, str):
            raise InvalidRecordError(
                "rollout_ids must be several ids, not one text: its letters would be fenced"
            )
        if rules is not None and not isinstance(rules, RowRules):
            raise InvalidRecordError(f"rules must be RowRules, not {type(rules).__name__}")
        keys = (RolloutKey(self.run, check_rollout_id(each)) for each in rollout_ids)
        return self._rollouts(keys, rules or RowRules(), ordered, jobs)

    async def _rollouts(
        self, keys: Iterator[RolloutKey], rules: RowRules, ordered: bool, jobs: int
    ) -> AsyncGenerator[TrainingRollout, None]:
        # In the order in which they were begun.
        reading: dict[asyncio.Task[TrainingRollout], None] = {}
        try:
            while True:
                for key in islice(keys, jobs - len(reading)):
                    reading[asyncio.create_task(self._read(key, rules))] = None
                if not reading:
                    return
                first = next(iter(reading))
                done, _ = await asyncio.wait(
                    [first] if ordered else reading, return_when=asyncio.FIRST_COMPLETED
                )
                ready = next(task for task in reading if task in done)
                del reading[ready]
                yield ready.result()
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    async def _read(self, key: RolloutKey, rules: RowRules) -> TrainingRollout:
        try:
            # Without payloads, so that neither a lock nor SQLite's writer waits for them.
            await self._raise_fence(key, all_links_txn)
        except TokenCaptureRetiredError:
            return _left_out(key, Why.RETIRED, None)
        rows = await self._database.read(partial(rollout_txn, key=key, include_incomplete=False))
        # Since the fence was raised it may have been marked, retired or deleted.
        why = Why.UNKNOWN if rows is None else why_not(rows.state, rows.incomplete)
        if rows is None or why is not None:
            return _left_out(key, why or Why.UNKNOWN, rows)
        making = asyncio.create_task(asyncio.to_thread(_made, rows, rules))
        making.add_done_callback(forget_error)
        try:
            return await asyncio.shield(making)
        finally:
            # Also when it is cancelled: no thread is left behind.
            await asyncio.wait([making])


def read_rollouts(
    url: str | os.PathLike[str],
    rollout_ids: Iterable[str],
    *,
    rules: RowRules | None = None,
    ordered: bool = True,
    jobs: int = DEFAULT_JOBS,
    **options: Any,
) -> Iterator[TrainingRollout]:
    """Yield what `TrainingSource(url, **options).read` does, to synchronous code in any thread.

    The ids are taken in a thread of its own, while the caller is at work. What it opened is closed when it ends or is
    closed itself. Raises, when it is first asked, what that does.
    """
    source = TrainingSource(url, **options)
    found = source.read(rollout_ids, rules=rules, ordered=ordered, jobs=jobs)

    async def end() -> None:
        await found.aclose()
        await source.close()

    loop = BackgroundLoop(f"the reading of {source!r}", end)
    try:
        while True:
            rollout = loop.run(partial(_next, found))
            if rollout is None:
                return
            yield rollout
    finally:
        loop.close()


async def _next(found: AsyncGenerator[TrainingRollout, None]) -> TrainingRollout | None:
    return await anext(found, None)


def _made(rows: RolloutRows, rules: RowRules) -> TrainingRollout:
    with making_sense(rows.key):
        rollout = rows.unpack()
    return TrainingRollout.of(rollout, rules)


def _left_out(key: RolloutKey, why: Why, rows: RolloutRows | None) -> TrainingRollout:
    snapshot_id, version = ("", 0) if rows is None else (rows.snapshot_id, rows.version)
    return TrainingRollout(key.rollout_id, snapshot_id, version, (), (LeftOut.of(key, why),))
