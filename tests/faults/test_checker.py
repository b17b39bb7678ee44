"""Histories that must be accepted though they look wrong, and random ones beside an enumeration of all orders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from campaigns.board import Board
from campaigns.checker import audit, check
from campaigns.history import Outcome, read_history
from campaigns.model import OPERATIONS
from campaigns.rules import explain
from campaigns.worker import Settings, Worker
from tests.faults.checker_histories import (
    ROLLOUT,
    Story,
    is_legal_by_enumeration,
    mutate,
    put,
    random_history,
    resolution,
    snapshot,
)
from tokencustody import open_store

FROZEN, RETIRED = "TokenCaptureFrozenError", "TokenCaptureRetiredError"
CONFLICT = "PayloadConflictError"

_LEGAL: list[Callable[[Story], None]] = []
_ALLOWED: list[Callable[[Story], None]] = []


def legal(tell: Callable[[Story], None]) -> Callable[[Story], None]:
    _LEGAL.append(tell)
    return tell


def allowed(tell: Callable[[Story], None]) -> Callable[[Story], None]:
    _ALLOWED.append(tell)
    return tell


@legal
def a_killed_put_shows_later(story: Story) -> None:
    story.begin("put", **put("a"))
    story.do("resolve", resolution("unresolved", "no_match"), conversations=["said by a"])
    story.do("put", **put("b"))
    story.do("freeze", snapshot({"a": "p", "b": "p"}))


@legal
def a_put_that_the_store_gave_up_shows_later(story: Story) -> None:
    story.lose(story.begin("put", **put("a")))
    story.do("resolve", resolution("unresolved", "no_match"), conversations=["said by a"])
    story.do("freeze", snapshot({"a": "p"}))


@legal
def a_killed_put_never_shows(story: Story) -> None:
    story.begin("put", **put("a"))
    story.do("freeze", snapshot())


@legal
def a_killed_conflict_has_effect(story: Story) -> None:
    story.do("put", **put("a", "p"))
    story.begin("put", **put("a", "q"))
    story.do("freeze", snapshot({"a": "p"}, version=2, incomplete=True))


@legal
def a_killed_freeze_closes_the_rollout(story: Story) -> None:
    story.begin("freeze")
    story.do("put", error=FROZEN, **put("a"))
    story.do("freeze", snapshot())
    story.do("drop", True, snapshot_id="snapshot-1", version=1)


@legal
def a_killed_delete_takes_effect_between_two_reads(story: Story) -> None:
    story.do("record", **put("a"))
    story.begin("delete")
    story.do("manifest", {"records": [["a", "p"]], "failures": []})
    story.do("manifest", {"records": [], "failures": []})


@legal
def a_killed_drop_retires_what_a_killed_mark_had_not_changed(story: Story) -> None:
    story.do("freeze", snapshot())
    story.begin("mark", call="a")
    story.begin("drop", snapshot_id="snapshot-1", version=1)
    story.do("put", error=RETIRED, **put("a"))


@legal
def a_put_overlaps_a_freeze_that_does_not_show_it(story: Story) -> None:
    freeze = story.begin("freeze")
    story.do("put", error=FROZEN, **put("a"))
    story.end(freeze, snapshot())


@legal
def a_put_overlaps_a_freeze_that_shows_it(story: Story) -> None:
    freeze = story.begin("freeze")
    story.do("put", **put("a"))
    story.end(freeze, snapshot({"a": "p"}))


@legal
def a_put_that_overlaps_a_delete_is_in_the_next_life(story: Story) -> None:
    story.do("retire", "absent")
    late = story.begin("put", **put("a"))
    story.do("delete", "absent")
    story.end(late)
    story.do("freeze", snapshot({"a": "p"}))


@legal
def a_record_is_discarded_by_a_retired_rollout(story: Story) -> None:
    story.do("record", **put("a"))
    story.do("retire", "removed")
    story.do("record", **put("b"))
    story.do("manifest", error="RolloutRetiredError")
    story.do("delete", "absent")
    story.do("manifest", {"records": [], "failures": []})


@legal
def a_record_that_looks_discarded_was_stored_after_the_delete(story: Story) -> None:
    story.do("retire", "absent")
    record = story.begin("record", **put("a"))
    story.do("delete", "absent")
    story.do("manifest", {"records": [["a", "p"]], "failures": []})
    story.end(record)


@legal
def an_empty_rollout_is_deleted_after_its_freeze(story: Story) -> None:
    delete = story.begin("delete")
    freeze = story.begin("freeze")
    story.do("resolve", resolution("root", None), conversations=[])
    story.end(delete, "absent")
    story.end(freeze, snapshot())
    story.do("freeze", snapshot(snapshot_id="snapshot-2"))


@legal
def a_mark_alone_is_something_to_remove(story: Story) -> None:
    story.do("mark", {"spilled": False}, call="")
    story.do("retire", "removed")


@legal
def a_spilled_mark_is_applied_before_the_last_reads(story: Story) -> None:
    story.do("mark", {"spilled": True}, call="a")
    story.do("freeze", snapshot())
    story.do("freeze", snapshot(version=2, incomplete=True), worker="final")


@legal
def a_spilled_mark_finds_the_rollout_retired(story: Story) -> None:
    story.do("mark", {"spilled": True}, call="a")
    story.do("retire", "absent")
    story.do("freeze", error=RETIRED, worker="final")


@legal
def a_conflicting_call_is_no_parent(story: Story) -> None:
    story.do("put", **put("a", "p"))
    story.do("put", error=CONFLICT, **put("a", "q"))
    story.do("resolve", resolution("unresolved", "no_match"), conversations=["said by a"])
    story.do("freeze", snapshot({"a": "p"}, version=2, incomplete=True))


@legal
def a_conflicting_call_leaves_its_twin_not_as_the_only_one(story: Story) -> None:
    story.do("put", **put("a"))
    story.do("put", **put("b", conversation="said by a", tokens="tokens of a p"))
    story.do("put", error=CONFLICT, **put("b", "q", conversation="said by a", tokens="tokens of a p"))
    story.do("resolve", resolution("unresolved", "ambiguous"), conversations=["said by a"])


@legal
def a_second_payload_leaves_its_twin_not_as_the_only_one(story: Story) -> None:
    story.do("put", **put("a"))
    story.do("put", **put("b"))
    story.do("put", error=CONFLICT, **put("b", "q", conversation="said by a"))
    story.do("resolve", resolution("unresolved", "ambiguous"), conversations=["said by a"])
    story.do("resolve", resolution("unresolved", "no_match"), conversations=["said by b"])


@legal
def a_conflicting_call_is_in_the_way_of_the_ledger(story: Story) -> None:
    story.do("put", **put("a", "p"))
    story.do("put", error=CONFLICT, **put("a", "q"))
    story.do("record", **put("a", "p"))
    story.do("resolve", resolution("unresolved", "no_match"), conversations=["said by a"])
    story.do("record", **put("b", conversation="said by a", tokens="tokens of a p"))
    story.do("resolve", resolution("unresolved", "ambiguous"), conversations=["said by a"])


@legal
def the_smallest_of_interchangeable_ledger_rows_is_the_parent(story: Story) -> None:
    story.do("record", **put("b", conversation="said by a", tokens="tokens of a p"))
    story.do("record", **put("a"))
    found = resolution("resolved", parent="a", tokens="tokens of a p", kind="ledger")
    story.do("resolve", found, conversations=["said by a"])


@legal
def a_delta_on_a_missing_call_cannot_be_proven(story: Story) -> None:
    story.do("put", **put("b", parent="a", delta=True, continues="tokens of a p"))
    story.do("resolve", error="LineageError", conversations=["said by b"])
    story.do("put", **put("a"))
    found = resolution("resolved", parent="b", tokens="tokens of b p", kind="complete")
    story.do("resolve", found, conversations=["said by b"])


@legal
def a_retired_snapshot_is_dropped_again(story: Story) -> None:
    story.do("freeze", snapshot())
    story.do("drop", True, snapshot_id="snapshot-1", version=1)
    story.do("drop", True, snapshot_id="snapshot-1", version=1)
    story.do("drop", False, snapshot_id="snapshot-1", version=2)


@legal
def what_was_staged_outlives_a_delete(story: Story) -> None:
    story.do("stage", call="a", payload="p")
    story.do("delete", "absent")
    story.do("fetch", "p", call="a")


@legal
def a_killed_unstage_takes_effect_late(story: Story) -> None:
    story.do("stage", call="a", payload="p")
    story.begin("unstage", call="a")
    story.do("fetch", "p", call="a")
    story.do("stage", call="a", payload="q")
    story.do("fetch", "q", call="a")


@allowed
def a_put_was_stored_before_the_retirement_that_it_answers(story: Story) -> None:
    late = story.begin("put", **put("a"))
    story.do("freeze", snapshot({"a": "p"}))
    story.do("drop", True, snapshot_id="snapshot-1", version=1)
    story.end(late, error=RETIRED)


@allowed
def a_put_is_stored_anew_after_a_delete(story: Story) -> None:
    late = story.begin("put", **put("a"))
    story.do("resolve", _PARENT_A, conversations=["said by a"])
    story.do("delete", "removed")
    story.do("resolve", resolution("unresolved", "no_match"), conversations=["said by a"])
    story.end(late)
    story.do("freeze", snapshot({"a": "p"}))


@allowed
def two_retires_removed_the_same_records(story: Story) -> None:
    story.do("put", **put("a"))
    first = story.begin("retire")
    story.do("retire", "removed")
    story.end(first, "removed")


@allowed
def a_delete_is_done_twice(story: Story) -> None:
    story.do("record", **put("a"))
    delete = story.begin("delete")
    story.do("manifest", {"records": [], "failures": []})
    story.do("record", **put("b"))
    story.do("manifest", {"records": [["b", "p"]], "failures": []})
    story.end(delete, "removed")
    story.do("manifest", {"records": [], "failures": []})


@allowed
def a_call_is_staged_anew_after_it_was_unstaged(story: Story) -> None:
    late = story.begin("stage", call="a", payload="p")
    story.do("fetch", "p", call="a")
    story.do("unstage", True, call="a")
    story.do("fetch", error="StagedCallMissingError", call="a")
    story.end(late)
    story.do("fetch", "p", call="a")


_PARENT_A = resolution("resolved", parent="a", tokens="tokens of a p", kind="complete")


def _named(tell: Callable[[Story], None]) -> str:
    return tell.__name__.replace("_", " ")


@pytest.mark.parametrize("tell", _LEGAL, ids=_named)
def test_a_legal_history_is_accepted_without_an_allowance(tell: Callable[[Story], None]) -> None:
    story = Story()
    tell(story)
    report = check(story.operations)
    assert report.ok, "\n".join(map(str, report.violations))
    assert report.allowed == 0


@pytest.mark.parametrize("tell", _ALLOWED, ids=_named)
def test_a_documented_exception_is_accepted_and_counted(tell: Callable[[Story], None]) -> None:
    story = Story()
    tell(story)
    report = check(story.operations)
    assert report.ok, "\n".join(map(str, report.violations))
    assert report.allowed == 1


@pytest.mark.parametrize("tell", _ALLOWED, ids=_named)
def test_the_same_without_an_overlap_is_refused(tell: Callable[[Story], None]) -> None:
    """What makes them exceptions is the overlap: with every operation after the one before, they are illegal."""
    story, apart = Story(), Story()
    tell(story)
    for operation in sorted(story.operations, key=lambda op: op.returned_at or 0):
        apart.do(operation.name, operation.value, error=operation.error, **operation.arguments)
    assert not check(apart.operations).ok


def test_a_repeated_write_has_no_effect_after_it_returned() -> None:
    story = Story()
    late = story.begin("put", **put("a"))
    story.do("delete", "removed")
    story.end(late)
    story.do("resolve", resolution("unresolved", "no_match"), conversations=["said by a"])
    story.do("freeze", snapshot({"a": "p"}))
    assert not check(story.operations).ok


_LATE: dict[str, tuple[str, dict[str, Any]]] = {
    "record": ("record", put("late")),
    "failure": ("record_failure", {"call": "late", "reason": "lost"}),
    "staged call": ("stage", {"call": "late", "payload": "p"}),
}


@pytest.mark.parametrize("late", _LATE)
@pytest.mark.parametrize("counted", [True, False])
def test_what_comes_behind_a_freeze_has_its_version(late: str, counted: bool) -> None:
    name, arguments = _LATE[late]
    story = Story()
    story.do("freeze", snapshot(version=1))
    for _ in range(2):
        story.do(name, **arguments)
    story.do("drop", False, snapshot_id="snapshot-1", version=1)
    story.do("freeze", snapshot(version=2 if counted else 1))
    assert check(story.operations).ok == counted


@pytest.mark.parametrize("late", _LATE)
def test_a_drop_takes_nothing_along_that_came_behind_the_freeze(late: str) -> None:
    name, arguments = _LATE[late]
    story = Story()
    story.do("freeze", snapshot(version=1))
    story.do(name, **arguments)
    story.do("drop", True, snapshot_id="snapshot-1", version=1)
    assert not check(story.operations).ok


def test_a_search_that_is_given_up_is_undecided_and_not_ok() -> None:
    story = Story()
    story.do("put", **put("a"))
    story.do("resolve", resolution("unresolved", "ambiguous"), conversations=["said by a"])
    report = check(story.operations, limit=1)
    assert report.undecided == [ROLLOUT]
    assert not report.ok
    assert check(story.operations).violations


def test_a_report_counts_what_was_judged_and_progress_is_told() -> None:
    story, other = Story(), Story("rollout-2")
    story.begin("put", **put("a"))
    story.do("stage", call="a", payload="p")
    story.do("stage", call="b", payload="p")
    other.do("retire", "absent")
    told: list[tuple[int, int]] = []
    report = check([*story.operations, *other.operations], progress=lambda *done: told.append(done))
    counted = (report.operations, report.unknown, report.rollouts, report.staged_calls)
    assert counted == (4, 1, 2, 2)
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


seeds = st.integers(0, 2**32)


@settings(max_examples=300)
@given(seed=seeds, length=st.integers(1, 60), staging=st.booleans())
def test_a_random_legal_history_is_accepted_and_breaks_no_rule(seed: int, length: int, staging: bool) -> None:
    operations = random_history(Random(seed), length, clients=5, cut=0.08, staging=staging)
    report = check(operations)
    assert report.ok, "\n".join(map(str, report.violations))
    assert report.allowed == 0
    assert explain(ROLLOUT, operations) == []


@settings(max_examples=1500)
@given(seed=seeds, staging=st.booleans())
def test_a_changed_answer_is_judged_as_an_enumeration_of_all_orders_judges_it(
    seed: int, staging: bool
) -> None:
    rng = Random(seed)
    operations = random_history(rng, rng.randint(2, 6), clients=3, cut=0.15, calls=2, staging=staging)
    changed = mutate(rng, operations)
    report = check(changed)
    is_legal = is_legal_by_enumeration(changed)
    assert (report.ok and report.allowed == 0) == is_legal
    if is_legal:
        assert explain(ROLLOUT, changed) == []


async def test_what_a_store_answers_to_many_tasks_at_once_is_accepted(store_url: str, tmp_path: Path) -> None:
    run, folder = "run-1", tmp_path / "history"
    folder.mkdir()
    worker = Settings(
        store_url,
        run,
        1,
        "worker",
        str(folder),
        tasks=6,
        deadline=30.0,
        pool_size=4,
        isolation="read committed",
    )
    async with open_store(store_url, run=run) as store:
        with Board.create(folder / "board", operations=600, rollouts=2) as board:
            await Worker(worker, board, store).run()
    history = read_history(folder)
    report = check(history)
    assert report.ok, "\n".join(map(str, report.violations))
    assert report.allowed == 0
    assert audit(store_url, run) == []
    # So that it cannot pass because nothing happened: every operation succeeded, and most could have failed.
    assert {op.name for op in history if op.outcome is Outcome.OK} == set(OPERATIONS)
    assert {op.error for op in history if op.outcome is Outcome.ERROR} >= {FROZEN, RETIRED, CONFLICT}


def test_changed_answers_are_mostly_illegal_so_that_refusing_them_is_tested() -> None:
    illegal = 0
    for seed in range(100):
        rng = Random(seed)
        operations = random_history(rng, 6, clients=3, cut=0.15, calls=2, staging=seed % 4 == 0)
        illegal += not is_legal_by_enumeration(mutate(rng, operations))
    assert illegal > 40
