"""Marks that wait on this host until their database can be reached.

Each mark that `mark_incomplete` could not bring into the database is a file of its own:

    SPILL/DATABASE/TIME-ROLLOUT-EVENT.mark1

DATABASE is the beginning of the SHA-256 of the database's address, ROLLOUT that of its run and rollout id, TIME is when
the mark was made and EVENT its event id, so that the names sort in the order of the marks. The address has neither user
nor password: every store of this host on the database finds the file, whoever it connects as. The file is one line of
JSON with the mark, the address, and the SHA-256 of the line without that hash. It is written under a temporary name,
synced and renamed, and then its folder is synced.

A mark is removed when the transaction that holds it has committed, never before. Its event id makes it a no-op there
when it was stored before, so any number of processes may replay a folder at once and die while they do. A file that is
not what was written is renamed to `….corrupt`, and does not hinder the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from tokencustody.errors import StoreUnavailableError, TokenCaptureRetiredError
from tokencustody.sql.engine import Result, Work
from tokencustody.sql.tables import FailureKind, VersionEvent
from tokencustody.sql.transactions import Database, Doors
from tokencustody.sql.url import DatabaseUrl
from tokencustody.store.fence import (
    RolloutKey,
    Stamp,
    fail_txn,
    happened_txn,
    lock_fence_txn,
    refuse_if_retired,
)
from tokencustody.store.ids import check_call_id, check_rollout_id

LOGGER = logging.getLogger(__name__)

SPILL_VARIABLE = "TOKENCUSTODY_SPILL"

# The number is the format of the file: what a later format is called, this library leaves alone.
_SUFFIX = ".mark1"
_CORRUPT = ".corrupt"
_LARGEST_FILE = 64 * 2**10
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0


@dataclass(frozen=True, slots=True)
class Mark:
    """That a call of a rollout was not captured. `model_call_id` is empty when nobody knows which."""

    key: RolloutKey
    model_call_id: str
    stamp: Stamp

    def __str__(self) -> str:
        return (
            f"the mark for call {self.model_call_id or '(unnamed)'} of rollout {self.key.rollout_id} "
            f"of run {self.key.run}"
        )

    def store_txn(self, connection: Connection) -> None:
        """Mark the rollout, unless this very mark is there. Raises TokenCaptureRetiredError."""
        fence = lock_fence_txn(connection, self.key, self.stamp, exclusive=True)
        if happened_txn(connection, self.key, self.stamp):
            return
        refuse_if_retired(fence, self.key, f"the mark for call {self.model_call_id or '(unnamed)'}")
        fail_txn(
            connection,
            self.key,
            fence,
            VersionEvent.MARK,
            FailureKind.MARK,
            self.stamp,
            model_call_id=self.model_call_id,
        )

    def settle_txn(self, connection: Connection) -> bool:
        """Do the same for a mark that waited; return False when its rollout was retired meanwhile."""
        try:
            self.store_txn(connection)
        except TokenCaptureRetiredError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class SpilledFile:
    """What `tokencustody spill list` tells of a file. `mark` is None when it is not what was written."""

    path: Path
    database: str
    mark: Mark | None


class Spill:
    """The marks of one database that wait in a folder of this host."""

    def __init__(self, root: Path, url: DatabaseUrl) -> None:
        # The user is left out, and with it whatever stands before the last @ of the host.
        self.address = re.sub(r"(?<=://)[^/]*@", "", url.display)
        self.folder = root / _short_hash(self.address, 32)

    def keep(self, mark: Mark) -> Path:
        """Write a mark; return its file once that survives a power cut. Raises OSError."""
        path = self.folder / _name(mark)
        temporary = path.with_suffix(".tmp")
        _make_folder(self.folder)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_content(mark, self.address))
                file.flush()
                os.fsync(descriptor)
            temporary.rename(path)
            _sync(self.folder)
            _sync(self.folder.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        return path

    def waiting(self, key: RolloutKey | None = None) -> list[Path]:
        """Return the files of the marks that wait, of one rollout or of all, in the order of the marks."""
        return _files(self.folder, f"-{_rollout_hash(key)}-" if key else "", _SUFFIX)

    def read(self, path: Path) -> Mark | None:
        """Return the mark of a file; None when it is gone, or when it was corrupt and is kept aside now."""
        try:
            data = _read(path)
        except FileNotFoundError:
            return None
        mark = _parsed(path.name, data, self.address)
        if mark is None:
            self._set_aside(path)
        return mark

    def _set_aside(self, path: Path) -> None:
        try:
            kept = path.rename(path.with_name(path.name + _CORRUPT))
        except FileNotFoundError:  # another process was faster
            return
        except OSError:
            kept = path
        LOGGER.error(
            "a mark for %s that waited on this host is corrupt, so a rollout that is incomplete may not be marked; the "
            "file is %s",
            self.address,
            kept,
        )

    def marks_of(self, key: RolloutKey) -> dict[Path, Mark]:
        """Return the marks of a rollout that wait, by their files. Raises StoreUnavailableError for a file that cannot
        be read."""
        try:
            marks = {path: self.read(path) for path in self.waiting(key)}
        except OSError as exc:
            raise StoreUnavailableError(
                f"a mark of rollout {key.rollout_id} of run {key.run} waits in {self.folder} and cannot be read: {exc}"
            ) from exc
        # The name holds but the beginning of a hash.
        return {path: mark for path, mark in marks.items() if mark is not None and mark.key == key}

    def remove(self, path: Path) -> bool:
        """Remove the file of a mark that is in the database; return False when somebody else did."""
        try:
            path.unlink()
            # Else it could come back after a power cut, and mark anew a rollout that was deleted meanwhile.
            _sync(self.folder)
        except FileNotFoundError:
            return False
        except OSError as exc:
            LOGGER.error("%s holds a mark that is in the database, and cannot be removed: %s", path, exc)
            return False
        return True


async def write_after(doors: Doors, spill: Spill, marks: Mapping[Path, Mark], work: Work[Result]) -> Result:
    """Run `work` in one transaction after these marks, whose files are removed when it has committed."""
    stored: dict[Path, bool] = {}

    def store_marks_first(connection: Connection) -> Result:
        for path, mark in marks.items():
            stored[path] = mark.settle_txn(connection)
        return work(connection)

    result = await doors.write(store_marks_first)
    for path, mark in marks.items():
        if not await asyncio.to_thread(spill.remove, path):
            continue
        doors.count("replayed_marks")
        if stored[path]:
            LOGGER.info("%s, which waited on this host, is in the database", mark)
        else:
            LOGGER.warning("%s waited on this host until the rollout was retired: it is discarded", mark)
    return result


class _OneAtATime(asyncio.Lock):
    """The turn to replay: the stores of a process and loop on one database would only repeat each other's work."""


