"""The staging store: what was staged is there, whole and once, and comes back verified."""

from __future__ import annotations

import array
import math
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, event

from tests.database.test_transactions import Points, connection_lost, failing, serialization_failure
from tests.support.ledger import make_commit
from tests.support.rows import rows_of, run_sql
from tests.support.staged import family, stage
from tokencustody import AttachedBuffer, CaptureStore, SqlStagingStore
from tokencustody.database.url import parse_url
from tokencustody.errors import (
    CorruptEntryError,
    InvalidRecordError,
    LineageError,
    SchemaMismatchError,
    StagedCallMissingError,
    StoreClosedError,
    StoreUnavailableError,
)
from tokencustody.schema import tables
from tokencustody.staging.protocols import StagingSink, StagingSource
from tokencustody.staging.records import StagedCallBaseSnapshot, StagedCallRecord, StageResult
from tokencustody.txn import staged_calls

ATTACHMENTS: dict[str, Any] = {
    "bytes": b"\0\xff",
    "text": "naïve \0",
    "json": {"b": [1, 10**30, None, True], "a": {"": math.inf}},
    "array": array.array("f", [1.5, -2.0]),
}
READ_BACK = ATTACHMENTS | {"array": AttachedBuffer("<f4", (2,), array.array("f", [1.5, -2.0]).tobytes())}
KEYS = ["r/a", "r/b", "r/c", "r/d"]


@pytest.fixture
def staging(store_url: str) -> Iterator[SqlStagingStore]:
    """A staging store on a new database, once on SQLite and once on PostgreSQL."""
    with SqlStagingStore(store_url, run="run-1", writer="test-writer") as opened:
        yield opened


@pytest.fixture
def staged(staging: SqlStagingStore) -> SqlStagingStore:
    """A staging store that holds a rollout of four calls."""
    for call in family():
        assert staging.stage(call.snapshot).ok
    return staging


def base(call: StagedCallRecord) -> StagedCallBaseSnapshot:
    return StagedCallBaseSnapshot.model_validate(call.model_dump(exclude={"extras"}))


def test_the_store_is_a_sink_and_a_source(staging: SqlStagingStore) -> None:
    assert isinstance(staging, StagingSink)
    assert isinstance(staging, StagingSource)


# Staging


def test_what_was_staged_comes_back_in_the_order_of_the_keys(staged: SqlStagingStore) -> None:
    calls = {call.record.staging_key: base(call.snapshot) for call in family()}
    for keys in (KEYS, KEYS[::-1], ["r/c"], ("r/b", "r/a", "r/b"), []):
        assert staged.fetch(keys) == [calls[key] for key in keys]
    assert staged.fetch_extras(["r/c", "r/a"]) == [{"routes": [[1, 2]]}, None]
    assert staged.fetch_attachments("r/a") == {}


async def test_a_staged_row_says_by_whom_it_was_written(staging: SqlStagingStore, store_url: str) -> None:
    staging.stage(stage("call-1").snapshot, attachments=ATTACHMENTS)
    (row,) = await rows_of(store_url, tables.staged_calls)
    assert (row["run"], row["written_by"], row["token_width"]) == ("run-1", "test-writer", 2)
    assert len(await rows_of(store_url, tables.staged_attachments)) == len(ATTACHMENTS)


def test_attachments_come_back_as_they_were_given(staging: SqlStagingStore) -> None:
    assert staging.stage(stage("call-1").snapshot, attachments=ATTACHMENTS).ok
    assert staging.fetch_attachments("r/call-1") == READ_BACK


@pytest.mark.serializable
async def test_the_same_call_again_is_a_success_and_one_row(staging: SqlStagingStore, store_url: str) -> None:
    call = stage("call-1", extras={"a": 1, "b": [2.5]}).snapshot
    reordered = stage("call-1", extras={"b": [2.5], "a": 1}).snapshot
    for record in (call, call, reordered):
        result = staging.stage(record, attachments=ATTACHMENTS)
        assert result == StageResult(ok=True, staging_key="r/call-1")
    assert len(await rows_of(store_url, tables.staged_calls)) == 1
    assert len(await rows_of(store_url, tables.staged_attachments)) == len(ATTACHMENTS)


