"""A prompt handed over from its parent's sequence on: stored as the whole one would be, and on no other parent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.arrays import id_arrays
from tests.support.entries import make_entry
from tests.support.rows import rows_of
from tokencustody import CaptureStore, TokenCaptureFrozenError, TokenEntry, open_store
from tokencustody.database.transactions import Doors
from tokencustody.errors import InvalidRecordError, LineageError, PayloadConflictError
from tokencustody.schema import tables
from tokencustody.store import sink
from tokencustody.txn.putting import Put

ROOT = make_entry(model_call_id="root", prompt=[1, 2, 3], generation=[70_000])
OTHER_ROOT = make_entry(model_call_id="root", prompt=[4, 4], generation=[4])
SEQUENCE = [1, 2, 3, 70_000]
SUFFIX = [5, 6]


def whole(call: str = "call", suffix: list[int] | None = None, **fields: Any) -> TokenEntry:
    prompt = SEQUENCE + (SUFFIX if suffix is None else suffix)
    return make_entry(model_call_id=call, prompt=prompt, generation=[8, 9], parent="root", **fields)


def without_prompt(entry: TokenEntry, **changes: Any) -> TokenEntry:
    return entry.model_copy(update={"prompt_token_ids": [], "digest": None, "cum_len": None, **changes})


async def elsewhere(store: CaptureStore, url: str, *entries: TokenEntry, removes: bool = False) -> None:
    """Put entries, after the rollout was removed or not, with nothing that the store knows of calls."""

    async def write() -> None:
        async with open_store(url, run=store.sink.run) as other:
            if removes:
                await other.source.delete(["rollout-1"])
            for entry in entries:
                await other.sink.put(entry)

    # In another loop, for the stores of one loop share what they know.
    await asyncio.to_thread(asyncio.run, write())


async def identities(url: str) -> dict[str, str]:
    return {row["model_call_id"]: row["payload_sha256"] for row in await rows_of(url, tables.entries)}


async def test_a_suffix_is_stored_as_the_whole_prompt_would_be(store: CaptureStore, store_url: str) -> None:
    await store.sink.put(ROOT)
    for number, suffix in enumerate(([], [5, 6], [2**40], [2**64 - 1])):
        for form, ids in {"list": suffix, "tuple": tuple(suffix), **id_arrays(suffix)}.items():
            call = f"call {number} {form}"
            expected = whole(call, suffix)
            await store.sink.put_continuation(without_prompt(expected), ids)
            await store.sink.put(expected)  # a no-op
            await store.sink.put_continuation(without_prompt(expected), ids)
    found = await rows_of(store_url, tables.entries)
    assert {row["shared_len"] for row in found if row["model_call_id"] != "root"} == {len(SEQUENCE)}
    snapshot = await store.source.freeze("rollout-1")
    assert not snapshot.incomplete
    read = {entry.model_call_id: entry for entry in snapshot.entries}
    assert read["call 1 list"] == whole("call 1 list")
    with pytest.raises(TokenCaptureFrozenError):
        await store.sink.put_continuation(without_prompt(whole("late")), SUFFIX)


async def test_what_the_caller_gave_is_not_changed(store: CaptureStore) -> None:
    await store.sink.put(ROOT)
    given = without_prompt(whole())
    before = given.model_copy(deep=True)
    await store.sink.put_continuation(given, SUFFIX)
    assert given == before


async def test_another_suffix_under_the_same_id_is_a_conflict(store: CaptureStore) -> None:
    await store.sink.put(ROOT)
    await store.sink.put(whole())
    with pytest.raises(PayloadConflictError, match="prompt_token_ids"):
        await store.sink.put_continuation(without_prompt(whole()), [5, 7])
    assert (await store.source.freeze("rollout-1")).incomplete


async def test_the_parent_may_have_been_written_by_another_process(
    store: CaptureStore, store_url: str
) -> None:
    await elsewhere(store, store_url, ROOT, whole("middle"))
    leaf = make_entry(
        model_call_id="leaf", prompt=[*SEQUENCE, *SUFFIX, 8, 9, 4], generation=[1], parent="middle"
    )
    await store.sink.put_continuation(without_prompt(leaf), [4])
    assert leaf in (await store.source.freeze("rollout-1")).entries


async def test_a_parent_that_is_a_delta_has_its_whole_sequence(store: CaptureStore) -> None:
    await store.sink.put(ROOT)
    delta = make_entry(
        model_call_id="delta",
        prompt=SUFFIX,
        generation=[8, 9],
        parent="root",
        cumulative=[*SEQUENCE, *SUFFIX, 8, 9],
        prompt_is_delta=True,
    )
    await store.sink.put(delta)
    leaf = make_entry(
        model_call_id="leaf", prompt=[*SEQUENCE, *SUFFIX, 8, 9, 4], generation=[1], parent="delta"
    )
    await store.sink.put_continuation(without_prompt(leaf), [4])
    assert leaf in (await store.source.freeze("rollout-1")).entries


async def test_a_parent_that_another_process_replaced_is_not_taken_for_the_one_that_is_known(
    store: CaptureStore, store_url: str
) -> None:
    await store.sink.put(ROOT)
    await elsewhere(store, store_url, OTHER_ROOT, removes=True)
    await store.sink.put_continuation(without_prompt(whole()), SUFFIX)
    read = {entry.model_call_id: entry for entry in (await store.source.freeze("rollout-1")).entries}
    assert read["call"].prompt_token_ids == [4, 4, 4, *SUFFIX]


async def test_a_parent_that_another_process_removed_is_not_taken_from_what_is_known(
    store: CaptureStore, store_url: str
) -> None:
    await store.sink.put(ROOT)
    await elsewhere(store, store_url, removes=True)
    with pytest.raises(LineageError, match="its parent root is not stored"):
        await store.sink.put_continuation(without_prompt(whole()), SUFFIX)
    assert not await identities(store_url)


async def test_a_parent_that_is_replaced_after_it_was_read_leaves_nothing_behind(
    store: CaptureStore, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await elsewhere(store, store_url, ROOT)
    write = sink.write_call

    async def replace_then_write(doors: Doors, call: Put, **options: Any) -> Sequence[str]:
        if call.new.row["model_call_id"] == "call":
            await elsewhere(store, store_url, OTHER_ROOT, removes=True)
        return await write(doors, call, **options)

    monkeypatch.setattr(sink, "write_call", replace_then_write)
    with pytest.raises(LineageError, match="put the call with its whole prompt"):
        await store.sink.put_continuation(without_prompt(whole()), SUFFIX)
    assert list(await identities(store_url)) == ["root"]


@pytest.mark.parametrize("parent", ["absent", "conflicting", "empty"])
async def test_without_one_sequence_to_follow_nothing_is_stored(
    store: CaptureStore, store_url: str, parent: str
) -> None:
    if parent == "conflicting":
        await store.sink.put(ROOT)
        with pytest.raises(PayloadConflictError):
            await store.sink.put(make_entry(model_call_id="root", prompt=[1], generation=[2]))
    if parent == "empty":
        await store.sink.put(make_entry(model_call_id="root", prompt=[], generation=[]))
    before = await identities(store_url)
    with pytest.raises(LineageError, match="model call call of rollout rollout-1: its parent root is not"):
        await store.sink.put_continuation(without_prompt(whole()), SUFFIX)
    assert await identities(store_url) == before
    if parent == "absent":
        assert not (await store.source.freeze("rollout-1")).incomplete


async def test_a_digest_or_length_that_was_given_must_be_that_of_the_sequence(store: CaptureStore) -> None:
    await store.sink.put(ROOT)
    good = whole()
    for wrong in ({"digest": "0" * 64}, {"cum_len": 3}):
        with pytest.raises(LineageError, match="call"):
            await store.sink.put_continuation(without_prompt(good, **wrong), SUFFIX)
    await store.sink.put_continuation(without_prompt(good, digest=good.digest, cum_len=good.cum_len), SUFFIX)
    assert good in (await store.source.freeze("rollout-1")).entries


async def test_a_record_that_cannot_take_a_suffix_is_refused_before_anything_is_read(
    store: CaptureStore,
) -> None:
    good = without_prompt(whole())
    refused: list[tuple[dict[str, Any], Any, str]] = [
        ({"prompt_token_ids": [1]}, SUFFIX, "prompt_token_ids must be empty"),
        ({"prompt_is_delta": True}, SUFFIX, "prompt_is_delta must be False"),
        ({"parent_call_id": None, "parent_resolution": "root"}, SUFFIX, "resolved parent_call_id"),
        ({}, [1, "two"], "prompt_suffix: every id must be an integer"),
        ({}, [True], "prompt_suffix: every id must be an integer"),
        ({}, [-1], "prompt_suffix: every id must lie between"),
        ({}, b"12", "prompt_suffix"),
        ({"generation_token_ids": [True, 9]}, SUFFIX, "generation_token_ids: every id must be an integer"),
    ]
    await store.sink.put(ROOT)
    for changes, suffix, said in refused:
        with pytest.raises(InvalidRecordError, match=said):
            await store.sink.put_continuation(good.model_copy(update=changes), suffix)
