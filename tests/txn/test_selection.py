"""Which rollouts count as exported."""

from __future__ import annotations

from pathlib import Path

from tests.export.exports import RUN, put_linear
from tests.support.rows import run_sql
from tokencustody import open_store
from tokencustody.database.url import parse_url
from tokencustody.export import ExportOptions, export
from tokencustody.schema.opening import CaptureDatabase
from tokencustody.txn.selection import RolloutFilter, pages


async def names(url: str, *, exported: bool) -> list[str]:
    """Return the rollouts that a filter finds."""
    database = CaptureDatabase(parse_url(url))
    try:
        wanted = RolloutFilter(run=RUN, exported=exported)
        return [row.rollout_id async for page in pages(database, wanted) for row in page]
    finally:
        await database.close()


async def test_a_rollout_counts_as_exported_until_it_is_marked_again(store_url: str, tmp_path: Path) -> None:
    await put_linear(store_url, 3)
    await export(store_url, tmp_path / "out", ExportOptions(run=RUN, format="calls"))
    assert await names(store_url, exported=False) == []

    async with open_store(store_url, run=RUN) as store:
        await store.sink.mark_incomplete("rollout-001", "lost")
        await store.source.retire(["rollout-001", "rollout-002"])
    assert await names(store_url, exported=True) == ["rollout-000", "rollout-002"]
    assert await names(store_url, exported=False) == ["rollout-001"]

    await run_sql(store_url, "UPDATE exports SET snapshot_id = 'another' WHERE rollout_id = 'rollout-000'")
    assert await names(store_url, exported=False) == ["rollout-000", "rollout-001"]
