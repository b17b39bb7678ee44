"""What the stores should reach, each a ratio within a round, and whether they did."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.results import FIGURES, Figure, Results, Spread, ratios
from benchmarks.staging import staging_workload
from benchmarks.stores import BARE, GYM, POSTGRESQL, SQLITE


@dataclass(frozen=True)
class Target:
    """`over` divided by `under`, or `over` itself, against `bound`: at least that, or at most with `at_most`.

    `unit` is `x` or `%` for a ratio; without `under` it is that of the figure, and the bound of a `%` is a part of 1.
    """

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
        return f"{100 * value:.2f}%" if self.unit == "%" else f"{value:.2f}{self.unit}"

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


def _put(store: str, workload: str, label: str, bound: float) -> Target:
    return Target(
        f"{store} put, {label}, over Gym's files",
        _figure(workload, store, "put_rate"),
        _figure(workload, GYM, "put_rate"),
        bound,
    )


_ROLLOUT = "rollout-200"


def _of_rollout(store: str, what: str, gyms: str, ours: str, bound: float) -> Target:
    """Return a target for how many times as long Gym's store takes."""
    return Target(
        f"{store}, 200-call rollout: {what}, Gym's time over ours",
        _figure(_ROLLOUT, GYM, gyms),
        _figure(_ROLLOUT, store, ours),
        bound,
    )


def _of_database(store: str, one_writer: float, many_writers: float) -> tuple[Target, ...]:
    """Return the targets of one database. `one_writer` and `many_writers` are the bounds of its puts over Gym's."""
    return (
        _put(store, "put-1", "1 writer", one_writer),
        _put(store, "put-64", "64 writers", many_writers),
        Target(
            f"{store} put, 64 writers: p99 over Gym's",
            _figure("put-64", store, "put_p99"),
            _figure("put-64", GYM, "put_p99"),
            0.5,
            at_most=True,
        ),
        Target(
            f"{store} put, 64 writers, over {BARE[store]} with the same rows per commit",
            _figure("put-64", store, "put_rate"),
            _figure("put-64", BARE[store], "put_rate"),
            0.5,
            beside=(_figure("put-64", store, "pack_rate"), _figure("put-64", store, "rows_per_commit")),
        ),
        _put(store, "put-16-long", "16 writers, 32,000-token prompts", 4.0),
        Target(
            f"{store}, 200-call rollout: put of the last 20 calls over the first 20",
            _figure(_ROLLOUT, store, "put_late"),
            _figure(_ROLLOUT, store, "put_early"),
            2.0,
            at_most=True,
            beside=(_figure(_ROLLOUT, GYM, "put_late"), _figure(_ROLLOUT, GYM, "put_early")),
        ),
        _of_rollout(store, "all puts", "put_all", "put_all", 1.6),
        _of_rollout(store, "freeze", "freeze", "freeze", 8.0),
        _of_rollout(store, "freeze as arrays", "freeze", "freeze_arrays", 30.0),
        *(
            _of_rollout(store, what, key, key, 1.5)
            for what, key in (
                ("resolve before each of the last 20 puts", "resolve_turn"),
                ("resolve again", "resolve_again"),
                ("resolve in a new process", "resolve_cold"),
            )
        ),
        Target(
            f"{store}, 200-call rollout: bytes on disk over Gym's file",
            _figure(_ROLLOUT, store, "disk"),
            _figure(_ROLLOUT, GYM, "disk"),
            0.026,
            at_most=True,
            unit="%",
            beside=(_figure(_ROLLOUT, store, "payload"),),
        ),
        Target(
            f"{store} staging, 16 threads over one",
            _figure(staging_workload(16), store, "stage_rate"),
            _figure(staging_workload(1), store, "stage_rate"),
            3.0,
        ),
        Target(
            f"{store} growth: put rate, full database over an empty one",
            _figure("growth", store, "full_rate"),
            _figure("growth", store, "empty_rate"),
            0.9,
        ),
    )


TARGETS: tuple[Target, ...] = (
    *_of_database(SQLITE, one_writer=1.5, many_writers=6.0),
    *_of_database(POSTGRESQL, one_writer=1.2, many_writers=5.0),
    Target(
        "SQLite put, 4 processes with 16 writers each: p99",
        _figure("processes", SQLITE, "put_p99"),
        None,
        60.0,
        at_most=True,
        unit=" ms",
        beside=(_figure("processes", GYM, "put_p99"),),
    ),
    Target(
        "PostgreSQL put, 64 writers: serialization retries",
        _figure("put-64", POSTGRESQL, "retries"),
        None,
        0.01,
        at_most=True,
        unit="%",
        beside=(_figure("processes", POSTGRESQL, "retries"),),
    ),
)
