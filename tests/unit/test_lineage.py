import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import vectors
from tests.support.rollouts import Turn, linear_rollout
from tokencustody.errors import LineageError
from tokencustody.fingerprint import FINGERPRINT_VERSION, assistant_fingerprint, conversation_digest
from tokencustody.lineage import RolloutLineage, stamp_continuation
from tokencustody.protocols import LineageResolution
from tokencustody.records import ParentResolutionStatus, TokenEntry, compute_digest

pytestmark = pytest.mark.quick

ROLLOUTS = vectors.load("resolution")
RESOLUTIONS = [
    pytest.param(rollout["entries"], case, id=f"rollout-{number}-{name}")
    for number, rollout in enumerate(ROLLOUTS)
    for name, case in rollout["resolve"].items()
]


def holding(*entries: TokenEntry) -> RolloutLineage:
    lineage = RolloutLineage()
    for entry in entries:
        lineage.add_entry(entry)
    return lineage


def altered(entry: TokenEntry, **fields: Any) -> TokenEntry:
    return TokenEntry.model_validate(entry.model_dump() | fields)


def assert_unresolved(resolution: LineageResolution, reason: str) -> None:
    assert resolution == LineageResolution(ParentResolutionStatus.UNRESOLVED, reason=reason)


def assert_resolved(resolution: LineageResolution, turn: Turn) -> None:
    assert resolution.status == ParentResolutionStatus.RESOLVED
    assert resolution.match is not None
    match = resolution.match
    assert (match.model_call_id, match.cumulative_token_ids) == (turn.entry.model_call_id, turn.tokens)
    assert (match.digest, match.prev_len) == (compute_digest(turn.tokens), len(turn.tokens))


@pytest.mark.parametrize(("entries", "case"), RESOLUTIONS)
def test_a_request_resolves_as_its_vector_says(entries: list[dict[str, Any]], case: dict[str, Any]) -> None:
    lineage = holding(*map(TokenEntry.model_validate, entries))
    resolution = lineage.resolve(case["request_items"])
    match = resolution.match
    assert {
        "status": resolution.status.value,
        "reason": resolution.reason,
        "model_call_id": match and match.model_call_id,
        "cumulative_token_ids": match and list(match.cumulative_token_ids),
        "digest": match and match.digest,
        "prev_len": match and match.prev_len,
    } == {name: case[name] for name in case if name != "request_items"}


def test_stamping_makes_a_call_the_parent_of_the_requests_that_continue_it() -> None:
    turn = linear_rollout(1)[0]
    bare = altered(turn.entry, continuation_fingerprint="", fingerprint_version=None)
    assert_unresolved(holding(bare).resolve(turn.next_request()), "no_match")
    assert stamp_continuation(bare, turn.request) is bare
    assert bare.continuation_fingerprint == assistant_fingerprint(turn.next_request())
    assert bare.continuation_context_len == len(turn.request)
    assert bare.continuation_context_digest == conversation_digest(turn.request)
    assert bare.fingerprint_version == FINGERPRINT_VERSION == 2
    assert_resolved(holding(bare).resolve(turn.next_request()), turn)


def test_a_request_without_a_model_turn_is_a_root_whatever_was_committed() -> None:
    turn = linear_rollout(1)[0]
    for request in ([], turn.request, [{"role": "system", "content": "x"}, *turn.request]):
        assert holding(turn.entry).resolve(request) == LineageResolution(ParentResolutionStatus.ROOT)


@given(
    st.integers(1, 6), st.sets(st.integers(1, 5)), st.integers(0, 2**32), st.randoms(use_true_random=False)
)
def test_every_continuation_resolves_to_its_parents_whole_sequence_in_whatever_order_calls_arrive(
    turns: int, deltas: set[int], seed: int, order: Any
) -> None:
    rollout = linear_rollout(turns, deltas=deltas, seed=seed)
    entries = [turn.entry for turn in rollout] * 2
    order.shuffle(entries)
    lineage = holding(*entries)
    for turn in rollout:
        assert_resolved(lineage.resolve(turn.next_request()), turn)


@given(st.integers(2, 6), st.sets(st.integers(1, 5)), st.integers(0, 2**32))
def test_delta_records_resolve_exactly_like_full_ones(turns: int, deltas: set[int], seed: int) -> None:
    full, suffixes = linear_rollout(turns, seed=seed), linear_rollout(turns, deltas=deltas, seed=seed)
    as_full, as_suffixes = (holding(*(t.entry for t in r)) for r in (full, suffixes))
    for turn in full:
        assert as_full.resolve(turn.next_request()) == as_suffixes.resolve(turn.next_request())


