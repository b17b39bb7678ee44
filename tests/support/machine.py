"""What some tests need of the machine itself: programs of the system, root, mounts.

A person whose machine lacks it sees why a test was skipped. Where CI is set the test fails instead, because there a
protection that is never tried would go unnoticed.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

# Debian keeps servers where a person's PATH does not look.
_FOLDERS = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])


def needs_program(name: str, *, package: str) -> str:
    """Return the path of a program that the Debian package brings, or end the test."""
    found = shutil.which(name, path=_FOLDERS)
    return found or _missing(f"the program {name} is not installed (Debian's package {package})")


def needs_file(pattern: str, *, package: str) -> Path:
    """Return the first file that an absolute pattern matches, which the Debian package brings, or end the test."""
    found = next(iter(sorted(Path("/").glob(pattern.lstrip("/")))), None)
    return found or _missing(f"there is no {pattern} (Debian's package {package})")


def needs_root() -> None:
    """End the test unless this process is root."""
    if os.getuid() != 0:
        _missing("only root can do this")


def needs_linux(what: str) -> None:
    """End the test unless this is Linux, which alone has `what`."""
    if sys.platform != "linux":
        _missing(f"this machine is no Linux, which has {what}")


def needs_mounts() -> None:
    """End the test unless this process may mount a tmpfs and an ext4 file system on a loop device."""
    needs_root()
    needs_program("mkfs.ext4", package="e2fsprogs")
    if problem := _mount_problem():
        _missing(f"this machine mounts nothing: {problem}")


def _missing(what: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(f"{what}, and CI is set")
    pytest.skip(what)


@functools.cache
def _mount_problem() -> str:
    """Return why mounting fails, or nothing."""
    with tempfile.TemporaryDirectory() as name:
        for command in (["mount", "-t", "tmpfs", "none", name], ["umount", name], ["losetup", "--find"]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return f"{command[0]}: {done.stderr.strip() or done.returncode}"
    return ""
