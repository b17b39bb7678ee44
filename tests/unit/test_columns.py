"""Arrays in the place of lists of tokens: the same entry, without a list on the way."""

from __future__ import annotations

import copy
import io
import math
import mmap
import pickle
import struct
from array import array
from collections import UserList, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.arrays import Untouchable, float_arrays, id_arrays, peak_below
from tokencustody.codec.calls import pack_entry, validated
from tokencustody.codec.id_columns import PackedIds
from tokencustody.records import (
    TokenEntry,
    compute_digest,
    cumulative_tokens,
    encode_token_ids,
    stamp_lineage,
)
from tokencustody.staging.digest import build_staging_delta, compute_chain_hash, hash_token_ids

pytestmark = pytest.mark.quick

BOUNDS = (2**7, 2**8, 2**15, 2**16, 2**31, 2**32, 2**63, 2**64)
IDS = st.sampled_from(BOUNDS).flatmap(
    lambda bound: st.lists(st.integers(0, bound - 1) | st.just(bound - 1), max_size=6)
)
ODD_FLOATS = [0.0, -0.0, math.inf, -math.inf, -1.5, 2.0**-149, struct.unpack("<f", b"\x01\0\xc0\xff")[0]]
FLOATS = st.lists(st.sampled_from(ODD_FLOATS) | st.floats(width=32, allow_nan=False), max_size=6)


def entry_of(prompt: Any = (), generation: Any = (), log_probs: Any = (), **fields: Any) -> TokenEntry:
    return TokenEntry(
        rollout_id="r",
        model_call_id="c",
        prompt_token_ids=prompt,
        generation_token_ids=generation,
        generation_log_probs=log_probs,
        **fields,
    )


def payload_of(entry: TokenEntry) -> bytes:
    return pack_entry(validated(entry)).payload


@given(prompt=IDS, generation=IDS, data=st.data())
def test_an_array_of_ids_is_the_list_of_the_same_ids(
    prompt: list[int], generation: list[int], data: st.DataObject
) -> None:
    log_probs = [-1.0] * len(generation)
    arrays = []
    for ids in (prompt, generation):
        forms = id_arrays(ids) | {"list": ids}
        arrays.append(forms[data.draw(st.sampled_from(sorted(forms)))])
    of_lists, of_arrays = entry_of(prompt, generation, log_probs), entry_of(*arrays, log_probs)
    assert payload_of(of_arrays) == payload_of(of_lists)
    assert of_arrays == of_lists
    assert of_lists == of_arrays
    assert of_arrays.model_dump() == of_lists.model_dump()
    assert of_arrays.model_dump_json() == of_lists.model_dump_json()
    assert cumulative_tokens(of_arrays) == prompt + generation
    assert compute_digest(arrays[0]) == compute_digest(prompt)
    assert encode_token_ids(arrays[0]) == encode_token_ids(prompt)
    assert stamp_lineage(of_arrays, None) == stamp_lineage(of_lists, None)
    assert payload_of(of_arrays) == payload_of(of_lists)
    whole = np.array(prompt + generation, "u8")
    assert stamp_lineage(entry_of(*arrays, log_probs), None, cumulative=whole) == of_lists
    delta = entry_of(
        *arrays, log_probs, prompt_is_delta=True, parent_call_id="p", parent_resolution="resolved"
    )
    stamp_lineage(delta, "p", cumulative=[7, *prompt, *generation])
    assert (delta.cum_len, delta.digest) == (len(whole) + 1, compute_digest([7, *prompt, *generation]))
    for wrong in (np.append(whole, np.uint64(1)), [1] * len(whole) + [2]):
        with pytest.raises(ValueError, match="cumulative disagrees"):
            stamp_lineage(of_arrays, None, cumulative=wrong)


@given(values=FLOATS, data=st.data())
def test_an_array_of_log_probabilities_is_the_list_of_them_in_every_bit(
    values: list[float], data: st.DataObject
) -> None:
    forms = float_arrays(values)
    column = forms[data.draw(st.sampled_from(sorted(forms)))]
    ids = list(range(len(values)))
    assert payload_of(entry_of([], ids, column)) == payload_of(entry_of([], ids, values))
    assert entry_of([], ids, column).model_dump_json() == entry_of([], ids, values).model_dump_json()


@given(bits=st.lists(st.binary(min_size=8, max_size=8), max_size=4))
def test_no_bit_of_a_float64_is_lost(bits: list[bytes]) -> None:
    column = np.frombuffer(b"".join(bits), "<f8")
    payload = payload_of(entry_of([], list(range(len(column))), column))
    assert b"".join(bits) in payload


def test_a_call_of_arrays_can_be_copied_and_pickled() -> None:
    entry = entry_of(
        np.arange(3), array("Q", [2**40]), np.array([-0.5], "f4"), note={"of": ["the", "writer"]}
    )
    for again in (
        copy.copy(entry),
        copy.deepcopy(entry),
        entry.model_copy(),
        entry.model_copy(deep=True),
        pickle.loads(pickle.dumps(entry)),  # noqa: S301 - our own
        TokenEntry.model_validate(entry.model_dump()),
        TokenEntry.model_validate(dict(entry)),
        TokenEntry.model_validate_json(entry.model_dump_json()),
    ):
        assert again == entry
        assert payload_of(again) == payload_of(entry)


