"""A verification from its first rollout to its last: in this process or in several, in one order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Self, TypeVar

from tokencustody.database.url import DatabaseUrl, parse_url
from tokencustody.errors import InvalidRecordError, RolloutNotFoundError, StoreUnavailableError
from tokencustody.txn.asked import missing_txn
from tokencustody.txn.fence import RolloutKey
from tokencustody.txn.selection import PAGE, RolloutFilter
from tokencustody.verify.checkpoint import Checkpoint, Position
from tokencustody.verify.findings import Found, VerifyReport
from tokencustody.verify.rollouts import Verifier
from tokencustody.verify.rows import count_txn, page_txn
from tokencustody.watching import Watch, unwatched

DEFAULT_DEADLINE = 60.0
# Rollouts that a worker verifies before it answers: few, for an interruption waits for it.
_CHUNK = 8
# Chunks that wait for each worker, so that none is idle.
_AHEAD = 2
# Seconds of work before other processes are started, which takes about as long.
_SOON = 3.0
_SAVE_EVERY = 1.0

Result = TypeVar("Result")


def verify(
    url: str | os.PathLike[str],
    wanted: RolloutFilter | None = None,
    *,
    jobs: int = 1,
    checkpoint: str | os.PathLike[str] | None = None,
    deadline: float = DEFAULT_DEADLINE,
    watch: Watch = unwatched,
) -> VerifyReport:
    """Compute everything again that a database has recorded of the rollouts in `wanted`, or of all, and compare.

    Writes nothing to the database, whose writers go on meanwhile: each rollout is read on one snapshot. Holds one
    rollout per job in memory. `jobs` is the number of processes; more than one start anew from the program's main
    module, which therefore must do its own work only under `if __name__ == "__main__"`. `watch` sees the rollouts go
    by.

    With `checkpoint`, a file, an interrupted verification of the same database and filter goes on where it was; the
    file is removed at the end. The findings are in the order of run, rollout and call, whatever the number of jobs.

    Raises StoreUnavailableError when the database cannot be reached for `deadline` seconds or may not be read,
    SchemaMismatchError for a revision that does not fit this library, RolloutNotFoundError for a run or rollout id
    in `wanted` that nothing has and for a filter that nothing matches, and InvalidRecordError for a checkpoint that
    belongs to something else.
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
        advance = stack.enter_context(watch("verifying rollouts", total))
        advance(position.found.counts.rollouts)
        workers = stack.enter_context(_Workers(reader, os.fspath(url), deadline, jobs))
        saved_at = time.monotonic()
        try:
            for last, found in _in_order(workers, _chunks(reader, wanted, position.after)):
                position.found.counts.add(found.counts)
                position.found.findings += found.findings
                position.after = last
                advance(found.counts.rollouts)
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
    if not total and wanted != RolloutFilter():
        missing = reader.read(partial(missing_txn, wanted=wanted, address=database.display))
        raise RolloutNotFoundError(
            missing or f"0 rollouts were looked at: none in {database.display} is what was asked for"
        )
    return total


def _chunks(reader: Verifier, wanted: RolloutFilter, after: RolloutKey | None) -> Iterator[list[RolloutKey]]:
    while True:
        page = reader.read(partial(page_txn, wanted=wanted, after=after, limit=PAGE))
        for start in range(0, len(page), _CHUNK):
            yield page[start : start + _CHUNK]
        if len(page) < PAGE:
            return
        after = page[-1]


class _Workers:
    """Where chunks are verified: a thread of this process, then, if it takes long, `jobs` others once they run."""

    def __init__(self, reader: Verifier, url: str, deadline: float, jobs: int) -> None:
        self.jobs = jobs
        self._reader = reader
        self._worker_options = (url, deadline)
        self._started = time.monotonic()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verify")
        # Processes start with the mask of the thread that starts them. Ctrl-C reaches the whole group of processes, of
        # which only the first decides; and in its main thread it would leave a worker half started.
        self._starter = ThreadPoolExecutor(
            1, "verify", signal.pthread_sigmask, (signal.SIG_BLOCK, {signal.SIGINT})
        )
        self._processes: ProcessPoolExecutor | None = None
        self._first: Future[int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for executor in (self._thread, self._starter, self._processes):
            if executor is not None:
                executor.shutdown(cancel_futures=True)

    def submit(self, keys: list[RolloutKey]) -> Future[Found]:
        if self._first is None and self.jobs > 1 and time.monotonic() - self._started >= _SOON:
            self._processes = ProcessPoolExecutor(
                self.jobs,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=self._worker_options,
            )
            self._first = self._in_process(os.getpid)
        if self._first is None or not _is_up(self._first):
            return self._thread.submit(self._reader.verify, keys)
        return self._in_process(partial(_verify_in_worker, keys))

    def _in_process(self, work: Callable[[], Result]) -> Future[Result]:
        assert self._processes is not None  # noqa: S101 - made by whoever calls this
        return self._starter.submit(self._processes.submit, work).result()


def _is_up(first: Future[int]) -> bool:
    return first.done()


def _in_order(workers: _Workers, chunks: Iterator[list[RolloutKey]]) -> Iterator[tuple[RolloutKey, Found]]:
    """Yield the last rollout of each chunk and what was found in it, in order; few chunks are under way at once."""
    running: deque[tuple[RolloutKey, Future[Found]]] = deque()
    begin = islice(chunks, workers.jobs * _AHEAD)
    while True:
        try:
            running.extend((chunk[-1], workers.submit(chunk)) for chunk in begin)
            if not running:
                return
            last, future = running.popleft()
            found = future.result()
        except BrokenProcessPool as exc:
            raise StoreUnavailableError(
                f"a worker process of the verification ended: {exc}; use fewer jobs"
            ) from None
        yield last, found
        begin = islice(chunks, 1)


_worker: Verifier | None = None


def _start_worker(url: str, deadline: float) -> None:
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
