"""The processes that a demo starts. None outlives the process that started it, however that one ends."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from typing import IO

_running: set[asyncio.subprocess.Process] = set()


@contextlib.asynccontextmanager
async def child(
    module: str,
    *arguments: str,
    log: IO[bytes],
    stop_seconds: float,
    line_bytes: int = 65_536,
    pass_fds: Sequence[int] = (),
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start `python -m module` with pipes to and from it, which must end when its standard input does.

    Leaving the context closes its standard input, and kills it when it has not ended `stop_seconds` later.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # a module in the current folder is not ours
        "-m",
        module,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
        limit=line_bytes,
        pass_fds=pass_fds,
        start_new_session=True,  # Ctrl-C is for this process, which then stops its children in order
    )
    _running.add(process)
    try:
        yield process
    finally:
        assert process.stdin is not None  # noqa: S101 - a pipe was asked for
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), stop_seconds)
        except TimeoutError:
            process.kill()
            await process.wait()
        _running.discard(process)


def kill_children() -> None:
    """Kill what still runs, for a process that is about to end itself."""
    for process in list(_running):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
