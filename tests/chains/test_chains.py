"""Which chains an export makes of a rollout, and what it leaves out."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text, update

from tests.export.exports import (
    RUN,
    branching,
    left_out,
    listed,
    manifest,
    parquet_rows,
    put_linear,
    put_rollout,
    put_staged,
    run_sql,
)
from tests.support.entries import make_entry
from tests.support.ledger import make_commit
from tests.support.rollouts import linear_rollout
from tests.support.staged import stage
from tokencustody import TokenEntry, open_store
from tokencustody.errors import InvalidRecordError, PayloadConflictError
from tokencustody.export import ExportOptions, Format, OnBreak, SharedCalls, Siblings, export
from tokencustody.records import compute_digest
from tokencustody.schema import tables


def test_options_name_the_same_formats_on_the_command_line_and_in_python() -> None:
    command = import_module("tokencustody.export.command")
    assert list(command.Format) == list(Format)
    assert list(command.SharedCalls) == list(SharedCalls)
    assert list(command.OnBreak) == list(OnBreak)
    assert list(command.Siblings) == list(Siblings)


@pytest.mark.parametrize(
    "options",
    [
        {"format": "csv"},
        {"shared_calls": "last"},
        {"on_break": "guess"},
        {"siblings": "first"},
        {"siblings": "keep", "format": "calls"},
        {"rows_per_file": 0},
        {"max_bytes": True},
        {"before": datetime(2026, 1, 1)},
        {"run": "../x"},
        {"rollout_ids": ("a b",)},
    ],
    ids=str,
)
def test_an_option_of_no_sense_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecordError, match=next(iter(options)).removesuffix("s")):
        ExportOptions(**options)


async def test_a_chain_has_every_token_once_with_its_loss_mask_and_log_probability(
    store_url: str, tmp_path: Path
) -> None:
    await put_rollout(store_url, branching()[:3])
    await export(store_url, tmp_path / "out")
    (row,) = parquet_rows(tmp_path / "out")
    assert row["token_ids"] == [1, 2, 3, 10, 11, 4, 20, 30]
    assert row["loss_mask"] == [0, 0, 0, 1, 1, 0, 1, 1]
    assert row["log_probs"] == [0, 0, 0, -0.25, -0.5, 0, -0.25, -0.25]
    assert row["call_ids"] == ["root", "left", "leaf"]
    assert row["call_starts"] == [0, 5, 7]
    assert row["generation_starts"] == [3, 6, 7]
    assert row["generation_lengths"] == [2, 1, 1]
    assert row["parent_resolutions"] == ["root", "resolved", "resolved"]
    assert row["digest"] == compute_digest(row["token_ids"])
    assert (row["run"], row["rollout_id"], row["leaf_call_id"]) == (RUN, "rollout-1", "leaf")
    assert (row["version"], row["incomplete"], row["source"]) == (1, False, "records")


@pytest.mark.parametrize(("shared", "masks"), [("first", [0, 0]), ("every", [1, 1])])
async def test_where_chains_branch_shared_calls_are_trained_in_the_first_chain_or_in_every_one(
    store_url: str, tmp_path: Path, shared: Any, masks: list[int]
) -> None:
    await put_rollout(store_url, branching())
    report = await export(store_url, tmp_path / "out", ExportOptions(shared_calls=shared))
    first, second = parquet_rows(tmp_path / "out")
    assert (first["leaf_call_id"], second["leaf_call_id"]) == ("leaf", "right")
    assert (first["chain_index"], second["chain_index"]) == (0, 1)
    assert first["loss_mask"] == [0, 0, 0, 1, 1, 0, 1, 1]
    assert second["token_ids"] == [1, 2, 3, 10, 11, 5, 6, 40, 41]
    assert second["loss_mask"] == [0, 0, 0, *masks, 0, 0, 1, 1]
    assert [log_prob != 0 for log_prob in second["log_probs"]] == [bit == 1 for bit in second["loss_mask"]]
    assert report.trained_tokens == (6 if shared == "first" else 8)
    assert report.calls == 4


async def test_delta_prompts_and_full_prompts_give_the_same_chain(store_url: str, tmp_path: Path) -> None:
    for rollout_id, deltas in (("full", []), ("delta", [1, 3])):
        turns = linear_rollout(4, stem="same", rollout_id="seeded", deltas=deltas)
        entries = [turn.entry.model_copy(update={"rollout_id": rollout_id}) for turn in turns]
        await put_rollout(store_url, entries)
    await export(store_url, tmp_path / "out")
    delta, full = parquet_rows(tmp_path / "out")
    assert delta["rollout_id"] == "delta"
    columns = ["token_ids", "loss_mask", "log_probs", "call_starts", "generation_starts", "digest"]
    assert {name: delta[name] for name in columns} == {name: full[name] for name in columns}
    assert tuple(full["token_ids"]) == turns[-1].tokens


ROOT = make_entry(model_call_id="root", prompt=[1], generation=[2])
CHILD: dict[str, Any] = {"model_call_id": "child", "prompt": [1, 2, 3], "generation": [4], "parent": "root"}


def changed(entry: TokenEntry, **fields: Any) -> TokenEntry:
    """Return the entry as a faulty writer would have stamped it."""
    return entry.model_copy(update=fields)


NOT_CONTINUING = [
    (changed(make_entry(**{**CHILD, "parent": None}), parent_resolution="unresolved"), "unresolved_parent"),
    (changed(make_entry(**{**CHILD, "parent": None}), parent_resolution=None), "parent_not_recorded"),
    (make_entry(**{**CHILD, "parent": "lost"}), "parent_missing"),
    (make_entry(**{**CHILD, "parent": "child"}), "parent_cycle"),
    (make_entry(**{**CHILD, "prompt": [1, 9, 3]}), "prompt_does_not_begin_with_parent"),
    (make_entry(**{**CHILD, "prompt": [1]}), "prompt_does_not_begin_with_parent"),
]
NOT_SOUND = [
    (changed(make_entry(**CHILD), digest="0" * 64), "digest_or_length_mismatch"),
    (changed(make_entry(**CHILD), cum_len=5), "digest_or_length_mismatch"),
    (make_entry(**{**CHILD, "generation": [2**63]}), "ids_beyond_int64"),
]


def below(child: TokenEntry, generation: int = 5) -> TokenEntry:
    """Return a call that continues the child."""
    prompt = [*child.prompt_token_ids, *child.generation_token_ids]
    return make_entry(model_call_id="below", prompt=prompt, generation=[generation], parent="child")


def _reason(value: Any) -> str:
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(("child", "reason"), NOT_CONTINUING, ids=_reason)
async def test_a_call_that_does_not_continue_its_parent_begins_a_row_that_says_why(
    store_url: str, tmp_path: Path, child: TokenEntry, reason: str
) -> None:
    await put_rollout(store_url, [ROOT, child, below(child)])
    report = await export(store_url, tmp_path / "out")
    first, second = parquet_rows(tmp_path / "out")
    assert (first["token_ids"], first["loss_mask"], first["call_ids"]) == ([1, 2], [0, 1], ["root"])
    prompt = child.prompt_token_ids
    assert second["token_ids"] == [*prompt, 4, 5]
    assert second["loss_mask"] == [0] * len(prompt) + [1, 1]
    assert second["call_ids"] == ["child", "below"]
    assert second["parent_resolutions"][1:] == ["resolved"]
    assert [(row["segment"], row["segments"], row["breaks"]) for row in (first, second)] == [
        (0, 2, None),
        (1, 2, reason),
    ]
    # A parent that is nowhere is lost, and calls in a circle have lost theirs.
    whole = reason not in ("parent_missing", "parent_cycle")
    assert [(row["whole"], row["calls_left_out"]) for row in (first, second)] == [(whole, 0)] * 2
    assert (left_out(tmp_path / "out"), report.breaks) == ([], {reason: 1})
    assert (report.ok, report.trained_tokens, report.calls) == (True, 3, 3)


@pytest.mark.parametrize(("child", "reason"), [*NOT_CONTINUING, *NOT_SOUND], ids=_reason)
async def test_on_break_first_exports_only_what_lies_before_and_names_the_rest(
    store_url: str, tmp_path: Path, child: TokenEntry, reason: str
) -> None:
    await put_rollout(store_url, [ROOT, child, below(child)])
    report = await export(store_url, tmp_path / "out", ExportOptions(on_break=OnBreak.FIRST))
    (row,) = parquet_rows(tmp_path / "out")
    assert (row["leaf_call_id"], row["token_ids"], row["loss_mask"]) == ("root", [1, 2], [0, 1])
    assert (row["segments"], row["breaks"], row["whole"], row["calls_left_out"]) == (1, None, False, 2)
    assert left_out(tmp_path / "out") == [
        ("rollout-1", "child", reason),
        ("rollout-1", "below", "parent_left_out"),
    ]
    assert report.ok
    assert manifest(tmp_path / "out")["parts"][0]["rollouts"][0]["whole"] is False


@pytest.mark.parametrize(("child", "reason"), [*NOT_CONTINUING, *NOT_SOUND], ids=_reason)
async def test_on_break_mask_leaves_a_broken_rollout_out_and_keeps_the_others(
    store_url: str, tmp_path: Path, child: TokenEntry, reason: str
) -> None:
    await put_rollout(store_url, [ROOT, child, below(child)])
    await put_linear(store_url, 1)
    await export(store_url, tmp_path / "out", ExportOptions(on_break=OnBreak.MASK))
    assert [row["rollout_id"] for row in parquet_rows(tmp_path / "out")] == ["rollout-000"]
    (masked,) = [each for each in manifest(tmp_path / "out")["left_out"] if each["reason"] == "broken"]
    assert (masked["rollout_id"], masked["model_call_id"], masked["detail"]) == ("rollout-1", "child", reason)


@pytest.mark.parametrize(("child", "reason"), NOT_SOUND, ids=_reason)
async def test_a_call_that_is_not_sound_is_left_out_and_what_continues_it_stands_alone(
    store_url: str, tmp_path: Path, child: TokenEntry, reason: str
) -> None:
    await put_rollout(store_url, [ROOT, child, below(child)])
    await export(store_url, tmp_path / "out")
    rows = parquet_rows(tmp_path / "out")
    if reason == "ids_beyond_int64":
        # Its prompt has the same id in it.
        assert [row["call_ids"] for row in rows] == [["root"]]
        assert left_out(tmp_path / "out") == [("rollout-1", name, reason) for name in ("child", "below")]
        return
    assert [(row["call_ids"], row["breaks"]) for row in rows] == [
        (["root"], None),
        (["below"], "parent_left_out"),
    ]
    assert rows[1]["loss_mask"] == [0, 0, 0, 0, 1]
    assert left_out(tmp_path / "out") == [("rollout-1", "child", reason)]
    assert {(row["whole"], row["calls_left_out"]) for row in rows} == {(False, 1)}


async def test_a_delta_without_a_digest_is_left_out_for_nothing_proves_it(
    store_url: str, tmp_path: Path
) -> None:
    delta = linear_rollout(2, deltas=[1])[1].entry
    first = linear_rollout(2, deltas=[1])[0].entry
    await put_rollout(store_url, [first, changed(delta, digest=None)])
    await export(store_url, tmp_path / "out")
    assert left_out(tmp_path / "out") == [("rollout", "call-1", "digest_or_length_mismatch")]


async def test_a_largest_id_of_int64_is_exported_exactly(store_url: str, tmp_path: Path) -> None:
    await put_rollout(store_url, [make_entry(generation=[2**63 - 1, 0, 2**32])])
    await export(store_url, tmp_path / "out")
    assert parquet_rows(tmp_path / "out")[0]["token_ids"][-3:] == [2**63 - 1, 0, 2**32]


async def test_a_chain_without_a_sampled_token_is_left_out(store_url: str, tmp_path: Path) -> None:
    await put_rollout(store_url, [make_entry(generation=[])])
    report = await export(store_url, tmp_path / "out")
    assert listed(report) == [("rollout-1", "call-1", "no_generated_tokens")]


async def test_calls_that_continue_one_that_sampled_nothing_are_exported(
    store_url: str, tmp_path: Path
) -> None:
    silent = make_entry(model_call_id="silent", prompt=[1, 2, 3], generation=[], parent="root")
    spoken = make_entry(model_call_id="spoken", prompt=[1, 2, 3], generation=[4], parent="silent")
    await put_rollout(store_url, [ROOT, silent, spoken])
    await export(store_url, tmp_path / "out")
    (row,) = parquet_rows(tmp_path / "out")
    assert (row["token_ids"], row["generation_lengths"]) == ([1, 2, 3, 4], [1, 0, 1])


async def test_incomplete_rollouts_are_left_out_unless_they_are_asked_for(
    store_url: str, tmp_path: Path
) -> None:
    await put_rollout(store_url, [ROOT])
    async with open_store(store_url, run=RUN) as store:
        await store.sink.mark_incomplete("rollout-1", "lost-call")
    await put_rollout(store_url, [make_entry("whole")])
    await export(store_url, tmp_path / "out")
    assert left_out(tmp_path / "out") == [("rollout-1", "", "incomplete")]
    await export(store_url, tmp_path / "all", ExportOptions(include_incomplete=True))
    assert [row["incomplete"] for row in parquet_rows(tmp_path / "all")] == [True, False]


async def test_a_conflicting_call_is_never_exported(store_url: str, tmp_path: Path) -> None:
    await put_rollout(store_url, [ROOT], freeze=False)
    with pytest.raises(PayloadConflictError):
        await put_rollout(store_url, [changed(ROOT, model="other")])
    async with open_store(store_url, run=RUN) as store:
        await store.source.freeze("rollout-1")
    report = await export(store_url, tmp_path / "out", ExportOptions(include_incomplete=True))
    assert listed(report) == [("rollout-1", "root", "conflicting_call")]


async def test_a_corrupt_rollout_is_named_left_out_and_reported_and_the_others_are_exported(
    store_url: str, tmp_path: Path
) -> None:
    for name in ("a", "b", "c"):
        await put_rollout(store_url, [make_entry(name)])
    broken = tables.entries.c.rollout_id == "b"
    await run_sql(store_url, update(tables.entries).where(broken).values(payload=b"\1\2\0\0"))
    report = await export(store_url, tmp_path / "out")
    assert [row["rollout_id"] for row in parquet_rows(tmp_path / "out")] == ["a", "c"]
    assert left_out(tmp_path / "out") == [("b", "", "corrupt")]
    assert "model call call-1 of rollout b" in manifest(tmp_path / "out")["left_out"][0]["detail"]
    assert not report.ok


async def test_open_rollouts_are_listed_and_named_ones_are_never_passed_over_in_silence(
    store_url: str, tmp_path: Path
) -> None:
    await put_rollout(store_url, [make_entry("open")], freeze=False)
    await put_rollout(store_url, [make_entry("gone")])
    async with open_store(store_url, run=RUN) as store:
        await store.source.retire(["gone"])
        await store.source.freeze("empty")
    report = await export(store_url, tmp_path / "all")
    assert listed(report) == [("empty", "", "no_calls"), ("open", "", "not_frozen")]
    named = ("open", "gone", "never-heard-of")
    report = await export(store_url, tmp_path / "nothing", ExportOptions(rollout_ids=named))
    assert report.left_out == {"retired": 1, "not_frozen": 1, "unknown": 1}
    assert (report.ok, report.unknown) == (False, ("never-heard-of",))
    assert not (tmp_path / "nothing").exists()
    await put_rollout(store_url, [make_entry("there")])
    report = await export(store_url, tmp_path / "named", ExportOptions(rollout_ids=(*named, "there")))
    assert left_out(tmp_path / "named") == [
        ("gone", "", "retired"),
        ("open", "", "not_frozen"),
        ("never-heard-of", "", "unknown"),
    ]
    assert (report.ok, report.unknown) == (False, ("never-heard-of",))


async def test_the_weight_version_is_that_of_the_ledger_or_of_the_record_or_none(
    store_url: str, tmp_path: Path
) -> None:
    entries = branching()[:3]
    entries[1] = changed(entries[1], weight_version=8)
    entries[2] = changed(entries[2], weight_version="step-8")
    async with open_store(store_url, run=RUN) as store:
        await store.lineage.record(make_commit(model_call_id="root"))
    await put_rollout(store_url, entries)
    await export(store_url, tmp_path / "out")
    assert parquet_rows(tmp_path / "out")[0]["weight_versions"] == [3, 8, None]


def staged_rollout() -> list[Any]:
    root = stage("a", added=(1, 2), sampled=(3,), weight_version=5)
    return [root, stage("b", root, added=(4,), sampled=(5, 6), weight_version=6)]


async def test_staged_calls_become_the_one_chain_that_their_receipt_proves(
    store_url: str, tmp_path: Path
) -> None:
    calls = staged_rollout()
    await put_staged(store_url, calls)
    await export(store_url, tmp_path / "out")
    (row,) = parquet_rows(tmp_path / "out")
    assert row["token_ids"] == calls[-1].token_ids == [1, 2, 3, 4, 5, 6]
    assert row["loss_mask"] == [0, 0, 1, 0, 1, 1]
    assert row["log_probs"] == [0, 0, -0.75, 0, -0.5, -0.75]
    assert row["weight_versions"] == [5, 6]
    assert (row["call_starts"], row["generation_starts"], row["generation_lengths"]) == (
        [0, 3],
        [2, 4],
        [1, 2],
    )
    assert (row["source"], row["digest"]) == ("ledger", compute_digest(row["token_ids"]))
    assert row["response_ids"] == [call.record.response_id for call in calls]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda calls: {"failures": [("c", "worker_died")]}, [("r", "", "worker_died")]),
        (lambda calls: {"staged": calls[:1]}, [("r", "b", "staged_call_missing")]),
        (
            lambda calls: {"calls": [*calls, stage("d", calls[0], sampled=(9,))]},
            [("r", "", "ambiguous_terminal")],
        ),
    ],
    ids=["a-failure", "a-missing-call", "two-leaves"],
)
async def test_a_staged_rollout_that_is_not_proven_is_left_out_with_its_reason(
    store_url: str,
    tmp_path: Path,
    make: Callable[[list[Any]], dict[str, Any]],
    expected: list[tuple[str, str, str]],
) -> None:
    await put_staged(store_url, **{"calls": staged_rollout(), **make(staged_rollout())})
    assert listed(await export(store_url, tmp_path / "out")) == expected


async def test_staged_calls_beside_the_terminal_chain_are_listed(store_url: str, tmp_path: Path) -> None:
    root, child = staged_rollout()
    retried = stage("z", sampled=(9,))
    await put_staged(store_url, [root, child, retried])
    await export(store_url, tmp_path / "out")
    assert parquet_rows(tmp_path / "out")[0]["call_ids"] == ["a", "b"]
    assert left_out(tmp_path / "out") == [("r", "z", "not_on_terminal_chain")]


async def test_a_corrupt_staged_call_leaves_its_rollout_out(store_url: str, tmp_path: Path) -> None:
    await put_staged(store_url, staged_rollout())
    broken = tables.staged_calls.c.model_call_id == "b"
    await run_sql(store_url, update(tables.staged_calls).where(broken).values(payload=b"\1\2"))
    assert listed(await export(store_url, tmp_path / "out")) == [("r", "", "corrupt")]


@pytest.mark.parametrize("form", ["parquet", "calls", "gym"])
@pytest.mark.parametrize("column", ["digest", "staging_chain"])
async def test_a_ledger_row_that_makes_no_sense_leaves_its_rollout_out_and_the_others_go_on(
    sqlite_url: str, tmp_path: Path, form: Any, column: str
) -> None:
    await put_staged(sqlite_url, staged_rollout())
    await put_rollout(sqlite_url, [make_entry("s")])
    # As a row of before revision 0004, which has no hash.
    nonsense = f"UPDATE ledger_calls SET row_sha256 = NULL, {column} = 'nonsense' WHERE model_call_id = 'a'"
    await run_sql(sqlite_url, text(nonsense))
    report = await export(sqlite_url, tmp_path / "out", ExportOptions(format=form))
    exported = [
        each["rollout_id"] for part in manifest(tmp_path / "out")["parts"] for each in part["rollouts"]
    ]
    corrupt = [rollout_id for rollout_id, _, reason in left_out(tmp_path / "out") if reason == "corrupt"]
    # Whether the format has a use for the column or not: the seal covers it.
    assert (exported, corrupt, report.ok) == (["s"], ["r"], False)


@pytest.mark.parametrize("form", ["parquet", "calls", "gym"])
async def test_a_changed_ledger_row_leaves_its_rollout_out(
    sqlite_url: str, tmp_path: Path, form: Any
) -> None:
    await put_staged(sqlite_url, staged_rollout())
    await run_sql(sqlite_url, text("UPDATE ledger_calls SET response_id = 'other' WHERE model_call_id = 'a'"))
    report = await export(sqlite_url, tmp_path / "out", ExportOptions(format=form))
    assert listed(report) == [("r", "", "corrupt")]


async def test_complete_records_come_before_staged_calls_of_the_same_rollout(
    store_url: str, tmp_path: Path
) -> None:
    await put_staged(store_url, staged_rollout(), freeze=False)
    await put_rollout(store_url, [make_entry("r", "recorded")])
    await export(store_url, tmp_path / "out")
    (row,) = parquet_rows(tmp_path / "out")
    assert (row["source"], row["call_ids"]) == ("records", ["recorded"])
    assert left_out(tmp_path / "out") == [
        ("r", "a", "staged_beside_records"),
        ("r", "b", "staged_beside_records"),
    ]


async def test_records_beside_a_call_that_the_ledger_lost_are_left_out(
    store_url: str, tmp_path: Path
) -> None:
    await put_staged(store_url, [], failures=[("lost", "worker_died")], freeze=False)
    await put_rollout(store_url, [make_entry("r", "recorded")])
    assert listed(await export(store_url, tmp_path / "out")) == [("r", "lost", "worker_died")]