def test_a_request_that_rewrites_the_parents_context_has_no_parent() -> None:
    turn = linear_rollout(1)[0]
    lineage = holding(turn.entry)
    rewritten = [{"role": "user", "content": "something else"}, *turn.next_request()[1:]]
    assert_unresolved(lineage.resolve(rewritten), "no_match")
    assert_unresolved(lineage.resolve(turn.next_request()[1:]), "no_match")
    assert_unresolved(
        lineage.resolve([*turn.request, {"role": "assistant", "content": "forged"}]), "no_match"
    )


def test_a_request_shorter_than_the_recorded_context_cannot_continue_it() -> None:
    turn = linear_rollout(1)[0]
    request = turn.next_request()
    claims_more = altered(
        turn.entry,
        continuation_context_len=len(request) + 1,
        continuation_context_digest=conversation_digest(request),
    )
    assert_unresolved(holding(claims_more).resolve(request), "no_match")


@pytest.mark.parametrize(("version", "reason"), [(None, ""), (2, ""), (1, "no_match"), (3, "no_match")])
def test_a_fingerprint_of_another_version_proves_nothing(version: int | None, reason: str) -> None:
    turn = linear_rollout(1)[0]
    resolution = holding(altered(turn.entry, fingerprint_version=version)).resolve(turn.next_request())
    assert resolution.reason == reason
    assert (resolution.match is None) == bool(reason)


def test_twins_with_one_sequence_resolve_to_the_smallest_call_id() -> None:
    turn = linear_rollout(1)[0]
    twins = [altered(turn.entry, model_call_id=name) for name in ("b", "a", "Z", "c")]
    for order in itertools.permutations(twins):
        resolution = holding(*order).resolve(turn.next_request())
        assert resolution.match is not None
        assert resolution.match.model_call_id == "Z"


@pytest.mark.parametrize(
    "fields",
    [
        {"generation_token_ids": [7], "generation_log_probs": [-1.0], "digest": compute_digest([7])},
        {"cum_len": 10_000},
        {"digest": None},
        {"digest": ""},
    ],
    ids=["another-digest", "another-length", "no-digest", "empty-digest"],
)
def test_twins_that_are_not_proven_equal_are_ambiguous(fields: dict[str, Any]) -> None:
    turn = linear_rollout(1)[0]
    other = altered(turn.entry, model_call_id="other", **fields)
    for order in ((turn.entry, other), (other, turn.entry)):
        assert_unresolved(holding(*order).resolve(turn.next_request()), "ambiguous")


@pytest.mark.parametrize("fields", [{"digest": None}, {"digest": ""}, {"cum_len": None}])
def test_twins_that_both_lack_a_proof_are_ambiguous_even_if_they_look_alike(fields: dict[str, Any]) -> None:
    turn = linear_rollout(1)[0]
    twins = [altered(turn.entry, model_call_id=name, **fields) for name in ("a", "b")]
    assert_unresolved(holding(*twins).resolve(turn.next_request()), "ambiguous")


@pytest.mark.parametrize(
    "fields",
    [
        {"created_at": 0.5},
        {"generation_log_probs": None},
        {"x_extra": 1},
        {"response_id": "r"},
        {"model": "m"},
    ],
    ids=lambda f: next(iter(f)),
)
def test_a_call_id_with_two_payloads_is_no_candidate_whichever_came_first(fields: dict[str, Any]) -> None:
    turn = linear_rollout(1)[0]
    if "generation_log_probs" in fields:
        fields = {"generation_log_probs": [-0.0 for _ in turn.entry.generation_log_probs]}
    second = altered(turn.entry, **fields)
    for order in itertools.permutations((turn.entry, second, turn.entry)):
        assert_unresolved(holding(*order).resolve(turn.next_request()), "no_match")


def test_signed_zeros_conflict_and_equal_nans_do_not() -> None:
    turn = linear_rollout(1)[0]
    count = len(turn.entry.generation_log_probs)
    plus, minus, nan, same_nan = (
        altered(turn.entry, generation_log_probs=[float(text)] * count)
        for text in ("0.0", "-0.0", "nan", "nan")
    )
    assert_unresolved(holding(plus, minus).resolve(turn.next_request()), "no_match")
    assert_resolved(holding(nan, same_nan).resolve(turn.next_request()), turn)


def test_a_conflict_leaves_the_other_calls_of_the_rollout_alone() -> None:
    first, second = linear_rollout(2)
    lineage = holding(first.entry, second.entry, altered(second.entry, model="another"))
    assert_resolved(lineage.resolve(first.next_request("again")), first)
    assert_unresolved(lineage.resolve(second.next_request()), "no_match")


