"""Which role of PostgreSQL each command needs, for a person to whom one was denied."""

from __future__ import annotations

import sys

_READER = "a worker of the run, a trainer of it or the owner of the tables, for it reads token data"
_TRAINER = "a trainer of the run or the owner of the tables"
_OWNER = "the owner of the tables"
# Of docs/roles.md, which has the same in one table.
NEEDS = {
    "runs": "a role that `tokencustody db grant` gave, or the owner of the tables",
    "rollouts": "a role that `tokencustody db grant` gave, or the owner of the tables",
    "show": "a role that `tokencustody db grant` gave, or the owner of the tables",
    "verify": _READER,
    "sql": "an auditor, a trainer of all runs or the owner of the tables for the views, and for token data "
    "a worker or trainer of the run",
    "export": _TRAINER,
    "copy": "a worker or trainer of the run or the owner of the tables to read, and the owner to write",
    "import": _OWNER,
    "retire": _TRAINER,
    "delete": _OWNER,
    "gc": "a trainer of the run for staged calls, the owner of the tables for fences",
    "spill": "a worker or trainer of the runs of the marks, or the owner of the tables",
    "serve": _TRAINER,
    "conformance": _OWNER,
    "demo": _OWNER,
    "db": _OWNER,
}


def denied(exc: Exception) -> str:
    """Return what to say of a statement that was denied to the command that is running, or nothing."""
    from tokencustody.errors import AccessDeniedError

    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    if not isinstance(exc, AccessDeniedError) or not words or words[0] not in NEEDS:
        return ""
    return f"{exc.denied}; `tokencustody {words[0]}` needs {NEEDS[words[0]]}: `tokencustody db roles` lists who is what"
