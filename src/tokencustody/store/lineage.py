"""The lineage store: names the proven parent of a request among the committed calls of its rollout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import exists, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from tokencustody.errors import InvalidRecordError
from tokencustody.fingerprint import FINGERPRINT_VERSION, assistant_fingerprint
from tokencustody.lineage import ROOT, Candidate, choose_parent, join_chain, resolved, unresolved
from tokencustody.protocols import LineageResolution
from tokencustody.records import TokenEntry
from tokencustody.sql.codec import unpack_entry
from tokencustody.sql.tables import FailureKind, entries, failures
from tokencustody.store.base import SqlStore
from tokencustody.store.fence import RolloutKey
from tokencustody.store.ids import check_rollout_id


class SqlLineageStore(SqlStore):
    """A `LineageResolver` over the calls that any process has committed."""

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

        async def decide(connection: AsyncConnection) -> tuple[str | Candidate, list[Any]]:
            rows = await connection.execute(_candidates(key, fingerprint))
            with _naming_request_items():
                choice = choose_parent([Candidate(*row) for row in rows], request_items)
            if isinstance(choice, str):
                return choice, []
            return choice, list(await connection.execute(_chain(key, choice.model_call_id)))

        choice, rows = await self._database.read(decide)
        if isinstance(choice, str):
            return unresolved(choice)
        chain = _in_order(rows, choice.model_call_id)
        return resolved(chain[-1], join_chain(chain))


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
        ~_conflicting(key),
    )


def _conflicting(key: RolloutKey) -> Any:
    return exists().where(
        key.of(failures),
        failures.c.kind == FailureKind.CONFLICT,
        failures.c.model_call_id == entries.c.model_call_id,
    )


def _chain(key: RolloutKey, model_call_id: str) -> Any:
    call = entries.c
    # UNION, not UNION ALL: rows that repeat end the recursion even if parents form a circle.
    chain = (
        select(call.model_call_id, call.parent_call_id, call.prompt_is_delta)
        .where(key.of(entries), call.model_call_id == model_call_id)
        .cte("chain", recursive=True)
    )
    chain = chain.union(
        select(call.model_call_id, call.parent_call_id, call.prompt_is_delta)
        .join(chain, call.model_call_id == chain.c.parent_call_id)
        .where(key.of(entries), chain.c.prompt_is_delta, ~_conflicting(key))
    )
    return (
        select(call.rollout_id, call.model_call_id, call.payload, call.payload_sha256)
        .join(chain, call.model_call_id == chain.c.model_call_id)
        .where(key.of(entries))
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
