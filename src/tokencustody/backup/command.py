"""`tokencustody backup`: a copy of a SQLite database that is being written."""

from __future__ import annotations

from typing import Annotated

import typer

from tokencustody.schema.command import Json, Url
from tokencustody.terminal import interrupts
from tokencustody.terminal.printing import as_json, plural, print_json, printable
from tokencustody.terminal.progress import progress


def backup(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The file to write, readable by its owner only.")
    ],
    url: Url,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace FILE, once the new backup is whole and proven.")
    ] = False,
    json: Json = False,
) -> None:
    """Copy a SQLite database to FILE while it is written: one snapshot, with every call acknowledged before it began.

    FILE appears when it is whole, checked and synced, or not at all. To restore it, stop whatever uses the database and
    put FILE in its place. For PostgreSQL it names pg_dump.
    """
    from tokencustody.backup.backup import back_up

    with interrupts.raised():
        made = back_up(url, file, overwrite=overwrite, watch=progress)
    waiting = _waiting(url)
    if waiting:
        typer.echo(
            f"note: {plural(waiting, 'mark')} for this database waiting on this host, so not in the backup: "
            f"`tokencustody spill replay --url {printable(made.database)}`, then back it up again",
            err=True,
        )
    if json:
        print_json({**as_json(made), "waiting_marks": waiting})
    else:
        held = f"{plural(made.rollouts, 'rollout')}, {plural(made.calls, 'call')}, {made.bytes / 1e6:,.1f} MB"
        typer.echo(printable(f"{made.file}: {held}, at {made.revision}, from {made.database}"))


def _waiting(url: str) -> int:
    """Return how many marks wait on this host for the database, as far as this user may look."""
    from tokencustody.database.url import parse_url
    from tokencustody.spill.files import spill_root
    from tokencustody.spill.marks import Spill

    root = spill_root("")
    if root is None:
        return 0
    try:
        return len(Spill(root, parse_url(url)).files())
    except OSError:
        return 0
