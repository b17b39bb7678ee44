"""The trees of a rollout's calls hold every call, whatever parents the calls name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from hypothesis import example, given
from hypothesis import strategies as st

from tokencustody.overview.forest import CallForest, call_forest
from tokencustody.overview.summaries import CallSummary


def call(call_id: str, parent: str | None) -> CallSummary:
    return CallSummary(
        model_call_id=call_id,
        parent_call_id=parent,
        parent_resolution=None,
        parent_resolution_reason="",
        model="",
        response_id=None,
        prompt_len=1,
        prompt_is_delta=False,
        generation_len=1,
        cum_len=None,
        committed_at=datetime(2026, 1, 1, tzinfo=UTC),
        written_by="writer",
    )


def calls_of(parents: Sequence[int | None]) -> list[CallSummary]:
    """Return a call for each number, with the numbered parent; too high a number names a missing call."""
    return [call(name(n), None if parent is None else name(parent)) for n, parent in enumerate(parents)]


def name(number: int) -> str:
    """Return the id of a call; ids sort in the opposite order of the calls."""
    return f"c{99_999 - number}"


def walk(forest: CallForest, tops: Sequence[CallSummary]) -> Iterator[CallSummary]:
    waiting = list(tops)
    while waiting:
        found = waiting.pop()
        yield found
        waiting.extend(forest.children.get(found.model_call_id, ()))


@given(st.lists(st.none() | st.integers(min_value=0, max_value=12), max_size=10))
@example([1, 0])
@example([0])
@example([1, 2, 0, 0, 3])
@example([11, 0, 11])
def test_every_call_stands_in_the_forest_exactly_once(parents: list[int | None]) -> None:
    calls = calls_of(parents)
    forest = call_forest(calls)
    tops = [*forest.roots, *(each for group in forest.orphans.values() for each in group), *forest.loops]
    assert sorted(each.model_call_id for each in walk(forest, tops)) == sorted(c.model_call_id for c in calls)


@given(st.lists(st.none() | st.integers(min_value=0, max_value=12), max_size=10))
def test_each_call_stands_where_its_parent_says_and_siblings_keep_their_order(
    parents: list[int | None],
) -> None:
    calls = calls_of(parents)
    forest = call_forest(calls)
    ids = {each.model_call_id for each in calls}
    assert all(each.parent_call_id is None for each in forest.roots)
    assert all(parent not in ids for parent in forest.orphans)
    for groups in (forest.orphans, forest.children):
        assert all(each.parent_call_id == parent for parent, group in groups.items() for each in group)
    for siblings in (forest.roots, forest.loops, *forest.orphans.values(), *forest.children.values()):
        assert [calls.index(each) for each in siblings] == sorted(calls.index(each) for each in siblings)


def test_a_circle_is_opened_at_its_first_call_and_not_at_one_that_hangs_from_it() -> None:
    forest = call_forest(calls_of([2, 2, 1]))
    assert [each.model_call_id for each in forest.loops] == [name(1)]
    assert {parent: [c.model_call_id for c in group] for parent, group in forest.children.items()} == {
        name(1): [name(2)],
        name(2): [name(0)],
    }


def test_a_chain_deeper_than_python_recurses_is_no_limit() -> None:
    forest = call_forest(calls_of([None, *range(20_000)]))
    assert sum(1 for _ in walk(forest, forest.roots)) == 20_001
