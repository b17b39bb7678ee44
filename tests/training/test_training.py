"""A trainer reads as arrays exactly the rows that an export writes, proven by the same hashes."""

from __future__ import annotations

import asyncio
import gc
import random
import struct
import sys
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text, update

from tests.export.exports import (
    RUN,
    branching,
    left_out,
    manifest,
    parquet_rows,
    put_rollout,
    put_staged,
    run_sql,
)
from tests.support.entries import make_entry
from tests.support.forests import Forests
from tests.support.ledger import make_commit
from tests.support.rollouts import linear_rollout
from tests.support.staged import stage
from tokencustody import TokenEntry, open_store
from tokencustody.codec import calls, id_columns, staged
from tokencustody.errors import CorruptEntryError, InvalidRecordError, PayloadConflictError
from tokencustody.export import ExportOptions, OnBreak, SharedCalls, Siblings, export
from tokencustody.schema import tables
from tokencustody.training import RowRules, TrainingRollout, TrainingSource, read_rollouts

BITS = [0x7FF8000000000000, 0xFFF8000000000001, 0x7FF0000000000000, 0xFFF0000000000000, 0, 1 << 63, 1]
WIDE = [2**16, 2**32, 2**32 + 1, 2**56, 2**63 - 1]
RULES = [
    RowRules(),
    RowRules(SharedCalls.EVERY, OnBreak.SPLIT, Siblings.KEEP),
    RowRules(on_break=OnBreak.MASK),
    RowRules(on_break=OnBreak.FIRST, siblings=Siblings.KEEP),
]


def wide(rollout_id: str) -> list[TokenEntry]:
    """Return calls whose ids become wider on the way, with log probabilities of every kind."""
    log_probs = [struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in BITS]
    entries = [make_entry(rollout_id, "c-0", prompt=[1, 2], generation=[3] * len(BITS), log_probs=log_probs)]
    for number, token in enumerate(WIDE, 1):
        above = entries[-1]
        prompt = [*above.prompt_token_ids, *above.generation_token_ids, number]
        entries.append(
            make_entry(
                rollout_id, f"c-{number}", prompt=prompt, generation=[token], parent=above.model_call_id
            )
        )
    return entries


def faulty(rollout_id: str) -> list[TokenEntry]:
    """Return a root and children that do not continue it, or do not prove that they do."""
    changes: dict[str, dict[str, Any]] = {
        "digest": {"digest": "0" * 64},
        "length": {"cum_len": 9},
        "beyond": {},
        "other": {},
        "lost": {"parent_call_id": "gone"},
        "unstamped": {"parent_call_id": None, "parent_resolution": None},
    }
    entries = [make_entry(rollout_id, "root", prompt=[1], generation=[2])]
    for number, (name, fields) in enumerate(changes.items(), 3):
        prompt = [9, number] if name == "other" else [1, 2, number]
        entry = make_entry(
            rollout_id,
            name,
            prompt=prompt,
            generation=[2**63 if name == "beyond" else 4],
            parent="root",
            routed_experts=f"experts of {name}",
            weight_version=number,
        )
        entries.append(entry.model_copy(update=fields))
    return entries


