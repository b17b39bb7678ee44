"""The sink: where a serving process puts calls, announces them, and says which ones it lost."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, insert, literal, select, update

from tokencustody.errors import PayloadConflictError
from tokencustody.records import TokenEntry
from tokencustody.sql.codec import PackedEntry, differing_fields, pack_entry, unpack_entry, validated
from tokencustody.sql.dialects import insert_if_absent
from tokencustody.sql.tables import (
    FailureKind,
    FenceState,
    VersionEvent,
    entries,
    intents,
    stored_payload,
)
from tokencustody.store.base import SqlStore, now
from tokencustody.store.fence import (
    RolloutKey,
    Stamp,
    advance_txn,
    fail_txn,
    happened_txn,
    lock_fence_txn,
    refuse_if_frozen,
    refuse_if_retired,
)
from tokencustody.store.ids import check_call_id, check_rollout_id
from tokencustody.store.inserting import CallInsert, NewCall

_LONGEST_AUDIT_TEXT = 512
# About what an intent takes on its way.
_INTENT_SIZE = 1024

_ENTRIES = CallInsert(entries, "committed_at", "payload_sha256")
_INTENTS = CallInsert(intents, "begun_at")


class SqlTokenSink(SqlStore):
    """A `TokenSink` with the optional `begin_call` and `refuse_call`.

    Every method returns once its row is durable, and raises StoreUnavailableError when the deadline passes first.
    """

    async def put(self, entry: TokenEntry) -> None:
        """Store one call.

        The same call id with the same bytes is a no-op. With other bytes the first payload stays, the rollout is
        incomplete and PayloadConflictError (a ValueError) is raised. Raises InvalidRecordError for a malformed
        entry, TokenCaptureFrozenError or TokenCaptureRetiredError after the fence.
        """
        entry = validated(entry)
        key = RolloutKey(self.run, check_rollout_id(entry.rollout_id))
        check_call_id(entry.model_call_id)
        packed = pack_entry(entry)
        stamp = Stamp.make(now(), self.written_by)
        row = {
            **key.columns(),
            **_audit_columns(entry, packed),
            "committed_at": stamp.at,
            "written_by": stamp.by,
        }

        this_call = key.of(entries) & (entries.c.model_call_id == entry.model_call_id)

        def store(connection: Connection) -> bool:
            fence = lock_fence_txn(connection, key, stamp, exclusive=False)
            if fence.state is not FenceState.OPEN and _stored_txn(
                connection, this_call, entries.c.committed_at, stamp
            ):
                return True
            refuse_if_frozen(fence, key, f"call {entry.model_call_id}")
            stored = connection.execute(insert_if_absent(connection, entries), row)
            if stored.rowcount:
                return True
            held: str | None = connection.scalar(select(entries.c.payload_sha256).where(this_call))
            return held == packed.sha256

        def compare(connection: Connection) -> list[str] | None:
            fence = lock_fence_txn(connection, key, stamp, exclusive=True)
            recorded = happened_txn(connection, key, stamp)
            if not recorded:
                refuse_if_frozen(fence, key, f"call {entry.model_call_id}")
            found = connection.execute(select(stored_payload, entries.c.payload_sha256).where(this_call))
            first = found.one_or_none()
            if first is None or first.payload_sha256 == packed.sha256:
                return None
            held = unpack_entry(
                first.payload,
                first.payload_sha256,
                rollout_id=key.rollout_id,
                model_call_id=entry.model_call_id,
            )
            fields = differing_fields(held, entry)
            if fields and not recorded:
                fail_txn(
                    connection,
                    key,
                    fence,
                    VersionEvent.CONFLICT,
                    FailureKind.CONFLICT,
                    stamp,
                    model_call_id=entry.model_call_id,
                    first=first.payload_sha256,
                    second=packed.sha256,
                    differing=",".join(fields).replace("\0", "\ufffd"),
                )
            return fields

        call = NewCall(row, stamp)
        if await self._database.write_together(_ENTRIES.shared, call, rollout=key, size=len(packed.payload)):
            return
        # A conflict needs the fence exclusively; upgrading the share lock would deadlock two conflicting writers.
        while not await self._database.write(store):
            fields = await self._database.write(compare)
            if fields:
                raise PayloadConflictError(
                    f"model call {entry.model_call_id} of rollout {key.rollout_id} was stored before with other "
                    f"bytes (differing: {', '.join(fields)}); the first payload stays and the rollout is incomplete"
                )
            if fields is not None:
                return

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Announce a call before it is dispatched. A repeat is a no-op.

        An intent with neither an entry nor a refusal at freeze makes the rollout incomplete. Raises
        TokenCaptureFrozenError or TokenCaptureRetiredError after the fence.
        """
        key = RolloutKey(self.run, check_rollout_id(rollout_id))
        check_call_id(model_call_id)
        stamp = Stamp.make(now(), self.written_by)

        def announce(connection: Connection) -> None:
            fence = lock_fence_txn(connection, key, stamp, exclusive=False)
            this_intent = key.of(intents) & (intents.c.model_call_id == model_call_id)
            if fence.state is not FenceState.OPEN and _stored_txn(
                connection, this_intent, intents.c.begun_at, stamp
            ):
                return
            refuse_if_frozen(fence, key, f"the intent of call {model_call_id}")
            connection.execute(insert_if_absent(connection, intents), _intent(key, model_call_id, stamp))

        call = NewCall(_intent(key, model_call_id, stamp), stamp)
        if not await self._database.write_together(_INTENTS.shared, call, rollout=key, size=_INTENT_SIZE):
            await self._database.write(announce)

    async def refuse_call(self, rollout_id: str, *, model_call_id: str, code: str) -> None:
        """Record that the engine refused a call, so that its intent does not dangle. `code` is the engine's own.

        The same code again is a no-op; another one makes the rollout incomplete and raises PayloadConflictError.
        Raises TokenCaptureFrozenError or TokenCaptureRetiredError after the fence.
        """
        key = RolloutKey(self.run, check_rollout_id(rollout_id))
        check_call_id(model_call_id)
        check_call_id(code, "code")
        stamp = Stamp.make(now(), self.written_by)
        this_intent = key.of(intents) & (intents.c.model_call_id == model_call_id)

        def refuse(connection: Connection) -> str:
            fence = lock_fence_txn(connection, key, stamp, exclusive=True)
            found = connection.execute(select(intents.c.refusal_code).where(this_intent)).one_or_none()
            held: str | None = None if found is None else found.refusal_code
            if happened_txn(connection, key, stamp):
                return held or code
            refuse_if_frozen(fence, key, f"the refusal of call {model_call_id}")
            if found is None:
                connection.execute(insert(intents), _intent(key, model_call_id, stamp))
            if held is None:
                connection.execute(
                    update(intents).where(this_intent).values(refusal_code=code, refused_at=stamp.at)
                )
                advance_txn(connection, key, fence, VersionEvent.REFUSAL, stamp, model_call_id=model_call_id)
                return code
            if held != code:
                fail_txn(
                    connection,
                    key,
                    fence,
                    VersionEvent.CONFLICT,
                    FailureKind.REFUSAL_CONFLICT,
                    stamp,
                    model_call_id=model_call_id,
                    differing="code",
                )
            return held

        held = await self._database.write(refuse)
        if held != code:
            raise PayloadConflictError(
                f"model call {model_call_id} of rollout {rollout_id} was refused before with another code ({held}); "
                "that one stays and the rollout is incomplete"
            )

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Record that a call of this rollout was not captured, so that its sample is masked.

        Works on a frozen rollout too, where it changes the version and so invalidates a drop of the old one. Raises
        TokenCaptureRetiredError for a retired rollout.
        """
        key = RolloutKey(self.run, check_rollout_id(rollout_id))
        if model_call_id != "":
            check_call_id(model_call_id)
        stamp = Stamp.make(now(), self.written_by)

        def mark(connection: Connection) -> None:
            fence = lock_fence_txn(connection, key, stamp, exclusive=True)
            if happened_txn(connection, key, stamp):
                return
            refuse_if_retired(fence, key, f"the mark for call {model_call_id or '(unnamed)'}")
            fail_txn(
                connection,
                key,
                fence,
                VersionEvent.MARK,
                FailureKind.MARK,
                stamp,
                model_call_id=model_call_id,
            )

        await self._database.write(mark)


def _stored_txn(connection: Connection, this_call: Any, stamped_at: Any, stamp: Stamp) -> bool:
    """Return whether an earlier try of this very write was committed, though its answer was lost."""
    written = this_call & (stamped_at == stamp.at) & (stamped_at.table.c.written_by == stamp.by)
    return connection.scalar(select(literal(1)).where(written)) is not None


def _intent(key: RolloutKey, model_call_id: str, stamp: Stamp) -> dict[str, Any]:
    return {
        **key.columns(),
        "model_call_id": model_call_id,
        "refusal_code": None,
        "begun_at": stamp.at,
        "refused_at": None,
        "written_by": stamp.by,
    }


def _audit_columns(entry: TokenEntry, packed: PackedEntry) -> dict[str, Any]:
    return {
        "model_call_id": entry.model_call_id,
        "model": _audit_text(entry.model),
        "response_id": _audit_text(entry.response_id),
        "prompt_len": len(entry.prompt_token_ids),
        "generation_len": len(entry.generation_token_ids),
        "cum_len": entry.cum_len,
        "token_width": packed.token_width,
        "digest": _audit_text(entry.digest),
        "parent_call_id": _audit_text(entry.parent_call_id),
        "parent_resolution": entry.parent_resolution,
        "parent_resolution_reason": _audit_text(entry.parent_resolution_reason),
        "prompt_is_delta": entry.prompt_is_delta,
        "continuation_fingerprint": _audit_text(entry.continuation_fingerprint),
        "continuation_context_len": entry.continuation_context_len,
        "continuation_context_digest": _audit_text(entry.continuation_context_digest),
        "fingerprint_version": entry.fingerprint_version,
        # SQLite would store NaN as NULL; the payload has the exact value.
        "created_at": entry.created_at if entry.created_at == entry.created_at else None,
        "payload": packed.payload,
        "payload_sha256": packed.sha256,
        "shared_len": 0,
        "stored_sha256": None,
        "sequence_proven": packed.digest is not None
        and (entry.cum_len, entry.digest) == (packed.length, packed.digest),
    }


def _audit_text(text: str | None) -> str | None:
    # PostgreSQL's text has no NUL and an indexed value has a limit. The payload keeps the exact text.
    if text is None:
        return None
    text = text.replace("\0", "\ufffd")
    return text if len(text) <= _LONGEST_AUDIT_TEXT else text[: _LONGEST_AUDIT_TEXT - 1] + "…"
