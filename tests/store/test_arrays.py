"""Calls given as arrays: stored, found again and read as those of lists are, with no list on the way."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from tests.support.arrays import float_arrays, id_arrays, peak_below
from tests.support.entries import REQUEST, make_entry
from tests.support.rows import rows_of
from tokencustody import CaptureStore
from tokencustody.errors import InvalidRecordError, PayloadConflictError
from tokencustody.schema import tables

LOG_PROBS = [-0.5, -0.0, -1.5]


async def test_a_call_of_arrays_and_one_of_lists_are_the_same_call(store: CaptureStore) -> None:
    for number, ids in enumerate(
        ([1, 2, 100], [1, 2, 200], [1, 2, 40_000], [1, 2, 2**31], [1, 2, 2**64 - 1])
    ):
        call = f"call-{number}"
        listed = make_entry(
            model_call_id=call, request=REQUEST, prompt=ids, generation=ids, log_probs=LOG_PROBS
        )
        for form, column in id_arrays(ids).items():
            packed = make_entry(
                model_call_id=call, request=REQUEST, prompt=column, generation=ids, log_probs=LOG_PROBS
            )
            assert packed == listed, form
            packed.generation_token_ids = column
            await store.sink.put(packed)
        await store.sink.put(listed)
    ids, call = [1, 2, 3], "floats"
    for column in (LOG_PROBS, *float_arrays(LOG_PROBS).values()):
        await store.sink.put(make_entry(model_call_id=call, generation=ids, log_probs=column))
    snapshot = await store.source.freeze("rollout-1")
    assert not snapshot.incomplete
    assert len(snapshot.entries) == 6
    columns = [(e.prompt_token_ids, e.generation_token_ids, e.generation_log_probs) for e in snapshot.entries]
    assert {type(column) for row in columns for column in row} == {list}
    assert {type(number) for row in columns for column in row for number in column} == {int, float}


async def test_another_number_in_an_array_is_a_conflict(store: CaptureStore) -> None:
    await store.sink.put(make_entry(prompt=[1, 2]))
    with pytest.raises(PayloadConflictError, match="prompt_token_ids"):
        await store.sink.put(make_entry(prompt=np.array([1, 3])))
    assert (await store.source.freeze("rollout-1")).incomplete


async def test_a_buffer_that_is_used_again_while_its_call_is_on_the_way_changes_nothing(
    store: CaptureStore, faults: dict[str, Any]
) -> None:
    ids, floats = np.array([1, 2, 3]), np.array(LOG_PROBS)
    entry = make_entry(request=REQUEST, prompt=ids, generation=ids, log_probs=floats)
    ids[:], floats[:] = 7, -7.0

    async def use_again() -> None:
        ids[:], floats[:] = 9, -9.0

    faults["before commit"] = use_again
    await store.sink.put(entry)
    faults.clear()
    (read,) = (await store.source.freeze("rollout-1")).entries
    assert (read.prompt_token_ids, read.generation_log_probs) == ([1, 2, 3], LOG_PROBS)
    assert read == make_entry(request=REQUEST, prompt=[1, 2, 3], generation=[1, 2, 3], log_probs=LOG_PROBS)


async def test_a_prompt_in_an_array_is_stored_without_its_parent_s_sequence(
    store: CaptureStore, store_url: str
) -> None:
    sequence: list[int] = []
    for number, new in enumerate((5, 70_000, 6, 2**40)):
        prompt: Any = np.array([*sequence, new], "u8")
        entry = make_entry(
            model_call_id=f"call-{number}",
            prompt=prompt,
            generation=array("H", [number]),
            log_probs=[-1.0],
            parent=f"call-{number - 1}" if number else None,
        )
        await store.sink.put(entry)
        sequence = [*sequence, new, number]
    read = (await store.source.freeze("rollout-1")).entries
    assert [*read[-1].prompt_token_ids, 3] == sequence
    assert [row["shared_len"] for row in await rows_of(store_url, tables.entries)] == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        (np.array([1, -1]), r"prompt_token_ids: every id must lie between 0 and 2\^64-1"),
        (np.zeros(2), "prompt_token_ids: the elements of an array must be integers"),
        (np.zeros((1, 2), "u2"), "prompt_token_ids: an array must have one dimension, not 2"),
    ],
)
async def test_an_assigned_array_is_looked_at_by_put(store: CaptureStore, column: Any, problem: str) -> None:
    entry = make_entry()
    entry.prompt_token_ids = column
    with pytest.raises(InvalidRecordError, match=problem):
        await store.sink.put(entry)
    assert (await store.source.freeze("rollout-1")).entries == ()


async def test_a_long_call_is_put_without_a_list(store: CaptureStore) -> None:
    await store.sink.put(make_entry(model_call_id="first"))  # whatever the first call imports
    column = np.arange(2_000_000, dtype="u4") + 80_000
    with peak_below(8 * column.nbytes):
        await store.sink.put(make_entry(prompt=column, generation=column[:1000], log_probs=np.zeros(1000)))
