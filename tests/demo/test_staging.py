"""The demo with worker staging on its real model: exact rows, named reasons, and processes that all end."""

from __future__ import annotations

import asyncio
import importlib
import json
import sqlite3
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tokencustody.cli import app
from tokencustody.control import RolloutControlClient
from tokencustody.control.server import make_control_app
from tokencustody.demo.model import INSTALL_HINT, ChatModel, Completion
from tokencustody.demo.staging.plans import plan_staged_rollouts
from tokencustody.demo.staging.processes import Crew, RoleFailedError
from tokencustody.demo.staging.report import StagingReport, make_report
from tokencustody.demo.staging.run import PLAYING, run_staging_demo
from tokencustody.demo.staging.serving import Gateway, Tally, play_all
from tokencustody.demo.staging.trainer import Verdict, read_rollout
from tokencustody.demo.staging.worker import InferenceWorker
from tokencustody.demo.tasks import MAX_TURNS
from tokencustody.demo.unused import RunTakenError
from tokencustody.errors import RolloutRetiredError
from tokencustody.staging import CommitCoords
from tokencustody.staging.rebuild import LinearizedRow
from tokencustody.store import SqlLineageStore, SqlStagingStore

REASONS = {
    "rollout-001": "worker_capture_failed",
    "rollout-003": "ambiguous_terminal",
    "rollout-004": "declared_terminal_not_captured",
}
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


async def test_every_training_row_is_what_the_engine_read_and_sampled(store_url: str) -> None:
    plans = plan_staged_rollouts(6, 3, seed=5)
    first_update = plans[0].calls - 1  # the first rollout's last call is of the second version
    outcomes: dict[str, tuple[Verdict, LinearizedRow | None]] = {}
    response_ids: dict[str, str] = {}
    with SqlStagingStore(store_url, run="demo") as staging:
        async with SqlLineageStore(store_url, run="demo") as ledger, RecordingModel(slots=1) as model:
            worker = InferenceWorker(
                model,
                staging,
                update_after=first_update,
                lost={plan.lost_call or "" for plan in plans},
                retried={call for plan in plans for call in plan.retried_calls},
                max_tokens=3,
                seed=5,
            )
            gateway = Gateway(ledger, frozenset(call for plan in plans for call in plan.retried_calls))

            async def ask(request: dict[str, Any]) -> dict[str, Any]:
                # As between two processes: nothing but JSON passes, and no token id.
                answer = json.dumps(await worker.answer(json.loads(json.dumps(request))))
                assert "token_ids" not in answer
                decoded: dict[str, Any] = json.loads(answer)
                return decoded

            results = await play_all(plans, gateway, [ask], model.context, lambda: None)
            transport = httpx.ASGITransport(app=make_control_app(ledger, auth_token="secret"))
            async with RolloutControlClient("http://serving", "secret", transport=transport) as client:
                for result in results:
                    outcomes[result.rollout_id] = await read_rollout(client, staging, asdict(result))
                    manifest = await client.manifest(result.rollout_id)
                    response_ids |= {record.model_call_id: record.response_id for record in manifest.records}

    assert {
        rollout: verdict.reason for rollout, (verdict, _) in outcomes.items() if verdict.reason
    } == REASONS
    assert gateway.tally.retries > 0
    assert set(gateway.tally.refused.values()) == {"exceed_context_size_error"}
    lost = plans[1].lost_call
    later = [plans[1].call_id(number) for number in range(plans[1].calls)]
    failures = dict.fromkeys(later[later.index(lost or "") + 1 :], "unresolved_parent")
    assert outcomes["rollout-001"][0].failures == {lost: "worker_capture_failed"} | failures

    for plan in plans:
        verdict, row = outcomes[plan.rollout.rollout_id]
        if row is None:
            assert verdict.rollout_id in REASONS
            continue
        completions = [model.returned[response_ids[span.model_call_id]] for span in verdict.spans]
        assert len(completions) == len(plan.rollout.user_turns)
        assert row.token_ids == completions[-1].prompt_token_ids + completions[-1].token_ids
        assert row.prompt_len == len(completions[0].prompt_token_ids)
        end = 0
        for span, completion in zip(verdict.spans, completions, strict=True):
            assert span.start == end
            end, sampled = span.end, span.start + span.prompt_tokens
            assert row.token_ids[: span.end] == completion.prompt_token_ids + completion.token_ids
            assert row.logprobs[span.start : end] == [0.0] * span.prompt_tokens + completion.log_probs
            assert row.token_mask[span.start : end] == [0.0] * span.prompt_tokens + [1.0] * (end - sampled)
            assert span.mean_log_prob == pytest.approx(sum(completion.log_probs) / len(completion.log_probs))
        assert end == len(row.token_ids)
        versions = [span.weight_version for span in verdict.spans]
        first = plan is plans[0]
        assert versions == ([1] * first_update + [2] if first else [2] * len(versions))
    assert outcomes["rollout-000"][0].terminal_selection == "declared"
    assert outcomes["rollout-005"][0].terminal_selection == "response_id"


