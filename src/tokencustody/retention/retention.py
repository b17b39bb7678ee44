"""Retention: retiring and deleting the rollouts that a filter asks for, and collecting what nobody will read.

Each rollout goes in a transaction of its own, however many rows it has, for its records must go together. Whatever is
interrupted has done whole rollouts: running it again does the rest.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from operator import attrgetter
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    and_,
    case,
    exists,
    func,
    select,
    true,
    tuple_,
)

from tokencustody.database.dialects import summed
from tokencustody.database.engine import DEFAULT_DEADLINE
from tokencustody.errors import DamagedMarkError
from tokencustody.ids import check_rollout_id
from tokencustody.overview.runs import RunSummary, summarize_runs
from tokencustody.schema.tables import entries, fences, ledger_calls, staged_calls
from tokencustody.states import FenceState
from tokencustody.store.base import SqlStore, now
from tokencustody.store.removal import delete_txn, disposable_txn, dispose_txn, retire_txn
from tokencustody.txn.asked import check_asked
from tokencustody.txn.fence import RolloutKey, Stamp, find_fence_txn, happened_txn, of_rollout
from tokencustody.txn.selection import PAGE, RolloutFilter, count, pages, select_fences
from tokencustody.txn.staged_calls import NOT_OPEN, STAGING_KEY

_STAGED = staged_calls.c


@dataclass(frozen=True, slots=True)
class Extent:
    """What rollouts amount to. `stored_bytes` are those of the payloads of `calls`, as they are stored.

    `never_exported` counts the rollouts that no export marked as they are now, `partly_exported` those that were
    marked, but of which no mark says that the files hold every sampled token.
    """

    runs: tuple[str, ...] = ()
    rollouts: int = 0
    open: int = 0
    frozen: int = 0
    retired: int = 0
    incomplete: int = 0
    never_exported: int = 0
    partly_exported: int = 0
    calls: int = 0
    stored_bytes: int = 0
    ledger_calls: int = 0


def merged(extents: Iterable[Extent]) -> Extent:
    """Return what rollouts amount to together, none of which is in two of these."""
    given = list(extents)
    figures = [name for name, field in Extent.__dataclass_fields__.items() if field.default == 0]
    return Extent(
        tuple(sorted({run for extent in given for run in extent.runs})),
        **{name: sum(getattr(extent, name) for extent in given) for name in figures},
    )


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of one rollout: how many `rows` are gone, or in `left` why it is still there.

    Neither, where somebody else had removed it meanwhile.
    """

    key: RolloutKey
    rows: int = 0
    removed: bool = False
    left: str = ""


Tell = Callable[[Settled], object]


