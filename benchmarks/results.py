"""What was measured: one value for each round, and what is said of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True, slots=True)
class Figure:
    """What a value is: of which workload and store. `name` ends with the unit in brackets."""

    workload: str
    store: str
    name: str


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of the rounds with the least and the greatest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(median(values), min(values), max(values))


@dataclass
class Results:
    """The values of each figure and curve in the order of the rounds, with what cannot be said in numbers."""

    figures: dict[Figure, list[float]] = field(default_factory=dict)
    # A curve has one value for each call of a rollout.
    curves: dict[Figure, list[list[float]]] = field(default_factory=dict)
    profiles: dict[str, list[ProfiledFunction]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, workload: str, store: str, **values: float) -> None:
        """Add a round's values. A keyword names its figure through FIGURES."""
        for key, value in values.items():
            self.figures.setdefault(Figure(workload, store, FIGURES[key]), []).append(value)

    def add_curve(self, workload: str, store: str, key: str, values: Sequence[float]) -> None:
        """Add a round's curve."""
        self.curves.setdefault(Figure(workload, store, FIGURES[key]), []).append(list(values))

    def note(self, text: str) -> None:
        """Add a sentence about how something was measured, once."""
        if text not in self.notes:
            self.notes.append(text)

    def workloads(self) -> Iterator[str]:
        """Yield the workloads that have figures, in the order of measuring."""
        yield from dict.fromkeys(figure.workload for figure in self.figures)


@dataclass(frozen=True, slots=True)
class ProfiledFunction:
    """One line of a profile: the CPU seconds of the function's own, without what it called, in all threads, and their
    share of those of all functions."""

    function: str
    calls: int
    own_seconds: float
    share: float


FIGURES = {
    "put": "put [ms]",
    "resolve": "resolve before the put [ms]",
    "put_rate": "puts [1/s]",
    "floor_share": "share of the bare driver's puts [%]",
    "put_p50": "put, median [ms]",
    "put_p99": "put, p99 [ms]",
    "pack_rate": "checking and packing alone [1/s]",
    "rows_per_commit": "calls per commit",
    "retries": "retries [% of calls]",
    "client_cpu": "CPU per call [ms]",
    "server_cpu": "server's CPU per call [ms]",
    "freeze_rate": "freezes [1/s]",
    "put_early": "put, first 20 calls [ms]",
    "put_late": "put, last 20 calls [ms]",
    "put_all": "all puts [s]",
    "resolve_turn": "resolve before each of the last 20 puts [ms]",
    "resolve_again": "resolve again [ms]",
    "resolve_cold": "resolve in a new process [ms]",
    "freeze": "freeze in a new process [ms]",
    "freeze_arrays": "freeze in a new process, as arrays [ms]",
    "disk": "on disk [MB]",
    "payload": "payloads [MB]",
    "freeze_memory": "peak memory of the freeze [MB]",
    "writer_memory": "peak memory of the writer [MB]",
    "stage_rate": "stages [1/s]",
    "stage_p99": "stage, p99 [ms]",
    "record": "record, median [ms]",
    "manifest": "manifest, median [ms]",
    "empty_rate": "puts into an empty database [1/s]",
    "full_rate": "puts into a full database [1/s]",
    "committed_rate": "puts at read committed [1/s]",
    "alone_rate": "puts at read committed, each in plain statements [1/s]",
    "serializable_rate": "puts, serializable [1/s]",
    "serializable_share": "puts, serializable over read committed [x]",
}


def percentile(values: Sequence[float], part: float) -> float:
    """Return the least value that at least `part` (0 to 1) of the values do not exceed."""
    return sorted(values)[max(math.ceil(part * len(values)) - 1, 0)]


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Return the ratio within each round."""
    return [above / below for above, below in zip(over, under, strict=True)]


def in_turn(stores: Sequence[str], turn: int) -> list[str]:
    """Return the stores in the order of one round: each round begins with another one."""
    start = turn % len(stores)
    return [*stores[start:], *stores[:start]]


def shares(count: int, parts: int) -> Iterator[slice]:
    """Yield slices that cut `count` rows into `parts` pieces of as equal a size as can be."""
    for part in range(parts):
        yield slice(part * count // parts, (part + 1) * count // parts)
