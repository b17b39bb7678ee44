"""Ctrl-C in commands that have something to clean up: the first ends them in order, the second at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, TypeVar

import typer

from tokencustody.terminal.printing import printable

# A progress bar hides it, and leaves the cursor at the end of its line.
_SHOW_CURSOR = "\x1b[?25h\n"

Result = TypeVar("Result")


def run(work: Coroutine[Any, Any, Result], *, notice: str, at_once: Callable[[], str]) -> Result:
    """Return the result of `work`, run in an event loop of its own.

    The first SIGINT prints `notice` and cancels `work`; KeyboardInterrupt is raised when it has cleaned up. The second
    calls `at_once`, prints what that returns and ends the process with 130, whatever its threads wait for.
    """

    import asyncio

    def end(_signal: int, _frame: FrameType | None) -> NoReturn:
        words = printable(at_once())
        shown = (_SHOW_CURSOR if os.isatty(2) else "") + (words and f"{words}\n")
        # Past `sys.stderr`, which may be in the middle of a write.
        os.write(2, shown.encode(errors="backslashreplace"))
        os._exit(130)

    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # as a shell sets it for what runs in the background
        return asyncio.run(work)

    async def interruptible() -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None  # noqa: S101 - this is its coroutine

        def stop() -> None:
            typer.echo(f"interrupted: {notice}", err=True)
            task.cancel()

        def interrupt(_signal: int, _frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, end)
            loop.call_soon_threadsafe(stop)

        # For what it does besides: a signal then wakes the loop, also one that comes as it begins to wait for events.
        loop.add_signal_handler(signal.SIGINT, lambda: None)
        signal.signal(signal.SIGINT, interrupt)
        return await work

    try:
        result = asyncio.run(interruptible())
    except asyncio.CancelledError:
        # The interpreter too waits for threads when it exits.
        signal.signal(signal.SIGINT, end)
        raise KeyboardInterrupt from None
    return result


@contextmanager
def raised() -> Iterator[None]:
    """Let the first Ctrl-C be a KeyboardInterrupt, by which the work ends in order, and the second end at once.

    By now every module is loaded, which `__main__` does not let it interrupt.
    """

    def interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGINT, lambda _signal, _frame: os._exit(130))
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    # A shell lets what runs in the background ignore it.
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
    yield
    signal.signal(signal.SIGINT, before)
