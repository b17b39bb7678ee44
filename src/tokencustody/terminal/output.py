"""Standard output, so that what cannot be written is told in one line."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


class OutputError(RuntimeError):
    """Standard output cannot be written, though somebody still reads it. The message says why.

    It is no OSError, so that nobody who expects one of a file or of a connection takes it for that.
    """


class _Output(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as exc:
            raise OutputError(f"cannot write the output: {exc.strerror}") from None


@contextmanager
def checked_output() -> Iterator[None]:
    """Raise OutputError for what is printed meanwhile and cannot be written, at the latest when the context ends.

    Where nobody reads it any more, as behind `| head`, the end is SystemExit with 1 and without a word.
    """
    if sys.stdout is None:  # closed by whoever started this
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        if sys.stdout is sys.__stdout__:
            sys.stdout = _rewrapped(sys.stdout)
        # A call id may hold any character; a terminal that has no glyph for one is no reason to fail.
        sys.stdout.reconfigure(errors="backslashreplace")
    # click puts another in its place when nobody reads it any more.
    stdout = sys.stdout
    try:
        try:
            yield
        finally:
            # Else the interpreter does it when it exits, and complains in its own words.
            stdout.flush()
    except BrokenPipeError:
        _discard(stdout)
        raise SystemExit(1) from None
    except OutputError:
        _discard(stdout)
        raise


def _rewrapped(stdout: io.TextIOWrapper) -> io.TextIOWrapper:
    stdout.flush()
    raw = _Output(stdout.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        raw if stdout.write_through else io.BufferedWriter(raw),
        encoding=stdout.encoding,
        line_buffering=stdout.line_buffering,
        write_through=stdout.write_through,
    )


def _discard(stdout: TextIO) -> None:
    """Let what is left in its buffers go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stdout.fileno())
    os.close(nowhere)
