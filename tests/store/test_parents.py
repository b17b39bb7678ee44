"""What continues which call, on both databases, for complete records and for rows of the ledger."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.gym_import.gym_folders import import_folder, line_of, write_rollout
from tests.support.conversations import SCENARIOS, Asked, Call, said, user
from tests.support.ledger import make_commit
from tokencustody import CaptureStore, TokenEntry, request_items, stamp_lineage
from tokencustody.errors import PayloadConflictError
from tokencustody.export import ExportOptions, export

CTX = [user("u")]


async def outcome(store: CaptureStore, rollout_id: str, request: list[dict[str, object]]) -> str:
    found = await store.lineage.resolve(rollout_id, copy.deepcopy(request))
    return found.match.model_call_id if found.match else found.reason


async def put(store: CaptureStore, entry: TokenEntry) -> None:
    with suppress(PayloadConflictError):
        await store.sink.put(entry)


@pytest.mark.quick("Never a guess")
async def test_a_request_resolves_to_the_proven_call_alone(store: CaptureStore) -> None:
    async def wrong(number: int, asked: Asked) -> str | None:
        rollout = f"rollout-{number}"
        for call in asked.calls:
            await put(store, call.entry(rollout))
        found = await outcome(store, rollout, asked.request)
        return None if found == asked.expected else f"{asked.name}: {found}, not {asked.expected}"

    found = [await wrong(number, asked) for number, asked in enumerate(SCENARIOS)]
    assert [each for each in found if each] == []


@pytest.mark.quick("Never a guess")
async def test_a_request_resolves_to_the_proven_row_of_the_ledger_alone(store: CaptureStore) -> None:
    answer = [said("hello")]
    after = [*CTX, *answer, user("next")]
    twins = {call: make_commit("twins", call, request=CTX, text="hello") for call in ("call-a", "call-b")}
    for commit in twins.values():
        await store.lineage.record(commit)
    assert await outcome(store, "twins", after) == "call-a"
    empty = make_commit("empty", request=after, text="")
    await store.lineage.record(empty)
    assert await outcome(store, "empty", after) == "no_match"
    assert await outcome(store, "empty", [*after, user("go on")]) == "no_match"
    assert await outcome(store, "empty", [*after, said(""), user("go on")]) == "call-1"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"input": "What is 2+2?"}, {"input": "Name a colour."}),
        (
            {"input": [user("go on")], "previous_response_id": "resp_1"},
            {"input": [user("go on")], "previous_response_id": "resp_2"},
        ),
        ({"input": [user("go on")], "conversation": "c"}, {"input": [user("go on")], "conversation": "c"}),
    ],
    ids=["text", "previous_response_id", "conversation"],
)
async def test_two_requests_that_do_not_say_what_was_asked_are_not_one(
    store: CaptureStore, store_url: str, tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    asked = [request_items({"instructions": "Be brief.", **body}) for body in (first, second)]
    root = Call("call-1", asked[0], [said("four")], (1, 2, 3)).entry()
    child = Call("call-2", [*CTX, said("four"), user("sure?")], [said("yes")], (1, 2, 3, 4, 5)).entry()
    child = stamp_lineage(child, "call-1", parent_resolution="resolved")
    for entry in (root, child, Call("call-3", asked[1], [said("red")], (1, 7, 8)).entry()):
        await store.sink.put(entry)
    await store.source.freeze("rollout-1")
    report = await export(store_url, tmp_path / "out", ExportOptions(run="run-1"))
    assert (report.calls, report.left_out.total()) == (3, 0)


@pytest.mark.parametrize("missing", ["chain_hash", "response_id"])
async def test_a_row_that_the_manifest_counts_as_failed_is_no_parent_and_makes_others_ambiguous(
    store: CaptureStore, missing: str
) -> None:
    after = [*CTX, said("hello"), user("next")]
    made = make_commit("source", "call-a", request=CTX, text="hello", tokens=[1, 2, 9])
    await store.lineage.record(made)
    [row] = await store.lineage.export_rows("source")
    row["record"][missing] = None
    await store.lineage.import_rows("other", [row])
    assert await outcome(store, "source", after) == "call-a"
    assert await outcome(store, "other", after) == "no_match"
    await store.lineage.record(make_commit("other", "call-b", request=CTX, text="hello"))
    assert await outcome(store, "other", after) == "ambiguous"


async def test_a_conflicting_record_is_no_parent_by_its_row_either_and_leaves_no_row_as_the_only_one(
    store: CaptureStore,
) -> None:
    after = [*CTX, said("hello"), user("next")]
    for rollout, row in (("same", "call-a"), ("twin", "call-b")):
        await store.sink.put(Call("call-a", CTX, [said("hello")]).entry(rollout))
        await put(store, Call("call-a", CTX, [said("hello")], (1, 2, 9)).entry(rollout))
        await store.lineage.record(make_commit(rollout, row, request=CTX, text="hello"))
    assert await outcome(store, "same", after) == "no_match"
    assert await outcome(store, "twin", after) == "ambiguous"


async def test_a_conflict_that_gyms_files_hold_makes_the_twin_of_either_line_ambiguous(
    store: CaptureStore, store_url: str, tmp_path: Path
) -> None:
    elsewhere = Call("call-a", CTX, [said("other")], (1, 2, 8))
    lines = [elsewhere, Call("call-a", CTX, [said("hello")], (1, 2, 9)), Call("call-b", CTX, [said("hello")])]
    write_rollout(tmp_path / "gym", [line_of(call.entry("rollout")) for call in lines])
    await import_folder(store_url, tmp_path / "gym", run="run-1")
    assert await outcome(store, "rollout", [*CTX, said("hello"), user("next")]) == "ambiguous"
    assert await outcome(store, "rollout", [*CTX, said("other"), user("next")]) == "no_match"
