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
may replay a folder at once, and die while they do. A file that is not what was written is renamed to `….corrupt`, and
does not hinder the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from tokencustody.errors import InvalidRecordError, TokenCaptureRetiredError
from tokencustody.sql import registry
from tokencustody.sql.folders import make_folder, sync_folder
from tokencustody.sql.tables import FailureKind, VersionEvent
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
    """A file of the spill and its database. `mark` is None when it cannot be read or is not what was written."""

    path: Path
    database: str
    mark: Mark | None


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
        """Write a mark; return its file once that survives a power cut. Raises OSError."""
        path = self.folder / _name(mark)
        temporary = path.with_suffix(".tmp")
        make_folder(self.folder)
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
        """Return whether nothing waits, for whatever database. Raises OSError, as `waiting`."""
        return not _files(self.folder, "", _SUFFIX) and not any(
            _files_of_others(folder, "") for folder in self._other_folders()
        )

    def waiting(self, key: RolloutKey | None = None) -> list[Path]:
        """Return the files of the marks that wait, of one rollout or of all, in the order of the marks.

        Those that were spilled under another address are among them once this process has reached the database. Raises
        OSError when this user may not look into the folder of the database's address.
        """
        infix = f"-{_rollout_hash(key)}-" if key else ""
        found = _files(self.folder, infix, _SUFFIX)
        identity = registry.identity_of(self._url)
        if identity is not None:
            found += [
                path
                for folder in self._other_folders()
                for path in _files_of_others(folder, infix)
                if _identity(path) == identity
            ]
        return sorted(found, key=lambda path: path.name)

    def _other_folders(self) -> list[Path]:
        return [folder for folder in _folders(self._root) if folder != self.folder]

    def files(self) -> list[SpilledFile]:
        """Return the marks that wait and those that were kept aside."""
        return _spilled_files([*self.waiting(), *_files(self.folder, "", _SUFFIX + _CORRUPT)])

    def claim(self, path: Path, claims: ExitStack) -> Mark | None:
        """Return the mark of a file, which nobody else can claim until `claims` is closed.

        None when it is gone, or when it was corrupt and is kept aside now. Raises BlockingIOError when somebody else
        has claimed it, another OSError when it cannot be read.
        """
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        claims.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A process that was forked meanwhile would go on holding it.
        claims.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)
        if not os.fstat(descriptor).st_nlink:  # removed before it was claimed
            return None
        address = self.address if path.parent == self.folder else None
        mark = _parsed(path.name, os.read(descriptor, _LARGEST_FILE), address)
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


def spill_root(spill: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder that the option `spill` names, or None when it turns spilling off.

    The empty string stands for the default: TOKENCUSTODY_SPILL, where that is set and empty none, else
    `tokencustody/spill` in the XDG state folder; none for a user without a home. Raises InvalidRecordError for no path.
    """
    if spill is None:
        return None
    named = os.fspath(spill) or os.environ.get(SPILL_VARIABLE)
    if named == "":
        return None
    if named is not None and "\0" in named:
        raise InvalidRecordError("spill must be a path, which has no NUL")
    try:
        if named is not None:
            return Path(named).expanduser().absolute()
        state = os.environ.get("XDG_STATE_HOME", "")
        base = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return base / "tokencustody" / "spill"


def spilled_files(root: Path) -> list[SpilledFile]:
    """Return every mark that waits or was kept aside below `root`, whatever its database, in the order of the marks.

    Raises OSError when this user may not look everywhere.
    """
    paths = [
        path
        for suffix in (_SUFFIX, _SUFFIX + _CORRUPT)
        for folder in _files(root, "", "")
        for path in _files(folder, "", suffix)
    ]
    return _spilled_files(sorted(paths, key=lambda path: path.name))


def _spilled_files(paths: Iterable[Path]) -> list[SpilledFile]:
    found = []
    for path in paths:
        try:
            data = _read(path)
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


def _identity(path: Path) -> str | None:
    try:
        fields = json.loads(_read(path))
        identity = fields["identity"] if isinstance(fields, dict) else None
    except (OSError, ValueError, KeyError, RecursionError):
        return None
    return identity if isinstance(identity, str) else None


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


def _files(folder: Path, infix: str, suffix: str) -> list[Path]:
    try:
        with os.scandir(folder) as found:
            names = [each.name for each in found if infix in each.name and each.name.endswith(suffix)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in sorted(names)]


def _folders(root: Path) -> list[Path]:
    try:
        return _files(root, "", "")
    except OSError as exc:
        LOGGER.warning("marks of other databases may wait in %s, which cannot be read: %s", root, exc)
        return []


def _files_of_others(folder: Path, infix: str) -> list[Path]:
    try:
        return _files(folder, infix, _SUFFIX)
    except OSError as exc:
        LOGGER.warning("marks of another address may wait in %s, which cannot be read: %s", folder, exc)
        return []


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_LARGEST_FILE)
