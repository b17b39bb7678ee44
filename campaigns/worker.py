"""A process of a campaign: several tasks that use one store at once and write down what they were answered.

It ends when the board hands out no more operations, when its driver ends, or by its own hand at a fault point.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from campaigns.board import Board
from campaigns.history import HistoryWriter, Outcome
from campaigns.workload import (
    FAILURE_REASONS,
    REFUSAL_CODES,
    Step,
    choose_step,
    content_id,
    entry_id,
    plan_rollout,
    record_id,
    staged_id,
)
from tokencustody.database.faults import FAULT_POINTS
from tokencustody.database.stats import STATS, Kind
from tokencustody.errors import StoreUnavailableError
from tokencustody.staging.records import staging_key
from tokencustody.store.opening import CaptureStore, open_store

# Out of a hundred operations one is cancelled within so many seconds.
_CANCELLED = 0.01
_CANCELLED_WITHIN = 0.02
# Seconds after an operation for which the database was not available.
_PAUSE = 0.3
_STATS_EVERY = 20
_COUNTERS = [stat.name for stat in STATS if stat.kind is Kind.COUNTER]

Method = Callable[[], Awaitable[Any]]


class WrongMatchError(Exception):
    """A resolver's match contradicts itself."""


class StagedConflict(Exception):  # noqa: N818 - the name that stands in a history
    """A staging store refused a record for another one under its key."""


@dataclass(frozen=True)
class Settings:
    """What a worker is told. `kill` names a fault point and after how often it is reached the process ends there."""

    url: str
    run: str
    seed: int
    name: str
    folder: str
    tasks: int
    deadline: float
    pool_size: int
    isolation: str
    kill: tuple[str, int] | None = None


