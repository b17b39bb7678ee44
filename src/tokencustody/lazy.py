"""Names of a package that are imported when they are first asked for.

A command line has to know the signature of every command, and so imports a module of most packages; what those packages
offer to programs loads database drivers, servers and file formats, which only the command that runs should wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def names(package: str, **where: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package: each name is found in the module of tokencustody that is given for it."""

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"tokencustody.{where[name]}"), name)

    return get