def test_entries_of_other_numbers_or_fields_differ() -> None:
    entry = entry_of(np.arange(3))
    assert entry != entry_of([0, 1, 3])
    assert entry != entry_of([0, 1])
    assert entry != entry_of([0, 1, 2], model="m")
    assert entry != [0, 1, 2]


def test_an_engine_that_uses_its_buffer_again_changes_nothing() -> None:
    ids, floats = [70_000, 80_000, 2**17], [-0.5, -0.25, 0.0]
    expected = stamp_lineage(entry_of(ids, ids, floats), None)
    made = [(buffer, entry_of(buffer, buffer, floats)) for buffer in id_arrays(ids).values()]
    made += [(buffer, entry_of(ids, ids, buffer)) for buffer in float_arrays(floats).values()]
    for buffer, entry in made:
        for place in range(3):
            buffer[place] = 9
        assert stamp_lineage(entry, None) == expected
        assert payload_of(entry) == payload_of(expected)


def test_an_array_is_not_asked_for_its_elements() -> None:
    ids, floats = Untouchable("q", [1, 2, 70_000]), Untouchable("d", [-0.5, -0.25, -1.0])
    assert payload_of(entry_of(ids, ids, floats)) == payload_of(
        entry_of([1, 2, 70_000], [1, 2, 70_000], [-0.5, -0.25, -1.0])
    )
    assert compute_digest(ids) == compute_digest([1, 2, 70_000])


@pytest.mark.parametrize("dtype", ["u2", "i4", "u4", "i8", ">u8"])
def test_no_list_of_millions_of_ids_is_made_on_the_way(dtype: str) -> None:
    ids = np.arange(2_000_000, dtype="u8") % 60_000 + (0 if dtype == "u2" else 80_000)
    column = ids.astype(dtype)
    # A list takes 36 bytes for each id, and at its making 8 more.
    with peak_below(5 * column.nbytes):
        entry = entry_of(column)
    with peak_below(2_000_000 * 12):
        pack_entry(validated(entry))
    # Encoded for the digest an id takes 8 bytes, and for a moment twice that.
    with peak_below(2_000_000 * 20):
        stamp_lineage(entry, None)


def test_what_is_assigned_is_stored_like_what_was_given() -> None:
    entry, of_lists = entry_of(), entry_of([1, 2], [3, 4], [-0.5, -1.0])
    # NumPy would add these two, element by element.
    entry.prompt_token_ids, entry.generation_token_ids = np.array([1, 2]), np.array([3, 4], ">i2")
    entry.generation_log_probs = np.array([-0.5, -1.0], "f4")
    assert cumulative_tokens(entry) == [1, 2, 3, 4]
    assert payload_of(stamp_lineage(entry, None)) == payload_of(stamp_lineage(of_lists, None))
    # Of our own kind, but wider than it need be.
    entry.prompt_token_ids, entry.generation_token_ids = array("Q", [1, 2]), array("I", [3, 4])
    assert payload_of(entry) == payload_of(of_lists)


@given(ids=IDS, width=st.sampled_from([2, 4, 8]))
def test_packed_ids_are_widened_as_the_numbers_that_they_are(ids: list[int], width: int) -> None:
    packed = PackedIds.of(ids)
    if width >= packed.width:
        expected = b"".join(token.to_bytes(width, "little") for token in ids)
        assert packed.at_width(width).tobytes() == expected


REFUSED: dict[str, tuple[Any, str]] = {
    "two dimensions": (np.zeros((2, 2), "i4"), "one dimension, not 2"),
    "no dimension": (np.array(5), "one dimension, not 0"),
    "a number of NumPy": (np.int64(5), "one dimension, not 0"),
    "booleans": (np.array([True]), r"integers of 1, 2, 4 or 8 bytes, not of the format '\?'"),
    "float16": (np.zeros(2, "f2"), "not of the format 'e'"),
    "complex": (np.zeros(2, "c16"), "not of the format 'Zd'"),
    "objects": (np.array([1, None]), "not of the format 'O'"),
    "records": (np.zeros(2, "i4,i4"), "not of the format"),
    "times": (np.zeros(2, "M8[s]"), "gives no buffer"),
    "text": ("12", "must be a list of plain numbers or an array of them, not str"),
    "bytes": (b"12", "must be a list of plain numbers or an array of them, not bytes"),
    "a bytearray": (bytearray(b"12"), "not bytearray"),
    "a mapping": ({1: 1}, "not dict"),
    "a set": ({1, 2}, "not set"),
    "what can be read once": (iter([1, 2]), "not list_iterator"),
    "none": (None, "not NoneType"),
    "a masked array": (np.ma.masked_array([1.0, 2.0], [0, 1]), "a masked array hides numbers"),
}
RAW = mmap.mmap(-1, 8)
NO_IDS = REFUSED | {
    "float64": (np.zeros(2), "not of the format 'd'"),
    **{
        name: (memory, "bytes do not say how wide an id is")
        for name, memory in (
            ("a view of bytes", memoryview(b"12345678")),
            ("a part of them", memoryview(bytearray(8))[::2]),
            ("a file in memory", io.BytesIO(bytes(8)).getbuffer()),
            ("shared memory", RAW),
            ("a view of it", memoryview(RAW)),
        )
    },
    **{
        f"negative {dtype}": (np.array([1, 2, -1], dtype), r"between 0 and 2\^64-1")
        for dtype in ("i1", "<i2", ">i2", "<i4", ">i4", "<i8", ">i8")
    },
}
NO_FLOATS = REFUSED | {
    "integers": (np.zeros(2, "i8"), "float64 or float32, not of the format 'l'"),
    "long doubles": (np.zeros(2, "g"), "not of the format 'g'"),
}
NO_FLOATS["booleans"] = (np.array([True]), r"float64 or float32, not of the format '\?'")


