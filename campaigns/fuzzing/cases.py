"""What a fuzz target is, and how its cases are run, bounded, counted and told again.

A case is a function of one random source: the same target, seed and number make the same case.
"""

from __future__ import annotations

import contextlib
import faulthandler
import random
import resource
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from tokencustody import errors
from tokencustody.errors import RolloutNotFoundError

Result = TypeVar("Result")

# Runs one case and returns what became of it. Raises Violation.
Case = Callable[[random.Random], str]

NAMED: tuple[type[Exception], ...] = (
    RolloutNotFoundError,
    *(
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, Exception) and each.__module__ == errors.__name__
    ),
)
# What takes a value of the wrong type says so as Python does, beside the ValueError that the wire contract names.
OF_VALUES = (ValueError, TypeError)

SECONDS_PER_CASE = 30
# Address space that a case may take beyond what the process has when it begins.
BYTES_PER_CASE = 2 * 2**30
_LONGEST_MESSAGE = 4000


class Violation(AssertionError):  # noqa: N818 - the word of the campaigns
    """A case broke a promise. The message says which and with what."""


@dataclass(frozen=True)
class Target:
    """A name, and what prepares its cases: `opened(seed)` yields the case."""

    name: str
    opened: Callable[[str], AbstractContextManager[Case]]


@dataclass(frozen=True)
class Found:
    """A violation, and what makes it again."""

    target: str
    seed: int
    number: int
    text: str


@dataclass
class Summary:
    """How many cases had which end, and the violations."""

    cases: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    violations: list[Found] = field(default_factory=list)


def run(
    target: Target, seed: int, goes_on: Callable[[int], bool], *, first: int = 0, most_violations: int = 20
) -> Summary:
    """Run cases from number `first` on for as long as `goes_on(number of cases)`; stop at the violations allowed."""
    summary = Summary()
    with target.opened(f"{seed}/{target.name}") as case:
        while goes_on(summary.cases) and len(summary.violations) < most_violations:
            number = first + summary.cases
            rng = random.Random(f"{seed}/{target.name}/{number}")
            summary.cases += 1
            try:
                with bounded():
                    summary.ends[case(rng)] += 1
            except Exception:
                summary.violations.append(Found(target.name, seed, number, traceback.format_exc()))
    return summary


def attempt(
    call: Callable[[], Result], allowed: tuple[type[Exception], ...], secrets: tuple[str, ...] = ()
) -> tuple[Result | None, Exception | None]:
    """Return what a call returns, or the allowed error that it raised. Raises Violation for any other error.

    A message must be of a length for a log, and repeat none of `secrets`.
    """
    try:
        return call(), None
    except allowed as exc:
        check_message(exc, secrets)
        return None, exc
    except Violation:
        raise
    except Exception as exc:
        raise Violation(f"an error without a name: {type(exc).__name__}: {str(exc)[:500]}") from exc


def check_message(exc: Exception, secrets: tuple[str, ...] = ()) -> None:
    """Raise Violation for an error whose message does not belong into a log."""
    text = str(exc)
    if len(text) > _LONGEST_MESSAGE and not isinstance(exc, ValidationError):
        raise Violation(
            f"{type(exc).__name__} has a message of {len(text)} characters: {text[:200]}…"
        ) from exc
    for secret in secrets:
        if secret in text:
            raise Violation(f"{type(exc).__name__} repeats {secret}: {text[:500]}") from exc


def end_of(exc: Exception | None, otherwise: str) -> str:
    """Return the name of how a case ended."""
    return otherwise if exc is None else type(exc).__name__


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Turn a case that takes too long, or too much memory, into an error.

    A loop in C that never returns ends the process, with a traceback, a while later.
    """
    allowed = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + BYTES_PER_CASE
    if allowed[1] != resource.RLIM_INFINITY:
        limit = min(limit, allowed[1])
    here = threading.current_thread() is threading.main_thread()

    def too_long(_signal: int, _frame: Any) -> None:
        raise Violation(f"not finished after {SECONDS_PER_CASE} s")

    before = signal.signal(signal.SIGALRM, too_long) if here else None
    if here:
        signal.setitimer(signal.ITIMER_REAL, SECONDS_PER_CASE)
        faulthandler.dump_traceback_later(3 * SECONDS_PER_CASE, exit=True)
    resource.setrlimit(resource.RLIMIT_AS, (limit, allowed[1]))
    try:
        yield
    except MemoryError as exc:
        raise Violation(f"more than {BYTES_PER_CASE >> 20} MiB of memory") from exc
    finally:
        resource.setrlimit(resource.RLIMIT_AS, allowed)
        if here:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            faulthandler.cancel_dump_traceback_later()
