"""Staged calls and their attachments: how they are stored, found, removed, and known to be left over."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any, ClassVar

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Connection,
    Row,
    Select,
    Text,
    and_,
    column,
    delete,
    insert,
    select,
    true,
    values,
)

from tokencustody.codec.attachments import IDENTITY_COLUMNS, attachments_sha256
from tokencustody.codec.row_hash import HASH_COLUMN, row_sha256
from tokencustody.codec.staged import CALL_COLUMNS, PackedCall, differing_columns
from tokencustody.database.dialects import limit_waiting, looked_up
from tokencustody.schema.tables import (
    fences,
    ledger_calls,
    snapshot_versions,
    staged_attachments,
    staged_calls,
)
from tokencustody.staging.records import StagedCallRecord, staging_key
from tokencustody.states import FenceState, VersionEvent
from tokencustody.txn.fence import Fence, RolloutKey, Stamp, advance_txn, happened_txn, of_call
from tokencustody.txn.kinds import STAGED_CALLS, Kind, NewCall
from tokencustody.txn.settling import Call

# The rollout and the call of a staging key.
StagedKey = tuple[str, str]

_CALL = staged_calls.c
STAGING_KEY = _CALL.rollout_id + "/" + _CALL.model_call_id
# Of the fence beside a staged call, which may have none.
NOT_OPEN = fences.c.state.is_(None) | (fences.c.state != FenceState.OPEN)
_IDS = (_CALL.rollout_id, _CALL.model_call_id)
METADATA = tuple(_CALL[name] for name in CALL_COLUMNS)
PAYLOAD = (_CALL.payload, _CALL.payload_sha256)
EXTRAS = (_CALL.extras,)
_HELD = select(*METADATA, *PAYLOAD).where(of_call(staged_calls))
_ATTACHMENTS = select(staged_attachments).where(of_call(staged_attachments))
_IDENTITIES = select(*(staged_attachments.c[name] for name in IDENTITY_COLUMNS)).where(
    of_call(staged_attachments)
)
_ATTACHED_HASH = select(*_IDS, _CALL.attachments_sha256).where(of_call(staged_calls))
_ADD_ATTACHMENT = insert(staged_attachments)
# Of one call, its attachments first.
REMOVE_STAGED = [delete(table).where(of_call(table)) for table in (staged_attachments, staged_calls)]
# Two parameters for each key, of which the databases take about 32,766.
_KEYS_PER_QUERY = 1000


@dataclass(frozen=True)
class StagedCall(Call):
    """A staged call on its way, with the rows of its attachments.

    Behind a freeze it makes a version, so that whoever froze before looks again, and nobody takes it for what is left
    over.
    """

    kind: ClassVar[Kind] = STAGED_CALLS
    attachments: Sequence[dict[str, Any]]

    def added_txn(self, connection: Connection, fence: Fence | None) -> None:
        if self.attachments:
            connection.execute(_ADD_ATTACHMENT, self.attachments)
        if fence is not None and fence.state is FenceState.FROZEN:
            new, event, call_id = self.new, VersionEvent.LATE_STAGE, self.new.key[2]
            # Not random, as that of others is: to draw one lets go of the interpreter's lock, and few are needed.
            written = f"{call_id} {new.stamp.at.isoformat()} {new.stamp.by}"
            stamp = replace(new.stamp, event_id=hashlib.sha256(written.encode()).hexdigest()[:32])
            # An earlier try of it may have been deleted since, and its version stays.
            if not happened_txn(connection, new.rollout, stamp):
                advance_txn(connection, new.rollout, fence, event, stamp, model_call_id=call_id)

    def is_same(self, held: Row[Any]) -> bool:
        return False  # what it was staged with stands in rows of their own

    def differing_txn(self, connection: Connection) -> list[str]:
        named = self.new.rollout.named(self.new.key[2])
        row, held = self.new.row, connection.execute(_HELD, named).one()
        # The digest differs with whatever it covers, so its name would say nothing.
        names = [name for name in CALL_COLUMNS if name != "digest" and getattr(held, name) != row[name]]
        fields = [name.replace("extras_digest", "extras") for name in names]
        attached = {tuple(found) for found in connection.execute(_IDENTITIES, named)}
        given = {tuple(each[name] for name in IDENTITY_COLUMNS) for each in self.attachments}
        others = sorted({identity[0] for identity in attached ^ given})
        return [
            *fields,
            *differing_columns(held, SimpleNamespace(**row)),
            *(f"attachment {name}" for name in others),
        ]


def new_staged_call(
    key: RolloutKey,
    record: StagedCallRecord,
    packed: PackedCall,
    attachments: Iterable[dict[str, Any]],
    stamp: Stamp,
) -> tuple[NewCall, list[dict[str, Any]]]:
    """Return the row of a packed record, and those of its packed attachments."""
    identity = {**key.columns(), "model_call_id": record.model_call_id}
    attached = [identity | attachment for attachment in attachments]
    for each in attached:
        each[HASH_COLUMN] = row_sha256(staged_attachments, each)
    row = identity | {
        **{name: getattr(record, name) for name in CALL_COLUMNS},
        "token_width": packed.token_width,
        "staged_at": stamp.at,
        "written_by": stamp.by,
        "payload": packed.payload,
        "payload_sha256": packed.sha256,
        "extras": packed.extras,
        "attachments_sha256": attachments_sha256((each["name"], each[HASH_COLUMN]) for each in attached),
    }
    return NewCall(row, stamp), attached


def staged_calls_txn(
    connection: Connection, run: str, keys: Iterable[StagedKey], columns: Sequence[ColumnElement[Any]]
) -> dict[str, Row[Any]]:
    """Return these columns, the ids among them, of the calls that are there, by staging key."""
    return {
        staging_key(row.rollout_id, row.model_call_id): row
        for chunk in _chunks(keys)
        for row in connection.execute(_asked_for(connection, run, chunk, columns))
    }


def attachments_txn(connection: Connection, run: str, key: StagedKey) -> tuple[Any, Sequence[Row[Any]]]:
    """Return a call, with the hash that says which attachments it has, and their rows; None if it is not there."""
    named = RolloutKey(run, key[0]).named(key[1])
    call: Any = connection.execute(_ATTACHED_HASH, named).one_or_none()
    return call, connection.execute(_ATTACHMENTS, named).all()


def remove_staged_txn(connection: Connection, run: str, keys: Iterable[StagedKey]) -> set[str]:
    """Remove calls and their attachments; return the staging keys that were there."""
    limit_waiting(connection)
    removed: set[str] = set()
    for chunk in _chunks(keys):
        # Locked, so that nobody compares a repeat with a call that is half gone.
        found = connection.execute(_asked_for(connection, run, chunk, _IDS, lock=True)).all()
        removed.update(staging_key(*row) for row in found)
        for statement in REMOVE_STAGED:
            for rollout_id, model_call_id in found:
                connection.execute(statement, RolloutKey(run, rollout_id).named(model_call_id))
    return removed


def orphaned(run: str | None = None, until: datetime | None = None) -> CompoundSelect[Any]:
    """Return the query for run and staging key of the calls, staged until then, that nothing will read.

    No ledger row of their run names them, and their rollout is not open. A call that was staged behind a freeze is none
    until the rollout is retired: whoever froze is yet to look again.
    """

    def of_run(column: ColumnElement[str]) -> ColumnElement[bool]:
        return true() if run is None else column == run

    event = snapshot_versions.c
    late = (
        select(event.run, event.rollout_id + "/" + event.model_call_id)
        .join(fences, (fences.c.run == event.run) & (fences.c.rollout_id == event.rollout_id))
        .where(of_run(event.run), event.event == VersionEvent.LATE_STAGE, fences.c.state == FenceState.FROZEN)
    )
    named = select(ledger_calls.c.run, ledger_calls.c.staging_key).where(of_run(ledger_calls.c.run))
    return (
        select(_CALL.run, STAGING_KEY.label("staging_key"))
        .outerjoin(fences, (fences.c.run == _CALL.run) & (fences.c.rollout_id == _CALL.rollout_id))
        .where(of_run(_CALL.run), true() if until is None else _CALL.staged_at <= until, NOT_OPEN)
        # EXCEPT, because there is no index by staging key.
        .except_(named, late)
    )


def orphans_txn(connection: Connection, run: str, until: datetime) -> list[str]:
    """Return the keys, sorted, of the calls of a run that are `orphaned`."""
    return sorted(row.staging_key for row in connection.execute(orphaned(run, until)))


def _asked_for(
    connection: Connection,
    run: str,
    keys: Sequence[StagedKey],
    columns: Sequence[ColumnElement[Any]],
    *,
    lock: bool = False,
) -> Select[Any]:
    """Return the query for these calls, which looks each of them up by its primary key."""
    # A list of pairs in an IN would make SQLite read the whole run, and PostgreSQL plan for longer than it reads.
    asked = values(column("rollout_id", Text), column("model_call_id", Text)).data(keys).cte("asked")
    is_asked = and_(
        _CALL.run == run,
        _CALL.rollout_id == asked.c.rollout_id,
        _CALL.model_call_id == asked.c.model_call_id,
    )
    return looked_up(connection, asked, staged_calls, columns, is_asked, lock=lock)


def _chunks(keys: Iterable[StagedKey]) -> Iterator[list[StagedKey]]:
    keys = list(keys)
    return (keys[start : start + _KEYS_PER_QUERY] for start in range(0, len(keys), _KEYS_PER_QUERY))
