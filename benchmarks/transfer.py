"""Moves rollouts all the way: Gym's files, SQLite, PostgreSQL, SQLite again, and files again; and compares them all.

Each step is one command of tokencustody in a process of its own, of which the time and the peak of its resident memory
are taken. A database is equal to another if both hold the same calls with the same payload hashes; a file, if what it
holds has them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter

import nemo_gym.token_id_capture as gym
from rich.console import Console
from rich.table import Table
from sqlalchemy import func, select

from benchmarks.stores import GYM, native
from benchmarks.timing import in_new_process
from tests.support import databases
from tests.support.postgres import postgres_server
from tokencustody import ParentResolutionStatus, TokenEntry, stamp_continuation, stamp_lineage
from tokencustody.database.url import parse_url
from tokencustody.export.parquet import require_pyarrow
from tokencustody.records import compute_digest
from tokencustody.schema import migrate
from tokencustody.schema.opening import CaptureDatabase
from tokencustody.schema.tables import entries

MOST_MEGABYTES = 300  # of any process
_RUN = "transfer"
_CALLS = 10
_SEED = 20_240_601

# A call, and its payload's SHA-256.
Payloads = dict[tuple[str, str], str]


@dataclass(frozen=True)
class Size:
    """How many rollouts, and the ids of the first prompt, of what each further one adds, and of what is sampled."""

    rollouts: int
    prompt: int
    added: int
    sampled: int


FULL, QUICK = Size(500, 2_000, 250, 500), Size(12, 100, 20, 40)


@dataclass(frozen=True)
class Step:
    """What one process did; `megabytes` are those of the payloads or files that it moved."""

    name: str
    seconds: float
    rollouts: int
    calls: int
    megabytes: float
    peak_megabytes: float


def write_rollouts(folder: str, size: Size, numbers: range) -> float:
    """Write rollouts through Gym's own store and freeze them; return the peak of this process in megabytes."""

    async def write() -> None:
        files = gym.TokenCaptureStore(folder)
        for number in numbers:
            for entry in _rollout(number, size):
                await files.begin_call(entry.rollout_id, entry.model_call_id)
                await files.put(native(GYM, entry))
            await files.freeze(entry.rollout_id)
        await files.close()

    asyncio.run(write())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def _rollout(number: int, size: Size) -> Iterator[TokenEntry]:
    rng = random.Random(_SEED + number)
    rollout_id = f"rollout-{number:05}"
    request = [{"role": "user", "content": f"task {number}"}]
    tokens: list[int] = []
    parent: str | None = None
    for call in range(_CALLS):
        prompt = tokens + [rng.randrange(151_936) for _ in range(size.added if tokens else size.prompt)]
        sampled = [rng.randrange(151_936) for _ in range(size.sampled)]
        answer = {"role": "assistant", "content": f"answer {call} " + "word " * size.sampled}
        entry = TokenEntry(
            rollout_id=rollout_id,
            model_call_id=f"call-{call:03}",
            model="policy",
            prompt_token_ids=prompt,
            generation_token_ids=sampled,
            generation_log_probs=[-rng.expovariate(1) for _ in sampled],
            output_items=[answer],
            token_item_index=0,
            response_id=f"response-{number}-{call}",
            created_at=1_700_000_000.0 + call,
        )
        status = ParentResolutionStatus.RESOLVED if parent else ParentResolutionStatus.ROOT
        yield stamp_continuation(stamp_lineage(entry, parent, parent_resolution=status), request)
        parent, tokens = entry.model_call_id, prompt + sampled
        request = [*request, answer, {"role": "user", "content": f"step {call}"}]


