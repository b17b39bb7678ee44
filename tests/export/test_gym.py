"""Gym's token files as an export writes them, read by nemo-gym itself."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import nemo_gym.token_id_capture as gym
import pytest

from tests.export.exports import RUN, branching, left_out, put_linear, put_rollout, put_staged
from tests.support.entries import make_entry
from tests.support.ledger import make_commit
from tests.support.rollouts import linear_rollout
from tests.support.staged import stage
from tokencustody import TokenEntry, open_store
from tokencustody.export import ExportError, ExportOptions, export

GYM = ExportOptions(format="gym", run=RUN)
ALL = ExportOptions(format="gym", run=RUN, include_incomplete=True)


def digests(entries: Any) -> dict[str, tuple[Any, ...]]:
    return {
        entry.model_call_id: (entry.digest, entry.cum_len, entry.model_dump(mode="json")) for entry in entries
    }


async def test_gym_reads_every_rollout_with_equal_entries_digests_snapshot_and_version(
    store_url: str, tmp_path: Path
) -> None:
    await put_linear(store_url, 3)
    special = make_entry(
        "special",
        "line\u2028separator \x85 é\xa0",
        generation=[2**64 - 1, 0],
        log_probs=[-0.0, 5e-324],
        output_items=[{"type": "message", "role": "assistant", "content": "\0", "unknown": [None, 1.5, {}]}],
        extra_field={"b": 1, "a": [True]},
    )
    async with open_store(store_url, run=RUN) as store:
        await store.sink.begin_call("special", special.model_call_id)
    await put_rollout(store_url, [special])
    report = await export(store_url, tmp_path / "out", GYM)
    assert (report.rollouts, report.calls) == (4, 10)
    files = gym.TokenCaptureStore(tmp_path / "out")
    async with open_store(store_url, run=RUN) as store:
        for rollout_id in ("special", "rollout-000", "rollout-001", "rollout-002"):
            ours, theirs = await store.source.freeze(rollout_id), await files.freeze(rollout_id)
            assert digests(theirs.entries) == digests(ours.entries)
            assert (theirs.snapshot_id, theirs.version) == (ours.snapshot_id, ours.version)
            assert theirs.incomplete is ours.incomplete is False
            with pytest.raises(Exception, match="frozen"):
                await files.put(
                    gym.TokenEntry(**make_entry(rollout_id, "late", generation=[1]).model_dump(mode="json"))
                )


async def test_the_bytes_are_those_that_gym_itself_writes(store_url: str, tmp_path: Path) -> None:
    entries = [*(turn.entry for turn in linear_rollout(3, deltas=[2]))]
    await put_rollout(store_url, entries)
    await export(store_url, tmp_path / "out", GYM)
    theirs = gym.TokenCaptureStore(tmp_path / "theirs")
    for entry in entries:
        await theirs.put(gym.TokenEntry(**entry.model_dump(mode="json")))
    snapshot = await theirs.freeze("rollout")
    assert (tmp_path / "out/rollout.tokens.jsonl").read_bytes() == theirs.path_for("rollout").read_bytes()
    ours = json.loads((tmp_path / "out/rollout.tokens.state.json").read_bytes())
    state = json.loads(theirs.state_path_for("rollout").read_bytes())
    assert state["snapshot_id"] == snapshot.snapshot_id
    own = {"snapshot_id", "version"}
    assert {name: ours[name] for name in ours.keys() - own} == {
        name: state[name] for name in state.keys() - own
    }


async def test_gym_sees_the_same_marks_and_dangling_intents(store_url: str, tmp_path: Path) -> None:
    async with open_store(store_url, run=RUN) as store:
        for rollout_id in ("marked", "dangling", "refused"):
            await store.sink.begin_call(rollout_id, "call-1")
            await store.sink.put(make_entry(rollout_id))
        await store.sink.mark_incomplete("marked", "lost-1")
        await store.sink.mark_incomplete("marked")
        await store.sink.begin_call("dangling", "lost-2")
        await store.sink.begin_call("refused", "call-2")
        await store.sink.refuse_call("refused", model_call_id="call-2", code="too_long")
        for rollout_id in ("marked", "dangling", "refused"):
            await store.source.freeze(rollout_id)
    await export(store_url, tmp_path / "out", ALL)
    files = gym.TokenCaptureStore(tmp_path / "out")
    found = {name: (await files.freeze(name)).incomplete for name in ("marked", "dangling", "refused")}
    assert found == {"marked": True, "dangling": True, "refused": False}
    assert files.incomplete_path_for("marked").read_bytes() == b"lost-1\n\n"
    assert files.intents_path_for("dangling").read_bytes() == b"call-1\nlost-2\n"
    assert files.intents_path_for("refused").read_bytes() == b"call-1\n"


async def test_gym_reads_the_ledger_as_our_own_manifest(store_url: str, tmp_path: Path) -> None:
    first = make_commit("rollout-1", "staged-1")
    second = make_commit("rollout-1", "staged-2", parent=first, admitted_at=None)
    async with open_store(store_url, run=RUN) as store:
        for commit in (first, second):
            await store.lineage.record(commit)
        await store.lineage.record_failure("rollout-1", "staged-3", "worker_died")
        expected = await store.lineage.manifest("rollout-1")
    await put_rollout(store_url, branching())
    await export(store_url, tmp_path / "out", GYM)
    lineage = gym.FileLineageStore(tmp_path / "out")
    theirs = await lineage.manifest("rollout-1")
    await lineage.close()
    assert theirs == expected
    # And byte for byte what Gym writes for the same commits.
    written = gym.FileLineageStore(tmp_path / "theirs")
    for commit in (first, second):
        data = commit.model_dump()
        del data["record"]["capture_key"]
        await written.record(gym.CaptureLedgerCommit.model_validate(data))
    await written.record_failure("rollout-1", "staged-3", "worker_died")
    await written.close()
    ours = (tmp_path / "out/rollout-1.lineage.jsonl").read_bytes().splitlines()
    assert ours == (tmp_path / "theirs/rollout-1.lineage.jsonl").read_bytes().splitlines()


async def test_a_rollout_of_staged_calls_alone_keeps_its_ledger(store_url: str, tmp_path: Path) -> None:
    await put_staged(store_url, [stage("a")])
    await export(store_url, tmp_path / "out", GYM)
    lineage = gym.FileLineageStore(tmp_path / "out")
    assert [record["model_call_id"] for record in (await lineage.manifest("r"))["records"]] == ["a"]
    await lineage.close()
    assert (await gym.TokenCaptureStore(tmp_path / "out").freeze("r")).entries == ()


def with_fields(**fields: Any) -> TokenEntry:
    return TokenEntry(**make_entry("bad", generation=[1]).model_dump() | fields)


@pytest.mark.parametrize(
    "entry",
    [
        with_fields(generation_log_probs=[math.nan]),
        with_fields(generation_log_probs=[-math.inf]),
        with_fields(extra={"score": math.nan}),
        with_fields(extra=2**64),
        with_fields(model_call_id=" spaces "),
        with_fields(model_call_id="two\nlines"),
        with_fields(model_call_id="two\rlines"),
        with_fields(rollout_id="x" * 255),
    ],
    ids=[
        "nan",
        "infinity",
        "nan-in-a-field",
        "long-integer",
        "spaces",
        "line-break",
        "carriage-return",
        "long-id",
    ],
)
async def test_what_gyms_files_cannot_carry_leaves_the_rollout_out_and_no_file_of_it(
    store_url: str, tmp_path: Path, entry: TokenEntry
) -> None:
    await put_rollout(store_url, [make_entry("good")])
    async with open_store(store_url, run=RUN) as store:
        await store.sink.begin_call(entry.rollout_id, entry.model_call_id)
    await put_rollout(store_url, [entry])
    await export(store_url, tmp_path / "out", GYM)
    (left,) = left_out(tmp_path / "out")
    assert (left[0], left[2]) == (entry.rollout_id, "gym_cannot_carry")
    names = {path.name.split(".tokens")[0] for path in (tmp_path / "out").glob("*.tokens.*")}
    assert names == {"good"}


async def test_gyms_files_hold_one_run(store_url: str, tmp_path: Path) -> None:
    for run in ("run-1", "run-2"):
        await put_linear(store_url, 1, run=run)
    with pytest.raises(ExportError, match="choose one with --run"):
        await export(store_url, tmp_path / "out", ExportOptions(format="gym"))
    assert (await export(store_url, tmp_path / "out", ExportOptions(format="gym", run="run-2"))).rollouts == 1


async def test_the_digest_in_the_state_is_that_of_the_line(store_url: str, tmp_path: Path) -> None:
    await put_rollout(store_url, [make_entry()])
    await export(store_url, tmp_path / "out", GYM)
    state = json.loads((tmp_path / "out/rollout-1.tokens.state.json").read_bytes())
    line = (tmp_path / "out/rollout-1.tokens.jsonl").read_bytes().rstrip(b"\n")
    assert state["entry_digests"] == {"call-1": hashlib.sha256(line).hexdigest()}
