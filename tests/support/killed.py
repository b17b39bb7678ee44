"""Runs a command of ours in a process that is killed at its Nth rollout, in the middle of a transaction.

    python -m tests.support.killed NUMBER POINT COMMAND…

POINT is "before commit", or "after" the commit of the Nth write.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tokencustody.store.base import SqlStore


def killed_at(number: int, point: str, *command: str) -> None:
    """Run the command and see it killed there."""
    arguments = [sys.executable, "-m", "tests.support.killed", str(number), point, *command]
    ended = subprocess.run(arguments, check=False, capture_output=True, timeout=120)
    assert ended.returncode == -signal.SIGKILL, ended


def _main(number: int, point: str, command: list[str]) -> None:
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
    from tokencustody.cli import main

    sys.argv = ["tokencustody", *command]
    main()


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
