"""A folder of NeMo Gym's file store, as release 0.7.0 writes it.

Each rollout has up to six files, named by its id:

    ID.tokens.jsonl        one record a line, its keys sorted; the last line may be torn by a crash
    ID.tokens.state.json   fence, version, snapshot id, and the SHA-256 of each line by call
    ID.tokens.intents      the calls that were announced, one id a line
    ID.tokens.incomplete   the calls that were lost, one id a line; an empty line is a call without a name
    ID.tokens.lock         empty; Gym's processes lock it while they read or write the others
    ID.lineage.jsonl       the token-free ledger, one row a line
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokencustody.errors import InvalidRecordError, RolloutNotFoundError, StoreUnavailableError
from tokencustody.gym_import.report import FindingKind, ImportFinding
from tokencustody.ids import check_rollout_id
from tokencustody.store.base import DEFAULT_MAX_ENTRY_BYTES

_TOKENS, _STATE, _INTENTS, _MARKS, _LOCK, _LEDGER = (
    ".tokens.jsonl",
    ".tokens.state.json",
    ".tokens.intents",
    ".tokens.incomplete",
    ".tokens.lock",
    ".lineage.jsonl",
)
_SUFFIXES = (_TOKENS, _STATE, _INTENTS, _MARKS, _LOCK, _LEDGER)
# JSON takes more room than the packed bytes of which a store accepts so many; nothing longer is read into memory.
LONGEST_LINE = DEFAULT_MAX_ENTRY_BYTES
# Of call ids, and pieces in which a line is measured.
_LONGEST_NAME = 4096
_PIECE = 2**20
_PATIENCE = 10.0
_LONGEST_STATE = 2**26


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file without its end, and where it begins; `text` is None where it is longer than is read."""

    number: int
    offset: int
    text: bytes | None
    is_ended: bool

    @property
    def is_blank(self) -> bool:
        """Whether there is nothing but white space in it."""
        return self.text is not None and not self.text.strip()


class UnreadableFileError(Exception):
    """A file could not be read. The message names it."""


@dataclass(frozen=True, slots=True)
class State:
    """What Gym's state file says of a rollout. `line_sha256` has the hash of each call's line."""

    frozen: bool
    retired: bool
    incomplete: bool
    snapshot_id: str
    version: int
    line_sha256: dict[str, str]