@pytest.fixture
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    # By import_module: the package's attribute of that name is the command.
    monkeypatch.setattr(importlib.import_module("tokencustody.demo.command"), "MAX_NEW_TOKENS", 3)


def test_three_processes_report_what_the_database_holds_and_retire_it(
    short_answers: None, store_url: str
) -> None:
    arguments = ["demo", "--staging", "--rollouts", "5", "--turns", "2", "--workers", "2", "--url", store_url]
    result = CliRunner().invoke(app, [*arguments, "--run", "told", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    plans = plan_staged_rollouts(5, 2, seed=0)

    assert report["run"] == "told"
    assert report["masked"] == REASONS
    assert report["trainable"] == sum(report["terminals"].values()) == 2
    assert report["calls"] == sum(plan.calls for plan in plans)
    assert report["calls"] == report["calls_recorded"] + len(report["failures"]) + len(
        report["calls_refused"]
    )
    assert report["calls"] == report["roots"] + report["resolved"] + report["unresolved"]
    assert set(report["failures"].values()) == {"worker_capture_failed", "unresolved_parent"}
    assert report["retries_absorbed"] == sum(len(plan.retried_calls) for plan in plans)
    assert report["retired"] == report["rollouts"] == 5

    shown, spans = report["shown_rollout"], report["shown_spans"]
    with SqlStagingStore(store_url, run="told") as staging:
        left = staging.orphans()
        staged = staging.fetch(left)
        keys = [f"{shown}/{span['model_call_id']}" for span in spans]
        assert len(staging.fetch_prefix_token_ids(keys)) == spans[-1]["end"]
    assert len(left) == report["staged_calls_left"] == report["calls_recorded"]
    assert {call.weight_version for call in staged} == {1, 2}
    by_key = {call.staging_key: call for call in staged}
    for key, span in zip(keys, spans, strict=True):
        call = by_key[key]
        assert (call.prev_len, call.cum_len) == (span["start"], span["end"])
        assert call.token_mask_delta.count(1.0) == span["generated_tokens"]
        assert call.weight_version == span["weight_version"]

    async def read_retired() -> None:
        async with SqlLineageStore(store_url, run="told") as ledger:
            for plan in plans:
                with pytest.raises(RolloutRetiredError):
                    await ledger.manifest(plan.rollout.rollout_id)

    asyncio.run(read_retired())
    again = CliRunner().invoke(app, [*arguments, "--run", "told", "--json"])
    assert again.exit_code == 1
    assert "run told already has rollouts; name another --run" in again.stderr
    assert again.stdout == ""


def test_a_person_sees_the_totals_one_training_row_and_a_query_that_runs(
    short_answers: None, tmp_path: Path
) -> None:
    database = tmp_path / "captures.db"
    arguments = [
        "demo",
        "--staging",
        "--rollouts",
        "3",
        "--turns",
        "2",
        "--url",
        str(database),
        "--run",
        "shown",
    ]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "150"})
    assert result.exit_code == 0, result.output
    for words in (
        "rollouts trainable",
        "worker_capture_failed: the worker could not stage a call",
        "The training row of rollout-002",
        f"sqlite:///{database}",
    ):
        assert words in result.stdout

    query = result.stdout[result.stdout.index("--") :]
    connection = sqlite3.connect(database)
    try:
        rows = connection.execute(query).fetchall()
        staged = connection.execute("SELECT sum(delta_len) FROM staged_calls").fetchone()
    finally:
        connection.close()
    assert sum(row[3] for row in rows) == staged[0] > 0


