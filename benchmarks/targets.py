"""What the stores should reach, each a ratio within a round, and whether they did."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.results import FIGURES, Figure, Results, Spread, ratios
from benchmarks.staging import staging_workload
from benchmarks.stores import BARE, DATABASES, GYM, POSTGRESQL, SQLITE


@dataclass(frozen=True)
class Target:
    """`over` divided by `under`, or `over` itself, against `bound`: at least that, or at most with `at_most`."""

    name: str
    over: Figure
    under: Figure | None
    bound: float
    at_most: bool = False
    unit: str = "x"
    # Shown beside the two, to tell what they mean.
    beside: tuple[Figure, ...] = ()

    def describe(self, value: float) -> str:
        """Return a measured ratio or the bound as text."""
        return f"{100 * value:.2f}%" if self.unit == "%" else f"{value:.2f}x"

    @property
    def demand(self) -> str:
        """The bound with its direction."""
        return f"{'at most' if self.at_most else 'at least'} {self.describe(self.bound)}"

    def parts(self) -> list[Figure]:
        """Return the figures that the ratio was made of, and those beside them."""
        return [figure for figure in (self.over, self.under, *self.beside) if figure is not None]


@dataclass(frozen=True)
class Verdict:
    """A target with the ratios of the rounds. None were measured when its workloads were left out."""

    target: Target
    spread: Spread | None

    @property
    def text(self) -> str:
        """Return met, missed or not measured."""
        if self.spread is None:
            return "not measured"
        bound = self.target.bound
        met = self.spread.median <= bound if self.target.at_most else self.spread.median >= bound
        return "met" if met else "missed"


def judge(target: Target, results: Results) -> Verdict:
    """Return whether the median of the rounds reaches the target."""
    over = results.figures.get(target.over)
    under = results.figures.get(target.under) if target.under else None
    if over is None or (target.under is not None and under is None):
        return Verdict(target, None)
    scale = 100 if target.under is None and target.unit == "%" else 1
    return Verdict(target, Spread.of(ratios(over, under) if under else [value / scale for value in over]))


def _figure(workload: str, store: str, key: str) -> Figure:
    return Figure(workload, store, FIGURES[key])


def _put(store: str, writers: int, bound: float) -> Target:
    workload = f"put-{writers}"
    return Target(
        f"{store} put, {writers} writer{'s' if writers > 1 else ''}, over Gym's files",
        _figure(workload, store, "put_rate"),
        _figure(workload, GYM, "put_rate"),
        bound,
    )


_ROLLOUT = "rollout-200"


def _of_rollout(store: str, what: str, key: str, bound: float) -> Target:
    """Return a target for how many times as long Gym's store takes."""
    return Target(
        f"{store}, 200-call rollout: {what}, Gym's time over ours",
        _figure(_ROLLOUT, GYM, key),
        _figure(_ROLLOUT, store, key),
        bound,
    )


TARGETS: tuple[Target, ...] = (
    _put(SQLITE, 1, 1.5),
    _put(SQLITE, 64, 5.0),
    Target(
        "SQLite put, 64 writers: p99 over Gym's",
        _figure("put-64", SQLITE, "put_p99"),
        _figure("put-64", GYM, "put_p99"),
        0.3,
        at_most=True,
    ),
    _put(POSTGRESQL, 1, 1.0),
    _put(POSTGRESQL, 64, 3.0),
    Target(
        "PostgreSQL put, 64 writers: serialization retries",
        _figure("put-64", POSTGRESQL, "retries"),
        None,
        0.01,
        at_most=True,
        unit="%",
        beside=(_figure("processes", POSTGRESQL, "retries"),),
    ),
    *(
        Target(
            f"{store} put, {label}, over {BARE[store]} with the same rows per commit",
            _figure(workload, store, "put_rate"),
            _figure(workload, BARE[store], "put_rate"),
            0.6,
            beside=(_figure(workload, store, "pack_rate"), _figure(workload, store, "rows_per_commit")),
        )
        for store in DATABASES
        for workload, label in (
            ("put-1", "1 writer"),
            ("put-16", "16 writers"),
            ("put-64", "64 writers"),
            ("put-16-long", "16 writers, 34,000 tokens"),
        )
    ),
    *(
        Target(
            f"{store}, 200-call rollout: bytes on disk over Gym's file",
            _figure(_ROLLOUT, store, "disk"),
            _figure(_ROLLOUT, GYM, "disk"),
            0.03,
            at_most=True,
            unit="%",
            beside=(_figure(_ROLLOUT, store, "payload"),),
        )
        for store in DATABASES
    ),
    *(
        Target(
            f"{store}, 200-call rollout: put of the last 20 calls over the first 20",
            _figure(_ROLLOUT, store, "put_late"),
            _figure(_ROLLOUT, store, "put_early"),
            1.5,
            at_most=True,
            beside=(_figure(_ROLLOUT, GYM, "put_late"), _figure(_ROLLOUT, GYM, "put_early")),
        )
        for store in DATABASES
    ),
    *(_of_rollout(store, "freeze", "freeze", 8.0) for store in DATABASES),
    *(
        _of_rollout(store, what, key, 1.5)
        for store in DATABASES
        for what, key in (
            ("resolve before each of the last 20 puts", "resolve_turn"),
            ("resolve again", "resolve_again"),
            ("resolve in a new process", "resolve_cold"),
        )
    ),
    *(
        Target(
            f"{store} staging, 16 threads over one",
            _figure(staging_workload(16), store, "stage_rate"),
            _figure(staging_workload(1), store, "stage_rate"),
            bound,
        )
        for store, bound in ((POSTGRESQL, 3.0), (SQLITE, 4.0))
    ),
    *(
        Target(
            f"{store} growth: put rate, full database over an empty one",
            _figure("growth", store, "full_rate"),
            _figure("growth", store, "empty_rate"),
            0.9,
        )
        for store in DATABASES
    ),
)
