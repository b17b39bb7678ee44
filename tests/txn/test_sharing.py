"""A prompt that begins with its proven parent's whole sequence is stored as its suffix, and comes back in every bit."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.entries import REQUEST, continuation, make_entry
from tests.support.rows import rows_of, run_sql
from tokencustody import CaptureStore, TokenCaptureRetiredError, TokenEntry, open_store
from tokencustody.codec.calls import pack_entry, validated
from tokencustody.database.coalescing import Coalesce
from tokencustody.database.transactions import Doors
from tokencustody.errors import CorruptEntryError, LineageError, PayloadConflictError
from tokencustody.lineage import RolloutLineage
from tokencustody.protocols import LineageResolution
from tokencustody.schema import tables
from tokencustody.store import sink
from tokencustody.txn.putting import Put

ROLLOUT = "rollout-1"


def bits(entry: TokenEntry) -> bytes:
    return pack_entry(validated(entry)).payload


async def shared_lens(url: str) -> dict[str, int]:
    """Return how many ids each call of the rollout left out, proven against the sizes of what is stored."""
    return {
        row["model_call_id"]: row["shared_len"]
        for row in await rows_of(url, tables.entries)
        if row["rollout_id"] == ROLLOUT
    }


# What the calls of a rollout should be, held in memory.


@dataclass
class Expected:
    """The calls that were put since the rollout began, by their ids, and what each may share."""

    entries: dict[str, TokenEntry] = field(default_factory=dict)
    requests: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    claimed: dict[str, list[int]] = field(default_factory=dict)
    conflicting: set[str] = field(default_factory=set)
    shared_lens: dict[str, int | None] = field(default_factory=dict)
    announced: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    incomplete: bool = False
    lineage: RolloutLineage = field(default_factory=RolloutLineage)

    def whole_sequence(self, call: str) -> list[int] | None:
        """Return a call's prompt and generated ids; None for a delta whose parents are not all there."""
        sequence: list[int] = []
        passed: list[str | None] = []
        ancestor: str | None = call
        while ancestor not in passed and (entry := self.entries.get(ancestor or "")) is not None:
            sequence = entry.prompt_token_ids + entry.generation_token_ids + sequence
            if not entry.prompt_is_delta:
                return sequence
            passed.append(ancestor)
            ancestor = entry.parent_call_id
        return None

    def may_share(self, entry: TokenEntry) -> int | None:
        """Return how many ids a call that is put now leaves out. None: that is left open."""
        parent = entry.parent_call_id
        if parent not in self.entries or parent in self.conflicting or entry.prompt_is_delta:
            return 0
        sequence = self.whole_sequence(parent)
        if sequence is None or entry.prompt_token_ids[: len(sequence)] != sequence:
            return 0
        ancestor = self.entries[parent]
        while ancestor.prompt_is_delta:
            ancestor = self.entries[ancestor.parent_call_id or ""]
            if ancestor.model_call_id in self.conflicting:
                return None
        return len(sequence)

    def add(self, entry: TokenEntry, request: list[dict[str, Any]], claimed: list[int]) -> None:
        call = entry.model_call_id
        self.shared_lens[call] = self.may_share(entry)
        self.entries[call], self.requests[call], self.claimed[call] = entry, request, claimed
        self.lineage.add_entry(entry)

    def is_incomplete(self) -> bool:
        dangling = self.announced - self.entries.keys() - self.refused
        unreadable = [call for call in self.entries if self.whole_sequence(call) is None]
        return self.incomplete or bool(dangling) or bool(unreadable)


IDS = st.sampled_from((2**16, 2**32, 2**64)).flatmap(
    lambda end: st.lists(st.integers(0, end - 1), max_size=4)
)


@dataclass(frozen=True)
class Step:
    """What happens next; numbers choose among what there is then."""

    what: str
    number: int
    store: int
    suffix: list[int]
    generation: list[int]
    claim: str
    text: str
    extra: str