def below_float32() -> StagedCallRecord:
    record = stage("b", stage("a")).snapshot
    record.generation_log_probs_delta[-1] = math.nextafter(record.generation_log_probs_delta[-1], 0)
    return record


OTHER_DATA: dict[str, tuple[Callable[[], StagedCallRecord], str]] = {
    "tokens": (lambda: stage("b", stage("a"), added=[8888]).snapshot, "token_ids_delta"),
    "log probability": (below_float32, "generation_log_probs_delta"),
    "mask": (
        lambda: stage("b", stage("a"), mask=[1.0, 0.0, 1.0]).snapshot,
        "generation_log_probs_delta, token_mask_delta",
    ),
    "zero": (lambda: stage("b", stage("a"), mask=[-0.0, 0.0, 1.0]).snapshot, "token_mask_delta"),
    "extras": (lambda: stage("b", stage("a"), extras={}).snapshot, "extras"),
    "weights": (lambda: stage("b", stage("a"), weight_version=2).snapshot, "weight_version"),
    "parent": (lambda: stage("b", stage("z")).snapshot, "parent_call_id"),
    "place": (lambda: stage("b", stage("a"), prev_len=4).snapshot, "prev_len, cum_len"),
    "chain": (lambda: stage("b", stage("a"), chain_hash="0" * 64).snapshot, "chain_hash"),
    "sequence": (lambda: stage("b", stage("a"), cumulative_hash="0" * 64).snapshot, "cumulative_hash"),
}


@pytest.mark.parametrize(("other", "differing"), OTHER_DATA.values(), ids=OTHER_DATA)
def test_other_data_under_the_key_is_a_failure_that_says_what_differs_and_the_first_stays(
    staging: SqlStagingStore, other: Callable[[], StagedCallRecord], differing: str
) -> None:
    first = stage("b", stage("a")).snapshot
    staging.stage(first)
    result = staging.stage(other())
    assert (result.ok, result.staging_key) == (False, None)
    assert result.error is not None
    assert "staged call b of rollout r was staged before with other data" in result.error
    assert differing in result.error
    assert "8888" not in result.error
    assert staging.fetch(["r/b"]) == [base(first)]


@pytest.mark.parametrize(
    "attachments",
    [None, {}, {"a": b"x", "b": "y", "c": 1}, {"a": b"x"}, {"a": b"x", "b": b"y"}, {"a": b"x", "b": "z"}],
)
def test_other_attachments_of_the_same_record_are_a_failure_that_names_them(
    staging: SqlStagingStore, attachments: dict[str, Any] | None
) -> None:
    call = stage("call-1").snapshot
    staging.stage(call, attachments={"a": b"x", "b": "y"})
    result = staging.stage(call, attachments=attachments)
    named = {name for name in "abc" if f"attachment {name}" in (result.error or "")}
    assert not result.ok
    assert named == {
        name for name in "abc" if (attachments or {}).get(name) != {"a": b"x", "b": "y"}.get(name)
    }
    assert staging.fetch_attachments("r/call-1") == {"a": b"x", "b": "y"}


def with_field(name: str, value: Any) -> Callable[[], StagedCallRecord]:
    return lambda: stage("call-1").snapshot.model_copy(update={name: value})


MALFORMED: dict[str, tuple[Callable[[], StagedCallRecord], str]] = {
    "changed": (with_field("weight_version", 2), "digest does not match"),
    "rollout id": (lambda: stage("call-1", rollout="r/1").snapshot, "rollout_id 'r/1'"),
    "call id": (lambda: stage("c" * 513).snapshot, "model_call_id has 513 characters"),
    "NUL": (lambda: stage("c\0").snapshot, "contains NUL"),
    "parent": (lambda: stage("b", stage("a\0")).snapshot, "parent_call_id"),
    "weights": (
        lambda: stage("call-1", weight_version=2**63).snapshot,
        "weight_version: 9223372036854775808",
    ),
    "surrogate": (with_field("model_call_id", "\ud800"), "model_call_id: "),
}


