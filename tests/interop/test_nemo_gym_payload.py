"""A Gym entry that went through our sink and came back through our source is the same in every bit."""

from __future__ import annotations

import json
import math
import random
import struct
from typing import Any

import pytest
from nemo_gym.token_id_capture import ParentResolutionStatus, TokenEntry

import tokencustody
from tokencustody.errors import InvalidRecordError, PayloadConflictError

from .conftest import GymStores

QUIET_NAN_WITH_A_PAYLOAD = struct.unpack("<d", bytes.fromhex("010000000000f87f"))[0]
ODD_FLOATS = [math.nan, -math.nan, QUIET_NAN_WITH_A_PAYLOAD, math.inf, -math.inf, 0.0, -0.0, 5e-324, -1 / 3]


def make_entry(**fields: Any) -> TokenEntry:
    return TokenEntry(
        **{
            "rollout_id": "rollout-1",
            "model_call_id": "call-1",
            "prompt_token_ids": [1, 2, 3],
            "generation_token_ids": [4, 5],
            "generation_log_probs": [-0.5, -0.25],
            **fields,
        }
    )


def bits(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)


async def put_and_read(gym: GymStores, entry: TokenEntry) -> TokenEntry:
    await gym.sink.put(entry)
    (read,) = (await gym.source.freeze(entry.rollout_id)).entries
    assert type(read) is TokenEntry
    return read


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt_token_ids": [], "generation_token_ids": [], "generation_log_probs": []},
        {"prompt_token_ids": [0, 2**16 - 1, 2**16, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]},
        {"output_items": [{"text": "é 😀 \u0000 \ufffe", "score": math.nan, "z": 1, "a": {"m": []}}]},
        {"routed_experts": {"layers": [[[0, 7], [3, 2]], None], "dtype": "uint8"}},
        {"weight_version": 7, "_private": {"deep": [1, [2.5, None, True]]}, "model_dump": "a method's name"},
        {
            "created_at": -0.0,
            "cum_len": 5,
            "digest": "d" * 64,
            "parent_resolution": ParentResolutionStatus.ROOT,
        },
        {"parent_call_id": "call-0", "parent_resolution": "resolved", "prompt_is_delta": True},
        {"response_id": "resp\u0000-1", "model": "m" * 5000, "big": 2**80},
    ],
    ids=lambda fields: "+".join(fields) or "plain",
)
async def test_an_entry_comes_back_as_gyms_own_dump_of_it(gym: GymStores, fields: dict[str, Any]) -> None:
    entry = make_entry(**fields)
    read = await put_and_read(gym, entry)
    # As text: NaN is not equal to itself, 0.0 is equal to -0.0, and text shows the order of keys.
    assert repr(read.model_dump()) == repr(entry.model_dump())
    assert repr(read) == repr(entry)


async def test_log_probabilities_come_back_in_every_bit(gym: GymStores) -> None:
    entry = make_entry(generation_token_ids=list(range(len(ODD_FLOATS))), generation_log_probs=ODD_FLOATS)
    assert bits(entry.generation_log_probs) == bits(ODD_FLOATS)
    read = await put_and_read(gym, entry)
    assert bits(read.generation_log_probs) == bits(ODD_FLOATS)


async def test_a_long_random_entry_comes_back_equal(gym: GymStores) -> None:
    rng = random.Random(20)
    entry = make_entry(
        prompt_token_ids=[rng.randrange(200_000) for _ in range(40_000)],
        generation_token_ids=[rng.randrange(200_000) for _ in range(8_000)],
        generation_log_probs=[-rng.expovariate(1) for _ in range(8_000)],
    )
    assert await put_and_read(gym, entry) == entry


async def test_a_retry_with_the_same_bytes_is_absorbed_even_with_nan(gym: GymStores) -> None:
    entry = make_entry(generation_log_probs=[math.nan, -0.0], note={"seen": math.nan})
    await gym.sink.put(entry)
    await gym.sink.put(entry.model_copy(deep=True))
    assert not (await gym.source.freeze("rollout-1")).incomplete


async def test_other_bytes_under_the_same_call_id_are_a_conflict_that_masks_the_rollout(
    gym: GymStores,
) -> None:
    await gym.sink.put(make_entry(generation_log_probs=[0.0, -0.25]))
    with pytest.raises(PayloadConflictError, match="generation_log_probs"):
        await gym.sink.put(make_entry(generation_log_probs=[-0.0, -0.25]))
    snapshot = await gym.source.freeze("rollout-1")
    assert snapshot.incomplete
    assert bits(snapshot.entries[0].generation_log_probs) == bits([0.0, -0.25])


async def test_the_callers_entry_is_left_as_it_was(gym: GymStores) -> None:
    entry = make_entry(output_items=[{"content": "x"}], extra=[1])
    before, lists = repr(entry), [id(entry.prompt_token_ids), id(entry.output_items)]
    await gym.sink.put(entry)
    assert repr(entry) == before
    assert [id(entry.prompt_token_ids), id(entry.output_items)] == lists


def assigned(name: str, value: Any) -> TokenEntry:
    entry = make_entry()
    setattr(entry, name, value)
    return entry


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (assigned("prompt_token_ids", [1, "2"]), "prompt_token_ids.1"),
        (assigned("prompt_token_ids", [-1]), "prompt_token_ids"),
        (assigned("prompt_token_ids", [2**64]), "prompt_token_ids"),
        (assigned("generation_token_ids", [None, 2]), "generation_token_ids.0"),
        (assigned("generation_log_probs", [-0.5]), "generation_log_probs has 1 values for 2"),
        (assigned("generation_log_probs", None), "generation_log_probs"),
        (assigned("token_item_index", 3), "token_item_index 3"),
        (assigned("parent_resolution", "resolved"), "parent_call_id is missing"),
        (assigned("schema_version", 2), "schema_version 2 is newer"),
        (assigned("rollout_id", "a/b"), "rollout_id 'a/b'"),
        (assigned("model_call_id", ""), "model_call_id"),
        (assigned("note", (1, 2)), "note: tuple"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_malformed_entry_is_refused_with_the_name_of_its_field(
    gym: GymStores, entry: TokenEntry, problem: str
) -> None:
    with pytest.raises(InvalidRecordError) as caught:
        await gym.sink.put(entry)
    assert problem in str(caught.value)
    assert (await gym.source.freeze("rollout-1")).entries == ()


async def test_what_is_not_gyms_entry_is_refused(gym: GymStores) -> None:
    own = tokencustody.TokenEntry(**make_entry().model_dump())
    for entry in (own, make_entry().model_dump(), json.dumps(make_entry().model_dump()), None):
        with pytest.raises(InvalidRecordError, match="entry must be nemo_gym's TokenEntry"):
            await gym.sink.put(entry)