async def fill(url: str) -> list[str]:
    """Store and freeze a rollout of every kind, and return their ids."""
    ids = []

    async def put(entries: list[TokenEntry]) -> None:
        await put_rollout(url, entries)
        ids.append(entries[0].rollout_id)

    for seed in range(20):
        await put(Forests(seed, f"forest-{seed}").entries)
    await put([turn.entry for turn in linear_rollout(6, rollout_id="line")])
    await put([turn.entry for turn in linear_rollout(6, rollout_id="deltas", deltas=[1, 2, 4])])
    await put([entry.model_copy(update={"rollout_id": "branching"}) for entry in branching()])
    await put(wide("wide"))
    await put(faulty("faulty"))
    await put([make_entry("silent", prompt=[1], generation=[])])
    chain = [stage("a", rollout="staged"), stage("b", rollout="staged")]
    chain[1] = stage("b", chain[0], rollout="staged", weight_version=2)
    await put_staged(url, chain, rollout_id="staged")
    await put_staged(url, [stage("a", rollout="gone")], staged=[], rollout_id="gone")
    await put_staged(url, [stage("a", rollout="beside")], rollout_id="beside", freeze=False)
    await put([make_entry("beside", "recorded")])
    await put_staged(url, [], failures=[("lost", "worker_died")], rollout_id="records", freeze=False)
    await put([make_entry("records", "recorded")])
    ids += ["staged", "gone"]
    async with open_store(url, run=RUN) as store:
        first, second = (make_entry("conflict", "c", prompt=[1], generation=[token]) for token in (2, 3))
        await store.sink.put(first)
        await store.sink.put(first)
        with pytest.raises(PayloadConflictError):
            await store.sink.put(second)
        await store.sink.put(make_entry("conflict", "d", prompt=[5], generation=[6]))
        await store.sink.put(make_entry("marked"))
        await store.sink.mark_incomplete("marked", "lost")
        await store.sink.begin_call("dangling", "never")
        await store.lineage.record(make_commit("versions", "call-1", weight_version=7))
        await store.sink.put(make_entry("versions"))
        for rollout_id in ("conflict", "marked", "dangling", "versions", "nobody"):
            await store.source.freeze(rollout_id)
            ids.append(rollout_id)
    return ids


# Those that `fill` returned.
IDS: list[str] = []


def fill_once(url: str) -> None:
    IDS[:] = asyncio.run(fill(url))


async def read(url: str, ids: Any, **options: Any) -> list[TrainingRollout]:
    async with TrainingSource(url, run=RUN) as source:
        return [rollout async for rollout in source.read(ids, **options)]


BY_TOKEN = ["token_ids", "loss_mask", "log_probs"]
BY_CALL = ["call_starts", "generation_starts", "generation_lengths"]
PLAIN = ["rollout_id", "chain_index", "segment", "breaks", "source", "digest"]
LISTS = ["call_ids", "weight_versions", "routed_experts"]


@pytest.mark.filled(by=fill_once)
@pytest.mark.parametrize("rules", RULES, ids=lambda rules: f"{rules.on_break}-{rules.siblings}")
async def test_the_arrays_are_in_every_bit_the_rows_that_an_export_writes(
    store_url: str, tmp_path: Path, rules: RowRules
) -> None:
    options = ExportOptions(shared_calls=rules.shared_calls, on_break=rules.on_break, siblings=rules.siblings)
    await export(store_url, tmp_path / "out", options, mark=False)
    rollouts = await read(store_url, IDS, rules=rules)
    assert [rollout.rollout_id for rollout in rollouts] == IDS
    rollouts.sort(key=lambda rollout: rollout.rollout_id)

    rows = [row for rollout in rollouts for row in rollout.rows]
    written = parquet_rows(tmp_path / "out")
    assert len(rows) == len(written) > 10
    for row, columns in zip(rows, written, strict=True):
        for name in PLAIN:
            assert getattr(row, name) == columns[name], (row.rollout_id, name)
        for name in LISTS:
            assert list(getattr(row, name)) == columns[name], (row.rollout_id, name)
        for name, kind in zip([*BY_TOKEN, *BY_CALL], ["q", "b", "d", "q", "q", "q"], strict=True):
            array = getattr(row, name)
            assert array.dtype.type is {"q": np.int64, "b": np.int8, "d": np.float64}[kind]
            assert array.flags.writeable
            assert array.tobytes() == np.array(columns[name], kind).tobytes(), (row.rollout_id, name)
    said = [
        (left.rollout_id, left.model_call_id, left.reason)
        for rollout in rollouts
        for left in rollout.left_out
    ]
    assert said == left_out(tmp_path / "out")
    assert len({reason for _, _, reason in said}) >= 8
    held = {
        each["rollout_id"]: (each["snapshot_id"], each["version"], each["whole"], each["is_held"])
        for part in manifest(tmp_path / "out")["parts"]
        for each in part["rollouts"]
    }
    for rollout in rollouts:
        if rollout.rollout_id in held:
            found = (rollout.snapshot_id, rollout.version, rollout.whole, rollout.is_held)
            assert found == held[rollout.rollout_id]
        else:
            assert (rollout.rows, rollout.whole, rollout.is_held) == ((), False, False)


