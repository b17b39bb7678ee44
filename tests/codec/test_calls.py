"""What comes back equals what was put, in every bit."""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
import struct
from array import array
from enum import IntEnum
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.entries import REQUEST, make_entry
from tests.support.rows import rows_of, run_sql
from tokencustody import CaptureStore, TokenEntry, open_store
from tokencustody.codec.calls import pack_entry, unpack_entry, validated, without_prefix
from tokencustody.codec.id_columns import PackedIds
from tokencustody.errors import CorruptEntryError, InvalidRecordError
from tokencustody.schema import tables

IDS = st.integers(0, 2**64 - 1) | st.integers(0, 200_000)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def same(read: TokenEntry, written: TokenEntry) -> bool:
    """Whether two entries agree in every bit, key order, number types and NaN log probabilities included."""

    def bits(value: Any) -> Any:
        match value:
            case float():
                # JSON text has a single NaN.
                return struct.pack("<d", math.nan if math.isnan(value) else value)
            case list():
                return [bits(item) for item in value]
            case dict():
                return [(key, bits(item)) for key, item in value.items()]
            case _:
                return type(value).__name__, value

    columns = [
        struct.pack(f"<{len(e.generation_log_probs)}d", *e.generation_log_probs) for e in (read, written)
    ]
    return bool(bits(dict(read)) == bits(dict(written)) and columns[0] == columns[1])


def round_trip(entry: TokenEntry) -> TokenEntry:
    packed = pack_entry(validated(entry))
    return unpack_entry(
        packed.payload, packed.sha256, rollout_id=entry.rollout_id, model_call_id=entry.model_call_id
    )


@given(
    prompt=st.lists(IDS, max_size=20),
    pairs=st.lists(st.tuples(IDS, st.floats()), max_size=20),
    experts=JSON,
    items=st.lists(st.dictionaries(TEXT, JSON, max_size=3), max_size=3),
    texts=st.tuples(TEXT, TEXT, TEXT),
    created_at=st.floats(),
    unknown=st.dictionaries(TEXT.map("x_{}".format), JSON, max_size=3),
)
def test_any_entry_survives_packing_in_every_bit(
    prompt: list[int],
    pairs: list[tuple[int, float]],
    experts: Any,
    items: list[dict[str, Any]],
    texts: tuple[str, str, str],
    created_at: float,
    unknown: dict[str, Any],
) -> None:
    entry = TokenEntry(
        rollout_id="rollout-1",
        model_call_id="call-1",
        prompt_token_ids=prompt,
        generation_token_ids=[token for token, _ in pairs],
        generation_log_probs=[log_prob for _, log_prob in pairs],
        routed_experts=experts,
        output_items=items,
        model=texts[0],
        response_id=texts[1],
        continuation_fingerprint=texts[2],
        created_at=created_at,
        **unknown,
    )
    assert same(round_trip(entry), entry)


def awkward_entry(rollout_id: str = "rollout-1") -> TokenEntry:
    nan_with_payload = struct.unpack("<d", (0x7FF8_0000_DEAD_BEEF).to_bytes(8, "little"))[0]
    log_probs = [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        nan_with_payload,
        5e-324,
        -1.7976931348623157e308,
        -0.1,
    ]
    return make_entry(
        rollout_id,
        prompt=[0, 65535, 65536, 2**32 - 1, 2**32, 2**63, 2**64 - 1],
        request=REQUEST,
        generation=list(range(len(log_probs))),
        log_probs=log_probs,
        model="nul \0 and 😀",
        response_id="\0" * 3 + "r" * 2000,
        parent_resolution_reason="",
        output_items=[{"role": "assistant", "content": "a\0b", "z": 1, "a": 1.0}],
        routed_experts={"layers": [[[1, 2], [3, 4]]], "dtype": "int16", "scale": [math.nan, -0.0, 1e308]},
        x_unknown={"b": 2**200, "a": [None, True, {"nested": "\u2028"}]},
    )


@pytest.mark.quick("Exact payload")
async def test_awkward_values_come_back_from_the_database_in_every_bit(store: CaptureStore) -> None:
    entry = awkward_entry()
    await store.sink.put(entry)
    await store.sink.put(entry)  # the retry of a NaN is the same bytes
    (read,) = (await store.source.freeze("rollout-1")).entries
    assert same(read, entry)


