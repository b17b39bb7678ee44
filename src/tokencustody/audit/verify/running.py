"""A verification from its first rollout to its last: in this process or in several, in one order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from functools import partial
from itertools import islice

from tokencustody.audit.reading import RolloutNotFoundError
from tokencustody.audit.selection import PAGE, RolloutFilter
from tokencustody.audit.verify.checkpoint import Checkpoint, Position
from tokencustody.audit.verify.findings import Found, VerifyReport
from tokencustody.audit.verify.rollouts import Verifier
from tokencustody.audit.verify.rows import count_txn, page_txn
from tokencustody.errors import InvalidRecordError, StoreUnavailableError
from tokencustody.sql.url import DatabaseUrl, parse_url
from tokencustody.store.fence import RolloutKey

DEFAULT_DEADLINE = 60.0
# Rollouts that a worker verifies before it answers: few, for an interruption waits for it.
_CHUNK = 8
# Chunks that wait for each worker, so that none is idle.
_AHEAD = 2
# So few are verified here before other processes have started.
_FEW = 64
_SAVE_EVERY = 1.0

Progress = Callable[[int, int], None]


def verify(
    url: str | os.PathLike[str],
    wanted: RolloutFilter | None = None,
    *,
    jobs: int = 1,
    checkpoint: str | os.PathLike[str] | None = None,
    deadline: float = DEFAULT_DEADLINE,
    progress: Progress = lambda done, total: None,
) -> VerifyReport:
    """Compute everything again that a database has recorded of the rollouts in `wanted`, or of all, and compare.

    Writes nothing to the database, whose writers go on meanwhile: each rollout is read on one snapshot. Holds one
    rollout per job in memory. `jobs` is the number of processes; more than one start anew from the program's main
    module, which therefore must do its own work only under `if __name__ == "__main__"`. `progress` is told how many
    rollouts are done and how many there are.

    With `checkpoint`, a file, an interrupted verification of the same database and filter goes on where it was; the
    file is removed at the end. The findings are in the order of run, rollout and call, whatever the number of jobs.

    Raises StoreUnavailableError when the database cannot be reached for `deadline` seconds or may not be read,
    SchemaMismatchError for another revision, RolloutNotFoundError for a rollout id in `wanted` that nothing has, and
    InvalidRecordError for a checkpoint that belongs to something else.
    """
    if type(jobs) is not int or jobs < 1:
        raise InvalidRecordError(f"jobs must be an integer of at least 1, not {jobs!r}")
    database, wanted = parse_url(url), wanted or RolloutFilter()
    saved = None if checkpoint is None else Checkpoint(checkpoint, database, wanted)
    position = Position() if saved is None else saved.load()
    started = time.monotonic() - position.seconds

    def seconds() -> float:
        return time.monotonic() - started

    with ExitStack() as stack:
        reader = stack.enter_context(Verifier(database, deadline))
        total = _total(reader, database, wanted)
        progress(position.found.counts.rollouts, total)
        executor: Executor
        if jobs == 1 or total <= _FEW:
            executor = ThreadPoolExecutor(1, thread_name_prefix="verify")
            work: Callable[[list[RolloutKey]], Found] = reader.verify
        else:
            executor = ProcessPoolExecutor(
                jobs,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(os.fspath(url), deadline),
            )
            work = _verify_in_worker
        stack.callback(executor.shutdown, cancel_futures=True)
        saved_at = time.monotonic()
        try:
            for last, found in _in_order(
                executor, work, _chunks(reader, wanted, position.after), jobs * _AHEAD
            ):
                position.found.counts.add(found.counts)
                position.found.findings += found.findings
                position.after = last
                progress(position.found.counts.rollouts, max(total, position.found.counts.rollouts))
                if saved is not None and time.monotonic() - saved_at >= _SAVE_EVERY:
                    position.seconds = seconds()
                    saved.save(position)
                    saved_at = time.monotonic()
        except BaseException:
            if saved is not None:
                position.seconds = seconds()
                saved.save(position)
            raise
    if saved is not None:
        saved.remove()
    findings = sorted(position.found.findings, key=lambda finding: (finding.run, finding.rollout_id))
    return VerifyReport(database.display, position.found.counts, tuple(findings), seconds())


def _total(reader: Verifier, database: DatabaseUrl, wanted: RolloutFilter) -> int:
    total = reader.read(partial(count_txn, wanted=wanted))
    for rollout_id in wanted.rollout_ids or ():
        one = RolloutFilter(run=wanted.run, rollout_ids=(rollout_id,))
        if not reader.read(partial(count_txn, wanted=one)):
            where = f"run {wanted.run} of " if wanted.run is not None else ""
            raise RolloutNotFoundError(f"rollout {rollout_id} is not in {where}{database.display}")
    return total


def _chunks(reader: Verifier, wanted: RolloutFilter, after: RolloutKey | None) -> Iterator[list[RolloutKey]]:
    while True:
        page = reader.read(partial(page_txn, wanted=wanted, after=after, limit=PAGE))
        for start in range(0, len(page), _CHUNK):
            yield page[start : start + _CHUNK]
        if len(page) < PAGE:
            return
        after = page[-1]


def _in_order(
    executor: Executor,
    work: Callable[[list[RolloutKey]], Found],
    chunks: Iterator[list[RolloutKey]],
    ahead: int,
) -> Iterator[tuple[RolloutKey, Found]]:
    """Yield the last rollout of each chunk and what was found in it, in order, while at most `ahead` are under way."""
    running: deque[tuple[RolloutKey, Future[Found]]] = deque()

    def begin(number: int) -> None:
        running.extend((chunk[-1], executor.submit(work, chunk)) for chunk in islice(chunks, number))

    begin(ahead)
    while running:
        last, future = running.popleft()
        try:
            found = future.result()
        except BrokenProcessPool as exc:
            raise StoreUnavailableError(
                f"a worker process of the verification ended: {exc}; use fewer jobs"
            ) from None
        begin(1)
        yield last, found


_worker: Verifier | None = None


def _start_worker(url: str, deadline: float) -> None:
    # Ctrl-C reaches the whole group of processes; the first of them decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    global _worker
    _worker = Verifier(parse_url(url), deadline)


def _end_with_parent() -> None:
    # Else a worker whose parent was killed waits for work for ever.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _verify_in_worker(keys: list[RolloutKey]) -> Found:
    assert _worker is not None  # noqa: S101 - the initializer ran
    return _worker.verify(keys)
