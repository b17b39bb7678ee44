"""The staging store: where inference workers stage token deltas, and a trainer reads them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Self

from pydantic import BaseModel
from sqlalchemy import ColumnElement, Connection, Select, Text, and_, column, delete, insert, select, values

from tokencustody.codec.attachments import (
    IDENTITY_COLUMNS,
    attachments_sha256,
    pack_attachments,
    unpack_attachment,
)
from tokencustody.codec.row_hash import HASH_COLUMN, is_proven, row_sha256
from tokencustody.codec.staged import (
    CALL_COLUMNS,
    check_payload,
    differing_columns,
    pack_call,
    unpack_call,
    unpack_extras,
    unpack_token_ids,
    validated_call,
    where,
)
from tokencustody.database.coalescing import Coalesce
from tokencustody.database.dialects import insert_if_absent, limit_waiting, looked_up
from tokencustody.database.engine import DEFAULT_DEADLINE, DEFAULT_POOL_SIZE
from tokencustody.database.portal import BackgroundLoop
from tokencustody.errors import (
    CorruptEntryError,
    InvalidRecordError,
    LineageError,
    StagedCallMissingError,
    StoreUnavailableError,
)
from tokencustody.ids import check_call_id, check_rollout_id
from tokencustody.schema.tables import (
    fences,
    ledger_calls,
    snapshot_versions,
    staged_attachments,
    staged_calls,
)
from tokencustody.staging.digest import hash_token_ids
from tokencustody.staging.records import StagedCallBaseSnapshot, StagedCallRecord, StageResult, staging_key
from tokencustody.states import FenceState, VersionEvent
from tokencustody.store.base import DEFAULT_MAX_ENTRY_BYTES, DatabaseClient, now
from tokencustody.txn.fence import RolloutKey, Stamp, advance_txn, find_fence_txn
from tokencustody.txn.inserting import CallInsert, NewCall

_CALL = staged_calls.c
_PAYLOAD = (_CALL.payload, _CALL.payload_sha256)
_IDS = (_CALL.rollout_id, _CALL.model_call_id)
_METADATA = tuple(_CALL[name] for name in CALL_COLUMNS)
# Two parameters for each key, of which the databases take about 32,766.
_KEYS_PER_QUERY = 1000

_STAGED_CALLS = CallInsert(staged_calls, "staged_at", "digest", "payload", fenced=False)


class SqlStagingStore(DatabaseClient):
    """A `StagingSink` and `StagingSource`. Any thread may call it, several at once, also one that runs an event loop.

    The methods are synchronous: they wait until their change is durable, and raise StoreUnavailableError when the
    deadline passes first. Connections live in a background thread that starts with the first call; a forked process
    gets its own. Close the store, or use it in `with`. Staged calls have no fence: freezing or retiring their rollout
    neither hinders nor removes them. One that is staged behind a freeze makes a version, so that whoever froze looks
    again.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        run: str = "default",
        writer: str | None = None,
        deadline: float = DEFAULT_DEADLINE,
        pool_size: int = DEFAULT_POOL_SIZE,
        coalesce: str = Coalesce.PROCESS,
        spill: str | os.PathLike[str] | None = "",
        max_entry_bytes: int = DEFAULT_MAX_ENTRY_BYTES,
    ) -> None:
        super().__init__(
            url,
            run=run,
            writer=writer,
            deadline=deadline,
            pool_size=pool_size,
            coalesce=coalesce,
            spill=spill,
            max_entry_bytes=max_entry_bytes,
        )
        self._background = BackgroundLoop(f"the store on {self._database.url.display}", self._database.close)

    def close(self) -> None:
        """Wait for calls that are running, then release resources. Idempotent; nothing is ever buffered."""
        self._background.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def stage(self, record: StagedCallRecord, *, attachments: Mapping[str, Any] | None = None) -> StageResult:
        """Make the record and its attachments durable, all or nothing, under "rollout_id/model_call_id".

        The same record with the same attachments again is a success. Other data under the key, a record or attachment
        that cannot be stored as it is, and a database that cannot be reached give a failed result whose error says
        which; nothing of the call is stored then. `attachments` as for `pack_attachments`; the call's digest
        does not cover them.
        A record of another implementation is checked like one of ours, and answered with that implementation's
        `StageResult`. Raises TypeError when `record` is no pydantic model or `attachments` no mapping.
        """
        result = _result_type(record)
        try:
            differing = self._stage(validated_call(record), pack_attachments(attachments))
        except (InvalidRecordError, CorruptEntryError, StoreUnavailableError) as exc:
            return result(ok=False, error=str(exc))
        if differing:
            return result(
                ok=False,
                error=f"{where(record)} was staged before with other data (differing: {', '.join(differing)}); the "
                "first stays",
            )
        return result(ok=True, staging_key=staging_key(record.rollout_id, record.model_call_id))

    def fetch(self, staging_keys: Sequence[str]) -> list[StagedCallBaseSnapshot]:
        """Return one verified snapshot for each key, in the order of the keys; a key named twice has it twice.

        Raises StagedCallMissingError that names every key without a call, CorruptEntryError for a call whose stored
        bytes are not those that were staged.
        """
        rows = self._rows(staging_keys, *_METADATA, *_PAYLOAD)
        snapshots = {key: unpack_call(row) for key, row in rows.items()}
        return [snapshots[key] for key in staging_keys]

    def fetch_extras(self, staging_keys: Sequence[str]) -> list[dict[str, Any] | None]:
        """Return the extras of each key, in the order of the keys, verified by the call's extras digest.

        Errors as for `fetch`.
        """
        rows = self._rows(staging_keys, *_METADATA, _CALL.extras)
        extras = {key: unpack_extras(row) for key, row in rows.items()}
        return [extras[key] for key in staging_keys]

    def fetch_attachments(self, key: str) -> dict[str, Any]:
        """Return the attachments of one staged call by name: bytes, text and JSON values as they were given, and an
        `AttachedBuffer` for each that was a buffer.

        Errors as for `fetch`.
        """
        (parsed,) = _parsed([key]).values()

        def read(connection: Connection) -> tuple[Any, Sequence[Any]]:
            if parsed is None:
                return None, ()
            call = select(*_IDS, _CALL.attachments_sha256).where(self._of_call(staged_calls, parsed))
            attached = select(staged_attachments).where(self._of_call(staged_attachments, parsed))
            return connection.execute(call).one_or_none(), connection.execute(attached).all()

        call, rows = self._background.run(lambda: self._database.read(read))
        if call is None:
            raise StagedCallMissingError([key])
        held = attachments_sha256((row.name, row.row_sha256) for row in rows)
        if call.attachments_sha256 not in (None, held):
            raise CorruptEntryError(
                f"{where(call)} does not have the attachments that it was staged with: some were removed, added or "
                "changed; restore them from a backup"
            )
        for row in rows:
            if not is_proven(staged_attachments, row):
                raise CorruptEntryError(
                    f"{where(row)}: attachment {row.name!r} is not what was attached to this call under this name; "
                    "restore it from a backup"
                )
        return {row.name: unpack_attachment(row) for row in rows}

    def fetch_prefix_token_ids(self, staging_chain: Sequence[str]) -> list[int]:
        """Return the token ids of a whole chain, root first, as its calls' deltas concatenated. No keys: no ids.

        Proven by the last call's cumulative hash. Raises LineageError that names the call where the keys are no chain,
        and for the rest as `fetch`.
        """
        rows = self._rows(staging_chain, *_METADATA, *_PAYLOAD)
        token_ids: list[int] = []
        links = [rows[key] for key in staging_chain]
        for link in links:
            if link.prev_len != len(token_ids):
                raise LineageError(
                    f"{where(link)} follows {link.prev_len} tokens, but the chain before it has {len(token_ids)}"
                )
            token_ids += unpack_token_ids(link)
            if not link.cum_len == link.prev_len + link.delta_len == len(token_ids):
                raise LineageError(f"{where(link)}: its lengths are not those of its token ids")
        if links and hash_token_ids(token_ids) != links[-1].cumulative_hash:
            # The hash of each payload tells a corrupt link from calls that are no chain.
            for link in links:
                check_payload(link)
            raise LineageError(f"{where(links[-1])}: the chain's token ids do not have its cumulative hash")
        return token_ids

    def delete(self, staging_keys: Sequence[str]) -> list[str]:
        """Remove staged calls and their attachments; return the keys that were there, each once, in input order.

        Either all of them are removed or none.
        """
        keys = _parsed(staging_keys)
        removed: set[str] = set()

        def remove(connection: Connection) -> None:
            limit_waiting(connection)
            for chunk in _chunks([parsed for parsed in keys.values() if parsed]):
                # Locked, so that nobody compares a repeat with a call that is half gone.
                found = connection.execute(self._asked_for(connection, chunk, _IDS, lock=True)).all()
                # Added up: a repeat after a commit whose answer was lost finds nothing left to remove.
                removed.update(staging_key(*row) for row in found)
                for table in (staged_attachments, staged_calls):
                    for row in found:
                        connection.execute(delete(table).where(self._of_call(table, row)))

        self._background.run(lambda: self._database.write(remove))
        return [key for key in keys if key in removed]

    def orphans(self, run: str | None = None, *, min_age: float = 0.0) -> list[str]:
        """Return the keys, sorted, of staged calls that nothing will read: no ledger row of the run names them, and
        their rollout is retired or has no fence, or is frozen and they were staged before that.

        A call that was staged a moment ago may still be recorded, and only then does a new rollout get its fence: pass
        as `min_age` the seconds that a recording may take before you delete what this returns. `run` defaults to the
        store's own.
        """
        run = self.run if run is None else check_rollout_id(run, "run")
        key = _CALL.rollout_id + "/" + _CALL.model_call_id
        event = snapshot_versions.c
        late = (
            select(event.rollout_id + "/" + event.model_call_id)
            .join(fences, (fences.c.run == event.run) & (fences.c.rollout_id == event.rollout_id))
            .where(
                event.run == run, event.event == VersionEvent.LATE_STAGE, fences.c.state == FenceState.FROZEN
            )
        )
        gone_or_fenced = fences.c.state.is_(None) | (fences.c.state != FenceState.OPEN)
        statement = (
            select(key)
            .outerjoin(fences, (fences.c.run == _CALL.run) & (fences.c.rollout_id == _CALL.rollout_id))
            .where(_CALL.run == run, _CALL.staged_at <= now() - timedelta(seconds=min_age), gone_or_fenced)
            # EXCEPT, because there is no index by staging key.
            .except_(select(ledger_calls.c.staging_key).where(ledger_calls.c.run == run), late)
        )

        def read(connection: Connection) -> list[str]:
            return sorted(connection.execute(statement).scalars())

        return self._background.run(lambda: self._database.read(read))

    def _stage(self, record: StagedCallRecord, attachments: list[dict[str, Any]]) -> list[str]:
        """Store a call and return nothing, or return what differs in the one that was stored before."""
        key = (check_rollout_id(record.rollout_id), check_call_id(record.model_call_id))
        if record.parent_call_id is not None:
            check_call_id(record.parent_call_id, "parent_call_id")
        packed = pack_call(record)
        size = len(packed.payload) + len(packed.extras or b"")
        self._check_size(size + sum(len(attachment["data"]) for attachment in attachments), *key)
        identity = {"run": self.run, "rollout_id": key[0], "model_call_id": key[1]}
        # Without an event id: staging opens no fence, and drawing a random one lets go of the interpreter's lock.
        stamp = Stamp(now(), self.written_by, event_id="")
        row = identity | {
            **{name: getattr(record, name) for name in CALL_COLUMNS},
            "token_width": packed.token_width,
            "staged_at": stamp.at,
            "written_by": stamp.by,
            "payload": packed.payload,
            "payload_sha256": packed.sha256,
            "extras": packed.extras,
        }

        attached = [identity | attachment for attachment in attachments]
        for each in attached:
            each[HASH_COLUMN] = row_sha256(staged_attachments, each)
        row["attachments_sha256"] = attachments_sha256((each["name"], each[HASH_COLUMN]) for each in attached)

        rollout = RolloutKey(self.run, key[0])

        def store(connection: Connection, late: Stamp | None = None) -> list[str] | None:
            """Return None if the rollout is frozen, for which a stamp and an exclusive lock are needed."""
            limit_waiting(connection)
            fence = find_fence_txn(connection, rollout, exclusive=late is not None)
            is_frozen = fence is not None and fence.state is FenceState.FROZEN
            if is_frozen and late is None:
                return None
            while True:
                stored = connection.execute(insert_if_absent(connection, staged_calls), row)
                if stored.rowcount:
                    if attachments:
                        connection.execute(insert(staged_attachments), attached)
                    if late is not None and fence is not None and is_frozen:
                        # So that whoever froze before looks again, and nobody takes this for what is left over.
                        advance_txn(
                            connection, rollout, fence, VersionEvent.LATE_STAGE, late, model_call_id=key[1]
                        )
                    return []
                found = connection.execute(
                    select(*_METADATA, *_PAYLOAD)
                    .where(self._of_call(staged_calls, key))
                    .with_for_update(read=True)
                )
                # None: it was deleted between the two statements.
                if (held := found.one_or_none()) is not None:
                    return _differing(held, row) + differing_attachments(connection)

        def differing_attachments(connection: Connection) -> list[str]:
            columns = [staged_attachments.c[name] for name in IDENTITY_COLUMNS]
            found = connection.execute(select(*columns).where(self._of_call(staged_attachments, key)))
            held = {tuple(row) for row in found}
            given = {tuple(attachment[name] for name in IDENTITY_COLUMNS) for attachment in attachments}
            return [f"attachment {name}" for name in sorted({row[0] for row in held ^ given})]

        async def stage() -> list[str]:
            with self._database.doors() as doors:
                if not attachments:
                    call = NewCall(row, stamp)
                    if await doors.write_together(
                        _STAGED_CALLS.shared, call, rollout=call.rollout, size=size
                    ):
                        return []
                differing = await doors.write(store, rollout=rollout)
                if differing is None:
                    late = Stamp.make(now(), self.written_by)
                    differing = await doors.write(lambda connection: store(connection, late), rollout=rollout)
                if differing:
                    doors.count("conflicts")
                return differing or []

        return self._background.run(stage)

    def _rows(self, staging_keys: Sequence[str], *columns: ColumnElement[Any]) -> dict[str, Any]:
        """Return the rows by key. Raises StagedCallMissingError that names every key without one."""
        keys = _parsed(staging_keys)

        def read(connection: Connection) -> dict[str, Any]:
            rows = {}
            for chunk in _chunks([parsed for parsed in keys.values() if parsed]):
                found = connection.execute(self._asked_for(connection, chunk, columns))
                rows.update({staging_key(row.rollout_id, row.model_call_id): row for row in found})
            return rows

        rows = self._background.run(lambda: self._database.read(read))
        if missing := [key for key in keys if key not in rows]:
            raise StagedCallMissingError(missing)
        return rows

    def _asked_for(
        self,
        connection: Connection,
        keys: Sequence[tuple[str, str]],
        columns: Sequence[ColumnElement[Any]],
        *,
        lock: bool = False,
    ) -> Select[Any]:
        """Return the query for these calls, which looks each of them up by its primary key."""
        # A list of pairs in an IN would make SQLite read the whole run, and PostgreSQL plan for longer than it reads.
        asked = values(column("rollout_id", Text), column("model_call_id", Text)).data(keys).cte("asked")
        is_asked = and_(
            _CALL.run == self.run,
            _CALL.rollout_id == asked.c.rollout_id,
            _CALL.model_call_id == asked.c.model_call_id,
        )
        return looked_up(connection, asked, staged_calls, columns, is_asked, lock=lock)

    def _of_call(self, table: Any, key: tuple[str, str]) -> ColumnElement[bool]:
        """Return the condition that a row of `table` belongs to this call."""
        columns = table.c
        return and_(columns.run == self.run, columns.rollout_id == key[0], columns.model_call_id == key[1])