async def test_a_call_of_200_000_tokens_comes_back_in_every_bit(store: CaptureStore) -> None:
    rng = random.Random(7)
    entry = make_entry(
        prompt=[rng.randrange(150_000) for _ in range(200_000)],
        generation=[rng.randrange(150_000) for _ in range(200_000)],
        log_probs=[-rng.expovariate(1) for _ in range(200_000)],
    )
    await store.sink.put(entry)
    (read,) = (await store.source.freeze("rollout-1")).entries
    assert same(read, entry)


@pytest.mark.parametrize(("highest", "width"), [(65535, 2), (65536, 4), (2**32 - 1, 4), (2**32, 8)])
def test_ids_take_the_narrowest_width_that_fits_the_call(highest: int, width: int) -> None:
    packed = pack_entry(make_entry(prompt=[1, 2], generation=[highest]))
    assert packed.token_width == width
    fields_at = 20 + 3 * width + 8
    assert packed.payload[fields_at : fields_at + 1] == b"{"


@pytest.mark.parametrize("width", [2, 4, 8])
def test_both_forms_of_a_payload_have_the_documented_layout(width: int) -> None:
    highest = 2 ** (8 * width) - 1
    entry = make_entry(prompt=[1, 2, 3], generation=[highest, 5], log_probs=[-1.0, math.nan])
    packed = pack_entry(entry)
    ids = b"".join(token.to_bytes(width, "little") for token in (1, 2, 3, highest, 5))
    columns = struct.pack("<2d", -1.0, math.nan)
    counts = struct.pack("<2Q", 3, 2)
    whole = bytes((1, width, 0, 0)) + counts + ids + columns
    assert packed.payload.startswith(whole + b'{"schema_version":1,"rollout_id":"rollout-1",')
    text = packed.payload[len(whole) :]
    for shared in range(4):
        stored = without_prefix(packed, shared)
        counts = struct.pack("<3Q", shared, 3 - shared, 2)
        assert stored.payload == bytes((2, width, 0, 0)) + counts + ids[shared * width :] + columns + text
        assert stored.sha256 == hashlib.sha256(stored.payload).hexdigest()


def test_the_payload_of_a_call_is_the_one_that_earlier_releases_stored() -> None:
    assert (
        pack_entry(make_entry()).sha256 == "5994d7d8798eb71bf974a4d83ccdbf7415e095408fed84a866c627f673706261"
    )
    assert (
        pack_entry(awkward_entry()).sha256
        == "c8f7f6a41a54d15003d427ea6b4f90535688fe9733b11424ad7b4ea3f2ea80ae"
    )


@given(prompt=st.lists(IDS, max_size=9), generation=st.lists(IDS, max_size=9))
def test_a_packed_call_knows_its_sequence(prompt: list[int], generation: list[int]) -> None:
    packed = pack_entry(make_entry(prompt=prompt, generation=generation))
    assert (packed.prompt_len, packed.length) == (len(prompt), len(prompt + generation))
    assert packed.sequence().token_ids() == prompt + generation


@given(
    prompt=st.lists(IDS, max_size=9), generation=st.lists(IDS, max_size=9), other=st.lists(IDS, max_size=9)
)
def test_a_prompt_begins_with_its_own_beginnings_of_whatever_width_and_with_nothing_else(
    prompt: list[int], generation: list[int], other: list[int]
) -> None:
    packed = pack_entry(make_entry(prompt=prompt, generation=generation))
    for length in range(len(prompt) + 1):
        assert packed.begins_with(PackedIds.of(prompt[:length]))
    assert packed.begins_with(PackedIds.of(other)) == (prompt[: len(other)] == other)
    assert not packed.begins_with(PackedIds.of([*prompt, 7]))


@pytest.mark.parametrize("length", [-1, 5])
def test_a_prefix_ends_within_the_prompt(length: int) -> None:
    with pytest.raises(ValueError, match=f"a prompt of 4 ids has no prefix of {length}"):
        without_prefix(pack_entry(make_entry()), length)


def test_a_delta_prompt_has_no_prefix() -> None:
    packed = pack_entry(
        make_entry(
            parent="call-0", cumulative=[9, 10, 11, 12, 13, 30, 31, 32], prompt=[13], prompt_is_delta=True
        )
    )
    assert not packed.begins_with(PackedIds.of([13]))
    with pytest.raises(ValueError, match="a delta prompt begins in its parent"):
        without_prefix(packed, 1)


def test_a_payload_without_its_beginning_is_not_read_as_a_whole_one() -> None:
    stored = without_prefix(pack_entry(make_entry()), 2)
    with pytest.raises(CorruptEntryError, match=r"call-1 of rollout rollout-1: .* lacks the beginning"):
        unpack_entry(stored.payload, stored.sha256, rollout_id="rollout-1", model_call_id="call-1")


