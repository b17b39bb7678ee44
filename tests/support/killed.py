"""Runs a command of ours in a process that is killed at its Nth rollout, in the middle of a transaction."""

from __future__ import annotations

import os
import signal
from functools import partial

from tests.support import commands
from tokencustody.store.base import SqlStore


def killed_at(number: int, point: str, *command: str) -> None:
    """Run the command and see it killed "before commit", or "after" the commit, of its Nth write."""
    ended = commands.run(command, before=partial(_kill_at, number, point))
    assert ended.returncode == -signal.SIGKILL, ended


def _kill_at(number: int, point: str) -> None:
    write = SqlStore._write_after_marks
    done = 0

    async def counted(self, key, work):  # type: ignore[no-untyped-def]
        nonlocal done
        done += 1

        def killed(connection):  # type: ignore[no-untyped-def]
            work(connection)
            os.kill(os.getpid(), signal.SIGKILL)

        if done < number or point == "after":
            result = await write(self, key, work)
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        return await write(self, key, killed)

    SqlStore._write_after_marks = counted  # type: ignore[method-assign]
