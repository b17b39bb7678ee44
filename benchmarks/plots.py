"""The figures as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.queueing import TRANSFER_QUEUE
from benchmarks.results import FIGURES, Figure, Results, Spread
from benchmarks.stores import BARE, COMPARED, GYM, JSONL, PLAIN, POSTGRESQL, SQLITE

_COLOURS = {
    GYM: "#888888",
    SQLITE: "#1f77b4",
    POSTGRESQL: "#d9642c",
    JSONL: "#2ca02c",
    TRANSFER_QUEUE: "#9467bd",
}
_COLOURS |= {other: _COLOURS[store] for others in (BARE, PLAIN) for store, other in others.items()}
_STYLES = dict.fromkeys(BARE.values(), ":") | dict.fromkeys(PLAIN.values(), "--")


def draw(folder: Path, results: Results, subtitle: str) -> list[Path]:
    """Write a picture for each subject that was measured into `folder`, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    by_writers = [
        ("put_rate", "puts a second", _lines_over(results, "put-", "put_rate")),
        ("put_p99", "put, p99 in ms", _lines_over(results, "put-", "put_p99")),
    ]
    by_calls = [
        ("put", "put in ms", _curves(results, "put")),
        ("disk", "on disk in MB", _lines_over(results, "rollout-", "disk")),
        ("freeze", "freeze in a new process in ms", _lines_over(results, "rollout-", "freeze")),
    ]
    written = []
    for name, axis, panels in (
        ("writers", "writers", by_writers),
        ("rollout", "calls in the rollout", by_calls),
    ):
        if any(lines for _, _, lines in panels):
            written.append(_picture(folder / f"{name}.png", axis, panels, subtitle))
    return written


Line = tuple[Sequence[float], Sequence[Spread]]


def _lines_over(results: Results, prefix: str, key: str) -> dict[str, Line]:
    """Return the line of each store over the number that ends the names of the workloads with this prefix."""
    lines: dict[str, Line] = {}
    for store in (*COMPARED, *BARE.values(), TRANSFER_QUEUE):
        points = {
            int(number): Spread.of(results.figures[figure])
            for workload in results.workloads()
            if workload.startswith(prefix) and (number := workload.removeprefix(prefix)).isdigit()
            if (figure := Figure(workload, store, FIGURES[key])) in results.figures
        }
        if points:
            lines[store] = (sorted(points), [points[at] for at in sorted(points)])
    return lines


def _curves(results: Results, key: str) -> dict[str, Line]:
    """Return the line of each store over the calls of its longest rollout."""
    lines: dict[str, Line] = {}
    for store in COMPARED:
        curves = [
            rounds
            for figure, rounds in results.curves.items()
            if figure.store == store and figure.name == FIGURES[key]
        ]
        if curves:
            longest = max(curves, key=lambda rounds: len(rounds[0]))
            points = [Spread.of(values) for values in zip(*longest, strict=True)]
            lines[store] = (range(1, len(points) + 1), points)
    return lines


def _picture(path: Path, axis: str, panels: list[tuple[str, str, dict[str, Line]]], subtitle: str) -> Path:
    figure, all_axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.8), layout="constrained")
    for axes, (_, label, lines) in zip(all_axes, panels, strict=True):
        for store, (positions, spreads) in lines.items():
            _draw_line(axes, store, positions, spreads)
        axes.set_yscale("log")
        axes.set_xlabel(axis)
        axes.set_ylabel(label)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(_plain)
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(visible=True, which="major", alpha=0.3)
    if axis == "writers":
        for axes in all_axes:
            axes.set_xscale("log", base=2)
            ticks = sorted(
                {position for _, _, lines in panels for at, _ in lines.values() for position in at}
            )
            axes.set_xticks(ticks, [str(int(tick)) for tick in ticks])
    handles = {
        store: handle
        for axes in all_axes
        for handle, store in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False, fontsize=8
    )
    figure.suptitle(subtitle, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _draw_line(axes: Any, store: str, positions: Sequence[float], spreads: Sequence[Spread]) -> None:
    middles = [spread.median for spread in spreads]
    few = len(positions) < 20
    if few:
        axes.fill_between(
            positions,
            [s.low for s in spreads],
            [s.high for s in spreads],
            color=_COLOURS[store],
            alpha=0.15,
            linewidth=0,
        )
    else:
        # One call's time is noise; the median of it and its neighbours shows the course.
        middles = [median(middles[max(at - 4, 0) : at + 5]) for at in range(len(middles))]
    axes.plot(
        positions,
        middles,
        marker="o" if few else None,
        linestyle=_STYLES.get(store, "-"),
        color=_COLOURS[store],
        label=f"{store} alone" if store in BARE.values() else store,
    )


def _plain(value: float, _position: int | None = None) -> str:
    return f"{value:g}"
