"""A database with every shape of rollout, and ways to change it behind the store's back."""

from __future__ import annotations

import asyncio
import contextlib
import math
from array import array
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, NullPool, create_engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from tests.support.entries import make_entry
from tests.support.older import refuse_with_another_code
from tests.support.rollouts import linear_rollout
from tests.support.staged import Staged, stage
from tokencustody import CaptureLedgerCommit, TokenEntry, open_store
from tokencustody.database.url import parse_url
from tokencustody.errors import PayloadConflictError
from tokencustody.fingerprint import assistant_fingerprint
from tokencustody.lineage import stamp_continuation
from tokencustody.records import ParentResolutionStatus, stamp_lineage
from tokencustody.store import CaptureStore

Result = TypeVar("Result")

RUN, OTHER_RUN = "run-a", "run-b"
_TURNS = 5


def fill(url: str) -> None:
    """Fill a database with rollouts of every shape, all of them sound."""
    asyncio.run(_fill(url))


async def _fill(url: str) -> None:
    async with (
        open_store(url, run=RUN, writer="one", spill=None) as store,
        open_store(url, run=RUN, writer="two", spill=None) as second,
    ):
        for turn in linear_rollout(_TURNS, rollout_id="linear"):
            await store.sink.put(turn.entry)
        await store.source.freeze("linear")
        for turn in linear_rollout(_TURNS, rollout_id="deltas", deltas={2, 3}):
            await store.sink.put(turn.entry)
        await _fill_tree(store)
        await _fill_odd(store)
        await _fill_masked(store)
        await _fill_ends(store)
        await _fill_staged(store)
        # Several writers of one rollout at once.
        calls = [make_entry("busy", f"call-{n}", generation=[n]) for n in range(8)]
        await asyncio.gather(*((store, second)[n % 2].sink.put(call) for n, call in enumerate(calls)))
    async with open_store(url, run=OTHER_RUN, spill=None) as store:
        for turn in linear_rollout(3, rollout_id="linear", seed=1):
            await store.sink.put(turn.entry)


async def _fill_tree(store: CaptureStore) -> None:
    """A root with two children that share its sequence, one of which has a child of wider ids."""
    root = make_entry("tree", "root", prompt=[1, 2, 3], generation=[4])
    left = _child(root, "left", [5], [6])
    right = _child(root, "right", [7], [8, 9])
    wide = _child(left, "wide", [70_000], [2**64 - 1])
    for entry in (root, left, right, wide):
        await store.sink.put(entry)


def _child(parent: TokenEntry, call: str, added: list[int], sampled: list[int], **fields: Any) -> TokenEntry:
    prompt = parent.prompt_token_ids + parent.generation_token_ids + added
    return make_entry(
        parent.rollout_id,
        call,
        prompt=prompt,
        generation=sampled,
        parent=parent.model_call_id,
        text=f"answer of {call}",
        **fields,
    )


async def _fill_odd(store: CaptureStore) -> None:
    """Values that a careless reader would not bring back."""
    odd = make_entry(
        "odd",
        "one\tcall é",
        generation=[0, 2**64 - 1, 2**32],
        log_probs=[math.nan, -0.0, -math.inf],
        model="a\0b" + "x" * 600,
        response_id="",
        unknown={"deep": [1, None, 2**70]},
    )
    odd.created_at = math.nan
    await store.sink.put(odd)
    await store.sink.put(
        TokenEntry(
            rollout_id="odd",
            model_call_id="bare",
            prompt_token_ids=[],
            generation_token_ids=[],
            generation_log_probs=[],
        )
    )
    # The engine printed the parent's answer with other tokens: no fault, but no continuation either.
    await store.sink.put(make_entry("odd", "retokenized", prompt=[1], parent="bare", text="other"))
    await store.sink.put(
        _child(make_entry("odd", "again", prompt=[9]), "lone", [3], [4], parent_resolution_reason="")
    )
    await store.sink.put(make_entry("odd", "again", prompt=[9]))
    await store.sink.put(make_entry("odd", "drifted", prompt=[8, 8], parent="again", text="drifted"))


async def _fill_masked(store: CaptureStore) -> None:
    sink = store.sink
    await sink.put(make_entry("masked", "twice"))
    with contextlib.suppress(PayloadConflictError):
        await sink.put(make_entry("masked", "twice", generation=[7]))
    await sink.put(make_entry("masked", "begun"))
    await sink.begin_call("masked", "begun")
    await sink.refuse_call("masked", model_call_id="refused", code="too_long")
    await refuse_with_another_code(store, "masked", "refused")
    await sink.mark_incomplete("masked")
    await store.source.freeze("masked")
    await sink.mark_incomplete("masked", "late")
    await sink.begin_call("dangling", "lost")
    await store.source.freeze("dangling")
    await sink.begin_call("waiting", "under-way")
    await sink.refuse_call("refused", model_call_id="refused", code="too_long")
    await store.source.freeze("refused")


async def _fill_ends(store: CaptureStore) -> None:
    for rollout in ("retired", "dropped", "dangling-retired"):
        await store.sink.put(make_entry(rollout))
    await store.sink.begin_call("dangling-retired", "lost")
    await store.source.freeze("dangling-retired")
    snapshot = await store.source.freeze("dropped")
    assert await store.source.drop("dropped", snapshot.snapshot_id, snapshot.version)
    await store.source.retire(["retired", "dangling-retired", "never-written"])
    await store.source.freeze("empty")


