"""What is read equals what was written, in every bit."""

from __future__ import annotations

import struct
from typing import Any

from tokencustody.conformance.case import Case
from tokencustody.conformance.expect import difference, expect, expect_entries
from tokencustody.conformance.fixtures import child_turn, opening, record, turn
from tokencustody.conformance.registry import check
from tokencustody.records import TokenEntry, cumulative_tokens

EDGE_IDS = (0, 1, 255, 256, 65535, 65536, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1)
EDGE_LOG_PROBS = (
    0x7FF8000000000000,  # NaN
    0xFFF8000000000123,  # NaN with a sign and a payload
    0x7FF0000000000000,  # infinity
    0xFFF0000000000000,  # -infinity
    0x0000000000000000,
    0x8000000000000000,  # -0.0
    0x0000000000000001,  # the smallest subnormal
    0x800FFFFFFFFFFFFF,  # the largest subnormal, negative
    0x7FEFFFFFFFFFFFFF,  # the largest number
    0xFFEFFFFFFFFFFFFF,
    0xBFB999999999999A,  # -0.1, which is no float32
    0xBFF0000000000001,  # the neighbour of -1.0
)
EDGE_TEXTS = (
    "",
    "\u0000",
    "a\u0000b\u0000",
    "\U0001f9ea\U0010ffff",
    "\ufeff\u200b\ufffe",
    "e\u0301 \u00e9",
    "\r\n\t\\\"'\x7f",
    "\\u0000",
)


@check()
async def exact_token_ids(case: Case) -> None:
    """Token ids from 0 to 2^64-1 come back as they were, in prompts and generations, alone, mixed, absent."""
    lists: list[tuple[int, ...]] = [
        (),
        *((edge,) for edge in EDGE_IDS),
        EDGE_IDS,
        EDGE_IDS[::-1],
        EDGE_IDS[:5],
        EDGE_IDS[:8],
    ]
    rollout = case.rollout()
    entries = []
    for number, ids in enumerate(lists):
        entries.append(record(rollout, f"prompt-{number}", prompt_token_ids=list(ids)))
        generated = {"generation_token_ids": list(ids), "generation_log_probs": [-0.5] * len(ids)}
        entries.append(record(rollout, f"generation-{number}", **generated))
    entries.append(
        record(
            rollout,
            "empty",
            prompt_token_ids=[],
            generation_token_ids=[],
            generation_log_probs=[],
            output_items=[],
        )
    )
    await _round_trip(case, rollout, entries)


@check()
async def exact_log_probs(case: Case) -> None:
    """Log probabilities keep their 64 bits: NaN, infinities, -0.0, subnormals and the largest, each also put
    twice.
    """
    rollout = case.rollout()
    values = [struct.unpack(">d", bits.to_bytes(8))[0] for bits in EDGE_LOG_PROBS]
    entries = [
        record(rollout, f"call-{number}", generation_token_ids=[1] * len(row), generation_log_probs=row)
        for number, row in enumerate([values, *([value] for value in values)])
    ]
    await _round_trip(case, rollout, entries)


@check()
async def exact_text(case: Case) -> None:
    """Any Unicode text, U+0000 included, comes back as it was, in every text field, output item and key."""
    rollout = case.rollout()
    entries = [
        record(
            rollout,
            f"call-{number}",
            model=text,
            response_id=text,
            parent_resolution_reason=text,
            output_items=[
                {"type": "message", "role": "assistant", "content": text, f"key {text}": [text, {text: text}]}
            ],
            token_item_index=0,
            unknown_text=text,
        )
        for number, text in enumerate(EDGE_TEXTS)
    ]
    await _round_trip(case, rollout, entries)


@check()
async def exact_unknown_fields(case: Case) -> None:
    """Unknown fields come back with value and type: 1 is not 1.0 or true, null is not absent, nothing is
    rounded.
    """
    rollout = case.rollout()
    numbers = [0, 1, -1, 2**53 + 1, -(2**63), 2**64 - 1, 1.0, -0.0, 0.1, 100.0, 1e16, 1e300, 5e-324]
    nested: list[Any] = [
        [],
        {},
        [[], {}, None],
        {"a": {"b": [1, 1.0, True, "1", None]}, "": ""},
        {"10": 1, "9": 2},
    ]
    values: list[Any] = [None, True, False, "", "1", *numbers, *nested]
    entries = [record(rollout, f"call-{number}", unknown=value) for number, value in enumerate(values)]
    entries.append(
        record(rollout, "all", **{f"unknown_{number}": value for number, value in enumerate(values)})
    )
    entries.append(
        record(
            rollout,
            "odd names",
            **{"with space": 1, "class": 2, "a.b": 3, "\u00e9": 4, "id": 5, "payload": 6},
        )
    )
    entries.append(record(rollout, "none"))
    await _round_trip(case, rollout, entries)


