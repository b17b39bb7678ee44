"""Which rollouts are meant, and walking through them in the order of their keys, some at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, Select, and_, case, exists, func, select, tuple_

from tokencustody.database.transactions import Database
from tokencustody.ids import check_rollout_id
from tokencustody.schema.tables import exports, fences
from tokencustody.states import FenceState
from tokencustody.txn.fence import RolloutKey

PAGE = 256

# Whether an export marked a row of `fences` as it is now. Retirement is one more version.
IS_EXPORTED = exists().where(
    exports.c.run == fences.c.run,
    exports.c.rollout_id == fences.c.rollout_id,
    exports.c.snapshot_id == fences.c.snapshot_id,
    exports.c.version == fences.c.version - case((fences.c.state == FenceState.RETIRED, 1), else_=0),
)
# Whether such a mark says that every sampled token is in the files. Marks from before revision 0005 say nothing.
IS_HELD = IS_EXPORTED.where(exports.c.is_held.is_(True))
IS_PARTLY_EXPORTED = and_(IS_EXPORTED, ~IS_HELD)


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """Which rollouts are meant; a field that is None asks for nothing.

    `incomplete` asks for the recorded verdict; `prefix` is how the rollout id begins, case-sensitive. `before` asks
    for rollouts that came into their present state (opened, frozen, retired) before that time. `exported` asks for
    those of which one export holds every sampled token as they are now, or, when False, which none marked as they are
    now; `partly_exported` for those between: marked, but not known to be held by one export. Raises InvalidRecordError
    for a run, rollout id or prefix that no id can have.
    """

    run: str | None = None
    state: FenceState | None = None
    incomplete: bool | None = None
    prefix: str | None = None
    rollout_ids: tuple[str, ...] | None = None
    before: datetime | None = None
    exported: bool | None = None
    partly_exported: bool = False

    def __post_init__(self) -> None:
        if self.run is not None:
            check_rollout_id(self.run, "run")
        if self.prefix is not None:
            check_rollout_id(self.prefix, "prefix")
        for rollout_id in self.rollout_ids or ():
            check_rollout_id(rollout_id)


def select_fences(wanted: RolloutFilter) -> Select[Any]:
    """Return the statement that finds the fences of the rollouts that are meant."""
    statement = select(fences)
    if wanted.run is not None:
        statement = statement.where(fences.c.run == wanted.run)
    if wanted.state is not None:
        statement = statement.where(fences.c.state == wanted.state)
    if wanted.incomplete is not None:
        statement = statement.where(fences.c.incomplete.is_(wanted.incomplete))
    if wanted.prefix is not None:
        # Not LIKE: it has wildcards, and on SQLite it ignores case.
        statement = statement.where(func.substr(fences.c.rollout_id, 1, len(wanted.prefix)) == wanted.prefix)
    if wanted.rollout_ids is not None:
        statement = statement.where(fences.c.rollout_id.in_(wanted.rollout_ids))
    if wanted.before is not None:
        since = func.coalesce(
            fences.c.retired_at, fences.c.frozen_at, fences.c.opened_at, type_=fences.c.opened_at.type
        )
        statement = statement.where(since < wanted.before)
    if wanted.exported is not None:
        statement = statement.where(IS_HELD if wanted.exported else ~IS_EXPORTED)
    if wanted.partly_exported:
        statement = statement.where(IS_PARTLY_EXPORTED)
    return statement


async def count(database: Database, wanted: RolloutFilter) -> int:
    """Return how many rollouts are meant."""
    counted = select(func.count()).select_from(select_fences(wanted).subquery("matching"))

    def look(connection: Connection) -> int:
        return int(connection.scalar(counted) or 0)

    return await database.read(look)


async def pages(
    database: Database, wanted: RolloutFilter, *, after: RolloutKey | None = None, size: int = PAGE
) -> AsyncIterator[Sequence[Row[Any]]]:
    """Yield the fences that are meant, at most `size` at a time, in the order of (run, rollout id) from `after` on.

    Each page is read when it is asked for, in a transaction of its own, so what is removed or added meanwhile before
    the place that was reached is neither repeated nor missed twice.
    """
    key = tuple_(fences.c.run, fences.c.rollout_id)
    ordered = select_fences(wanted).order_by(fences.c.run, fences.c.rollout_id).limit(size)
    while True:
        statement = ordered if after is None else ordered.where(key > (after.run, after.rollout_id))

        def look(connection: Connection, statement: Select[Any] = statement) -> Sequence[Row[Any]]:
            return connection.execute(statement).all()

        page = await database.read(look)
        if page:
            yield page
        if len(page) < size:
            return
        after = RolloutKey(page[-1].run, page[-1].rollout_id)