async def _fill_staged(store: CaptureStore) -> None:
    calls = staged_family("staged")
    for call in calls:
        attachments = None
        if call.record.model_call_id == "b":
            attachments = {"bytes": b"abc", "text": "é", "json": {"a": [1.5]}, "buffer": array("f", [1, 2])}
        assert store.staging.stage(call.snapshot, attachments=attachments).ok
        await store.lineage.record(_commit("staged", call))
    await store.lineage.record_failure("staged", "broken", "request_finished_without_staged_coordinates")
    await store.lineage.record_failure("staged", "d", "came_later")
    # The same call as a complete record.
    await store.sink.put(_complete(calls[0]))
    # A checkpoint brought the rollout's rows under another id; its tokens stay staged under the old one.
    await store.lineage.import_rows("resumed", await store.lineage.export_rows("staged"))
    later = stage("e", calls[1], rollout="resumed", added=[20], sampled=[21])
    assert store.staging.stage(later.snapshot).ok
    await store.lineage.record(_commit("resumed", later))
    for call in staged_family("orphans"):
        assert store.staging.stage(call.snapshot).ok


def staged_family(rollout: str) -> list[Staged]:
    """Return a root, two calls after it in a line, and a sibling of the second."""
    root = stage("a", added=[1, 2], sampled=[3], rollout=rollout)
    middle = stage("b", root, added=[4], sampled=[5, 2**40], rollout=rollout, weight_version=2)
    last = stage("c", middle, added=[], sampled=[7, 8], extras={"routes": [[1, 2.5]]}, rollout=rollout)
    return [root, middle, last, stage("d", root, added=[4], sampled=[9], rollout=rollout)]


_REQUEST = [{"role": "user", "content": "count"}]
_RESPONSE = [{"role": "assistant", "content": "one, two"}]


def _commit(rollout: str, call: Staged) -> CaptureLedgerCommit:
    chains = {"a": ["a"], "b": ["a", "b"], "c": ["a", "b", "c"], "d": ["a", "d"]}
    name = call.record.model_call_id
    chain = [f"{rollout}/{each}" for each in chains.get(name, ())]
    if name == "e":
        chain = ["staged/a", "staged/b", "resumed/e"]
    fingerprint = assistant_fingerprint([*_REQUEST, *_RESPONSE])
    return CaptureLedgerCommit(
        rollout_id=rollout,
        record=call.record.model_copy(update={"continuation_fingerprint": fingerprint}),
        staging_chain=tuple(chain),
        request_items=_REQUEST,
        response_items=_RESPONSE,
    )


def _complete(call: Staged) -> TokenEntry:
    entry = TokenEntry(
        rollout_id=call.snapshot.rollout_id,
        model_call_id=call.snapshot.model_call_id,
        prompt_token_ids=call.token_ids[:-1],
        generation_token_ids=call.token_ids[-1:],
        generation_log_probs=[-0.5],
        output_items=_RESPONSE,
        response_id=call.record.response_id,
    )
    stamp_lineage(entry, None, parent_resolution=ParentResolutionStatus.ROOT)
    return stamp_continuation(entry, _REQUEST)


# On the server: for each constraint a statement of its own would cost more than the rest of the test.
_UNHINDERED = """
    DO $$
    DECLARE found record;
    BEGIN
        FOR found IN SELECT conrelid::regclass AS its_table, conname FROM pg_constraint
            WHERE contype IN ('c', 'f', 'u') AND connamespace = 'public'::regnamespace ORDER BY contype DESC
        LOOP
            EXECUTE format('ALTER TABLE %s DROP CONSTRAINT IF EXISTS %I CASCADE', found.its_table, found.conname);
        END LOOP;
    END $$"""


def behind(url: str, work: Callable[[Connection], Result]) -> Result:
    """Run `work` in one transaction that no constraint and no trigger hinders."""
    parsed = parse_url(url)
    if parsed.is_sqlite:
        file = create_engine(URL.create("sqlite", database=parsed.dsn), poolclass=NullPool)
        with file.connect() as connection:
            connection.execute(text("PRAGMA foreign_keys = OFF"))
            connection.execute(text("PRAGMA ignore_check_constraints = ON"))
            result = work(connection)
            connection.commit()
            return result
    return asyncio.run(_behind_postgresql(url, work))


async def _behind_postgresql(url: str, work: Callable[[Connection], Result]) -> Result:
    server = create_async_engine(make_url(url).set(drivername="postgresql+asyncpg"), poolclass=NullPool)
    try:
        async with server.begin() as connection:
            await connection.execute(text(_UNHINDERED))
            return await connection.run_sync(work)
    finally:
        await server.dispose()


def change(
    url: str, table: str, column: str, to: Callable[[Any], Any], *, run: str = RUN, **where: Any
) -> None:
    """Set a column of the one row that `where` names to `to` of what it holds."""
    condition = " AND ".join(f"{name} = :{name}" for name in ("run", *where))

    def update(connection: Connection) -> None:
        named = {"run": run, **where}
        (value,) = connection.execute(
            text(f"SELECT {column} FROM {table} WHERE {condition}"), named
        ).scalars()
        changed = to(value)
        assert changed != value
        connection.execute(
            text(f"UPDATE {table} SET {column} = :changed WHERE {condition}"), {"changed": changed, **named}
        )

    behind(url, update)


def flip(value: Any, bit: int = 0) -> Any:
    """Return a value with one bit flipped: of the bytes, of the text's last character, or of the number."""
    match value:
        case bool():
            return not value
        case int():
            return value ^ (1 << bit % 8)
        case float():
            return value + 2.0**-10
        case bytes():
            at = bit // 8 % len(value)
            return value[:at] + bytes([value[at] ^ (1 << bit % 8)]) + value[at + 1 :]
        case str():
            at = bit // 8 % len(value)
            return value[:at] + chr(ord(value[at]) ^ (1 << bit % 3)) + value[at + 1 :]
        case _:
            return value