STEPS = st.lists(
    st.builds(
        Step,
        what=st.sampled_from(
            ["root"]
            + ["child"] * 8
            + ["delta"] * 3
            + ["stranger", "short", "orphan", "itself"]
            + ["again"] * 3
            + ["conflict"] * 2
            + ["begin", "refuse", "reopen"]
            + ["resolve"] * 4
            + ["delete", "retire", "drop"]
        ),
        number=st.integers(0, 999),
        store=st.integers(0, 1),
        suffix=IDS,
        generation=IDS,
        claim=st.sampled_from(
            ["right"] * 6 + ["none", "no digest", "no length", "wrong digest", "wrong length"]
        ),
        text=st.sampled_from(["yes", "no", "perhaps"]),
        extra=st.sampled_from(["", "", "large", "nul", "nan"]),
    ),
    min_size=4,
    max_size=40,
)
EXTRA: dict[str, dict[str, Any]] = {
    "": {},
    "large": {"x_large": 2**80},
    "nul": {"x_text": "né\0"},
    "nan": {"log_probs": float("nan")},
}


def new_call(expected: Expected, step: Step) -> tuple[TokenEntry, list[dict[str, Any]], list[int]]:
    """Return a call that nobody has put, the request that it answers, and the sequence that it claims to have."""
    call = f"call-{len(expected.entries)}"
    suffix, generation = step.suffix, step.generation
    parent: str | None = None
    prompt, request = suffix, REQUEST
    sequence: list[int] = []
    if step.what == "orphan":
        parent = f"call-{len(expected.entries) + 1 + step.number % 3}"
    elif step.what == "itself":
        parent = call
    elif step.what != "root" and expected.entries:
        # Mostly one of the last: chains should become long.
        calls = list(expected.entries)
        parent = (
            calls[-1 - step.number % min(3, len(calls))]
            if step.number % 4
            else calls[step.number % len(calls)]
        )
        sequence = expected.claimed[parent]
        request = continuation(expected.requests[parent], text_of(expected.entries[parent]), "and then?")
    if step.what == "child":
        prompt = sequence + suffix
    elif step.what == "short":
        prompt = sequence[:-1]
    elif step.what == "stranger":
        prompt = [*suffix, 7, *sequence]
    is_delta = step.what == "delta" and parent is not None
    claimed = (sequence if is_delta else []) + prompt + generation
    extra = dict(EXTRA[step.extra])
    if "log_probs" in extra:
        extra["log_probs"] = [extra["log_probs"]] * len(generation)
    entry = make_entry(
        ROLLOUT,
        call,
        prompt=prompt,
        generation=generation,
        parent=parent,
        request=request,
        text=step.text,
        cumulative=claimed if is_delta else None,
        prompt_is_delta=is_delta,
        **extra,
    )
    if step.claim in ("none", "no digest"):
        entry.digest = None
    if step.claim in ("none", "no length"):
        entry.cum_len = None
    if step.claim == "wrong digest":
        entry.digest = "0" * 64
    if step.claim == "wrong length":
        entry.cum_len = len(claimed) + 1
    return entry, request, claimed


def text_of(entry: TokenEntry) -> str:
    return str(entry.output_items[0]["content"])


