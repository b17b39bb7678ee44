"""Copying rollouts from one database to another, each in one transaction."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Select, bindparam, exists, func, insert, select, tuple_, update

from tokencustody.copying.deciding import CopyOutcome, Decision, decide
from tokencustody.copying.report import CopiedRollout, CopyReport
from tokencustody.copying.rows import DamagedRowError, Image, Spool, image_txn, proven_image_txn, row_key
from tokencustody.database import registry
from tokencustody.database.dialects import insert_if_absent
from tokencustody.database.engine import Engines
from tokencustody.database.url import DatabaseUrl, parse_url
from tokencustody.errors import DamagedMarkError, InvalidRecordError, StoreUnavailableError
from tokencustody.schema import migrate, revisions
from tokencustody.schema.opening import CaptureDatabase
from tokencustody.schema.tables import fences, intents, staged_calls
from tokencustody.spill.files import spill_root
from tokencustody.spill.marks import Spill
from tokencustody.spill.replaying import how_to_decide
from tokencustody.states import FenceState
from tokencustody.store.base import SqlStore
from tokencustody.txn import selection
from tokencustody.txn.asked import check_asked, reach
from tokencustody.txn.fence import RolloutKey, find_fence_txn, of_rollout
from tokencustody.txn.selection import PAGE, RolloutFilter
from tokencustody.watching import Watch, unwatched

# Seconds that the transaction of one rollout may take.
_LONGEST_TRANSACTION = 3600.0

_MOVE_FENCE = update(fences).where(of_rollout(fences))
# An intent changes once in its life.
_REFUSE = update(intents).where(
    of_rollout(intents),
    intents.c.model_call_id == bindparam("call"),
    intents.c.refused_at.is_(None),
    intents.c.begun_at == bindparam("begun"),
)


class _RefusedError(Exception):
    """The transaction is to be undone, for what its decision says."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision.reason)
        self.decision = decision


