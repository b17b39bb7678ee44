"""`tokencustody spill …`: the marks that wait on this host until their database can be reached."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokencustody.schema.command import Json, Url
from tokencustody.terminal.printing import console, literal, moment, plural, print_json, printable

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from tokencustody.spill.marks import SpilledFile

DEADLINE = 10.0

spill = typer.Typer(
    help="See, replay and decide about the marks that wait on this host for their database.",
    no_args_is_help=True,
)

Folder = Annotated[
    Path | None,
    typer.Option(
        "--spill",
        help="The folder that the stores name by their option spill. Default: TOKENCUSTODY_SPILL, else "
        "tokencustody/spill in the XDG state folder.",
    ),
]


DamagedFile = Annotated[
    Path, typer.Argument(help="A damaged file, as the refused freeze or `spill list` names it.")
]


Of = Annotated[
    str | None,
    typer.Option(
        "--of",
        metavar="URL",
        help="Another address, as `spill list` shows it, under which the marks were kept: for a database that was "
        "moved to a new server, or is reached by several.",
    ),
]


@spill.command("list")
def list_(folder: Folder = None, as_json: Json = False) -> None:
    """List the marks that wait, of every database, and the corrupt files. Exit code 1 if there are any."""
    from tokencustody.spill.marks import spilled_files

    root = _root(folder)
    with _looking():
        files = spilled_files(root)
    if as_json:
        print_json({"folder": str(root), "files": [_document(file) for file in files]})
    elif not files:
        typer.echo(f"no mark waits in {root}")
    else:
        marks = [file for file in files if file.mark]
        corrupt = [file for file in files if not file.mark]
        if marks:
            console(folds=True).print(_table(marks))
        for file in corrupt:
            typer.echo(f"corrupt: {printable(str(file.path))}")
        typer.echo(f"{_counted(files)} in {root}")
        if marks:
            typer.echo("replay with: tokencustody spill replay --url URL")
        if corrupt:
            typer.echo(
                "a corrupt file was the mark of a rollout, which is neither frozen nor let go here: a freeze names it, "
                "and `tokencustody spill mark` or `tokencustody spill discard` decides"
            )
    if files:
        raise typer.Exit(1)


@spill.command()
def replay(
    url: Url,
    folder: Folder = None,
    of: Of = None,
    as_json: Json = False,
) -> None:
    """Bring the marks that wait for a database, of every run, into it. Exit code 1 if any are left or corrupt."""
    import asyncio

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from tokencustody.database.url import parse_url
    from tokencustody.schema.opening import CaptureDatabase
    from tokencustody.spill import replaying
    from tokencustody.spill.marks import Spill

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    database = CaptureDatabase(parse_url(url), deadline=DEADLINE, creates=False)
    waiting = Spill(_root(folder), parse_url(of) if of else database.url)
    replayed = {True: 0, False: 0}
    err = Console(stderr=True)
    bar = Progress(
        TextColumn("replaying"),
        BarColumn(),
        MofNCompleteColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )

    async def run() -> None:
        try:
            with database.doors() as doors:
                await doors.reached()
            bar.update(task, total=len(waiting.waiting()))
            await replaying.replay(database, waiting, settled)
        finally:
            await database.close()

    def settled(stored: bool) -> None:
        replayed[stored] += 1
        bar.advance(task)

    with _looking(), bar:
        task = bar.add_task("", total=len(waiting.waiting()) or None)
        # Also when nothing waits: an address that leads nowhere is no success.
        asyncio.run(run())
        left = waiting.files()
    if as_json:
        corrupt = sum(file.mark is None for file in left)
        print_json(
            {
                "replayed": replayed[True],
                "discarded": replayed[False],
                "waiting": len(left) - corrupt,
                "corrupt": corrupt,
            }
        )
    else:
        discarded = f", {replayed[False]:,} of retired rollouts discarded" if replayed[False] else ""
        rest = f"; {_counted(left)} in {waiting.folder}" if left else ""
        typer.echo(f"{waiting.address}: {plural(replayed[True], 'mark')} replayed{discarded}{rest}")
    if left:
        raise typer.Exit(1)


@spill.command()
def mark(
    file: DamagedFile,
    rollout: Annotated[str, typer.Argument(help="The rollout, as the refused freeze names it.")],
    url: Url,
    run: Annotated[str, typer.Option("--run", help="The rollout's run.")] = "default",
    of: Of = None,
) -> None:
    """Mark the rollout of a damaged file as incomplete, and remove the file.

    By its name the file belongs to one rollout, by its folder to one database: in no other anything is marked. Where
    --of names the address of that folder, the database must know the rollout.
    """
    import asyncio

    from tokencustody.database.url import parse_url
    from tokencustody.ids import check_rollout_id
    from tokencustody.schema.opening import CaptureDatabase
    from tokencustody.spill.marks import Spill
    from tokencustody.txn.fence import RolloutKey, find_fence_txn

    key = RolloutKey(check_rollout_id(run, "run"), check_rollout_id(rollout))
    _refuse_whole(file)
    database = CaptureDatabase(parse_url(url), deadline=DEADLINE, creates=False)
    folder = file.absolute().parent
    own = Spill(folder.parent, database.url)
    kept = Spill(folder.parent, parse_url(of)) if of else own
    if folder.name != kept.folder.name:
        raise typer.BadParameter(
            f"{printable(str(file))} is not of {kept.address}, so nothing was marked: name its database, or, where "
            "that has another address now, by --of the one under which the mark was kept"
        )
    made = kept.mark_of(file, key, f"{socket.gethostname()}:{os.getpid()}")
    if made is None:
        raise typer.BadParameter(f"{file.name} was no mark of rollout {rollout} of run {run}")

    def settle(connection: Connection) -> bool | None:
        # That it is the same database, --of only says.
        if kept.folder != own.folder and find_fence_txn(connection, key) is None:
            return None
        return made.settle_txn(connection)

    async def store() -> bool | None:
        try:
            return await database.write(settle)
        finally:
            await database.close()

    stored = asyncio.run(store())
    if stored is None:
        raise typer.BadParameter(
            f"{database.url.display} has no rollout {rollout} of run {run}, so nothing was marked: name its database"
        )
    _remove(file)
    if stored:
        typer.echo(
            f"rollout {rollout} of run {run} is marked as incomplete, and {printable(str(file))} removed"
        )
    else:
        typer.echo(
            f"rollout {rollout} of run {run} was retired: nothing to mark; {printable(str(file))} removed"
        )


@spill.command()
def discard(
    file: DamagedFile,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove a damaged file, after which its rollout can be frozen as if no call was lost."""
    _refuse_whole(file)
    if not yes:
        typer.confirm("Was no call of its rollout lost? The rollout may then be trained on", abort=True)
    _remove(file)
    typer.echo(f"{printable(str(file))} removed")


