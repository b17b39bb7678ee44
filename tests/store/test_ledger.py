"""The capture ledger: token-free rows in commit order, visible to every process at once."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from tests.database.test_transactions import Points, connection_lost, failing
from tests.support.entries import REQUEST, continuation, make_entry
from tests.support.ledger import make_commit
from tests.support.rows import rows_of, run_sql
from tokencustody import CaptureStore, TokenCaptureRetiredError, open_store
from tokencustody.errors import (
    CorruptEntryError,
    InvalidRecordError,
    PayloadConflictError,
    RolloutRetiredError,
)
from tokencustody.protocols import CaptureLedger
from tokencustody.schema import tables
from tokencustody.staging.records import RolloutManifest
from tokencustody.txn.ledger_rows import flat

NEXT = continuation(REQUEST, "Paris.", "And of Spain?")


def calls_of(manifest: dict[str, Any]) -> list[str]:
    return [record["model_call_id"] for record in manifest["records"]]


def failures_of(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    return [(failure["model_call_id"], failure["reason"]) for failure in manifest["failures"]]


async def test_the_store_is_a_capture_ledger(store: CaptureStore) -> None:
    assert isinstance(store.lineage, CaptureLedger)
    assert store.lineage.is_process_shared()


async def test_a_manifest_is_the_records_in_commit_order_and_validates_as_wire_data(
    store: CaptureStore,
) -> None:
    commits = [make_commit(model_call_id=f"call-{number}") for number in (3, 1, 2)]
    for commit in commits:
        await store.lineage.record(commit)
        await store.lineage.record(commit)  # an identical repeat
    manifest = await store.lineage.manifest("rollout-1")
    assert json.loads(json.dumps(manifest)) == manifest
    assert list(RolloutManifest.model_validate(manifest).records) == [commit.record for commit in commits]
    assert manifest["failures"] == []
    assert await store.lineage.has_rows("rollout-1")


async def test_an_unknown_rollout_has_an_empty_manifest(store: CaptureStore) -> None:
    manifest = RolloutManifest.model_validate(await store.lineage.manifest("never-seen"))
    assert (manifest.records, manifest.failures) == ([], [])
    assert not await store.lineage.has_rows("never-seen")


@pytest.mark.parametrize(
    "other",
    [
        make_commit(weight_version=4),
        make_commit(text="Lyon."),
        make_commit(request=[{"role": "user", "content": "?"}]),
        make_commit().model_copy(update={"staging_chain": ("another/key",)}),
    ],
    ids=["record", "response", "request", "staging chain"],
)
async def test_other_data_under_a_call_id_is_a_conflict_and_the_first_stays(
    store: CaptureStore, other: Any
) -> None:
    await store.lineage.record(make_commit())
    with pytest.raises(
        PayloadConflictError, match="conflicting ledger record for model call call-1 of rollout rollout-1"
    ):
        await store.lineage.record(other)
    (record,) = RolloutManifest.model_validate(await store.lineage.manifest("rollout-1")).records
    assert record == make_commit().record


async def test_each_reason_of_a_failed_call_is_listed_once(store: CaptureStore) -> None:
    for reason in ("worker_capture_failed", "another reason", "worker_capture_failed"):
        await store.lineage.record_failure("rollout-1", "call-1", reason)
    with pytest.raises(PayloadConflictError, match="conflicting"):
        await store.lineage.record(make_commit())
    manifest = await store.lineage.manifest("rollout-1")
    reasons = ("worker_capture_failed", "another reason")
    assert (calls_of(manifest), failures_of(manifest)) == ([], [("call-1", reason) for reason in reasons])
    assert await store.lineage.has_rows("rollout-1")


async def test_a_failure_of_a_recorded_call_poisons_it_without_removing_it(store: CaptureStore) -> None:
    await store.lineage.record(make_commit())
    await store.lineage.record_failure("rollout-1", "call-1", "late trouble")
    manifest = await store.lineage.manifest("rollout-1")
    assert (calls_of(manifest), failures_of(manifest)) == (["call-1"], [("call-1", "late trouble")])


@pytest.mark.serializable
async def test_the_freeze_fence_is_the_sinks_and_the_ledger_still_records(store: CaptureStore) -> None:
    await store.source.freeze("rollout-1")
    await store.lineage.record(make_commit())
    await store.lineage.record_failure("rollout-1", "call-2", "worker_capture_failed")
    manifest = await store.lineage.manifest("rollout-1")
    assert (calls_of(manifest), failures_of(manifest)) == (["call-1"], [("call-2", "worker_capture_failed")])


async def test_a_retired_rollout_discards_late_rows_with_a_warning_and_cannot_be_read(
    store: CaptureStore, store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    await store.lineage.record(make_commit())
    assert await store.lineage.retire(["rollout-1"]) == {"removed": ["rollout-1"], "absent": []}
    with caplog.at_level(logging.WARNING, logger="tokencustody"):
        await store.lineage.record(make_commit(model_call_id="late"))
        await store.lineage.record_failure("rollout-1", "late-2", "too late")
    first, second = (record.getMessage() for record in caplog.records)
    assert "rollout-1/late" in first
    assert "late-2" in second
    for read in (store.lineage.manifest, store.lineage.has_rows, store.lineage.export_rows):
        with pytest.raises(RolloutRetiredError, match="rollout-1"):
            await read("rollout-1")
    with pytest.raises(RolloutRetiredError):
        await store.lineage.import_rows("rollout-1", [])
    assert await rows_of(store_url, tables.ledger_calls) == []


@pytest.mark.serializable
async def test_one_fence_covers_records_and_ledger_whoever_retires(store: CaptureStore) -> None:
    await store.lineage.record(make_commit("by-source"))
    await store.sink.put(make_entry("by-ledger"))
    assert (await store.source.retire(["by-source"]))["removed"] == ["by-source"]
    assert (await store.lineage.retire(["by-ledger"]))["removed"] == ["by-ledger"]
    with pytest.raises(RolloutRetiredError):
        await store.lineage.manifest("by-source")
    with pytest.raises(TokenCaptureRetiredError):
        await store.sink.put(make_entry("by-ledger"))
    await store.lineage.delete(["by-ledger", "by-source"])
    await store.sink.put(make_entry("by-ledger"))
    assert not await store.lineage.has_rows("by-source")


@pytest.mark.serializable
async def test_a_ledger_row_resolves_the_next_request_of_any_client(
    store: CaptureStore, store_url: str
) -> None:
    first = make_commit()
    await store.lineage.record(first)
    second = make_commit(model_call_id="call-2", request=NEXT, text="Madrid.", parent=first)
    await store.lineage.record(second)
    async with open_store(store_url, run="run-1") as fresh:
        found = await fresh.lineage.resolve("rollout-1", continuation(NEXT, "Madrid.", "And of Italy?"))
    assert found.match is not None
    assert found.match.model_call_id == "call-2"
    assert found.match.cumulative_token_ids == ()
    assert found.match.digest == second.record.cumulative_hash
    assert found.match.staging_chain == ("rollout-1/call-1", "rollout-1/call-2")
    assert (found.match.prev_len, found.match.chain_hash) == (second.record.cum_len, second.record.chain_hash)


@pytest.mark.parametrize("version", [0, 1, 3])
async def test_rows_of_another_or_no_fingerprint_version_are_no_candidates(
    store: CaptureStore, version: int
) -> None:
    await store.lineage.record(make_commit(fingerprint_version=version))
    found = await store.lineage.resolve("rollout-1", NEXT)
    assert (found.status, found.reason) == ("unresolved", "no_match")


async def test_complete_records_are_asked_before_the_ledger(store: CaptureStore) -> None:
    await store.lineage.record(make_commit(model_call_id="a-ledger-row"))
    await store.sink.put(make_entry(model_call_id="complete"))
    found = await store.lineage.resolve("rollout-1", NEXT)
    assert found.match is not None
    assert (found.match.model_call_id, found.match.cumulative_token_ids != ()) == ("complete", True)


async def test_ambiguous_complete_records_are_not_settled_by_the_ledger(store: CaptureStore) -> None:
    await store.lineage.record(make_commit(model_call_id="a-ledger-row"))
    await store.sink.put(make_entry(model_call_id="one"))
    await store.sink.put(make_entry(model_call_id="two", generation=[1]))
    found = await store.lineage.resolve("rollout-1", NEXT)
    assert (found.status, found.reason) == ("unresolved", "ambiguous")


async def test_twin_rows_resolve_by_the_smallest_id_only_with_the_same_cumulative_hash(
    store: CaptureStore,
) -> None:
    for call in ("b", "a"):
        await store.lineage.record(make_commit(model_call_id=call))
        await store.lineage.record(make_commit("rollout-2", call, tokens=[1, 2, ord(call)]))
    same = await store.lineage.resolve("rollout-1", NEXT)
    assert same.match is not None
    assert same.match.model_call_id == "a"
    assert (await store.lineage.resolve("rollout-2", NEXT)).reason == "ambiguous"


async def test_failures_never_become_parents(store: CaptureStore) -> None:
    await store.lineage.record_failure("rollout-1", "call-1", "worker_capture_failed")
    assert (await store.lineage.resolve("rollout-1", NEXT)).reason == "no_match"


async def test_a_row_without_response_id_or_chain_hash_stands_under_failures(
    store: CaptureStore, store_url: str
) -> None:
    for number in range(3):
        await store.lineage.record(make_commit(model_call_id=f"call-{number}"))
    await store.lineage.record_failure("rollout-1", "call-3", "worker_capture_failed")
    # As rows of before revision 0004, which have no hash.
    without_hash = "UPDATE ledger_calls SET row_sha256 = NULL"
    await run_sql(store_url, f"{without_hash}, response_id = NULL WHERE model_call_id = 'call-0'")
    await run_sql(store_url, f"{without_hash}, chain_hash = NULL WHERE model_call_id = 'call-1'")
    manifest = await store.lineage.manifest("rollout-1")
    assert calls_of(manifest) == ["call-2"]
    assert failures_of(manifest) == [
        ("call-0", "ledger_row_missing_response_id"),
        ("call-1", "ledger_row_missing_chain_hash"),
        ("call-3", "worker_capture_failed"),
    ]


@pytest.mark.parametrize("column", ["response_id", "capture_key", "continuation_fingerprint", "written_by"])
async def test_a_row_that_was_changed_is_corrupt_and_the_call_is_named(
    store: CaptureStore, store_url: str, column: str
) -> None:
    await store.lineage.record(make_commit())
    await store.lineage.record(make_commit(model_call_id="call-2"))
    await run_sql(store_url, f"UPDATE ledger_calls SET {column} = 'other' WHERE model_call_id = 'call-2'")
    for read in (store.lineage.manifest, store.lineage.export_rows):
        with pytest.raises(CorruptEntryError, match="call-2 of rollout rollout-1: its row in the ledger"):
            await read("rollout-1")


async def test_a_failure_that_was_changed_is_corrupt_and_the_call_is_named(
    store: CaptureStore, store_url: str
) -> None:
    await store.lineage.record_failure("rollout-1", "call-x", "worker_capture_failed")
    await run_sql(store_url, "UPDATE ledger_failures SET reason = 'another'")
    with pytest.raises(CorruptEntryError, match="call-x of rollout rollout-1"):
        await store.lineage.manifest("rollout-1")


async def test_exported_rows_come_back_in_order_and_keep_who_staged_them(
    store: CaptureStore, store_url: str
) -> None:
    first = make_commit()
    await store.lineage.record(first)
    await store.lineage.record_failure("rollout-1", "call-x", "worker_capture_failed")
    await store.lineage.record(
        make_commit(model_call_id="call-0", request=NEXT, text="Madrid.", parent=first)
    )
    before = await store.lineage.manifest("rollout-1")
    rows = json.loads(json.dumps(await store.lineage.export_rows("rollout-1")))

    await store.lineage.import_rows("attempt-2", rows)
    await store.lineage.import_rows("attempt-2", rows)
    moved = await store.lineage.manifest("attempt-2")
    assert calls_of(moved) == ["call-1", "call-0"]
    assert failures_of(moved) == failures_of(before)
    assert {record["capture_key"] for record in moved["records"]} == {"rollout-1"}
    assert [record["staging_key"] for record in moved["records"]] == ["rollout-1/call-1", "rollout-1/call-0"]
    found = await store.lineage.resolve("attempt-2", continuation(NEXT, "Madrid.", "?"))
    assert found.match is not None
    assert found.match.staging_chain == ("rollout-1/call-1", "rollout-1/call-0")

    again = await store.lineage.export_rows("attempt-2")
    await store.lineage.import_rows("attempt-3", again)
    assert {r["capture_key"] for r in (await store.lineage.manifest("attempt-3"))["records"]} == {"rollout-1"}

    await store.lineage.delete(["rollout-1"])
    await store.lineage.import_rows("rollout-1", rows)
    assert await store.lineage.manifest("rollout-1") == before
    await store.lineage.record(first)  # its repeat is still recognised


@pytest.mark.serializable
async def test_an_import_is_all_or_nothing(store: CaptureStore) -> None:
    await store.lineage.record(make_commit(model_call_id="call-1"))
    await store.lineage.record(make_commit(model_call_id="call-2"))
    rows = await store.lineage.export_rows("rollout-1")
    await store.lineage.record(make_commit("attempt-2", "call-2", text="other"))
    with pytest.raises(PayloadConflictError, match="call-2"):
        await store.lineage.import_rows("attempt-2", rows)
    assert calls_of(await store.lineage.manifest("attempt-2")) == ["call-2"]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"rollout_id": "a/b"}, r"rows\[1\]: rollout_id"),
        ({"record": {}}, r"rows\[1\]: "),
        ({"staging_chain": ["nul\0"]}, r"rows\[1\]: staging_chain\[0\]"),
        ({"record": None}, r"rows\[1\]"),
    ],
)
async def test_a_malformed_row_is_named_and_nothing_is_imported(
    store: CaptureStore, damage: dict[str, Any], says: str
) -> None:
    for number in range(2):
        await store.lineage.record(make_commit(model_call_id=f"call-{number}"))
    rows = await store.lineage.export_rows("rollout-1")
    with pytest.raises(InvalidRecordError, match=says):
        await store.lineage.import_rows("attempt-2", [rows[0], rows[1] | damage])
    assert not await store.lineage.has_rows("attempt-2")


@pytest.mark.parametrize("row", ["text", [], None, 5, 1.5, iter(())], ids=lambda row: type(row).__name__)
async def test_a_row_that_is_no_object_is_named_and_nothing_is_imported(
    store: CaptureStore, row: Any
) -> None:
    with pytest.raises(InvalidRecordError, match=rf"rows\[0\]: .* not {type(row).__name__}"):
        await store.lineage.import_rows("rollout-1", [row])
    assert not await store.lineage.has_rows("rollout-1")


@pytest.mark.parametrize(
    "change",
    [
        {"record": {"weight_version": 99}},
        {"record": {"continuation_fingerprint": "f" * 64}},
        {"derived_fingerprint": "f" * 64},
        {"derived_fingerprint_version": 1},
        {"staging_chain": ["rollout-1/call-0", "rollout-1/call-1"]},
        {"continuation_context_len": 7},
        {"record": {"weight_version": 99}, "payload_sha256": "0" * 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_flat", [False, True])
async def test_an_altered_row_is_a_conflict_whatever_hash_it_carries(
    store: CaptureStore, change: dict[str, Any], is_flat: bool
) -> None:
    await store.lineage.record(make_commit())
    rows = await store.lineage.export_rows("rollout-1")
    altered = rows[0] | change | {"record": rows[0]["record"] | change.get("record", {})}
    with pytest.raises(PayloadConflictError, match="call-1"):
        await store.lineage.import_rows("rollout-1", [flat(altered) if is_flat else altered])
    assert await store.lineage.export_rows("rollout-1") == rows
    # Where the call is new it is another one, and has a hash of its own.
    await store.lineage.delete(["rollout-1"])
    await store.lineage.import_rows("rollout-1", [altered])
    (imported,) = await store.lineage.export_rows("rollout-1")
    assert imported["payload_sha256"] not in (rows[0]["payload_sha256"], "0" * 64)
    with pytest.raises(PayloadConflictError, match="call-1"):
        await store.lineage.import_rows("rollout-1", rows)


@pytest.mark.parametrize("is_older_here", [False, True])
@pytest.mark.parametrize("is_older_there", [False, True])
async def test_a_row_of_an_older_release_is_known_again(
    store: CaptureStore, is_older_here: bool, is_older_there: bool
) -> None:
    await store.lineage.record(make_commit())
    rows = await store.lineage.export_rows("rollout-1")
    older = [
        {name: value for name, value in row.items() if not name.startswith("derived_")}
        | {"payload_sha256": "0" * 64}
        for row in rows
    ]
    await store.lineage.delete(["rollout-1"])
    await store.lineage.import_rows("rollout-1", older if is_older_here else rows)
    before = await store.lineage.export_rows("rollout-1")
    await store.lineage.import_rows("rollout-1", older if is_older_there else rows)
    await store.lineage.record(make_commit())
    assert await store.lineage.export_rows("rollout-1") == before


async def test_rows_without_a_response_id_can_be_carried_along(store: CaptureStore) -> None:
    await store.lineage.record(make_commit())
    (row,) = await store.lineage.export_rows("rollout-1")
    row["record"]["response_id"] = None
    await store.lineage.import_rows("attempt-2", [row])
    assert failures_of(await store.lineage.manifest("attempt-2")) == [
        ("call-1", "ledger_row_missing_response_id")
    ]


@pytest.mark.parametrize("lacking", ["chain_hash", "cumulative_hash"])
@pytest.mark.parametrize("is_flat", [False, True])
async def test_rows_without_a_hash_are_carried_along_as_failed_and_are_no_parents(
    store: CaptureStore, lacking: str, is_flat: bool
) -> None:
    await store.lineage.record(make_commit())
    (row,) = await store.lineage.export_rows("rollout-1")
    del row["record"][lacking]
    await store.lineage.import_rows("attempt-2", [flat(row) if is_flat else row])
    manifest = await store.lineage.manifest("attempt-2")
    assert (calls_of(manifest), failures_of(manifest)) == (
        [],
        [("call-1", "ledger_row_missing_chain_hash")],
    )
    assert (await store.lineage.resolve("attempt-2", NEXT)).status == "unresolved"
    (again,) = await store.lineage.export_rows("attempt-2")
    await store.lineage.import_rows("attempt-3", [again])
    assert failures_of(await store.lineage.manifest("attempt-3")) == failures_of(manifest)


@pytest.mark.serializable
async def test_a_lost_answer_never_becomes_a_conflict_or_a_second_row(
    store: CaptureStore, store_url: str, faults: Points
) -> None:
    faults["after commit, before acknowledgement"] = failing(1, connection_lost)
    await store.lineage.record(make_commit())
    faults["after commit, before acknowledgement"] = failing(1, connection_lost)
    await store.lineage.record_failure("rollout-1", "call-2", "worker_capture_failed")
    assert [row["position"] for row in await rows_of(store_url, tables.ledger_calls)] == [1]
    assert [row["position"] for row in await rows_of(store_url, tables.ledger_failures)] == [2]


@pytest.mark.serializable
async def test_concurrent_records_of_one_rollout_get_distinct_positions(
    store: CaptureStore, store_url: str
) -> None:
    async with open_store(store_url, run="run-1") as other:
        await asyncio.gather(
            *(
                client.lineage.record(make_commit(model_call_id=f"call-{number}-{which}"))
                for number in range(10)
                for which, client in enumerate((store, other))
            )
        )
    rows = await rows_of(store_url, tables.ledger_calls)
    assert sorted(row["position"] for row in rows) == list(range(1, 21))


async def test_what_is_recorded_at_the_same_time_is_kept_or_refused_each_for_itself(
    store: CaptureStore, store_url: str
) -> None:
    await store.lineage.record(make_commit(rollout_id="rollout-3"))
    await store.source.freeze("rollout-5")
    await store.source.retire(["rollout-7"])
    before = store.stats()["transactions"]
    answers = await asyncio.gather(
        *(
            store.lineage.record(make_commit(rollout_id=f"rollout-{n}", response_id="other"))
            for n in range(20)
        ),
        *(store.lineage.record_failure(f"rollout-{n}", "call-9", "lost") for n in range(20)),
        return_exceptions=True,
    )
    conflicts = {number: answer for number, answer in enumerate(answers) if answer is not None}
    assert list(conflicts) == [3]
    assert isinstance(conflicts[3], PayloadConflictError)
    if store_url.startswith("sqlite"):
        assert store.stats()["transactions"] - before < 10  # a flush of the disk each
    rows = {row["rollout_id"]: row for row in await rows_of(store_url, tables.ledger_calls)}
    assert rows.keys() == {f"rollout-{n}" for n in range(20)} - {"rollout-7"}
    assert {name for name, row in rows.items() if row["response_id"] != "other"} == {"rollout-3"}
    failed = {row["rollout_id"] for row in await rows_of(store_url, tables.ledger_failures)}
    assert failed == rows.keys()
    assert (await store.source.freeze("rollout-5")).version > 1


@pytest.mark.parametrize(
    ("commit", "says"),
    [
        ({"rollout_id": "r"}, "CaptureLedgerCommit"),
        (make_commit().model_copy(update={"rollout_id": "a/b"}), "rollout_id"),
        (make_commit(response_id="nul\0"), r"record\.response_id"),
        (make_commit(weight_version=2**63), r"record\.weight_version"),
        (make_commit().model_copy(update={"request_items": [{"content": 5}]}), "request_items"),
        (make_commit().model_copy(update={"staging_chain": ("",)}), "staging_chain"),
        (
            make_commit().model_copy(
                update={"record": make_commit().record.model_copy(update={"cum_len": 9})}
            ),
            "record",
        ),
    ],
)
async def test_a_malformed_commit_is_refused_by_name_before_anything_is_written(
    store: CaptureStore, commit: Any, says: str
) -> None:
    with pytest.raises(InvalidRecordError, match=says):
        await store.lineage.record(commit)
    assert not await store.lineage.has_rows("rollout-1")


@pytest.mark.parametrize(("call", "reason"), [("", "r"), ("c\0", "r"), ("c", ""), ("c", "r\0"), ("c", 5)])
async def test_a_malformed_failure_is_refused(store: CaptureStore, call: str, reason: Any) -> None:
    with pytest.raises(InvalidRecordError):
        await store.lineage.record_failure("rollout-1", call, reason)
    assert not await store.lineage.has_rows("rollout-1")