class Play:
    """Two stores, which share nothing but the database, as two processes do, against what is expected of them."""

    def __init__(self, url: str, coalesce: str, seen: Counter[str]) -> None:
        self.url = url
        self.seen = seen
        self.coalesce = coalesce
        # Stores with another pool share no engine, and so no sequences either.
        self.stores = [self.open(0), self.open(1)]
        self.expected = Expected()

    def open(self, number: int) -> CaptureStore:
        return open_store(self.url, pool_size=3 + number, coalesce=self.coalesce)

    async def run(self, steps: Sequence[Step]) -> None:
        try:
            await self.stores[0].source.delete([ROLLOUT])
            for step in steps:
                self.seen[step.what] += 1
                await self.take(step, self.stores[step.store])
            await self.check_all()
        finally:
            for store in self.stores:
                await store.close()

    async def take(self, step: Step, store: CaptureStore) -> None:
        expected = self.expected
        calls = list(expected.entries)
        chosen = calls[step.number % len(calls)] if calls else None
        match step.what:
            case "again" if chosen:
                await store.sink.put(expected.entries[chosen])
            case "conflict" if chosen:
                other = expected.entries[chosen].model_copy(update={"model": f"model-{step.number}"})
                with pytest.raises(PayloadConflictError):
                    await store.sink.put(other)
                expected.conflicting.add(chosen)
                expected.incomplete = True
                expected.lineage.add_entry(other)
            case "begin":
                call = f"call-{len(calls) + step.number % 3}"
                await store.sink.begin_call(ROLLOUT, call)
                expected.announced.add(call)
            case "refuse":
                call = f"call-{len(calls) + step.number % 3}"
                await store.sink.refuse_call(ROLLOUT, model_call_id=call, code="busy")
                expected.refused.add(call)
            case "reopen":
                await store.close()
                self.stores[step.store] = self.open(step.store)
            case "resolve" if chosen:
                await self.check_resolution(
                    continuation(
                        expected.requests[chosen],
                        text_of(expected.entries[chosen]),
                        f"question {step.number}",
                    ),
                    store,
                )
            case "delete" | "retire" | "drop":
                await self.check_all()
                await self.begin_anew(step, store)
            case "root" | "child" | "delta" | "stranger" | "short" | "orphan" | "itself":
                entry, request, claimed = new_call(expected, step)
                await store.sink.put(entry)
                expected.add(entry, request, claimed)

    async def begin_anew(self, step: Step, store: CaptureStore) -> None:
        if step.what == "drop":
            snapshot = await store.source.freeze(ROLLOUT)
            assert await store.source.drop(ROLLOUT, snapshot.snapshot_id, snapshot.version)
        elif step.what == "retire":
            await store.source.retire([ROLLOUT])
        if step.what != "delete":
            with pytest.raises(TokenCaptureRetiredError):
                await store.sink.put(make_entry(ROLLOUT, "call-0"))
        await store.source.delete([ROLLOUT])
        self.expected = Expected()

    async def check_resolution(self, request: list[dict[str, Any]], store: CaptureStore) -> None:
        found = [await resolution(each, request) for each in (store, store)]  # the second from what it knows
        try:
            expected: LineageResolution | type[LineageError] = self.expected.lineage.resolve(request)
        except LineageError:
            expected = LineageError
        assert found == [expected, expected]
        self.seen["parent resolved"] += isinstance(expected, LineageResolution) and expected.match is not None

    async def check_all(self) -> None:
        """Freeze the rollout, and open it again behind the stores' backs."""
        expected = self.expected
        rows = [row for row in await rows_of(self.url, tables.entries) if row["rollout_id"] == ROLLOUT]
        assert {row["model_call_id"] for row in rows} == expected.entries.keys()
        for row in rows:
            entry = expected.entries[row["model_call_id"]]
            may_share = expected.shared_lens[entry.model_call_id]
            if may_share is not None:
                assert row["shared_len"] == may_share, entry.model_call_id
            assert row["prompt_len"] == len(entry.prompt_token_ids)
            self.seen["shared"] += row["shared_len"] > 0
        for store in self.stores:
            snapshot = await store.source.freeze(ROLLOUT)
            assert snapshot.incomplete == expected.is_incomplete()
            read = {entry.model_call_id: bits(entry) for entry in snapshot.entries}
            assert read == {call: bits(entry) for call, entry in expected.entries.items()}


async def resolution(
    store: CaptureStore, request: list[dict[str, Any]]
) -> LineageResolution | type[LineageError]:
    try:
        return await store.lineage.resolve(ROLLOUT, request)
    except LineageError:
        return LineageError


def test_whoever_wrote_what_each_call_comes_back_in_every_bit_and_shares_what_is_proven(
    store_url: str,
) -> None:
    seen: Counter[str] = Counter()

    # Without shrinking, which would take minutes with a database.
    @settings(
        max_examples=60, phases=[Phase.explicit, Phase.generate], suppress_health_check=[HealthCheck.too_slow]
    )
    @given(steps=STEPS, coalesce=st.sampled_from(list(Coalesce)))
    def play(steps: list[Step], coalesce: Coalesce) -> None:
        asyncio.run(Play(store_url, coalesce, seen).run(steps))

    play()
    assert seen["shared"] > 40, seen
    assert seen["parent resolved"] > 5, seen


# Single promises.

