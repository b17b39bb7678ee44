"""Bringing the marks that wait on this host into their database: before what must not overtake them, and in the
background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from sqlalchemy import Connection

from tokencustody.errors import AccessDeniedError, StoreUnavailableError
from tokencustody.sql.engine import Result, Work
from tokencustody.sql.transactions import Database, Doors
from tokencustody.store.fence import RolloutKey
from tokencustody.store.spill import Mark, Spill

LOGGER = logging.getLogger(__name__)

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
_FIRST_CLAIM_PAUSE = 0.002
_LONGEST_CLAIM_PAUSE = 0.1


async def write_after_marks(
    doors: Doors, spill: Spill, key: RolloutKey, work: Work[Result], give_up: float
) -> Result:
    """Run `work` in one transaction after the marks of its rollout that wait.

    Raises StoreUnavailableError also when one of them cannot be read, or when somebody else still replays one when the
    loop's clock reads `give_up`.
    """
    with ExitStack() as claims:
        claimed: dict[Path, Mark] = {}
        for path in spill.waiting(key):
            try:
                mark = await _claim(spill, path, claims, give_up)
            except StoreUnavailableError:
                raise
            except OSError as exc:
                raise StoreUnavailableError(
                    f"a mark of rollout {key.rollout_id} of run {key.run} waits on this host and must come first, but "
                    f"cannot be read: {exc}"
                ) from exc
            if mark is not None:
                claimed[path] = mark
        stored: dict[Path, bool] = {}

        def store_marks_first(connection: Connection) -> Result:
            for path, mark in claimed.items():
                stored[path] = mark.settle_txn(connection)
            return work(connection)

        result = await doors.write(store_marks_first, rollout=key)
        for path, mark in claimed.items():
            _remove(doors, spill, path, mark, stored=stored[path])
        if claimed:
            await asyncio.to_thread(spill.sync, claimed)
        return result


async def replay(
    database: Database, spill: Spill, settled: Callable[[bool], None] = lambda stored: None
) -> None:
    """Bring every mark that waits into the database, in order, whatever its run. Raises as a write does.

    `settled` is called for each, with False when its rollout was retired meanwhile. A mark that the database's user may
    not make, as one of another worker's run, stays for another user; AccessDeniedError comes after all others.
    """
    denied: AccessDeniedError | None = None
    with database.doors() as doors:
        await doors.reached()
        waiting = spill.waiting()
        for path in waiting:
            with ExitStack() as claims:
                try:
                    mark = await _claim(spill, path, claims, database.end_of_patience())
                except StoreUnavailableError:
                    raise
                except OSError as exc:
                    LOGGER.error(
                        "a mark for %s waits on this host and cannot be read: %s", spill.address, exc
                    )
                    continue
                if mark is not None:
                    try:
                        stored = await doors.write(mark.settle_txn, rollout=mark.key)
                    except AccessDeniedError as exc:
                        denied = denied or exc
                        continue
                    _remove(doors, spill, path, mark, stored=stored)
                    settled(stored)
        await asyncio.to_thread(spill.sync, waiting)
    if denied is not None:
        raise denied


async def _claim(spill: Spill, path: Path, claims: ExitStack, give_up: float) -> Mark | None:
    pause = _FIRST_CLAIM_PAUSE
    while True:
        try:
            return spill.claim(path, claims)
        except BlockingIOError:
            if asyncio.get_running_loop().time() + pause >= give_up:
                raise StoreUnavailableError(
                    f"a mark for {spill.address} waits on this host, and its replay has not ended elsewhere: {path}"
                ) from None
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_CLAIM_PAUSE)


def _remove(doors: Doors, spill: Spill, path: Path, mark: Mark, *, stored: bool) -> None:
    # Nothing is awaited between the commit and this, where a cancellation would leave the file.
    spill.remove(path)
    if stored:
        doors.count("replayed_marks")
        LOGGER.info("%s, which waited on this host, is in the database", mark)
    else:
        LOGGER.warning("%s waited on this host until the rollout was retired: it is discarded", mark)


class Replayer:
    """Replays in the background what waits for a store's database, in each loop that uses the store.

    It tries again with growing pauses for as long as something waits and the store is open.
    """

    def __init__(self, database: Database, spill: Spill) -> None:
        self._database = database
        self.spill = spill
        # By process and loop; None where there was nothing to do yet.
        self._tasks: dict[tuple[int, asyncio.AbstractEventLoop], asyncio.Task[None] | None] = {}
        self._closed = False

    def look_once(self) -> None:
        """Start if something waits, at the first use of the store in this process and loop."""
        here = (os.getpid(), asyncio.get_running_loop())
        if here not in self._tasks:
            self._tasks = {at: task for at, task in self._tasks.items() if not at[1].is_closed()}
            self._tasks[here] = None
            try:
                if not self.spill.is_empty():
                    self.start()
            except OSError as exc:
                LOGGER.error(
                    "marks for %s may wait in %s, which cannot be read: %s",
                    self.spill.address,
                    self.spill.folder,
                    exc,
                )

    def start(self) -> None:
        """Start, unless it runs or the store is closed."""
        loop = asyncio.get_running_loop()
        task = self._tasks.get((os.getpid(), loop))
        if not self._closed and (task is None or task.done()):
            self._tasks[os.getpid(), loop] = loop.create_task(self._run(), name="tokencustody spill")

    async def stop(self) -> None:
        """Stop in every loop that runs. What waits still waits."""
        self._closed = True
        for (pid, loop), task in list(self._tasks.items()):
            if task is not None and pid == os.getpid() and loop.is_running():
                if loop is asyncio.get_running_loop():
                    await _end(task)
                else:
                    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_end(task), loop))

    def report(self) -> None:
        """Log what is left, if this replayer ever had something to do."""
        tasks, self._tasks = self._tasks, {}
        left = 0
        with contextlib.suppress(OSError):
            left = len(self.spill.waiting()) if any(tasks.values()) else 0
        if left:
            LOGGER.warning(
                "%d mark%s for %s still wait%s in %s: the next store on this host that uses the database replays "
                "them, or `tokencustody spill replay`",
                left,
                "" if left == 1 else "s",
                self.spill.address,
                "s" if left == 1 else "",
                self.spill.folder,
            )

    async def _run(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                await replay(self._database, self.spill)
                # Nothing is awaited between the last look and the end, so that no mark comes in between.
                if not self.spill.waiting():
                    return
            except Exception as exc:
                LOGGER.log(
                    logging.WARNING if pause == _FIRST_PAUSE else logging.DEBUG,
                    "marks for %s wait in %s and will be tried again: %s: %s",
                    self.spill.address,
                    self.spill.folder,
                    type(exc).__name__,
                    exc,
                )
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311 - jitter, not a secret
            pause = min(2 * pause, _LONGEST_PAUSE)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
