"""Feeds the library what nobody should, and counts what became of it.

The exit code is 1 when a promise was broken: a wrong value taken for right, an error without a name, a traceback on the
command line, a hang, too much memory. A case that broke one is made again by its target, seed and number.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from campaigns.fuzzing.cases import Found, Summary, Target, run
from campaigns.fuzzing.targets import GROUPS, groups
from campaigns.options import positive
from tests.support.postgres import postgres_server
from tokencustody.schema import migrate

_NEEDS_POSTGRESQL = {"put", "rows"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the targets that were asked for, in turns, until time or cases are up, and print what came of it."""
    options = _options(arguments)
    # What is asked for here is refused, and said to be.
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    console = Console(stderr=options.json)
    if not console.is_terminal:
        console.width = 130
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        targets = _targets(options, folder, stack)
        if options.case is not None:
            targets = [target for target in targets if target.name == options.target]
            summaries = {
                target.name: run(target, options.seed, lambda n: n < 1, first=options.case)
                for target in targets
            }
        else:
            summaries = _run_all(targets, options, console)
    found = [violation for summary in summaries.values() for violation in summary.violations]
    if options.json:
        sys.stdout.write(json.dumps(_as_json(options.seed, summaries), indent=2) + "\n")
    else:
        _print(console, summaries, details=options.ends)
    for violation in found:
        console.print(violation.text, markup=False, highlight=False, soft_wrap=True)
        console.print(
            "make it again: scripts/fuzz "
            f"--seed {violation.seed} --target {violation.target} --case {violation.number}",
            soft_wrap=True,
        )
    if found:
        path = options.reproducers / f"fuzz-{options.seed}.json"
        path.write_text(json.dumps([vars(violation) for violation in found], indent=2) + "\n")
        console.print(f"kept in {path}", soft_wrap=True)
    return 1 if found else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=positive(float), default=5.0, help="how long, for all targets together (5)"
    )
    parser.add_argument(
        "--cases", type=positive(int), help="this many cases of each target instead of minutes"
    )
    parser.add_argument("--only", default=",".join(GROUPS), help=f"some of {','.join(GROUPS)}")
    parser.add_argument("--no-postgresql", action="store_true", help="without a PostgreSQL server of its own")
    parser.add_argument("--target", help="with --case: the target of a case")
    parser.add_argument("--case", type=int, help="run one case again")
    parser.add_argument("--ends", action="store_true", help="count every way in which cases ended")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument(
        "--reproducers", type=Path, default=Path(), help="the folder for what makes violations again (here)"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.only.split(",")) - set(GROUPS):
        parser.error(
            f"--only: no target is named {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}"
        )
    if (options.case is None) != (options.target is None):
        parser.error("--case and --target go together")
    return options


def _targets(options: argparse.Namespace, folder: Path, stack: ExitStack) -> list[Target]:
    wanted = set(options.only.split(","))
    sqlite_url, postgresql_url = f"sqlite:///{folder / 'rows.db'}", None
    if wanted & _NEEDS_POSTGRESQL:
        migrate.upgrade(sqlite_url)
        if not options.no_postgresql:
            postgresql_url = stack.enter_context(postgres_server()).url
            migrate.upgrade(postgresql_url)
    by_group = groups(sqlite_url, postgresql_url)
    return [target for name in GROUPS if name in wanted for target in by_group[name]]


def _run_all(targets: Sequence[Target], options: argparse.Namespace, console: Console) -> dict[str, Summary]:
    summaries: dict[str, Summary] = {}
    share = options.minutes * 60 / len(targets)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[cases]} cases"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for target in targets:
            task = progress.add_task(target.name, total=options.cases or share, cases=0)
            until = time.monotonic() + share

            def goes_on(cases: int, task: Any = task, until: float = until) -> bool:
                left = until - time.monotonic()
                progress.update(task, completed=cases if options.cases else share - left, cases=cases)
                return cases < options.cases if options.cases else left > 0

            summaries[target.name] = run(target, options.seed, goes_on)
    return summaries


def _errors(summary: Summary) -> Counter[str]:
    """Return how often each class of error was met; an end names several, or none."""
    found: Counter[str] = Counter()
    for end, times in summary.ends.items():
        for word in end.replace(",", " ").split():
            if word.endswith("Error"):
                found[word] += times
    return found


def _as_json(seed: int, summaries: dict[str, Summary]) -> dict[str, Any]:
    return {
        "seed": seed,
        "targets": {
            name: {
                "cases": summary.cases,
                "errors": _errors(summary),
                "ends": summary.ends,
                "violations": [vars(violation) for violation in summary.violations],
            }
            for name, summary in summaries.items()
        },
        "cases": sum(summary.cases for summary in summaries.values()),
        "violations": sum(len(summary.violations) for summary in summaries.values()),
    }


def _print(console: Console, summaries: dict[str, Summary], *, details: bool) -> None:
    table = Table("target", "cases", "ends" if details else "named errors", "other ends", "violations")
    for name, summary in summaries.items():
        errors = _errors(summary)
        named = summary.ends if details else errors
        others = summary.cases - len(summary.violations) - sum(errors.values())
        table.add_row(
            name,
            f"{summary.cases:,}",
            "\n".join(f"{count:,} {what}" for what, count in named.most_common()),
            f"{max(others, 0):,}",
            str(len(summary.violations)),
        )
    console.print(table)
    cases = sum(summary.cases for summary in summaries.values())
    found: list[Found] = [each for summary in summaries.values() for each in summary.violations]
    console.print(f"{cases:,} cases, violations: {len(found)}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
