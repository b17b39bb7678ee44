"""The command line in processes of its own, forked from one that has its libraries loaded."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

from tests.support import forked
from tokencustody.__main__ import main

_CAPABILITIES_VERSION_3 = 0x20080522


def start(
    words: Sequence[str], out: int, err: int, *, before: Callable[[], object] | None = None
) -> ForkServerProcess:
    """Start a command that writes to these files, after `before` was called in its process."""
    # What hands a file to a forked process; closing it is the caller's.
    with closing(Connection(os.dup(out))) as its_out, closing(Connection(os.dup(err))) as its_err:
        process = forked.process(_run, list(words), its_out, its_err, before)
        process.start()
    return process


def _run(words: list[str], out: Connection, err: Connection, before: Callable[[], object] | None) -> None:
    for number, stream in enumerate((out, err), 1):
        os.dup2(stream.fileno(), number)
        stream.close()
    if before is not None:
        before()
    # What the command starts loads the main module too: not that of the tests.
    sys.modules["__main__"] = sys.modules[main.__module__]
    sys.argv = ["tokencustody", *words]
    main()


def run(words: Sequence[str], *, before: Callable[[], object] | None = None) -> CompletedProcess[str]:
    """Run a command to its end."""
    with TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("out", "err")]
        with files[0].open("wb") as out, files[1].open("wb") as err:
            process = start(words, out.fileno(), err.fileno(), before=before)
        process.join()
        assert process.exitcode is not None
        return CompletedProcess([*words], process.exitcode, *(file.read_text() for file in files))


def drop_privileges() -> None:
    """Let file modes count for this process, also where root runs it (on Linux)."""
    if os.getuid() == 0:
        header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION_3, 0)
        no_capability = (ctypes.c_uint32 * 6)()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.capset(header, no_capability):
            raise OSError(ctypes.get_errno(), "capset")
