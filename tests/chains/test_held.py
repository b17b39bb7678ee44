"""Nothing is retired of which a sampled token is in no file, whatever the format and wherever the tokens lie."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from tests.export.exports import (
    RUN,
    json_lines,
    left_out,
    manifest,
    parquet_rows,
    put_rollout,
    put_staged,
    run_sql,
)
from tests.support.entries import make_entry
from tests.support.staged import stage
from tokencustody.export import ExportOptions, Format, export
from tokencustody.retention.retention import Retention, Settled
from tokencustody.schema import tables
from tokencustody.states import FenceState, OnBreak
from tokencustody.txn.selection import RolloutFilter

RECORDS = [
    make_entry("r", "root", prompt=[1], generation=[2]),
    make_entry("r", "child", prompt=[1, 2, 3], generation=[4], parent="root"),
]
BROKEN = [RECORDS[0], make_entry("r", "child", prompt=[7], generation=[8], parent="root")]
SILENT = [
    make_entry("r", "root", prompt=[1], generation=[]),
    make_entry("r", "child", prompt=[7], generation=[], parent="root"),
]
IN_A_CIRCLE = [
    make_entry("r", "one", prompt=[1], generation=[2], parent="two"),
    make_entry("r", "two", prompt=[1, 2, 3], generation=[4], parent="one"),
]
DELTA_OF_NOTHING = [
    make_entry(
        "r", "delta", prompt=[3], generation=[4], parent="gone", prompt_is_delta=True, cumulative=[3, 4]
    )
]
STAGED = [stage("a"), stage("b")]
CHAIN = [STAGED[0], stage("c", STAGED[0])]
BESIDE = {("a", "staged_beside_records"), ("b", "staged_beside_records")}
ONLY_STAGED = {("a", "only_staged"), ("b", "only_staged")}
MISSING = {("a", "staged_call_missing")}
LOST = {("lost", "worker_died")}
FAILURES = [("lost", "worker_died"), ("lost", "worker_died_again")]
TWICE_LOST = set(FAILURES)


@dataclass(frozen=True)
class Made:
    """A rollout, and by format what is left out of it and whether it is whole (None: it is not exported)."""

    parquet: tuple[set[tuple[str, str]], bool | None]
    calls: tuple[set[tuple[str, str]], bool | None]
    gym: tuple[set[tuple[str, str]], bool | None]
    entries: Any = ()
    calls_staged: Any = ()
    staged: Any = None
    failures: Any = ()
    on_break: OnBreak = OnBreak.SPLIT


ROLLOUTS = {
    "records": Made((set(), True), (set(), True), (set(), True), RECORDS),
    "records beside staged calls": Made(
        (BESIDE, False), (set(), True), (ONLY_STAGED, False), RECORDS, STAGED
    ),
    "records beside a staged call that is missing": Made(
        (MISSING, False), (MISSING, False), (MISSING, False), RECORDS, STAGED[:1], []
    ),
    "records beside a call that failed": Made(
        (TWICE_LOST, None), (TWICE_LOST, False), (TWICE_LOST, False), RECORDS, failures=FAILURES
    ),
    "a record that was said to have failed": Made(
        (set(), True), (set(), True), (set(), True), RECORDS, failures=[("root", "worker_died")]
    ),
    "a staged call alone": Made(
        (set(), True), (set(), True), ({("a", "only_staged")}, False), calls_staged=STAGED[:1]
    ),
    "staged calls in a chain": Made(
        (set(), True),
        (set(), True),
        ({("a", "only_staged"), ("c", "only_staged")}, False),
        calls_staged=CHAIN,
    ),
    "staged calls beside the terminal one": Made(
        ({("b", "not_on_terminal_chain")}, False),
        (set(), True),
        (ONLY_STAGED | {("c", "only_staged")}, False),
        calls_staged=[*CHAIN, STAGED[1]],
    ),
    "staged calls of which one is missing": Made(
        (MISSING, None),
        (MISSING, False),
        ({("a", "staged_call_missing"), ("c", "only_staged")}, False),
        calls_staged=CHAIN,
        staged=CHAIN[1:],
    ),
    "staged calls beside one that failed": Made(
        ({("", "worker_died")}, None),
        (LOST, False),
        (LOST | {("a", "only_staged")}, False),
        calls_staged=STAGED[:1],
        failures=FAILURES[:1],
    ),
    "a broken conversation that is masked": Made(
        ({("child", "broken")}, None), (set(), True), (set(), True), BROKEN, on_break=OnBreak.MASK
    ),
    "a broken one that is masked and sampled nothing": Made(
        ({("child", "no_generated_tokens"), ("root", "no_generated_tokens"), ("child", "broken")}, None),
        (set(), True),
        (set(), True),
        SILENT,
        on_break=OnBreak.MASK,
    ),
    "a broken one that is masked beside staged calls": Made(
        ({("child", "broken")} | BESIDE, None),
        (set(), True),
        (ONLY_STAGED, False),
        BROKEN,
        STAGED,
        on_break=OnBreak.MASK,
    ),
    "a broken one of which the rest is cut off": Made(
        ({("child", "prompt_does_not_begin_with_parent")}, False),
        (set(), True),
        (set(), True),
        BROKEN,
        on_break=OnBreak.FIRST,
    ),
    "calls in a circle": Made((set(), False), (set(), False), (set(), False), IN_A_CIRCLE),
    "a delta whose beginning is not there": Made(
        ({("delta", "parent_missing")}, None), (set(), False), (set(), False), DELTA_OF_NOTHING
    ),
}


async def make(url: str, made: Made) -> None:
    # Beside it, one of which all is always exported, so that there is a folder.
    await put_rollout(url, [make_entry("whole", prompt=[1], generation=[2])])
    if made.calls_staged or made.failures:
        await put_staged(
            url, made.calls_staged, staged=made.staged, failures=made.failures, freeze=not made.entries
        )
    if made.entries:
        await put_rollout(url, made.entries)


def filled(name: str) -> Any:
    fill = pytest.mark.filled(by=lambda url: asyncio.run(make(url, ROLLOUTS[name])))
    return pytest.param(name, marks=fill)


def sampled_in(out: Path, form: Format) -> set[str]:
    """Return the calls of the rollout of which the files hold the sampled tokens, as a reader finds them."""
    match form:
        case Format.PARQUET:
            return {call for row in parquet_rows(out) if row["rollout_id"] == "r" for call in row["call_ids"]}
        case Format.CALLS:
            return {
                line["model_call_id"]
                for line in json_lines(out)
                if line["rollout_id"] == "r" and ("entry" in line or "staged" in line)
            }
        case Format.GYM:
            return {
                line["model_call_id"]
                for line in json_lines(out)
                if line.get("rollout_id") == "r" and "generation_token_ids" in line
            }


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize("name", [*map(filled, ROLLOUTS)])
async def test_a_rollout_is_retired_only_when_every_sampled_token_of_it_is_in_the_files(
    store_url: str, tmp_path: Path, name: str, form: Format
) -> None:
    made = ROLLOUTS[name]
    options = {"on_break": made.on_break} if form is Format.PARQUET else {}
    wanted = ExportOptions(format=form, run=RUN, include_incomplete=True, **options)
    report = await export(store_url, tmp_path / "out", wanted, retire=True)
    found, is_whole = getattr(made, form.value)
    assert {(call, reason) for _, call, reason in left_out(tmp_path / "out")} == found

    exported = {
        rollout["rollout_id"]: rollout
        for part in manifest(tmp_path / "out")["parts"]
        for rollout in part["rollouts"]
    }
    sampled = {entry.model_call_id for entry in made.entries if entry.generation_token_ids}
    sampled |= {call.record.model_call_id for call in made.calls_staged}
    is_held = is_whole is not None and sampled <= sampled_in(tmp_path / "out", form)
    assert ("r" in exported) == (is_whole is not None)
    if is_whole is not None:
        assert (exported["r"]["is_held"], exported["r"]["whole"]) == (is_held, is_whole)
        everything = {*sampled, *(call for call, _ in found)} | {e.model_call_id for e in made.entries}
        not_held = everything - sampled_in(tmp_path / "out", form)
        assert exported["r"]["calls_left_out"] == len(not_held)
        for row in parquet_rows(tmp_path / "out"):
            if row["rollout_id"] == "r":
                assert (row["whole"], row["calls_left_out"]) == (is_whole, len(not_held))
    # What is not marked is not kept as partly exported either: it was left out.
    assert [kept.why for kept in report.kept] == (
        ["partly_exported"] if is_whole is not None and not is_held else []
    )

    # Nor does what comes later take what no file holds.
    settled: list[Settled] = []
    async with Retention(store_url) as retention:
        await retention.retire(RolloutFilter(state=FenceState.FROZEN, exported=True), settled.append)
    fences = select(tables.fences.c.rollout_id, tables.fences.c.state)
    marks = select(tables.exports.c.rollout_id, tables.exports.c.is_held)
    states, marked, entries = await run_sql(store_url, fences, marks, select(tables.entries.c.model_call_id))
    assert dict(map(tuple, states)) == {"r": "retired" if is_held else "frozen", "whole": "retired"}
    assert dict(map(tuple, marked)) == {"whole": True} | ({"r": is_held} if is_whole is not None else {})
    assert len(entries) == (0 if is_held else len(made.entries))