PARENT = make_entry(ROLLOUT, "parent", prompt=[1, 2, 3], generation=[4, 5], request=REQUEST)
CHILD = make_entry(
    ROLLOUT,
    "child",
    prompt=[1, 2, 3, 4, 5, 6],
    generation=[7],
    parent="parent",
    request=continuation(REQUEST, "Paris.", "And of Spain?"),
    text="Madrid.",
)
OTHER_PARENT = make_entry(ROLLOUT, "parent", prompt=[1, 2, 3], generation=[4, 9], request=REQUEST)
OTHER_CHILD = make_entry(ROLLOUT, "other-child", prompt=[1, 2, 3, 4, 9, 6], generation=[7], parent="parent")


async def frozen(store: CaptureStore) -> list[TokenEntry]:
    return list((await store.source.freeze(ROLLOUT)).entries)


@pytest.mark.parametrize("coalesce", list(Coalesce))
@pytest.mark.parametrize("writer_of_parent", ["the same store", "another store", "a store that is closed"])
async def test_a_child_is_stored_as_its_suffix_whichever_process_wrote_its_parent(
    store_url: str, writer_of_parent: str, coalesce: Coalesce
) -> None:
    async with (
        open_store(store_url, pool_size=3) as other,
        open_store(store_url, pool_size=2, coalesce=coalesce) as store,
    ):
        if writer_of_parent == "a store that is closed":
            async with open_store(store_url, pool_size=1) as closed:
                await closed.sink.put(PARENT)
        else:
            await (other if writer_of_parent == "another store" else store).sink.put(PARENT)
        await store.sink.put(CHILD)
        rows = {row["model_call_id"]: row for row in await rows_of(store_url, tables.entries)}
        assert rows["child"]["shared_len"] == 5
        assert len(rows["child"]["payload"]) == len(bits(CHILD)) - 5 * 2 + 8  # a longer header
        assert (rows["child"]["prompt_len"], rows["child"]["generation_len"]) == (6, 1)
        assert await frozen(other) == [CHILD, PARENT]


@pytest.mark.parametrize("known", [True, False], ids=["a parent just put", "a parent read back"])
@pytest.mark.parametrize(
    "parent",
    [
        None,
        OTHER_PARENT,
        make_entry(ROLLOUT, "parent", prompt=[1, 2, 3], generation=[4, 5, 6, 7, 8]),
        make_entry(ROLLOUT, "parent", prompt=[], generation=[]),
    ],
    ids=["missing", "other tokens", "longer", "empty"],
)
async def test_a_child_of_a_parent_that_does_not_match_is_stored_whole(
    store_url: str, parent: TokenEntry | None, known: bool
) -> None:
    async with open_store(store_url, pool_size=3) as store, open_store(store_url, pool_size=2) as other:
        if parent is not None:
            await (store if known else other).sink.put(parent)
        await store.sink.put(CHILD)
        assert (await shared_lens(store_url))["child"] == 0
        assert CHILD in await frozen(store)


@pytest.mark.parametrize(
    "claim", [{"digest": "0" * 64}, {"digest": None, "cum_len": None}, {"cum_len": 99}], ids=str
)
@pytest.mark.parametrize("known", [True, False], ids=["a parent just put", "a parent read back"])
async def test_what_a_parent_claims_of_its_sequence_counts_for_resolution_only(
    store_url: str, claim: dict[str, Any], known: bool
) -> None:
    parent = PARENT.model_copy(update=claim)
    request = continuation(REQUEST, "Paris.", "And of Spain?")
    async with open_store(store_url, pool_size=3) as store, open_store(store_url, pool_size=2) as other:
        await (store if known else other).sink.put(parent)
        await store.sink.put(CHILD)
        assert (await shared_lens(store_url))["child"] == 5
        for each in (store, other, store):
            if None in claim.values():
                assert (await each.lineage.resolve(ROLLOUT, request)).match is not None
            else:
                with pytest.raises(LineageError, match="model call parent of rollout rollout-1"):
                    await each.lineage.resolve(ROLLOUT, request)
        assert await frozen(other) == [CHILD, parent]


@pytest.mark.parametrize("who", ["the same store", "another store"])
async def test_a_child_of_a_conflicting_parent_is_stored_whole(store_url: str, who: str) -> None:
    async with open_store(store_url, pool_size=3) as store, open_store(store_url, pool_size=2) as other:
        await store.sink.put(PARENT)
        with pytest.raises(PayloadConflictError):
            await (store if who == "the same store" else other).sink.put(OTHER_PARENT)
        await store.sink.put(CHILD)
        await other.sink.put(CHILD)
        assert (await shared_lens(store_url))["child"] == 0
        assert await frozen(store) == [CHILD, PARENT]