class Copier:
    """Copies rollouts between two databases, whatever they are; every row arrives as it was, in every bit.

    A rollout is copied in one transaction, as one snapshot of the source shows it, and is read back before it counts.
    Nothing in the target is overwritten or removed: what it lacks is added, an earlier state of a rollout moves on with
    the source, and whatever else differs is a conflict. `deadline` is for how many seconds a database may be out of
    reach, ten unless given.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        target: str | os.PathLike[str],
        *,
        deadline: float | None = None,
    ) -> None:
        self._addresses = source, target
        self._deadline = deadline
        self._source = _Source(parse_url(source), deadline=_LONGEST_TRANSACTION, pool_size=1, read_only=True)
        self._target = _Target(target, deadline=_LONGEST_TRANSACTION, pool_size=1)

    async def close(self) -> None:
        """Close both databases."""
        await self._source.close()
        await self._target.close()

    async def copy(
        self,
        *,
        run: str | None = None,
        rollout_ids: Collection[str] | None = None,
        prefix: str | None = None,
        include_open: bool = False,
        dry_run: bool = False,
        watch: Watch = unwatched,
    ) -> CopyReport:
        """Copy the rollouts that are meant, those that are open only with `include_open`, and report on all.

        With `dry_run` it only looks, and says what would be done. Raises InvalidRecordError when both are the same
        database, RolloutNotFoundError for a run that the source does not have or a prefix with which nothing in it
        begins, StoreUnavailableError, SchemaMismatchError.
        """
        wanted = RolloutFilter(
            run=run, prefix=prefix, rollout_ids=None if rollout_ids is None else tuple(rollout_ids)
        )
        is_new = await self._reach(wanted, dry_run=dry_run)
        marks = self._marks()
        report = CopyReport()
        unseen = set(rollout_ids or ())
        total = await selection.count(self._source, wanted) + await self._count_staged_alone(wanted)
        with watch("copying", total) as advance:
            async for key, state in self._keys(wanted):
                if state == FenceState.OPEN and not include_open:
                    copied = _told(key, CopyOutcome.LEFT_OUT, "it is open")
                elif why := _held_up(marks, key):
                    copied = _told(key, CopyOutcome.LEFT_OUT, why)
                else:
                    copied = await self._copy(key, dry_run=dry_run, is_new=is_new)
                report.add(copied)
                unseen.discard(key.rollout_id)
                advance(1)
        for rollout_id in sorted(unseen):
            report.add(
                CopiedRollout(run or "", rollout_id, CopyOutcome.FAILED, "the source has no such rollout")
            )
        return report

    async def _reach(self, wanted: RolloutFilter, *, dry_run: bool) -> bool:
        """Find both databases there, and in the source what is meant; return whether the target is yet to be made."""
        source, target = self._source.url, self._target.url
        _refuse_same(source, target)
        await reach(self._addresses[0], deadline=self._deadline)
        await check_asked(self._source, wanted)
        if dry_run and target.is_sqlite and await migrate.is_new_sqlite(target):
            return True
        await reach(self._addresses[1], deadline=self._deadline, read_only=False)
        _refuse_same(source, target)
        return False

    def _marks(self) -> Spill | None:
        root = spill_root("")
        return None if root is None else Spill(root, self._source.url)

    async def _keys(self, wanted: RolloutFilter) -> AsyncIterator[tuple[RolloutKey, str | None]]:
        async for page in selection.pages(self._source, wanted):
            for fence in page:
                yield RolloutKey(fence.run, fence.rollout_id), fence.state
        columns = (staged_calls.c.run, staged_calls.c.rollout_id)
        ordered = _staged_alone(wanted).order_by(*columns).limit(PAGE)
        found = await self._source.read(partial(_all, ordered))
        while found:
            for row in found:
                yield RolloutKey(row.run, row.rollout_id), None
            last = (found[-1].run, found[-1].rollout_id)
            found = await self._source.read(partial(_all, ordered.where(tuple_(*columns) > last)))

    async def _count_staged_alone(self, wanted: RolloutFilter) -> int:
        counted = select(func.count()).select_from(_staged_alone(wanted).subquery("matching"))
        return int((await self._source.read(partial(_all, counted)))[0][0])

    async def _copy(self, key: RolloutKey, *, dry_run: bool, is_new: bool) -> CopiedRollout:
        target = Image() if is_new else await self._target.image(key)
        # Where the target holds nothing, all of the source is read at once, for there is nothing to decide.
        if dry_run or target.rows:
            source = await self._source.read(lambda connection: image_txn(connection, key))
            decision = decide(source, target)
            if decision.outcome is CopyOutcome.ALREADY_THERE:
                return await self._already_there(key, decision)
            if dry_run or decision.outcome not in (CopyOutcome.COPIED, CopyOutcome.UPDATED):
                return _told(key, decision.outcome, decision.reason)
        with Spool() as spool:
            try:
                source = await self._source.read(lambda connection: image_txn(connection, key, spool))
                decision = await self._target.write(key, source, spool)
                held = await self._target.proven_image(key)
            except _RefusedError as exc:
                return _told(key, exc.decision.outcome, exc.decision.reason)
            except DamagedRowError as exc:
                return _told(key, CopyOutcome.FAILED, f"{exc}: run `tokencustody verify`")
            except DamagedMarkError as exc:
                return _told(key, CopyOutcome.FAILED, f"in the target, {exc}")
            if decide(source, held).outcome is not CopyOutcome.ALREADY_THERE:
                return _told(
                    key,
                    CopyOutcome.FAILED,
                    "what the target gives back is not what was written: check its disk",
                )
            return CopiedRollout(
                key.run,
                key.rollout_id,
                decision.outcome,
                rows=len(decision.add),
                bytes=spool.bytes if decision.outcome is CopyOutcome.COPIED else 0,
            )

    async def _already_there(self, key: RolloutKey, decision: Decision) -> CopiedRollout:
        """Return that a rollout is in the target, or, once its bytes were hashed, that they are damaged."""
        side = "source"
        try:
            await self._source.read(partial(proven_image_txn, key=key))
            side = "target"
            await self._target.proven_image(key)
        except DamagedRowError as exc:
            return _told(key, CopyOutcome.FAILED, f"in the {side}, {exc}: run `tokencustody verify`")
        return _told(key, decision.outcome, decision.reason)


class _Source(CaptureDatabase):
    """The database that is copied, of which nothing must be unknown, or it would be left out."""

    async def _find_tables(self, engines: Engines) -> None:
        await super()._find_tables(engines)
        await engines.read(lambda connection: revisions.ensure_known(connection, self.url.display))


class _Target(SqlStore):
    """The database that is copied to, with every run in it."""

    @property
    def url(self) -> DatabaseUrl:
        return self._database.url

    async def image(self, key: RolloutKey) -> Image:
        return await self._database.read(lambda connection: image_txn(connection, key))

    async def proven_image(self, key: RolloutKey) -> Image:
        return await self._database.read(lambda connection: proven_image_txn(connection, key))

    async def write(self, key: RolloutKey, source: Image, spool: Spool) -> Decision:
        """Add what is missing, and return what was decided now that nobody else writes. Raises _RefusedError."""

        def work(connection: Connection) -> Decision:
            find_fence_txn(connection, key)
            decision = decide(source, image_txn(connection, key))
            if decision.outcome is CopyOutcome.CONFLICT:
                raise _RefusedError(decision)
            _add_txn(connection, key, decision, spool)
            return decision

        return await self._write_after_marks(key, work)


def _add_txn(connection: Connection, key: RolloutKey, decision: Decision, spool: Spool) -> None:
    for table, rows in spool.pages():
        missing = [row for row in rows if row_key(table, row) in decision.add]
        if table is fences:
            _fence_txn(connection, key, missing, rows if decision.moves_fence else [])
        elif missing:
            connection.execute(insert(table), missing)
        if table is intents:
            for row in rows:
                if row_key(table, row) in decision.refuse:
                    _refuse_txn(connection, key, row)


def _fence_txn(
    connection: Connection, key: RolloutKey, new: list[dict[str, Any]], moved: list[dict[str, Any]]
) -> None:
    for row in new:
        if not connection.execute(insert_if_absent(connection, fences), row).rowcount:
            raise _RefusedError(
                Decision(CopyOutcome.CONFLICT, "somebody opened it in the target meanwhile; copy again")
            )
    for row in moved:
        changes = {name: value for name, value in row.items() if name not in key.columns()}
        connection.execute(_MOVE_FENCE, key.named(**changes))


def _refuse_txn(connection: Connection, key: RolloutKey, row: dict[str, Any]) -> None:
    refusal = {name: row[name] for name in ("refusal_code", "refused_at")}
    named = key.named(row["model_call_id"], begun=row["begun_at"], **refusal)
    if not connection.execute(_REFUSE, named).rowcount:
        raise _RefusedError(
            Decision(CopyOutcome.CONFLICT, f"the target holds other data in intents ({row['model_call_id']})")
        )


def _held_up(marks: Spill | None, key: RolloutKey) -> str:
    """Return what of a rollout's marks on this host must come first, nothing if nothing must."""
    if marks is None:
        return ""
    try:
        # In this order: somebody else may find damage in between, and rename the file.
        waiting, damaged = marks.waiting(key), marks.damaged(key)
    except OSError as exc:
        raise StoreUnavailableError(
            f"marks for the source may wait in {marks.folder}, but this user may not look: {exc.strerror}"
        ) from exc
    if damaged:
        return f"a mark of it that waited on this host is damaged: {how_to_decide(key, damaged[0])}"
    if waiting:
        return "a mark of it waits on this host: bring it into the source by `tokencustody spill replay`"
    return ""


