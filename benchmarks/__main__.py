"""Measures the stores beside NeMo Gym's file store, what people write instead and the bare drivers, on one disk.

Within a round the stores take turns, and each round begins with another one. A ratio is that of neighbours within a
round; what is printed is the median of the rounds, with the least and the greatest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import machine
from benchmarks.growth import Growth
from benchmarks.ledger import Ledger
from benchmarks.levels import Levels
from benchmarks.memory import Memory
from benchmarks.processes import Processes
from benchmarks.profiling import Profile
from benchmarks.put import Put
from benchmarks.queueing import TransferQueue
from benchmarks.report import as_json, print_report
from benchmarks.results import Results, in_turn
from benchmarks.rollout import Rollout
from benchmarks.staging import Staging
from benchmarks.stores import Arena
from benchmarks.targets import TARGETS, judge
from benchmarks.workload import Bench, Workload
from tests.support.postgres import postgres_server

# Left out of a quick run unless they are asked for.
_NOT_QUICK = {"rollout-50", "rollout-100", "rollout-200-arrays"}


def workloads(*, quick: bool) -> list[Workload]:
    """Return everything that is measured, in its order; quick ones are fewer and smaller."""
    rounds = 2 if quick else 5
    few = 1 if quick else 3
    return [
        Put("put-1", writers=1, rollouts=8 if quick else 100, rounds=rounds),
        Put("put-16", writers=16, rollouts=32 if quick else 64, rounds=rounds),
        Put("put-64", writers=64, rollouts=64 if quick else 128, rounds=rounds),
        Put(
            "put-16-long",
            writers=16,
            rollouts=16,
            rounds=1 if quick else 5,
            prompt=32_000,
            generated=2_000,
        ),
        *(Rollout(calls=calls, rounds=few) for calls in (10, 50, 100)),
        Rollout(calls=200, rounds=1 if quick else 5, others=not quick),
        Rollout(calls=200, rounds=1 if quick else 5, arrays=True),
        Processes(rollouts=32 if quick else 400, rounds=1 if quick else 5),
        Staging(rollouts=32 if quick else 96, rounds=rounds),
        Ledger(rounds=few),
        Growth(held=50_000 if quick else 1_000_000, rollouts=32 if quick else 64, rounds=rounds),
        *(
            Levels(
                f"levels-{writers}", writers=writers, rollouts=few_rollouts if quick else many, rounds=rounds
            )
            for writers, few_rollouts, many in ((1, 8, 50), (16, 16, 64), (64, 64, 128))
        ),
        Memory(calls=50 if quick else 200),
        Profile(rollouts=64),
        TransferQueue(rollouts={1: 8, 16: 16, 64: 64} if quick else {1: 50, 16: 64, 64: 128}, rounds=rounds),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print tables, and write what was asked for."""
    names = [workload.name for workload in workloads(quick=False)]
    parser = argparse.ArgumentParser(prog="scripts/bench", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds and smaller sizes, within two minutes"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=names,
        metavar="NAME",
        help=f"one of {', '.join(names)}; repeatable",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures to FILE")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write PNG pictures into FOLDER")
    parser.add_argument(
        "--directory", type=Path, help="measure on this folder's disk; default: temporary files"
    )
    parser.add_argument(
        "--coalesce", choices=("process", "rollout", "off"), help="open our stores with this option"
    )
    options = parser.parse_args(arguments)
    if options.directory is not None:
        tempfile.tempdir = str(options.directory.resolve())
    left_out = _NOT_QUICK if options.quick else set()
    chosen = [
        workload
        for workload in workloads(quick=options.quick)
        if (workload.name in options.only if options.only else workload.name not in left_out)
    ]
    console = Console()
    if not console.is_terminal:
        console.width = 130
    began, load_before = perf_counter(), os.getloadavg()
    store_options = {} if options.coalesce is None else {"coalesce": options.coalesce}
    results = Results()
    with tempfile.TemporaryDirectory(prefix="tokencustody-bench-") as name, postgres_server() as server:
        described = machine.describe(Path(name), server)
        for what, value in described.items():
            console.print(f"{what.replace('_', ' ')}: {value}", highlight=False, soft_wrap=True)
        for problem in machine.problems(described):
            console.print(f"[red]{problem}[/red]", highlight=False, soft_wrap=True)
        with Arena(Path(name), server, store_options) as arena:
            seconds_of = _measure(Bench(arena, results, machine.ServerCpu(server)), chosen, console)
    seconds = perf_counter() - began
    settings: dict[str, Any] = {
        "quick": options.quick,
        "coalesce": options.coalesce or "default",
        "rounds": {workload.name: workload.rounds for workload in chosen},
        "seconds": round(seconds, 1),
        "seconds_of_workloads": seconds_of,
        "load_before": load_before,
        "load_after": os.getloadavg(),
    }
    verdicts = [judge(target, results) for target in TARGETS]
    print_report(console, verdicts, results)
    if options.quick:
        console.print(
            "This was a quick run: few rounds, small sizes, figures that only show that it runs.",
            highlight=False,
        )
    load = " before and ".join(f"{each[0]:.1f}" for each in (load_before, settings["load_after"]))
    console.print(f"{seconds:.0f} seconds; load average {load} after", highlight=False)
    if options.json is not None:
        report = as_json(described, settings, verdicts, results)
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    if options.plots is not None:
        from benchmarks.plots import draw  # matplotlib takes a second to import

        kind = "quick run, " if options.quick else ""
        subtitle = f"{kind}{described['cpus']} CPUs, {described['processor']}, {described['file_system']}"
        for path in draw(options.plots, results, subtitle):
            console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    return 0


def _measure(bench: Bench, chosen: list[Workload], console: Console) -> dict[str, float]:
    """Measure, and return how many seconds each workload took."""
    seconds = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        total = sum(workload.rounds * len(workload.stores) for workload in chosen)
        task = progress.add_task("", total=total)
        for workload in chosen:
            began = perf_counter()
            progress.update(task, description=f"{workload.name}: preparing")
            workload.prepare(bench)
            try:
                for turn in range(workload.rounds):
                    for store in in_turn(workload.stores, turn):
                        progress.update(task, description=f"{workload.name}: {store}")
                        workload.measure(bench, store, turn)
                        progress.advance(task)
            finally:
                workload.finish()
            seconds[workload.name] = round(perf_counter() - began, 1)
    return seconds


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
