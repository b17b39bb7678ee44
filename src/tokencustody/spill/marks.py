"""Marks that wait on this host until their database can be reached.

Each mark that `mark_incomplete` could not bring into the database is a file of its own:

    SPILL/DATABASE/TIME-ROLLOUT-EVENT.mark1

DATABASE is the beginning of the SHA-256 of the database's address, ROLLOUT that of its run and rollout id, TIME is when
the mark was made and EVENT its event id, so that the names sort in the order of the marks. The file is one line of JSON
with the mark, the address, the database's identity, and the SHA-256 of the line without that hash. It is written under
a temporary name, synced and renamed, and then its folder is synced.

The address has neither user nor password: every store of this host on the database finds the file, whoever it connects
as. PostgreSQL has an identity too, by which a store finds the file that reaches the database through a pooler, or under
another name of its host; but not if the process that wrote the file had never reached the database.

Who replays a mark first claims its file by a lock that ends with its process, and removes it when the transaction that
holds the mark has committed. Its event id makes it a no-op there when it was stored before. So any number of processes
may replay a folder at once, and die while they do. A file that is not what was written is renamed to `….corrupt`. Its
name still tells its rollout, which is neither frozen nor let go on this host until a person has decided about the file;
it does not hinder the others.

Functions of this module wait for the disk, so they run in threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from tokencustody.database import registry
from tokencustody.database.folders import make_folder, sync_folder
from tokencustody.database.url import DatabaseUrl
from tokencustody.errors import TokenCaptureRetiredError
from tokencustody.ids import check_call_id, check_rollout_id
from tokencustody.spill.files import LARGEST_FILE, check_folder, files_in, open_regular, read_file
from tokencustody.states import FailureKind, VersionEvent
from tokencustody.txn.fence import (
    RolloutKey,
    Stamp,
    fail_txn,
    happened_txn,
    lock_fence_txn,
    refuse_if_retired,
)

LOGGER = logging.getLogger(__name__)

# The number is the format of the file: what a later format is called, this library leaves alone.
_SUFFIX = ".mark1"
_CORRUPT = ".corrupt"
_DAMAGED = _SUFFIX + _CORRUPT
_NAME = re.compile(r"(\d{8}T\d{6}\.\d{6})Z-([0-9a-f]{16})-([0-9A-Za-z]+)\.mark1(?:\.corrupt)?")


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
        fence = lock_fence_txn(connection, self.key, self.stamp)
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
    """A file of the spill and its database. `mark` is None when it cannot be read or is not what was written."""

    path: Path
    database: str
    mark: Mark | None


@dataclass(frozen=True, slots=True)
class Claim:
    """A file that nobody else can claim until this is closed. `mark` is None when it is not what was written."""

    path: Path
    mark: Mark | None
    descriptor: int

    def close(self) -> None:
        """Let others claim the file, if it is still there."""
        # A process that was forked meanwhile would go on holding it.
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        os.close(self.descriptor)


class Spill:
    """The marks of one database that wait in a folder of this host."""

    def __init__(self, root: Path, url: DatabaseUrl) -> None:
        # The user is left out, and with it whatever stands before the last @ of the host.
        display = f"sqlite:///{os.path.realpath(url.dsn)}" if url.is_sqlite else url.display
        self.address = re.sub(r"(?<=://)[^/]*@", "", display)
        self._url = url
        self._root = root
        self.folder = root / _short_hash(self.address, 32)

    def keep(self, mark: Mark) -> Path:
        """Write a mark; return its file once that survives a power cut. Raises OSError, also for an unsafe folder."""
        path = self.folder / _name(mark)
        temporary = path.with_suffix(".tmp")
        make_folder(self.folder)
        self._check_folders()
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_content(mark, self.address, registry.identity_of(self._url)))
                file.flush()
                os.fsync(descriptor)
            temporary.rename(path)
            sync_folder(self.folder)
            sync_folder(self.folder.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        return path

    def is_empty(self) -> bool:
        """Return whether nothing waits and nothing is damaged, for whatever database. Raises OSError, as `waiting`."""
        self._check_folders()
        kinds = (_SUFFIX, _DAMAGED)
        return not files_in(self.folder, "", kinds) and not any(
            _files_of_others(folder, "", kinds) for folder in self._other_folders()
        )

    def waiting(self, key: RolloutKey | None = None) -> list[Path]:
        """Return the files of the marks that wait, of one rollout or of all, in the order of the marks.

        Those that were spilled under another address are among them once this process has reached the database. Raises
        OSError when this user may not look into the folder of the database's address, or may not trust it.
        """
        return self._files(key, _SUFFIX)

    def damaged(self, key: RolloutKey) -> list[Path]:
        """Return the files that were marks of this rollout, and are not what was written. Raises as `waiting`."""
        return self._files(key, _DAMAGED)

    def _files(self, key: RolloutKey | None, suffix: str) -> list[Path]:
        self._check_folders()
        infix = f"-{_rollout_hash(key)}-" if key else ""
        found = files_in(self.folder, infix, suffix)
        identity = registry.identity_of(self._url)
        if identity is not None:
            found += [
                path
                for folder in self._other_folders()
                for path in _files_of_others(folder, infix, suffix)
                if _may_be_of(path, identity, damaged=key is not None)
            ]
        return sorted(found, key=lambda path: path.name)

    def _other_folders(self) -> list[Path]:
        return [folder for folder in _folders(self._root) if folder != self.folder]

    def _check_folders(self) -> None:
        for folder in (self._root, self.folder):
            check_folder(folder)

    def files(self) -> list[SpilledFile]:
        """Return the marks that wait and those that were kept aside."""
        return _spilled_files([*self.waiting(), *files_in(self.folder, "", _DAMAGED)])

    def claim(self, path: Path) -> Claim | None:
        """Claim a file, or return None when it is gone. What is damaged is kept aside.

        Raises BlockingIOError when somebody else has claimed it, another OSError when it cannot be read.
        """
        try:
            descriptor = open_regular(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(descriptor).st_nlink:  # removed before it was claimed
                os.close(descriptor)
                return None
            data = os.read(descriptor, LARGEST_FILE)
        except BaseException:
            os.close(descriptor)
            raise
        mark = _parsed(path.name, data, self.address if path.parent == self.folder else None)
        return Claim(path if mark else self._set_aside(path), mark, descriptor)

    def mark_of(self, path: Path, key: RolloutKey, by: str) -> Mark | None:
        """Return the mark for a rollout that a damaged file must have been; None when its name is of another one."""
        named = _NAME.fullmatch(path.name)
        if named is None or named[2] != _rollout_hash(key):
            return None
        at = datetime.strptime(named[1], "%Y%m%dT%H%M%S.%f").replace(tzinfo=UTC)
        return Mark(key, "", Stamp(at, by, named[3]))

    def _set_aside(self, path: Path) -> Path:
        kept = path
        # Another address's is found again by whoever uses that, and is theirs to report.
        if path.parent == self.folder:
            with contextlib.suppress(OSError):  # as when another process was faster
                kept = path.rename(path.with_name(path.name + _CORRUPT))
            LOGGER.error(
                "a mark for %s that waited on this host is damaged, and its rollout is neither frozen nor let go here "
                "until somebody decides with `tokencustody spill mark` or `tokencustody spill discard`; the file is %s",
                self.address,
                kept,
            )
        return kept

    def finish(self, claims: Sequence[Claim]) -> None:
        """Remove the files of marks that are in the database, for good, and let go of them."""
        try:
            for claim in claims:
                self.remove(claim.path)
            self.sync(claim.path for claim in claims)
        finally:
            for claim in claims:
                claim.close()

    def remove(self, path: Path) -> None:
        """Remove the file of a mark that was claimed and is in the database."""
        try:
            path.unlink(missing_ok=True)
        except OSError as exc:
            LOGGER.error("%s holds a mark that is in the database, and cannot be removed: %s", path, exc)

    def sync(self, removed: Iterable[Path]) -> None:
        """Make removals survive a power cut, after which a mark could come back to a rollout that was deleted."""
        for folder in {path.parent for path in removed}:
            with contextlib.suppress(OSError):
                sync_folder(folder)


def spilled_files(root: Path) -> list[SpilledFile]:
    """Return every mark that waits or was kept aside below `root`, whatever its database, in the order of the marks.

    Raises OSError when this user may not look everywhere.
    """
    folders = files_in(root, "", "")
    paths = [path for folder in folders for path in files_in(folder, "", (_SUFFIX, _DAMAGED))]
    return _spilled_files(sorted(paths, key=lambda path: path.name))


def is_damaged(path: Path) -> bool:
    """Return whether a file has the name of a mark, and not its content. Raises OSError."""
    return _NAME.fullmatch(path.name) is not None and _parsed(path.name, read_file(path), None) is None


def _spilled_files(paths: Iterable[Path]) -> list[SpilledFile]:
    found = []
    for path in paths:
        try:
            data = read_file(path)
        except FileNotFoundError:  # replayed meanwhile
            continue
        except OSError:
            data = b""
        mark = _parsed(path.name, data, None)
        found.append(SpilledFile(path, json.loads(data)["database"] if mark else "", mark))
    return found


def _name(mark: Mark) -> str:
    at = mark.stamp.at.astimezone(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    return f"{at}-{_rollout_hash(mark.key)}-{mark.stamp.event_id}{_SUFFIX}"


def _rollout_hash(key: RolloutKey) -> str:
    return _short_hash(f"{key.run}/{key.rollout_id}", 16)


def _short_hash(text: str, length: int) -> str:
    # The path of a SQLite file need not be UTF-8.
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:length]


def _may_be_of(path: Path, identity: str, *, damaged: bool) -> bool:
    """Return whether a mark is of the database of that identity; `damaged` is for one that does not tell."""
    try:
        data = read_file(path)
    except FileNotFoundError:
        return False
    except OSError:
        return damaged
    if _parsed(path.name, data, None) is None:
        return damaged
    found: str | None = json.loads(data)["identity"]
    return found == identity


def _content(mark: Mark, address: str, identity: str | None) -> bytes:
    fields: dict[str, Any] = {
        "database": address,
        "identity": identity,
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
            "" if fields["model_call_id"] == "" else check_call_id(fields["model_call_id"]),
            Stamp(
                datetime.fromisoformat(fields["at"]),
                check_call_id(fields["written_by"]),
                check_call_id(fields["event_id"]),
            ),
        )
        database, identity = str(fields["database"]), fields["identity"]
        written = (
            name == _name(mark)
            and address in (None, database)
            and data == _content(mark, database, None if identity is None else str(identity))
        )
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None
    return mark if written and mark.stamp.at.tzinfo is not None else None


def _folders(root: Path) -> list[Path]:
    try:
        return files_in(root, "", "")
    except OSError as exc:
        LOGGER.warning("marks of other databases may wait in %s, which cannot be read: %s", root, exc)
        return []


def _files_of_others(folder: Path, infix: str, suffixes: str | tuple[str, ...]) -> list[Path]:
    try:
        return files_in(folder, infix, suffixes)
    except OSError as exc:
        LOGGER.warning("marks of another address may wait in %s, which cannot be read: %s", folder, exc)
        return []