def _result_type(record: BaseModel) -> type[StageResult]:
    if not isinstance(record, BaseModel):
        raise TypeError(f"record must be a StagedCallRecord, not {type(record).__name__}")
    # Another implementation takes only its own class for an answer; it stands beside its record.
    beside: type[StageResult] = getattr(sys.modules.get(type(record).__module__), "StageResult", StageResult)
    return beside


def _parsed(staging_keys: Sequence[str]) -> dict[str, tuple[str, str] | None]:
    """Return, for each key once, its rollout and call; None for a key that no staged call can have."""
    if isinstance(staging_keys, str | bytes) or not isinstance(staging_keys, Sequence):
        raise TypeError(f"staging keys must be a sequence of texts, not {type(staging_keys).__name__}")
    keys: dict[str, tuple[str, str] | None] = {}
    for index, key in enumerate(staging_keys):
        if not isinstance(key, str):
            raise TypeError(f"staging key {index} must be text, not {type(key).__name__}")
        # A rollout id has no slash, a call id may.
        rollout_id, _, model_call_id = key.partition("/")
        try:
            keys[key] = (check_rollout_id(rollout_id), check_call_id(model_call_id))
        except InvalidRecordError:
            keys[key] = None
    return keys


def _chunks(keys: list[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    return (keys[start : start + _KEYS_PER_QUERY] for start in range(0, len(keys), _KEYS_PER_QUERY))


def _differing(held: Any, row: dict[str, Any]) -> list[str]:
    """Return the names of the fields in which a stored row is not the given one."""
    # The digest differs with whatever it covers, so its name would say nothing.
    names = [name for name in CALL_COLUMNS if name != "digest" and getattr(held, name) != row[name]]
    return [name.replace("extras_digest", "extras") for name in names] + differing_columns(
        held, SimpleNamespace(**row)
    )
