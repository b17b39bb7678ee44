"""The resolver: names the proven parent of a request among the committed calls of its rollout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, and_, or_, select

from tokencustody.errors import InvalidRecordError
from tokencustody.fingerprint import FINGERPRINT_VERSION, assistant_fingerprint
from tokencustody.lineage import NO_MATCH, ROOT, Candidate, choose_parent, join_chain, resolved, unresolved
from tokencustody.protocols import LineageMatch, LineageResolution
from tokencustody.records import ParentResolutionStatus, TokenEntry
from tokencustody.sql.codec import unpack_entry
from tokencustody.sql.dialects import looked_up
from tokencustody.sql.tables import entries, ledger_calls, stored_payload
from tokencustody.store.base import SqlStore
from tokencustody.store.fence import RolloutKey
from tokencustody.store.ids import check_rollout_id
from tokencustody.store.inserting import is_conflicting


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

        def choose(connection: Connection, candidates: Any) -> Candidate | str:
            rows = connection.execute(candidates)
            with _naming_request_items():
                return choose_parent([Candidate(*row) for row in rows], request_items)

        def decide(connection: Connection) -> LineageResolution | list[TokenEntry]:
            choice = choose(connection, _candidates(key, fingerprint))
            if isinstance(choice, Candidate):
                rows = connection.execute(_chain(connection, key, choice.model_call_id)).all()
                return _in_order(rows, choice.model_call_id)
            if choice == NO_MATCH:
                choice = choose(connection, _ledger_candidates(key, fingerprint))
            if isinstance(choice, Candidate):
                found = connection.execute(_ledger_call(key, choice.model_call_id))
                return _resolved_to_ledger(found.one())
            return unresolved(choice)

        decision = await self._database.read(decide)
        if isinstance(decision, LineageResolution):
            return decision
        return resolved(decision[-1], join_chain(decision))


@contextmanager
def _naming_request_items() -> Iterator[None]:
    try:
        yield
    except ValueError as exc:
        raise InvalidRecordError(f"request_items: {exc}") from None


def _candidates(key: RolloutKey, fingerprint: str) -> Any:
    call = entries.c
    return select(
        call.model_call_id,
        call.continuation_context_len,
        call.continuation_context_digest,
        call.digest,
        call.cum_len,
    ).where(
        key.of(entries),
        call.continuation_fingerprint == fingerprint,
        or_(call.fingerprint_version == FINGERPRINT_VERSION, call.fingerprint_version.is_(None)),
        ~is_conflicting(key),
    )


def _ledger_candidates(key: RolloutKey, fingerprint: str) -> Any:
    call = ledger_calls.c
    # Unversioned rows do not count, nor rows that no child could be chained to.
    return select(
        call.model_call_id,
        call.continuation_context_len,
        call.continuation_context_digest,
        call.cumulative_hash,
        call.cum_len,
    ).where(
        key.of(ledger_calls),
        call.continuation_fingerprint == fingerprint,
        call.fingerprint_version == FINGERPRINT_VERSION,
        call.chain_hash.is_not(None),
    )


def _ledger_call(key: RolloutKey, model_call_id: str) -> Any:
    return select(ledger_calls).where(key.of(ledger_calls), ledger_calls.c.model_call_id == model_call_id)


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


def _chain(connection: Connection, key: RolloutKey, model_call_id: str) -> Any:
    call = entries.c
    link = (call.model_call_id, call.parent_call_id, call.prompt_is_delta)
    # UNION, not UNION ALL: rows that repeat end the recursion even if parents form a circle.
    chain = (
        select(*link).where(key.of(entries), call.model_call_id == model_call_id).cte("chain", recursive=True)
    )
    is_parent = and_(key.of(entries), call.model_call_id == chain.c.parent_call_id, ~is_conflicting(key))
    chain = chain.union(looked_up(connection, chain, entries, link, is_parent).where(chain.c.prompt_is_delta))
    payload = (call.rollout_id, call.model_call_id, stored_payload, call.payload_sha256)
    return looked_up(
        connection,
        chain,
        entries,
        payload,
        and_(key.of(entries), call.model_call_id == chain.c.model_call_id),
    )


def _in_order(rows: Sequence[Any], model_call_id: str) -> list[TokenEntry]:
    """Return the chain's entries from the one with a full prompt, as far as it was found, down to the call."""
    by_id = {row.model_call_id: row for row in rows}
    chain: list[TokenEntry] = []
    row = by_id.pop(model_call_id, None)
    while row is not None:
        entry = unpack_entry(
            row.payload, row.payload_sha256, rollout_id=row.rollout_id, model_call_id=row.model_call_id
        )
        chain.append(entry)
        row = by_id.pop(entry.parent_call_id or "", None) if entry.prompt_is_delta else None
    return chain[::-1]