async def test_a_parent_that_conflicts_later_still_holds_what_its_children_share(store: CaptureStore) -> None:
    await store.sink.put(PARENT)
    await store.sink.put(CHILD)
    with pytest.raises(PayloadConflictError):
        await store.sink.put(OTHER_PARENT)
    with pytest.raises(PayloadConflictError, match="differing: model"):
        await store.sink.put(CHILD.model_copy(update={"model": "other"}))
    await store.sink.put(CHILD)
    assert await frozen(store) == [CHILD, PARENT]


@pytest.mark.parametrize("ending", ["delete", "retire", "drop"])
@pytest.mark.parametrize("resolved", [True, False])
async def test_what_another_process_deleted_and_wrote_anew_is_neither_shared_nor_resolved_from_memory(
    store_url: str, ending: str, resolved: bool
) -> None:
    request = continuation(REQUEST, "Paris.", "And of Spain?")
    async with open_store(store_url, pool_size=3) as store, open_store(store_url, pool_size=2) as other:
        await store.sink.put(PARENT)
        if resolved:
            await store.lineage.resolve(ROLLOUT, request)
        if ending == "drop":
            snapshot = await other.source.freeze(ROLLOUT)
            assert await other.source.drop(ROLLOUT, snapshot.snapshot_id, snapshot.version)
        elif ending == "retire":
            await other.source.retire([ROLLOUT])
        assert (await store.lineage.resolve(ROLLOUT, request)).match is None or ending == "delete"
        await other.source.delete([ROLLOUT])
        assert (await store.lineage.resolve(ROLLOUT, request)).match is None
        await other.sink.put(OTHER_PARENT)
        found = await store.lineage.resolve(ROLLOUT, request)
        assert found.match is not None
        assert found.match.cumulative_token_ids == (1, 2, 3, 4, 9)
        await store.sink.put(CHILD)
        await store.sink.put(OTHER_CHILD)
        assert await shared_lens(store_url) == {"parent": 0, "child": 0, "other-child": 5}
        assert await frozen(store) == [CHILD, OTHER_CHILD, OTHER_PARENT]


async def test_a_child_of_a_parent_that_was_written_anew_shares_it_though_another_one_is_remembered(
    store_url: str,
) -> None:
    async with open_store(store_url, pool_size=3) as store, open_store(store_url, pool_size=2) as other:
        await store.sink.put(PARENT)
        await other.source.delete([ROLLOUT])
        await other.sink.put(OTHER_PARENT)
        await store.sink.put(OTHER_CHILD)
        assert (await shared_lens(store_url))["other-child"] == 5
        assert await frozen(store) == [OTHER_CHILD, OTHER_PARENT]


@pytest.fixture
def before_writing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], Awaitable[None]]], None]:
    """Return a function that lets something happen when a call's parent has been read and it is about to be written."""
    write_together, write = Doors.write_together, Doors.write
    happening: dict[str, Callable[[], Awaitable[None]]] = {}

    async def watched_alone(self: Any, work: Any, **options: Any) -> Any:
        put = getattr(work, "keywords", {}).get("call")
        if isinstance(put, Put) and (happen := happening.pop(put.entry.model_call_id, None)) is not None:
            await happen()
        return await write(self, work, **options)

    async def watched(self: Any, write: Any, item: Any, **options: Any) -> Any:
        if (happen := happening.pop(item.key[2], None)) is not None:
            await happen()
        return await write_together(self, write, item, **options)

    monkeypatch.setattr(Doors, "write_together", watched)
    monkeypatch.setattr(Doors, "write", watched_alone)
    return happening.__setitem__


MEANWHILE = {
    "nothing": 5,
    "the same tokens": 5,
    "other tokens": 0,
    "delete": 0,
    "conflict": 0,
    "retire": None,
}


