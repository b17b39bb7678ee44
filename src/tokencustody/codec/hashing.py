"""Hashing long things in threads beside: it lets others use the interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, Self

Given = ParamSpec("Given")

# Bytes from which on a thread is worth its while.
_LONG = 128 * 1024
_MOST_THREADS = 4


class Hashers:
    """Threads for hashes, as many as there are processors, up to four. They start with the first that is long."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def start(
        self, size: int, hashing: Callable[Given, str], *args: Given.args, **options: Given.kwargs
    ) -> Future[str]:
        """Return the hash of `size` bytes that `hashing` returns: at once where they are few."""
        if size >= _LONG:
            if self._threads is None:
                threads = min(os.cpu_count() or 1, _MOST_THREADS)
                self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokencustody")
            return self._threads.submit(hashing, *args, **options)
        made: Future[str] = Future()
        made.set_result(hashing(*args, **options))
        return made
