"""Where SQLite and PostgreSQL differ in the statements that the stores build."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    FromClause,
    Select,
    Table,
    Text,
    bindparam,
    cast,
    func,
    select,
    true,
)
from sqlalchemy.dialects import sqlite

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

Statement = TypeVar("Statement")

# The option of a connection that says for how many seconds its transaction waits for a lock. Without it, it waits on.
PATIENCE = "tokencustody_patience"
# The option of a connection with the numbers of the advisory locks that its session took before the transaction began.
# Without it, the transaction takes them itself.
TURNS = "tokencustody_turns"
# In seconds, for a transaction that many calls share. It passes rollouts over that are held, and waits only where
# another writer of the same call has not committed yet.
LANE_PATIENCE = 0.25

# At least `on`, whatever a role, a database or a reload says, for the commit of the transaction that evaluates it.
DURABLE_COMMIT = (
    "set_config('synchronous_commit',"
    " CASE current_setting('synchronous_commit') WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)"
)


class TurnMissingError(Exception):
    """A transaction that shows one snapshot came upon an advisory lock that its session has to take before it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def built_once(build: Callable[[Connection], Statement]) -> Callable[[Connection], Statement]:
    """Let `build` make its statement once for each dialect: to build one takes several times as long as to run it."""
    built: dict[str, Statement] = {}

    @wraps(build)
    def get(connection: Connection) -> Statement:
        name = connection.dialect.name
        if name not in built:
            built[name] = build(connection)
        return built[name]

    return get


def insert_if_absent(connection: Connection, table: Table) -> postgresql.Insert | sqlite.Insert:
    """Return an INSERT into `table` that does nothing when the primary key exists; its row count tells which."""
    return _insert_if_absent(is_postgresql(connection), table)


@cache
def _insert_if_absent(for_postgresql: bool, table: Table) -> postgresql.Insert | sqlite.Insert:
    if for_postgresql:
        from sqlalchemy.dialects import postgresql

        return postgresql.insert(table).on_conflict_do_nothing()
    return sqlite.insert(table).on_conflict_do_nothing()


def locking(connection: Connection, row: Select[Any]) -> Select[Any]:
    """Return a query for the one row that `row` selects, which locks it exclusively until the transaction ends.

    On PostgreSQL it first takes its turn by the advisory lock whose number is the parameter `lock_number`: row locks
    have no queue, so that a share lock would overtake the freeze that waits for those before it. SQLite has one writer
    at a time anyway. The parameter `lock_timeout` is what `patience` returns: it holds for the whole transaction.
    """
    if not is_postgresql(connection):
        return row
    number = bindparam("lock_number", type_=BigInteger())
    limit = select(_limit(bindparam("lock_timeout", type_=Text())).label("text")).subquery("patience")
    # Reading from what comes first makes the next wait for it.
    turn = (
        select(cast(func.pg_advisory_xact_lock(number), Text).label("taken"))
        .where(limit.c.text.is_not(None))
        .lateral("turn")
    )
    locked = row.where(turn.c.taken.is_not(None)).with_for_update().lateral("locked")
    return select(*locked.c).select_from(limit.join(turn, true()).join(locked, true()))


def ensure_turn(connection: Connection, number: int) -> None:
    """Raise TurnMissingError where the session has to take this advisory lock before its transaction begins."""
    taken = connection.get_execution_options().get(TURNS)
    if taken is not None and number not in taken:
        raise TurnMissingError(number)


def patience(connection: Connection) -> str:
    """Return PostgreSQL's `lock_timeout` for this transaction; "0" is none."""
    seconds = connection.get_execution_options().get(PATIENCE, 0.0)
    return f"{round(1000 * seconds)}ms"


def limit_waiting(connection: Connection) -> None:
    """Let this transaction, if it does not begin with `locking`, wait no longer for a lock than its patience."""
    if is_postgresql(connection):
        connection.execute(select(_limit(bindparam(None, patience(connection), Text))))


def _limit(limit: ColumnElement[str]) -> ColumnElement[str]:
    # For this transaction alone: a pooler hands the session to others.
    return func.set_config("lock_timeout", limit, true())


def lock_number(name: str) -> int:
    """Return the number by which PostgreSQL knows the advisory lock on `name`."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)


def looked_up(
    connection: Connection,
    source: FromClause,
    table: Table,
    columns: Sequence[ColumnElement[Any]],
    matches: ColumnElement[bool],
    *,
    lock: bool = False,
) -> Select[Any]:
    """Return a query for `columns` of the one row of `table`, if any, that `matches` each row of `source`; with `lock`
    it locks them for an update.

    On PostgreSQL each is looked up by itself: without statistics its planner would rather read the whole rollout again
    for each.
    """
    if is_postgresql(connection):
        found = select(*columns).where(matches).limit(1)
        row = (found.with_for_update() if lock else found).lateral()
        return select(*row.c).select_from(source.join(row, true()))
    return select(*columns).select_from(source.join(table, matches))


def is_postgresql(connection: Connection) -> bool:
    """Return whether the connection is one to PostgreSQL; it is one to SQLite otherwise."""
    return connection.dialect.name == "postgresql"


def summed(column: Any) -> ColumnElement[int]:
    """Return the sum of a column, 0 of no rows."""
    # PostgreSQL's sum of bigint is a numeric.
    return func.coalesce(func.sum(column), 0).cast(BigInteger)
