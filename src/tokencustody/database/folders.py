"""Folders that only their owner may enter, and whose entries survive a power cut."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from tokencustody.errors import InvalidRecordError

# With one slash it is what pathlib makes of an address with two.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def local_path(path: str | os.PathLike[str], what: str) -> Path:
    """Return a path of a file system. Raises InvalidRecordError for an address with a scheme, as `s3://…`.

    It would pass for a folder whose name is the scheme. The message names no more than that: the rest may be a secret.
    """
    address = _ADDRESS.match(os.fspath(path))
    if address is not None:
        raise InvalidRecordError(
            f"{address[1]}://… is an address, and {what} needs a file system, which can lock, rename and sync files: "
            f"name a local path, and copy what lies there with the tools of {address[1]}"
        )
    return Path(path)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, each mode 0700 and synced into its parent. Raises OSError."""
    if not folder.is_dir():
        make_folder(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make what was created, renamed and removed in a folder survive a power cut. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
