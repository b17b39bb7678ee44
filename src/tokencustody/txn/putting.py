"""One call on its way into the store: with others in one statement, or alone when that did not store it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sqlalchemy import Connection, Row, select

from tokencustody.codec.calls import PackedEntry, SharedPayload, differing_fields, without_prefix
from tokencustody.codec.chains import unpack_calls, unpack_chain, unpack_sequence_on
from tokencustody.codec.id_columns import PackedIds
from tokencustody.database.dialects import insert_if_absent
from tokencustody.errors import CorruptEntryError, LineageError
from tokencustody.records import TokenEntry
from tokencustody.schema.tables import entries
from tokencustody.states import FailureKind, FenceState, VersionEvent
from tokencustody.txn.fence import (
    RolloutKey,
    Stamp,
    fail_txn,
    happened_txn,
    lock_fence_txn,
    of_call,
    refuse_if_frozen,
)
from tokencustody.txn.inserting import NewCall, base_is_there_txn
from tokencustody.txn.reading import chain_txn
from tokencustody.txn.sequences import KnownSequence

_LONGEST_AUDIT_TEXT = 512


_IDENTITY = select(entries.c.payload_sha256).where(of_call(entries))
_WRITTEN = select(entries.c.committed_at, entries.c.written_by, entries.c.payload_sha256).where(
    of_call(entries)
)


@dataclass(frozen=True)
class Put:
    """A packed call, the stamp of its writing, and the sequence of its parent if its prompt begins with it."""

    key: RolloutKey
    entry: TokenEntry
    packed: PackedEntry
    stamp: Stamp
    base: KnownSequence | None

    @cached_property
    def call(self) -> NewCall:
        """The row, without the prefix that the parent holds."""
        if self.base is None or not self.base.ids:
            return self.whole_call
        shared = without_prefix(self.packed, len(self.base.ids))
        return NewCall(self._row(shared), self.stamp, self.base.payload_sha256)

    @cached_property
    def whole_call(self) -> NewCall:
        """The row with the whole prompt."""
        return NewCall(self._row(None), self.stamp)

    def store_txn(self, connection: Connection) -> bool:
        """Store the call, alone; return False when its id is taken by other bytes.

        Raises TokenCaptureFrozenError or TokenCaptureRetiredError after the fence.
        """
        fence = lock_fence_txn(connection, self.key, self.stamp, exclusive=False)
        if fence.state is not FenceState.OPEN and self._is_written_txn(connection):
            return True
        refuse_if_frozen(fence, self.key, f"call {self.entry.model_call_id}")
        call = self._call_txn(connection)
        if connection.execute(insert_if_absent(connection, entries), call.row).rowcount:
            return True
        held: str | None = connection.scalar(_IDENTITY, self._named)
        return held == self.packed.sha256

    def compare_txn(self, connection: Connection) -> list[str] | None:
        """Return the fields in which the stored call differs, kept as evidence; None when there is no such call.

        No fields: the same payload. It takes the fence exclusively, for upgrading the share lock would deadlock two
        conflicting writers.
        """
        fence = lock_fence_txn(connection, self.key, self.stamp, exclusive=True)
        recorded = happened_txn(connection, self.key, self.stamp)
        call_id = self.entry.model_call_id
        if not recorded:
            refuse_if_frozen(fence, self.key, f"call {call_id}")
        first: str | None = connection.scalar(_IDENTITY, self._named)
        if first is None or first == self.packed.sha256:
            return None
        fields = differing_fields(read_call_txn(connection, self.key, call_id), self.entry)
        if fields and not recorded:
            fail_txn(
                connection,
                self.key,
                fence,
                VersionEvent.CONFLICT,
                FailureKind.CONFLICT,
                self.stamp,
                model_call_id=call_id,
                **conflict_evidence(first, self.packed.sha256, self.entry, fields),
            )
        return fields

    def _call_txn(self, connection: Connection) -> NewCall:
        """Return the row as it can be stored now that the fence is locked and no parent can be replaced any more."""
        parent = self.entry.parent_call_id
        if self.base is None or parent is None:
            return self.whole_call
        if not self.base.is_delta and base_is_there_txn(connection, self.call):
            return self.call
        found = read_base(self.key, chain_txn(connection, self.key, parent), parent)
        if found is None or not self.packed.begins_with(found.ids):
            return self.whole_call
        return replace(self, base=found).call

    @property
    def _named(self) -> dict[str, Any]:
        return self.key.named(self.entry.model_call_id)

    def _is_written_txn(self, connection: Connection) -> bool:
        """Return whether an earlier try of this very write was committed, though its answer was lost."""
        row = connection.execute(_WRITTEN, self._named).one_or_none()
        return row is not None and tuple(row) == (
            self.stamp.at,
            self.stamp.by,
            self.packed.sha256,
        )

    def _row(self, shared: SharedPayload | None) -> dict[str, Any]:
        entry, packed = self.entry, self.packed
        return {
            "run": self.key.run,
            "rollout_id": self.key.rollout_id,
            "model_call_id": entry.model_call_id,
            "model": audit_text(entry.model),
            "response_id": audit_text(entry.response_id),
            "prompt_len": packed.prompt_len,
            "generation_len": packed.length - packed.prompt_len,
            "cum_len": entry.cum_len,
            "token_width": packed.token_width,
            "digest": audit_text(entry.digest),
            "parent_call_id": audit_text(entry.parent_call_id),
            "parent_resolution": entry.parent_resolution,
            "parent_resolution_reason": audit_text(entry.parent_resolution_reason),
            "prompt_is_delta": entry.prompt_is_delta,
            "continuation_fingerprint": audit_text(entry.continuation_fingerprint),
            "continuation_context_len": entry.continuation_context_len,
            "continuation_context_digest": audit_text(entry.continuation_context_digest),
            "fingerprint_version": entry.fingerprint_version,
            # SQLite would store NaN as NULL; the payload has the exact value.
            "created_at": entry.created_at if entry.created_at == entry.created_at else None,
            "committed_at": self.stamp.at,
            "written_by": self.stamp.by,
            "payload": packed.payload if shared is None else shared.payload,
            "payload_sha256": packed.sha256,
            "shared_len": 0 if shared is None or self.base is None else len(self.base.ids),
            "stored_sha256": None if shared is None else shared.sha256,
        }


def conflict_evidence(first: str, second: str, entry: TokenEntry, fields: Sequence[str]) -> dict[str, Any]:
    """Return what `fail_txn` keeps of a conflict: both payload hashes, the fields that differ, and by what a request
    is known that continues `entry`, the second payload.
    """
    return {
        "first": first,
        "second": second,
        "differing": ",".join(fields).replace("\0", "\ufffd"),
        "second_fingerprint": audit_text(entry.continuation_fingerprint),
        "second_fingerprint_version": entry.fingerprint_version,
        "second_context_len": entry.continuation_context_len,
        "second_context_digest": audit_text(entry.continuation_context_digest),
    }


def read_call_txn(connection: Connection, key: RolloutKey, model_call_id: str) -> TokenEntry:
    """Return a call that is stored, as it was written. Raises CorruptEntryError."""
    chain = unpack_calls(key.rollout_id, chain_txn(connection, key, model_call_id))
    return next(entry for entry in chain if entry.model_call_id == model_call_id)


def read_base(key: RolloutKey, chain: Sequence[Row[Any]], model_call_id: str) -> KnownSequence | None:
    """Return the whole sequence of a call, with which the prompts of its children may begin, from its chain.

    None when the call is missing or conflicting, or when its sequence cannot be rebuilt.
    """
    call = next((row for row in chain if row.model_call_id == model_call_id), None)
    if call is None or call.is_conflicting:
        return None
    try:
        _, ids = unpack_chain(key.rollout_id, chain, model_call_id, prove=False)
    except (CorruptEntryError, LineageError):
        return None
    return KnownSequence(call.payload_sha256, PackedIds.of(ids), is_delta=call.prompt_is_delta)


def read_base_on(key: RolloutKey, row: Row[Any], beginning: KnownSequence) -> KnownSequence | None:
    """Return what `read_base` does for a call that was stored without `beginning`; None when it was without another."""
    try:
        ids = unpack_sequence_on(key.rollout_id, row, beginning.ids)
    except CorruptEntryError:
        return None
    return None if ids is None or row.is_conflicting else KnownSequence(row.payload_sha256, ids)


def audit_text(text: str | None) -> str | None:
    """Return text as an audit column holds it; the payload keeps it exactly."""
    # PostgreSQL's text has no NUL, and an indexed value has a limit.
    if text is None:
        return None
    text = text.replace("\0", "\ufffd")
    return text if len(text) <= _LONGEST_AUDIT_TEXT else text[: _LONGEST_AUDIT_TEXT - 1] + "…"
