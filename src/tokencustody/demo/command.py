"""`tokencustody demo`: the main job on a real model."""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import time
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from tokencustody.demo.tasks import MAX_TURNS, plan_rollouts
from tokencustody.terminal import interrupts
from tokencustody.terminal.printing import console, printable, program

if TYPE_CHECKING:
    from tokencustody.demo.report import Report

Result = TypeVar("Result")

MAX_NEW_TOKENS = 40
DEFAULT_URL = "sqlite:///tokencustody-demo.db"

_QUESTIONS = """
  -- What is incomplete, and why?
  SELECT rollout_id, reason, model_call_id, detail, since FROM audit_incomplete WHERE run = '{run}';

  -- How were parents decided?
  SELECT parent_resolution, parent_resolution_reason, count(*) AS calls, sum(generation_len) AS generated
  FROM audit_calls WHERE run = '{run}' GROUP BY 1, 2 ORDER BY 3 DESC;

  -- What else than its freeze changed a rollout?
  SELECT rollout_id, version, event, model_call_id, recorded_at FROM audit_versions
  WHERE run = '{run}' AND event NOT IN ('open', 'freeze') ORDER BY recorded_at;
"""

_STAGING_STEPS = """
The staged calls of run {run} stay in {url}; the ledger's rows went when the trainer retired the rollouts.

  -- How many tokens did each weight version add?
  SELECT weight_version, mode, count(*) AS calls, sum(delta_len) AS tokens
  FROM staged_calls WHERE run = '{run}' GROUP BY 1, 2 ORDER BY 1, 2;
"""


