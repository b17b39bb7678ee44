"""A frozen rollout is read as it was when it was frozen, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.entries import make_entry
from tests.support.rows import run_sql
from tokencustody import open_store
from tokencustody.errors import CorruptEntryError
from tokencustody.export import export

CHANGES = {
    "a call was removed": "DELETE FROM entries WHERE model_call_id = 'call-2'",
    "every call was removed": "DELETE FROM entries",
    "a call was renamed": "UPDATE entries SET model_call_id = 'other' WHERE model_call_id = 'call-2'",
    "an intent was removed": "DELETE FROM intents WHERE model_call_id = 'call-1'",
    "an intent was added": (
        "INSERT INTO intents (run, rollout_id, model_call_id, begun_at, written_by)"
        " SELECT run, rollout_id, 'late', begun_at, written_by FROM intents WHERE model_call_id = 'call-1'"
    ),
    "a refusal was changed": "UPDATE intents SET refusal_code = 'another' WHERE refusal_code IS NOT NULL",
}


async def freeze(url: str) -> None:
    async with open_store(url) as store:
        for call in ("call-1", "call-2"):
            await store.sink.begin_call("rollout-1", call)
            await store.sink.put(make_entry(model_call_id=call))
        await store.sink.begin_call("rollout-1", "refused")
        await store.sink.refuse_call("rollout-1", model_call_id="refused", code="too_long")
        await store.source.freeze("rollout-1")


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_what_was_changed_behind_the_fence_is_noticed_by_whoever_reads_it(
    store_url: str, tmp_path: Path, change: str
) -> None:
    await freeze(store_url)
    await run_sql(store_url, change)
    async with open_store(store_url) as store:
        with pytest.raises(CorruptEntryError, match="rollout-1 of run default"):
            await store.source.freeze("rollout-1")
    report = await export(store_url, tmp_path / "out")
    assert (report.rollouts, report.left_out["corrupt"], report.ok) == (0, 1, False)


async def test_a_rollout_that_is_marked_after_its_freeze_keeps_its_seal(store_url: str) -> None:
    await freeze(store_url)
    async with open_store(store_url) as store:
        await store.sink.mark_incomplete("rollout-1", "lost")
        again = await store.source.freeze("rollout-1")
    assert [entry.model_call_id for entry in again.entries] == ["call-1", "call-2"]


async def test_a_rollout_that_was_frozen_before_there_were_seals_is_read_as_it_is(store_url: str) -> None:
    await freeze(store_url)
    await run_sql(store_url, "UPDATE snapshot_versions SET sealed_sha256 = NULL")
    await run_sql(store_url, "DELETE FROM entries WHERE model_call_id = 'call-2'")
    async with open_store(store_url) as store:
        assert len((await store.source.freeze("rollout-1")).entries) == 1
