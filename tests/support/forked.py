"""Processes that are forked from one that has imported what tests use, which is the dearest part of starting one.

Like a spawned process it has none of the parent's memory, threads or open files, but what it is given.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "campaigns.worker",
        "tests.support.entries",
        "tests.support.rows",
        "tests.support.staged",
        "tokencustody.database.postgresql",
        "tokencustody.schema.migrate",
    ]
)


def process(target: Callable[..., object], *arguments: Any) -> ForkServerProcess:
    """Return a process, not yet started, that calls the target in the environment of this moment."""
    return CONTEXT.Process(target=_call, args=(dict(os.environ), target, arguments))


def _call(environment: dict[str, str], target: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    # The fork server keeps that of the test that started it.
    os.environ.clear()
    os.environ.update(environment)
    target(*arguments)
