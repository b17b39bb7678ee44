"""The runs that a database holds, and what each amounts to: a few statements, however many rollouts there are."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Select, and_, case, func, select

from tokencustody.database.dialects import is_postgresql, summed
from tokencustody.database.transactions import Database
from tokencustody.schema.tables import (
    entries,
    fences,
    ledger_calls,
    snapshot_versions,
    staged_attachments,
    staged_calls,
)
from tokencustody.states import FenceState
from tokencustody.txn.selection import IS_EXPORTED, IS_PARTLY_EXPORTED
from tokencustody.txn.staged_calls import orphaned


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run. Tokens are those of complete records, a delta prompt counted as it was sent.

    `exported` counts the rollouts that an export marked as they are now, `partly_exported` those of them of which no
    mark says that the files hold every sampled token, `orphans` the staged calls that `SqlStagingStore.orphans` lists.
    `stored_bytes` are those of payloads, extras and attachments as they are stored, None for a role that may not read
    them. `first_opened` is None for a run without a rollout; `last_activity` is the newest write of a call, ledger row,
    staged call or version.
    """

    run: str
    rollouts: int = 0
    open: int = 0
    frozen: int = 0
    retired: int = 0
    incomplete: int = 0
    exported: int = 0
    partly_exported: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    stored_bytes: int | None = 0
    ledger_calls: int = 0
    staged_calls: int = 0
    orphans: int = 0
    first_opened: datetime | None = None
    last_activity: datetime | None = None


def _per_run(table: Any, *figures: Any) -> Select[Any]:
    return select(table.c.run, *figures).group_by(table.c.run)


def _statements(run: str | None) -> list[Select[Any]]:
    """Return one statement for each table, whose columns are named after the fields of `RunSummary`."""
    states = [summed(case((fences.c.state == state, 1), else_=0)).label(state) for state in FenceState]
    staged = staged_calls.c
    return [
        _per_run(
            fences,
            func.count().label("rollouts"),
            *states,
            summed(case((fences.c.incomplete, 1), else_=0)).label("incomplete"),
            summed(case((IS_EXPORTED, 1), else_=0)).label("exported"),
            summed(case((IS_PARTLY_EXPORTED, 1), else_=0)).label("partly_exported"),
            func.min(fences.c.opened_at).label("first_opened"),
        ),
        _per_run(
            entries,
            func.count().label("calls"),
            summed(entries.c.prompt_len).label("prompt_tokens"),
            summed(entries.c.generation_len).label("generated_tokens"),
            summed(func.length(entries.c.payload)).label("stored_bytes"),
            func.max(entries.c.committed_at).label("last_activity"),
        ),
        _per_run(
            ledger_calls,
            func.count().label("ledger_calls"),
            func.max(ledger_calls.c.committed_at).label("last_activity"),
        ),
        _per_run(snapshot_versions, func.max(snapshot_versions.c.recorded_at).label("last_activity")),
        _per_run(
            staged_calls,
            func.count().label("staged_calls"),
            summed(func.length(staged.payload) + func.coalesce(func.length(staged.extras), 0)).label(
                "stored_bytes"
            ),
            func.max(staged.staged_at).label("last_activity"),
        ),
        _per_run(staged_attachments, summed(func.length(staged_attachments.c.data)).label("stored_bytes")),
        _per_run(orphaned(run).subquery("orphaned"), func.count().label("orphans")),
    ]


_BYTES = (entries.c.payload, staged_calls.c.payload, staged_calls.c.extras, staged_attachments.c.data)


def _may_read_bytes(connection: Connection) -> bool:
    """Return whether the user may read what token data is in, for only then its length can be asked for."""
    if not is_postgresql(connection):
        return True
    may = [func.has_column_privilege(column.table.name, column.name, "SELECT") for column in _BYTES]
    return bool(connection.scalar(select(and_(*may))))


def _without_bytes(statement: Select[Any]) -> Select[Any]:
    return statement.with_only_columns(
        *(column for column in statement.selected_columns if column.name != "stored_bytes")
    )


async def summarize_runs(database: Database, run: str | None = None) -> list[RunSummary]:
    """Return every run that has a rollout or a staged call, or only `run`, in the order of their names.

    All of it is one state of the database. Raises StoreUnavailableError as any read does.
    """
    statements = [
        each if run is None else each.where(each.selected_columns.run == run) for each in _statements(run)
    ]

    def look(connection: Connection) -> list[RunSummary]:
        may_read = _may_read_bytes(connection)
        figures: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for statement in statements:
            for row in connection.execute(statement if may_read else _without_bytes(statement)).mappings():
                of_run = figures[row["run"]]
                for name, value in row.items():
                    match name:
                        case "stored_bytes":
                            of_run[name] = of_run.get(name, 0) + value
                        case "last_activity":
                            of_run[name] = max(of_run.get(name, value), value)
                        case _:
                            of_run[name] = value
        unknown: dict[str, Any] = {} if may_read else {"stored_bytes": None}
        return [RunSummary(**figures[name] | unknown) for name in sorted(figures)]

    return await database.read(look)


def total(runs: list[RunSummary]) -> RunSummary:
    """Return the sum of all runs, which has no name, from the first opening to the last activity."""
    opened = [run.first_opened for run in runs if run.first_opened is not None]
    active = [run.last_activity for run in runs if run.last_activity is not None]
    unknown: dict[str, Any] = {"stored_bytes": None} if any(run.stored_bytes is None for run in runs) else {}
    counted = [name for name, field in RunSummary.__dataclass_fields__.items() if field.default == 0]
    return RunSummary(
        run="",
        **{name: sum(getattr(run, name) or 0 for run in runs) for name in counted} | unknown,
        first_opened=min(opened, default=None),
        last_activity=max(active, default=None),
    )
