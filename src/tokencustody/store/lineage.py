"""The resolver: names the proven parent of a request among the committed calls of its rollout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, or_, select

from tokencustody.errors import InvalidRecordError
from tokencustody.fingerprint import FINGERPRINT_VERSION, assistant_fingerprint
from tokencustody.lineage import (
    NO_MATCH,
    ROOT,
    Candidate,
    check_recorded,
    choose_parent,
    resolved,
    unresolved,
)
from tokencustody.protocols import LineageMatch, LineageResolution
from tokencustody.records import ParentResolutionStatus
from tokencustody.sql.chains import unpack_chain
from tokencustody.sql.id_columns import PackedIds, digest_of_ids
from tokencustody.sql.tables import entries, ledger_calls
from tokencustody.store.base import SqlStore
from tokencustody.store.fence import RolloutKey, of_rollout
from tokencustody.store.ids import check_rollout_id
from tokencustody.store.reading import IS_CONFLICTING, chain_txn
from tokencustody.store.sequences import KnownSequence, KnownSequences


class SqlLineageResolver(SqlStore):
    """A `LineageResolver` over the calls that any process has committed: complete records first, then the ledger."""

    def is_process_shared(self) -> bool:
        """Return True: every process that opens the database sees the same calls."""
        return True

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        """Return whether the request is a root, continues one proven call, or cannot be resolved and why.

        Raises InvalidRecordError for items that cannot be hashed, LineageError for a parent whose tokens do not have
        its recorded digest, CorruptEntryError for one whose stored bytes are not those that were written.
        """
        key = RolloutKey(self.run, check_rollout_id(rollout_id))
        if not isinstance(request_items, list | tuple):
            raise InvalidRecordError(
                f"request_items must be a list of items, not {type(request_items).__name__}"
            )
        with _naming_request_items():
            fingerprint = assistant_fingerprint(request_items)
        if not fingerprint:
            return ROOT

        def choose(connection: Connection, candidates: Any) -> tuple[Candidate | str, dict[str, Any]]:
            found = connection.execute(candidates, key.named(fingerprint=fingerprint))
            rows = {row.model_call_id: row for row in found}
            with _naming_request_items():
                return choose_parent([Candidate(*row[:5]) for row in rows.values()], request_items), rows

        def decide(connection: Connection) -> LineageResolution | _Parent:
            choice, rows = choose(connection, _CANDIDATES)
            if isinstance(choice, Candidate):
                row = rows[choice.model_call_id]
                known = None if row.prompt_is_delta else sequences.find(key, choice.model_call_id)
                if known is not None and known.payload_sha256 == row.payload_sha256:
                    return _Parent(row, known=known)
                return _Parent(row, chain=chain_txn(connection, key, choice.model_call_id))
            if choice == NO_MATCH:
                choice, rows = choose(connection, _LEDGER_CANDIDATES)
            if isinstance(choice, Candidate):
                return _resolved_to_ledger(rows[choice.model_call_id])
            return unresolved(choice)

        with self._database.doors() as doors:
            sequences = doors.kept(KnownSequences)
            decision = await doors.read(decide)
        if isinstance(decision, LineageResolution):
            return decision
        return _resolved(sequences, key, decision)


_CALL = entries.c
_CANDIDATES = select(
    _CALL.model_call_id,
    _CALL.continuation_context_len,
    _CALL.continuation_context_digest,
    _CALL.digest,
    _CALL.cum_len,
    _CALL.payload_sha256,
    _CALL.prompt_is_delta,
    _CALL.rollout_id,
).where(
    of_rollout(entries),
    _CALL.continuation_fingerprint == bindparam("fingerprint"),
    or_(_CALL.fingerprint_version == FINGERPRINT_VERSION, _CALL.fingerprint_version.is_(None)),
    ~IS_CONFLICTING,
)
_RECORDED = ledger_calls.c
# Unversioned rows do not count, nor rows that no child could be chained to.
_LEDGER_CANDIDATES = select(
    _RECORDED.model_call_id,
    _RECORDED.continuation_context_len,
    _RECORDED.continuation_context_digest,
    _RECORDED.cumulative_hash,
    _RECORDED.cum_len,
    _RECORDED.staging_chain,
    _RECORDED.chain_hash,
).where(
    of_rollout(ledger_calls),
    _RECORDED.continuation_fingerprint == bindparam("fingerprint"),
    _RECORDED.fingerprint_version == FINGERPRINT_VERSION,
    _RECORDED.chain_hash.is_not(None),
)


@dataclass(frozen=True, slots=True)
class _Parent:
    """The call that was chosen, and its sequence, or the rows to rebuild it from."""

    row: Any
    known: KnownSequence | None = None
    chain: Sequence[Any] = ()


def _resolved(sequences: KnownSequences, key: RolloutKey, parent: _Parent) -> LineageResolution:
    row, known = parent.row, parent.known
    if known is not None:
        ids = known.ids.token_ids()
        if known.digest is None:
            check_recorded(row, ids, digest_of_ids)
    else:
        chain = _proven(parent.chain, row.model_call_id)
        _, ids = unpack_chain(key.rollout_id, chain, row.model_call_id)
    digest = (known and known.digest) or row.digest or digest_of_ids(ids)
    if not row.prompt_is_delta and (known is None or known.digest is None):
        packed = PackedIds.of(ids) if known is None else known.ids
        sequences.keep(key, row.model_call_id, KnownSequence(row.payload_sha256, packed, digest))
    return resolved(row.model_call_id, digest, tuple(ids))


@contextmanager
def _naming_request_items() -> Iterator[None]:
    try:
        yield
    except ValueError as exc:
        raise InvalidRecordError(f"request_items: {exc}") from None


def _resolved_to_ledger(row: Any) -> LineageResolution:
    match = LineageMatch(
        model_call_id=row.model_call_id,
        cumulative_token_ids=(),
        digest=row.cumulative_hash,
        staging_chain=tuple(json.loads(row.staging_chain)),
        prev_len=row.cum_len,
        chain_hash=row.chain_hash,
    )
    return LineageResolution(ParentResolutionStatus.RESOLVED, match)


def _proven(chain: Sequence[Any], model_call_id: str) -> list[Any]:
    """Return the rows of a chain without the conflicting calls that a delta would continue, and what is above them."""
    by_id = {row.model_call_id: row for row in chain}
    row = by_id.pop(model_call_id, None)
    while row is not None and row.prompt_is_delta:
        row = by_id.pop(row.parent_call_id, None)
        if row is not None and row.is_conflicting:
            return [each for each in chain if each is not row]
    return list(chain)
