"""A complete record on its way into the store: its row, what that leans on, and the evidence when it conflicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sqlalchemy import Connection, Row, select

from tokencustody.codec.calls import (
    PackedEntry,
    SharedPayload,
    differing_fields,
    unpack_entry,
    without_prefix,
)
from tokencustody.codec.chains import unpack_calls, unpack_chain, unpack_sequence_on
from tokencustody.codec.id_columns import PackedIds
from tokencustody.errors import CorruptEntryError, LineageError
from tokencustody.records import TokenEntry
from tokencustody.schema.tables import entries
from tokencustody.states import FailureKind, VersionEvent
from tokencustody.txn.continuing import ParentReplacedError, no_parent
from tokencustody.txn.fence import Fence, RolloutKey, Stamp, fail_txn, of_call
from tokencustody.txn.kinds import ENTRIES, Kind, NewCall
from tokencustody.txn.reading import IS_CONFLICTING, chain_txn
from tokencustody.txn.sequences import KnownSequence
from tokencustody.txn.settling import Call

_LONGEST_AUDIT_TEXT = 512
_IDENTITY = select(entries.c.payload_sha256).where(of_call(entries))
_BASE = _IDENTITY.where(~IS_CONFLICTING)


def new_call(
    key: RolloutKey, entry: TokenEntry, packed: PackedEntry, stamp: Stamp, base: KnownSequence | None
) -> NewCall:
    """Return the row of a packed call, without the prefix that `base` holds: the sequence of its parent, which is
    given only where the prompt begins with it.
    """
    if base is None or not base.ids:
        return NewCall(_row(key, entry, packed, stamp), stamp)
    beginning = len(base.ids)
    row = _row(key, entry, packed, stamp, without_prefix(packed, beginning), beginning)
    return NewCall(row, stamp, base.payload_sha256)


@dataclass(frozen=True)
class Put(Call):
    """A complete record on its way: the call from which `new_call` made its row, and the base that this leans on.

    With `only_on_base` the beginning of its prompt was taken from there, and proves nothing of another parent.
    """

    kind: ClassVar[Kind] = ENTRIES
    entry: TokenEntry
    packed: PackedEntry
    base: KnownSequence | None
    only_on_base: bool = False

    def row_txn(self, connection: Connection) -> dict[str, Any]:
        # Now no parent can be replaced any more.
        key, parent = self.new.rollout, self.entry.parent_call_id
        if self.base is None or not self.base.ids or parent is None:
            return self.new.row
        if not self.base.is_delta:
            held = connection.scalar(_BASE, key.named(parent))
            if held == self.new.base_sha256:
                return self.new.row
        found = read_base(key, chain_txn(connection, key, parent), parent)
        if found is not None and not self.packed.begins_with(found.ids):
            found = None
        if found is None and self.only_on_base:
            raise ParentReplacedError(no_parent(self.entry))
        return new_call(key, self.entry, self.packed, self.new.stamp, found).row

    def differing_txn(self, connection: Connection) -> list[str]:
        call_id = self.entry.model_call_id
        held = read_call_txn(connection, self.new.rollout, call_id)
        # Not the entry itself, whose lists are its caller's and may have changed since they were packed.
        given = unpack_entry(
            self.packed.payload,
            self.packed.sha256,
            rollout_id=self.new.rollout.rollout_id,
            model_call_id=call_id,
        )
        return differing_fields(held, given)

    def conflict_txn(self, connection: Connection, fence: Fence, fields: Sequence[str]) -> None:
        key, call_id = self.new.rollout, self.entry.model_call_id
        first: str = connection.execute(_IDENTITY, key.named(call_id)).scalar_one()
        fail_txn(
            connection,
            key,
            fence,
            VersionEvent.CONFLICT,
            FailureKind.CONFLICT,
            self.new.stamp,
            model_call_id=call_id,
            **conflict_evidence(first, self.packed.sha256, self.entry, fields),
        )


def _row(
    key: RolloutKey,
    entry: TokenEntry,
    packed: PackedEntry,
    stamp: Stamp,
    shared: SharedPayload | None = None,
    shared_len: int = 0,
) -> dict[str, Any]:
    return {
        **key.columns(),
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
        "committed_at": stamp.at,
        "written_by": stamp.by,
        "payload": packed.payload if shared is None else shared.payload,
        "payload_sha256": packed.sha256,
        "shared_len": shared_len,
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
