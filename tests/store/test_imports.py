"""Nothing is imported on the way of a call: what another thread imports while a process forks stays locked in the child
for ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

WALK = """
import asyncio, logging, sys
from tests.support.entries import REQUEST, continuation, make_entry
from tests.support.ledger import make_commit
from tests.support.staged import stage
from tokencustody import SqlTokenSink, open_store
from tokencustody.errors import PayloadConflictError, TokenCaptureFrozenError

logging.basicConfig()
url, unreachable = sys.argv[1:]
store = open_store(url, run="run-1", coalesce="off")
away = SqlTokenSink(unreachable, deadline=0.2)
staged = stage("call-1", rollout="r").snapshot
before = set(sys.modules)


async def capture():
    sink, lineage = store.sink, store.lineage
    await sink.begin_call("r", "call-1")
    for _ in range(2):
        await sink.put(make_entry("r", "call-1"))
    try:
        await sink.put(make_entry("r", "call-1", model="other"))
    except PayloadConflictError:
        pass
    await sink.refuse_call("r", model_call_id="call-2", code="busy")
    await sink.mark_incomplete("r")
    await away.mark_incomplete("r")  # waits on this host
    await away.close()
    await lineage.resolve("r", continuation(REQUEST, "Paris.", "And of Spain?"))
    await lineage.record(make_commit("r"))
    await lineage.record_failure("r", "lost", "lost")
    assert await lineage.has_rows("r") and await lineage.manifest("r")
    await lineage.import_rows("s", await lineage.export_rows("r"))


async def let_go():
    snapshot = await store.source.freeze("r")
    try:
        await store.sink.put(make_entry("r", "late"))
    except TokenCaptureFrozenError:
        pass
    await store.source.drop("r", snapshot.snapshot_id, snapshot.version)
    await store.source.retire(["s"])
    await store.source.delete(["r", "s"])
    store.stats()


async def calls():
    async with store:
        await capture()
        await asyncio.to_thread(stage_and_fetch, store.staging)
        await let_go()


def stage_and_fetch(staging):
    assert staging.stage(staged, attachments={"bytes": b"1", "json": {"x": 1}}).ok
    for fetch in (staging.fetch, staging.fetch_extras, staging.fetch_prefix_token_ids):
        fetch(["r/call-1"])
    staging.fetch_attachments("r/call-1")
    staging.orphans()
    staging.delete(["r/call-1"])


asyncio.run(calls())
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "used"])
def test_no_method_of_any_store_imports_a_module(unused_store_url: str, is_new: bool) -> None:
    if not is_new:
        make = f"import asyncio, tokencustody as t; asyncio.run(t.SqlTokenSource({unused_store_url!r}).freeze('r'))"
        subprocess.run([sys.executable, "-c", make], check=True, cwd=ROOT)
    walk = [sys.executable, "-c", WALK, unused_store_url, "postgresql://nobody@localhost:1/nowhere"]
    done = subprocess.run(walk, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
