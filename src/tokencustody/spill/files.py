"""The folder of the spill, and its files: others and failing disks may have had their hands on them, so they are read
without waiting, and not trusted."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tokencustody.database.folders import local_path
from tokencustody.errors import InvalidRecordError

Result = TypeVar("Result")

SPILL_VARIABLE = "TOKENCUSTODY_SPILL"
# No mark is longer.
LARGEST_FILE = 64 * 2**10


def spill_root(spill: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder that the option `spill` names, or None when it turns spilling off.

    The empty string stands for the default: TOKENCUSTODY_SPILL, where that is set and empty none, else
    `tokencustody/spill` in the XDG state folder; none for a user without a home. Raises InvalidRecordError for no path.
    """
    if spill is None:
        return None
    named = os.fspath(spill) or os.environ.get(SPILL_VARIABLE)
    if named == "":
        return None
    if named is not None and "\0" in named:
        raise InvalidRecordError("spill must be a path, which has no NUL")
    try:
        if named is not None:
            return local_path(named, "the folder of spilled marks").expanduser().absolute()
        state = os.environ.get("XDG_STATE_HOME", "")
        base = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return base / "tokencustody" / "spill"


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file; return its descriptor. Raises OSError for anything else, a link included, and never waits.

    What is opened by its name alone may be a pipe that nobody writes into.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def read_file(path: Path) -> bytes:
    """Return the beginning of a regular file. Raises OSError."""
    descriptor = open_regular(path)
    try:
        return os.read(descriptor, LARGEST_FILE)
    finally:
        os.close(descriptor)


def check_folder(folder: Path) -> None:
    """Raise PermissionError for a folder in which somebody else could remove or exchange files. It need not exist."""
    try:
        status = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, "it belongs to another user", str(folder))
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise PermissionError(errno.EPERM, "every user may write into it", str(folder))


def files_in(folder: Path, infix: str, suffixes: str | tuple[str, ...]) -> list[Path]:
    """Return what a folder holds under such names, sorted; nothing where there is none. Raises OSError."""
    try:
        with os.scandir(folder) as found:
            names = [each.name for each in found if infix in each.name and each.name.endswith(suffixes)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in sorted(names)]


async def in_file_thread(
    work: Callable[[], Result], give_up: float, too_late: Callable[[Result], object] = lambda _: None
) -> Result:
    """Return `work()`, run in a thread of its own. Raises TimeoutError when the loop's clock reads `give_up`.

    Work on files that hangs holds up neither the loop nor the end of the process. It has begun when this first waits,
    and goes on when nobody waits for it any more: `too_late` gets what comes of it then.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Result] = loop.create_future()

    def tell(result: Result) -> None:
        if ended.done():
            too_late(result)
        else:
            ended.set_result(result)

    def fail(error: BaseException) -> None:
        if not ended.done():
            ended.set_exception(error)

    def run() -> None:
        try:
            result = work()
        except BaseException as exc:
            _call(loop, fail, exc)
        else:
            if not _call(loop, tell, result):
                too_late(result)

    threading.Thread(target=run, name="spill of marks", daemon=True).start()
    async with asyncio.timeout_at(give_up):
        return await ended


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], argument: object) -> bool:
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:  # the loop was closed
        return False
    return True