def demo(
    url: Annotated[
        str,
        typer.Option(envvar="TOKENCUSTODY_URL", help="Where to capture: a SQLite file or a PostgreSQL URL."),
    ] = DEFAULT_URL,
    run: Annotated[str, typer.Option(help="The run's namespace; by default one named after the time.")] = "",
    rollouts: Annotated[int, typer.Option(min=1, max=999, help="How many rollouts to play.")] = 24,
    turns: Annotated[int, typer.Option(min=1, max=MAX_TURNS, help="The most turns a rollout may have.")] = 5,
    workers: Annotated[
        int, typer.Option(min=1, max=16, help="How many rollouts to play at the same time.")
    ] = 4,
    seed: Annotated[int, typer.Option(help="Seeds the conversations and the sampling.")] = 0,
    staging: Annotated[
        bool,
        typer.Option("--staging", help="Let a worker stage the tokens, and a trainer read them over HTTP."),
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the report as JSON only.")] = False,
) -> None:
    """Play multi-turn rollouts against a real chat model on this machine and capture every token.

    Announces each call before it is made and puts it after, retries some with identical bytes, loses one on
    purpose, then freezes every rollout and reports what the store holds. The database stays.

    With --staging, an inference worker, a serving process and a trainer are processes of their own: the worker stages
    each call's tokens, the serving process keeps the ledger, and the trainer verifies what it can train on.
    """
    # The time to find it by, and a part that no demo started in the same second has.
    run = run or f"{time.strftime('demo-%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    if staging:
        _show_staging(url, run, rollouts, turns, workers, seed, json_output)
        return
    from tokencustody.demo.model import DemoPackagesMissingError, ModelServerError, find_model
    from tokencustody.demo.report import calls_table, totals_table
    from tokencustody.demo.unused import RunTakenError
    from tokencustody.errors import PayloadConflictError, TokenCaptureFrozenError

    try:
        find_model()
        report = _run(_demo(url, run, rollouts, turns, workers, seed))
    except (DemoPackagesMissingError, ModelServerError, RunTakenError) as exc:
        _fail(str(exc))
    except (PayloadConflictError, TokenCaptureFrozenError):
        _fail(f"another process plays these rollouts in run {run}; name another --run")
    if json_output:
        _print_json(url, run, report.as_json())
        return
    out = console(folds=True)
    out.print(totals_table(report), calls_table(report))
    out.print(_next_steps(url, run, report), soft_wrap=True)


async def _demo(url: str, run: str, rollouts: int, turns: int, workers: int, seed: int) -> Report:
    from tokencustody.demo.model import MODEL_NAME, ChatModel
    from tokencustody.demo.report import make_report
    from tokencustody.demo.rollouts import RolloutPlayer
    from tokencustody.demo.unused import check_unused
    from tokencustody.store import open_store

    await check_unused(url, run)
    plans = plan_rollouts(rollouts, turns, seed)
    calls = sum(len(plan.user_turns) + plan.too_long for plan in plans)
    model = ChatModel(slots=workers)
    with _progress() as progress:
        loading = progress.add_task(f"Loading {MODEL_NAME}", total=None)
        async with open_store(url, run=run) as store, model:
            progress.update(loading, total=1, completed=1)
            playing = progress.add_task("Playing and capturing", total=calls)
            player = RolloutPlayer(
                model, store, MAX_NEW_TOKENS, seed, on_call=lambda: progress.advance(playing)
            )
            started = time.perf_counter()
            played = await player.play_all(plans, workers)
            seconds = time.perf_counter() - started
            freezing = progress.add_task("Freezing and reading back", total=len(plans))
            snapshots = []
            for plan in plans:
                snapshots.append(await store.source.freeze(plan.rollout_id))
                progress.advance(freezing)
    return make_report(snapshots, played, seconds)


def _show_staging(
    url: str, run: str, rollouts: int, turns: int, workers: int, seed: int, json_output: bool
) -> None:
    try:
        from tokencustody.demo.model import find_model

        find_model()
        # What its processes need besides.
        from tokencustody.control import RolloutControlClient, make_control_app  # noqa: F401
        from tokencustody.demo.staging.processes import RoleFailedError
        from tokencustody.demo.staging.report import spans_table, totals_table
        from tokencustody.demo.staging.run import run_staging_demo
        from tokencustody.demo.unused import RunTakenError
    except ImportError as exc:
        _fail(str(exc))
    with contextlib.ExitStack() as exits:
        # Not before there is something to show: even an empty one prints a line.
        progress: Progress | None = None
        bars: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            nonlocal progress
            progress = progress or exits.enter_context(_progress())
            if what not in bars:
                bars[what] = progress.add_task(what, total=total)
            progress.update(bars[what], completed=done)

        try:
            report = _run(
                run_staging_demo(
                    url,
                    run,
                    rollouts=rollouts,
                    turns=turns,
                    workers=workers,
                    seed=seed,
                    max_tokens=MAX_NEW_TOKENS,
                    progress=show,
                )
            )
        except (RoleFailedError, RunTakenError) as exc:
            exits.close()
            _fail(str(exc))
    if json_output:
        _print_json(url, run, report.as_json())
        return
    out = console(folds=True)
    out.print(totals_table(report))
    if report.shown_spans:
        out.print(spans_table(report))
    out.print(_STAGING_STEPS.format(run=run, url=_shown(url)), soft_wrap=True)


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    from tokencustody.demo.children import kill_children

    def kill() -> str:
        kill_children()
        return ""

    return interrupts.run(work, notice="ending the demo's processes; Ctrl-C again kills them", at_once=kill)


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {printable(message)}", err=True)
    raise typer.Exit(1) from None


def _print_json(url: str, run: str, report: dict[str, Any]) -> None:
    from tokencustody.demo.model import MODEL_NAME

    typer.echo(json.dumps({"run": run, "url": _shown(url), "model": MODEL_NAME, **report}))


def _shown(url: str) -> str:
    from tokencustody.database.url import parse_url

    return parse_url(url).display


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    columns = (
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield progress


def _next_steps(url: str, run: str, report: Report) -> str:
    from tokencustody.database.url import parse_url

    parsed = parse_url(url)
    where = f"--url {shlex.quote(parsed.display)} --run {run}"
    return f"""
The run {run} stays in {parsed.display}

  {program()} rollouts {where}
  {program()} show {report.shown_rollout} {where}
  {program()} verify {where}
  {program()} export {run} {where}

Three questions for `{program()} sql`, or {"sqlite3" if parsed.is_sqlite else "psql"}:
{_QUESTIONS.format(run=run)}"""
