"""Cuts the power of a database while calls are written to it, and counts the acknowledged ones that are lost.

    python -m campaigns.power_cut --database sqlite|postgresql [--cuts N] [--seed S] [--json] [--unsafe]

The database lies on an ext4 file system on a loop device, which the cut shuts down without flushing. Writers log every
acknowledged call, synced, outside of it. After the cut the writers and the server are killed, the file system is
mounted again, and every rollout is frozen and compared with what was written. `--unsafe` turns the databases' syncing
off, which must lose calls, else the cut is none.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import selectors
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import Pool, event

from campaigns.disks import PowerDisk
from campaigns.history import HistoryWriter, Outcome, read_history
from campaigns.options import positive
from campaigns.servers import PostgresCluster
from tokencustody import CaptureStore, ParentResolutionStatus, TokenEntry, open_store, stamp_lineage
from tokencustody.database import postgresql
from tokencustody.errors import CorruptEntryError, StoreUnavailableError
from tokencustody.txn import inserting

WRITERS = 2
TASKS = 4
_CALLS_PER_ROLLOUT = 20
_MOST_ACKNOWLEDGED = 150


@dataclass
class Summary:
    """What became of the calls: acknowledged before the cut, lost of these, and there without having been."""

    database: str
    seed: int
    unsafe: bool
    cuts: int = 0
    acknowledged: int = 0
    lost: int = 0
    unsure: int = 0


def make_entry(rollout: str, call: str) -> TokenEntry:
    """Return the entry of a call, which its ids alone determine."""
    rng = random.Random(f"{rollout} {call}")
    length = rng.choice([3, 200, 2000])
    entry = TokenEntry(
        rollout_id=rollout,
        model_call_id=call,
        prompt_token_ids=[rng.randrange(150_000) for _ in range(length)],
        generation_token_ids=[rng.randrange(150_000) for _ in range(length // 2)],
        generation_log_probs=[-rng.random() for _ in range(length // 2)],
        output_items=[{"role": "assistant", "content": f"answer {rng.random()}"}],
        created_at=1_700_000_000.0 + rng.random(),
    )
    return stamp_lineage(entry, None, parent_resolution=ParentResolutionStatus.ROOT)


class _Place(Protocol):
    """Where a database is."""

    def url(self, cut: int) -> str: ...

    def kill(self) -> None: ...

    def start(self) -> None: ...

    def clear(self) -> None: ...


class _Files:
    """SQLite: a new file for each cut, so that its creation is cut too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def url(self, cut: int) -> str:
        return f"sqlite:///{self._folder / f'captures-{cut}.db'}"

    def kill(self) -> None: ...

    def start(self) -> None: ...

    def clear(self) -> None:
        for path in self._folder.glob("captures-*"):
            path.unlink()


class _Server:
    """PostgreSQL: one database, which recovers from every cut."""

    def __init__(self, cluster: PostgresCluster) -> None:
        self._cluster = cluster
        self._url = cluster.create_database("captures")
        cluster.fetch("CHECKPOINT")

    def url(self, cut: int) -> str:
        return self._url

    def kill(self) -> None:
        self._cluster.kill_postmaster()

    def start(self) -> None:
        self._cluster.start()

    def clear(self) -> None: ...


@contextlib.contextmanager
def _place(database: str, disk: PowerDisk, *, unsafe: bool) -> Iterator[_Place]:
    if database == "sqlite":
        yield _Files(disk.folder)
        return
    # Else the server writes its log five times a second by itself.
    settings = {"wal_writer_delay": "10s"} if unsafe else {}
    with PostgresCluster(disk.folder, settings=settings) as cluster:
        yield _Server(cluster)


def run(
    database: str,
    *,
    cuts: int,
    seed: int,
    unsafe: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> Summary:
    """Cut the power `cuts` times, each after a random number of acknowledged calls, and count what is lost."""
    if unsafe:
        sync_nothing()
    rng = random.Random(seed)
    summary = Summary(database, seed, unsafe)
    with (
        PowerDisk(1 << 30) as disk,
        tempfile.TemporaryDirectory(prefix="tokencustody-logs-") as logs,
        _place(database, disk, unsafe=unsafe) as place,
    ):
        for cut in range(cuts):
            log = Path(logs) / str(cut)
            log.mkdir()
            # The first ones come while the database is new.
            acknowledged = rng.choice([1, rng.randint(1, 10), rng.randint(1, _MOST_ACKNOWLEDGED)])
            with _writers(place.url(cut), log, cut, unsafe=unsafe) as writers:
                _wait_for(writers, acknowledged)
                cut_at = disk.cut()
            place.kill()
            disk.remount()
            place.start()
            lost, unsure, count = asyncio.run(_compare(place.url(cut), log, cut_at))
            place.clear()
            summary.cuts += 1
            summary.acknowledged += count
            summary.lost += lost
            summary.unsure += unsure
            progress(f"cut {cut + 1} of {cuts}: {count} calls acknowledged, {lost} lost")
    return summary


@contextlib.contextmanager
def _writers(url: str, log: Path, cut: int, *, unsafe: bool) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    with contextlib.ExitStack() as stack:
        writers = []
        for number in range(WRITERS):
            arguments = ["--write", str(log), "--number", f"{cut}-{number}", *["--unsafe"] * unsafe]
            writer = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "campaigns.power_cut", *arguments],
                    # Not an argument, which every user sees: it has the password.
                    env=os.environ | {"DATABASE_URL": url},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    bufsize=0,
                )
            )
            stack.callback(writer.kill)
            writers.append(writer)
        yield writers


