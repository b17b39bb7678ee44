"""Histories that break each rule by hand, each found by the rule of that name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from campaigns.checker import check
from campaigns.rules import RULES
from tests.faults.checker_histories import Story, put, resolution, snapshot

FROZEN, RETIRED = "TokenCaptureFrozenError", "TokenCaptureRetiredError"
CONFLICT = "PayloadConflictError"
COMPLETE = {"kind": "complete", "tokens": "tokens of a p", "parent": "a"}

_BROKEN: list[tuple[str, Callable[[Story], None]]] = []


def breaks(rule: str) -> Callable[[Callable[[Story], None]], Callable[[Story], None]]:
    def remember(tell: Callable[[Story], None]) -> Callable[[Story], None]:
        _BROKEN.append((rule, tell))
        return tell

    return remember


@breaks("lost write")
def a_put_is_missing_in_the_snapshot(story: Story) -> None:
    story.do("put", **put("a"))
    story.do("freeze", snapshot())


@breaks("lost write")
def a_put_has_another_payload_in_the_snapshot(story: Story) -> None:
    story.begin("put", **put("a", "q"))
    story.do("put", **put("a", "p"))
    story.do("freeze", snapshot({"a": "q"}))


@breaks("lost write")
def a_refusal_is_missing_in_the_snapshot(story: Story) -> None:
    story.do("refuse", call="a", code="busy")
    story.do("freeze", snapshot(version=2))


@breaks("lost write")
def a_record_is_missing_in_the_manifest(story: Story) -> None:
    story.do("record", **put("a"))
    story.do("manifest", {"records": [], "failures": []})


@breaks("lost write")
def a_failure_is_missing_in_the_manifest(story: Story) -> None:
    story.do("record_failure", call="a", reason="unresolved_parent")
    story.do("manifest", {"records": [], "failures": []})


@breaks("lost write")
def a_staged_call_is_missing(story: Story) -> None:
    story.do("stage", call="a", payload="p")
    story.do("fetch", error="StagedCallMissingError", call="a")


@breaks("lost write")
def a_put_is_missing_in_the_last_read_after_a_crash(story: Story) -> None:
    story.do("put", **put("a"))
    story.begin("put", **put("b"))
    story.do("freeze", snapshot({"b": "p"}), worker="final")


@breaks("write after the fence")
def a_put_succeeds_after_the_freeze(story: Story) -> None:
    story.do("freeze", snapshot())
    story.do("put", **put("a"))


@breaks("write after the fence")
def an_identical_repeat_succeeds_after_the_freeze(story: Story) -> None:
    story.do("put", **put("a"))
    story.do("freeze", snapshot({"a": "p"}))
    story.do("put", **put("a"))


@breaks("write after the fence")
def an_intent_is_stored_after_the_freeze(story: Story) -> None:
    story.do("freeze", snapshot())
    story.do("begin", call="a")


@breaks("write after the fence")
def a_refusal_is_stored_after_the_retirement(story: Story) -> None:
    story.do("retire", "absent")
    story.do("refuse", call="a", code="busy")


@breaks("version reused")
def a_version_goes_backwards(story: Story) -> None:
    story.do("mark", {"spilled": False}, call="a")
    story.do("freeze", snapshot(version=2, incomplete=True))
    story.do("freeze", snapshot(version=1, incomplete=True))


@breaks("version reused")
def a_mark_does_not_change_the_version(story: Story) -> None:
    story.do("mark", {"spilled": False}, call="a")
    story.do("freeze", snapshot(version=2, incomplete=True))
    story.do("mark", {"spilled": False}, call="a")
    story.do("freeze", snapshot(version=2, incomplete=True))


@breaks("version reused")
def a_version_is_dropped_that_was_marked_since(story: Story) -> None:
    story.do("freeze", snapshot())
    story.do("mark", {"spilled": False}, call="a")
    story.do("drop", True, snapshot_id="snapshot-1", version=1)


@breaks("snapshot changed")
def one_id_and_version_stand_for_two_snapshots(story: Story) -> None:
    story.begin("put", **put("a"))
    story.do("freeze", snapshot())
    story.do("freeze", snapshot({"a": "p"}))


@breaks("snapshot changed")
def a_frozen_rollout_gets_another_snapshot_id(story: Story) -> None:
    story.do("freeze", snapshot())
    story.do("freeze", snapshot(snapshot_id="snapshot-2"))


@breaks("snapshot changed")
def a_snapshot_id_comes_again_after_a_delete(story: Story) -> None:
    story.do("freeze", snapshot())
    story.do("delete", "absent")
    story.do("put", **put("a"))
    story.do("freeze", snapshot({"a": "p"}))


@breaks("wrong parent")
def a_parent_was_never_said(story: Story) -> None:
    story.do("put", **put("a"))
    story.do("resolve", resolution("resolved", **COMPLETE), conversations=["said by b"])


@breaks("wrong parent")
def a_parent_has_other_tokens(story: Story) -> None:
    story.do("put", **put("a"))
    wrong = COMPLETE | {"tokens": "tokens of b p"}
    story.do("resolve", resolution("resolved", **wrong), conversations=["said by a"])


@breaks("wrong parent")
def a_parent_is_guessed_among_two(story: Story) -> None:
    story.do("put", **put("a"))
    story.do("put", **put("b", conversation="said by a"))
    story.do("resolve", resolution("resolved", **COMPLETE), conversations=["said by a"])


@breaks("wrong parent")
def the_larger_of_two_interchangeable_ids_is_the_parent(story: Story) -> None:
    story.do("put", **put("b", conversation="said by a", tokens="tokens of a p"))
    story.do("put", **put("a"))
    wrong = COMPLETE | {"parent": "b"}
    story.do("resolve", resolution("resolved", **wrong), conversations=["said by a"])


@breaks("wrong parent")
def a_shorter_conversation_is_resolved(story: Story) -> None:
    story.do("put", **put("a"))
    story.do("resolve", resolution("resolved", **COMPLETE), conversations=["said by a", "said by b"])


@breaks("wrong parent")
def a_parent_is_not_found(story: Story) -> None:
    story.do("put", **put("a"))
    story.do("resolve", resolution("unresolved", "no_match"), conversations=["said by a"])


@breaks("wrong parent")
def interchangeable_parents_are_called_ambiguous(story: Story) -> None:
    story.do("put", **put("a"))
    story.do("put", **put("b", conversation="said by a", tokens="tokens of a p"))
    story.do("resolve", resolution("unresolved", "ambiguous"), conversations=["said by a"])


@breaks("wrong parent")
def a_parent_is_guessed_beside_a_call_with_two_payloads(story: Story) -> None:
    story.do("put", **put("a"))
    story.do("put", **put("b", conversation="said by a", tokens="tokens of a p"))
    story.do("put", error=CONFLICT, **put("b", "q", conversation="said by a", tokens="tokens of a p"))
    story.do("resolve", resolution("resolved", **COMPLETE), conversations=["said by a"])


@breaks("wrong parent")
def a_ledger_row_is_guessed_beside_a_call_with_two_payloads(story: Story) -> None:
    story.do("put", **put("b", conversation="said by a"))
    story.do("put", error=CONFLICT, **put("b", "q", conversation="said by a"))
    story.do("record", **put("a"))
    found = COMPLETE | {"kind": "ledger"}
    story.do("resolve", resolution("resolved", **found), conversations=["said by a"])


@breaks("wrong parent")
def a_call_with_two_payloads_alone_is_called_ambiguous(story: Story) -> None:
    story.do("put", **put("a"))
    story.do("put", error=CONFLICT, **put("a", "q"))
    story.do("resolve", resolution("unresolved", "ambiguous"), conversations=["said by a"])


@breaks("wrong parent")
def a_ledger_row_goes_before_a_complete_record(story: Story) -> None:
    story.do("put", **put("a"))
    story.do("record", **put("b", conversation="said by a"))
    wrong = resolution("resolved", parent="b", tokens="tokens of b p", kind="ledger")
    story.do("resolve", wrong, conversations=["said by a"])


@breaks("wrong parent")
def a_continuation_is_called_a_root(story: Story) -> None:
    story.do("put", **put("a"))
    story.do("resolve", resolution("root"), conversations=["said by a"])


@breaks("false conflict")
def a_repeat_conflicts_with_itself(story: Story) -> None:
    story.begin("put", **put("a"))
    story.do("put", error=CONFLICT, **put("a"))


@breaks("false conflict")
def a_record_conflicts_with_itself(story: Story) -> None:
    story.begin("record", **put("a"))
    story.do("record", error=CONFLICT, **put("a"))


@breaks("false conflict")
def a_refusal_conflicts_with_itself(story: Story) -> None:
    story.do("refuse", call="a", code="busy")
    story.do("refuse", error=CONFLICT, call="a", code="busy")


@breaks("false conflict")
def a_staged_call_conflicts_with_itself(story: Story) -> None:
    story.begin("stage", call="a", payload="p")
    story.do("stage", error="StagedConflict", call="a", payload="p")


@breaks("swallowed conflict")
def two_payloads_are_acknowledged_under_one_call(story: Story) -> None:
    story.do("put", **put("a", "p"))
    story.do("put", **put("a", "q"))


@breaks("swallowed conflict")
def two_codes_are_acknowledged_for_one_call(story: Story) -> None:
    story.do("refuse", call="a", code="busy")
    story.do("refuse", call="a", code="filtered")


@breaks("swallowed conflict")
def two_rows_are_acknowledged_under_one_call(story: Story) -> None:
    story.do("record", **put("a", "p"))
    story.do("record", **put("a", "q"))


@breaks("hidden incompleteness")
def a_dangling_intent_does_not_show(story: Story) -> None:
    story.do("begin", call="a")
    story.do("freeze", snapshot())


@breaks("hidden incompleteness")
def a_conflict_does_not_show(story: Story) -> None:
    story.do("put", **put("a", "p"))
    story.do("put", error=CONFLICT, **put("a", "q"))
    story.do("freeze", snapshot({"a": "p"}, version=2))


@breaks("hidden incompleteness")
def a_mark_on_a_frozen_rollout_does_not_show(story: Story) -> None:
    story.do("freeze", snapshot())
    story.do("mark", {"spilled": False}, call="a")
    story.do("freeze", snapshot(version=2))


@breaks("manifest changed")
def a_manifest_loses_a_row(story: Story) -> None:
    story.begin("record", **put("a"))
    story.do("manifest", {"records": [["a", "p"]], "failures": []})
    story.do("manifest", {"records": [], "failures": []})


@breaks("manifest changed")
def a_manifest_is_reordered(story: Story) -> None:
    story.begin("record", **put("a"))
    story.begin("record", **put("b"))
    story.do("manifest", {"records": [["a", "p"], ["b", "p"]], "failures": []})
    story.do("manifest", {"records": [["b", "p"], ["a", "p"]], "failures": []})


@breaks("manifest changed")
def a_manifest_is_not_in_commit_order(story: Story) -> None:
    story.do("record", **put("b"))
    story.do("record", **put("a"))
    story.do("manifest", {"records": [["a", "p"], ["b", "p"]], "failures": []})


@breaks("staging contradiction")
def a_fetch_returns_what_was_not_staged(story: Story) -> None:
    story.do("stage", call="a", payload="p")
    story.do("fetch", "q", call="a")


@breaks("staging contradiction")
def two_fetches_differ(story: Story) -> None:
    for payload in "pq":
        story.begin("stage", call="a", payload=payload)
    for payload in "pq":
        story.do("fetch", payload, call="a")


@breaks("staging contradiction")
def a_staged_call_was_absent_when_it_was_unstaged(story: Story) -> None:
    story.do("stage", call="a", payload="p")
    story.do("unstage", False, call="a")


@breaks("staging contradiction")
def an_unstaged_call_is_there_again(story: Story) -> None:
    story.do("stage", call="a", payload="p")
    story.do("unstage", True, call="a")
    story.do("fetch", "p", call="a")


@breaks("unnamed error")
def a_driver_error_comes_through(story: Story) -> None:
    story.do("put", error="InterfaceError", **put("a"))


@breaks("unnamed error")
def a_resolve_is_refused_by_the_fence(story: Story) -> None:
    story.do("resolve", error=FROZEN, conversations=[])


@breaks("retired rollout came back")
def a_retired_rollout_freezes(story: Story) -> None:
    story.do("retire", "absent")
    story.do("freeze", snapshot(version=2))


@breaks("retired rollout came back")
def a_dropped_rollout_shows_its_manifest(story: Story) -> None:
    story.do("freeze", snapshot())
    story.do("drop", True, snapshot_id="snapshot-1", version=1)
    story.do("manifest", {"records": [], "failures": []})


@breaks("retired rollout came back")
def a_rollout_that_was_said_to_be_retired_is_marked(story: Story) -> None:
    story.begin("retire")
    story.do("put", error=RETIRED, **put("a"))
    story.do("mark", {"spilled": False}, call="a")


@breaks("spilled mark lost")
def a_spilled_mark_never_shows(story: Story) -> None:
    story.do("put", **put("a"))
    story.do("mark", {"spilled": True}, call="b")
    story.do("freeze", snapshot({"a": "p"}), worker="final")


@breaks("made-up content")
def a_snapshot_shows_what_nobody_put(story: Story) -> None:
    story.do("freeze", snapshot({"a": "p"}))


@breaks("made-up content")
def a_manifest_shows_what_nobody_recorded(story: Story) -> None:
    story.do("manifest", {"records": [], "failures": [["a", "unresolved_parent"]]})


@pytest.mark.parametrize(
    ("rule", "tell"), _BROKEN, ids=[tell.__name__.replace("_", " ") for _, tell in _BROKEN]
)
def test_a_history_that_breaks_a_rule_is_refused_by_that_name(
    rule: str, tell: Callable[[Story], None]
) -> None:
    story = Story()
    tell(story)
    report = check(story.operations)
    assert not report.ok
    assert not report.undecided
    named = [violation.rule for violation in report.violations]
    assert rule in named
    if rule != "unnamed error":
        assert "no legal order" in named
    for violation in report.violations:
        assert violation.rollout in str(violation)
        assert violation.operations


def test_every_rule_has_a_history_that_breaks_it() -> None:
    assert {rule for rule, _ in _BROKEN} == {*RULES, "unnamed error"}


def test_a_violation_says_which_operations_did_not_fit() -> None:
    story = Story()
    story.do("put", **put("a"))
    story.do("drop", True, snapshot_id="snapshot-1", version=1)
    (violation,) = check(story.operations).violations
    assert violation.rule == "no legal order"
    assert violation.operations == (story.operations[1],)
    assert "after 1 of 2 operations" in str(violation)
    assert str(story.operations[1]) in str(violation)