class Retention(SqlStore):
    """A client that removes from every run of one database. A SQLite file that does not exist is not created.

    The methods tell `settled` of each rollout when its transaction is over. A cancelled one ends between two rollouts.
    Before a rollout goes, it is asked again, under its lock, whether it is what was listed: one that was frozen,
    marked, exported or made anew meanwhile is left. Nothing overtakes a mark that waits on this host; where one is
    damaged, its rollout is left. Each method raises StoreUnavailableError when the database cannot be reached or
    refuses; a single transaction may take `deadline` seconds.
    """

    _creates = False

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        writer: str | None = None,
        deadline: float = DEFAULT_DEADLINE,
        spill: str | os.PathLike[str] | None = "",
    ) -> None:
        super().__init__(url, writer=writer, deadline=deadline, spill=spill)

    def __repr__(self) -> str:
        return f"Retention({self._database.url.display!r})"

    async def check_run(self, run: str) -> None:
        """Raise RolloutNotFoundError, which lists the runs there are, for one without a rollout or staged call."""
        await check_asked(self._database, RolloutFilter(run=run))

    async def extent(self, wanted: RolloutFilter) -> Extent:
        """Return what the rollouts that `wanted` asks for amount to, in two statements for each fact at most."""
        matching = select_fences(wanted).subquery("matching")
        figures = {str(state): matching.c.state == state for state in FenceState}
        figures |= {"rollouts": true(), "incomplete": matching.c.incomplete}
        counts = [summed(case((meant, 1), else_=0)).label(name) for name, meant in figures.items()]
        of_fences = select(matching.c.run, *counts).group_by(matching.c.run)
        of_calls = (
            select(func.count(), summed(func.length(entries.c.payload)))
            .select_from(entries)
            .join(matching, _same_rollout(entries.c, matching.c))
        )
        of_ledger = (
            select(func.count())
            .select_from(ledger_calls)
            .join(matching, _same_rollout(ledger_calls.c, matching.c))
        )

        def look(connection: Connection) -> Extent:
            by_run = connection.execute(of_fences).all()
            calls, stored = connection.execute(of_calls).one()
            return Extent(
                runs=tuple(sorted(row.run for row in by_run)),
                **{name: sum(row._mapping[name] for row in by_run) for name in figures},
                calls=calls,
                stored_bytes=stored,
                ledger_calls=connection.scalar(of_ledger) or 0,
            )

        found = await self._database.read(look)
        if wanted.exported is True:
            return found
        never = await count(self._database, replace(wanted, exported=False))
        partly = await count(self._database, replace(wanted, partly_exported=True))
        return replace(found, never_exported=never, partly_exported=partly)

    async def states(self, wanted: RolloutFilter) -> dict[RolloutKey, FenceState]:
        """Return the present state of each rollout that is asked for."""
        return {
            RolloutKey(row.run, row.rollout_id): FenceState(row.state)
            async for page in pages(self._database, wanted)
            for row in page
        }

    async def retire(self, wanted: RolloutFilter, settled: Tell) -> None:
        """Retire the rollouts that are asked for: their records go, their fences and histories stay."""
        async for page in pages(self._database, wanted):
            for listed in page:
                await _whole(self._unless_damaged(listed, self._retire(wanted, listed)), settled)

    async def delete(self, wanted: RolloutFilter, settled: Tell) -> None:
        """Delete the rollouts that are asked for with fence, history and export marks: their ids read as unused.

        A write that comes late, to a rollout that was frozen or retired, opens it anew.
        """
        async for page in pages(self._database, wanted):
            for listed in page:
                await _whole(self._unless_damaged(listed, self._delete(wanted, listed)), settled)

    async def delete_run(self, run: str, settled: Tell, staged: Tell) -> None:
        """Delete the rollouts of a run, in every state, and then what was staged in it before this began.

        `staged` is told of the latter. What a rollout needs that is left, as `delete` leaves it, stays.
        """
        began = now()
        await self.delete(RolloutFilter(run=run), settled)
        await self.collect(began, staged, run)

    async def run_summary(self, run: str) -> RunSummary:
        """Return what a run amounts to; nothing when there is none."""
        found = await summarize_runs(self._database, check_rollout_id(run, "run"))
        return found[0] if found else RunSummary(run)

    async def orphans(self, before: datetime, run: str | None = None) -> int:
        """Return how many staged calls `collect` would remove."""
        found = 0
        async for key, named in self._with_orphans(before, run):

            def look(connection: Connection, key: RolloutKey = key, named: set[str] = named) -> int:
                return len(disposable_txn(connection, key, before, named, lock=False))

            found += await self._database.read(look)
        return found

    async def collect(self, before: datetime, settled: Tell, run: str | None = None) -> None:
        """Remove staged calls that nobody will read, staged before then, of one run or of all, with their attachments.

        No ledger row of their run names them, and their rollout is frozen, retired or has no fence. A call that was
        staged behind a freeze stays until the rollout is retired, and any for as long as one that stays continues it.
        """
        async for key, named in self._with_orphans(before, run):
            await _whole(self._collect(key, before, named), settled)

    async def _unless_damaged(self, listed: Row[Any], removal: Coroutine[Any, Any, Settled]) -> Settled:
        try:
            return await removal
        except DamagedMarkError as exc:
            return Settled(RolloutKey(listed.run, listed.rollout_id), left=str(exc))

    async def _retire(self, wanted: RolloutFilter, listed: Row[Any]) -> Settled:
        stamp = Stamp.make(now(), self.written_by)
        key = RolloutKey(listed.run, listed.rollout_id)
        rows = 0

        def attempt(connection: Connection) -> Settled:
            nonlocal rows
            fence = find_fence_txn(connection, key)
            if fence is None:
                return Settled(key)
            if fence.state is FenceState.RETIRED:
                # It may be this very retirement, whose answer was lost.
                return Settled(key, rows, removed=happened_txn(connection, key, stamp))
            if left := _change_txn(connection, key, wanted, listed):
                return Settled(key, left=left)
            rows = retire_txn(connection, key, fence, stamp)
            return Settled(key, rows, removed=True)

        return await self._write_after_marks(key, attempt)

    async def _delete(self, wanted: RolloutFilter, listed: Row[Any]) -> Settled:
        key = RolloutKey(listed.run, listed.rollout_id)
        done = Settled(key)

        def attempt(connection: Connection) -> Settled:
            nonlocal done
            if find_fence_txn(connection, key) is None:
                return done  # by an earlier try whose answer was lost, or by somebody else
            if left := _change_txn(connection, key, wanted, listed):
                return Settled(key, left=left)
            done = Settled(key, delete_txn(connection, key), removed=True)
            return done

        return await self._write_after_marks(key, attempt)

    async def _collect(self, key: RolloutKey, before: datetime, named: set[str]) -> Settled:
        gone: set[str] = set()

        def attempt(connection: Connection) -> Settled:
            find_fence_txn(connection, key)
            calls = disposable_txn(connection, key, before, named, lock=True)
            dispose_txn(connection, key, calls)
            # Added up: a repeat after a commit whose answer was lost finds nothing left to remove.
            gone.update(calls)
            return Settled(key, len(gone), removed=bool(gone))

        return await self._database.write(attempt)

    async def _with_orphans(
        self, before: datetime, run: str | None
    ) -> AsyncIterator[tuple[RolloutKey, set[str]]]:
        """Yield each rollout that may hold orphans, and the keys of its staged calls that other ledgers name."""
        if run is not None:
            check_rollout_id(run, "run")
        key = tuple_(_STAGED.run, _STAGED.rollout_id)
        by_its_ledger = exists().where(
            _same_rollout(ledger_calls.c, _STAGED),
            ledger_calls.c.model_call_id == _STAGED.model_call_id,
            ledger_calls.c.staging_key == STAGING_KEY,
        )
        ordered = (
            select(_STAGED.run, _STAGED.rollout_id)
            .distinct()
            .outerjoin(fences, _same_rollout(fences.c, _STAGED))
            .where(_STAGED.staged_at < before, NOT_OPEN)
            .where(~by_its_ledger, true() if run is None else _STAGED.run == run)
            .order_by(_STAGED.run, _STAGED.rollout_id)
            .limit(PAGE)
        )
        after: RolloutKey | None = None
        while True:
            statement = ordered if after is None else ordered.where(key > (after.run, after.rollout_id))

            def look(connection: Connection, statement: Any = statement) -> list[tuple[RolloutKey, set[str]]]:
                page = [RolloutKey(*row) for row in connection.execute(statement)]
                of_runs = [list(group) for _, group in groupby(page, attrgetter("run"))]
                return [
                    (rollout, named)
                    for group in of_runs
                    for named in [_named_elsewhere_txn(connection, group)]
                    for rollout in group
                ]

            page = await self._database.read(look)
            for found in page:
                yield found
            if len(page) < PAGE:
                return
            after = page[-1][0]