@pytest.mark.parametrize(
    ("at", "says"),
    [(0, "codec 9"), (1, "9 bytes"), (2, "dialect 9"), (3, "header is 9"), (5, "ends inside a column")],
)
def test_a_header_of_an_unknown_kind_is_a_corruption_error_though_the_hash_is_right(
    at: int, says: str
) -> None:
    payload = bytearray(pack_entry(make_entry()).payload)
    payload[at] = 9
    with pytest.raises(CorruptEntryError, match=f"call-1 of rollout rollout-1: .* does not decode: .*{says}"):
        unpack_entry(
            bytes(payload),
            hashlib.sha256(payload).hexdigest(),
            rollout_id="rollout-1",
            model_call_id="call-1",
        )


async def test_the_payload_hash_can_be_checked_from_the_row_alone(
    store: CaptureStore, store_url: str
) -> None:
    await store.sink.put(awkward_entry())
    (row,) = await rows_of(store_url, tables.entries)
    assert hashlib.sha256(row["payload"]).hexdigest() == row["payload_sha256"]


async def test_audit_columns_say_what_the_payload_says(store: CaptureStore, store_url: str) -> None:
    entry = awkward_entry()
    await store.sink.put(entry)
    (row,) = await rows_of(store_url, tables.entries)
    assert (row["prompt_len"], row["generation_len"], row["cum_len"]) == (7, 9, 16)
    assert (row["token_width"], row["digest"], row["parent_resolution"]) == (8, entry.digest, "root")
    assert row["model"] == "nul \ufffd and 😀"
    assert row["response_id"].startswith("\ufffd\ufffd\ufffdrrr")
    assert row["response_id"].endswith("…")
    assert row["created_at"] == entry.created_at


async def test_a_timestamp_that_is_not_a_number_is_null_in_its_column_and_exact_in_the_payload(
    store: CaptureStore, store_url: str
) -> None:
    entry = make_entry()
    entry.created_at = math.nan
    await store.sink.put(entry)
    (row,) = await rows_of(store_url, tables.entries)
    assert row["created_at"] is None
    assert same((await store.source.freeze("rollout-1")).entries[0], entry)


def broken(**fields: Any) -> TokenEntry:
    entry = make_entry()
    for name, value in fields.items():
        setattr(entry, name, value)
    return entry


async def test_an_id_that_equals_an_integer_is_stored_as_that_integer(store: CaptureStore) -> None:
    await store.sink.put(broken(prompt_token_ids=[True, False, IntEnum("Token", {"end": 7}).end]))
    await store.sink.put(broken(prompt_token_ids=[1, 0, 7]))
    (read,) = (await store.source.freeze("rollout-1")).entries
    assert [(type(token), token) for token in read.prompt_token_ids] == [(int, 1), (int, 0), (int, 7)]


async def test_a_log_probability_that_is_an_integer_is_stored_as_the_float_that_it_equals(
    store: CaptureStore,
) -> None:
    entry = broken(generation_log_probs=[-1, -2.5, 0])
    assert [type(each) for each in validated(entry).generation_log_probs] == [float, float, float]
    await store.sink.put(entry)
    await store.sink.put(broken(generation_log_probs=[-1.0, -2.5, 0.0]))
    (read,) = (await store.source.freeze("rollout-1")).entries
    assert [(type(each), each) for each in read.generation_log_probs] == [
        (float, -1.0),
        (float, -2.5),
        (float, 0.0),
    ]


async def test_lists_that_change_while_a_call_is_on_its_way_are_stored_as_they_were(
    store: CaptureStore, faults: dict[str, Any]
) -> None:
    entry = make_entry(prompt=[1, 2, 3])

    async def change() -> None:
        entry.prompt_token_ids[0] = 9
        entry.generation_log_probs.clear()

    faults["before commit"] = change
    await store.sink.put(entry)
    faults.clear()
    (read,) = (await store.source.freeze("rollout-1")).entries
    assert (read.prompt_token_ids, len(read.generation_log_probs)) == ([1, 2, 3], 3)


def deep_nest() -> list[Any]:
    nest: list[Any] = []
    for _ in range(5000):
        nest = [nest]
    return nest


@pytest.mark.parametrize("name", ["cls", "self", "_fields_set", "values", "model_", "x y"])
async def test_an_unknown_field_may_have_any_name(store: CaptureStore, name: str) -> None:
    entry = make_entry()
    assert entry.model_extra is not None
    entry.model_extra[name] = [1, 2]
    await store.sink.put(entry)
    (read,) = (await store.source.freeze("rollout-1")).entries
    assert same(read, entry)