def test_without_a_trainable_rollout_the_demo_says_so_and_shows_no_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    verdict = Verdict("rollout-000", "why", "", None, 0.0, calls=0, failures={"call": "why"})
    report = make_report(
        [asdict(verdict)], asdict(Tally(calls=1)), {"retired": 1, "staged_calls_left": 0}, 1.0
    )

    async def masked(*arguments: Any, **options: Any) -> StagingReport:
        return report

    monkeypatch.setattr("tokencustody.demo.staging.run.run_staging_demo", masked)
    arguments = ["demo", "--staging", "--url", str(tmp_path / "captures.db")]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "150"})
    assert result.exit_code == 0, result.output
    trainable = next(line for line in result.stdout.splitlines() if "rollouts trainable" in line)
    assert trainable.split("│")[2].strip() == "0"
    assert "training row" not in result.stdout


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda coords: None, "worker_response_missing_commit_coordinates"),
        (lambda coords: coords | {"cum_len": 9}, "invalid_worker_commit_coordinates"),
        (lambda coords: coords | {"model_call_id": "other"}, "invalid_worker_commit_coordinates"),
        (lambda coords: coords | {"rollout_id": "other"}, "invalid_worker_commit_coordinates"),
    ],
)
async def test_an_answer_without_the_coordinates_of_its_call_is_a_failure_in_the_ledger(
    sqlite_url: str, change: Callable[[dict[str, Any]], dict[str, Any] | None], reason: str
) -> None:
    coords = CommitCoords(
        rollout_id="r",
        model_call_id="c",
        prev_len=0,
        delta_len=2,
        cum_len=2,
        weight_version=1,
        digest="a" * 64,
        extras_digest="b" * 64,
        staging_key="r/c",
        chain_hash="c" * 64,
        cumulative_hash="d" * 64,
    ).model_dump()
    output = [{"type": "message", "role": "assistant", "content": "Apple."}]
    answer = {
        "response": {"id": "response-1", "output": output},
        "finish_reason": "stop",
        "commit_coords": change(coords),
        "altered_by_text": False,
    }

    async def ask(request: dict[str, Any]) -> dict[str, Any]:
        return answer

    async with SqlLineageStore(sqlite_url) as ledger:
        assert await Gateway(ledger).call(ask, "r", "c", QUESTION) == answer
        manifest = await ledger.manifest("r")
        assert [(f["model_call_id"], f["reason"]) for f in manifest["failures"]] == [("c", reason)]
        assert manifest["records"] == []

        answer["commit_coords"] = coords
        await Gateway(ledger).call(ask, "r2", "c", QUESTION)
        assert (await ledger.manifest("r2"))["failures"][0]["reason"] == "invalid_worker_commit_coordinates"