@pytest.mark.parametrize(("malformed", "said"), MALFORMED.values(), ids=MALFORMED)
async def test_a_malformed_record_is_a_failure_that_says_why_and_leaves_no_row(
    staging: SqlStagingStore, store_url: str, malformed: Callable[[], StagedCallRecord], said: str
) -> None:
    staging.stage(stage("another").snapshot)
    result = staging.stage(malformed())
    assert not result.ok
    assert said in (result.error or "")
    assert len(await rows_of(store_url, tables.staged_calls)) == 1


async def test_a_call_with_an_attachment_that_cannot_be_stored_is_rejected_whole(
    staging: SqlStagingStore, store_url: str
) -> None:
    staging.stage(stage("another").snapshot)
    result = staging.stage(stage("call-1").snapshot, attachments={"fine": b"x", "odd": (1, 2)})
    assert not result.ok
    assert "attachment 'odd'" in (result.error or "")
    assert len(await rows_of(store_url, tables.staged_calls)) == 1
    assert await rows_of(store_url, tables.staged_attachments) == []


def test_what_is_no_record_or_no_mapping_is_the_callers_error(staging: SqlStagingStore) -> None:
    record: Any
    for record in (None, {}, "r/call-1", object()):
        with pytest.raises(TypeError, match="record must be a StagedCallRecord"):
            staging.stage(record)
    attachments: Any = [1]
    with pytest.raises(TypeError, match="attachments must be a mapping"):
        staging.stage(stage("call-1").snapshot, attachments=attachments)


def test_a_database_that_cannot_be_reached_is_a_failure_for_the_sink_and_an_error_for_the_source(
    tmp_path: Any,
) -> None:
    with SqlStagingStore(tmp_path / "no-such-directory" / "x.db", deadline=1.0) as staging:
        result = staging.stage(stage("call-1").snapshot)
        assert not result.ok
        assert "x.db is not available" in (result.error or "")
        with pytest.raises(StoreUnavailableError):
            staging.fetch(["r/call-1"])


def test_a_database_without_the_tables_is_an_error_and_no_failed_call(empty_postgres_url: str) -> None:
    with SqlStagingStore(empty_postgres_url) as staging, pytest.raises(SchemaMismatchError):
        staging.stage(stage("call-1").snapshot)


@pytest.mark.serializable
@pytest.mark.parametrize("point", ["before commit", "after commit, before acknowledgement"])
@pytest.mark.parametrize("error", [serialization_failure, connection_lost])
async def test_a_call_whose_commit_failed_or_lost_its_answer_is_staged_once(
    staging: SqlStagingStore, store_url: str, faults: Points, point: str, error: Callable[[], BaseException]
) -> None:
    faults[point] = failing(2, error)
    assert staging.stage(stage("call-1").snapshot, attachments=ATTACHMENTS).ok
    assert len(await rows_of(store_url, tables.staged_calls)) == 1
    assert staging.fetch_attachments("r/call-1") == READ_BACK


async def test_a_call_that_was_interrupted_before_its_commit_leaves_neither_row_nor_attachment(
    staging: SqlStagingStore, store_url: str, faults: Points
) -> None:
    staging.stage(stage("another").snapshot)
    faults["before commit"] = failing(1, lambda: ZeroDivisionError("no fault of the database"))
    with pytest.raises(ZeroDivisionError):
        staging.stage(stage("call-1").snapshot, attachments=ATTACHMENTS)
    assert len(await rows_of(store_url, tables.staged_calls)) == 1
    assert await rows_of(store_url, tables.staged_attachments) == []


# Reading


def test_missing_keys_are_one_error_that_names_them_all(staged: SqlStagingStore) -> None:
    for read in (staged.fetch, staged.fetch_extras, staged.fetch_prefix_token_ids):
        with pytest.raises(LookupError, match=r"r/x.*no-slash") as missing:
            read(["r/x", "r/a", "no-slash", "r/x", "r\0/a", "r/", "/a", "q/a"])
        assert isinstance(missing.value, StagedCallMissingError)
        assert missing.value.staging_keys == ["r/x", "no-slash", "r\0/a", "r/", "/a", "q/a"]
    for key in ("r/x", "no-slash"):
        with pytest.raises(StagedCallMissingError, match=key):
            staged.fetch_attachments(key)


def test_a_call_id_may_have_slashes(staging: SqlStagingStore) -> None:
    for call in ("a/b", "/", "a"):
        assert staging.stage(stage(call).snapshot).staging_key == f"r/{call}"
    assert [call.model_call_id for call in staging.fetch(["r//", "r/a/b", "r/a"])] == ["/", "a/b", "a"]


