"""One run of the demo with worker staging: starts the three processes, and gathers what they report."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from tokencustody.demo.staging.plans import plan_staged_rollouts
from tokencustody.demo.staging.processes import Crew
from tokencustody.demo.staging.report import StagingReport, make_report
from tokencustody.demo.unused import check_unused

# What is being done, how much of it is done, and how much there is.
Progress = Callable[[str, int, int], None]

LOADING = "Starting worker and serving process"
PLAYING = "Playing, staging, recording"
TRAINING = "Reading, verifying, linearising"


async def run_staging_demo(
    url: str,
    run: str,
    *,
    rollouts: int,
    turns: int,
    workers: int,
    seed: int,
    max_tokens: int,
    context: int = 2048,
    progress: Progress,
) -> StagingReport:
    """Play `rollouts` rollouts, `workers` at a time, train on them, and return what came of it.

    All processes have ended when this returns or raises. Raises RunTakenError, RoleFailedError when a process fails,
    and the errors of a store for a database that cannot be used.
    """
    plans = plan_staged_rollouts(rollouts, turns, seed)
    calls = sum(plan.calls for plan in plans)
    # Before the processes start: it makes a new SQLite file, and finds a database that cannot be used.
    await check_unused(url, run)

    database: dict[str, Any] = {"url": url, "run": run}
    auth_token = secrets.token_urlsafe(32)
    async with Crew() as crew:
        with contextlib.ExitStack() as exits:
            pairs = [socket.socketpair() for _ in range(workers)]
            for sock in (sock for pair in pairs for sock in pair):
                exits.enter_context(sock)
            worker_ends, serving_ends = zip(*pairs, strict=True)
            progress(LOADING, 0, 2)
            await crew.start(
                "worker",
                database
                | {
                    "lines": [sock.fileno() for sock in worker_ends],
                    "context": context,
                    "update_after": calls // 2,
                    "lost": [plan.lost_call for plan in plans if plan.lost_call],
                    "retried": [call for plan in plans for call in plan.retried_calls],
                    "max_tokens": max_tokens,
                    "seed": seed,
                },
                worker_ends,
            )
            await crew.start(
                "serving",
                database
                | {
                    "lines": [sock.fileno() for sock in serving_ends],
                    "context": context,
                    "auth_token": auth_token,
                    "rollouts": rollouts,
                    "turns": turns,
                    "seed": seed,
                },
                serving_ends,
            )
        ready, called, base_url, began = 0, 0, "", 0.0
        while True:
            event = await crew.hear()
            if "ready" in event:
                ready += 1
                base_url = event.get("base_url", base_url)
                progress(LOADING, ready, 2)
                began = time.perf_counter()
            elif "called" in event:
                called += event["called"]
                progress(PLAYING, called, calls)
            else:
                break
        played, seconds = event, time.perf_counter() - began

        orders = database | {"base_url": base_url, "auth_token": auth_token, "results": played["results"]}
        await crew.start("trainer", orders)
        verdicts: list[dict[str, Any]] = []
        progress(TRAINING, 0, len(plans))
        while "verdict" in (event := await crew.hear()):
            verdicts.append(event["verdict"])
            progress(TRAINING, len(verdicts), len(plans))
    return make_report(verdicts, played["tally"], event, seconds)
