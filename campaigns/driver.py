"""Runs a campaign: workers on one database, faults while they work, and a verdict on what they were answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from random import Random
from typing import Any, TypeVar, cast

from campaigns import worker
from campaigns.board import Board
from campaigns.checker import Violation, audit, check
from campaigns.history import HistoryWriter, Operation, Outcome, read_history
from campaigns.report import Campaign, Summary
from campaigns.setups import SETUPS, Setup
from tokencustody.spill.marks import spilled_files
from tokencustody.states import Isolation
from tokencustody.store.opening import open_store
from tokencustody.txn.selection import RolloutFilter
from tokencustody.verify import Rule, verify

RUN = "campaign"
IN_A_BATCH = "inside a coalesced batch"
POINTS = ("before commit", "after commit, before acknowledgement", IN_A_BATCH)
# Faults that the driver brings about by itself, whatever the database.
OWN_FAULTS = ("kill", "points")

# The workers name parents that never come or go again, and digests and hashes that are of something else.
_BROUGHT_ABOUT = {
    Rule.PROMPT_LOST,
    Rule.DIGEST,
    Rule.PARENT_MISSING,
    Rule.LEDGER_PARENT,
    Rule.LEDGER_STAGED,
    Rule.LEDGER_ENTRY,
    Rule.STAGED_CHAIN,
    Rule.STAGED_LOST,
}
# A shared transaction of several calls is rarer than a commit.
_RARITY = {IN_A_BATCH: 16}
_PATIENCE = 60.0
_TICK = 0.02
_FORKSERVER = multiprocessing.get_context("forkserver")

Item = TypeVar("Item")
# What is being done, how much of it is done, of how much, and the faults so far.
Progress = Callable[[str, int, int, Counter[str]], None]


def known_faults(database: str) -> list[str]:
    """Return the faults that a campaign on this database can have here."""
    return [*OWN_FAULTS, *SETUPS[database].fault_names()]


def no_progress(_doing: str, _done: int, _of: int, _struck: Counter[str]) -> None:
    """Tell nobody."""


def run(campaign: Campaign, folder: Path, progress: Progress = no_progress, *, keep: bool = False) -> Summary:
    """Run a campaign, whose history and files go into the empty `folder`, and judge it.

    With `keep`, and when it did not pass, a copy of the database is left in the folder.
    """
    summary = Summary(campaign)
    began = time.monotonic()
    with SETUPS[campaign.database](folder, campaign.operations) as setup:
        with Board.create(
            folder / "board", operations=campaign.operations, rollouts=campaign.rollouts
        ) as board:
            _Run(campaign, setup, folder, board, summary, progress).until_done()
            begun = board.begun
        summary.struck.update(setup.counts())
        staged = _staged_calls(read_history(folder))

        def reading(done: int) -> None:
            progress("reading", done, begun, summary.struck)

        asyncio.run(_read_finally(setup.url, folder, begun, staged, reading))
        summary.violations += audit(setup.url, RUN) + verified(setup.url) + _marks_left(folder)
        judge(folder, summary, progress)
        if keep or not summary.passed:
            setup.keep_database()
    summary.seconds = time.monotonic() - began
    return summary


def judge(folder: Path, summary: Summary, progress: Progress = no_progress) -> None:
    """Check the history that lies in a folder, and count it."""
    history = read_history(folder)
    for operation in history:
        summary.outcomes[operation.name, operation.outcome] += 1
        if operation.outcome is Outcome.ERROR:
            summary.errors[str(operation.error)] += 1
    summary.rollouts = len({operation.rollout for operation in history})
    report = check(history, progress=lambda done, of: progress("checking", done, of, summary.struck))
    summary.violations += report.violations
    summary.undecided += report.undecided
    summary.allowed += report.allowed


@dataclass
class _Process:
    """One life of a worker."""

    name: str
    process: ForkServerProcess


@dataclass
class _Run:
    """The workers and faults of a campaign while it lasts."""

    campaign: Campaign
    setup: Setup
    folder: Path
    board: Board
    summary: Summary
    progress: Progress
    lives: Counter[int] = field(default_factory=Counter)
    is_over: bool = False

    def __post_init__(self) -> None:
        self.rng = Random(f"{self.campaign.seed}/driver")
        self.points = _shuffled(self.rng, POINTS)
        self.kinds = _shuffled(self.rng, [name for name in self.campaign.faults if name != "points"])
        self.poll = select.poll()
        self.processes: dict[int, tuple[int, _Process]] = {}  # by sentinel, with the worker's number

    def until_done(self) -> None:
        """Keep the workers running, and strike, until every operation is begun; then wait for their end."""
        campaign = self.campaign
        give_up = time.monotonic() + 60 * campaign.minutes if campaign.minutes else float("inf")
        faults = [name for name in campaign.faults if name != "points"]
        next_fault = self._pause() if faults else campaign.operations
        try:
            for number in range(campaign.workers):
                self._start(number)
            while self.board.taken < campaign.operations and time.monotonic() < give_up:
                self._wait(_TICK)
                self.progress("working", self.board.taken, campaign.operations, self.summary.struck)
                if next_fault <= self.board.taken < campaign.operations:
                    self._strike()
                    next_fault = self.board.taken + self._pause()
            self.is_over = True
            self.board.stop()
            ended_by = time.monotonic() + _PATIENCE
            while self.processes:
                self._wait(_TICK)
                if time.monotonic() > ended_by:
                    self._give_up_on_workers()
        finally:
            for _, life in self.processes.values():
                life.process.kill()
                life.process.join()

    def _pause(self) -> int:
        return max(1, round(self.campaign.fault_every * self.rng.uniform(0.5, 1.5)))

    def _start(self, number: int) -> None:
        self.lives[number] += 1
        name = f"w{number}.{self.lives[number]}"
        kill = None
        # Half of the workers die, and those have more tasks and one connection, so that calls gather.
        is_to_die = number % 2 == 0
        isolation = self.campaign.isolation[number // 2 % len(self.campaign.isolation)]
        gathers = isolation != Isolation.SERIALIZABLE or self.campaign.database == "sqlite"
        if is_to_die and "points" in self.campaign.faults:
            point = next(point for point in self.points if gathers or point != IN_A_BATCH)
            most = max(1, self.campaign.kill_every // _RARITY.get(point, 1))
            kill = (point, self.rng.randint(1, most))
        settings = worker.Settings(
            url=self.setup.url,
            run=RUN,
            seed=self.campaign.seed,
            name=name,
            folder=str(self.folder),
            tasks=self.campaign.tasks * (2 if is_to_die else 1),
            deadline=self.campaign.deadline,
            pool_size=1 if is_to_die else 2,
            isolation=isolation,
            kill=kill,
        )
        worker.log_file(self.folder, name).touch()
        # Most lives are short, so the server that it is forked from had better have imported what it needs.
        process = _FORKSERVER.Process(target=worker.main, args=(settings,), daemon=True)
        process.start()
        self.poll.register(process.sentinel, select.POLLIN)
        self.processes[process.sentinel] = (number, _Process(name, process))

    def _wait(self, seconds: float) -> None:
        """Wait for workers to end, at most so long; count how they did, and start those that were killed again."""
        for sentinel, _ in self.poll.poll(seconds * 1000):
            number, life = self.processes.pop(sentinel)
            self.poll.unregister(sentinel)
            self._count_end(life)
            if not self.is_over and self.board.taken < self.campaign.operations:
                self._start(number)

    def _count_end(self, life: _Process) -> None:
        life.process.join()
        code = life.process.exitcode
        life.process.close()
        note = self.folder / f"{life.name}.killed"
        if code == -signal.SIGKILL:
            self.summary.killed[note.read_text() if note.exists() else "from outside"] += 1
        elif code != 0:
            log = worker.log_file(self.folder, life.name).read_text(errors="replace")
            self.summary.crashes.append(f"worker {life.name} ended with {code}: {log[-2000:]}")
        stats = self.folder / f"{life.name}.stats"
        if stats.exists():
            self.summary.stats.update(json.loads(stats.read_text()))

    def _strike(self) -> None:
        kind = next(self.kinds)
        if kind == "kill":
            _, life = self.rng.choice(list(self.processes.values()))
            life.process.kill()
            self.summary.struck[kind] += 1
            return
        fault = self.setup.faults[kind]
        struck = fault.strike(self.rng)
        self.summary.struck[kind] += 1 if struck is None else struck
        if fault.seconds is not None:
            shortest, longest = fault.seconds
            # Mostly short, so that most operations outlast it.
            until = time.monotonic() + shortest + (longest - shortest) * self.rng.random() ** 3
            while (left := until - time.monotonic()) > 0:
                self._wait(min(left, _TICK))
            fault.end()

    def _give_up_on_workers(self) -> None:
        for _, life in self.processes.values():
            # faulthandler writes down where it hangs.
            with contextlib.suppress(ProcessLookupError):
                os.kill(cast(int, life.process.pid), signal.SIGABRT)


def _shuffled(rng: Random, items: Sequence[Item]) -> Iterator[Item]:
    """Yield all items in a random order, again and again, so that each has its turn soon."""
    while items:
        yield from rng.sample(items, len(items))


def _staged_calls(history: Sequence[Operation]) -> dict[str, set[str]]:
    """Return the ids of the calls that workers tried to stage, by rollout."""
    staged: dict[str, set[str]] = {}
    for operation in history:
        if operation.name == "stage":
            staged.setdefault(operation.rollout, set()).add(operation.arguments["call"])
    return staged


async def _read_finally(
    url: str, folder: Path, rollouts: int, staged: Mapping[str, set[str]], progress: Callable[[int], None]
) -> None:
    """Append what every rollout holds now, so that whatever was acknowledged must show."""
    with HistoryWriter(folder / "final.jsonl", "final") as final:
        async with open_store(url, run=RUN, spill=worker.spill_folder(folder)) as store:
            for number in range(1, rollouts + 1):
                rollout = f"rollout-{number}"
                # First, for it brings in the marks that still wait on this host.
                await _note(final, "freeze", rollout, {}, worker.freeze(store, rollout, {}))
                await _note(final, "manifest", rollout, {}, worker.manifest(store, rollout))
                for call in sorted(staged.get(rollout, ())):
                    await _note(final, "fetch", rollout, {"call": call}, worker.fetch(store, rollout, call))
                progress(number)


def verified(url: str, run: str = RUN) -> list[Violation]:
    """Return what `verify` finds that no writer can bring about, however it errs, if the store keeps its promises."""
    return [
        Violation(f"verify: {finding.rule}", finding.rollout_id, f"{finding.model_call_id}: {finding.text}")
        for finding in verify(url, RolloutFilter(run=run)).findings
        if finding.rule not in _BROUGHT_ABOUT
    ]


def _marks_left(folder: Path) -> list[Violation]:
    """Return the spilled marks that reached no rollout though the database is there and every rollout was frozen."""
    return [
        Violation(
            "spilled mark left",
            file.mark.key.rollout_id if file.mark else "",
            f"{file.path.name} still waits",
        )
        for file in spilled_files(worker.spill_folder(folder))
    ]


async def _note(
    final: HistoryWriter, name: str, rollout: str, arguments: dict[str, Any], reading: Any
) -> None:
    number = final.invoke(name, rollout, **arguments)
    try:
        final.answer(number, Outcome.OK, value=await reading)
    except Exception as exc:
        # Not even StoreUnavailableError is excused now.
        final.answer(number, Outcome.ERROR, error=type(exc).__name__)
