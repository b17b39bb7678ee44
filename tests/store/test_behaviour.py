"""Section 5 of the wire contract, row by row: what each operation does on an open, a frozen and a retired rollout."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tests.support.entries import make_entry
from tests.support.rows import rows_of
from tokencustody import CaptureStore, TokenCaptureFrozenError, TokenCaptureRetiredError, open_store
from tokencustody.errors import InvalidRecordError, PayloadConflictError
from tokencustody.schema import tables

pytestmark = pytest.mark.serializable

Operation = Callable[[CaptureStore], Awaitable[object]]

WRITES: dict[str, Operation] = {
    "put of a new call": lambda s: s.sink.put(make_entry(model_call_id="call-2")),
    "put of the same bytes": lambda s: s.sink.put(make_entry()),
    "put of other bytes": lambda s: s.sink.put(make_entry(model="other")),
    "begin_call": lambda s: s.sink.begin_call("rollout-1", "call-3"),
    "refuse_call": lambda s: s.sink.refuse_call("rollout-1", model_call_id="call-4", code="too_long"),
}


async def retire(store: CaptureStore) -> None:
    await store.sink.put(make_entry())
    await store.source.retire(["rollout-1"])


@pytest.mark.quick("Strict fence")
@pytest.mark.parametrize("operation", WRITES.values(), ids=WRITES)
async def test_no_write_succeeds_after_a_freeze(store: CaptureStore, operation: Operation) -> None:
    await store.sink.put(make_entry())
    frozen = await store.source.freeze("rollout-1")
    with pytest.raises(TokenCaptureFrozenError) as refused:
        await operation(store)
    assert type(refused.value) is TokenCaptureFrozenError
    assert "rollout-1" in str(refused.value)
    assert await store.source.freeze("rollout-1") == frozen


@pytest.mark.quick("Strict fence")
@pytest.mark.parametrize("operation", WRITES.values(), ids=WRITES)
async def test_no_write_succeeds_after_a_retirement(store: CaptureStore, operation: Operation) -> None:
    await retire(store)
    with pytest.raises(TokenCaptureRetiredError, match="rollout-1"):
        await operation(store)


async def test_marks_and_freezes_of_a_retired_rollout_are_refused(store: CaptureStore) -> None:
    await retire(store)
    with pytest.raises(TokenCaptureRetiredError):
        await store.sink.mark_incomplete("rollout-1", "call-9")
    with pytest.raises(TokenCaptureRetiredError):
        await store.source.freeze("rollout-1")


@pytest.mark.quick("Exact payload")
async def test_the_same_bytes_again_are_a_no_op(store: CaptureStore) -> None:
    await store.sink.put(make_entry())
    await store.sink.put(make_entry())
    snapshot = await store.source.freeze("rollout-1")
    assert [entry.model_call_id for entry in snapshot.entries] == ["call-1"]
    assert (snapshot.incomplete, snapshot.version) == (False, 1)


@pytest.mark.quick("Exact payload")
async def test_other_bytes_are_a_conflict_that_is_kept_as_evidence(
    store: CaptureStore, store_url: str
) -> None:
    first = make_entry()
    await store.sink.put(first)
    with pytest.raises(
        PayloadConflictError, match=r"call-1 of rollout rollout-1 .*differing: created_at, model"
    ) as conflict:
        await store.sink.put(first.model_copy(update={"model": "other", "created_at": 1.0}))
    assert isinstance(conflict.value, ValueError)

    (evidence,) = await rows_of(store_url, tables.failures)
    (stored,) = await rows_of(store_url, tables.entries)
    assert evidence["kind"] == "conflict"
    assert evidence["model_call_id"] == "call-1"
    assert evidence["differing_fields"] == "created_at,model"
    assert evidence["written_by"] == "test-writer"
    assert evidence["first_payload_sha256"] == stored["payload_sha256"] != evidence["second_payload_sha256"]

    snapshot = await store.source.freeze("rollout-1")
    assert snapshot.entries == (first,)
    assert (snapshot.incomplete, snapshot.version) == (True, 2)


async def test_each_conflicting_attempt_is_a_version_of_its_own(store: CaptureStore) -> None:
    await store.sink.put(make_entry())
    for model in ("other", "other", "third"):
        with pytest.raises(PayloadConflictError):
            await store.sink.put(make_entry(model=model))
    await store.sink.put(make_entry())  # the first payload still counts as stored
    assert (await store.source.freeze("rollout-1")).version == 4


async def test_an_intent_without_entry_or_refusal_masks_the_rollout(store: CaptureStore) -> None:
    await store.sink.begin_call("rollout-1", "call-1")
    await store.sink.begin_call("rollout-1", "call-1")
    assert (await store.source.freeze("rollout-1")).incomplete


async def test_an_intent_with_its_entry_does_not_dangle(store: CaptureStore) -> None:
    await store.sink.begin_call("rollout-1", "call-1")
    await store.sink.put(make_entry())
    assert not (await store.source.freeze("rollout-1")).incomplete


async def test_a_refused_call_does_not_dangle_and_is_in_the_snapshot(store: CaptureStore) -> None:
    await store.sink.begin_call("rollout-1", "call-1")
    await store.sink.refuse_call("rollout-1", model_call_id="call-1", code="context_length_exceeded")
    await store.sink.refuse_call("rollout-1", model_call_id="call-1", code="context_length_exceeded")
    await store.sink.refuse_call("rollout-1", model_call_id="call-0", code="never_announced")
    snapshot = await store.source.freeze("rollout-1")
    assert not snapshot.incomplete
    assert snapshot.refusals == (("call-0", "never_announced"), ("call-1", "context_length_exceeded"))
    assert snapshot.version == 3


async def test_a_refusal_with_another_code_is_a_conflict_that_marks_nothing(store: CaptureStore) -> None:
    await store.sink.refuse_call("rollout-1", model_call_id="call-1", code="first")
    said = "call-1 of rollout rollout-1 was refused before with the code first; that stays"
    with pytest.raises(PayloadConflictError, match=said):
        await store.sink.refuse_call("rollout-1", model_call_id="call-1", code="second")
    snapshot = await store.source.freeze("rollout-1")
    assert snapshot.refusals == (("call-1", "first"),)
    assert (snapshot.incomplete, snapshot.version) == (False, 2)


async def test_an_engine_may_refuse_a_call_without_a_code(store: CaptureStore) -> None:
    for call in ("call-1", "call-2"):
        await store.sink.begin_call("rollout-1", call)
    for code in (None, None):
        await store.sink.refuse_call("rollout-1", model_call_id="call-1", code=code)
    for code in ("busy", None):  # which says nothing else
        await store.sink.refuse_call("rollout-1", model_call_id="call-2", code=code)
    said = "call-1 of rollout rollout-1 was refused before without a code; that stays"
    with pytest.raises(PayloadConflictError, match=said):
        await store.sink.refuse_call("rollout-1", model_call_id="call-1", code="busy")
    snapshot = await store.source.freeze("rollout-1")
    assert snapshot.refusals == (("call-1", None), ("call-2", "busy"))
    assert (snapshot.incomplete, snapshot.version) == (False, 3)
    assert (await store.source.freeze("rollout-1")).refusals == snapshot.refusals


async def test_a_mark_masks_an_open_rollout(store: CaptureStore) -> None:
    await store.sink.put(make_entry())
    await store.sink.mark_incomplete("rollout-1")
    snapshot = await store.source.freeze("rollout-1")
    assert (snapshot.incomplete, snapshot.version) == (True, 2)


@pytest.mark.quick("Strict fence")
async def test_a_mark_after_the_freeze_invalidates_the_drop_of_the_old_version(store: CaptureStore) -> None:
    await store.sink.put(make_entry())
    before = await store.source.freeze("rollout-1")
    await store.sink.mark_incomplete("rollout-1", "call-7")
    assert not await store.source.drop("rollout-1", before.snapshot_id, before.version)
    after = await store.source.freeze("rollout-1")
    assert (after.snapshot_id, after.version, after.incomplete) == (
        before.snapshot_id,
        before.version + 1,
        True,
    )
    assert after.entries == before.entries
    assert await store.source.drop("rollout-1", snapshot_id=after.snapshot_id, version=after.version)


async def test_freezing_again_returns_the_same_snapshot(store: CaptureStore, store_url: str) -> None:
    await store.sink.put(make_entry())
    first = await store.source.freeze("rollout-1")
    async with open_store(store_url, run="run-1") as fresh:
        assert await fresh.source.freeze("rollout-1") == first


async def test_freezing_an_unknown_rollout_gives_an_empty_snapshot_and_fences_it(store: CaptureStore) -> None:
    snapshot = await store.source.freeze("never-seen")
    assert (snapshot.entries, snapshot.incomplete, snapshot.refusals) == ((), False, ())
    with pytest.raises(TokenCaptureFrozenError):
        await store.sink.put(make_entry("never-seen"))


async def test_a_drop_changes_nothing_unless_it_names_exactly_the_frozen_snapshot(
    store: CaptureStore,
) -> None:
    assert not await store.source.drop("unknown", "some-id", 1)
    await store.sink.put(make_entry())
    assert not await store.source.drop("rollout-1", "some-id", 0)
    snapshot = await store.source.freeze("rollout-1")
    assert not await store.source.drop("rollout-1", "another-id", snapshot.version)
    assert not await store.source.drop("rollout-1", snapshot.snapshot_id, snapshot.version - 1)
    assert not await store.source.drop("rollout-1", snapshot.snapshot_id, snapshot.version + 1)
    assert await store.source.freeze("rollout-1") == snapshot


async def test_dropping_a_retired_rollout_is_true_only_for_the_snapshot_that_was_retired(
    store: CaptureStore,
) -> None:
    for retire_by in ("drop", "retire"):
        rollout = f"retired-by-{retire_by}"
        await store.sink.put(make_entry(rollout))
        snapshot = await store.source.freeze(rollout)
        if retire_by == "drop":
            assert await store.source.drop(rollout, snapshot.snapshot_id, snapshot.version)
        else:
            await store.source.retire([rollout])
        assert await store.source.drop(rollout, snapshot.snapshot_id, snapshot.version)
        assert not await store.source.drop(rollout, snapshot.snapshot_id, snapshot.version + 1)
        assert not await store.source.drop(rollout, snapshot.snapshot_id, snapshot.version - 1)
        assert not await store.source.drop(rollout, "another-id", snapshot.version)
    await store.source.retire(["never-frozen"])
    assert not await store.source.drop("never-frozen", "", 0)


async def test_a_batch_says_which_rollouts_had_records_in_input_order(store: CaptureStore) -> None:
    for rollout in ("c", "a"):
        await store.sink.put(make_entry(rollout))
    await store.sink.begin_call("intent-only", "call-1")
    await store.source.freeze("empty")
    removal = await store.source.retire(["c", "never", "a", "c", "empty", "intent-only"])
    assert removal == {"removed": ["c", "a", "intent-only"], "absent": ["never", "empty"]}
    assert await store.source.retire(["a", "c"]) == {"removed": [], "absent": ["a", "c"]}
    with pytest.raises(TokenCaptureRetiredError):
        await store.sink.put(make_entry("never"))


async def test_a_deleted_rollout_is_unused_again(store: CaptureStore, store_url: str) -> None:
    await store.sink.put(make_entry())
    old = await store.source.freeze("rollout-1")
    assert await store.source.delete(["rollout-1", "never"]) == {
        "removed": ["rollout-1"],
        "absent": ["never"],
    }
    assert await store.source.delete(["rollout-1"]) == {"removed": [], "absent": ["rollout-1"]}
    for table in tables.metadata.sorted_tables:
        assert table is tables.wire_schema or await rows_of(store_url, table) == []
    await store.sink.put(make_entry(model="other"))
    new = await store.source.freeze("rollout-1")
    assert new.snapshot_id != old.snapshot_id
    assert not await store.source.drop("rollout-1", old.snapshot_id, old.version)


@pytest.mark.parametrize("batch", ["rollout-1", b"rollout-1", 5, {"rollout-1"}, None])
async def test_a_batch_that_is_no_sequence_of_ids_is_a_type_error(store: CaptureStore, batch: object) -> None:
    await store.sink.put(make_entry())
    for remove in (store.source.retire, store.source.delete):
        with pytest.raises(TypeError, match="sequence"):
            await remove(batch)  # type: ignore[arg-type]
    assert len((await store.source.freeze("rollout-1")).entries) == 1


async def test_every_id_of_a_batch_is_checked_before_anything_changes(store: CaptureStore) -> None:
    await store.sink.put(make_entry())
    for remove in (store.source.retire, store.source.delete):
        with pytest.raises(InvalidRecordError, match=r"rollout_ids\[1\]"):
            await remove(["rollout-1", "no/slash"])
    assert len((await store.source.freeze("rollout-1")).entries) == 1


@pytest.mark.quick("Everything is a row")
async def test_every_version_has_its_row_and_survives_retirement(store: CaptureStore, store_url: str) -> None:
    await store.sink.put(make_entry())
    with pytest.raises(PayloadConflictError):
        await store.sink.put(make_entry(model="other"))
    await store.sink.refuse_call("rollout-1", model_call_id="call-2", code="busy")
    await store.source.freeze("rollout-1")
    await store.sink.mark_incomplete("rollout-1", "call-3")
    snapshot = await store.source.freeze("rollout-1")
    assert await store.source.drop("rollout-1", snapshot.snapshot_id, snapshot.version)
    await store.source.retire(["rollout-1"])

    versions = await rows_of(store_url, tables.snapshot_versions)
    assert [(row["version"], row["event"], row["model_call_id"]) for row in versions] == [
        (0, "open", ""),
        (1, "conflict", "call-1"),
        (2, "refusal", "call-2"),
        (3, "freeze", ""),
        (4, "mark", "call-3"),
        (5, "drop", ""),
    ]
    assert {row["snapshot_id"] for row in versions[3:]} == {snapshot.snapshot_id}
    assert {row["written_by"] for row in versions} == {"test-writer"}
    assert await rows_of(store_url, tables.entries) == []


async def test_a_put_does_not_rewrite_the_fence(store: CaptureStore, store_url: str) -> None:
    await store.sink.begin_call("rollout-1", "call-1")
    before = await rows_of(store_url, tables.fences)
    await store.sink.put(make_entry())
    assert await rows_of(store_url, tables.fences) == before


async def test_runs_do_not_see_one_another(store: CaptureStore, store_url: str) -> None:
    async with open_store(store_url, run="run-2") as other:
        await store.sink.put(make_entry(model="of run 1"))
        await other.sink.put(make_entry(model="of run 2"))
        await store.source.freeze("rollout-1")
        await other.sink.put(make_entry(model_call_id="call-2"))
        await store.source.delete(["rollout-1"])
        snapshot = await other.source.freeze("rollout-1")
        assert sorted((e.model_call_id, e.model) for e in snapshot.entries) == [
            ("call-1", "of run 2"),
            ("call-2", ""),
        ]


async def test_rows_are_signed_by_host_and_pid_unless_the_store_has_a_name(store_url: str) -> None:
    import os
    import socket

    async with open_store(store_url) as unnamed:
        await unnamed.sink.put(make_entry())
    (row,) = await rows_of(store_url, tables.entries)
    assert row["written_by"] == f"{socket.gethostname()}:{os.getpid()}"
    assert row["run"] == "default"
