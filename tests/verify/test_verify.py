"""Verification: nothing is found in a sound database, and everything that was planted is, with the call's name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from tests.support import databases
from tests.support.postgres import Server
from tests.verify.verifying import RUN, behind, change, fill, flip
from tokencustody.verify import RULES, Rule, verify

ZEROS = "0" * 64


@pytest.fixture(scope="module")
def filled_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("filled") / "captures.db"
    fill(str(path))
    return path


@pytest.fixture(scope="module")
def filled_postgres(postgres: Server, _migrated_template: str) -> Iterator[str]:
    name = databases.create(postgres, "filled", _migrated_template)
    try:
        fill(postgres.url_of(name))
        yield name
    finally:
        databases.drop(postgres, name)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A copy of the filled database, once of each kind."""
    if request.param == "sqlite":
        copy = tmp_path / "captures.db"
        shutil.copy(request.getfixturevalue("filled_sqlite"), copy)
        yield f"sqlite:///{copy}"
        return
    server: Server = request.getfixturevalue("postgres")
    with databases.fresh(server, request.getfixturevalue("filled_postgres")) as found:
        yield found


@pytest.mark.quick("Everything is a row")
def test_nothing_is_found_in_a_sound_database_of_every_shape(url: str) -> None:
    report = verify(url)

    assert report.findings == ()
    assert report.ok
    assert (report.counts.rollouts, report.counts.calls, report.counts.ledger_rows) == (18, 34, 13)
    assert (report.counts.staged_calls, report.counts.attachments, report.counts.retokenized) == (9, 4, 1)
    assert report.counts.parents_not_recorded == 1


def test_every_rule_says_what_it_demands() -> None:
    assert set(RULES) == set(Rule)


@dataclass(frozen=True)
class Planted:
    """What is done to the database, and the findings that it must make: rule, rollout, call."""

    do: Callable[[str], None]
    found: set[tuple[str, str, str]]


def _sql(statement: str, **values: Any) -> Callable[[str], None]:
    return lambda url: behind(url, lambda connection: _execute(connection, statement, values))


def _execute(connection: Any, statement: str, values: dict[str, Any]) -> None:
    assert connection.execute(text(statement), {"run": RUN, **values}).rowcount


def _change(table: str, column: str, to: Callable[[Any], Any] = flip, **where: Any) -> Callable[[str], None]:
    return lambda url: change(url, table, column, to, **where)


def _entry(
    column: str, to: Callable[[Any], Any] = flip, rollout: str = "linear", call: str = "call-1"
) -> Callable[[str], None]:
    return _change("entries", column, to, rollout_id=rollout, model_call_id=call)


def _row(
    table: str, column: str, call: str, to: Callable[[Any], Any] = flip, rollout: str = "staged", **where: Any
) -> Callable[[str], None]:
    return _change(table, column, to, rollout_id=rollout, model_call_id=call, **where)


def _fence(column: str, to: Callable[[Any], Any], rollout: str) -> Callable[[str], None]:
    return _change("fences", column, to, rollout_id=rollout)


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def _lost(rollout: str, *calls: str) -> set[tuple[str, str, str]]:
    return {("prompt_lost", rollout, call) for call in calls}


def _last_bit(data: Any) -> Any:
    return flip(data, 8 * (len(data) - 1))