async def replay(
    database: Database, spill: Spill, progress: Callable[[Mark], None] = lambda mark: None
) -> None:
    """Bring every mark that waits into the database, in order, whatever its run. Raises as a write does.

    `progress` is called for each that is there.
    """
    with database.doors() as doors:
        async with doors.kept(_OneAtATime):
            for path in spill.waiting():
                try:
                    mark = await asyncio.to_thread(spill.read, path)
                except OSError as exc:
                    LOGGER.error(
                        "a mark for %s waits on this host and cannot be read: %s", spill.address, exc
                    )
                    continue
                if mark is not None:
                    await write_after(doors, spill, {path: mark}, lambda _: None)
                    progress(mark)


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
            if self.spill.waiting():
                self.start()

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
        if any(tasks.values()) and (left := len(self.spill.waiting())):
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
        # Nothing is awaited between the last look and the end, so that no mark comes in between.
        while self.spill.waiting():
            try:
                await replay(self._database, self.spill)
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


def spill_root(spill: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder that the option `spill` names, or None when it turns spilling off.

    The empty string stands for the default: TOKENCUSTODY_SPILL, where that is set and empty none, else
    `tokencustody/spill` in the XDG state folder; none for a user without a home.
    """
    if spill is None:
        return None
    named = os.fspath(spill) or os.environ.get(SPILL_VARIABLE)
    if named == "":
        return None
    try:
        if named is not None:
            return Path(named).expanduser().absolute()
        state = os.environ.get("XDG_STATE_HOME", "")
        base = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return base / "tokencustody" / "spill"


def spilled_files(root: Path) -> list[SpilledFile]:
    """Return every mark that waits or was kept aside below `root`, whatever its database, in the order of the marks."""
    found = []
    for folder in _files(root, "", ""):
        for path in [*_files(folder, "", _SUFFIX), *_files(folder, "", _SUFFIX + _CORRUPT)]:
            try:
                data = _read(path)
            except FileNotFoundError:
                continue
            mark = _parsed(path.name, data, None)
            address = json.loads(data)["database"] if mark else ""
            found.append(SpilledFile(path, address, mark))
    return sorted(found, key=lambda file: file.path.name)


def _name(mark: Mark) -> str:
    at = mark.stamp.at.astimezone(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    return f"{at}-{_rollout_hash(mark.key)}-{mark.stamp.event_id}{_SUFFIX}"


def _rollout_hash(key: RolloutKey) -> str:
    return _short_hash(f"{key.run}/{key.rollout_id}", 16)


def _short_hash(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def _content(mark: Mark, address: str) -> bytes:
    fields: dict[str, Any] = {
        "database": address,
        "run": mark.key.run,
        "rollout_id": mark.key.rollout_id,
        "model_call_id": mark.model_call_id,
        "at": mark.stamp.at.isoformat(),
        "written_by": mark.stamp.by,
        "event_id": mark.stamp.event_id,
    }
    digest = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
    return json.dumps(fields | {"sha256": digest}).encode() + b"\n"


def _parsed(name: str, data: bytes, address: str | None) -> Mark | None:
    """Return the mark of a file's content; None when that is not what was written under this name."""
    try:
        fields = json.loads(data)
        mark = Mark(
            RolloutKey(check_rollout_id(fields["run"], "run"), check_rollout_id(fields["rollout_id"])),
            fields["model_call_id"] and check_call_id(fields["model_call_id"]),
            Stamp(
                datetime.fromisoformat(fields["at"]),
                check_call_id(fields["written_by"]),
                check_call_id(fields["event_id"]),
            ),
        )
        written = name == _name(mark) and data == _content(mark, address or fields["database"])
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None
    return mark if written else None


def _files(folder: Path, infix: str, suffix: str) -> list[Path]:
    try:
        with os.scandir(folder) as found:
            names = [each.name for each in found if infix in each.name and each.name.endswith(suffix)]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        # A folder that this user cannot look into holds nothing that this user wrote.
        return []
    return [folder / name for name in sorted(names)]


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_LARGEST_FILE)


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
        _sync(folder.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
