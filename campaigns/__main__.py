"""Lets several processes work on one database, brings faults about, and judges whether every answer was right.

The seed decides what is sent and which faults strike in which order; how processes interleave is the machine's affair.
The exit code is 1 when a promise was broken, when a rollout could not be decided, or when a worker crashed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import secrets
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from campaigns import driver, worker
from campaigns.options import positive
from campaigns.report import Campaign, Summary
from campaigns.setups import SETUPS
from tokencustody.database import postgresql
from tokencustody.states import Isolation

_SETTINGS = "campaign.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign, or check one again, and print what came of it."""
    options = _options(arguments)
    console = Console(stderr=options.json)
    if not console.is_terminal:
        console.width = 130
    # Everything that was started is stopped, as when Ctrl-C is pressed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    multiprocessing.set_forkserver_preload([worker.__name__, postgresql.__name__])
    if options.check is not None:
        campaign = Campaign(**json.loads((options.check / _SETTINGS).read_text()))
        summary = Summary(campaign, checked_again=True)
        driver.judge(options.check, summary)
        _print(console, summary, as_json=options.json)
        return 0 if summary.passed else 1
    folder = _folder(options.keep)
    campaign = _campaign(options)
    (folder / _SETTINGS).write_text(json.dumps(vars(campaign)))
    try:
        summary = _run(campaign, folder, console, keep=options.keep is not None)
    except BaseException:
        console.print(f"it did not come to its end; its files are in {folder}", soft_wrap=True)
        raise
    _print(console, summary, as_json=options.json)
    if not summary.passed:
        console.print(f"run it again: scripts/campaign {_as_options(campaign)}", soft_wrap=True)
        console.print(f"check it again: scripts/campaign --check {folder}", soft_wrap=True)
    elif options.keep is None:
        shutil.rmtree(folder)
    return 0 if summary.passed else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--database", choices=list(SETUPS), default="sqlite", help="default: sqlite")
    parser.add_argument("--seed", type=int, help="default: drawn, and printed")
    parser.add_argument(
        "--operations", type=positive(int), default=20_000, metavar="N", help="default: 20000"
    )
    parser.add_argument(
        "--minutes", type=positive(float), metavar="M", help="end sooner, after so many minutes"
    )
    parser.add_argument("--workers", type=positive(int), default=4, metavar="N", help="processes; default: 4")
    parser.add_argument(
        "--isolation",
        type=_levels,
        default=[Isolation.READ_COMMITTED],
        metavar="A,B",
        help=f"the levels at which workers open their stores, out of {', '.join(Isolation)}; default: read committed",
    )
    parser.add_argument(
        "--faults",
        metavar="A,B",
        help="out of those of the database (default: all; none: no faults): "
        + "; ".join(f"{name}: {', '.join(driver.known_faults(name))}" for name in SETUPS),
    )
    parser.add_argument(
        "--fault-every", type=positive(int), default=200, metavar="N", help="operations; default: 200"
    )
    parser.add_argument(
        "--kill-every",
        type=positive(int),
        default=400,
        metavar="N",
        help="a worker dies before it has passed its fault point more than N times; default: 400",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="leave the history here; after a violation it is always kept",
    )
    parser.add_argument(
        "--check", type=Path, metavar="FOLDER", help="only check the history that was kept here"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    options = parser.parse_args(arguments)
    if options.check is not None and not (options.check / _SETTINGS).exists():
        parser.error(f"--check: {options.check} holds no history that was kept")
    if options.database == "pgbouncer" and Isolation.SERIALIZABLE in options.isolation:
        parser.error("--isolation: no store is serializable behind a pooler")
    known = driver.known_faults(options.database)
    if options.faults is None:
        options.faults = known
    else:
        options.faults = [] if options.faults == "none" else options.faults.split(",")
    if unknown := set(options.faults) - set(known):
        parser.error(
            f"--faults: {', '.join(sorted(unknown))} cannot happen to {options.database} here; "
            f"choose out of {', '.join(known)}"
        )
    return options


def _campaign(options: argparse.Namespace) -> Campaign:
    return Campaign(
        database=options.database,
        seed=secrets.randbelow(10**6) if options.seed is None else options.seed,
        operations=options.operations,
        minutes=options.minutes,
        workers=options.workers,
        faults=options.faults,
        fault_every=options.fault_every,
        kill_every=options.kill_every,
        isolation=options.isolation,
    )


def _levels(text: str) -> list[str]:
    levels = text.split(",")
    if unknown := set(levels) - set(Isolation):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))} is none of {', '.join(Isolation)}")
    return levels


def _folder(keep: Path | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="tokencustody-campaign-"))
    keep.mkdir(parents=True, exist_ok=True)
    if any(keep.iterdir()):
        raise SystemExit(f"--keep: {keep} is not empty")
    return keep.resolve()


def _run(campaign: Campaign, folder: Path, console: Console, *, keep: bool) -> Summary:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[struck]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=campaign.operations, struck="")

        def progress(doing: str, done: int, of: int, struck: Counter[str]) -> None:
            said = ", ".join(f"{name} {count}" for name, count in sorted(struck.items()))
            doing = f"{campaign.database}, seed {campaign.seed}: {doing}"
            bar.update(task, description=doing, completed=done, total=of, struck=said)

        return driver.run(campaign, folder, progress, keep=keep)


def _print(console: Console, summary: Summary, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary.as_json(), indent=2))
    else:
        summary.print(console)


def _as_options(campaign: Campaign) -> str:
    minutes = "" if campaign.minutes is None else f" --minutes {campaign.minutes:g}"
    return (
        f"--database {campaign.database} --seed {campaign.seed} --operations {campaign.operations}{minutes} "
        f"--workers {campaign.workers} --faults {','.join(campaign.faults) or 'none'} "
        f"--fault-every {campaign.fault_every} --kill-every {campaign.kill_every} "
        f"--isolation '{','.join(campaign.isolation)}'"
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
