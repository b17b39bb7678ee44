"""Names of a package that are imported when they are first asked for.

The signatures of commands, which `--help` shows, lie in modules of most packages; what those packages offer to programs
loads pydantic, database drivers, servers and file formats, for which only that should wait which uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def names(package: str, *modules: str, **where: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package: each name is found in the module of tokencustody that is given for it.

    `modules` are those of the package that are its attributes before anybody imports them.
    """

    def get(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"tokencustody.{where[name]}"), name)

    return get
