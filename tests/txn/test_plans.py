"""Every hot statement reaches its rows by an index that begins with the rollout, however full the database is and
whatever the planner knows of it.

TOKENCUSTODY_PLAN_ENTRIES=1000000 fills the databases with that many entries instead of a few.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.support import databases, filling
from tests.support.entries import REQUEST, continuation, make_entry
from tests.support.ledger import make_commit
from tests.support.postgres import Server
from tests.support.probes import run_script
from tests.support.staged import stage
from tests.txn import plans
from tokencustody import CaptureStore, TokenCaptureFrozenError, TokenEntry, open_store
from tokencustody.database.coalescing import Coalesce
from tokencustody.errors import PayloadConflictError
from tokencustody.retention.retention import Retention
from tokencustody.states import FenceState
from tokencustody.txn.fence import RolloutKey
from tokencustody.txn.selection import RolloutFilter, pages

ENTRIES = int(os.environ.get("TOKENCUSTODY_PLAN_ENTRIES", "20000"))
RUN = "filled"
LISTING = "a listing, which reads more than single rollouts"
_STATEMENTS: dict[tuple[str, str], list[plans.Statement]] = {}

NEXT = continuation(REQUEST, "Paris.", "And of Spain?")
LAST = continuation(NEXT, "Madrid.", "And of Italy?")

# Which tables each call must be seen to reach; a call that reached none would prove nothing.
REACHED = {
    "begin_call": {"fences"},
    "put": {"fences"},
    "put a child": {"fences"},
    "put many": {"fences"},
    "put again": {"entries"},
    "put a conflict": {"fences", "entries", "snapshot_versions"},
    "put too late": {"fences", "entries"},
    "refuse_call": {"fences", "intents", "snapshot_versions"},
    "mark_incomplete": {"fences", "snapshot_versions"},
    "resolve": {"entries", "failures"},
    "resolve by the ledger": {"entries", "failures", "ledger_calls"},
    "record": {"fences", "ledger_calls", "ledger_failures"},
    "record_failure": {"fences", "ledger_failures"},
    "import_rows": {"fences", "ledger_calls", "ledger_failures"},
    "manifest": {"fences", "ledger_calls", "ledger_failures"},
    "has_rows": {"fences", "ledger_calls", "ledger_failures"},
    "stage again": {"staged_calls", "staged_attachments"},
    "fetch": {"staged_calls"},
    "fetch_extras": {"staged_calls"},
    "fetch_attachments": {"staged_calls", "staged_attachments"},
    "fetch_prefix_token_ids": {"staged_calls"},
    "delete what was staged": {"staged_calls", "staged_attachments"},
    "freeze": {"fences", "entries", "intents"},
    "drop": {"fences", "entries", "intents", "failures", "ledger_calls", "ledger_failures"},
    "retire": {"fences", "entries", "intents", "failures", "ledger_calls", "ledger_failures"},
    "delete": {"fences", "snapshot_versions", "exports", "entries", "intents", "failures", "ledger_calls"},
    "retire what matches": {"fences", "entries", "intents", "failures", "ledger_calls", "ledger_failures"},
    "delete what matches": {"fences", "snapshot_versions", "exports", "entries", "intents", "failures"},
    "collect what was staged": {"fences", "ledger_calls", "staged_calls", "staged_attachments"},
}


def calls_of(rollout: str) -> list[TokenEntry]:
    """Return a root, a child that gives its whole prompt, and a grandchild that gives only what it adds."""
    root = make_entry(rollout, "call-1")
    sequence = [*root.prompt_token_ids, *root.generation_token_ids]
    child = make_entry(
        rollout,
        "call-2",
        prompt=[*sequence, 40],
        generation=[50],
        request=NEXT,
        text="Madrid.",
        parent="call-1",
        cumulative=[*sequence, 40, 50],
    )
    grandchild = make_entry(
        rollout,
        "call-3",
        prompt=[60],
        generation=[70],
        request=LAST,
        text="Rome.",
        parent="call-2",
        cumulative=[*sequence, 40, 50, 60, 70],
        prompt_is_delta=True,
    )
    return [root, child, grandchild]


async def use(store: CaptureStore, recorder: plans.Recorder, rollout: str) -> None:
    """Make every hot call, several of them in each of their outcomes, under its name."""

    @asynccontextmanager
    async def call(name: str) -> AsyncIterator[CaptureStore]:
        recorder.call = name
        with suppress(PayloadConflictError, TokenCaptureFrozenError):
            yield store

    root, child, grandchild = calls_of(rollout)
    others = [f"{rollout}-{number}" for number in range(8)]
    async with call("begin_call"):
        await store.sink.begin_call(rollout, "call-1")
        await store.sink.begin_call(rollout, "call-1")
        await asyncio.gather(*(store.sink.begin_call(rollout, f"call-{number}") for number in range(2, 6)))
    async with call("put"):
        await store.sink.put(root)
    async with call("put a child"):
        await store.sink.put(child)
        await store.sink.put(grandchild)
    async with call("put many"):
        for number in range(3):
            await asyncio.gather(*(store.sink.put(calls_of(other)[number]) for other in others))
    async with call("put again"):
        await asyncio.gather(*map(store.sink.put, (root, child, grandchild)))
    async with call("put a conflict"):
        await store.sink.put(make_entry(others[0], "call-2", prompt=[1]))
    async with call("refuse_call"):
        await store.sink.refuse_call(rollout, model_call_id="call-4", code="too long")
        await store.sink.refuse_call(rollout, model_call_id="call-4", code="too long")
        await store.sink.refuse_call(rollout, model_call_id="call-4", code="another")
    async with call("mark_incomplete"):
        await store.sink.mark_incomplete(others[1])
    async with call("resolve"):
        for request, answer, parent in ((REQUEST, "Paris.", 1), (NEXT, "Madrid.", 2), (LAST, "Rome.", 3)):
            found = await store.lineage.resolve(rollout, continuation(request, answer, "Next?"))
            assert found.match is not None
            assert found.match.model_call_id == f"call-{parent}"
    await use_ledger(store, call, f"{rollout}-ledger")
    await use_staging(store, call, rollout)
    async with call("freeze"):
        for frozen in (rollout, *others):
            assert len((await store.source.freeze(frozen)).entries) == 3
        snapshot = await store.source.freeze(rollout)
    async with call("put too late"):
        await store.sink.put(make_entry(rollout, "call-5"))
    async with call("drop"):
        assert await store.source.drop(rollout, snapshot.snapshot_id, snapshot.version)
    async with call("retire"):
        await store.source.retire(others)
    async with call("delete"):
        await store.source.delete([rollout])


async def use_retention(store: CaptureStore, url: str, recorder: plans.Recorder, rollout: str) -> None:
    """Make what retention does with each rollout that it has listed."""

    async def listed(each: str) -> tuple[RolloutFilter, Any]:
        recorder.call = LISTING
        await store.sink.put(make_entry(each))
        await store.source.freeze(each)
        wanted = RolloutFilter(
            run=RUN, state=FenceState.FROZEN, prefix=rollout, before=datetime.now(UTC), exported=False
        )
        async for page in pages(retention._database, wanted):
            return wanted, page[0]
        raise AssertionError("nothing matches")

    async with Retention(url) as retention:
        for name, remove in (
            ("retire what matches", retention._retire),
            ("delete what matches", retention._delete),
        ):
            wanted, row = await listed(f"{rollout}-{name.partition(' ')[0]}")
            recorder.call = name
            assert (await remove(wanted, row)).removed
        recorder.call = LISTING
        staged = stage("call-1", rollout=f"{rollout}-staged").snapshot
        assert (await asyncio.to_thread(store.staging.stage, staged, attachments={"raw": b"\0"})).ok
        recorder.call = "collect what was staged"
        key = RolloutKey(RUN, f"{rollout}-staged")
        assert (await retention._collect(key, datetime.now(UTC), set())).removed


async def use_ledger(store: CaptureStore, call: Any, rollout: str) -> None:
    async with call("record"):
        commit = make_commit(rollout)
        await store.lineage.record(commit)
        await store.lineage.record(commit)
        await store.lineage.record(
            make_commit(rollout, "call-2", request=NEXT, text="Madrid.", tokens=[40, 50], parent=commit)
        )
    async with call("record_failure"):
        await store.lineage.record_failure(rollout, "lost", "worker_capture_failed")
    async with call("resolve by the ledger"):
        found = await store.lineage.resolve(rollout, LAST)
        assert found.match is not None
        assert found.match.model_call_id == "call-2"
    async with call("manifest"):
        assert len((await store.lineage.manifest(rollout))["records"]) == 2
    async with call("has_rows"):
        assert await store.lineage.has_rows(rollout)
    async with call("import_rows"):
        await store.lineage.import_rows(f"{rollout}-copy", await store.lineage.export_rows(rollout))


async def use_staging(store: CaptureStore, call: Any, rollout: str) -> None:
    async def put(number: int) -> None:
        staged = stage(f"call-{number}", rollout=rollout, extras={"number": number}).snapshot
        result = await asyncio.to_thread(store.staging.stage, staged, attachments={"raw": b"\0\1"})
        assert result.ok

    keys = [f"{rollout}/call-{number}" for number in range(8)]
    async with call("stage"):
        await asyncio.gather(*map(put, range(8)))
    async with call("stage again"):
        await put(1)
    for name, argument in (
        ("fetch", keys),
        ("fetch_extras", keys),
        ("fetch_attachments", keys[0]),
        ("fetch_prefix_token_ids", keys[:1]),
    ):
        async with call(name):
            assert await asyncio.to_thread(getattr(store.staging, name), argument)
    async with call("delete what was staged"):
        assert await asyncio.to_thread(store.staging.delete, keys) == keys


def make_full(url: str, statistics: str) -> None:
    """Fill a database with calls, and let its planner know nothing of them, what it was at the start, or all."""
    filling.keep_statistics(url)
    if statistics == "of the start":
        filling.fill(url, filling.CALLS_PER_ROLLOUT, run=RUN)
        filling.analyze(url)
    filling.fill(url, ENTRIES - filling.CALLS_PER_ROLLOUT, start=filling.CALLS_PER_ROLLOUT, run=RUN)
    if statistics == "current":
        filling.analyze(url)


# SQLite gathers no statistics by itself, so it has none or those that somebody asked for.
DATABASES = [
    ("sqlite", "no"),
    ("sqlite", "current"),
    ("postgresql", "no"),
    ("postgresql", "of the start"),
    ("postgresql", "current"),
]


@pytest.fixture(scope="module", params=DATABASES, ids="-".join)
def full_url(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, postgres: Server
) -> Iterator[str]:
    """A database that holds many calls, of which its planner knows this."""
    dialect, statistics = request.param
    with ExitStack() as stack:
        if dialect == "sqlite":
            url = f"sqlite:///{tmp_path_factory.mktemp('full') / 'full.db'}"
        else:
            url = stack.enter_context(databases.fresh(postgres))
        make_full(url, statistics)
        yield url


# Without statistics PostgreSQL takes whichever index has the rollout: it expects one row from each.
known_tables = pytest.mark.parametrize(
    "full_url",
    [each for each in DATABASES if each != ("postgresql", "no") and each[1] != "of the start"],
    indirect=True,
    ids="-".join,
)
FEW_IN_A_ROLLOUT = ("failures", "ledger_failures")


async def statements_of(url: str, coalesce: str) -> list[plans.Statement]:
    """Return what the store executes on a database in every hot call."""
    if (url, coalesce) not in _STATEMENTS:
        with plans.recorded() as recorder:
            async with open_store(url, run=RUN, writer="planner", coalesce=coalesce) as store:
                await use(store, recorder, f"rollout-{coalesce}")
                await use_retention(store, url, recorder, f"retained-{coalesce}")
        _STATEMENTS[url, coalesce] = [each for each in recorder.statements.values() if each.call != LISTING]
    return _STATEMENTS[url, coalesce]


async def accesses_of(
    url: str, statements: list[plans.Statement]
) -> list[tuple[plans.Statement, plans.Access]]:
    """Return each access to a table of rollouts that the database plans for these statements."""
    found = await plans.of(url)
    try:
        return [(each, access) for each in statements for access in await found.explain(each)]
    finally:
        await found.close()


@pytest.mark.parametrize("coalesce", list(Coalesce))
async def test_every_hot_statement_reaches_single_rollouts_by_an_index(full_url: str, coalesce: str) -> None:
    accesses = await accesses_of(full_url, await statements_of(full_url, coalesce))
    loose = [(each.call, str(access), each.text) for each, access in accesses if not access.is_keyed()]
    assert not loose
    for call, tables in REACHED.items():
        assert {access.table for each, access in accesses if each.call == call} >= tables, call


@known_tables
async def test_parents_are_found_by_their_fingerprint(full_url: str) -> None:
    accesses = await accesses_of(full_url, await statements_of(full_url, "process"))
    for call, tables in (("resolve", ["entries"]), ("resolve by the ledger", ["entries", "ledger_calls"])):
        assert {access.index for each, access in accesses if each.call == call} >= {
            f"ix_{table}_continuation_fingerprint" for table in tables
        }


@known_tables
@pytest.mark.parametrize("coalesce", list(Coalesce))
async def test_single_calls_are_found_by_their_ids(full_url: str, coalesce: str) -> None:
    accesses = await accesses_of(full_url, await statements_of(full_url, coalesce))
    asked = [access for _, access in accesses if "model_call_id" in access.condition]
    assert {access.table for access in asked} >= {"entries", "intents", "ledger_calls", "staged_calls"}
    loose = [
        (each.call, str(access), each.text)
        for each, access in accesses
        if "model_call_id" in access.left_over and access.table not in FEW_IN_A_ROLLOUT
    ]
    assert not loose


async def test_no_rollout_is_read_again_for_each_of_its_calls(full_url: str) -> None:
    accesses = await accesses_of(full_url, await statements_of(full_url, "process"))
    repeated = [
        (each.call, str(access), each.text)
        for each, access in accesses
        if "model_call_id" in access.repeated and access.table not in FEW_IN_A_ROLLOUT
    ]
    assert not repeated


def test_a_lost_index_is_noticed(store_url: str) -> None:
    filling.keep_statistics(store_url)
    filling.fill(store_url, 2000, run=RUN)
    statements = asyncio.run(statements_of(store_url, "process"))

    def loose() -> set[str]:
        accesses = asyncio.run(accesses_of(store_url, statements))
        return {each.call for each, access in accesses if not access.is_keyed()}

    assert not loose()
    run_script(
        store_url, "ALTER TABLE intents RENAME TO indexed; CREATE TABLE intents AS SELECT * FROM indexed"
    )
    assert loose() >= {"refuse_call", "freeze", "drop", "retire"}


@pytest.mark.parametrize(
    "condition",
    ["true", "run = 'filled'", "rollout_id = 'filled-7'", "model_call_id = 'call-1'", "run = rollout_id"],
)
async def test_a_statement_that_reads_more_than_single_rollouts_is_noticed(
    full_url: str, condition: str
) -> None:
    texts = [f"SELECT written_by FROM {table} AS t WHERE {condition}" for table in ("entries", "intents")]
    accesses = await accesses_of(full_url, [plans.Statement("", text, ()) for text in texts])
    assert {access.table for _, access in accesses} == {"entries", "intents"}
    assert not [access for _, access in accesses if access.is_keyed()]
