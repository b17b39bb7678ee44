"""A call that is too large is refused before any transaction; one within the limit comes back as it was."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from tests.support.entries import make_entry
from tests.support.rows import rows_of
from tests.support.staged import stage
from tokencustody import CaptureStore, open_store
from tokencustody.codec.calls import pack_entry
from tokencustody.codec.staged import pack_call
from tokencustody.errors import EntryTooLargeError, InvalidRecordError
from tokencustody.schema import tables
from tokencustody.store.staging import SqlStagingStore

MIB = 2**20


def size_of(entry: Any) -> int:
    return len(pack_entry(entry).payload)


@pytest.mark.parametrize("over", [0, 1])
async def test_a_call_of_exactly_the_limit_is_stored_and_one_byte_more_is_refused(
    store_url: str, over: int
) -> None:
    entry = make_entry(x_text="x" * 5000)
    size = size_of(entry)
    async with open_store(store_url, max_entry_bytes=size - over) as store:
        if not over:
            await store.sink.put(entry)
            assert [each.x_text for each in (await store.source.freeze("rollout-1")).entries] == ["x" * 5000]  # type: ignore[attr-defined]
            return
        with pytest.raises(EntryTooLargeError) as raised:
            await store.sink.put(entry)
        for part in ("call-1", "rollout-1", f"takes {size} bytes", f"the {size - 1} that", "max_entry_bytes"):
            assert part in str(raised.value)
        assert store.stats()["transactions"] == 0


async def test_a_prefix_that_the_parent_holds_counts_as_well(store_url: str) -> None:
    # What may be read back does not depend on who wrote before.
    parent = make_entry(prompt=list(range(1000)), generation=[1])
    child = make_entry(
        model_call_id="call-2", prompt=[*range(1000), 1, 2], generation=[3], parent="call-1", cumulative=None
    )
    async with open_store(store_url, max_entry_bytes=size_of(child) - 1) as store:
        await store.sink.put(parent)
        with pytest.raises(EntryTooLargeError):
            await store.sink.put(child)


@pytest.mark.parametrize("over", [0, 1])
def test_a_staged_call_counts_with_its_extras_and_attachments(store_url: str, over: int) -> None:
    record = stage("call-1", extras={"note": "y" * 100}).snapshot
    packed = pack_call(record)
    attachments = {"routes": bytes(300), "text": "z" * 200}
    size = len(packed.payload) + len(packed.extras or b"") + 500
    with SqlStagingStore(store_url, max_entry_bytes=size - over) as staging:
        result = staging.stage(record, attachments=attachments)
        assert result.ok is not bool(over)
        if over:
            assert result.error is not None
            for part in (record.model_call_id, f"takes {size} bytes", "max_entry_bytes"):
                assert part in result.error
            assert staging.stats()["transactions"] == 0
        else:
            assert result.staging_key is not None
            assert staging.fetch_attachments(result.staging_key) == attachments


async def test_a_call_of_64_mib_is_stored_and_read_back(store_url: str) -> None:
    text = "é" * (30 * MIB)
    entry = make_entry(prompt=list(range(200_000)), generation=list(range(200_000)), x_text=text)
    assert size_of(entry) > 60 * MIB
    async with open_store(store_url) as store:
        await store.sink.put(entry)
        (found,) = (await store.source.freeze("rollout-1")).entries
    (row,) = await rows_of(store_url, tables.entries)
    assert len(row["payload"]) == size_of(entry)
    assert hashlib.sha256(row["payload"]).hexdigest() == row["payload_sha256"]
    assert found.generation_token_ids == entry.generation_token_ids
    assert found.generation_log_probs == entry.generation_log_probs
    assert found.x_text == text  # type: ignore[attr-defined]


async def test_the_default_limit_is_256_mib(sqlite_url: str) -> None:
    entry = make_entry(x_text="x" * (256 * MIB))
    async with open_store(sqlite_url) as store:
        with pytest.raises(EntryTooLargeError, match=f"more than the {256 * MIB} that"):
            await store.sink.put(entry)


@pytest.mark.parametrize("value", [0, -1, 2**30, True, 1.5, "1", None])
def test_a_limit_that_no_database_can_keep_is_refused_when_a_store_is_made(
    sqlite_url: str, value: Any
) -> None:
    with pytest.raises(InvalidRecordError, match="max_entry_bytes"):
        CaptureStore(sqlite_url, max_entry_bytes=value)