def _wait_for(writers: Sequence[subprocess.Popen[bytes]], acknowledged: int) -> None:
    with selectors.DefaultSelector() as selector:
        for writer in writers:
            assert writer.stdout is not None
            selector.register(writer.stdout, selectors.EVENT_READ)
        while acknowledged > 0:
            for key, _ in selector.select():
                told = os.read(key.fd, 4096)
                if not told:
                    (ended,) = (each for each in writers if each.stdout is key.fileobj)
                    raise RuntimeError(f"a writer ended before the cut, with status {ended.wait(10)}")
                acknowledged -= len(told)


async def _compare(url: str, log: Path, cut_at: int) -> tuple[int, int, int]:
    """Return how many acknowledged calls are lost or differ, how many others are there, and how many there were."""
    operations = read_history(log)
    async with open_store(url) as store:
        found: dict[tuple[str, str], TokenEntry] = {}
        for rollout in {operation.rollout for operation in operations}:
            snapshot = await store.source.freeze(rollout)
            found.update({(rollout, entry.model_call_id): entry for entry in snapshot.entries})
    lost = 0
    acknowledged = {
        (operation.rollout, operation.arguments["call"])
        for operation in operations
        if operation.returned_at is not None and operation.returned_at < cut_at
    }
    for rollout, call in acknowledged:
        entry = found.pop((rollout, call), None)
        # A float's repr tells its every bit.
        lost += entry is None or repr(entry.model_dump()) != repr(make_entry(rollout, call).model_dump())
    return lost, len(found), len(acknowledged)


async def write(url: str, log: Path, number: str) -> None:
    """Put calls until killed; log each that was acknowledged, then tell it by a byte on standard output."""

    async def put(store: CaptureStore, writer: HistoryWriter, task: int) -> None:
        for count in range(1_000_000):
            rollout, call = f"cut-{number}-{task}-{count // _CALLS_PER_ROLLOUT}", f"call-{count}"
            operation = writer.invoke("put", rollout, call=call)
            await store.sink.put(make_entry(rollout, call))
            writer.answer(operation, Outcome.OK)
            os.write(sys.stdout.fileno(), b".")

    async with open_store(url) as store:
        with contextlib.ExitStack() as stack:
            logs = [
                stack.enter_context(HistoryWriter(log / f"{number}-{task}.jsonl", f"{number}-{task}"))
                for task in range(TASKS)
            ]
            await asyncio.gather(*(put(store, each, task) for task, each in enumerate(logs)))


def sync_nothing() -> None:
    """Take the protection of this process's stores away, to show what a cut does without it."""
    never = "set_config('synchronous_commit', 'off', true)"
    inserting.DURABLE_COMMIT = postgresql.DURABLE_COMMIT = never  # type: ignore[attr-defined]

    @event.listens_for(Pool, "checkout")
    def relax(connection: Any, *_: object) -> None:
        # After the store has made sure that its connections are safe.
        is_file = isinstance(connection, sqlite3.Connection)
        cursor = connection.cursor()
        cursor.execute("PRAGMA synchronous = NORMAL" if is_file else "SET synchronous_commit = off")
        cursor.close()
        if not is_file:
            connection.commit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cuts and print the summary; the status is 1 when calls were lost (with --unsafe: when none were)."""
    parser = argparse.ArgumentParser(prog="scripts/power-cut", description=f"{main.__doc__} Needs root.")
    parser.add_argument("--database", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--cuts", type=positive(int), default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--unsafe", action="store_true", help="turn syncing off: calls must be lost")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--number", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.write and os.geteuid():
        parser.error("only root can mount the disk whose power is cut")
    if options.write:
        if options.unsafe:
            sync_nothing()
        try:
            asyncio.run(write(os.environ["DATABASE_URL"], options.write, options.number))
        # What is read from a disk that is gone may look damaged.
        except (CorruptEntryError, StoreUnavailableError) as exc:
            # Before the cut it would be a reason that must be seen.
            print(f"the writer ended, as it must after a cut: {exc}", file=sys.stderr, flush=True)
        # The disk is gone; the end comes from outside, or with the end of who started it.
        sys.stdin.read()
        return 0
    summary = run(
        options.database,
        cuts=options.cuts,
        seed=options.seed,
        unsafe=options.unsafe,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if options.json:
        print(json.dumps(asdict(summary)))
    else:
        print(", ".join(f"{name}: {value}" for name, value in asdict(summary).items()))
    return int(bool(summary.lost) != options.unsafe)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
