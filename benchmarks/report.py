"""The figures as tables for a person and as JSON for a program."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.results import FIGURES, Figure, Results, Spread, ratios
from benchmarks.stores import BARE, COMPARED, GYM
from benchmarks.targets import Target, Verdict

_RATE = FIGURES["put_rate"]
_STYLES = {"met": "green", "missed": "red", "not measured": "dim"}


def print_report(console: Console, verdicts: list[Verdict], results: Results) -> None:
    """Print the profiles, every figure, and the targets last, where a person looks first."""
    for store, functions in results.profiles.items():
        table = Table(title=f"{store}: 64 writers' puts by function", box=SIMPLE_HEAD, title_justify="left")
        table.add_column("own CPU [ms]", justify="right", no_wrap=True)
        table.add_column("share", justify="right", no_wrap=True)
        table.add_column("calls", justify="right", no_wrap=True)
        table.add_column("function", overflow="fold")
        for each in functions:
            table.add_row(
                f"{1000 * each.own_seconds:.0f}",
                f"{100 * each.share:.1f}%",
                f"{each.calls:,}",
                each.function,
            )
        console.print(table, highlight=False)
    console.print(figures_table(results), highlight=False)
    if any(figure.name == _RATE for figure in results.figures):
        console.print(puts_table(results), highlight=False)
    measured = [verdict for verdict in verdicts if verdict.spread is not None]
    if measured:
        console.print(targets_table(measured, results), highlight=False)
    for note in results.notes:
        console.print(note, highlight=False, soft_wrap=True)
    counts = {text: sum(verdict.text == text for verdict in verdicts) for text in _STYLES}
    console.print(", ".join(f"{count} {text}" for text, count in counts.items() if count), highlight=False)


def puts_table(results: Results) -> Table:
    """Return one row for the puts of each store: beside Gym's files, and beside the floor, where there is one.

    The floor is the bare driver with the same rows in as many commits.
    """
    table = Table(title="puts: medians of the rounds", box=SIMPLE_HEAD, title_justify="left")
    table.add_column("workload", no_wrap=True)
    table.add_column("store", no_wrap=True)
    for column in ("puts [1/s]", "p99 [ms]", "over Gym's", "floor [1/s]", "share of it"):
        table.add_column(column, justify="right", no_wrap=True)
    above = ""
    for workload, store in [(each.workload, each.store) for each in results.figures if each.name == _RATE]:
        if store in BARE.values():
            continue

        def of(store: str, key: str, workload: str = workload) -> list[float] | None:
            return results.figures.get(Figure(workload, store, FIGURES[key]))

        rates, gyms, p99 = of(store, "put_rate") or [], of(GYM, "put_rate"), of(store, "put_p99")
        floor = of(BARE[store], "put_rate") if store in BARE else None
        # What did not take turns with Gym's has no ratio within a round.
        comparable = gyms is not None and store in COMPARED
        table.add_row(
            workload if workload != above else "",
            store,
            _number(median(rates)),
            _number(median(p99)) if p99 else "",
            f"{median(ratios(rates, gyms or [])):.2f}x" if comparable else "",
            _number(median(floor)) if floor else "",
            f"{100 * median(ratios(rates, floor)):.0f}%" if floor else "",
        )
        above = workload
    return table


def targets_table(verdicts: list[Verdict], results: Results) -> Table:
    """Return one row for each target, and under its name the parts that its ratio was made of."""
    table = Table(title="targets", box=SIMPLE_HEAD, title_justify="left")
    table.add_column("figure")
    table.add_column("measured (range)", justify="right", no_wrap=True)
    table.add_column("target", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for verdict in verdicts:
        target, spread = verdict.target, verdict.spread
        measured = ""
        if spread is not None:
            low, high = target.describe(spread.low), target.describe(spread.high)
            measured = f"{target.describe(spread.median)} ({low}..{high})"
        table.add_row(
            "\n".join([target.name, *(f"  [dim]{line}[/dim]" for line in _parts(target, results))]),
            measured,
            target.demand,
            f"[{_STYLES[verdict.text]}]{verdict.text}[/]",
        )
    return table


def _parts(target: Target, results: Results) -> list[str]:
    """Return a line for each figure, with the stores that have it."""
    figures = [figure for figure in target.parts() if figure in results.figures]
    lines = []
    for name in dict.fromkeys(figure.name for figure in figures):
        same = [figure for figure in figures if figure.name == name]
        of_one_store = len({figure.store for figure in same}) < len(same)
        values = [
            f"{each.workload if of_one_store else each.store} {shown(Spread.of(results.figures[each]))}"
            for each in same
        ]
        lines.append(_escaped(f"{name}: {', '.join(values)}"))
    return lines


def figures_table(results: Results) -> Table:
    """Return every figure, the stores of a workload beside each other."""
    table = Table(title="figures: median (range over the rounds)", box=SIMPLE_HEAD, title_justify="left")
    table.add_column("workload", no_wrap=True)
    table.add_column("figure", no_wrap=True)
    table.add_column("store", no_wrap=True)
    table.add_column("measured (range)", justify="right", no_wrap=True)
    for workload in results.workloads():
        figures = [figure for figure in results.figures if figure.workload == workload]
        names = list(dict.fromkeys(figure.name for figure in figures))
        for name in names:
            same = [figure for figure in figures if figure.name == name]
            for index, figure in enumerate(same):
                table.add_row(
                    workload if name == names[0] and index == 0 else "",
                    _escaped(name) if index == 0 else "",
                    figure.store,
                    shown(Spread.of(results.figures[figure])),
                    end_section=name == names[-1] and figure == same[-1],
                )
    return table


def shown(spread: Spread) -> str:
    """Return a median with its range, in as many digits as it deserves."""
    return f"{_number(spread.median)} ({_number(spread.low)}..{_number(spread.high)})"


def as_json(
    machine: dict[str, Any], settings: dict[str, Any], verdicts: list[Verdict], results: Results
) -> dict[str, Any]:
    """Return everything, each figure with the value of each round."""
    return {
        "machine": machine,
        **settings,
        "targets": [
            {
                "figure": verdict.target.name,
                "target": verdict.target.bound,
                "at_most": verdict.target.at_most,
                "verdict": verdict.text,
                "measured": None if verdict.spread is None else asdict(verdict.spread),
                "parts": [
                    _series(figure, results.figures[figure])
                    for figure in verdict.target.parts()
                    if figure in results.figures
                ],
            }
            for verdict in verdicts
        ],
        "figures": [_series(figure, values) for figure, values in results.figures.items()],
        "curves": [asdict(figure) | {"rounds": rounds} for figure, rounds in results.curves.items()],
        "profiles": {
            store: [asdict(function) for function in functions]
            for store, functions in results.profiles.items()
        },
        "notes": results.notes,
    }


def _series(figure: Figure, values: list[float]) -> dict[str, Any]:
    return asdict(figure) | asdict(Spread.of(values)) | {"rounds": values}


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")
