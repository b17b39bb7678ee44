"""Disks that run full and disks that lose their power.

Both need root. They are unmounted also when this process is killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from campaigns.guard import cleaned_up

_PATIENCE = 30.0
# EXT4_IOC_SHUTDOWN, and its flag to leave the journal in memory unwritten.
_SHUTDOWN = 0x8004587D
_WITHOUT_FLUSHING = 2


class DiskError(RuntimeError):
    """A disk could not be made or mounted. The message is that of the program which failed."""


class _Disk:
    """A file system of its own, mounted at `folder`, that is gone after the block."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._home = Path(tempfile.mkdtemp(prefix="tokencustody-disk-"))
            # Servers of another account must get to the folder.
            self._home.chmod(0o711)
            self.folder = self._home / "mounted"
            self.folder.mkdir()
            script = 'umount -l "$1/mounted"; rm -rf --one-file-system "$1"'
            stack.enter_context(cleaned_up(script, str(self._home)))
            self._make()
            self._mount()
            self.folder.chmod(0o755)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def _make(self) -> None:
        """Make what is mounted."""

    def _mount(self) -> None:
        raise NotImplementedError


class SmallDisk(_Disk):
    """A tmpfs of `size` bytes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def fill(self) -> int:
        """Take all the space that is left; return how many bytes that was."""
        taken = 0
        with (self.folder / "ballast").open("ab", buffering=0) as file:
            for piece in (1 << 20, 1 << 12, 1):
                try:
                    while True:
                        taken += file.write(bytes(piece))
                except OSError as exc:
                    if exc.errno != errno.ENOSPC:
                        raise
        return taken

    def free(self) -> None:
        """Give the space back."""
        (self.folder / "ballast").unlink(missing_ok=True)

    def grow(self, size: int) -> None:
        """Make the disk larger by `size` bytes."""
        self._size += size
        _run("mount", "-o", f"remount,size={self._size}", str(self.folder))

    def _mount(self) -> None:
        _run("mount", "-t", "tmpfs", "-o", f"size={self._size}", "none", str(self.folder))


class PowerDisk(_Disk):
    """An ext4 file system of `size` bytes on a loop device, whose power can be cut.

    What a cut loses is whatever the kernel has not written to the device; the device itself forgets nothing.
    """

    def __init__(self, size: int = 1 << 28) -> None:
        super().__init__()
        self._size = size

    def cut(self) -> int:
        """Cut the power; return when that began, in CLOCK_MONOTONIC nanoseconds.

        From now on every write fails, and what was not synced before is lost. It takes some milliseconds, in which a
        sync may still report success: a process that has no power would not hear of it. The caller kills every process
        that has a file open on the disk, then calls `remount`.
        """
        began = time.monotonic_ns()
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _WITHOUT_FLUSHING))
        finally:
            os.close(descriptor)
        return began

    def remount(self) -> None:
        """Give the power back: the file system recovers from its journal. Raises DiskError while files are open."""
        give_up = time.monotonic() + _PATIENCE
        while True:
            try:
                _run("umount", str(self.folder))
                break
            except DiskError:
                # A process that was killed keeps its files for another moment.
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.02)
        self._mount()

    def _make(self) -> None:
        image = self._home / "image"
        with image.open("wb") as file:
            file.truncate(self._size)
        _run("mkfs.ext4", "-q", "-F", str(image))

    def _mount(self) -> None:
        # A long interval between the journal's own commits: what nobody synced stays unwritten until the cut.
        _run("mount", "-o", "loop,commit=300", str(self._home / "image"), str(self.folder))


def _run(*command: str) -> None:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PATH": path}
    )
    if done.returncode:
        raise DiskError(f"{' '.join(command)}: {done.stderr.strip()}")
