"""The rollouts that all workers of a campaign are at, in a file that they share."""

from __future__ import annotations

import fcntl
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self

_HEAD = struct.Struct("=QQQ")  # operations taken, operations wanted, rollouts begun
_SLOT = struct.Struct("=QQQ")  # number of the rollout, its operations taken, its operations in all


@dataclass(frozen=True)
class Turn:
    """One operation to be done: on which rollout, and how old that is, from 0.0 to 1.0."""

    rollout: int
    age: float


class Board:
    """Hands out operations, each once, on a few rollouts at a time; one that is over gives way to the next.

    A context manager. Every process opens the file by itself. A process that is killed leaves nothing locked.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), 0)

    @classmethod
    def create(cls, path: Path, *, operations: int, rollouts: int) -> Self:
        """Make the file for so many operations in all, on so many rollouts at a time."""
        path.write_bytes(_HEAD.pack(0, operations, 0) + _SLOT.pack(0, 0, 0) * rollouts)
        return cls(path)

    @property
    def taken(self) -> int:
        """The operations handed out so far."""
        return int(_HEAD.unpack_from(self._map)[0])

    @property
    def begun(self) -> int:
        """The rollouts begun so far, which have the numbers from 1."""
        return int(_HEAD.unpack_from(self._map)[2])

    def take(self, rng: Random) -> Turn | None:
        """Return the next operation, or None when all are taken."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            taken, wanted, begun = _HEAD.unpack_from(self._map)
            if taken >= wanted:
                return None
            slots = (len(self._map) - _HEAD.size) // _SLOT.size
            at = _HEAD.size + _SLOT.size * rng.randrange(slots)
            number, done, lifetime = _SLOT.unpack_from(self._map, at)
            if done == lifetime:
                begun += 1
                number, done, lifetime = begun, 0, rng.randint(60, 150)
            _SLOT.pack_into(self._map, at, number, done + 1, lifetime)
            _HEAD.pack_into(self._map, 0, taken + 1, wanted, begun)
            return Turn(number, done / lifetime)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def stop(self) -> None:
        """Hand out no more operations."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        taken, _, begun = _HEAD.unpack_from(self._map)
        _HEAD.pack_into(self._map, 0, taken, taken, begun)
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._map.close()
        self._file.close()