async def _whole(removal: Coroutine[Any, Any, Settled], settled: Tell) -> None:
    """Tell what became of a rollout, also when this is cancelled while it is being removed."""
    removing = asyncio.ensure_future(removal)
    try:
        await asyncio.shield(removing)
    except asyncio.CancelledError:
        await asyncio.wait([removing])
        settled(removing.result())
        raise
    settled(removing.result())


def _change_txn(connection: Connection, key: RolloutKey, wanted: RolloutFilter, listed: Row[Any]) -> str:
    """Return how a locked rollout differs from what was listed, or nothing."""
    is_this = of_rollout(fences)
    found = connection.execute(select_fences(wanted).where(is_this), key.named()).one_or_none()
    if found is not None and tuple(found) == tuple(listed):
        return ""
    present = connection.execute(select(fences).where(is_this), key.named()).one()
    if present.opened_at != listed.opened_at:
        return "it was deleted and made anew meanwhile"
    if present.state != listed.state:
        return f"it is {present.state} meanwhile"
    if present.version != listed.version:
        return f"it got version {present.version} meanwhile"
    return "it was exported meanwhile"


def _named_elsewhere_txn(connection: Connection, rollouts: Sequence[RolloutKey]) -> set[str]:
    """Return those staging keys of rollouts that follow each other in a run which ledgers of the run name.

    Ledger rows that were imported into a rollout name what was staged for another.
    """
    first, last = rollouts[0], rollouts[-1]
    staged = select(STAGING_KEY).where(
        _STAGED.run == first.run, _STAGED.rollout_id.between(first.rollout_id, last.rollout_id)
    )
    # An IN, because there is no index by staging key.
    named = select(ledger_calls.c.staging_key).where(
        ledger_calls.c.run == first.run, ledger_calls.c.staging_key.in_(staged)
    )
    return set(connection.execute(named).scalars())


def _same_rollout(one: Any, other: Any) -> ColumnElement[bool]:
    return and_(one.run == other.run, one.rollout_id == other.rollout_id)
