"""What is wrong in a folder of Gym's file store is told by file, line and call, and masks the rollout."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError

from tests.gym_import.gym_folders import (
    found,
    freeze,
    import_folder,
    import_one,
    line_of,
    state_of,
    write_rollout,
)
from tests.support.rich import rows
from tests.support.rollouts import linear_rollout
from tests.support.staged import stage
from tokencustody.database.url import parse_url
from tokencustody.errors import InvalidRecordError
from tokencustody.gym_import import FindingKind, ImportOutcome
from tokencustody.gym_import import files as gym_files
from tokencustody.gym_import.walking import Walk
from tokencustody.spill.marks import Mark, Spill
from tokencustody.store.base import DEFAULT_MAX_ENTRY_BYTES, now
from tokencustody.txn.fence import RolloutKey, Stamp

ENTRIES = [turn.entry for turn in linear_rollout(3)]
LINES = [line_of(entry) for entry in ENTRIES]
DELTAS = [turn.entry for turn in linear_rollout(3, deltas=(1, 2))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "gym"


def changed(call: int, **changes: Any) -> bytes:
    return line_of(ENTRIES[call], **changes)


async def test_a_last_line_torn_at_any_byte_is_told_and_masks_the_rollout(
    sqlite_url: str, folder: Path
) -> None:
    # Without what Gym may leave out: fewer bytes to tear it at.
    left_out = dict.fromkeys(
        (
            "continuation_context_digest",
            "continuation_context_len",
            "continuation_fingerprint",
            "output_items",
            "prefix_requested",
            "prefix_supplied",
            "routed_experts",
            "token_item_index",
        ),
        ...,
    )
    entry = linear_rollout(1)[0].entry
    size = len(line_of(entry, rollout_id="torn-0000", **left_out))
    for length in range(1, size + 1):
        name = f"torn-{length:04}"
        line = line_of(entry, rollout_id=name, **left_out)
        write_rollout(folder, [], rollout_id=name, last_line=line[:length])
    report = await import_folder(sqlite_url, folder)
    *torn, whole = report.rollouts
    assert len(torn) == size - 1 > 300
    assert all(found(imported) == [("lost", "jsonl", 1, None)] for imported in torn)
    assert all("torn" in imported.findings[0].reason for imported in torn)
    assert all((imported.calls, imported.incomplete) == (0, True) for imported in torn)
    assert (whole.calls, whole.findings, whole.incomplete) == (1, [], False)


async def test_a_whole_last_line_without_its_end_is_a_record(store_url: str, folder: Path) -> None:
    write_rollout(folder, LINES[:2], last_line=LINES[2])
    imported = await import_one(store_url, folder)
    assert (imported.calls, imported.findings, imported.incomplete) == (3, [], False)
    assert list((await freeze(store_url)).entries) == ENTRIES


BROKEN = {
    "no JSON": (b"{nonsense", None, "no JSON"),
    "no object": (b"[1, 2]", None, "no JSON object"),
    "no text": (b"\xff\xfe", None, "no JSON"),
    "deep": (b"[" * 100_000, None, "no JSON"),
    "newer schema": (changed(1, schema_version=2), "call-1", "upgrade"),
    "older schema": (changed(1, schema_version=0), "call-1", "older"),
    "null log probability": (
        changed(1, generation_log_probs=[None] * len(ENTRIES[1].generation_token_ids)),
        "call-1",
        "generation_log_probs",
    ),
    "lengths that differ": (changed(1, generation_log_probs=[]), "call-1", "generation_log_probs"),
    "no tokens": (changed(1, prompt_token_ids=...), "call-1", "prompt_token_ids"),
    "negative id": (changed(1, prompt_token_ids=[-1]), "call-1", "prompt_token_ids"),
    "too great an id": (changed(1, prompt_token_ids=[2**64]), "call-1", "prompt_token_ids"),
    "another rollout": (changed(1, rollout_id="other"), "call-1", "belongs to rollout other"),
    "no call id": (changed(1, model_call_id=""), None, "model_call_id"),
    "lone surrogate": (changed(1, model="@").replace(b"@", b"\\ud800"), "call-1", "model"),
}


async def test_a_line_that_is_no_record_is_told_and_masks_the_rollout_and_the_others_are_imported(
    store_url: str, folder: Path
) -> None:
    names = {f"rollout-{number:02}": each for number, each in enumerate(BROKEN)}
    for name, each in names.items():
        around = [line_of(entry, rollout_id=name) for entry in (ENTRIES[0], ENTRIES[2])]
        line = BROKEN[each][0].replace(b'"rollout_id":"rollout"', f'"rollout_id":"{name}"'.encode())
        write_rollout(folder, [around[0], line, around[1]], rollout_id=name)
    report = await import_folder(store_url, folder)
    assert [each.rollout_id for each in report.rollouts] == list(names)
    for imported in report.rollouts:
        _, call, reason = BROKEN[names[imported.rollout_id]]
        assert found(imported) == [("lost", "jsonl", 2, call)], names[imported.rollout_id]
        assert reason in imported.findings[0].reason
        assert (imported.outcome, imported.added, imported.incomplete) == (ImportOutcome.IMPORTED, 2, True)
        assert not imported.is_clean
    snapshot = await freeze(store_url, "rollout-00")
    assert snapshot.incomplete
    assert [entry.model_call_id for entry in snapshot.entries] == ["call-0", "call-2"]


async def test_a_finding_does_not_quote_token_ids_or_log_probabilities(sqlite_url: str, folder: Path) -> None:
    secret = 98_765_432
    write_rollout(
        folder,
        [
            changed(0, prompt_token_ids=[secret, "x"]),
            changed(1, generation_log_probs=[str(secret)]),
            b'{"prompt_token_ids":[%d,' % secret,
            changed(2, cum_len=1, prompt_token_ids=[secret]),
        ],
    )
    imported = await import_one(sqlite_url, folder)
    assert len(imported.findings) == 4
    assert str(secret) not in repr(imported)


WRONG_LINEAGE = {
    "digest": ({"digest": "0" * 64}, "digest"),
    "cum_len": ({"cum_len": 1}, "cum_len"),
    "ids": ({"generation_token_ids": [7] * len(ENTRIES[1].generation_token_ids)}, "digest"),
}


@pytest.mark.parametrize(("changes", "reason"), WRONG_LINEAGE.values(), ids=WRONG_LINEAGE.keys())
async def test_a_record_whose_ids_do_not_have_its_digest_is_kept_and_masks_the_rollout(
    store_url: str, folder: Path, changes: dict[str, Any], reason: str
) -> None:
    write_rollout(folder, [LINES[0], changed(1, **changes)])
    imported = await import_one(store_url, folder)
    assert found(imported) == [("lost", "jsonl", 2, "call-1")]
    assert reason in imported.findings[0].reason
    snapshot = await freeze(store_url)
    assert snapshot.incomplete
    assert len(snapshot.entries) == 2


@pytest.mark.parametrize("changes", [{"digest": "0" * 64}, {"prompt_token_ids": [1]}])
async def test_a_delta_is_checked_against_the_sequence_of_its_parents(
    store_url: str, folder: Path, changes: dict[str, Any]
) -> None:
    lines = [line_of(entry) for entry in DELTAS]
    write_rollout(folder, lines)
    assert (await import_one(store_url, folder, dry_run=True)).is_clean
    write_rollout(folder, [*lines[:2], line_of(DELTAS[2], **changes)])
    assert found(await import_one(store_url, folder)) == [("lost", "jsonl", 3, "call-2")]


async def test_a_delta_without_its_parent_masks_the_rollout(store_url: str, folder: Path) -> None:
    write_rollout(folder, [line_of(DELTAS[0]), line_of(DELTAS[2])])
    imported = await import_one(store_url, folder)
    assert found(imported) == [("lost", "jsonl", 2, "call-2")]
    assert imported.incomplete


async def test_a_line_that_is_not_the_one_that_gym_indexed_masks_the_rollout(
    store_url: str, folder: Path
) -> None:
    lines = dict(zip(("call-0", "call-1"), LINES, strict=False))
    write_rollout(folder, [LINES[0], changed(1, model="another")], state=state_of(lines))
    assert found(await import_one(store_url, folder)) == [("lost", "jsonl", 2, "call-1")]


async def test_a_call_of_which_no_line_is_left_masks_the_rollout(store_url: str, folder: Path) -> None:
    lines = dict(zip(("call-0", "call-1"), LINES, strict=False))
    state = state_of(lines, frozen=True, snapshot_id="snapshot-1", version=3)
    write_rollout(folder, LINES[:1], state=state)
    imported = await import_one(store_url, folder)
    assert found(imported) == [("lost", "json", None, "call-1")]
    snapshot = await freeze(store_url)
    assert (snapshot.incomplete, snapshot.snapshot_id) == (True, "snapshot-1")
    # Gym's version was that of all calls, so nobody may drop this as that.
    assert snapshot.version == 4


STATES = (
    "{",
    "[]",
    '{"frozen": 1}',
    '{"frozen": true}',
    '{"version": -1}',
    '{"version": true}',
    '{"entry_digests": []}',
    '{"frozen": true, "snapshot_id": "s", "version": 9223372036854775807}',
    '{"version": ' + "1" * 5000 + "}",
    # Snapshot ids that no database, or no person, should have to hold.
    *(
        json.dumps({"frozen": True, "retired": retired, "snapshot_id": snapshot_id})
        for snapshot_id in (
            7,
            ["s"],
            "a\0b",
            "a\ud800b",
            "a b",
            "a\nb",
            "\x1b[31m",
            "../s",
            "\u00e9",
            "s" * 256,
        )
        for retired in (False, True)
    ),
)


async def test_a_state_that_makes_no_sense_masks_the_rollout_which_stays_open(
    store_url: str, folder: Path
) -> None:
    for number, text in enumerate(STATES):
        name = f"rollout-{number}"
        write_rollout(folder, [line_of(entry, rollout_id=name) for entry in ENTRIES], rollout_id=name)
        (folder / f"{name}.tokens.state.json").write_text(text)
    report = await import_folder(store_url, folder)
    assert len(report.rollouts) == len(STATES)
    for imported in report.rollouts:
        assert found(imported) == [("lost", "json", None, None)]
        assert (imported.state, imported.calls, imported.incomplete) == ("open", 3, True)


async def test_another_content_of_a_call_is_kept_as_evidence_and_the_first_stays(
    store_url: str, folder: Path
) -> None:
    other = changed(1, model="another", response_id="r\0")
    write_rollout(folder, [*LINES, other, other, LINES[1]])
    dry = await import_one(store_url, folder, dry_run=True)
    imported = await import_one(store_url, folder)
    assert found(imported) == found(dry)
    assert found(imported) == [
        ("lost", "jsonl", 4, "call-1"),
        ("lost", "jsonl", 5, "call-1"),
        ("note", "jsonl", 6, "call-1"),
    ]
    assert "model, response_id" in imported.findings[0].reason
    (failure,) = (await rows(store_url))["failures"]
    assert all(part in failure for part in ("'conflict'", "'call-1'", "'model,response_id'"))
    snapshot = await freeze(store_url)
    assert snapshot.incomplete
    assert list(snapshot.entries) == ENTRIES
    assert (await import_one(store_url, folder)).outcome is ImportOutcome.ALREADY_THERE
    assert len((await rows(store_url))["failures"]) == 1


async def test_the_same_call_with_its_keys_in_another_order_is_the_same(store_url: str, folder: Path) -> None:
    backwards = json.dumps(dict(reversed(json.loads(LINES[0]).items()))).encode()
    extra = changed(1, extra={"a": 1, "b": 2}), changed(1).replace(b"{", b'{"extra":{"b":2,"a":1},', 1)
    write_rollout(folder, [LINES[0], backwards, *extra])
    imported = await import_one(store_url, folder)
    assert [kind for kind, *_ in found(imported)] == ["note", "note"]
    assert not imported.incomplete


async def test_a_legacy_record_without_lineage_is_noted_and_imported(store_url: str, folder: Path) -> None:
    lineage = (
        "digest",
        "cum_len",
        "parent_resolution",
        "parent_call_id",
        "schema_version",
        "fingerprint_version",
    )
    write_rollout(folder, [changed(0, **dict.fromkeys(lineage, ...))])
    imported = await import_one(store_url, folder)
    assert found(imported) == [("note", "jsonl", 1, "call-0")]
    assert imported.is_clean
    (entry,) = (await freeze(store_url)).entries
    assert (entry.digest, entry.schema_version) == (None, 1)


async def test_a_fingerprint_of_another_version_is_noted(store_url: str, folder: Path) -> None:
    write_rollout(folder, [changed(0, fingerprint_version=1)])
    assert found(await import_one(store_url, folder)) == [("note", "jsonl", 1, "call-0")]


async def test_marks_and_intents_that_no_call_id_can_be_mask_the_rollout(
    store_url: str, folder: Path
) -> None:
    write_rollout(folder, LINES, intents=["call-0", "", "x" * 513], marks=["", "y" * 513, "lost", "lost"])
    imported = await import_one(store_url, folder)
    assert found(imported) == [("lost", "intents", None, None)]
    failures = (await rows(store_url))["failures"]
    assert len(failures) == 2
    assert [("'lost'" in row, "'mark'" in row) for row in sorted(failures)] in (
        [(False, True), (True, True)],
        [(True, True), (False, True)],
    )


LEDGER_ROW = {
    "admitted_at": None,
    "chain_hash": "c" * 64,
    "context_digest": "",
    "context_len": 0,
    "continuation_fingerprint": None,
    "cum_len": 3,
    "cumulative_hash": "e" * 64,
    "delta_len": 3,
    "digest": "e" * 64,
    "extras_digest": "d" * 64,
    "fingerprint": "",
    "fingerprint_version": 2,
    "mode": "text",
    "model_call_id": "call-0",
    "output_fingerprint": None,
    "parent_call_id": None,
    "prev_len": 0,
    "response_id": "response",
    "staging_chain": ["rollout/call-0"],
    "staging_digest": "a" * 64,
    "staging_key": "rollout/call-0",
    "weight_version": 1,
}


def ledger_line(**changes: Any) -> bytes:
    return json.dumps(LEDGER_ROW | changes).encode() + b"\n"


FAILED = b'{"failure_reason":"why","model_call_id":"call-1"}\n'
WRONG_LEDGERS = {
    "torn": (ledger_line()[:-9], ("lost", 2, None)),
    "no JSON": (b"{\n", ("lost", 2, None)),
    "other data": (ledger_line(weight_version=2), ("lost", 2, "call-0")),
    "wrong lengths": (ledger_line(model_call_id="call-2", cum_len=9), ("lost", 2, "call-2")),
    "digest": (ledger_line(model_call_id="call-2", digest="b" * 64), ("lost", 2, "call-2")),
    "unknown field": (ledger_line(model_call_id="call-2", new=1), ("lost", 2, "call-2")),
    "no reason": (b'{"failure_reason":"","model_call_id":"call-2"}\n', ("lost", 2, "call-2")),
    "success after failure": (FAILED + ledger_line(model_call_id="call-1"), ("lost", 3, "call-1")),
}


async def test_a_ledger_row_that_cannot_be_kept_is_told(store_url: str, folder: Path) -> None:
    names = {f"rollout-{number}": each for number, each in enumerate(WRONG_LEDGERS)}
    for name, each in names.items():
        write_rollout(folder, [], rollout_id=name, ledger=ledger_line() + WRONG_LEDGERS[each][0])
    report = await import_folder(store_url, folder)
    assert len(report.rollouts) == len(WRONG_LEDGERS)
    for imported in report.rollouts:
        each = names[imported.rollout_id]
        expected = WRONG_LEDGERS[each][1]
        assert [(kind, line, call) for kind, _, line, call in found(imported)] == [expected], each
        assert imported.incomplete is (expected[0] == "lost")
    again = await import_folder(store_url, folder)
    assert {imported.outcome for imported in again.rollouts} == {ImportOutcome.ALREADY_THERE}


async def test_files_of_no_rollout_are_told(store_url: str, folder: Path) -> None:
    write_rollout(folder, LINES)
    write_rollout(folder, [], rollout_id="a b")
    (folder / "README").touch()
    (folder / "folder.tokens.jsonl").mkdir()
    os.mkfifo(folder / "pipe.tokens.state.json")
    report = await import_folder(store_url, folder)
    assert [each.rollout_id for each in report.rollouts] == ["rollout"]
    assert [(each.file, each.kind) for each in report.strangers] == [
        ("README", FindingKind.NOTE),
        ("a b.tokens.jsonl", FindingKind.LOST),
        ("a b.tokens.lock", FindingKind.LOST),
        ("folder.tokens.jsonl", FindingKind.LOST),
        ("pipe.tokens.state.json", FindingKind.LOST),
    ]


async def test_a_rollout_of_which_only_the_lock_is_left_was_deleted(store_url: str, folder: Path) -> None:
    write_rollout(folder, [], rollout_id="deleted")
    (folder / "deleted.tokens.jsonl").unlink()
    report = await import_folder(store_url, folder)
    assert (report.rollouts, report.strangers) == ([], [])


async def test_a_line_of_any_length_takes_little_memory(
    sqlite_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gym_files.LONGEST_LINE == DEFAULT_MAX_ENTRY_BYTES
    monkeypatch.setattr(gym_files, "LONGEST_LINE", 4 * 2**20)
    write_rollout(folder, [LINES[0]], intents=["call-0"], marks=["lost"])
    for name in ("tokens.jsonl", "tokens.intents", "tokens.incomplete"):
        with (folder / f"rollout.{name}").open("ab") as stream:
            stream.truncate(stream.tell() + 2**27)  # a hole, which takes no room on the disk
            stream.seek(0, os.SEEK_END)
            stream.write(b"\n" + (LINES[1] if name == "tokens.jsonl" else b"call-1") + b"\n")
    tracemalloc.start()
    try:
        imported = await import_one(sqlite_url, folder)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 32 * 2**20
    assert found(imported) == [("lost", "jsonl", 2, None), ("lost", "intents", None, None)]
    assert (imported.calls, imported.incomplete) == (2, True)


@pytest.mark.parametrize("end", [b"\n", b""], ids=["ended", "torn"])
@pytest.mark.parametrize("spare", [-1, 0, 1])
@pytest.mark.parametrize("longest", [10, 2**20, 2**20 + 1, 3 * 2**20])
def test_lines_up_to_a_length_are_read_and_longer_ones_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest: int, spare: int, end: bytes
) -> None:
    monkeypatch.setattr(gym_files, "LONGEST_LINE", longest)
    length = longest - 1 + spare
    (tmp_path / "file").write_bytes(b"first\n" + b"x" * length + b"\n\n" + b"y" * length + end)
    read = list(gym_files.lines(tmp_path / "file"))
    fits = spare <= 0
    assert [line.text for line in read] == [
        b"first",
        b"x" * length if fits else None,
        b"",
        b"y" * length if fits else None,
    ]
    assert [line.offset for line in read] == [0, 6, 7 + length, 8 + length]
    assert [line.is_ended for line in read] == [True, True, True, end == b"\n" or not fits]


async def test_a_folder_goes_on_after_a_rollout_that_cannot_be_imported(
    store_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = {
        "b-driver": DBAPIError("INSERT", [], ValueError("token 98765432")),
        "c-number": OverflowError("token 98765432"),
        "d-value": InvalidRecordError("a value that cannot be stored"),
    }
    for name in ("a", *refusals, "z"):
        write_rollout(folder, [line_of(entry, rollout_id=name) for entry in ENTRIES], rollout_id=name)
    walk = Walk.run_txn

    def refused(self: Walk, connection: Any) -> Any:
        result = walk(self, connection)
        if self._writes and (refusal := refusals.get(self._key.rollout_id)) is not None:
            raise refusal
        return result

    monkeypatch.setattr(Walk, "run_txn", refused)
    report = await import_folder(store_url, folder)
    assert {each.rollout_id: each.outcome for each in report.rollouts} == {
        "a": ImportOutcome.IMPORTED,
        **dict.fromkeys(refusals, ImportOutcome.FAILED),
        "z": ImportOutcome.IMPORTED,
    }
    assert not report.is_clean
    said = [finding.reason for each in report.rollouts for finding in each.findings]
    assert len(said) == 3
    assert all(reason.startswith("nothing of it was imported") for reason in said)
    assert "98765432" not in "".join(said)
    monkeypatch.setattr(Walk, "run_txn", walk)
    again = await import_folder(store_url, folder)
    assert [each.outcome for each in again.rollouts] == [
        ImportOutcome.ALREADY_THERE,
        *[ImportOutcome.IMPORTED] * 3,
        ImportOutcome.ALREADY_THERE,
    ]


async def test_a_damaged_mark_of_a_rollout_that_waits_on_this_host_holds_up_that_rollout_and_no_other(
    store_url: str, folder: Path, spill_folder: Path
) -> None:
    for rollout in ("a", "b"):
        write_rollout(folder, [changed(0, rollout_id=rollout)], rollout_id=rollout)
    spill = Spill(spill_folder, parse_url(store_url))
    spill.keep(Mark(RolloutKey("default", "a"), "lost", Stamp.make(now(), "test"))).write_bytes(b"torn")
    report = await import_folder(store_url, folder)
    assert [each.outcome for each in report.rollouts] == [ImportOutcome.FAILED, ImportOutcome.IMPORTED]
    assert "spill discard" in report.rollouts[0].findings[0].reason


LEDGER_VALUES = [
    *(("context_len", value) for value in (2**63, 2**70, -1, 1.5, "1", None, True, [1], float("nan"))),
    *(("staging_chain", value) for value in ("r/a", {"r/a": 1}, 5, None, ["a\0b"], [1])),
]


async def test_a_ledger_value_that_no_column_holds_is_told_and_the_other_rollouts_are_imported(
    store_url: str, folder: Path
) -> None:
    row = stage("a").record.model_dump(mode="json", exclude={"capture_key"})
    row |= {"staging_digest": row["digest"], "digest": row["cumulative_hash"], "context_digest": ""}
    row |= {"context_len": 1, "staging_chain": ["r/a"], "fingerprint": ""}
    for number, (name, value) in enumerate(LEDGER_VALUES):
        line = json.dumps(row | {name: value}).encode() + b"\n"
        write_rollout(folder, [], rollout_id=f"rollout-{number:02}", ledger=line)
    write_rollout(folder, [], rollout_id="sound", ledger=json.dumps(row).encode() + b"\n")
    *bad, sound = (await import_folder(store_url, folder)).rollouts
    assert (sound.outcome, sound.ledger_rows, sound.findings) == (ImportOutcome.IMPORTED, 1, [])
    assert len(bad) == len(LEDGER_VALUES)
    for imported, (name, _) in zip(bad, LEDGER_VALUES, strict=True):
        assert [finding.kind for finding in imported.findings] == [FindingKind.LOST]
        assert name in imported.findings[0].reason
        assert imported.incomplete


async def test_no_longer_line_is_read_than_a_store_accepts(
    store_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gym_files, "LONGEST_LINE", max(map(len, LINES)) + 1)
    write_rollout(folder, [LINES[0], changed(1, model="x" * 10_000), LINES[2]])
    imported = await import_one(store_url, folder)
    assert found(imported) == [("lost", "jsonl", 2, None)]
    assert imported.calls == 2


async def test_findings_of_a_rollout_are_counted_beyond_those_that_are_listed(
    sqlite_url: str, folder: Path
) -> None:
    write_rollout(folder, [b"nonsense"] * 250)
    imported = await import_one(sqlite_url, folder)
    assert (len(imported.findings), imported.counts) == (100, {FindingKind.LOST: 250})
    assert len((await rows(sqlite_url))["failures"]) == 1
