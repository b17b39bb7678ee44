"""Reading the store for a person: which rollouts there are, and what is known of one."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, Subquery, Table, and_, case, func, select

from tokencustody.errors import RolloutNotFoundError
from tokencustody.ids import check_rollout_id
from tokencustody.overview.summaries import (
    CallSummary,
    Intent,
    LedgerCall,
    LedgerFailure,
    Reason,
    ReasonKind,
    RolloutDetail,
    RolloutPage,
    RolloutSummary,
    Totals,
    Version,
)
from tokencustody.schema.tables import (
    entries,
    failures,
    fences,
    intents,
    ledger_calls,
    ledger_failures,
    snapshot_versions,
)
from tokencustody.states import FenceState, VersionEvent
from tokencustody.store.base import SqlStore
from tokencustody.txn.fence import RolloutKey, of_rollout
from tokencustody.txn.selection import RolloutFilter, select_fences

_PARENTS_NOT_RECORDED = func.sum(case((entries.c.parent_resolution.is_(None), 1), else_=0))
_HISTORY = [
    snapshot_versions.c[name]
    for name in ("version", "event", "model_call_id", "snapshot_id", "recorded_at", "written_by")
]


class RolloutReader(SqlStore):
    """A client that reads every run of one database, on one connection, and changes nothing.

    A SQLite file that does not exist is a StoreUnavailableError and is not created. Each method sees one
    consistent state of the database and raises StoreUnavailableError when `deadline`, in seconds, has passed.
    """

    _read_only = True

    def __init__(self, url: str | os.PathLike[str], *, deadline: float = 10.0) -> None:
        super().__init__(url, deadline=deadline, pool_size=1)

    def __repr__(self) -> str:
        return f"RolloutReader({self._database.url.display!r})"

    async def rollouts(self, wanted: RolloutFilter | None = None, *, limit: int | None = None) -> RolloutPage:
        """Return the `limit` newest rollouts that `wanted` asks for, newest first, and the totals of all.

        The number of statements does not depend on the number of rollouts.
        """
        matching = select_fences(wanted or RolloutFilter())
        newest = matching.order_by(fences.c.opened_at.desc(), fences.c.run, fences.c.rollout_id).limit(limit)

        def look(connection: Connection) -> RolloutPage:
            found = _summaries_txn(connection, newest.subquery("page"))
            return RolloutPage(tuple(found), _totals_txn(connection, matching.subquery("matching")))

        return await self._database.read(look)

    async def rollout(self, rollout_id: str, run: str | None = None) -> RolloutDetail:
        """Return what is known of one rollout.

        Raises RolloutNotFoundError when it is unknown, or when it is in several runs and `run` does not say
        which; InvalidRecordError for a rollout id or run that no rollout can have.
        """
        check_rollout_id(rollout_id)
        named = select_fences(RolloutFilter(run=run)).where(fences.c.rollout_id == rollout_id)

        def look(connection: Connection) -> RolloutDetail | list[str]:
            found = _summaries_txn(connection, named.subquery("page"))
            if len(found) != 1:
                return sorted(summary.run for summary in found)
            key = RolloutKey(found[0].run, rollout_id)
            return RolloutDetail(
                found[0],
                _calls_txn(connection, key),
                _intents_txn(connection, key),
                _versions_txn(connection, key),
                _ledger_calls_txn(connection, key),
                _ledger_failures_txn(connection, key),
            )

        detail = await self._database.read(look)
        if isinstance(detail, RolloutDetail):
            return detail
        if detail:
            raise RolloutNotFoundError(
                f"rollout {rollout_id} is in {len(detail)} runs; name one of {', '.join(detail)}"
            )
        where = f"run {run} of " if run is not None else ""
        raise RolloutNotFoundError(f"rollout {rollout_id} is not in {where}{self._database.url.display}")


def _of(table: Table, page: Subquery) -> Any:
    return and_(table.c.run == page.c.run, table.c.rollout_id == page.c.rollout_id)


def _per_rollout(table: Table, page: Subquery, *columns: Any) -> Select[Any]:
    return select(table.c.run, table.c.rollout_id, *columns).join(page, _of(table, page))


def _summaries_txn(connection: Connection, page: Subquery) -> list[RolloutSummary]:
    fence_rows = connection.execute(select(page)).all()
    call_columns = (
        func.count(),
        func.sum(entries.c.prompt_len),
        func.sum(entries.c.generation_len),
        _PARENTS_NOT_RECORDED,
    )
    counted = connection.execute(
        _per_rollout(entries, page, *call_columns).group_by(entries.c.run, entries.c.rollout_id)
    )
    # int: PostgreSQL's sum of bigint is a numeric.
    counts = {(run, rollout_id): tuple(map(int, sums)) for run, rollout_id, *sums in counted}
    recorded = _counts_txn(connection, page, ledger_calls)
    failed = _counts_txn(connection, page, ledger_failures)
    reasons = _recorded_reasons_txn(connection, page)
    uncaptured = _uncaptured_txn(connection, page)
    endings = _endings_txn(connection, page)
    found = []
    for row in fence_rows:
        key = (row.run, row.rollout_id)
        ending, past_reasons = endings.get(key, (None, []))
        why = reasons[key] or past_reasons
        if row.state == FenceState.FROZEN:
            why = why + [Reason(ReasonKind.DANGLING_INTENT, call_id) for call_id in uncaptured[key]]
        elif row.state == FenceState.RETIRED and row.incomplete and not why:
            # Every other cause has its row in the history.
            why = [Reason(ReasonKind.DANGLING_INTENT, "")]
        calls, prompt_tokens, generated_tokens, parents_not_recorded = counts.get(key, (0, 0, 0, 0))
        found.append(
            RolloutSummary(
                run=row.run,
                rollout_id=row.rollout_id,
                state=FenceState(row.state),
                version=row.version,
                snapshot_id=row.snapshot_id,
                incomplete=row.incomplete,
                reasons=tuple(why),
                not_yet_captured=tuple(uncaptured[key] if row.state == FenceState.OPEN else ()),
                calls=calls,
                prompt_tokens=prompt_tokens,
                generated_tokens=generated_tokens,
                parents_not_recorded=parents_not_recorded,
                ledger_calls=recorded.get(key, 0),
                ledger_failures=failed.get(key, 0),
                opened_at=row.opened_at,
                frozen_at=row.frozen_at,
                retired_at=row.retired_at,
                retired_by=ending,
            )
        )
    found.sort(key=lambda summary: (summary.run, summary.rollout_id))
    found.sort(key=lambda summary: summary.opened_at, reverse=True)
    return found


def _counts_txn(connection: Connection, page: Subquery, table: Table) -> dict[tuple[str, str], int]:
    rows = connection.execute(
        _per_rollout(table, page, func.count()).group_by(table.c.run, table.c.rollout_id)
    )
    return {(run, rollout_id): count for run, rollout_id, count in rows}


def _recorded_reasons_txn(
    connection: Connection, page: Subquery
) -> defaultdict[tuple[str, str], list[Reason]]:
    what = (failures.c.kind, failures.c.model_call_id, failures.c.differing_fields)
    rows = connection.execute(
        _per_rollout(failures, page, *what, func.count())
        .group_by(failures.c.run, failures.c.rollout_id, *what)
        .order_by(func.min(failures.c.version))
    )
    found: defaultdict[tuple[str, str], list[Reason]] = defaultdict(list)
    for run, rollout_id, kind, model_call_id, differing, times in rows:
        found[run, rollout_id].append(Reason(ReasonKind(kind), model_call_id, differing, times))
    return found


def _uncaptured_txn(connection: Connection, page: Subquery) -> defaultdict[tuple[str, str], list[str]]:
    same_call = and_(_of(entries, page), entries.c.model_call_id == intents.c.model_call_id)
    rows = connection.execute(
        _per_rollout(intents, page, intents.c.model_call_id)
        .outerjoin(entries, same_call)
        .where(intents.c.refused_at.is_(None), entries.c.model_call_id.is_(None))
        .order_by(intents.c.begun_at)
    )
    found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for run, rollout_id, model_call_id in rows:
        found[run, rollout_id].append(model_call_id)
    return found


def _endings_txn(
    connection: Connection, page: Subquery
) -> dict[tuple[str, str], tuple[VersionEvent, list[Reason]]]:
    """Return what the history of each retired rollout says: how it went, and why it was incomplete."""
    what = (snapshot_versions.c.event, snapshot_versions.c.model_call_id)
    telling = (VersionEvent.MARK, VersionEvent.CONFLICT, VersionEvent.DROP, VersionEvent.RETIRE)
    rows = connection.execute(
        _per_rollout(snapshot_versions, page, *what, func.count())
        .where(page.c.state == FenceState.RETIRED, snapshot_versions.c.event.in_(telling))
        .group_by(snapshot_versions.c.run, snapshot_versions.c.rollout_id, *what)
        .order_by(func.min(snapshot_versions.c.version))
    )
    reasons: defaultdict[tuple[str, str], list[Reason]] = defaultdict(list)
    endings = {}
    for run, rollout_id, event, model_call_id, times in rows:
        if event in (VersionEvent.DROP, VersionEvent.RETIRE):
            endings[run, rollout_id] = VersionEvent(event)
        else:
            reasons[run, rollout_id].append(Reason(ReasonKind(event), model_call_id, times=times))
    return {key: (ending, reasons[key]) for key, ending in endings.items()}


def _totals_txn(connection: Connection, matching: Subquery) -> Totals:
    def count_where(condition: Any) -> Any:
        return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)

    states = [count_where(matching.c.state == state) for state in FenceState]
    of_fences = connection.execute(
        select(func.count(), *states, count_where(matching.c.incomplete)).select_from(matching)
    )
    sums = [
        func.coalesce(each, 0)
        for each in (
            func.sum(entries.c.prompt_len),
            func.sum(entries.c.generation_len),
            _PARENTS_NOT_RECORDED,
        )
    ]
    of_calls = connection.execute(
        select(func.count(), *sums).select_from(entries).join(matching, _of(entries, matching))
    )
    of_ledger = [
        (
            connection.execute(select(func.count()).select_from(table).join(matching, _of(table, matching)))
        ).scalar_one()
        for table in (ledger_calls, ledger_failures)
    ]
    return Totals(*map(int, of_fences.one()), *map(int, of_calls.one()), *of_ledger)


def _calls_txn(connection: Connection, key: RolloutKey) -> tuple[CallSummary, ...]:
    columns = [entries.c[name] for name in CallSummary.__dataclass_fields__]
    rows = connection.execute(select(*columns).where(of_rollout(entries)), key.named())
    # Sorted here: calls of one transaction share their time, and databases differ in how they order text.
    return tuple(
        sorted((CallSummary(*row) for row in rows), key=lambda call: (call.committed_at, call.model_call_id))
    )


def _intents_txn(connection: Connection, key: RolloutKey) -> tuple[Intent, ...]:
    same_call = and_(of_rollout(entries), entries.c.model_call_id == intents.c.model_call_id)
    rows = connection.execute(
        select(
            intents.c.model_call_id,
            entries.c.model_call_id.is_not(None),
            intents.c.refusal_code,
            intents.c.begun_at,
            intents.c.refused_at,
            intents.c.written_by,
        )
        .outerjoin(entries, same_call)
        .where(of_rollout(intents)),
        key.named(),
    )
    return tuple(
        sorted((Intent(*row) for row in rows), key=lambda intent: (intent.begun_at, intent.model_call_id))
    )


def _versions_txn(connection: Connection, key: RolloutKey) -> tuple[Version, ...]:
    of_version = and_(of_rollout(failures), failures.c.version == snapshot_versions.c.version)
    evidence = [
        failures.c[name] for name in ("differing_fields", "first_payload_sha256", "second_payload_sha256")
    ]
    rows = connection.execute(
        select(*_HISTORY, failures.c.kind.label("failure_kind"), *evidence)
        .select_from(snapshot_versions)
        .outerjoin(failures, of_version)
        .where(of_rollout(snapshot_versions))
        .order_by(snapshot_versions.c.version),
        key.named(),
    )
    return tuple(_version(row._mapping) for row in rows)


def _version(row: RowMapping) -> Version:
    columns: dict[str, Any] = {str(name): value for name, value in row.items()}
    columns["event"] = VersionEvent(columns["event"])
    columns["failure_kind"] = columns["failure_kind"] and ReasonKind(columns["failure_kind"])
    return Version(**columns)


def _ledger_calls_txn(connection: Connection, key: RolloutKey) -> tuple[LedgerCall, ...]:
    columns = [ledger_calls.c[name] for name in LedgerCall.__dataclass_fields__]
    rows = connection.execute(
        select(*columns).where(of_rollout(ledger_calls)).order_by(ledger_calls.c.position), key.named()
    )
    return tuple(LedgerCall(*row) for row in rows)


def _ledger_failures_txn(connection: Connection, key: RolloutKey) -> tuple[LedgerFailure, ...]:
    columns = [ledger_failures.c[name] for name in LedgerFailure.__dataclass_fields__]
    rows = connection.execute(
        select(*columns).where(of_rollout(ledger_failures)).order_by(ledger_failures.c.position), key.named()
    )
    return tuple(LedgerFailure(*row) for row in rows)