@pytest.mark.parametrize("coalesce", list(Coalesce))
@pytest.mark.parametrize("known", [True, False], ids=["a parent just put", "a parent read back"])
@pytest.mark.parametrize(("meanwhile", "shared_len"), MEANWHILE.items(), ids=MEANWHILE)
async def test_what_happens_to_a_parent_while_its_child_waits_to_be_written_is_seen(
    store_url: str,
    before_writing: Callable[[str, Callable[[], Awaitable[None]]], None],
    meanwhile: str,
    shared_len: int | None,
    known: bool,
    coalesce: Coalesce,
) -> None:
    async with (
        open_store(store_url, pool_size=1, coalesce=coalesce) as store,
        open_store(store_url, pool_size=2) as other,
    ):

        async def happen() -> None:
            if meanwhile in ("delete", "other tokens", "the same tokens"):
                await other.source.delete([ROLLOUT])
            if meanwhile in ("other tokens", "the same tokens"):
                await other.sink.put(OTHER_PARENT if meanwhile == "other tokens" else PARENT)
            if meanwhile == "conflict":
                with pytest.raises(PayloadConflictError):
                    await other.sink.put(OTHER_PARENT)
            if meanwhile == "retire":
                await other.source.retire([ROLLOUT])

        await (store if known else other).sink.put(PARENT)
        before_writing("child", happen)
        if shared_len is None:
            with pytest.raises(TokenCaptureRetiredError):
                await store.sink.put(CHILD)
            return
        await store.sink.put(CHILD)
        assert (await shared_lens(store_url))["child"] == shared_len
        held = {"delete": [], "other tokens": [OTHER_PARENT]}.get(meanwhile, [PARENT])
        assert await frozen(other) == [CHILD, *held]


async def test_a_delta_whose_ancestors_were_replaced_is_not_leaned_on(
    store_url: str, before_writing: Callable[[str, Callable[[], Awaitable[None]]], None]
) -> None:
    grandparent = make_entry(ROLLOUT, "grandparent", prompt=[1, 2], generation=[3])
    replaced = make_entry(ROLLOUT, "grandparent", prompt=[1, 2], generation=[8])
    delta = make_entry(
        ROLLOUT,
        "delta",
        prompt=[4],
        generation=[5],
        parent="grandparent",
        cumulative=[1, 2, 3, 4, 5],
        prompt_is_delta=True,
    )
    child = make_entry(ROLLOUT, "child", prompt=[1, 2, 3, 4, 5, 6], generation=[7], parent="delta")

    async def replace() -> None:
        async with open_store(store_url, pool_size=2) as other:
            await other.source.delete([ROLLOUT])
            await other.sink.put(replaced)
            await other.sink.put(delta)  # the same bytes, which now claim a wrong sequence

    async with open_store(store_url, pool_size=1) as store, open_store(store_url, pool_size=3) as writer:
        await writer.sink.put(grandparent)
        await writer.sink.put(delta)
        before_writing("child", replace)
        await store.sink.put(child)
        assert await frozen(store) == [child, delta, replaced]


async def test_a_full_child_of_a_writers_delta_shares_its_whole_sequence(
    store: CaptureStore, store_url: str
) -> None:
    delta = make_entry(
        ROLLOUT,
        "delta",
        prompt=[6],
        generation=[7, 8],
        parent="parent",
        cumulative=[1, 2, 3, 4, 5, 6, 7, 8],
        prompt_is_delta=True,
    )
    child = make_entry(
        ROLLOUT, "child", prompt=[1, 2, 3, 4, 5, 6, 7, 8, 2**40], generation=[1], parent="delta"
    )
    for entry in (PARENT, delta, child):
        await store.sink.put(entry)
    assert await shared_lens(store_url) == {"parent": 0, "delta": 0, "child": 8}
    assert await frozen(store) == [child, delta, PARENT]


async def test_a_delta_that_comes_before_its_parent_is_leaned_on_only_once_it_is_proven(
    store: CaptureStore, store_url: str
) -> None:
    delta = make_entry(
        ROLLOUT,
        "delta",
        prompt=[6],
        generation=[7],
        parent="parent",
        cumulative=[1, 2, 3, 4, 5, 6, 7],
        prompt_is_delta=True,
    )
    early, late = (
        make_entry(ROLLOUT, name, prompt=[1, 2, 3, 4, 5, 6, 7, 8], generation=[9], parent="delta")
        for name in ("early", "late")
    )
    for entry in (delta, early, PARENT, late):
        await store.sink.put(entry)
    assert await shared_lens(store_url) == {"parent": 0, "delta": 0, "early": 0, "late": 7}
    assert await frozen(store) == [delta, early, late, PARENT]