def test_keys_that_are_no_sequence_of_texts_are_the_callers_error(staging: SqlStagingStore) -> None:
    keys: Any
    for keys in ("r/a", b"r/a", None, {"r/a"}, [1], [b"r/a"]):
        for call in (staging.fetch, staging.fetch_extras, staging.fetch_prefix_token_ids, staging.delete):
            with pytest.raises(TypeError, match="staging key"):
                call(keys)


@pytest.mark.serializable
def test_a_batch_of_any_size_is_read_and_deleted(
    staged: SqlStagingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (1, 2, 3, 4):
        monkeypatch.setattr(staged_calls, "_KEYS_PER_QUERY", size)
        assert [call.staging_key for call in staged.fetch(KEYS)] == KEYS
    monkeypatch.setattr(staged_calls, "_KEYS_PER_QUERY", 3)
    assert staged.delete(KEYS) == KEYS


def test_runs_are_apart(staged: SqlStagingStore, store_url: str) -> None:
    with SqlStagingStore(store_url, run="run-2") as other:
        assert other.stage(stage("a", weight_version=7).snapshot).ok
        assert other.fetch(["r/a"])[0].weight_version == 7
        with pytest.raises(StagedCallMissingError):
            other.fetch(["r/b"])
        assert other.delete(["r/a", "r/b"]) == ["r/a"]
    assert len(staged.fetch(KEYS)) == 4


DAMAGES = [
    "UPDATE staged_calls SET payload = (SELECT payload FROM staged_calls WHERE model_call_id = 'c')",
    "UPDATE staged_calls SET weight_version = weight_version + 1",
    "UPDATE staged_calls SET parent_call_id = 'd'",
    "UPDATE staged_calls SET chain_hash = cumulative_hash",
    "UPDATE staged_calls SET model_call_id = 'e'",
]


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_call_that_was_changed_in_the_database_is_an_error_that_names_it(
    staged: SqlStagingStore, store_url: str, damage: str
) -> None:
    key = "r/e" if "'e'" in damage else "r/b"
    await run_sql(store_url, f"{damage} WHERE model_call_id = 'b'")
    with pytest.raises(CorruptEntryError, match=f"staged call {key[2:]} of rollout r"):
        staged.fetch(["r/a", key])
    assert len(staged.fetch(["r/a", "r/c", "r/d"])) == 3


async def test_staging_over_a_call_that_no_longer_decodes_is_a_failure_that_names_it(
    staged: SqlStagingStore, store_url: str
) -> None:
    await run_sql(store_url, "UPDATE staged_calls SET payload = substr(payload, 2) WHERE model_call_id = 'a'")
    result = staged.stage(stage("a", added=[1, 2], sampled=[3]).snapshot)
    assert not result.ok
    assert "staged call a of rollout r: the stored payload does not decode" in (result.error or "")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("text", "data = CAST(data AS TEXT)"),
        *(("buffer", f"shape = '{shape}'") for shape in ('{"a":1}', "3", "[")),
    ],
)
def test_an_attachment_whose_row_was_damaged_is_a_named_error(
    sqlite_url: str, name: str, change: str
) -> None:
    with SqlStagingStore(sqlite_url) as staging:
        staging.stage(stage("b").snapshot, attachments={"text": b"x", "buffer": bytearray(b"xyz")})
        with sqlite3.connect(parse_url(sqlite_url).dsn) as file:
            file.execute(f"UPDATE staged_attachments SET {change} WHERE name = '{name}'")
        file.close()
        with pytest.raises(CorruptEntryError, match=f"staged call b of rollout r: attachment '{name}'"):
            staging.fetch_attachments("r/b")


async def test_extras_and_attachments_that_were_changed_in_the_database_are_errors(
    staging: SqlStagingStore, store_url: str
) -> None:
    staging.stage(stage("b", extras={"k": 1}).snapshot, attachments={"a": "x"})
    await run_sql(store_url, "UPDATE staged_calls SET extras = NULL")
    await run_sql(store_url, "UPDATE staged_attachments SET data = payload FROM staged_calls")
    with pytest.raises(CorruptEntryError, match="staged call b of rollout r: the stored extras"):
        staging.fetch_extras(["r/b"])
    with pytest.raises(CorruptEntryError, match="staged call b of rollout r: attachment 'a'"):
        staging.fetch_attachments("r/b")


