"""The staging store: where inference workers stage token deltas, and a trainer reads them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Self

from pydantic import BaseModel
from sqlalchemy import ColumnElement, Connection

from tokencustody.codec.attachments import attachments_sha256, pack_attachments, unpack_attachment
from tokencustody.codec.row_hash import is_proven
from tokencustody.codec.staged import (
    check_payload,
    pack_call,
    staged_name,
    unpack_call,
    unpack_extras,
    unpack_token_ids,
    validated_call,
)
from tokencustody.database.coalescing import Coalesce
from tokencustody.database.engine import DEFAULT_DEADLINE, DEFAULT_POOL_SIZE, Result, Work
from tokencustody.database.portal import BackgroundLoop
from tokencustody.errors import (
    CorruptEntryError,
    InvalidRecordError,
    LineageError,
    StagedCallMissingError,
    StoreUnavailableError,
)
from tokencustody.ids import check_call_id, check_rollout_id
from tokencustody.schema.tables import staged_attachments
from tokencustody.staging.digest import hash_token_ids
from tokencustody.staging.records import StagedCallBaseSnapshot, StagedCallRecord, StageResult, staging_key
from tokencustody.states import Isolation
from tokencustody.store.base import DEFAULT_MAX_ENTRY_BYTES, DatabaseClient, now
from tokencustody.store.writing import write_call
from tokencustody.txn.fence import RolloutKey, Stamp
from tokencustody.txn.staged_calls import (
    EXTRAS,
    METADATA,
    PAYLOAD,
    StagedCall,
    StagedKey,
    attachments_txn,
    new_staged_call,
    orphans_txn,
    remove_staged_txn,
    staged_calls_txn,
)


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
        isolation: str = Isolation.READ_COMMITTED,
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
            isolation=isolation,
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
                error=f"{staged_name(record)} was staged before with other data (differing: {', '.join(differing)}); "
                "the first stays",
            )
        return result(ok=True, staging_key=staging_key(record.rollout_id, record.model_call_id))

    def fetch(self, staging_keys: Sequence[str]) -> list[StagedCallBaseSnapshot]:
        """Return one verified snapshot for each key, in the order of the keys; a key named twice has it twice.

        Raises StagedCallMissingError that names every key without a call, CorruptEntryError for a call whose stored
        bytes are not those that were staged.
        """
        rows = self._rows(staging_keys, *METADATA, *PAYLOAD)
        snapshots = {key: unpack_call(row) for key, row in rows.items()}
        return [snapshots[key] for key in staging_keys]

    def fetch_extras(self, staging_keys: Sequence[str]) -> list[dict[str, Any] | None]:
        """Return the extras of each key, in the order of the keys, verified by the call's extras digest.

        Errors as for `fetch`.
        """
        rows = self._rows(staging_keys, *METADATA, *EXTRAS)
        extras = {key: unpack_extras(row) for key, row in rows.items()}
        return [extras[key] for key in staging_keys]

    def fetch_attachments(self, key: str) -> dict[str, Any]:
        """Return the attachments of one staged call by name: bytes, text and JSON values as they were given, and an
        `AttachedBuffer` for each that was a buffer.

        Errors as for `fetch`.
        """
        (parsed,) = _parsed([key]).values()

        if parsed is None:
            raise StagedCallMissingError([key])
        call, rows = self._read(lambda connection: attachments_txn(connection, self.run, parsed))
        if call is None:
            raise StagedCallMissingError([key])
        held = attachments_sha256((row.name, row.row_sha256) for row in rows)
        if call.attachments_sha256 not in (None, held):
            raise CorruptEntryError(
                f"{staged_name(call)} does not have the attachments that it was staged with: some were removed, added "
                "or changed; restore them from a backup"
            )
        for row in rows:
            if not is_proven(staged_attachments, row):
                raise CorruptEntryError(
                    f"{staged_name(row)}: attachment {row.name!r} is not what was attached to this call under this "
                    "name; restore it from a backup"
                )
        return {row.name: unpack_attachment(row) for row in rows}

    def fetch_prefix_token_ids(self, staging_chain: Sequence[str]) -> list[int]:
        """Return the token ids of a whole chain, root first, as its calls' deltas concatenated. No keys: no ids.

        Proven by the last call's cumulative hash. Raises LineageError that names the call where the keys are no chain,
        and for the rest as `fetch`.
        """
        rows = self._rows(staging_chain, *METADATA, *PAYLOAD)
        token_ids: list[int] = []
        links = [rows[key] for key in staging_chain]
        for link in links:
            if link.prev_len != len(token_ids):
                raise LineageError(
                    f"{staged_name(link)} follows {link.prev_len} tokens, but the chain before it has {len(token_ids)}"
                )
            token_ids += unpack_token_ids(link)
            if not link.cum_len == link.prev_len + link.delta_len == len(token_ids):
                raise LineageError(f"{staged_name(link)}: its lengths are not those of its token ids")
        if links and hash_token_ids(token_ids) != links[-1].cumulative_hash:
            # The hash of each payload tells a corrupt link from calls that are no chain.
            for link in links:
                check_payload(link)
            raise LineageError(
                f"{staged_name(links[-1])}: the chain's token ids do not have its cumulative hash"
            )
        return token_ids

    def delete(self, staging_keys: Sequence[str]) -> list[str]:
        """Remove staged calls and their attachments; return the keys that were there, each once, in input order.

        Either all of them are removed or none.
        """
        keys = _parsed(staging_keys)
        removed: set[str] = set()

        def remove(connection: Connection) -> None:
            # Added up: a repeat after a commit whose answer was lost finds nothing left to remove.
            removed.update(remove_staged_txn(connection, self.run, filter(None, keys.values())))

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
        until = now() - timedelta(seconds=min_age)
        return self._read(lambda connection: orphans_txn(connection, run, until))

    def _stage(self, record: StagedCallRecord, attachments: list[dict[str, Any]]) -> Sequence[str]:
        """Store a call and return nothing, or return what differs in the one that was stored before."""
        key = RolloutKey(self.run, check_rollout_id(record.rollout_id))
        check_call_id(record.model_call_id)
        if record.parent_call_id is not None:
            check_call_id(record.parent_call_id, "parent_call_id")
        packed = pack_call(record)
        size = len(packed.payload) + len(packed.extras or b"")
        attached_size = sum(len(attachment["data"]) for attachment in attachments)
        self._check_size(size + attached_size, key.rollout_id, record.model_call_id)
        stamp = Stamp(now(), self.written_by, event_id="")  # staging opens no fence
        new, attached = new_staged_call(key, record, packed, attachments, stamp)
        call = StagedCall(new, attached)

        async def stage() -> Sequence[str]:
            with self._database.doors() as doors:
                # Attachments are rows of another table.
                differing = await write_call(doors, call, size=size, alone=bool(attached))
                if differing:
                    doors.count("conflicts")
                return differing

        return self._background.run(stage)

    def _rows(self, staging_keys: Sequence[str], *columns: ColumnElement[Any]) -> dict[str, Any]:
        """Return the rows by key. Raises StagedCallMissingError that names every key without one."""
        keys = _parsed(staging_keys)
        asked = [parsed for parsed in keys.values() if parsed]
        rows = self._read(lambda connection: staged_calls_txn(connection, self.run, asked, columns))
        if missing := [key for key in keys if key not in rows]:
            raise StagedCallMissingError(missing)
        return rows

    def _read(self, work: Work[Result]) -> Result:
        return self._background.run(lambda: self._database.read(work))


def _result_type(record: BaseModel) -> type[StageResult]:
    if not isinstance(record, BaseModel):
        raise TypeError(f"record must be a StagedCallRecord, not {type(record).__name__}")
    # Another implementation takes only its own class for an answer; it stands beside its record.
    beside: type[StageResult] = getattr(sys.modules.get(type(record).__module__), "StageResult", StageResult)
    return beside


def _parsed(staging_keys: Sequence[str]) -> dict[str, StagedKey | None]:
    """Return, for each key once, its rollout and call; None for a key that no staged call can have."""
    if isinstance(staging_keys, str | bytes) or not isinstance(staging_keys, Sequence):
        raise TypeError(f"staging keys must be a sequence of texts, not {type(staging_keys).__name__}")
    keys: dict[str, StagedKey | None] = {}
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