class Number(int):
    pass


MALFORMED: dict[str, tuple[Any, str]] = {
    "an entry that was never checked": (
        TokenEntry.model_construct(rollout_id="rollout-1"),
        "model_call_id: Field required",
    ),
    "no entry": ({"rollout_id": "r"}, "entry must be a TokenEntry, not dict"),
    "rollout id of a wrong type": (broken(rollout_id=5), "rollout_id"),
    "rollout id outside the rules": (broken(rollout_id="a/b"), "rollout_id"),
    "rollout id too long": (broken(rollout_id="r" * 256), "rollout_id"),
    "rollout id with a newline": (broken(rollout_id="r\n"), "rollout_id"),
    "empty call id": (broken(model_call_id=""), "model_call_id"),
    "call id too long": (broken(model_call_id="c" * 513), "model_call_id"),
    "call id with NUL": (broken(model_call_id="c\0"), "model_call_id"),
    "call id with a lone surrogate": (broken(model_call_id="c\ud800"), "model_call_id"),
    "id below zero": (broken(prompt_token_ids=[1, -1]), "prompt_token_ids"),
    "generated id below zero": (broken(generation_token_ids=[1, 2, -1]), "generation_token_ids"),
    "prompt id of 2^64": (broken(prompt_token_ids=[1, 2**64]), "prompt_token_ids"),
    "generated id that is missing": (broken(generation_token_ids=[1, None, 3]), r"generation_token_ids\.1"),
    "id of 2^64": (broken(generation_token_ids=[1, 2, 2**64]), "generation_token_ids"),
    "id that is a float": (broken(prompt_token_ids=[1.0]), r"prompt_token_ids\.0"),
    "id that is text": (broken(prompt_token_ids=["1"]), r"prompt_token_ids\.0"),
    "log probability that is text": (
        broken(generation_log_probs=["1", "2", "3"]),
        r"generation_log_probs\.0",
    ),
    "fewer log probabilities than ids": (
        broken(generation_log_probs=[-1.0]),
        "generation_log_probs has 1 values for 3 generation_token_ids",
    ),
    "ids as bytes": (broken(prompt_token_ids=b"12"), "prompt_token_ids: must be a list"),
    "ids as a mapping": (
        broken(generation_token_ids={1: 1, 2: 2, 3: 3}),
        "generation_token_ids: must be a list",
    ),
    "log probability that is a boolean": (
        broken(generation_log_probs=[-1.0, True, -1.0]),
        r"generation_log_probs\.1",
    ),
    "log probabilities in an array of integers": (
        broken(generation_log_probs=array("i", [1, 2, 3])),
        "generation_log_probs: the elements of an array must be float64 or float32",
    ),
    "log probability that is missing": (broken(generation_log_probs=[None] * 3), r"generation_log_probs\.0"),
    "lists of different length": (
        broken(generation_log_probs=[-1.0]),
        "generation_log_probs has 1 values for 3",
    ),
    "newer schema": (broken(schema_version=2), "schema_version 2 is newer than 1.*upgrade"),
    "older schema": (broken(schema_version=0), "schema_version 0 is older"),
    "model that is a number": (broken(model=3), "model"),
    "resolution that does not exist": (broken(parent_resolution="maybe"), "parent_resolution"),
    "resolved without a parent": (broken(parent_resolution="resolved"), "parent_call_id is missing"),
    "negative length": (broken(cum_len=-1), "cum_len"),
    "length beyond a column": (broken(continuation_context_len=2**63), "continuation_context_len"),
    "item index out of range": (broken(token_item_index=1), "token_item_index"),
    "output items that are no objects": (broken(output_items=["x"]), r"output_items\.0"),
    "routed experts in a tuple": (broken(routed_experts=[(1, 2)]), r"routed_experts\[0\]: tuple"),
    "routed experts as bytes": (broken(routed_experts=b"123"), "routed_experts: bytes"),
    "an identifier object": (broken(routed_experts={"id": UUID(int=1)}), r"routed_experts\.id: UUID"),
    "a key that is a number": (broken(output_items=[{"a": {1: 2}}]), r"output_items\[0\]\.a: the key 1"),
    "a lone surrogate deep inside": (broken(output_items=[{"a": ["\ud800"]}]), r"output_items\[0\]\.a\[0\]"),
    "a lone surrogate in a key": (broken(output_items=[{"\ud800": 1}]), r"output_items\[0\] key"),
    "a lone surrogate in a text": (broken(model="\udfff"), "model"),
    "an unknown field that is no JSON": (make_entry(x_set={1, 2}), "x_set: set"),
    "a nest without a floor": (broken(routed_experts=deep_nest()), "nested too deeply"),
}