@pytest.mark.parametrize("change", ["model_call_id = 'c'", "name = 'z'", "kind = 'text'"])
async def test_an_attachment_of_another_call_name_or_kind_is_corrupt(
    staging: SqlStagingStore, store_url: str, change: str
) -> None:
    for call in "bc":
        staging.stage(stage(call).snapshot, attachments={call: b"x"})
    await run_sql(store_url, f"UPDATE staged_attachments SET {change} WHERE name = 'b'")
    # Of another kind it is still one of those; under another name or call it is one more or fewer.
    said = (
        "attachment 'b' is not what was attached to this call"
        if "kind" in change
        else "some were removed, added"
    )
    with pytest.raises(CorruptEntryError, match=said):
        staging.fetch_attachments("r/c" if "call" in change else "r/b")


# Prefixes


@contextmanager
def counting_statements(about: str) -> Iterator[list[str]]:
    """Collect the statements of every engine that mention `about`."""
    seen: list[str] = []

    def note(_conn: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if about in statement:
            seen.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def test_a_chain_gives_the_whole_token_sequence_in_one_query(staged: SqlStagingStore) -> None:
    calls = {call.record.staging_key: call.token_ids for call in family()}
    staged.fetch(KEYS)
    with counting_statements("staged_calls") as statements:
        assert staged.fetch_prefix_token_ids(["r/a", "r/b", "r/c"]) == calls["r/c"]
    assert len(statements) == 1
    assert staged.fetch_prefix_token_ids(["r/a", "r/d"]) == calls["r/d"]
    assert staged.fetch_prefix_token_ids(["r/a"]) == calls["r/a"]
    assert staged.fetch_prefix_token_ids([]) == []


NO_CHAINS = {
    "in another order": (["r/b", "r/a"], "staged call b of rollout r follows 3 tokens"),
    "with a gap": (["r/a", "r/c"], "staged call c of rollout r follows 6 tokens"),
    "without its root": (["r/b", "r/c"], "staged call b of rollout r follows 3 tokens"),
    "with a call twice": (["r/a", "r/b", "r/b"], "staged call b of rollout r follows 3 tokens"),
    "with a cousin": (["r/other", "r/b"], "staged call b of rollout r: the chain's token ids"),
    "with a parent too many": (["r/a", "r/other"], "staged call other of rollout r follows 0 tokens"),
}


@pytest.mark.parametrize(("chain", "said"), NO_CHAINS.values(), ids=NO_CHAINS)
def test_keys_that_are_no_chain_are_an_error_that_names_the_link(
    staged: SqlStagingStore, chain: list[str], said: str
) -> None:
    staged.stage(stage("other", added=[8888, 2]).snapshot)
    with pytest.raises(LineageError, match=said) as refused:
        staged.fetch_prefix_token_ids(chain)
    assert "8888" not in str(refused.value)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        ("payload = (SELECT payload FROM staged_calls WHERE model_call_id = 'c')", LineageError),
        ("payload = (SELECT payload FROM staged_calls WHERE model_call_id = 'twin')", CorruptEntryError),
        ("payload = substr(payload, 2)", CorruptEntryError),
        ("delta_len = 4, cum_len = 7", LineageError),
    ],
)
async def test_a_link_that_was_changed_in_the_database_is_named(
    staged: SqlStagingStore, store_url: str, damage: str, error: type[Exception]
) -> None:
    staged.stage(stage("twin", added=[4], sampled=[5, 8]).snapshot)
    await run_sql(store_url, f"UPDATE staged_calls SET {damage} WHERE model_call_id = 'b'")
    with pytest.raises(error, match="staged call b of rollout r"):
        staged.fetch_prefix_token_ids(["r/a", "r/b", "r/c"])


# Removal


