"""The parts of the benchmark that measure nothing. No test asserts a time."""

from __future__ import annotations

import io
from array import array
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from rich.console import Console

from benchmarks.__main__ import main, workloads
from benchmarks.bare import Batches
from benchmarks.calls import growing_rollout, independent_rollouts, ledger_line, rollout_name, staged_rollout
from benchmarks.others import JsonLines, create_plain_table, plain_table
from benchmarks.put import add_floor
from benchmarks.queueing import NOT_INSTALLED, TRANSFER_QUEUE, TransferQueue
from benchmarks.report import as_json, figures_table, print_report, puts_table, targets_table
from benchmarks.results import FIGURES, Figure, Results, Spread, in_turn, percentile, ratios, shares
from benchmarks.rollout import in_arrays
from benchmarks.stores import GYM, POSTGRESQL, SQLITE, STORES
from benchmarks.targets import TARGETS, Target, judge
from benchmarks.timing import Stopwatch
from benchmarks.workload import Bench
from tokencustody.lineage import RolloutLineage

if TYPE_CHECKING:
    from benchmarks.machine import ServerCpu
    from benchmarks.stores import Arena

RATE = FIGURES["put_rate"]


def put_target(bound: float, *, at_most: bool = False) -> Target:
    return Target(
        "SQLite over Gym", Figure("put-1", SQLITE, RATE), Figure("put-1", GYM, RATE), bound, at_most=at_most
    )


def measured(ours: list[float], gyms: list[float]) -> Results:
    results = Results()
    for mine, other in zip(ours, gyms, strict=True):
        results.add("put-1", SQLITE, put_rate=mine)
        results.add("put-1", GYM, put_rate=other)
    return results


def took(seconds: float) -> Stopwatch:
    watch = Stopwatch()
    watch.seconds = seconds
    return watch


def everything() -> Results:
    results = Results()
    for target in TARGETS:
        for figure in target.parts():
            results.figures.setdefault(figure, [1.0, 2.0])
    return results


@pytest.mark.parametrize(
    ("part", "value"), [(0.0, 1), (0.01, 1), (0.5, 50), (0.99, 99), (0.991, 100), (1.0, 100)]
)
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(part: float, value: int) -> None:
    assert percentile(range(100, 0, -1), part) == value


def test_a_percentile_of_one_value_is_that_value() -> None:
    assert percentile([7.0], 0.99) == 7.0


def test_a_ratio_compares_neighbours_of_one_round() -> None:
    assert ratios([10, 40], [5, 10]) == [2, 4]
    with pytest.raises(ValueError, match="zip"):
        ratios([10, 40], [5])


def test_each_round_begins_with_another_store_and_has_all_of_them() -> None:
    rounds = [in_turn(STORES, turn) for turn in range(6)]
    assert [order[0] for order in rounds] == [*STORES, *STORES]
    assert all(sorted(order) == sorted(STORES) for order in rounds)


@pytest.mark.parametrize(("count", "parts"), [(10, 3), (10, 10), (10, 1), (7, 4)])
def test_the_bare_driver_commits_as_often_as_the_store_with_every_row_once(count: int, parts: int) -> None:
    rows = list(range(count))
    pieces = [rows[piece] for piece in shares(count, parts)]
    assert list(chain.from_iterable(pieces)) == rows
    assert len(pieces) == parts
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


@pytest.mark.parametrize(
    ("calls", "commits", "writers", "connections"),
    [(100, 100, 1, 1), (640, 640, 64, 4), (640, 20, 64, 2), (640, 10, 64, 1), (640, 5, 64, 1)],
)
def test_the_bare_driver_has_as_many_connections_as_waiting_writers_fill(
    calls: int, commits: int, writers: int, connections: int
) -> None:
    assert Batches.like(calls, commits, writers) == Batches(commits, connections)


@pytest.mark.parametrize(
    ("bound", "at_most", "verdict"),
    [(2.0, False, "met"), (2.1, False, "missed"), (2.0, True, "met"), (1.9, True, "missed")],
)
def test_a_target_is_judged_by_the_median_of_the_ratios_within_rounds(
    bound: float, at_most: bool, verdict: str
) -> None:
    # The ratio of the medians would be 1.
    results = measured([10, 30, 20], [20, 15, 10])
    judged = judge(put_target(bound, at_most=at_most), results)
    assert judged.spread == Spread(2.0, 0.5, 2.0)
    assert judged.text == verdict


@pytest.mark.parametrize(
    ("unit", "figure", "met", "missed"), [("%", "retries", 0.99, 1.01), (" ms", "put_p99", 59.9, 60.1)]
)
def test_a_share_of_calls_and_a_time_are_judged_as_they_are(
    unit: str, figure: str, met: float, missed: float
) -> None:
    target = next(target for target in TARGETS if target.under is None and target.unit == unit)
    for value, verdict in ((met, "met"), (missed, "missed")):
        results = Results()
        results.add(target.over.workload, target.over.store, **{figure: value})
        judged = judge(target, results)
        assert judged.text == verdict
        assert judged.spread is not None
        assert target.describe(judged.spread.median) == f"{value:.2f}{unit}"


def test_a_target_whose_workload_was_left_out_has_no_verdict() -> None:
    results = Results()
    results.add("put-1", SQLITE, put_rate=1)
    assert judge(put_target(1.0), results).text == "not measured"
    assert judge(put_target(1.0), Results()).text == "not measured"


