"""Calls stored without the sequence of their parent come back in every bit, or as an error that names them."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import sys
import tracemalloc
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.entries import make_entry
from tokencustody import TokenEntry
from tokencustody.chains.reading import FrozenRollout
from tokencustody.codec import hashing
from tokencustody.codec.calls import pack_entry, unpack_entry, validated, without_prefix
from tokencustody.codec.chains import prove_calls, unpack_calls, unpack_chain
from tokencustody.codec.id_columns import is_beyond_int64, pack_ids, resized
from tokencustody.errors import CorruptEntryError, LineageError
from tokencustody.lineage import join_chain
from tokencustody.txn.fence import RolloutKey

ROLLOUT = "rollout-1"


@dataclass(frozen=True, weakref_slot=True, slots=True)
class Row:
    """What the readers need of a row of `entries`."""

    model_call_id: str
    payload: bytes
    payload_sha256: str
    stored_sha256: str | None = None


@dataclass(frozen=True)
class Call:
    """A call of a test: what was put, how it was stored, and the whole sequence that it stands for."""

    entry: TokenEntry
    row: Row
    sequence: list[int]
    above: Call | None

    @property
    def chain(self) -> list[Row]:
        return [self.row, *(self.above.chain if self.above else ())]


def stored(entry: TokenEntry, shared_len: int = 0) -> Row:
    packed = pack_entry(validated(entry))
    if not shared_len:
        return Row(entry.model_call_id, packed.payload, packed.sha256)
    shared = without_prefix(packed, shared_len)
    return Row(entry.model_call_id, shared.payload, packed.sha256, shared.sha256)


def bits(entry: TokenEntry) -> bytes:
    return pack_entry(validated(entry)).payload


def root(name: str, prompt: list[int], generation: list[int]) -> Call:
    entry = make_entry(ROLLOUT, name, prompt=prompt, generation=generation)
    return Call(entry, stored(entry), prompt + generation, None)


def child(
    name: str, parent: Call, suffix: list[int], generation: list[int], *, share: bool = True, **fields: Any
) -> Call:
    """Return a call with the full prompt, stored with or without the sequence of its parent."""
    prompt = parent.sequence + suffix
    entry = make_entry(
        ROLLOUT, name, prompt=prompt, generation=generation, parent=parent.entry.model_call_id, **fields
    )
    share = share and bool(parent.sequence)
    row = stored(entry, len(parent.sequence) if share else 0)
    return Call(entry, row, prompt + generation, parent if share else None)


def delta(name: str, parent: Call, suffix: list[int], generation: list[int]) -> Call:
    """Return a call whose writer sent only what follows its parent."""
    sequence = parent.sequence + suffix + generation
    entry = make_entry(
        ROLLOUT,
        name,
        prompt=suffix,
        generation=generation,
        parent=parent.entry.model_call_id,
        cumulative=sequence,
        prompt_is_delta=True,
    )
    return Call(entry, stored(entry), sequence, parent)


def stranger(name: str, parent: Call, prompt: list[int], generation: list[int]) -> Call:
    """Return a call whose prompt has nothing of the parent that it names."""
    entry = make_entry(ROLLOUT, name, prompt=prompt, generation=generation, parent=parent.entry.model_call_id)
    return Call(entry, stored(entry), prompt + generation, None)


def read_calls(rollout_id: str, rows: Iterable[Row]) -> list[TokenEntry]:
    """Return what is read as lists. As columns the same is read, or refused in the same words."""
    rows = list(rows)

    def as_columns() -> Iterator[TokenEntry]:
        calls = {call.record.model_call_id: call for call in prove_calls(rollout_id, rows)}
        key = RolloutKey("run", rollout_id)
        return FrozenRollout(key, "s", 1, False, calls, {}, (), (), {}, (), {}).records()

    def ending(read: Callable[[], Iterable[TokenEntry]]) -> Any:
        try:
            return [bits(entry) for entry in read()]
        except CorruptEntryError as exc:
            return str(exc)

    assert ending(as_columns) == ending(lambda: unpack_calls(rollout_id, rows))
    return unpack_calls(rollout_id, rows)


IDS = st.sampled_from((2**16, 2**32, 2**64)).flatmap(
    lambda bound: st.lists(st.integers(0, bound - 1), max_size=4)
)


@st.composite
def rollouts(draw: st.DrawFn, *, share: bool = True) -> list[Call]:
    """Return the calls of a rollout: roots, full children, unrelated prompts and deltas, of all widths."""
    calls: list[Call] = []
    for number in range(draw(st.integers(1, 10))):
        name, suffix, generation = f"call-{number}", draw(IDS), draw(IDS)
        kind = (
            draw(st.sampled_from(("child", "child", "child", "delta", "stranger", "root")))
            if calls
            else "root"
        )
        parent = draw(st.sampled_from(calls)) if calls else None
        if parent is None or kind == "root":
            calls.append(root(name, suffix, generation))
        elif kind == "delta":
            calls.append(delta(name, parent, suffix, generation))
        elif kind == "stranger":
            calls.append(stranger(name, parent, suffix, generation))
        else:
            extra: dict[str, Any] = draw(st.sampled_from(({}, {"x_large": 2**80}, {"x_text": "né\0"})))
            shared = share and draw(st.booleans())
            calls.append(child(name, parent, suffix, generation, share=shared, **extra))
    return calls


@given(calls=rollouts(), seed=st.integers(0, 9))
def test_every_rollout_comes_back_in_every_bit_and_in_the_order_of_its_rows(
    calls: list[Call], seed: int
) -> None:
    random.Random(seed).shuffle(calls)
    read = read_calls(ROLLOUT, iter([call.row for call in calls]))
    assert [bits(entry) for entry in read] == [bits(call.entry) for call in calls]
    for call in calls:
        chain = call.chain
        random.Random(seed).shuffle(chain)
        entry, sequence = unpack_chain(ROLLOUT, chain, call.entry.model_call_id)
        assert (bits(entry), list(sequence)) == (bits(call.entry), call.sequence)
        # Rows beside the chain change nothing.
        assert unpack_chain(ROLLOUT, [c.row for c in calls], call.entry.model_call_id)[1] == sequence


def test_a_tree_of_shared_prompts_deltas_and_strangers_comes_back_whatever_the_order_of_its_rows() -> None:
    calls = [root("call-0", [1, 2], [3])]
    for number in range(1, 64):
        kind = (child, child, delta, stranger)[number % 4]
        parent = calls[(number - 1) // 3]
        calls.append(kind(f"call-{number}", parent, [2 ** (number % 40), number], [number]))
    for seed in range(5):
        random.Random(seed).shuffle(calls)
        read = read_calls(ROLLOUT, [call.row for call in calls])
        assert [bits(entry) for entry in read] == [bits(call.entry) for call in calls]


def in_order(rows: Sequence[Row], model_call_id: str) -> list[TokenEntry]:
    """Return the chain by decoding every record whole, as long as no prompt is shared."""
    by_id = {row.model_call_id: row for row in rows}
    chain: list[TokenEntry] = []
    row = by_id.pop(model_call_id, None)
    while row is not None:
        entry = unpack_entry(
            row.payload, row.payload_sha256, rollout_id=ROLLOUT, model_call_id=row.model_call_id
        )
        chain.append(entry)
        row = by_id.pop(entry.parent_call_id or "", None) if entry.prompt_is_delta else None
    return chain[::-1]


@given(calls=rollouts(share=False), data=st.data())
def test_chains_without_sharing_end_like_the_pure_matcher_in_the_same_sequence_or_error(
    calls: list[Call], data: st.DataObject
) -> None:
    call = data.draw(st.sampled_from(calls))
    entry, rows = call.entry.model_copy(), [other.row for other in calls if other is not call]
    damage = data.draw(st.sampled_from(("none", "length", "digest", "no digest", "parent", "row", "byte")))
    match damage:
        case "length":
            entry.cum_len = len(call.sequence) + 1
        case "digest":
            entry.digest = "0" * 64
        case "no digest":
            entry.digest = entry.cum_len = None
        case "parent" if entry.parent_call_id:
            entry.parent_call_id = data.draw(st.sampled_from([c.entry.model_call_id for c in calls]))
        case "row" | "byte" if rows:
            row = rows.pop(data.draw(st.integers(0, len(rows) - 1)))
            if damage == "byte":
                rows.append(dataclasses.replace(row, payload=row.payload[:-2] + b"\0}"))
    rows.append(stored(entry))

    def ending(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (CorruptEntryError, LineageError) as exc:
            return type(exc), str(exc)

    expected = ending(lambda: join_chain(in_order(rows, entry.model_call_id)))
    assert ending(lambda: tuple(unpack_chain(ROLLOUT, rows, entry.model_call_id)[1])) == expected


def family() -> list[Call]:
    """Return a small rollout in which every way of sharing occurs, parents first."""
    first = root("first", [1, 2, 3], [70_000])
    second = child("second", first, [4], [5, 6])
    third = child("third", second, [], [7], x_large=2**80)
    step = delta("step", third, [8], [2**40])
    fourth = child("fourth", step, [9], [10])
    return [first, second, third, step, fourth, child("sibling", first, [11], [])]


def replaced(calls: list[Call], name: str, **columns: Any) -> list[Row]:
    return [
        dataclasses.replace(call.row, **columns) if call.row.model_call_id == name else call.row
        for call in calls
    ]


def sha256(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()


def damages(payload: bytes) -> Iterator[bytes]:
    for at in range(len(payload)):
        yield payload[:at]
        yield payload[:at] + bytes((payload[at] ^ 1 << at % 8,)) + payload[at + 1 :]


@pytest.mark.parametrize("name", ["first", "second", "third", "step", "fourth"])
def test_any_flipped_byte_and_any_truncated_row_is_an_error_that_names_its_call(name: str) -> None:
    calls = family()
    (payload,) = [call.row.payload for call in calls if call.row.model_call_id == name]
    for damaged in damages(payload):
        rows = replaced(calls, name, payload=damaged)
        with pytest.raises(CorruptEntryError, match=f"model call {name} of rollout"):
            read_calls(ROLLOUT, rows)
        with pytest.raises(CorruptEntryError, match=f"model call {name} of rollout"):
            unpack_chain(ROLLOUT, rows, "fourth")


@pytest.mark.parametrize("name", ["second", "third", "fourth"])
def test_damage_whose_stored_hash_was_recomputed_is_never_read_as_a_call(name: str) -> None:
    calls = family()
    (call,) = [call for call in calls if call.row.model_call_id == name]
    for damaged in damages(call.row.payload):
        rows = replaced(calls, name, payload=damaged, stored_sha256=sha256(damaged))
        with pytest.raises(CorruptEntryError):
            read_calls(ROLLOUT, rows)
        with pytest.raises(CorruptEntryError):
            unpack_chain(ROLLOUT, rows, name)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (
            {"payload_sha256": "0" * 64},
            "third of rollout rollout-1: its prompt cannot be rebuilt.* second is not",
        ),
        ({"stored_sha256": "0" * 64}, "third of rollout rollout-1: the stored payload does not match"),
        ({"stored_sha256": None}, "third of rollout rollout-1: the stored payload does not match"),
        ({"payload": None}, "third of rollout rollout-1: the stored payload is missing"),
    ],
)
def test_an_edited_row_is_an_error_that_names_its_call(columns: dict[str, Any], says: str) -> None:
    rows = replaced(family(), "third", **columns)
    with pytest.raises(CorruptEntryError, match=says):
        read_calls(ROLLOUT, rows)
    with pytest.raises(CorruptEntryError, match=says):
        unpack_chain(ROLLOUT, rows, "third")


def test_a_row_whose_form_and_hashes_disagree_is_an_error() -> None:
    calls = family()
    whole, shared = calls[0].row, calls[1].row
    for edited in (
        dataclasses.replace(whole, stored_sha256=whole.payload_sha256, payload_sha256="0" * 64),
        dataclasses.replace(shared, payload_sha256=sha256(shared.payload), stored_sha256=None),
    ):
        name = edited.model_call_id
        with pytest.raises(CorruptEntryError, match=f"model call {name} of rollout .* in which form"):
            read_calls(ROLLOUT, [edited if c.row.model_call_id == name else c.row for c in calls])


@pytest.mark.parametrize(
    ("missing", "named"),
    [("first", "second"), ("second", "third"), ("third", "fourth"), ("step", "fourth")],
)
def test_a_missing_parent_is_an_error_that_names_it_and_the_call(missing: str, named: str) -> None:
    rows = [call.row for call in family() if call.row.model_call_id != missing]
    says = f"model call {named} of rollout rollout-1: .* model call {missing}, in which it began, is missing"
    with pytest.raises(CorruptEntryError, match=says):
        read_calls(ROLLOUT, rows)
    with pytest.raises(CorruptEntryError, match=says):
        unpack_chain(ROLLOUT, rows, "fourth")


def test_a_missing_call_that_nobody_needs_leaves_the_others_readable() -> None:
    first = root("first", [1], [2])
    calls = [delta("step", first, [3], [4]), child("whole", first, [3], [4], share=False)]
    assert [bits(e) for e in read_calls(ROLLOUT, [c.row for c in calls])] == [bits(c.entry) for c in calls]


@pytest.mark.parametrize(
    "ids", [([1, 2, 4], [70_000]), ([1, 2, 3], [70_000, 4]), ([1, 2, 3], [2**40]), ([], [])]
)
def test_another_call_in_the_place_of_the_parent_is_an_error_that_names_the_child(
    ids: tuple[list[int], list[int]],
) -> None:
    rows = [root("first", *ids).row, *(call.row for call in family()[1:])]
    says = r"model call (second|sibling) of rollout rollout-1: .* call first is not"
    with pytest.raises(CorruptEntryError, match=says):
        read_calls(ROLLOUT, rows)
    for name in ("second", "third", "step", "fourth"):
        with pytest.raises(CorruptEntryError, match=says):
            unpack_chain(ROLLOUT, rows, name)


def test_a_parent_with_the_same_sequence_serves_wherever_its_prompt_ended() -> None:
    calls = family()
    rows = [root("first", [1, 2], [3, 70_000]).row, *(call.row for call in calls[1:])]
    assert [bits(entry) for entry in read_calls(ROLLOUT, rows)[1:]] == [bits(c.entry) for c in calls[1:]]


def test_a_payload_copied_from_another_call_or_rollout_is_an_error() -> None:
    calls = family()
    for name, source in (("second", "third"), ("third", "second"), ("first", "step")):
        (row,) = [call.row for call in calls if call.row.model_call_id == source]
        rows = replaced(calls, name, **row_columns(row))
        with pytest.raises(
            CorruptEntryError, match=f"model call {name} of rollout .* belongs to another call"
        ):
            read_calls(ROLLOUT, rows)
    with pytest.raises(CorruptEntryError, match=r"of rollout rollout-2: .* belongs to another call"):
        read_calls("rollout-2", [call.row for call in calls])


def row_columns(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("payload", "payload_sha256", "stored_sha256")}


@pytest.mark.parametrize("through", ["itself", "another", "a delta"])
def test_parents_in_a_circle_are_an_error_and_never_a_hang(through: str) -> None:
    first = root("first", [1], [2])
    bait = {"itself": "second", "another": "third", "a delta": "third"}[through]
    second = child("second", dataclasses.replace(first, entry=make_entry(ROLLOUT, bait)), [3], [4])
    third = (delta if through == "a delta" else child)("third", second, [5], [6])
    rows = [third.row, second.row]
    says = "model call (second|third) of rollout .* is its own parent"
    with pytest.raises(CorruptEntryError, match=says):
        read_calls(ROLLOUT, rows)
    for name in ("second", "third"):
        with pytest.raises(CorruptEntryError, match=says):
            unpack_chain(ROLLOUT, rows, name)


def test_deltas_in_a_circle_are_readable_as_sent_and_have_no_sequence() -> None:
    first = root("first", [1], [2])
    third = dataclasses.replace(first, entry=make_entry(ROLLOUT, "third"))
    calls = [delta("second", third, [3], [4]), delta("third", first, [5], [6])]
    calls[1] = delta("third", calls[0], [5], [6])
    rows = [call.row for call in calls]
    assert [bits(entry) for entry in read_calls(ROLLOUT, rows)] == [bits(call.entry) for call in calls]
    with pytest.raises(
        LineageError, match="model call third of rollout rollout-1: its parent chain is broken"
    ):
        unpack_chain(ROLLOUT, rows, "second")


def test_a_call_that_is_not_among_the_rows_is_an_error() -> None:
    with pytest.raises(CorruptEntryError, match="model call x of rollout rollout-1: its row is missing"):
        unpack_chain(ROLLOUT, [root("first", [1], [2]).row], "x")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"cum_len": 9}, "records a sequence of 9 tokens, but its chain has 4"),
        ({"digest": "0" * 64}, "another"),
    ],
)
def test_a_shared_prompt_that_does_not_have_its_recorded_sequence_is_no_parent(
    fields: dict[str, Any], says: str
) -> None:
    first = root("first", [1], [2])
    entry = child("second", first, [3], [4]).entry.model_copy(update=fields)
    rows = [first.row, stored(entry, 2)]
    assert bits(read_calls(ROLLOUT, rows)[1]) == bits(entry)
    with pytest.raises(LineageError, match=f"model call second of rollout rollout-1.*{says}"):
        unpack_chain(ROLLOUT, rows, "second")


@pytest.mark.parametrize("kind", ["shared", "delta"])
def test_chains_of_thousands_of_calls_are_read(kind: str) -> None:
    first = call = root("call-0", [70_000], [])
    rows = [first.row]
    # More than Python's stack is deep.
    for number in range(1, 2 * sys.getrecursionlimit()):
        call = (child if kind == "shared" else delta)(f"call-{number}", call, [], [])
        rows.append(call.row)
    last = child("last", call, [1], [2])
    rows.append(last.row)
    assert bits(read_calls(ROLLOUT, reversed(rows))[0]) == bits(last.entry)
    assert unpack_chain(ROLLOUT, rows, "last")[1] == [70_000, 1, 2]


def growing(calls: int) -> list[Call]:
    """Return calls of which each adds 100 ids, all different and none small, to the one before it."""
    ids = iter(range(100_000, 100_000 + 100 * calls))
    grown = [root("call-0", [next(ids) for _ in range(50)], [next(ids) for _ in range(50)])]
    while len(grown) < calls:
        suffix, generation = [next(ids) for _ in range(50)], [next(ids) for _ in range(50)]
        grown.append(child(f"call-{len(grown)}", grown[-1], suffix, generation))
    return grown


def test_a_growing_rollout_has_one_integer_for_each_token_however_many_prompts_hold_it() -> None:
    calls = growing(40)
    entries = unpack_calls(ROLLOUT, [call.row for call in calls])
    integers = {id(token) for e in entries for token in e.prompt_token_ids + e.generation_token_ids}
    assert len(integers) == 4000
    assert sum(len(entry.prompt_token_ids) for entry in entries) > 75_000


def traced(read: Callable[..., Any]) -> tuple[Any, int, int]:
    """Return what `read` makes of a growing rollout, and how many bytes that holds and took at most."""
    rows = [call.row for call in growing(150)]
    read(ROLLOUT, rows)
    tracemalloc.start()
    try:
        result = read(ROLLOUT, iter(rows))
        return result, *tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


def test_reading_holds_no_more_than_one_sequence_when_the_result_is_complete() -> None:
    entries, held, peak = traced(unpack_calls)
    # A list and a packed column of 15,000 ids, and a temporary of each.
    assert peak - held < 15_000 * 2 * (8 + 4)
    assert held > 8 * sum(len(entry.prompt_token_ids) for entry in entries)


def test_columns_hold_what_is_stored_and_make_no_number_of_a_token() -> None:
    calls, held, peak = traced(prove_calls)
    # Not a byte for each id of the prompts; and while reading the rows and one sequence of 15,000, but no list of it.
    assert held < sum(call.shared_len for call in calls)
    assert peak - held < 15_000 * 4 * 4


def test_ids_are_resized_as_they_would_be_packed_anew() -> None:
    ids = [0, 1, 255, 256, 65_535]
    for width, to in product((2, 4, 8), repeat=2):
        assert resized(pack_ids(ids, width).tobytes(), width, to) == pack_ids(ids, to).tobytes()
    assert resized(pack_ids([2**40], 8).tobytes(), 8, 8) == pack_ids([2**40], 8).tobytes()
    for wide, to in ((2**16, 2), (2**63, 2), (2**32, 4), (2**56, 4)):
        with pytest.raises(OverflowError):
            resized(pack_ids([1, wide], 8).tobytes(), 8, to)


def test_ids_beyond_63_bits_are_found() -> None:
    for ids in ([], [0, 2**63 - 1], [2**62, 127, 2**56 - 1]):
        assert not is_beyond_int64(array("Q", ids))
    for ids in ([2**63], [1, 2**64 - 1, 2]):
        assert is_beyond_int64(array("Q", ids))


def test_rows_of_an_iterator_are_let_go_one_by_one() -> None:
    calls = growing(10)
    alive: list[weakref.ref[Row]] = []

    def rows() -> Iterator[Row]:
        for call in calls:
            row = dataclasses.replace(call.row)
            alive.append(weakref.ref(row))
            assert sum(ref() is not None for ref in alive) <= 2
            yield row
            del row

    assert len(unpack_calls(ROLLOUT, rows())) == 10


@pytest.mark.parametrize("hashed", ["in line", "beside"])
def test_long_prefixes_that_are_hashed_beside_are_proven_all_the_same(
    hashed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "_LONG", 0 if hashed == "beside" else 2**60)
    calls = [root("call-0", [70_000], [1])]
    for number in range(1, 40):
        calls.append(child(f"call-{number}", calls[-1], [number], [number + 1]))
    rows = [call.row for call in calls]
    assert [bits(entry) for entry in read_calls(ROLLOUT, rows)] == [bits(call.entry) for call in calls]
    # Only the hash of the whole payload tells that a prompt was put together wrongly.
    for wrong in (1, 20, 39):
        swapped = [
            row if number != wrong else dataclasses.replace(row, payload_sha256="0" * 64)
            for number, row in enumerate(rows)
        ]
        with pytest.raises(CorruptEntryError, match=f"call-{wrong} of"):
            read_calls(ROLLOUT, swapped)