@given(st.integers(0, 3), st.integers(0, 2**32), st.data())
def test_a_tampered_delta_chain_is_an_error_and_never_a_wrong_prefix(
    victim: int, seed: int, data: st.DataObject
) -> None:
    rollout = linear_rollout(4, deltas={1, 2, 3}, seed=seed)
    entries = [turn.entry.model_copy(deep=True) for turn in rollout]
    field = data.draw(st.sampled_from(["prompt_token_ids", "generation_token_ids"]))
    ids: list[int] = getattr(entries[victim], field)
    place = data.draw(st.integers(0, len(ids) - 1))
    ids[place] += data.draw(st.integers(1, 1000))
    lineage = holding(*entries)
    for number, turn in enumerate(rollout):
        if number < victim:
            assert_resolved(lineage.resolve(turn.next_request()), turn)
        else:
            with pytest.raises(LineageError, match=turn.entry.model_call_id):
                lineage.resolve(turn.next_request())


def test_a_delta_chain_with_a_lost_link_is_an_error() -> None:
    rollout = linear_rollout(4, deltas={1, 2, 3})
    for lost in range(3):
        lineage = holding(*(turn.entry for number, turn in enumerate(rollout) if number != lost))
        with pytest.raises(LineageError, match="chain is broken"):
            lineage.resolve(rollout[3].next_request())


def test_a_delta_chain_that_runs_in_a_circle_is_an_error() -> None:
    first, second = linear_rollout(3, deltas={1, 2})[1:]
    looped = altered(first.entry, parent_call_id=second.entry.model_call_id)
    with pytest.raises(LineageError, match="chain is broken"):
        holding(looped, second.entry).resolve(second.next_request())


@pytest.mark.parametrize("fields", [{"digest": "0" * 64}, {"cum_len": 1}])
def test_a_full_record_that_contradicts_its_own_digest_or_length_is_an_error(fields: dict[str, Any]) -> None:
    turn = linear_rollout(1)[0]
    with pytest.raises(LineageError, match="call-0 of rollout rollout"):
        holding(altered(turn.entry, **fields)).resolve(turn.next_request())


def test_a_delta_record_without_a_digest_is_an_error_because_its_chain_cannot_be_checked() -> None:
    first, second = linear_rollout(2, deltas={1})
    for fields in ({"digest": None}, {"digest": ""}, {"digest": None, "cum_len": None}):
        with pytest.raises(LineageError, match=r"call-1"):
            holding(first.entry, altered(second.entry, **fields)).resolve(second.next_request())


def test_a_conflicting_parent_is_no_link_of_a_delta_chain_whichever_came_first() -> None:
    first, second = linear_rollout(2, deltas={1})
    rival = altered(first.entry, prompt_token_ids=[5] * len(first.entry.prompt_token_ids))
    outcomes = set()
    for order in itertools.permutations((first.entry, rival, second.entry)):
        try:
            outcomes.add(str(holding(*order).resolve(second.next_request()).status))
        except LineageError:
            outcomes.add("error")
    assert len(outcomes) == 1


def test_a_record_of_arrays_is_the_same_record_and_its_chain_has_the_same_sequence() -> None:
    turns = linear_rollout(3, deltas={1, 2})
    of_lists = [turn.entry for turn in turns]
    columns = [
        {
            "prompt_token_ids": np.array(entry.prompt_token_ids),
            "generation_token_ids": np.array(entry.generation_token_ids, ">i4"),
            "generation_log_probs": np.array(entry.generation_log_probs),
        }
        for entry in of_lists
    ]
    made = [TokenEntry(**dict(entry) | arrays) for entry, arrays in zip(of_lists, columns, strict=True)]
    assigned = [entry.model_copy(update=arrays) for entry, arrays in zip(of_lists, columns, strict=True)]
    for entries in ([*of_lists, *made, *assigned], [*made, *of_lists], [*assigned, *made]):
        for turn in turns:
            assert_resolved(holding(*entries).resolve(turn.next_request()), turn)
    # NumPy prints a long array without its middle.
    long = altered(of_lists[0], prompt_token_ids=[1] * 2_000)
    other = [1] * 1_000 + [2] + [1] * 999
    twins = [long.model_copy(update={"prompt_token_ids": np.array(ids)}) for ids in ([1] * 2_000, other)]
    assert holding(*twins).conflicting == {"call-0"}


@pytest.mark.parametrize("items", [["text"], [{"role": "assistant", "content": 5}]])
def test_request_items_that_cannot_be_hashed_are_a_value_error(items: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        RolloutLineage().resolve(items)
