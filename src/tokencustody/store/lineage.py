"""The resolver: names the proven parent of a request among the committed calls of its rollout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from sqlalchemy import Connection, Select, and_, bindparam, false, func, null, select, union_all

from tokencustody.codec.chains import unpack_chain
from tokencustody.codec.id_columns import PackedIds, digest_of_ids
from tokencustody.errors import InvalidRecordError, LoneSurrogateError
from tokencustody.ids import check_rollout_id
from tokencustody.lineage import (
    MOST_FINGERPRINTS,
    NO_MATCH,
    ROOT,
    UNHASHED_ITEMS,
    Candidate,
    Request,
    check_recorded,
    choose_parent,
    resolved,
    unresolved,
)
from tokencustody.protocols import LineageMatch, LineageResolution
from tokencustody.records import ParentResolutionStatus
from tokencustody.schema.tables import entries, failures, ledger_calls
from tokencustody.store.base import SqlStore
from tokencustody.txn.fence import RolloutKey, of_rollout
from tokencustody.txn.reading import IS_CONFLICTING, chain_txn, is_conflicting
from tokencustody.txn.sequences import KnownSequence, KnownSequences


class SqlLineageResolver(SqlStore):
    """A `LineageResolver` over the calls that any process has committed: complete records first, then the ledger."""

    def is_process_shared(self) -> bool:
        """Return True: every process that opens the database sees the same calls."""
        return True

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        """Return whether the request is a root, continues one proven call, or cannot be resolved and why.

        Why: `no_match`; `ambiguous`, for several calls that differ, or one beside a call that conflicts;
        `unhashed_items`, for items that the hashes of the only call leave out. `request_items` are best those that
        `tokencustody.request_items` makes of the request's body. The rules are in docs/lineage.md.

        Raises InvalidRecordError for items that cannot be hashed, LineageError for a parent whose tokens do not have
        its recorded digest, CorruptEntryError for one whose stored bytes are not those that were written.
        """
        key = RolloutKey(self.run, check_rollout_id(rollout_id))
        if not isinstance(request_items, list | tuple):
            raise InvalidRecordError(
                f"request_items must be a list of items, not {type(request_items).__name__}"
            )
        try:
            with _naming_request_items():
                request = Request(request_items)
            return ROOT if request.is_root else await self._resolve(key, request)
        except LoneSurrogateError:
            return unresolved(UNHASHED_ITEMS)

    async def _resolve(self, key: RolloutKey, request: Request) -> LineageResolution:
        # Of each name there is a branch of the query, which finds nothing for NULL.
        asked = key.named(**dict(zip_longest(_NAMES, request.fingerprints)))

        def choose(rows: Sequence[Any], others: Sequence[Any] = ()) -> tuple[Candidate | str, Any]:
            with _naming_request_items():
                choice = choose_parent(map(_candidate, (*rows, *others)), request)
            named = choice.model_call_id if isinstance(choice, Candidate) else None
            return choice, next((row for row in rows if row.is_parent and row.model_call_id == named), None)

        def decide(connection: Connection) -> LineageResolution | _Parent:
            complete = connection.execute(_CANDIDATES, asked).all()
            choice, row = choose(complete)
            if isinstance(choice, Candidate):
                known = None if row.prompt_is_delta else sequences.find(key, choice.model_call_id)
                if known is not None and known.payload_sha256 == row.payload_sha256:
                    return _Parent(row, known=known)
                return _Parent(row, chain=chain_txn(connection, key, choice.model_call_id))
            if choice == NO_MATCH:
                # A complete record that conflicts leaves no row of the ledger as the only one either.
                choice, row = choose(connection.execute(_LEDGER_CANDIDATES, asked).all(), complete)
            return unresolved(choice) if isinstance(choice, str) else _resolved_to_ledger(row)

        with self._database.doors() as doors:
            sequences = doors.kept(KnownSequences)
            decision = await doors.read(decide)
        if isinstance(decision, LineageResolution):
            return decision
        return _resolved(sequences, key, decision)


_CALL, _SECOND, _RECORDED = entries.c, failures.c, ledger_calls.c
_NAMES = [f"fingerprint_{number}" for number in range(MOST_FINGERPRINTS)]
# The first columns are those of a `Candidate`.
_ENTRY = select(
    _CALL.model_call_id,
    _CALL.continuation_context_len,
    _CALL.continuation_context_digest,
    _CALL.digest,
    _CALL.cum_len,
    _CALL.continuation_fingerprint,
    _CALL.fingerprint_version,
    (~IS_CONFLICTING).label("is_parent"),
    _CALL.payload_sha256,
    _CALL.prompt_is_delta,
    _CALL.rollout_id,
).where(of_rollout(entries))
# What a call that conflicts would be with its second payload.
_CONFLICT = select(
    _SECOND.model_call_id,
    _SECOND.second_context_len,
    _SECOND.second_context_digest,
    null(),
    null(),
    _SECOND.second_fingerprint,
    _SECOND.second_fingerprint_version,
    false(),
    null(),
    null(),
    _SECOND.rollout_id,
).where(of_rollout(failures), _SECOND.second_fingerprint.in_(map(bindparam, _NAMES)))
# No child can be chained to a row without a hash of its chain or tokens, and the manifest counts one without a
# response id as failed.
_ROW = select(
    _RECORDED.model_call_id,
    _RECORDED.continuation_context_len,
    _RECORDED.continuation_context_digest,
    _RECORDED.cumulative_hash,
    _RECORDED.cum_len,
    _RECORDED.continuation_fingerprint,
    _RECORDED.fingerprint_version,
    and_(
        _RECORDED.chain_hash.is_not(None),
        _RECORDED.cumulative_hash != "",
        func.coalesce(_RECORDED.response_id, "") != "",
        ~is_conflicting(_RECORDED.model_call_id),
    ).label("is_parent"),
    _RECORDED.staging_chain,
    _RECORDED.chain_hash,
).where(of_rollout(ledger_calls))


def _with_any(statement: Select[Any], fingerprint: Any) -> list[Select[Any]]:
    # One branch each: for a list a planner may leave the index aside and read the whole rollout.
    return [statement.where(fingerprint == bindparam(name)) for name in _NAMES]


_CANDIDATES = union_all(*_with_any(_ENTRY, _CALL.continuation_fingerprint), _CONFLICT)
_LEDGER_CANDIDATES = union_all(*_with_any(_ROW, _RECORDED.continuation_fingerprint))


def _candidate(row: Any) -> Candidate:
    call_id, context_len, context_digest, digest, cum_len, fingerprint, version, is_parent = row[:8]
    # Of a call that conflicts, which sequence it has is not known.
    known = digest if is_parent or "chain_hash" in row._fields else None
    return Candidate(
        call_id, context_len, context_digest, known, cum_len, fingerprint, version, bool(is_parent)
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
    except LoneSurrogateError:
        raise
    except ValueError as exc:
        raise InvalidRecordError(f"request_{exc}") from None


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