class Worker:
    """The tasks of one process, which share a store and what they saw of snapshots."""

    def __init__(self, settings: Settings, board: Board, store: CaptureStore) -> None:
        self._settings = settings
        self._board = board
        self._store = store
        self._snapshots: dict[str, tuple[str, int]] = {}
        self._marking = asyncio.Lock()
        self._stats = Path(settings.folder) / f"{settings.name}.stats"
        self._done = 0

    async def run(self) -> None:
        """Work until the board hands out no more."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._settings.tasks):
                tasks.create_task(self._work(f"{self._settings.name}-{number}"))
        self._write_stats()

    async def _work(self, name: str) -> None:
        rng = Random(f"{self._settings.seed}/{name}")
        with HistoryWriter(Path(self._settings.folder) / f"{name}.jsonl", name) as history:
            while (turn := self._board.take(rng)) is not None:
                rollout = plan_rollout(self._settings.seed, turn.rollout)
                step = choose_step(rng, rollout, turn.age)
                patience = rng.uniform(0, _CANCELLED_WITHIN) if rng.random() < _CANCELLED else None
                await self._perform(history, rollout.id, step, patience)
                self._keep_stats()

    def _keep_stats(self) -> None:
        self._done += 1
        if self._done % _STATS_EVERY == 0:
            self._write_stats()

    def _write_stats(self) -> None:
        new = self._stats.with_suffix(".new")
        stats = self._store.stats()
        new.write_text(json.dumps({name: stats[name] for name in _COUNTERS}))
        new.rename(self._stats)

    async def _perform(
        self, history: HistoryWriter, rollout: str, step: Step, patience: float | None
    ) -> None:
        arguments, method = getattr(self, f"_{step.name}")(step)
        number = history.invoke(step.name, rollout, **arguments)
        try:
            async with asyncio.timeout(patience) as cut:
                value = await method()
        except Exception as exc:
            error = type(exc).__name__
            is_cut = isinstance(exc, TimeoutError) and cut.expired()
            if is_cut or isinstance(exc, StoreUnavailableError):
                history.answer(number, Outcome.UNKNOWN, error=error)
                if not is_cut:
                    # As a caller would: a full disk refuses so fast that little else would happen.
                    await asyncio.sleep(_PAUSE)
                return
            history.answer(number, Outcome.ERROR, error=error)
            if not isinstance(exc, ValueError | LookupError | RuntimeError | StagedConflict):
                traceback.print_exc()
        else:
            history.answer(number, Outcome.OK, value=value)

    def _put(self, step: Step) -> tuple[dict[str, Any], Method]:
        entry = step.call.entry(step.variant)
        arguments = {
            "call": step.call.id,
            "payload": entry_id(entry),
            "parent": entry.parent_call_id,
            "conversation": step.call.conversation,
            "tokens": content_id(step.call.tokens(step.variant)),
            "delta": entry.prompt_is_delta,
        }
        if entry.prompt_is_delta and step.call.parent is not None:
            arguments["continues"] = content_id(step.call.parent.sequence)
        return arguments, lambda: self._store.sink.put(entry)

    def _begin(self, step: Step) -> tuple[dict[str, Any], Method]:
        call = step.call
        return {"call": call.id}, lambda: self._store.sink.begin_call(call.rollout, call.id)

    def _refuse(self, step: Step) -> tuple[dict[str, Any], Method]:
        call, code = step.call, REFUSAL_CODES[step.second_choice]
        return (
            {"call": call.id, "code": code},
            lambda: self._store.sink.refuse_call(call.rollout, model_call_id=call.id, code=code),
        )

    def _mark(self, step: Step) -> tuple[dict[str, Any], Method]:
        async def mark() -> dict[str, bool]:
            # One at a time, so that the counter tells whether it was this mark that was spilled.
            async with self._marking:
                before = self._spilled()
                await self._store.sink.mark_incomplete(step.call.rollout, step.call.id)
                return {"spilled": self._spilled() > before}

        return {"call": step.call.id}, mark

    def _spilled(self) -> int:
        return self._store.stats().get("spilled_marks", 0)

    def _freeze(self, step: Step) -> tuple[dict[str, Any], Method]:
        return {}, lambda: freeze(self._store, step.call.rollout, self._snapshots)

    def _drop(self, step: Step) -> tuple[dict[str, Any], Method]:
        snapshot_id, version = self._snapshots.get(step.call.rollout, ("never-made", 1))
        version += step.second_choice
        return (
            {"snapshot_id": snapshot_id, "version": version},
            lambda: self._store.source.drop(step.call.rollout, snapshot_id, version),
        )

    def _retire(self, step: Step) -> tuple[dict[str, Any], Method]:
        store = self._store.lineage if step.second_choice else self._store.source
        return {}, lambda: _removal(store.retire, step.call.rollout)

    def _delete(self, step: Step) -> tuple[dict[str, Any], Method]:
        store = self._store.lineage if step.second_choice else self._store.source
        return {}, lambda: _removal(store.delete, step.call.rollout)

    def _record(self, step: Step) -> tuple[dict[str, Any], Method]:
        commit = step.call.commit(step.variant)
        arguments = {
            "call": step.call.id,
            "payload": record_id(commit.record.model_dump(mode="json")),
            "conversation": step.call.conversation,
            "tokens": commit.record.cumulative_hash,
            "parent": commit.record.parent_call_id,
        }
        return arguments, lambda: self._store.lineage.record(commit)

    def _record_failure(self, step: Step) -> tuple[dict[str, Any], Method]:
        call, reason = step.call, FAILURE_REASONS[step.second_choice]
        return (
            {"call": call.id, "reason": reason},
            lambda: self._store.lineage.record_failure(call.rollout, call.id, reason),
        )

    def _manifest(self, step: Step) -> tuple[dict[str, Any], Method]:
        return {}, lambda: manifest(self._store, step.call.rollout)

    def _resolve(self, step: Step) -> tuple[dict[str, Any], Method]:
        async def resolve() -> dict[str, Any]:
            found = await self._store.lineage.resolve(step.call.rollout, step.call.request)
            match = found.match
            answer = {"status": str(found.status), "reason": found.reason}
            if match is None:
                return answer | {"parent": None, "tokens": None, "kind": None}
            if match.staging_chain:
                return answer | {"parent": match.model_call_id, "tokens": match.digest, "kind": "ledger"}
            if match.prev_len != len(match.cumulative_token_ids):
                raise WrongMatchError(f"{match.model_call_id}: {match.prev_len} is not the number of tokens")
            tokens = content_id(match.cumulative_token_ids)
            return answer | {"parent": match.model_call_id, "tokens": tokens, "kind": "complete"}

        return {"conversations": [call.conversation for call in step.call.line]}, resolve

    def _stage(self, step: Step) -> tuple[dict[str, Any], Method]:
        record = step.call.staged(step.variant)

        async def stage() -> None:
            result = await asyncio.to_thread(self._store.staging.stage, record)
            if result.ok:
                return
            said = result.error or ""
            if "was staged before with other data" in said:
                raise StagedConflict(said)
            # The store's own error, which a staging sink answers as text.
            raise StoreUnavailableError(said) if "is not available" in said else AssertionError(said)

        return {"call": step.call.id, "payload": staged_id(record)}, stage

    def _fetch(self, step: Step) -> tuple[dict[str, Any], Method]:
        return {"call": step.call.id}, lambda: fetch(self._store, step.call.rollout, step.call.id)

    def _unstage(self, step: Step) -> tuple[dict[str, Any], Method]:
        key = staging_key(step.call.rollout, step.call.id)

        async def unstage() -> bool:
            return await asyncio.to_thread(self._store.staging.delete, [key]) == [key]

        return {"call": step.call.id}, unstage


async def freeze(store: CaptureStore, rollout: str, snapshots: dict[str, tuple[str, int]]) -> dict[str, Any]:
    """Freeze a rollout, remember its snapshot's id and version, and return what a history holds of it."""
    snapshot = await store.source.freeze(rollout)
    snapshots[rollout] = (snapshot.snapshot_id, snapshot.version)
    return {
        "snapshot_id": snapshot.snapshot_id,
        "version": snapshot.version,
        "incomplete": snapshot.incomplete,
        "calls": {entry.model_call_id: entry_id(entry) for entry in snapshot.entries},
        "refusals": {refusal.model_call_id: refusal.code for refusal in snapshot.refusals},
    }