@pytest.mark.parametrize(
    ("field", "given_", "problem"),
    [
        pytest.param(field, value, problem, id=f"{field}: {name}")
        for field, refused in (
            ("prompt_token_ids", NO_IDS),
            ("generation_token_ids", NO_IDS),
            ("generation_log_probs", NO_FLOATS),
        )
        for name, (value, problem) in refused.items()
    ],
)
def test_what_is_no_column_of_numbers_is_refused_by_the_name_of_its_field(
    field: str, given_: Any, problem: str
) -> None:
    fields = {"prompt_token_ids": [], "generation_token_ids": [], "generation_log_probs": []}
    with pytest.raises(ValueError, match=rf"{field}\n.*{problem}") as refused:
        TokenEntry(rollout_id="r", model_call_id="c", **(fields | {field: given_}))
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("name", NO_IDS)
def test_what_is_no_column_of_ids_is_refused_wherever_ids_are_hashed(name: str) -> None:
    value, problem = NO_IDS[name]
    delta = entry_of([1], [2], [-0.5], prompt_is_delta=True, parent_call_id="p", parent_resolution="resolved")
    assigned = entry_of()
    assigned.prompt_token_ids = value
    hashed: list[Callable[[], Any]] = [
        lambda: compute_digest(value),
        lambda: encode_token_ids(value),
        lambda: cumulative_tokens(assigned),
        lambda: stamp_lineage(assigned, None),
        lambda: hash_token_ids(value),
        lambda: compute_chain_hash(None, value),
        lambda: build_staging_delta(
            prompt_token_ids=value, generated_token_ids=[], generated_log_probs=[], prev_len=0
        ),
    ]
    if value is not None:
        hashed.append(lambda: stamp_lineage(delta, "p", cumulative=value))
    for door in hashed:
        with pytest.raises(ValueError, match=problem):
            door()


def test_any_sequence_of_plain_numbers_is_taken_at_every_door() -> None:
    ids, log_probs = [1, 2, 70_000], [-0.5, -0.0, -1.0]
    expected = payload_of(entry_of(ids, ids, log_probs))
    for form in (tuple, deque, UserList):
        assert payload_of(entry_of(form(ids), form(ids), form(log_probs))) == expected
        assert compute_digest(form(ids)) == compute_digest(ids)
        assert build_staging_delta(
            prompt_token_ids=form(ids),
            generated_token_ids=form(ids),
            generated_log_probs=form(log_probs),
            prev_len=1,
        ) == ([2, 70_000, *ids], [0.0] * 2 + [1.0] * 3, [0.0] * 2 + log_probs)


@pytest.mark.parametrize("dtype", ["u1", ">i4", "u8"])
def test_an_array_that_was_assigned_is_compared_and_dumped_like_the_list(dtype: str) -> None:
    expected = entry_of([1, 2, 3], [4, 5], [-0.5, -1.0])
    columns = {
        "prompt_token_ids": np.array([1, 2, 3], dtype),
        "generation_token_ids": np.array([9, 4, 9, 5], dtype)[1::2],
        "generation_log_probs": np.array([-0.5, -1.0], ">f4"),
    }
    assigned = entry_of()
    for name, column in columns.items():
        setattr(assigned, name, column)
    constructed = TokenEntry.model_construct(**dict(expected) | columns)
    for entry in (assigned, constructed, expected.model_copy(update=columns)):
        assert entry == expected
        assert expected == entry
        assert entry != entry_of([1, 2, 4], [4, 5], [-0.5, -1.0])
        assert entry.model_dump() == expected.model_dump()
        assert entry.model_dump_json() == expected.model_dump_json()
        assert payload_of(entry) == payload_of(expected)


def test_an_array_without_a_buffer_is_refused_with_what_to_do() -> None:
    class Tensor:
        def tolist(self) -> list[int]:
            return [1]

    with pytest.raises(ValueError, match=r"not Tensor; it has \.tolist\(\)"):
        entry_of(Tensor())
    assert entry_of(Tensor().tolist()).prompt_token_ids == [1]