def _told(key: RolloutKey, outcome: CopyOutcome, reason: str) -> CopiedRollout:
    return CopiedRollout(key.run, key.rollout_id, outcome, reason)


def _all(statement: Select[Any], connection: Connection) -> Sequence[Any]:
    return connection.execute(statement).all()


def _staged_alone(wanted: RolloutFilter) -> Select[Any]:
    """Return the statement for the rollouts that have staged calls and no fence."""
    staged = staged_calls.c
    has_fence = exists().where(fences.c.run == staged.run, fences.c.rollout_id == staged.rollout_id)
    statement = select(staged.run, staged.rollout_id).distinct().where(~has_fence)
    if wanted.run is not None:
        statement = statement.where(staged.run == wanted.run)
    if wanted.prefix is not None:
        statement = statement.where(func.substr(staged.rollout_id, 1, len(wanted.prefix)) == wanted.prefix)
    if wanted.rollout_ids is not None:
        statement = statement.where(staged.rollout_id.in_(wanted.rollout_ids))
    return statement


def _refuse_same(source: DatabaseUrl, target: DatabaseUrl) -> None:
    if source.is_sqlite and target.is_sqlite:
        files = Path(source.dsn), Path(target.dsn)
        same = all(file.exists() for file in files) and files[0].samefile(files[1])
    else:
        identity = registry.identity_of(source)
        same = source.display == target.display or (
            identity is not None and identity == registry.identity_of(target)
        )
    if same:
        raise InvalidRecordError(f"{source.display} and {target.display} are the same database")