async def manifest(store: CaptureStore, rollout: str) -> dict[str, Any]:
    """Read a rollout's manifest and return what a history holds of it."""
    found = await store.lineage.manifest(rollout)
    return {
        "records": [[record["model_call_id"], record_id(record)] for record in found["records"]],
        "failures": [[failure["model_call_id"], failure["reason"]] for failure in found["failures"]],
    }


async def fetch(store: CaptureStore, rollout: str, call: str) -> str:
    """Read a staged call and return its content id."""
    (snapshot,) = await asyncio.to_thread(store.staging.fetch, [staging_key(rollout, call)])
    return staged_id(snapshot)


def spill_folder(folder: Path) -> Path:
    """Return where a campaign's marks wait while its database is away."""
    return folder / "spill"


async def _removal(remove: Callable[[Sequence[str]], Awaitable[Any]], rollout: str) -> str:
    result = await remove([rollout])
    return "removed" if result["removed"] == [rollout] else "absent"


def _kill_at(point: str, reached: int, note: Path) -> None:
    left = reached

    async def kill() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            note.write_text(point)  # noqa: ASYNC240 - the last thing that this process does
            os.kill(os.getpid(), signal.SIGKILL)

    FAULT_POINTS[point] = kill


async def _main(settings: Settings) -> None:
    folder = Path(settings.folder)
    if settings.kill is not None:
        _kill_at(*settings.kill, folder / f"{settings.name}.killed")
    async with open_store(
        settings.url,
        run=settings.run,
        deadline=settings.deadline,
        pool_size=settings.pool_size,
        isolation=settings.isolation,
        spill=spill_folder(folder),
    ) as store:
        with Board(folder / "board") as board:
            await Worker(settings, board, store).run()


def log_file(folder: Path, name: str) -> Path:
    """Return where a worker prints, its own death included."""
    return folder / f"{name}.log"


def main(settings: Settings) -> None:
    """Be the worker's process, to its end or to that of its driver."""
    threading.Thread(target=_end_with_driver, daemon=True).start()
    log = os.open(log_file(Path(settings.folder), settings.name), os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(log, stream)
    # A driver that has lost its patience with a worker sends SIGABRT.
    faulthandler.enable()
    # Losses that a campaign brings about are no news.
    logging.disable(logging.WARNING)
    asyncio.run(_main(settings))


def _end_with_driver() -> None:
    # Else a worker whose driver was killed goes on by itself.
    driver = multiprocessing.parent_process()
    assert driver is not None
    driver.join()
    os._exit(1)
