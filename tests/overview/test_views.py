"""The audit views say the same on both databases, and what the tables and the rest of the library say."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.support import filling
from tests.support.audited import RUN, ask, fill, set_parent
from tests.support.entries import make_entry
from tests.txn import plans
from tokencustody import open_store
from tokencustody.database.url import parse_url
from tokencustody.overview.reading import RolloutReader
from tokencustody.overview.summaries import Reason
from tokencustody.schema.migrations import views_0005
from tokencustody.schema.tables import entries, exports, ledger_calls, snapshot_versions, staged_calls
from tokencustody.store import SqlStagingStore

VIEWS = sorted(views_0005.views("sqlite"))
# What each database makes anew.
ITS_OWN = {"sealed_sha256", "row_sha256", "snapshot_id", "event_id", "since"}


@pytest.fixture
def url(store_url: str) -> str:
    """A database that holds one rollout of each kind."""
    fill(store_url)
    return store_url


def of(url: str, view: str, rollout_id: str, columns: str = "*") -> list[dict[str, Any]]:
    return ask(url, f"SELECT {columns} FROM {view} WHERE run = '{RUN}' AND rollout_id = '{rollout_id}'")


def moment(value: Any) -> datetime | None:
    if value is None or isinstance(value, datetime):
        return value
    return datetime.fromisoformat(value).replace(tzinfo=UTC)


@pytest.mark.quick("Everything is a row")
def test_both_databases_give_the_same_columns_and_rows(sqlite_url: str, postgres_url: str) -> None:
    for url in (sqlite_url, postgres_url):
        fill(url)
    for view in VIEWS:
        one, other = (ask(url, f"SELECT * FROM {view}") for url in (sqlite_url, postgres_url))
        assert one, f"{view} shows something"
        assert [*one[0]] == [*other[0]], view
        if view == "audit_integrity":
            continue  # of which SQLite computes nothing by itself
        same = [
            sorted(
                (
                    {name: value for name, value in row.items() if name not in ITS_OWN and name[-3:] != "_at"}
                    for row in rows
                ),
                key=repr_of_key,
            )
            for rows in (one, other)
        ]
        assert same[0] == same[1], view


def repr_of_key(row: dict[str, Any]) -> str:
    names = ("rollout_id", "model_call_id", "position", "version", "kind", "reason", "name")
    return repr([row.get(name) for name in names])


def words(reason: Reason) -> str:
    said = [
        str(reason.kind),
        reason.model_call_id,
        reason.differing_fields and f"({reason.differing_fields})",
    ]
    return " ".join([*filter(None, said), *([f"x{reason.times}"] if reason.times > 1 else [])])


def test_audit_rollouts_agrees_with_the_command_rollouts(url: str) -> None:
    async def read() -> Any:
        async with RolloutReader(url) as reader:
            return (await reader.rollouts()).rollouts

    told = {each.rollout_id: each for each in asyncio.run(read())}
    rows = {row["rollout_id"]: row for row in ask(url, "SELECT * FROM audit_rollouts")}
    assert rows.keys() == told.keys() == {
        "open", "clean", "bad", "consumed", "abandoned", "dangled", "chain", "ledger"
    }  # fmt: skip
    for rollout_id, each in told.items():
        row = rows[rollout_id]
        for name in (
            *(
                "run",
                "state",
                "version",
                "snapshot_id",
                "incomplete",
                "calls",
                "prompt_tokens",
                "generated_tokens",
            ),
            *("ledger_calls", "ledger_failures", "retired_by"),
        ):
            assert row[name] == getattr(each, name), (rollout_id, name)
        for name in ("opened_at", "frozen_at", "retired_at"):
            assert moment(row[name]) == getattr(each, name), (rollout_id, name)
        assert row["pending_intents"] == len(each.not_yet_captured)
        assert row["why"] == "; ".join(map(words, each.reasons))
        masks = [why for why in of(url, "audit_incomplete", rollout_id) if why["masks_rollout"]]
        assert len(masks) == sum(reason.times for reason in each.reasons)
        assert bool(row["incomplete"]) == bool(masks)
    assert rows["bad"]["why"] == (
        "refusal_conflict call-5 (code); mark call-3 x2; mark; conflict call-1 (model); dangling_intent call-9"
    )
    assert (rows["open"]["why"], rows["open"]["pending_intents"]) == ("", 1)
    assert (rows["dangled"]["why"], rows["abandoned"]["why"]) == ("dangling_intent", "mark call-1")
    assert (rows["clean"]["exports"], rows["bad"]["exports"]) == (1, 0)
    assert moment(rows["clean"]["exported_at"]) is not None


def test_whole_bytes_are_those_of_the_payloads_without_sharing(url: str) -> None:
    async def put_whole() -> int:
        from tokencustody.codec.calls import pack_entry

        async with open_store(url, run=RUN) as store:
            snapshot = await store.source.freeze("chain")
        return sum(len(pack_entry(entry).payload) for entry in snapshot.entries)

    (row,) = of(url, "audit_rollouts", "chain")
    assert row["stored_bytes"] < row["whole_bytes"] == asyncio.run(put_whole())
    calls = of(url, "audit_calls", "chain")
    assert sum(call["stored_bytes"] for call in calls) == row["stored_bytes"]
    assert sum(call["whole_bytes"] for call in calls) == row["whole_bytes"]


@pytest.mark.parametrize(
    ("view", "table", "left_out"),
    [
        ("audit_calls", entries, {"payload"}),
        ("audit_versions", snapshot_versions, set()),
        ("audit_ledger", ledger_calls, set()),
        ("audit_staging", staged_calls, {"payload", "extras"}),
        ("audit_exports", exports, set()),
    ],
)
def test_no_audit_column_is_missing_and_no_array_is_shown(
    url: str, view: str, table: Any, left_out: set[str]
) -> None:
    shown = {*ask(url, f"SELECT * FROM {view}")[0]}
    assert {*table.c.keys()} - shown == left_out


@pytest.mark.quick("Everything is a row")
def test_incomplete_has_a_row_for_each_reason(url: str) -> None:
    found = [
        tuple(
            row[name]
            for name in ("rollout_id", "reason", "model_call_id", "detail", "masks_rollout", "written_by")
        )
        for row in ask(url, "SELECT * FROM audit_incomplete")
    ]
    assert sorted(found) == sorted([
        ("bad", "refusal_conflict", "call-5", "code", True, "writer-1"),
        ("bad", "mark", "call-3", "", True, "writer-1"),
        ("bad", "mark", "call-3", "", True, "writer-1"),
        ("bad", "mark", "", "", True, "writer-1"),
        ("bad", "conflict", "call-1", "model", True, "writer-2"),
        ("bad", "dangling_intent", "call-9", "", True, "writer-1"),
        ("abandoned", "mark", "call-1", "", True, "writer-1"),
        ("dangled", "dangling_intent", "", "", True, ""),
        ("chain", "unresolved_parent", "lost", "no_match", False, "writer-1"),
        ("ledger", "ledger_failure", "call-2", "worker_capture_failed", False, "writer-1"),
        ("ledger", "ledger_failure", "call-3", "ledger_row_missing_response_id", False, "writer-1"),
    ])  # fmt: skip
    assert all(moment(row["since"]) for row in ask(url, "SELECT * FROM audit_incomplete"))


def test_intents_say_what_became_of_each(url: str) -> None:
    states = {
        (row["rollout_id"], row["model_call_id"]): (row["state"], row["stored_by"])
        for row in ask(url, "SELECT * FROM audit_intents")
    }
    assert states == {
        ("open", "call-1"): ("stored", "writer-1"),
        ("open", "call-2"): ("pending", None),
        ("bad", "call-5"): ("refused", None),
        ("bad", "call-9"): ("dangling", None),
    }


@pytest.mark.quick("Everything is a row")
def test_conflicts_name_both_payloads_and_both_writers(url: str) -> None:
    refusal, conflict = sorted(of(url, "audit_conflicts", "bad"), key=lambda row: row["version"])
    (call,) = of(url, "audit_calls", "bad")
    assert conflict["kind"] == "conflict"
    assert conflict["first_payload_sha256"] == call["payload_sha256"] != conflict["second_payload_sha256"]
    assert (conflict["first_written_by"], conflict["second_written_by"]) == ("writer-1", "writer-2")
    assert moment(conflict["first_written_at"]) == moment(call["committed_at"])
    assert (refusal["kind"], refusal["first_written_by"], refusal["differing_fields"]) == (
        "refusal_conflict", "writer-1", "code"
    )  # fmt: skip


def test_versions_keep_the_history_of_what_is_gone(url: str) -> None:
    events = [
        row["event"] for row in sorted(of(url, "audit_versions", "consumed"), key=lambda row: row["version"])
    ]
    assert events == ["open", "freeze", "drop"]


def test_lineage_tells_depth_root_and_path(url: str) -> None:
    rows = {row["model_call_id"]: row for row in of(url, "audit_lineage", "chain")}
    assert len(rows) == 7
    for number in range(6):
        row = rows[f"call-{number}"]
        path = " > ".join(f"call-{each}" for each in range(number + 1))
        assert (row["depth"], row["root_call_id"], row["path"], row["ending"]) == (
            number,
            "call-0",
            path,
            "root",
        )
    assert (rows["lost"]["depth"], rows["lost"]["parent_resolution"]) == (0, "unresolved")


def test_lineage_loses_no_call_where_parents_are_missing_or_form_a_circle(url: str) -> None:
    # 0 is its own parent's child: a circle of two with a call below it; 3 has lost its parent.
    set_parent(url, "chain", {"call-0": "call-1", "call-3": "gone", "lost": "lost"})
    rows = {row["model_call_id"]: row for row in of(url, "audit_lineage", "chain")}
    assert {
        call: (row["ending"], row["missing_call_id"], row["depth"], row["path"]) for call, row in rows.items()
    } == {
        "call-0": ("circle", None, None, None),
        "call-1": ("circle", None, None, None),
        "call-2": ("circle", None, None, None),
        "lost": ("circle", None, None, None),
        "call-3": ("missing", "gone", 0, "call-3"),
        "call-4": ("missing", "gone", 1, "call-3 > call-4"),
        "call-5": ("missing", "gone", 2, "call-3 > call-4 > call-5"),
    }


def test_ledger_is_in_commit_order(url: str) -> None:
    rows = sorted(of(url, "audit_ledger", "ledger"), key=lambda row: row["position"])
    assert [(row["position"], row["kind"], row["model_call_id"], row["reason"]) for row in rows] == [
        (1, "call", "call-1", None),
        (2, "failure", "call-2", "worker_capture_failed"),
        (3, "call", "call-3", None),
    ]


def test_staging_calls_those_orphans_that_the_store_does(url: str) -> None:
    rows = ask(url, "SELECT * FROM audit_staging")
    orphans = sorted(f"{row['rollout_id']}/{row['model_call_id']}" for row in rows if row["is_orphan"])
    with SqlStagingStore(url, run=RUN) as staging:
        assert staging.orphans() == orphans == ["ledger/call-9", "nowhere/call-1"]
    assert len(rows) == 4
    assert {(row["attachments"], row["attachment_bytes"]) for row in rows} == {(2, 6)}


def test_integrity_shows_a_hash_that_is_not_that_of_the_bytes(url: str) -> None:
    before = of(url, "audit_integrity", "ledger")
    assert {(row["kind"], row["name"]) for row in before} == {
        ("staged_call", ""), ("attachment", "raw"), ("attachment", "note")
    }  # fmt: skip
    if url.startswith("sqlite"):
        assert {(row["agrees"], row["recomputed_sha256"]) for row in before} == {(None, None)}
        return
    assert all(row["agrees"] for row in ask(url, "SELECT agrees FROM audit_integrity"))
    for table, column in (
        ("entries", "payload"),
        ("staged_calls", "payload"),
        ("staged_attachments", "data"),
    ):
        flip = f"UPDATE {table} SET {column} = set_byte({column}, 0, get_byte({column}, 0) # 1)"
        ask(url, flip)
        count = ask(url, f"SELECT count(*) AS rows FROM {table}")[0]["rows"]
        assert len(ask(url, "SELECT * FROM audit_integrity WHERE NOT agrees")) == count
        ask(url, flip)
        assert ask(url, "SELECT * FROM audit_integrity WHERE NOT agrees") == []


def test_exports_say_whether_they_are_of_the_present_snapshot(url: str) -> None:
    (mark,) = of(url, "audit_exports", "clean")
    assert (mark["destination"], bool(mark["is_current"]), bool(mark["is_held"])) == ("exported", True, True)


# Of the 20,000 entries of a full database.
STEPS_OF_A_SCAN = 20_000


@pytest.mark.parametrize("statistics", [False, True], ids=["unanalyzed", "analyzed"])
async def test_a_question_about_one_rollout_reads_no_other(store_url: str, statistics: bool) -> None:
    filling.keep_statistics(store_url)
    filling.fill(store_url, 20_000)
    if statistics:
        filling.analyze(store_url)
    asked = {view: f"SELECT * FROM {view} WHERE run = $1 AND rollout_id = $2" for view in VIEWS}
    if store_url.startswith("sqlite"):
        steps: dict[str, int] = {}
        with closing(sqlite3.connect(parse_url(store_url).dsn)) as connection:
            for view, statement in asked.items():
                taken: list[int] = []
                connection.set_progress_handler(lambda taken=taken: taken.append(1), 100)
                connection.execute(
                    statement.replace("$1", "?").replace("$2", "?"), ("filled", "filled-700")
                ).fetchall()
                steps[view] = 100 * len(taken)
        assert {view: count for view, count in steps.items() if count > STEPS_OF_A_SCAN / 2} == {}
        return
    explaining = await plans.of(store_url)
    try:
        for view, statement in asked.items():
            found = await explaining.explain(plans.Statement(view, statement, ("filled", "filled-700")))
            assert found or view == "audit_exports"
            assert [access for access in found if not access.is_keyed()] == []
    finally:
        await explaining.close()


def test_views_answer_about_an_entry_of_any_id(url: str) -> None:
    odd = "a'b\"\\ > c\n\x1b[31m/é🜚"

    async def put() -> None:
        async with open_store(url, run=RUN) as store:
            await store.sink.put(make_entry("odd", odd))

    asyncio.run(put())
    (row,) = of(url, "audit_lineage", "odd")
    assert (row["model_call_id"], row["path"], row["root_call_id"]) == (odd, odd, odd)
