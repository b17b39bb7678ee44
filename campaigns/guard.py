"""What is to be cleaned up also when this process is killed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

# The shell's input ends with this process, whatever ends it, and with every process that was forked from it.
_WAIT = 'read -r _; script=$1; shift; eval "$script"'


@contextmanager
def cleaned_up(script: str, *arguments: str) -> Iterator[None]:
    """Run a shell script, with its `$1`, `$2` …, when the block or this process ends, even by SIGKILL.

    It may run a second time after the block has cleaned up by itself, so it must bear finding nothing.
    """
    with subprocess.Popen(
        ["/bin/sh", "-c", _WAIT, "sh", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Its own session, so that Ctrl-C reaches the campaign alone.
        start_new_session=True,
    ) as shell:
        try:
            yield
        finally:
            shell.communicate()
