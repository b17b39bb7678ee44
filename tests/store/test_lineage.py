"""Parents are resolved only when proven, from the calls that any client has committed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.entries import REQUEST, continuation, make_entry
from tests.support.rows import run_sql
from tokencustody import CaptureStore, TokenEntry, compute_digest, open_store, stamp_continuation
from tokencustody.errors import CorruptEntryError, InvalidRecordError, LineageError, PayloadConflictError

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "resolution.json").read_text())
NEXT = continuation(REQUEST, "Paris.", "And of Spain?")


def decision(resolution: Any) -> tuple[str, str, str | None]:
    match = resolution.match
    return resolution.status, resolution.reason, match and match.model_call_id


@pytest.mark.quick("Never a guess")
@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["rollout_id"])
async def test_every_resolution_vector_holds_for_an_old_and_a_fresh_client(
    store: CaptureStore, store_url: str, case: dict[str, Any]
) -> None:
    await store.lineage.resolve(case["rollout_id"], [{"role": "assistant", "content": "before"}])
    for entry in case["entries"]:
        await store.sink.put(TokenEntry.model_validate(entry))
    async with open_store(store_url, run="run-1") as fresh:
        for lineage in (store.lineage, fresh.lineage):
            for name, expected in case["resolve"].items():
                found = await lineage.resolve(case["rollout_id"], expected["request_items"])
                assert decision(found) == (
                    expected["status"],
                    expected["reason"],
                    expected.get("model_call_id"),
                ), name
                if found.match is not None:
                    assert list(found.match.cumulative_token_ids) == expected["cumulative_token_ids"]
                    assert (found.match.digest, found.match.prev_len) == (
                        expected["digest"],
                        expected["prev_len"],
                    )


async def test_a_delta_chain_is_resolved_to_the_whole_sequence(store: CaptureStore) -> None:
    await store.sink.put(make_entry())
    tokens, request, text, parent = [10, 11, 12, 13, 30, 31, 32], REQUEST, "Paris.", "call-1"
    for number in range(2, 12):
        request = continuation(request, text, f"question {number}")
        prompt, generation, text = [100 * number], [100 * number + 1], f"answer {number}"
        tokens = [*tokens, *prompt, *generation]
        await store.sink.put(
            make_entry(
                model_call_id=f"call-{number}",
                prompt=prompt,
                generation=generation,
                request=request,
                text=text,
                parent=parent,
                cumulative=tokens,
                prompt_is_delta=True,
            )
        )
        parent = f"call-{number}"
        found = await store.lineage.resolve("rollout-1", continuation(request, text, "next"))
        assert found.match is not None
        assert found.match.model_call_id == parent
        assert found.match.cumulative_token_ids == tuple(tokens)
        assert found.match.digest == compute_digest(tokens)
        assert found.match.prev_len == len(tokens)


def delta(
    parent: str, *, call: str = "call-2", text: str = "Madrid.", cumulative: list[int] | None = None
) -> TokenEntry:
    return make_entry(
        model_call_id=call,
        prompt=[40],
        generation=[50],
        request=NEXT,
        text=text,
        parent=parent,
        cumulative=cumulative or [10, 11, 12, 13, 30, 31, 32, 40, 50],
        prompt_is_delta=True,
    )


AFTER_DELTA = continuation(NEXT, "Madrid.", "And of Italy?")


async def test_a_delta_whose_parent_is_missing_is_an_error_and_never_a_wrong_prefix(
    store: CaptureStore,
) -> None:
    await store.sink.put(delta("call-1"))
    with pytest.raises(LineageError, match="call-2 of rollout rollout-1: its parent chain is broken"):
        await store.lineage.resolve("rollout-1", AFTER_DELTA)


async def test_a_delta_chain_that_is_a_circle_is_an_error(store: CaptureStore) -> None:
    await store.sink.put(delta("call-3"))
    await store.sink.put(delta("call-2", call="call-3", text="Rome."))
    with pytest.raises(LineageError, match="call-3 of rollout rollout-1: its parent chain is broken"):
        await store.lineage.resolve("rollout-1", AFTER_DELTA)


async def test_a_chain_with_another_digest_is_an_error(store: CaptureStore) -> None:
    await store.sink.put(make_entry())
    await store.sink.put(delta("call-1", cumulative=[9, 11, 12, 13, 30, 31, 32, 40, 50]))
    with pytest.raises(LineageError, match="another digest"):
        await store.lineage.resolve("rollout-1", AFTER_DELTA)


async def test_a_chain_of_another_length_is_an_error(store: CaptureStore) -> None:
    entry = make_entry()
    entry.cum_len = 6
    await store.sink.put(entry)
    with pytest.raises(LineageError, match="records a sequence of 6 tokens, but its chain has 7"):
        await store.lineage.resolve("rollout-1", NEXT)


async def test_a_parent_whose_row_was_damaged_is_an_error_that_names_it(
    store: CaptureStore, store_url: str
) -> None:
    await store.sink.put(make_entry())
    await run_sql(store_url, "UPDATE entries SET payload_sha256 = :other", other="0" * 64)
    with pytest.raises(CorruptEntryError, match="call-1 of rollout rollout-1"):
        await store.lineage.resolve("rollout-1", NEXT)


async def test_a_call_with_conflicting_payloads_is_no_candidate(store: CaptureStore) -> None:
    await store.sink.put(make_entry())
    assert decision(await store.lineage.resolve("rollout-1", NEXT)) == ("resolved", "", "call-1")
    with pytest.raises(PayloadConflictError):
        await store.sink.put(make_entry(model="other"))
    assert decision(await store.lineage.resolve("rollout-1", NEXT)) == ("unresolved", "no_match", None)


async def test_a_call_with_conflicting_payloads_is_no_link_of_a_delta_chain(store: CaptureStore) -> None:
    await store.sink.put(make_entry())
    await store.sink.put(delta("call-1"))
    assert decision(await store.lineage.resolve("rollout-1", AFTER_DELTA)) == ("resolved", "", "call-2")
    with pytest.raises(PayloadConflictError):
        await store.sink.put(make_entry(model="other"))
    with pytest.raises(LineageError, match="its parent chain is broken"):
        await store.lineage.resolve("rollout-1", AFTER_DELTA)


async def test_calls_of_other_rollouts_and_runs_are_no_candidates(
    store: CaptureStore, store_url: str
) -> None:
    await store.sink.put(make_entry("rollout-2"))
    async with open_store(store_url, run="run-2") as other:
        await other.sink.put(make_entry())
    assert decision(await store.lineage.resolve("rollout-1", NEXT)) == ("unresolved", "no_match", None)


@pytest.mark.parametrize(
    ("version", "status"), [(None, "resolved"), (2, "resolved"), (1, "unresolved"), (3, "unresolved")]
)
async def test_only_fingerprints_of_the_same_version_count_and_unversioned_ones(
    store: CaptureStore, version: int | None, status: str
) -> None:
    entry = make_entry()
    entry.fingerprint_version = version
    await store.sink.put(entry)
    assert (await store.lineage.resolve("rollout-1", NEXT)).status == status


async def test_frozen_calls_are_still_parents_and_retired_ones_are_gone(store: CaptureStore) -> None:
    await store.sink.put(make_entry())
    await store.source.freeze("rollout-1")
    assert (await store.lineage.resolve("rollout-1", NEXT)).status == "resolved"
    await store.source.retire(["rollout-1"])
    assert decision(await store.lineage.resolve("rollout-1", NEXT)) == ("unresolved", "no_match", None)


async def test_of_twins_with_the_same_sequence_the_smallest_call_id_wins_by_code_point(
    store: CaptureStore,
) -> None:
    for call in ("b", "a", "Z", "é", "_"):
        await store.sink.put(make_entry(model_call_id=call))
    assert decision(await store.lineage.resolve("rollout-1", NEXT)) == ("resolved", "", "Z")


async def test_unstamped_twins_are_ambiguous(store: CaptureStore) -> None:
    for call in ("call-1", "call-2"):
        entry = make_entry(model_call_id=call)
        entry.digest = entry.cum_len = None
        await store.sink.put(stamp_continuation(entry, REQUEST))
    assert decision(await store.lineage.resolve("rollout-1", NEXT)) == ("unresolved", "ambiguous", None)


@pytest.mark.parametrize(
    "items", [None, "text", {"role": "user"}, ["text"], [{"role": "assistant", "content": 5}]]
)
async def test_a_malformed_request_is_refused(store: CaptureStore, items: Any) -> None:
    with pytest.raises(InvalidRecordError, match="request_items"):
        await store.lineage.resolve("rollout-1", items)


async def test_a_request_with_an_unhashable_context_is_refused_by_name(store: CaptureStore) -> None:
    await store.sink.put(make_entry())
    broken: list[dict[str, Any]] = [{"role": "user", "content": {"no": "list"}}, *NEXT[1:]]
    with pytest.raises(InvalidRecordError, match="request_items"):
        await store.lineage.resolve("rollout-1", broken)
