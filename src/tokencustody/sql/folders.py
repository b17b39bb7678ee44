"""Folders that only their owner may enter, and whose entries survive a power cut."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


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