def growing(rollout_id: str, calls: int, step: int) -> list[TokenEntry]:
    """Return calls that each add `step` ids, none of them small."""
    rng = random.Random(rollout_id)
    entries: list[TokenEntry] = []
    prompt: list[int] = []
    for number in range(calls):
        prompt = [*prompt, *(rng.randrange(1_000, 150_000) for _ in range(step))]
        generation = [rng.randrange(1_000, 150_000) for _ in range(step)]
        parent = entries[-1].model_call_id if entries else None
        entries.append(
            make_entry(rollout_id, f"c-{number}", prompt=prompt, generation=generation, parent=parent)
        )
        prompt = [*prompt, *generation]
    return entries


async def test_no_list_is_made_of_the_tokens(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await put_rollout(store_url, growing("long", 40, 250))

    async def peak_of(work: Callable[[TrainingSource], Awaitable[Any]]) -> int:
        async with TrainingSource(store_url, run=RUN) as source:
            await work(source)
            gc.collect()
            tracemalloc.start()
            try:
                before, _ = tracemalloc.get_traced_memory()
                await work(source)
                return tracemalloc.get_traced_memory()[1] - before
            finally:
                tracemalloc.stop()

    async def as_arrays(source: TrainingSource) -> None:
        (rollout,) = [each async for each in source.read(["long"])]
        (row,) = rollout.rows
        assert len(row.token_ids) == 20_000

    async def as_lists(source: TrainingSource) -> None:
        await source.freeze("long")

    # The prompts have 390,000 ids: lists of them alone are 3.1 MB.
    assert await peak_of(as_lists) > 3_100_000
    for module, name in (
        (id_columns, "numbers"),
        (id_columns, "pack_ids"),
        (calls, "decoded"),
        (staged, "numbers"),
    ):
        monkeypatch.setattr(module, name, None)
    assert await peak_of(as_arrays) < 2_500_000


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "as they come"])
async def test_rollouts_come_in_their_order_or_as_they_are_ready_and_no_more_are_begun_than_jobs(
    store_url: str, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    ids = [f"rollout-{number}" for number in range(8)]
    for rollout_id in ids:
        await put_rollout(store_url, [make_entry(rollout_id)])
    taken: list[str] = []
    first_may_end = asyncio.Event()
    as_it_is = TrainingSource._read

    async def read_late(self: TrainingSource, key: Any, rules: Any) -> TrainingRollout:
        if key.rollout_id == ids[0]:
            await first_may_end.wait()
        return await as_it_is(self, key, rules)

    def one_by_one() -> Iterator[str]:
        for rollout_id in ids:
            taken.append(rollout_id)
            yield rollout_id

    monkeypatch.setattr(TrainingSource, "_read", read_late)
    found = []
    async with TrainingSource(store_url, run=RUN) as source:
        reading = source.read(one_by_one(), ordered=ordered, jobs=3)
        if ordered:
            first_may_end.set()
        async for rollout in reading:
            found.append(rollout.rollout_id)
            assert len(taken) - len(found) <= 3
            if len(found) == 7:
                first_may_end.set()
    assert sorted(found) == ids
    assert (found == ids) is ordered
    assert ordered or found[-1] == ids[0]


async def test_reading_freezes_as_a_freeze_does(store_url: str) -> None:
    entries = [turn.entry for turn in linear_rollout(4, rollout_id="open", deltas=[2])]
    await put_rollout(store_url, entries, freeze=False)
    async with TrainingSource(store_url, run=RUN) as source:
        (rollout,) = [each async for each in source.read(["open"])]
        snapshot = await source.freeze("open")
        assert (rollout.snapshot_id, rollout.version) == (snapshot.snapshot_id, snapshot.version)
        assert [len(row.call_ids) for row in rollout.rows] == [4]
        assert rollout.is_held
        assert await source.drop("open", rollout.snapshot_id, rollout.version)
        (retired,) = [each async for each in source.read(["open"])]
    assert (retired.rows, [left.reason for left in retired.left_out]) == ((), ["retired"])


async def test_a_delta_that_nobody_can_read_masks_the_rollout_when_it_is_read(store_url: str) -> None:
    delta = make_entry(
        "r", "delta", prompt=[3], generation=[4], parent="gone", prompt_is_delta=True, cumulative=[3, 4]
    )
    await put_rollout(store_url, [delta], freeze=False)
    (rollout,) = await read(store_url, ["r"])
    assert (rollout.rows, [left.reason for left in rollout.left_out]) == ((), ["incomplete"])


@pytest.mark.parametrize(
    ("meanwhile", "reason"),
    [("retired", "retired"), ("deleted", "unknown"), ("made anew", "not_frozen"), ("marked", "incomplete")],
)
async def test_a_rollout_that_was_let_go_or_marked_meanwhile_has_no_rows(
    store_url: str, monkeypatch: pytest.MonkeyPatch, meanwhile: str, reason: str
) -> None:
    await put_rollout(store_url, [make_entry("r")])
    await put_rollout(store_url, [make_entry("s")])
    async with TrainingSource(store_url, run=RUN) as source, open_store(store_url, run=RUN) as store:
        raise_fence = source._raise_fence

        async def then_let_go(key: Any, read_calls: Any) -> Any:
            frozen = await raise_fence(key, read_calls)
            if key.rollout_id != "r":
                return frozen
            match meanwhile:
                case "marked":
                    await store.sink.mark_incomplete("r", "late")
                case "retired":
                    await store.source.drop("r", frozen.snapshot_id, frozen.version)
                case _:
                    await store.source.delete(["r"])
            if meanwhile == "made anew":
                await store.sink.put(make_entry("r"))
            return frozen

        monkeypatch.setattr(source, "_raise_fence", then_let_go)
        gone, other = [each async for each in source.read(["r", "s"], jobs=1)]
    assert (gone.rows, [left.reason for left in gone.left_out]) == ((), [reason])
    assert len(other.rows) == 1


@pytest.mark.parametrize(
    ("call", "column"),
    [
        ("call-0", "payload"),
        ("call-0", "payload_sha256"),
        *product(["call-2", "call-4"], ["payload", "payload_sha256", "stored_sha256"]),
    ],
)
async def test_a_damaged_call_is_an_error_that_names_it(store_url: str, call: str, column: str) -> None:
    entries = [turn.entry for turn in linear_rollout(5, rollout_id="r", deltas=[3])]
    await put_rollout(store_url, entries)
    found = (await run_sql(store_url, tables.entries.select().where(tables.entries.c.model_call_id == call)))[
        0
    ][0]
    damaged = found.payload[:-9] + b"\0" + found.payload[-8:] if column == "payload" else "0" * 64
    await run_sql(
        store_url,
        update(tables.entries).where(tables.entries.c.model_call_id == call).values({column: damaged}),
    )
    # The seal covers the hash of the whole payload, and so names the rollout.
    named = "rollout r of run run-1" if column == "payload_sha256" else f"model call {call} of rollout r"
    with pytest.raises(CorruptEntryError, match=named):
        await read(store_url, ["r"])


async def test_a_ledger_row_that_was_removed_behind_the_freeze_is_an_error(store_url: str) -> None:
    await put_staged(store_url, [stage("a")])
    await run_sql(store_url, text("DELETE FROM ledger_calls"))
    with pytest.raises(CorruptEntryError, match="does not hold the calls, intents and ledger rows"):
        await read(store_url, ["r"])


async def test_a_call_that_was_removed_between_the_freeze_and_the_reading_is_an_error(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_rollout(store_url, branching())
    async with TrainingSource(store_url, run=RUN) as source:
        raise_fence = source._raise_fence

        async def then_remove(key: Any, read_calls: Any) -> Any:
            frozen = await raise_fence(key, read_calls)
            await run_sql(store_url, text("DELETE FROM entries WHERE model_call_id = 'right'"))
            return frozen

        monkeypatch.setattr(source, "_raise_fence", then_remove)
        with pytest.raises(CorruptEntryError, match="does not hold the calls"):
            await anext(source.read(["rollout-1"]))


async def test_an_error_ends_the_reading_and_nothing_is_left_behind(store_url: str) -> None:
    ids = [f"rollout-{number}" for number in range(6)]
    for rollout_id in ids:
        await put_rollout(store_url, growing(rollout_id, 5, 50))
    damage = update(tables.entries).where(tables.entries.c.rollout_id == ids[2])
    await run_sql(store_url, damage.values(payload=b"nothing"))
    async with TrainingSource(store_url, run=RUN) as source:
        reading = source.read(ids)
        assert [(await anext(reading)).rollout_id for _ in range(2)] == ids[:2]
        with pytest.raises(CorruptEntryError, match=ids[2]):
            await anext(reading)
        with pytest.raises(StopAsyncIteration):
            await anext(reading)
        # What is wrong with one says nothing of the others.
        assert len([each async for each in source.read(ids[3:])]) == 3


async def test_a_reading_that_is_left_early_leaves_nothing_behind(store_url: str) -> None:
    ids = [f"rollout-{number}" for number in range(6)]
    for rollout_id in ids:
        await put_rollout(store_url, growing(rollout_id, 5, 50))
    async with TrainingSource(store_url, run=RUN) as source:
        async for rollout in source.read(ids):
            assert rollout.rollout_id == ids[0]
            break
    for rollout in read_rollouts(store_url, ids, run=RUN):
        assert rollout.rollout_id == ids[0]
        break


def test_synchronous_code_reads_the_same(store_url: str) -> None:
    entries = [turn.entry for turn in linear_rollout(4, rollout_id="r")]
    asyncio.run(put_rollout(store_url, entries))
    (expected,) = asyncio.run(read(store_url, ["r"]))
    (rollout,) = read_rollouts(store_url, ["r"], run=RUN, jobs=1)
    for mine, theirs in zip(rollout.rows, expected.rows, strict=True):
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        assert mine.digest == theirs.digest
    with pytest.raises(InvalidRecordError, match="rollout_id"):
        list(read_rollouts(store_url, ["no id"], run=RUN))


async def test_the_batch_of_the_documentation_has_every_row(store_url: str) -> None:
    document = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    code = document.split("```python\n", 1)[1].split("```", 1)[0]
    await put_rollout(store_url, branching())
    await put_rollout(store_url, [make_entry("other")])
    scope: dict[str, Any] = {}
    exec(code, scope)  # noqa: S102 - the documentation of this repository
    made = await asyncio.to_thread(scope["batch"], store_url, RUN, ["rollout-1", "other"])
    assert {name: array.shape for name, array in made.items()} == dict.fromkeys(made, (3, 9))
    assert made["loss_mask"].sum() == 6 + 3
    assert made["token_ids"][2].tolist() == [10, 11, 12, 13, 30, 31, 32, 0, 0]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"rollout_ids": "rollout-1"}, "several ids"),
        ({"rollout_ids": ["r"], "jobs": 0}, "jobs"),
        ({"rollout_ids": ["r"], "jobs": True}, "jobs"),
        ({"rollout_ids": ["r"], "rules": "keep"}, "rules must be RowRules, not str"),
    ],
)
async def test_a_request_of_no_sense_is_refused_before_anything_is_fenced(
    sqlite_url: str, asked: dict[str, Any], says: str
) -> None:
    async with TrainingSource(sqlite_url, run=RUN) as source:
        with pytest.raises(InvalidRecordError, match=says):
            source.read(**asked)
    assert await run_sql(sqlite_url, tables.fences.select()) == [[]]


@pytest.mark.parametrize("rule", ["shared_calls", "on_break", "siblings"])
def test_a_rule_may_be_plain_text_and_one_of_no_sense_is_refused_by_name(rule: str) -> None:
    word = getattr(RowRules(), rule)
    assert getattr(RowRules(**{rule: str(word)}), rule) is word
    with pytest.raises(InvalidRecordError, match=rule):
        RowRules(**{rule: "guess"})


async def test_without_numpy_the_error_names_the_extra(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    async with TrainingSource(sqlite_url, run=RUN) as source:
        with pytest.raises(ImportError, match=r"pip install 'tokencustody\[training\]'"):
            source.read(["r"])