def test_every_target_is_of_a_figure_that_some_workload_measures() -> None:
    names = {
        name for quick in (True, False) for name in {workload.name for workload in workloads(quick=quick)}
    }
    for target in TARGETS:
        for figure in target.parts():
            assert figure.workload.partition(",")[0] in names
            assert figure.name in FIGURES.values()


def test_a_quick_run_measures_what_every_target_needs() -> None:
    quick = {workload.name for workload in workloads(quick=True)}
    assert {figure.workload.partition(",")[0] for target in TARGETS for figure in target.parts()} <= quick


def test_the_table_has_every_target_with_its_parts_and_verdict() -> None:
    results = everything()
    console = Console(width=200, record=True, file=io.StringIO())
    verdicts = [judge(target, results) for target in TARGETS]
    console.print(targets_table(verdicts, results))
    console.print(figures_table(results))
    text = console.export_text()
    for verdict in verdicts:
        assert verdict.target.name in text
        assert verdict.target.demand in text
        assert verdict.text in ("met", "missed")
    assert "puts [1/s]: SQLite 1.5 (1..2), Gym files 1.5 (1..2)" in text


def test_each_put_stands_beside_gyms_files_and_its_floor() -> None:
    results = measured([20], [16])
    add_floor(results, "put-1", SQLITE, calls=240, commits=60, watch=took(6.0))
    results.add("put-1", TRANSFER_QUEUE, put_rate=5)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(puts_table(results))
    rows = [line.split() for line in console.export_text().splitlines()]
    assert ["put-1", "SQLite", "20", "1.25x", "40", "50%"] in rows
    assert ["Gym", "files", "16", "1.00x"] in rows
    assert ["TransferQueue", "(in", "memory)", "5"] in rows
    assert results.figures[Figure("put-1", SQLITE, FIGURES["floor_share"])] == [50]


def test_the_json_has_the_value_of_each_round() -> None:
    results = measured([10, 30], [20, 15])
    report = as_json({"cpus": 2}, {"quick": True}, [judge(put_target(3.0), results)], results)
    assert report["quick"] is True
    assert report["targets"][0]["verdict"] == "missed"
    assert report["targets"][0]["measured"] == {"median": 1.25, "low": 0.5, "high": 2.0}
    assert [part["rounds"] for part in report["targets"][0]["parts"]] == [[10, 30], [20, 15]]
    assert [figure["rounds"] for figure in report["figures"]] == [[10, 30], [20, 15]]


def test_an_unknown_workload_is_refused_with_the_names_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "nothing"])
    assert "put-64" in capsys.readouterr().err


def test_every_call_of_a_growing_rollout_resolves_to_the_one_before() -> None:
    rollout = growing_rollout(5)
    lineage = RolloutLineage()
    for entry, request in zip(rollout.entries, rollout.requests[:-1], strict=True):
        match = lineage.resolve(request).match
        assert (match and match.model_call_id) == entry.parent_call_id
        lineage.add_entry(entry)
    match = lineage.resolve(rollout.requests[-1]).match
    assert match is not None
    last = rollout.entries[-1]
    assert list(match.cumulative_token_ids) == last.prompt_token_ids + last.generation_token_ids


def test_rollouts_have_names_of_their_own() -> None:
    assert len({rollout_name(number) for number in range(10_000)}) == 10_000
    rollouts = independent_rollouts(3, prompt=4, generated=2)
    assert len({(call.rollout_id, call.model_call_id) for calls in rollouts for call in calls}) == 30


def test_staged_and_ledger_calls_go_on_from_the_one_before() -> None:
    staged = staged_rollout("rollout", added=2, sampled=3)
    assert [record.parent_call_id for record in staged[1:]] == [
        record.model_call_id for record in staged[:-1]
    ]
    commits = list(ledger_line(3))
    assert [len(commit.staging_chain) for commit in commits] == [1, 2, 3]


def test_a_database_is_never_its_own_reference() -> None:
    for target in TARGETS:
        assert target.over != target.under
        if "over Gym's files" in target.name:
            assert target.under is not None
            assert target.over.store in (SQLITE, POSTGRESQL)
            assert target.under.store == GYM


async def test_what_people_write_instead_gives_back_what_it_was_given(
    tmp_path: Path, unused_store_url: str
) -> None:
    calls = growing_rollout(3).entries
    await create_plain_table(unused_store_url)
    table = plain_table(unused_store_url)
    for store in (JsonLines(str(tmp_path)), table):
        try:
            for call in calls:
                await store.put(call)
            assert (await store.freeze(calls[0].rollout_id)).entries == calls
        finally:
            await store.close()


def test_a_call_in_arrays_is_the_same_call() -> None:
    [call] = growing_rollout(1).entries
    given = in_arrays(call)
    assert isinstance(given.prompt_token_ids, array)
    assert given == call


def test_the_report_says_how_to_install_what_could_not_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.queueing.is_installed", lambda: False)
    results = Results()
    workload = TransferQueue(rollouts={1: 1}, rounds=5)
    workload.prepare(Bench(cast("Arena", None), results, cast("ServerCpu", None)))
    assert workload.rounds == 0
    console = Console(width=200, record=True, file=io.StringIO())
    print_report(console, [], results)
    assert NOT_INSTALLED in console.export_text()