@pytest.mark.parametrize(("entry", "names"), MALFORMED.values(), ids=MALFORMED)
async def test_a_malformed_entry_is_refused_by_the_name_of_its_field_and_nothing_is_written(
    store: CaptureStore, store_url: str, entry: Any, names: str
) -> None:
    await store.source.freeze("another-rollout")
    with pytest.raises(InvalidRecordError, match=names):
        await store.sink.put(entry)
    assert [row["rollout_id"] for row in await rows_of(store_url, tables.fences)] == ["another-rollout"]


def test_integers_of_other_types_do_not_pass_as_ids() -> None:
    with pytest.raises(InvalidRecordError, match="prompt_token_ids"):
        pack_entry(validated(broken(prompt_token_ids=[2**64 + 1])))
    assert round_trip(broken(prompt_token_ids=[Number(7)], cum_len=None, digest=None)).prompt_token_ids == [7]


CORRUPTIONS = {
    "a flipped byte": (
        "UPDATE entries SET payload = :bytes WHERE model_call_id = 'call-1' AND rollout_id = 'rollout-1'",
        "SHA-256",
    ),
    "another call's payload": (
        "UPDATE entries SET (payload, payload_sha256) ="
        " (SELECT payload, payload_sha256 FROM entries"
        " WHERE model_call_id = 'call-2' AND rollout_id = 'rollout-1')"
        " WHERE model_call_id = 'call-1' AND rollout_id = 'rollout-1'",
        "belongs to another call",
    ),
    "an empty payload with its right hash": (
        "UPDATE entries SET payload = :bytes, payload_sha256 = :sha256"
        " WHERE model_call_id = 'call-1' AND rollout_id = 'rollout-1'",
        "does not decode",
    ),
}


@pytest.mark.quick("Exact payload")
@pytest.mark.parametrize(("statement", "says"), CORRUPTIONS.values(), ids=CORRUPTIONS)
async def test_a_row_that_is_not_what_was_written_is_named_and_the_rest_stays_readable(
    store: CaptureStore, store_url: str, statement: str, says: str
) -> None:
    for call in ("call-1", "call-2"):
        await store.sink.put(make_entry(model_call_id=call))
    await store.sink.put(make_entry("rollout-2"))
    (payload, *_) = [row["payload"] for row in await rows_of(store_url, tables.entries)]
    damaged = b"" if ":sha256" in statement else payload[:25] + bytes((payload[25] ^ 1,)) + payload[26:]
    values = {"bytes": damaged, "sha256": hashlib.sha256(damaged).hexdigest()}
    await run_sql(
        store_url, statement, **{name: value for name, value in values.items() if f":{name}" in statement}
    )

    with pytest.raises(CorruptEntryError, match=f"model call call-1 of rollout rollout-1: .*{says}"):
        await store.source.freeze("rollout-1")
    assert len((await store.source.freeze("rollout-2")).entries) == 1


@pytest.mark.parametrize(
    "payload", ["'text'", "CAST(substr(payload, 1, 20) || x'00ff' || substr(payload, 22) AS TEXT)", "12"]
)
async def test_a_payload_that_is_bytes_no_more_is_a_corruption_error_on_sqlite(
    sqlite_url: str, payload: str
) -> None:
    async with open_store(sqlite_url) as store:
        await store.sink.put(make_entry())
        await run_sql(sqlite_url, f"UPDATE entries SET payload = {payload}")
        with pytest.raises(CorruptEntryError, match="call-1 of rollout rollout-1"):
            await store.source.freeze("rollout-1")


@given(cut=st.integers(0, 400), flip=st.integers(0, 400))
def test_any_damage_to_a_payload_is_a_corruption_error(cut: int, flip: int) -> None:
    packed = pack_entry(make_entry())
    damaged = bytearray(packed.payload[: len(packed.payload) - cut])
    if damaged:
        damaged[flip % len(damaged)] ^= 0x41
    with pytest.raises(CorruptEntryError, match="call-1"):
        unpack_entry(bytes(damaged), packed.sha256, rollout_id="rollout-1", model_call_id="call-1")
    # Even when somebody recomputes the hash, a named error or a readable entry is all that may come of it.
    with contextlib.suppress(CorruptEntryError):
        unpack_entry(
            bytes(damaged),
            hashlib.sha256(damaged).hexdigest(),
            rollout_id="rollout-1",
            model_call_id="call-1",
        )
