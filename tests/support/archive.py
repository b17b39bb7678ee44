"""A SQLite file as an archive holds it: neither it nor its folder can be written to, not even by root."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DROP_FROM_BOUNDING_SET, _CAPABILITIES = 24, 64


@contextmanager
def archived(file: Path) -> Iterator[None]:
    """Take the rights to write a file and its folder away for a while."""
    file.chmod(0o444)
    file.parent.chmod(0o555)
    try:
        assert "PermissionError" in python("-c", f"open({str(file.parent / 'new')!r}, 'x')").stderr
        assert "PermissionError" in python("-c", f"open({str(file)!r}, 'r+')").stderr
        yield
    finally:
        file.parent.chmod(0o755)
        file.chmod(0o600)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python so that file modes count for it, also where root runs it (on Linux)."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=_without_privileges,
    )


def _without_privileges() -> None:
    """Let file modes count for root too, from the next program on."""
    if os.getuid() == 0:
        process = ctypes.CDLL(None)
        for capability in range(_CAPABILITIES):
            process.prctl(_DROP_FROM_BOUNDING_SET, capability)