PLANTED = {
    "a bit of a whole payload": Planted(
        _entry("payload", lambda data: flip(data, 8 * 30), call="call-0"),
        {("payload_hash", "linear", "call-0")} | _lost("linear", "call-1", "call-2", "call-3", "call-4"),
    ),
    "a bit of a shared payload": Planted(
        _entry("payload", lambda data: flip(data, 8 * 30), call="call-2"),
        {("payload_hash", "linear", "call-2")} | _lost("linear", "call-3", "call-4"),
    ),
    "a bit of a delta payload": Planted(
        _entry("payload", _last_bit, rollout="deltas", call="call-2"),
        {("payload_hash", "deltas", "call-2")} | _lost("deltas", "call-3", "call-4"),
    ),
    "the hash of a whole payload": Planted(
        _entry("payload_sha256", _always(ZEROS), rollout="tree", call="root"),
        {("payload_hash", "tree", "root")} | _lost("tree", "left", "right", "wide"),
    ),
    "the whole hash of a shared payload": Planted(
        _entry("payload_sha256", _always(ZEROS), call="call-3"),
        {("seal", "linear", ""), ("whole_hash", "linear", "call-3")} | _lost("linear", "call-4"),
    ),
    "the hash of the stored bytes": Planted(
        _entry("stored_sha256", _always(ZEROS), call="call-4"), {("payload_hash", "linear", "call-4")}
    ),
    "a hash that is none": Planted(
        _entry("payload_sha256", _always("g" * 64), call="call-4"), {("column_form", "linear", "call-4")}
    ),
    "the form of a payload": Planted(
        _sql(
            "UPDATE entries SET stored_sha256 = NULL, payload_sha256 = stored_sha256 WHERE run = :run AND"
            " rollout_id = 'linear' AND model_call_id = 'call-4'"
        ),
        {("seal", "linear", ""), ("payload_form", "linear", "call-4")},
    ),
    "a digest": Planted(_entry("digest"), {("entry_columns", "linear", "call-1")}),
    "a cum_len": Planted(_entry("cum_len"), {("entry_columns", "linear", "call-1")}),
    "a parent": Planted(_entry("parent_call_id", _always("call-9")), {("entry_columns", "linear", "call-1")}),
    "a shared length": Planted(_entry("shared_len"), {("entry_columns", "linear", "call-1")}),
    "a prompt length": Planted(_entry("prompt_len"), {("entry_columns", "linear", "call-1")}),
    "a number of sampled tokens": Planted(_entry("generation_len"), {("entry_columns", "linear", "call-1")}),
    "a token width": Planted(_entry("token_width", _always(8)), {("entry_columns", "linear", "call-1")}),
    "a model": Planted(_entry("model", _always("another")), {("entry_columns", "linear", "call-1")}),
    "a response id": Planted(_entry("response_id", _always("r")), {("entry_columns", "linear", "call-1")}),
    "a resolution": Planted(
        _entry("parent_resolution", _always("unresolved")), {("entry_columns", "linear", "call-1")}
    ),
    "a time of creation": Planted(_entry("created_at"), {("entry_columns", "linear", "call-1")}),
    "a fingerprint": Planted(_entry("continuation_fingerprint"), {("entry_columns", "linear", "call-1")}),
    "a digest in a payload whose hashes are right": Planted(
        lambda url: _rewrite(url, "linear", "call-0", "digest", lambda digest: flip(digest)),
        {("seal", "linear", ""), ("digest", "linear", "call-0"), ("entry_columns", "linear", "call-0")},
    ),
    "a length in a payload whose hashes are right": Planted(
        lambda url: _rewrite(url, "odd", "again", "cum_len", lambda length: length + 1),
        {("cum_len", "odd", "again"), ("entry_columns", "odd", "again")},
    ),
    "a parent of its own in a payload whose hashes are right": Planted(
        lambda url: _rewrite(url, "odd", "drifted", "parent_call_id", _always("drifted")),
        {("parent_circle", "odd", "drifted"), ("entry_columns", "odd", "drifted")},
    ),
    "a supplied prefix in a payload whose hashes are right": Planted(
        lambda url: _rewrite(url, "odd", "drifted", "prefix_supplied", _always(True)),
        {("parent_sequence", "odd", "drifted")},
    ),
    "a shared ancestor that was deleted": Planted(
        _sql("DELETE FROM entries WHERE run = :run AND rollout_id = 'tree' AND model_call_id = 'left'"),
        _lost("tree", "wide"),
    ),
    "a last call that was deleted": Planted(
        _sql("DELETE FROM entries WHERE run = :run AND rollout_id = 'linear' AND model_call_id = 'call-4'"),
        {("seal", "linear", "")},
    ),
    "all calls of a frozen rollout": Planted(
        _sql("DELETE FROM entries WHERE run = :run AND rollout_id = 'linear'"), {("seal", "linear", "")}
    ),
    "another code of a refusal": Planted(
        _sql("UPDATE intents SET refusal_code = 'x' WHERE run = :run AND rollout_id = 'refused'"),
        {("seal", "refused", "")},
    ),
    "the seal of a frozen rollout": Planted(
        _change("snapshot_versions", "sealed_sha256", _always(ZEROS), rollout_id="linear", version=1),
        {("seal", "linear", "")},
    ),
    "a parent that was deleted": Planted(
        _sql("DELETE FROM entries WHERE run = :run AND rollout_id = 'odd' AND model_call_id = 'again'"),
        {("parent_missing", "odd", "drifted"), ("parent_missing", "odd", "lone")},
    ),
    "a call that was moved to another rollout": Planted(
        _sql(
            "UPDATE entries SET rollout_id = 'busy' WHERE run = :run AND rollout_id = 'tree' AND"
            " model_call_id = 'right'"
        ),
        {("payload_form", "busy", "right")},
    ),
    "a call that was moved to another call": Planted(
        _sql(
            "UPDATE entries SET model_call_id = 'other' WHERE run = :run AND rollout_id = 'tree' AND"
            " model_call_id = 'right'"
        ),
        {("payload_form", "tree", "other")},
    ),
    "calls without a fence": Planted(
        _sql("DELETE FROM fences WHERE run = :run AND rollout_id = 'waiting'"),
        {("fence_missing", "waiting", ""), ("fence_missing", "waiting", "under-way")},
    ),
    "the version of a fence": Planted(
        _fence("version", lambda version: version + 1, "linear"), {("fence_version", "linear", "")}
    ),
    "an open fence that was frozen": Planted(
        _fence("state", _always("open"), "linear"), {("fence_state", "linear", "")}
    ),
    "a state that is none": Planted(_fence("state", flip, "tree"), {("column_form", "tree", "")}),
    "the snapshot of a fence": Planted(
        _fence("snapshot_id", flip, "linear"), {("fence_snapshot", "linear", "")}
    ),
    "the snapshot of a version": Planted(
        _change("snapshot_versions", "snapshot_id", rollout_id="masked", version=6),
        {("fence_snapshot", "masked", "late")},
    ),
    "the verdict of a marked rollout": Planted(
        _fence("incomplete", _always(False), "masked"), {("fence_incomplete", "masked", "")}
    ),
    "the verdict of a rollout with a dangling intent": Planted(
        _fence("incomplete", _always(False), "dangling"), {("fence_incomplete", "dangling", "lost")}
    ),
    "the verdict of a sound rollout": Planted(
        _fence("incomplete", _always(True), "linear"), {("fence_incomplete", "linear", "")}
    ),
    "an intent that was deleted": Planted(
        _sql("DELETE FROM intents WHERE run = :run AND rollout_id = 'dangling'"),
        {("seal", "dangling", ""), ("fence_incomplete", "dangling", "")},
    ),
    "the time of a freeze": Planted(
        _sql("UPDATE fences SET frozen_at = opened_at WHERE run = :run AND rollout_id = 'linear'"),
        {("fence_times", "linear", "")},
    ),
    "a version that was deleted": Planted(
        _sql("DELETE FROM snapshot_versions WHERE run = :run AND rollout_id = 'refused' AND version = 1"),
        {("refusal_history", "refused", "refused")},
    ),
    "a version in the middle that was deleted": Planted(
        _sql("DELETE FROM snapshot_versions WHERE run = :run AND rollout_id = 'masked' AND version = 2"),
        {("history", "masked", ""), ("refusal_history", "masked", "refused")},
    ),
    "a first version that was deleted": Planted(
        _sql("DELETE FROM snapshot_versions WHERE run = :run AND rollout_id = 'tree'"),
        {("history", "tree", ""), ("fence_times", "tree", "")},
    ),
    "a last version that was deleted": Planted(
        _sql("DELETE FROM snapshot_versions WHERE run = :run AND rollout_id = 'linear' AND version = 1"),
        {
            ("fence_version", "linear", ""),
            ("fence_state", "linear", ""),
            ("fence_snapshot", "linear", ""),
            ("fence_times", "linear", ""),
        },
    ),
    "the call of a freeze": Planted(
        _change("snapshot_versions", "model_call_id", _always("call-1"), rollout_id="linear", version=1),
        {("history", "linear", "call-1")},
    ),
    "the event of a version": Planted(
        _change("snapshot_versions", "event", _always("mark"), rollout_id="refused", version=1),
        {
            ("failure_history", "refused", "refused"),
            ("refusal_history", "refused", "refused"),
            ("fence_incomplete", "refused", ""),
        },
    ),
    "a failure that was deleted": Planted(
        _sql("DELETE FROM failures WHERE run = :run AND rollout_id = 'masked' AND version = 6"),
        {("failure_history", "masked", "late")},
    ),
    "the first hash of a conflict": Planted(
        _row("failures", "first_payload_sha256", "twice", _always(ZEROS), "masked"),
        {("conflict_hash", "masked", "twice")},
    ),
    "the code of a refusal that was taken away": Planted(
        _sql(
            "UPDATE intents SET refusal_code = NULL, refused_at = NULL WHERE run = :run AND rollout_id = 'refused'"
        ),
        {
            ("seal", "refused", ""),
            ("refusal_history", "refused", "refused"),
            ("fence_incomplete", "refused", "refused"),
        },
    ),
    "records of a retired rollout": Planted(
        _sql("UPDATE intents SET rollout_id = 'retired' WHERE run = :run AND rollout_id = 'waiting'"),
        {("retired_records", "retired", "under-way")},
    ),
    "an export of another snapshot": Planted(
        _sql(
            "INSERT INTO exports SELECT run, rollout_id, 'x', 'another', 1, 'folder', :zeros, opened_at, 'me', TRUE"
            " FROM fences WHERE run = :run AND rollout_id = 'linear'",
            zeros=ZEROS,
        ),
        {("export_mark", "linear", "")},
    ),
    "the position of a ledger row": Planted(
        _row("ledger_calls", "position", "c", _always(40)),
        {
            ("ledger_hash", "staged", "c"),
            ("ledger_position", "staged", "c"),
            ("ledger_position", "staged", "d"),
        },
    ),
    "a ledger row that was deleted": Planted(
        _sql("DELETE FROM ledger_calls WHERE run = :run AND rollout_id = 'staged' AND model_call_id = 'a'"),
        {
            ("ledger_position", "staged", "b"),
            ("ledger_parent", "staged", "b"),
            ("ledger_parent", "staged", "d"),
        },
    ),
    "the hash of a ledger row": Planted(
        _row("ledger_calls", "payload_sha256", "b", _always("x" * 64)), {("column_form", "staged", "b")}
    ),
    "a weight version in the ledger": Planted(
        _row("ledger_calls", "weight_version", "c"),
        {("ledger_hash", "staged", "c"), ("ledger_staged", "staged", "c")},
    ),
    "a digest in the ledger": Planted(
        _row("ledger_calls", "digest", "c", _always(ZEROS)),
        {("ledger_hash", "staged", "c"), ("ledger_staged", "staged", "c")},
    ),
    "a weight version in a ledger that was moved": Planted(
        _row("ledger_calls", "weight_version", "c", rollout="resumed"),
        {("ledger_hash", "resumed", "c"), ("ledger_staged", "resumed", "c")},
    ),
    "a chain hash in the ledger": Planted(
        _row("ledger_calls", "chain_hash", "c", _always(ZEROS)),
        {("ledger_hash", "staged", "c"), ("ledger_staged", "staged", "c")},
    ),
    "the chain hash of a parent that is staged elsewhere": Planted(
        _row("ledger_calls", "chain_hash", "b", _always(ZEROS), rollout="resumed"),
        {
            ("ledger_hash", "resumed", "b"),
            ("ledger_staged", "resumed", "b"),
            ("staged_chain", "resumed", "e"),
        },
    ),
    "a staging chain": Planted(
        _row("ledger_calls", "staging_chain", "c", _always('["staged/x", "staged/b", "staged/c"]')),
        {("ledger_hash", "staged", "c"), ("ledger_chain", "staged", "c")},
    ),
    "a staging key": Planted(
        _row("ledger_calls", "staging_key", "c", _always("staged/x")),
        {("ledger_hash", "staged", "c"), ("ledger_row", "staged", "c")},
    ),
    "a parent in the ledger": Planted(
        _row("ledger_calls", "parent_call_id", "c", _always("d")),
        {
            ("ledger_hash", "staged", "c"),
            ("ledger_staged", "staged", "c"),
            ("ledger_parent", "staged", "c"),
            ("ledger_chain", "staged", "c"),
        },
    ),
    "a response id in the ledger, beside a complete record": Planted(
        _row("ledger_calls", "response_id", "a"),
        {("ledger_hash", "staged", "a"), ("ledger_entry", "staged", "a")},
    ),
    "a response id in the ledger": Planted(
        _row("ledger_calls", "response_id", "c"), {("ledger_hash", "staged", "c")}
    ),
    "another hash of a ledger row": Planted(
        _row("ledger_calls", "payload_sha256", "b", _always(ZEROS)), {("ledger_hash", "staged", "b")}
    ),
    "a bit of a staged payload": Planted(
        _row("staged_calls", "payload", "b", _last_bit),
        {("staged_hash", "staged", "b"), ("staged_lost", "staged", "c")},
    ),
    "the hash of a staged payload": Planted(
        _row("staged_calls", "payload_sha256", "c", _always(ZEROS)), {("staged_hash", "staged", "c")}
    ),
    "the digest of a staged call": Planted(
        _row("staged_calls", "digest", "c", _always(ZEROS)),
        {("staged_call", "staged", "c"), ("ledger_staged", "staged", "c"), ("ledger_staged", "resumed", "c")},
    ),
    "the token width of a staged call": Planted(
        _row("staged_calls", "token_width", "c", _always(8)), {("staged_call", "staged", "c")}
    ),
    "the extras of a staged call": Planted(
        _row("staged_calls", "extras", "c", _always(b'{"routes":[[1,2]]}')),
        {("staged_extras", "staged", "c")},
    ),
    "extras that are taken away": Planted(
        _row("staged_calls", "extras", "c", _always(None)), {("staged_extras", "staged", "c")}
    ),
    "a staged call that was moved to another rollout": Planted(
        _sql(
            "UPDATE staged_calls SET rollout_id = 'busy' WHERE run = :run AND rollout_id = 'orphans' AND"
            " model_call_id = 'd'"
        ),
        {("staged_call", "busy", "d")},
    ),
    "a reason in the ledger": Planted(
        _row("ledger_failures", "reason", "broken", flip), {("ledger_hash", "staged", "broken")}
    ),
    "the name of an attachment": Planted(
        _row("staged_attachments", "name", "b", _always("other"), name="bytes"),
        {("attachment", "staged", "b")},
    ),
    "an attachment of another call": Planted(
        _row("staged_attachments", "model_call_id", "b", _always("c"), name="text"),
        {("attachment", "staged", "c"), ("attachment", "staged", "b")},
    ),
    "the data of an attachment": Planted(
        _row("staged_attachments", "data", "b", name="buffer"), {("attachment", "staged", "b")}
    ),
    "the shape of an attachment": Planted(
        _row("staged_attachments", "shape", "b", _always("[3]"), name="buffer"),
        {("attachment", "staged", "b")},
    ),
    "an attachment without its call": Planted(
        _row("staged_attachments", "model_call_id", "b", _always("z"), name="json"),
        {("attachment", "staged", "z"), ("attachment", "staged", "b")},
    ),
}