class RecordedProcesses(list[asyncio.subprocess.Process]):
    """The processes that this process started."""

    @property
    def ended(self) -> bool:
        return len(self) > 0 and all(process.returncode is not None for process in self)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> RecordedProcesses:
    processes = RecordedProcesses()
    create = asyncio.create_subprocess_exec

    async def recording(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        processes.append(await create(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", recording)
    return processes


async def run_small(url: str, on_progress: Callable[[str, int, int], None]) -> None:
    await run_staging_demo(
        url, "demo", rollouts=4, turns=2, workers=2, seed=0, max_tokens=3, progress=on_progress
    )


async def test_a_worker_that_dies_ends_the_run_with_its_name_and_no_process_left(
    sqlite_url: str, started: RecordedProcesses
) -> None:
    killed = []

    def kill_the_worker(what: str, done: int, total: int) -> None:
        # Once: a second `kill` collects the exit status itself, and asyncio then reports 255.
        if what == PLAYING and not killed:
            killed.append(started[0].kill())

    with pytest.raises(
        RoleFailedError, match=r"worker process: it was killed by signal 9|the worker closed its line"
    ):
        await run_small(sqlite_url, kill_the_worker)
    assert started.ended


async def test_a_cancelled_run_leaves_no_process_behind(sqlite_url: str, started: RecordedProcesses) -> None:
    def cancel(what: str, done: int, total: int) -> None:
        if what == PLAYING:
            running.cancel()

    running = asyncio.create_task(run_small(sqlite_url, cancel))
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(started) == 2
    assert started.ended


async def test_a_process_that_cannot_do_its_part_says_why(started: RecordedProcesses) -> None:
    async with Crew() as crew:
        await crew.start("trainer", {"url": "captures.db", "run": "not a run", "results": []})
        with pytest.raises(RoleFailedError, match="the trainer process: run 'not a run' is not 1 to 255"):
            await crew.hear()
    async with Crew() as crew:
        await crew.start("nothing", {})
        with pytest.raises(RoleFailedError, match=r"the nothing process: .*No module named"):
            await crew.hear()
    assert started.ended


async def test_a_run_with_rollouts_is_refused_before_any_process_starts(
    store_url: str, started: RecordedProcesses
) -> None:
    async with SqlLineageStore(store_url, run="demo") as ledger:
        await ledger.record_failure("another-rollout", "call", "why")
    with pytest.raises(RunTakenError, match="run demo already has rollouts"):
        await run_small(store_url, lambda what, done, total: None)
    assert started == []


@pytest.mark.parametrize("missing", ["fastapi", "httpx", "uvicorn"])
def test_without_the_http_packages_the_demo_says_in_one_line_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    for name in [*sys.modules]:
        if name.startswith(("tokencustody.control", "tokencustody.demo.staging")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    result = CliRunner().invoke(app, ["demo", "--staging", "--url", str(tmp_path / "captures.db")])
    assert result.exit_code == 1
    error = result.stderr.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert missing in error
    assert "pip install" in error
    assert INSTALL_HINT not in error
    assert not (tmp_path / "captures.db").exists()


@pytest.mark.parametrize("count", [1, 4, 5, 12])
@pytest.mark.parametrize("turns", [1, 2, MAX_TURNS])
def test_plans_are_repeatable_and_arrange_each_accident_once(count: int, turns: int) -> None:
    plans = plan_staged_rollouts(count, turns, seed=1)
    assert plans == plan_staged_rollouts(count, turns, seed=1)
    assert sum(plan.lost_call is not None for plan in plans) == 1
    assert sum(plan.forked for plan in plans) == (turns > 1)
    assert sum(plan.mistaken for plan in plans) == (count > 1 or turns == 1)
    assert all(plan.witness == "none" for plan in plans if plan.forked)
    assert all(plan.witness == "declared" for plan in plans if plan.mistaken)
    if count > 4:
        accidents = [(plan.lost_call is not None) + plan.forked + plan.mistaken for plan in plans]
        assert max(accidents) == 1
    for plan in plans:
        calls = [plan.call_id(number) for number in range(plan.calls)]
        assert {plan.lost_call, *plan.retried_calls} - {None} <= {*calls}
