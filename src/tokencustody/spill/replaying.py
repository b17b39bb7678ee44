"""Bringing the marks that wait on this host into their database: before what must not overtake them, and in the
background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection

from tokencustody.database.engine import Result, Work
from tokencustody.database.transactions import Database, Doors
from tokencustody.errors import AccessDeniedError, DamagedMarkError, StoreUnavailableError
from tokencustody.spill.files import in_file_thread
from tokencustody.spill.marks import Claim, Spill
from tokencustody.txn.fence import RolloutKey

Done = TypeVar("Done")

LOGGER = logging.getLogger(__name__)

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
_FIRST_CLAIM_PAUSE = 0.002
_LONGEST_CLAIM_PAUSE = 0.1


async def write_after_marks(
    doors: Doors, replayer: Replayer, key: RolloutKey, work: Work[Result], give_up: float
) -> Result:
    """Run `work` in one transaction after the marks of its rollout that wait.

    Raises DamagedMarkError when one of them is damaged or cannot be read, StoreUnavailableError also when somebody else
    still replays one, or the folder does not answer, when the loop's clock reads `give_up`.
    """
    spill = replayer.spill
    waiting = await _look(doors, spill, key, give_up)
    if not waiting:
        return await doors.write(work, rollout=key)
    # It settles those that are left when `work` is refused, as by a fence.
    replayer.start()
    claims: list[Claim] = []
    are_stored = False
    try:
        for path in waiting:
            claim = await _claim_first(spill, path, key, give_up)
            if claim is not None:
                claims.append(claim)
                if claim.mark is None:
                    raise _damaged(key, claim.path)
        # What is gone may be in the database, or damaged and renamed.
        if len(claims) < len(waiting) and (
            damaged := await _in_thread(spill, lambda: spill.damaged(key), give_up)
        ):
            raise _damaged(key, damaged[0])
        stored: dict[Path, bool] = {}

        def store_marks_first(connection: Connection) -> Result:
            for claim in claims:
                if claim.mark is not None:
                    stored[claim.path] = claim.mark.settle_txn(connection)
            return work(connection)

        result = await doors.write(store_marks_first, rollout=key)
        # Nothing is awaited between the commit and this, where a cancellation would leave the files.
        are_stored = True
        await _finish(doors, spill, claims, stored, give_up)
        return result
    finally:
        if not are_stored:
            await _let_go(spill, claims, give_up)


async def _look(doors: Doors, spill: Spill, key: RolloutKey, give_up: float) -> list[Path]:
    """Return the files of the marks of a rollout that wait. Raises DamagedMarkError if one is damaged."""
    try:
        if await _in_thread(spill, spill.is_empty, give_up):
            return []
        # Only then is it known which marks, spilled under other addresses, are for this database.
        await doors.reached()
        # In this order: somebody else may find damage in between, and rename the file.
        waiting, damaged = await _in_thread(spill, lambda: (spill.waiting(key), spill.damaged(key)), give_up)
    except StoreUnavailableError:
        raise
    except OSError as exc:
        raise StoreUnavailableError(
            f"marks of rollout {key.rollout_id} of run {key.run} may wait in {spill.folder} and must come first, but "
            f"this user may not look: {exc.filename}: {exc.strerror}; mend that, let the user of that folder replay "
            "them, or open the store with another folder (the option spill), or with none"
        ) from exc
    if damaged:
        raise _damaged(key, damaged[0])
    return waiting


def _damaged(key: RolloutKey, path: Path) -> DamagedMarkError:
    return DamagedMarkError(
        f"a mark of rollout {key.rollout_id} of run {key.run} that waited on this host is damaged, so the rollout may "
        f"lack a call and is neither frozen nor let go: {how_to_decide(key, path)}"
    )


def how_to_decide(key: RolloutKey, path: Path) -> str:
    """Return the commands by which a person decides about a damaged file."""
    named = shlex.quote(str(path))
    return (
        f"`tokencustody spill mark {named} {key.rollout_id} --run {key.run} --url URL` marks it, "
        f"`tokencustody spill discard {named}` says that it need not be marked"
    )


async def _claim_first(spill: Spill, path: Path, key: RolloutKey, give_up: float) -> Claim | None:
    try:
        return await _claim(spill, path, give_up)
    except StoreUnavailableError:
        raise
    except OSError as exc:
        raise DamagedMarkError(
            f"a mark of rollout {key.rollout_id} of run {key.run} waits on this host and must come first, but "
            f"cannot be read: {exc}; mend that, or decide: {how_to_decide(key, path)}"
        ) from exc


async def replay(
    database: Database, spill: Spill, settled: Callable[[bool], None] = lambda stored: None
) -> None:
    """Bring every mark that waits into the database, in order, whatever its run. Raises as a write does.

    `settled` is called for each, with False when its rollout was retired meanwhile. A mark that the database's user may
    not make, as one of another worker's run, stays for another user; AccessDeniedError comes after all others. What is
    damaged or cannot be read stays too.
    """
    denied: AccessDeniedError | None = None
    with database.doors() as doors:
        await doors.reached()
        for path in await _in_thread(spill, spill.waiting, database.end_of_patience()):
            give_up = database.end_of_patience()
            try:
                claim = await _claim(spill, path, give_up)
            except StoreUnavailableError:
                raise
            except OSError as exc:
                LOGGER.error("a mark for %s waits on this host and cannot be read: %s", spill.address, exc)
                continue
            if claim is None:
                continue
            is_stored = False
            try:
                if claim.mark is not None:
                    stored = await doors.write(claim.mark.settle_txn, rollout=claim.mark.key)
                    is_stored = True
                    await _finish(doors, spill, [claim], {claim.path: stored}, give_up)
                    settled(stored)
            except AccessDeniedError as exc:
                denied = denied or exc
            finally:
                if not is_stored:
                    await _let_go(spill, [claim], give_up)
    if denied is not None:
        raise denied


async def _claim(spill: Spill, path: Path, give_up: float) -> Claim | None:
    pause = _FIRST_CLAIM_PAUSE
    while True:
        try:
            return await _in_thread(spill, lambda: spill.claim(path), give_up, _close)
        except BlockingIOError:
            if asyncio.get_running_loop().time() + pause >= give_up:
                raise StoreUnavailableError(
                    f"a mark for {spill.address} waits on this host, and its replay has not ended elsewhere: {path}"
                ) from None
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_CLAIM_PAUSE)


def _close(claim: Claim | None) -> None:
    if claim is not None:
        claim.close()


async def _finish(
    doors: Doors, spill: Spill, claims: Sequence[Claim], stored: Mapping[Path, bool], give_up: float
) -> None:
    for claim in claims:
        if stored[claim.path]:
            doors.count("replayed_marks")
            LOGGER.info("%s, which waited on this host, is in the database", claim.mark)
        else:
            LOGGER.warning(
                "%s waited on this host until the rollout was retired: it is discarded", claim.mark
            )
    # What is committed is so, also where the folder does not answer: then the files are replayed without effect.
    with contextlib.suppress(StoreUnavailableError):
        await _in_thread(spill, lambda: spill.finish(claims), give_up)


async def _let_go(spill: Spill, claims: Sequence[Claim], give_up: float) -> None:
    def close() -> None:
        for claim in claims:
            claim.close()

    if claims:
        with contextlib.suppress(StoreUnavailableError):
            await _in_thread(spill, close, give_up)


async def _in_thread(
    spill: Spill,
    work: Callable[[], Done],
    give_up: float,
    too_late: Callable[[Done], object] = lambda _: None,
) -> Done:
    try:
        return await in_file_thread(work, give_up, too_late)
    except TimeoutError:
        raise StoreUnavailableError(
            f"marks for {spill.address} may wait in {spill.folder}, which does not answer: mend its disk, or open the "
            "store with another folder (the option spill)"
        ) from None


class Replayer:
    """Replays in the background what waits for a store's database, in each loop that uses the store.

    It tries again with growing pauses for as long as something waits and the store is open.
    """

    def __init__(self, database: Database, spill: Spill) -> None:
        self._database = database
        self.spill = spill
        # By process and loop: first the look, then the replay if there is something.
        self._tasks: dict[tuple[int, asyncio.AbstractEventLoop], asyncio.Task[None]] = {}
        self._closed = False
        # How often there was something to do.
        self._asked = 0

    def look_once(self) -> None:
        """Start if something waits, at the first use of the store in this process and loop."""
        here = (os.getpid(), asyncio.get_running_loop())
        if here not in self._tasks:
            self._tasks = {at: task for at, task in self._tasks.items() if not at[1].is_closed()}
            self._tasks[here] = here[1].create_task(self._look(), name="tokencustody spill")

    async def _look(self) -> None:
        try:
            is_empty = await _in_thread(self.spill, self.spill.is_empty, self._database.end_of_patience())
        except OSError as exc:
            LOGGER.error(
                "marks for %s may wait in %s, which cannot be read: %s",
                self.spill.address,
                self.spill.folder,
                exc,
            )
            return
        if not is_empty:
            self._tasks.pop((os.getpid(), asyncio.get_running_loop()), None)
            self.start()

    def start(self) -> None:
        """Start, unless it runs or the store is closed."""
        loop = asyncio.get_running_loop()
        task = self._tasks.get((os.getpid(), loop))
        self._asked += 1
        if not self._closed and (task is None or task.done()):
            self._tasks[os.getpid(), loop] = loop.create_task(self._run(), name="tokencustody spill")

    async def stop(self) -> None:
        """Stop in every loop that runs. What waits still waits."""
        self._closed = True
        for (pid, loop), task in list(self._tasks.items()):
            if pid != os.getpid():
                continue
            if loop is asyncio.get_running_loop():
                await _end(task)
                continue
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(task.cancel)
            # A loop that stops meanwhile ends nothing, and tells nobody.
            while loop.is_running() and not task.done():  # noqa: ASYNC110 - it would set no event
                await asyncio.sleep(_FIRST_CLAIM_PAUSE)

    async def report(self) -> None:
        """Log what is left, if this replayer ever had something to do."""
        asked, self._asked = self._asked, 0
        left = 0
        if asked:
            with contextlib.suppress(OSError):
                give_up = self._database.end_of_patience()
                left = len(await _in_thread(self.spill, self.spill.waiting, give_up))
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
                asked = self._asked
                left = await _in_thread(self.spill, self.spill.waiting, self._database.end_of_patience())
                # Nothing is awaited between this and the end, so that no mark comes in between.
                if not left and asked == self._asked:
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