def _rewrite(url: str, rollout: str, call: str, field: str, to: Callable[[Any], Any]) -> None:
    """Change a field in a whole payload as a faulty writer would have written it, with its hash."""
    import hashlib
    import struct

    def changed(payload: bytes) -> bytes:
        width, (prompt, generated) = payload[1], struct.unpack_from("<QQ", payload, 4)
        at = 20 + (prompt + generated) * width + generated * 8
        fields = json.loads(payload[at:])
        fields[field] = to(fields[field])
        return payload[:at] + json.dumps(fields).encode()

    change(url, "entries", "payload", changed, rollout_id=rollout, model_call_id=call)
    statement = (
        "SELECT payload FROM entries WHERE run = :run AND rollout_id = :rollout AND model_call_id = :call"
    )
    named = {"run": RUN, "rollout": rollout, "call": call}
    payload = behind(url, lambda connection: connection.execute(text(statement), named).scalar_one())
    sha256 = hashlib.sha256(payload).hexdigest()
    change(url, "entries", "payload_sha256", _always(sha256), rollout_id=rollout, model_call_id=call)


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_a_planted_corruption_is_found_and_named(url: str, planted: Planted) -> None:
    planted.do(url)

    report = verify(url)

    assert {
        (each.rule.value, each.rollout_id, each.model_call_id) for each in report.findings
    } == planted.found
    assert {each.run for each in report.findings} == {RUN}
