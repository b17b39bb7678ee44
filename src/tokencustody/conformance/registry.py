"""The registered checks. A module under `cases/` adds its own with the decorator `check`."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tokencustody.conformance.case import Case

CheckFunction = Callable[[Case], Awaitable[str | None]]

CASES = (
    "records",
    "fence",
    "intents",
    "retirement",
    "removal",
    "lineage",
    "parents",
    "exactness",
    "namespaces",
    "ledger",
    "ledger_lineage",
    "ledger_removal",
    "staging",
    "staged_reads",
    "attachments",
    "strict_fence",
)

_CHECKS: dict[str, Check] = {}


@dataclass(frozen=True)
class Check:
    """One check: what it holds a transport to, and the capabilities without which it is not applicable.

    `function` raises when the promise is broken; the text it may return is shown as the detail of a pass.
    """

    name: str
    promise: str
    needs: tuple[str, ...]
    function: CheckFunction


def check(*needs: str) -> Callable[[CheckFunction], CheckFunction]:
    """Register the decorated function under its own name, its docstring as the promise."""

    def register(function: CheckFunction) -> CheckFunction:
        name = function.__name__
        if name in _CHECKS:
            raise ValueError(f"two checks are named {name}")
        _CHECKS[name] = Check(name, " ".join((function.__doc__ or "").split()), needs, function)
        return function

    return register


def registered_checks() -> tuple[Check, ...]:
    """Return every check, in the order in which a run takes them."""
    for room in CASES:
        importlib.import_module(f"tokencustody.conformance.cases.{room}")
    return tuple(_CHECKS.values())