class Transfer:
    """Takes the steps in `folder`, with a PostgreSQL database at `postgres`."""

    def __init__(self, folder: Path, postgres: str, size: Size, console: Console) -> None:
        self._folder = folder
        self._postgres = postgres
        self._size = size
        self._console = console
        self.steps: list[Step] = []
        self.payload_megabytes = 0.0

    def run(self) -> Payloads:
        """Take every step and return the payloads, which are the same everywhere. Raises AssertionError otherwise."""
        files = self._folder / "gym"
        self._write(files)
        first, second, third = (
            f"sqlite:///{self._folder / name}.db" for name in ("first", "second", "third")
        )
        size = _megabytes(files)
        run = ("--run", _RUN)
        self._command("import Gym files to SQLite", size, "import", str(files), "--url", first, *run)
        self._command("import them again", size, "import", str(files), "--url", first, *run)
        payloads, stored = payloads_of(first)
        assert len(payloads) == self._size.rollouts * _CALLS
        self.payload_megabytes = stored
        migrate.upgrade(self._postgres)
        copy = ("copy", *run, "--from")
        self._command("copy SQLite to PostgreSQL", stored, *copy, first, "--to", self._postgres)
        self._equal(self._postgres, payloads)
        self._command("copy PostgreSQL to SQLite", stored, *copy, self._postgres, "--to", second)
        self._equal(second, payloads)
        self._command("copy them again", stored, *copy, self._postgres, "--to", second)
        parquet_files, gym_files = self._folder / "parquet", self._folder / "gym-again"
        source = ("--url", second, *run)
        self._command("export to Parquet", stored, "export", str(parquet_files), *source)
        # Not in this process: what it takes at its largest counts as taken by each child it starts.
        in_new_process(check_parquet, parquet_files, payloads)
        self._command("export to Gym files", stored, "export", str(gym_files), *source, "--format", "gym")
        self._command(
            "import the exported Gym files",
            _megabytes(gym_files),
            *("import", str(gym_files), "--url", third, *run),
        )
        self._equal(third, payloads)
        return payloads

    def _write(self, folder: Path) -> None:
        """Write Gym's files in two processes."""
        parts = [range(self._size.rollouts)[part::2] for part in range(2)]
        began = perf_counter()
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
            peaks = list(pool.map(write_rollouts, [str(folder)] * 2, [self._size] * 2, parts))
        self._add("Gym's store writes files", perf_counter() - began, _megabytes(folder), max(peaks))

    def _command(self, name: str, megabytes: float, *arguments: str) -> None:
        """Run a command, and see it succeed."""
        began = perf_counter()
        command = [sys.executable, "-m", "tokencustody", *arguments]
        with tempfile.TemporaryFile() as output:
            child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            seconds = perf_counter() - began
            if child.returncode:
                output.seek(0)
                said = output.read().decode(errors="replace")[-2_000:]
                raise RuntimeError(f"{name}: exit code {child.returncode}: {said}")
        # macOS counts bytes.
        peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
        self._add(name, seconds, megabytes, peak)

    def _add(self, name: str, seconds: float, megabytes: float, peak: float) -> None:
        rollouts = self._size.rollouts
        self.steps.append(Step(name, seconds, rollouts, rollouts * _CALLS, megabytes, peak))
        self._console.print(f"{name}: {seconds:.1f} s", highlight=False)

    def _equal(self, url: str, expected: Payloads) -> None:
        found, _ = payloads_of(url)
        assert found == expected, "the databases differ"


def payloads_of(url: str) -> tuple[Payloads, float]:
    """Return the payload hashes of a database, and how many megabytes of payloads it stores."""
    columns = (entries.c.rollout_id, entries.c.model_call_id, entries.c.payload_sha256)
    found = select(*columns, func.length(entries.c.payload)).where(entries.c.run == _RUN)

    async def read() -> tuple[Payloads, float]:
        database = CaptureDatabase(parse_url(url), creates=False)
        try:
            rows = await database.read(lambda connection: connection.execute(found).all())
        finally:
            await database.close()
        return {(row[0], row[1]): row[2] for row in rows}, sum(row[3] for row in rows) / 1e6

    return asyncio.run(read())


def check_parquet(folder: Path, payloads: Payloads) -> None:
    """Check that the chains hold every call once, and that each has the ids that its digest says."""
    _, parquet = require_pyarrow()
    found: Payloads = {}
    columns = ["rollout_id", "call_ids", "payload_sha256", "token_ids", "digest"]
    for path in sorted(folder.rglob("*.parquet")):
        for batch in parquet.ParquetFile(path).iter_batches(16, columns=columns):
            for row in batch.to_pylist():
                calls = [(row["rollout_id"], call) for call in row["call_ids"]]
                found |= dict(zip(calls, row["payload_sha256"], strict=True))
                assert compute_digest(row["token_ids"]) == row["digest"], "a chain has other ids"
    assert found == payloads, "the Parquet files differ"


def table_of(steps: Sequence[Step]) -> Table:
    """Return the steps as a table."""
    table = Table("step", "seconds", "rollouts/s", "calls/s", "MB/s", "peak MB", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for step in steps:
        rates = (step.rollouts / step.seconds, step.calls / step.seconds, step.megabytes / step.seconds)
        cells = (f"{step.seconds:.1f}", *(f"{rate:,.1f}" for rate in rates), f"{step.peak_megabytes:.0f}")
        table.add_row(step.name, *cells)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the steps, and print what they took. Exit code 1 if a process took too much memory."""
    parser = argparse.ArgumentParser(prog="scripts/transfer", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="a few small rollouts, within a minute")
    parser.add_argument("--rollouts", type=int, metavar="N", help="another number of rollouts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--directory", type=Path, help="work on this folder's disk; default: temporary files")
    options = parser.parse_args(arguments)
    if options.rollouts is not None and options.rollouts < 1:
        parser.error("--rollouts must be at least 1")
    if options.directory is not None and not options.directory.is_dir():
        parser.error(f"{options.directory} is no folder")
    size = QUICK if options.quick else FULL
    size = replace(size, rollouts=options.rollouts or size.rollouts)
    console = Console()
    with (
        postgres_server() as server,
        databases.fresh(server) as url,
        tempfile.TemporaryDirectory(dir=options.directory) as folder,
    ):
        transfer = Transfer(Path(folder), url, size, console)
        payloads = transfer.run()
    console.print(table_of(transfer.steps))
    console.print(
        f"{len(payloads):,} calls are equal everywhere. MB/s are of the files for imports, and of the "
        f"{transfer.payload_megabytes:,.1f} MB of stored payloads for copies and exports.",
        highlight=False,
    )
    if options.json is not None:
        figures = {"size": asdict(size), "steps": [asdict(step) for step in transfer.steps]}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    too_large = [step.name for step in transfer.steps if step.peak_megabytes > MOST_MEGABYTES]
    for name in too_large:
        console.print(f"{name} took more than {MOST_MEGABYTES} MB", style="bold red")
    return 1 if too_large else 0


def _megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