@check()
async def exact_routed_experts(case: Case) -> None:
    """Routed experts of any JSON shape come back as they were."""
    rollout = case.rollout()
    shapes: list[Any] = [
        None,
        [],
        [[[layer, layer + 1] for layer in range(4)] for _ in range(8)],
        {"shape": [2, 1], "data": "AAEC", "nested": {"experts": [[0.5, 1], [1.0, 0]]}},
        "AAECAw==",
        7,
        0.5,
        False,
    ]
    await _round_trip(
        case, rollout, [record(rollout, f"call-{n}", routed_experts=shape) for n, shape in enumerate(shapes)]
    )


@check()
async def exact_fields(case: Case) -> None:
    """Every field of record schema 1 comes back as it was, at its default and away from it."""
    rollout = case.rollout()
    parent = turn(
        rollout, "parent", opening(), created_at=0.1 + 0.2, token_item_index=0, prefix_requested=True
    )
    plain = TokenEntry(
        rollout_id=rollout,
        model_call_id="bare",
        prompt_token_ids=[],
        generation_token_ids=[],
        generation_log_probs=[],
    )
    odd = record(rollout, "odd", cum_len=2**40, digest="not a digest", prefix_supplied=True, created_at=-0.0)
    odd.continuation_context_len = 2**31
    odd.continuation_fingerprint = odd.continuation_context_digest = "no hash"
    odd.fingerprint_version = 99
    unresolved = record(
        rollout, "unresolved", parent_resolution="unresolved", parent_resolution_reason="ambiguous"
    )
    await _round_trip(case, rollout, [parent, plain, odd, unresolved])


@check()
async def exact_continuations(case: Case) -> None:
    """Prompts that begin with their parent's sequence, that only claim to, and deltas all come back as they
    were sent.

    A child may also arrive before its parent.
    """
    rollout = case.rollout()
    root = turn(rollout, "root", opening(), prompt_token_ids=[5, 6, 2**40])
    tokens = cumulative_tokens(root)
    full = child_turn(tokens, root, "full", opening(), delta=False)
    delta = child_turn(tokens, root, "delta", opening(), delta=True)
    wrong = child_turn([*tokens[:-1], tokens[-1] + 1], root, "wrong prefix", opening(), delta=False)
    short = child_turn(tokens[:2], root, "shorter than its parent", opening(), delta=False)
    exact = record(
        rollout, "no new ids", prompt_token_ids=tokens, parent_call_id="root", parent_resolution="resolved"
    )
    early = child_turn(cumulative_tokens(full), full, "early", opening(), delta=False)
    orphan = record(rollout, "orphan", parent_call_id="nowhere", parent_resolution="resolved")
    own = record(rollout, "own parent", parent_call_id="own parent", parent_resolution="resolved")
    await _round_trip(case, rollout, [early, root, full, delta, wrong, short, exact, orphan, own])


@check()
async def exact_call_ids(case: Case) -> None:
    """Model call ids that differ in anything, in case, margins or Unicode form, are different calls of 1 to
    512 characters.
    """
    rollout = case.rollout()
    short = [
        "a",
        "A",
        "a ",
        " a",
        "a\n",
        "\ufeffa",
        "\u00e9",
        "e\u0301",
        "\u00df",
        "ss",
        "null",
        "0",
        "00",
        "\U0001f9ea",
    ]
    hostile = ["../a", "a/b", "a%", "a_", "a'", 'a"', "a\\"]
    longest = ["c" * 511, "c" * 512, "\U0001f9ea" * 512]
    ids = [*short, *hostile, *longest]
    await _round_trip(case, rollout, [record(rollout, call) for call in ids])


@check()
async def exact_long_lists(case: Case) -> None:
    """A call of 200,000 prompt ids and 200,000 generated ones comes back as it was."""
    rollout = case.rollout()
    draw = case.random
    entry = record(
        rollout,
        prompt_token_ids=[draw.getrandbits(17) for _ in range(200_000)],
        generation_token_ids=[draw.getrandbits(17) for _ in range(200_000)],
        generation_log_probs=[-draw.expovariate(1.0) for _ in range(200_000)],
    )
    await _round_trip(case, rollout, [entry])


async def _round_trip(case: Case, rollout: str, entries: list[TokenEntry]) -> None:
    # A repeat must be recognised as the same bytes, or a lost acknowledgement becomes a conflict.
    sink = case.sink()
    for entry in entries:
        sent = entry.model_copy(deep=True)
        await sink.put(sent)
        await sink.put(sent.model_copy(deep=True))
        expect_entries_unchanged(entry, sent)
    snapshot = await case.source().freeze(rollout)
    expect_entries(snapshot, *entries)
    expect(not snapshot.incomplete, "identical repeats made the rollout incomplete")


def expect_entries_unchanged(before: TokenEntry, after: TokenEntry) -> None:
    """Require that a put left its caller's record alone."""
    where = difference(before.model_dump(), after.model_dump())
    expect(where is None, f"put changed its caller's record {before.model_call_id!r:.60}: {where}")