def _refuse_whole(file: Path) -> None:
    from tokencustody.spill.marks import is_damaged

    try:
        damaged = is_damaged(file)
    except FileNotFoundError:
        raise typer.BadParameter(f"there is no file {printable(str(file))}") from None
    except OSError:
        damaged = True
    if not damaged:
        raise typer.BadParameter(
            f"{printable(str(file))} is not a damaged mark: `tokencustody spill replay` brings it in"
        )


def _remove(file: Path) -> None:
    from tokencustody.database.folders import sync_folder

    try:
        file.unlink()
        sync_folder(file.parent)
    except OSError as exc:
        typer.echo(f"error: {printable(str(file))} cannot be removed: {exc.strerror}; remove it", err=True)
        raise typer.Exit(1) from None


def _root(folder: Path | None) -> Path:
    from tokencustody.spill.files import spill_root

    if folder is not None and not folder.is_dir():
        raise typer.BadParameter(f"{folder} is no folder", param_hint="--spill")
    root = spill_root(folder or "")
    if root is None:
        raise typer.BadParameter("marks are kept nowhere: name the folder", param_hint="--spill")
    return root


@contextmanager
def _looking() -> Iterator[None]:
    try:
        yield
    except PermissionError as exc:
        typer.echo(f"error: marks may wait in {printable(str(exc.filename))}: {exc.strerror}", err=True)
        raise typer.Exit(1) from None


def _document(file: SpilledFile) -> dict[str, Any]:
    if file.mark is None:
        return {"file": str(file.path), "corrupt": True}
    return {
        "file": str(file.path),
        "corrupt": False,
        "database": file.database,
        "run": file.mark.key.run,
        "rollout_id": file.mark.key.rollout_id,
        "model_call_id": file.mark.model_call_id,
        "at": file.mark.stamp.at.isoformat(),
        "written_by": file.mark.stamp.by,
    }


def _table(files: list[SpilledFile]) -> Any:
    from rich.table import Table

    table = Table("at", "database", "run", "rollout", "call", box=None)
    for file in files:
        if file.mark is not None:
            key = file.mark.key
            row = (file.database, key.run, key.rollout_id, file.mark.model_call_id or "(unnamed)")
            table.add_row(moment(file.mark.stamp.at), *map(literal, row))
    return table


def _counted(files: list[SpilledFile]) -> str:
    corrupt = sum(file.mark is None for file in files)
    said = [plural(len(files) - corrupt, "mark")] if len(files) > corrupt else []
    return " and ".join([*said, *([plural(corrupt, "corrupt file")] if corrupt else [])])