async def test_deleted_calls_are_gone_with_their_attachments_and_their_keys_can_be_used_again(
    staged: SqlStagingStore, store_url: str
) -> None:
    staged.stage(stage("x").snapshot, attachments=ATTACHMENTS)
    assert staged.delete(["r/x", "r/none", "no-slash", "r/b", "r/x"]) == ["r/x", "r/b"]
    assert staged.delete(["r/x", "r/b"]) == []
    assert staged.delete([]) == []
    assert await rows_of(store_url, tables.staged_attachments) == []
    assert len(staged.fetch(["r/a", "r/c", "r/d"])) == 3
    assert staged.stage(stage("x", weight_version=2).snapshot).ok


@pytest.mark.serializable
def test_a_deletion_whose_answer_was_lost_still_says_what_it_removed(
    staged: SqlStagingStore, faults: Points
) -> None:
    faults["after commit, before acknowledgement"] = failing(1, connection_lost)
    assert staged.delete(["r/a", "r/none"]) == ["r/a"]


async def test_orphans_are_what_no_ledger_row_names_in_rollouts_that_are_fenced_or_gone(
    store: CaptureStore,
) -> None:
    for rollout in ("open", "frozen", "retired", "gone"):
        for call in ("named", "unnamed"):
            assert store.staging.stage(stage(call, rollout=rollout).snapshot).ok
        await store.lineage.record(make_commit(rollout, "named"))
    await store.source.freeze("frozen")
    await store.source.retire(["retired"])
    await store.source.delete(["gone"])
    orphans = ["frozen/unnamed", "gone/named", "gone/unnamed", "retired/named", "retired/unnamed"]
    assert store.staging.orphans() == store.staging.orphans("run-1") == orphans
    assert store.staging.orphans("run-2") == []
    assert store.staging.delete(store.staging.orphans()) == orphans
    assert store.staging.orphans() == []
    assert len(store.staging.fetch(["open/named", "open/unnamed", "frozen/named"])) == 3


async def test_a_call_that_another_rollouts_ledger_took_over_is_no_orphan(store: CaptureStore) -> None:
    for call in ("kept", "lost"):
        store.staging.stage(stage(call, rollout="first").snapshot)
    await store.lineage.record(make_commit("first", "kept"))
    await store.lineage.import_rows("second", await store.lineage.export_rows("first"))
    await store.lineage.retire(["first"])
    assert store.staging.orphans() == ["first/lost"]


async def test_a_call_younger_than_the_asked_age_is_no_orphan_yet(
    staging: SqlStagingStore, store_url: str
) -> None:
    for call in ("old", "young"):
        staging.stage(stage(call).snapshot)
    old = "2020-01-01 00:00:00.000000"
    await run_sql(store_url, f"UPDATE staged_calls SET staged_at = '{old}' WHERE model_call_id = 'old'")
    assert staging.orphans(min_age=3600) == ["r/old"]
    assert staging.orphans() == ["r/old", "r/young"]


def test_a_run_that_is_no_id_is_refused(staging: SqlStagingStore) -> None:
    with pytest.raises(InvalidRecordError, match="run"):
        staging.orphans("a/b")


@pytest.mark.serializable
async def test_a_fence_neither_hinders_staging_nor_removes_what_was_staged(store: CaptureStore) -> None:
    await store.source.freeze("r")
    assert store.staging.stage(stage("after-freeze").snapshot).ok
    await store.source.retire(["r"])
    assert store.staging.stage(stage("after-retirement").snapshot, attachments=ATTACHMENTS).ok
    await store.source.delete(["r"])
    assert len(store.staging.fetch(["r/after-freeze", "r/after-retirement"])) == 2


# Lifetime


def test_a_closed_store_says_so_and_can_be_closed_again(store_url: str) -> None:
    unused = SqlStagingStore(store_url)
    used = SqlStagingStore(store_url)
    used.stage(stage("call-1").snapshot)
    for staging in (unused, used):
        staging.close()
        staging.close()
        for call in (lambda s: s.fetch(["r/call-1"]), lambda s: s.stage(stage("call-1").snapshot)):
            with pytest.raises(StoreClosedError, match="closed"):
                call(staging)


async def test_an_open_store_stages_and_closes_it_all(store: CaptureStore) -> None:
    assert store.staging.run == store.run
    assert store.staging.stage(stage("call-1").snapshot).ok
    await store.close()
    with pytest.raises(StoreClosedError):
        store.staging.fetch(["r/call-1"])