async def test_calls_that_name_each_other_as_parents_are_stored_and_read(
    store: CaptureStore, store_url: str
) -> None:
    calls = [
        make_entry(ROLLOUT, name, prompt=[1, 2], generation=[], parent=parent)
        for name, parent in (("a", "b"), ("b", "a"), ("c", "c"))
    ]
    for entry in calls + calls:
        await store.sink.put(entry)
    assert await shared_lens(store_url) == {"a": 0, "b": 2, "c": 0}
    async with open_store(store_url, run="run-1") as again:
        assert await frozen(again) == calls


async def test_a_chain_written_alternately_by_two_processes_grows_by_its_suffixes_only(
    store_url: str,
) -> None:
    async with open_store(store_url, pool_size=3) as one, open_store(store_url, pool_size=2) as two:
        sequence, parent, written = list(range(1000)), None, []
        for number in range(30):
            entry = make_entry(
                ROLLOUT,
                f"call-{number:02}",
                prompt=sequence,
                generation=[number] * 5,
                parent=parent,
                request=[*REQUEST, {"role": "user", "content": str(number)}],
            )
            await (one, two)[number % 2].sink.put(entry)
            written.append(entry)
            parent, sequence = entry.model_call_id, [*sequence, *entry.generation_token_ids, 1, 2, 3]
        rows = await rows_of(store_url, tables.entries)
        assert [row["shared_len"] for row in rows] == [0, *(1005 + 8 * n for n in range(29))]
        assert max(len(row["payload"]) for row in rows[1:]) < len(rows[0]["payload"]) / 2
        assert await frozen(two) == written


async def test_a_corrupt_parent_is_named_and_not_its_child(store: CaptureStore, store_url: str) -> None:
    await store.sink.put(PARENT)
    await store.sink.put(CHILD)
    await run_sql(
        store_url, "UPDATE entries SET payload_sha256 = :hash WHERE model_call_id = 'parent'", hash="0" * 64
    )
    with pytest.raises(CorruptEntryError, match="model call parent of rollout rollout-1: the stored payload"):
        await store.source.freeze(ROLLOUT)


async def test_a_call_on_a_parent_that_was_corrupted_is_stored_whole(
    store: CaptureStore, store_url: str
) -> None:
    await store.sink.put(PARENT)
    await run_sql(
        store_url, "UPDATE entries SET payload_sha256 = :hash WHERE model_call_id = 'parent'", hash="0" * 64
    )
    await store.sink.put(CHILD)  # what was remembered of the parent is not what is stored
    assert (await shared_lens(store_url))["child"] == 0


async def test_calls_that_two_processes_put_in_turn_read_one_row_of_the_parent(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains_read = 0
    whole_chain = sink.chain_txn

    def counted(connection: Any, key: Any, model_call_id: str) -> Any:
        nonlocal chains_read
        chains_read += 1
        return whole_chain(connection, key, model_call_id)

    monkeypatch.setattr(sink, "chain_txn", counted)
    calls = [make_entry(ROLLOUT, "call-0", prompt=[1], generation=[2])]
    # Stores with pools of two sizes do not share what they remember, as processes do not.
    async with open_store(store_url, pool_size=2) as one, open_store(store_url, pool_size=3) as other:
        await one.sink.put(calls[0])
        for number in range(1, 12):
            parent = calls[-1]
            prompt = [*parent.prompt_token_ids, *parent.generation_token_ids, number + 70_000 * (number > 5)]
            calls.append(
                make_entry(
                    ROLLOUT, f"call-{number}", prompt=prompt, generation=[3], parent=parent.model_call_id
                )
            )
            await (other if number % 2 else one).sink.put(calls[-1])
        assert all(list((await shared_lens(store_url)).values())[1:])
        assert sorted(e.model_call_id for e in await frozen(one)) == sorted(e.model_call_id for e in calls)
    assert chains_read == 0
