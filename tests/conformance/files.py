"""A tiny transport over JSON lines that reaches other processes, with its fence locked or not."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokencustody.errors import TokenCaptureFrozenError
from tokencustody.protocols import TokenCaptureSnapshot
from tokencustody.records import TokenEntry


class LockedFiles:
    """A file of records and an empty one as the fence per rollout, under a lock. Just enough for the race."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def put(self, entry: TokenEntry) -> None:
        with self.lock(entry.rollout_id, fcntl.LOCK_SH):
            if self.path(entry.rollout_id, "fence").exists():
                raise TokenCaptureFrozenError
            await self.pause()
            line = entry.model_dump_json().encode() + b"\n"
            descriptor = os.open(self.path(entry.rollout_id, "jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        with self.lock(rollout_id, fcntl.LOCK_EX):
            self.path(rollout_id, "fence").touch()
            records = self.path(rollout_id, "jsonl")
            lines = records.read_text().splitlines() if records.exists() else []
        entries = tuple(TokenEntry(**json.loads(line)) for line in lines)
        return TokenCaptureSnapshot(rollout_id, entries, False, snapshot_id=rollout_id, version=1)

    async def close(self) -> None:
        pass

    async def pause(self) -> None:
        """Do nothing: what happens between the look at the fence and the write."""

    @contextmanager
    def lock(self, rollout_id: str, kind: int) -> Iterator[None]:
        with self.path(rollout_id, "lock").open("w") as file:
            fcntl.flock(file, kind)
            yield

    def path(self, rollout_id: str, suffix: str) -> Path:
        return self.folder / f"{rollout_id}.{suffix}"


class UnlockedFiles(LockedFiles):
    """Looks at the fence, then writes, with nothing that keeps a freeze of another process out of between."""

    @contextmanager
    def lock(self, rollout_id: str, kind: int) -> Iterator[None]:
        yield

    async def pause(self) -> None:
        await asyncio.sleep(0)