@dataclass(frozen=True, slots=True)
class RolloutFiles:
    """The files of one rollout, each None where there is none."""

    rollout_id: str
    tokens: Path | None = None
    state: Path | None = None
    intents: Path | None = None
    marks: Path | None = None
    lock: Path | None = None
    ledger: Path | None = None

    def read_state(self) -> State | None:
        """Return what the state file says, None where there is none.

        Raises ValueError when it makes no sense, UnreadableFileError.
        """
        if self.state is None:
            return None
        with _reading(self.state):
            if self.state.stat().st_size > _LONGEST_STATE:
                raise ValueError(f"it is longer than {_LONGEST_STATE} bytes")
            text = self.state.read_bytes()
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
        state = State(
            _field(found, "frozen", bool, False),
            _field(found, "retired", bool, False),
            _field(found, "incomplete", bool, False),
            _field(found, "snapshot_id", str, ""),
            _field(found, "version", int, 0),
            _field(found, "entry_digests", dict, {}),
        )
        if state.frozen or state.retired:
            if not state.snapshot_id:
                raise ValueError("it is frozen without a snapshot_id")
            check_rollout_id(state.snapshot_id, "snapshot_id")
        if not 0 <= state.version < 2**62:
            raise ValueError(f"version {state.version} is none")
        return state

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Keep Gym's processes from writing the files meanwhile.

        Raises StoreUnavailableError when one of them holds the lock for long.
        """
        if self.lock is None:
            yield
            return
        with _reading(self.lock):
            descriptor = os.open(self.lock, os.O_RDONLY)
        try:
            await _share(descriptor, self.lock)
            yield
        finally:
            os.close(descriptor)


_FIELD_OF_SUFFIX = dict(
    zip(_SUFFIXES, ("tokens", "state", "intents", "marks", "lock", "ledger"), strict=True)
)


def scan(folder: Path, wanted: Callable[[str], bool]) -> tuple[list[RolloutFiles], list[ImportFinding]]:
    """Return the rollouts of a folder that are wanted, in the order of their ids, and what belongs to no rollout.

    A rollout of which only the lock is left was deleted, and is none. Raises StoreUnavailableError, and
    RolloutNotFoundError for a folder without any file of the store.
    """
    found: dict[str, dict[str, Path]] = {}
    strangers: list[ImportFinding] = []
    try:
        with os.scandir(folder) as found_in_folder:
            entries = list(found_in_folder)
    except OSError as exc:
        raise StoreUnavailableError(f"{folder} cannot be read: {exc.strerror}") from exc
    if not any(entry.name.endswith(_SUFFIXES) for entry in entries):
        raise RolloutNotFoundError(f"there is no file of Gym's store in {folder}")
    for entry in entries:
        suffix = next((suffix for suffix in _SUFFIXES if entry.name.endswith(suffix)), None)
        problem = "" if suffix else "no file of Gym's store has such a name"
        kind = FindingKind.NOTE
        if suffix is not None:
            rollout_id = entry.name.removesuffix(suffix)
            try:
                check_rollout_id(rollout_id)
                if not stat.S_ISREG(entry.stat().st_mode):
                    problem = "it is no regular file"
            except InvalidRecordError as exc:
                problem = str(exc)
            except OSError as exc:
                problem = f"it cannot be read: {exc.strerror}"
            if not problem:
                if wanted(rollout_id):
                    found.setdefault(rollout_id, {})[_FIELD_OF_SUFFIX[suffix]] = Path(entry.path)
                continue
            kind = FindingKind.LOST
        strangers.append(ImportFinding(kind, entry.name, None, None, problem))
    rollouts = [RolloutFiles(name, **files) for name, files in found.items() if files.keys() - {"lock"}]
    return (
        sorted(rollouts, key=lambda each: each.rollout_id),
        sorted(strangers, key=lambda each: each.file),
    )


def lines(path: Path | None, longest: int | None = None) -> Iterator[Line]:
    """Yield the lines of a file, one in memory at a time, and that only up to a length. Raises UnreadableFileError."""
    if path is None:
        return
    longest = LONGEST_LINE if longest is None else longest
    with _reading(path), path.open("rb", buffering=_PIECE) as file:
        number = offset = 0
        while piece := file.readline(min(longest, _PIECE)):
            number += 1
            length, is_ended = len(piece), piece.endswith(b"\n")
            # Measured before it is read, so that a line of any length takes no more memory than a piece.
            while not is_ended and (more := file.readline(_PIECE)):
                length, is_ended = length + len(more), more.endswith(b"\n")
            if length - is_ended >= longest:
                yield Line(number, offset, None, is_ended=True)
            else:
                if length > len(piece):
                    file.seek(offset)
                    piece = file.read(length)
                yield Line(number, offset, piece.removesuffix(b"\n"), is_ended)
            offset = file.tell()


def names(path: Path | None) -> Iterator[tuple[int, str]]:
    """Yield the number and the name of each line, NUL for one that is longer than any. Raises UnreadableFileError."""
    for line in lines(path, _LONGEST_NAME):
        yield line.number, (b"\0" if line.text is None else line.text).decode(errors="surrogateescape")


def text_at(path: Path, offset: int) -> bytes:
    """Return the line that begins at an offset, as `lines` gives it. Raises UnreadableFileError."""
    with _reading(path), path.open("rb") as file:
        file.seek(offset)
        return file.readline(LONGEST_LINE).removesuffix(b"\n")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        # As itself it would pass for a lost connection to the database.
        raise UnreadableFileError(f"{path.name} cannot be read: {exc.strerror}") from exc


def _field(found: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = found.get(name, default)
    if type(value) is not kind:
        raise ValueError(f"its {name} is {type(value).__name__}, not {kind.__name__}")
    return value


async def _share(descriptor: int, path: Path) -> None:
    give_up = asyncio.get_running_loop().time() + _PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if asyncio.get_running_loop().time() > give_up:
                raise StoreUnavailableError(
                    f"{path.name} has been locked for {_PATIENCE:.0f} seconds by a process of Gym: import again when "
                    "that has ended"
                ) from None
            await asyncio.sleep(0.05)
