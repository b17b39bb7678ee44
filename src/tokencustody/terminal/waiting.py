"""Telling a person what a command waits for, instead of silence."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from tokencustody import waits
from tokencustody.terminal.printing import printable

# In seconds: how long nothing is said, and how often it is looked at.
SILENCE = 2.0
_STEP = 0.1


@contextmanager
def told() -> Iterator[None]:
    """Say on standard error, once for each database, that it is waited for, whatever the command does meanwhile."""
    ended = threading.Event()
    teller = threading.Thread(target=_tell, args=(ended,), name="telling of waits", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


def _tell(ended: threading.Event) -> None:
    said: set[str] = set()
    while not ended.wait(_STEP):
        now = time.monotonic()
        long = {wait.url.display: wait for wait in list(waits.current) if now - wait.since >= SILENCE}
        for display in long.keys() - said:
            typer.echo(_words(long[display], now), err=True)
        said = set(long)


def _words(wait: waits.Wait, now: float) -> str:
    what = "be unlocked" if wait.url.is_sqlite else "answer"
    left = (
        "" if wait.seconds is None else f", at most {max(0.0, wait.since + wait.seconds - now):,.0f} s more"
    )
    return f"waiting for {printable(wait.url.display)} to {what}{left}; Ctrl-C ends it"
