"""The rows from which calls are read back: one with those that its prompt begins in, or all of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Exists, Row, Select, and_, exists, or_, select

from tokencustody.database.dialects import built_once, looked_up
from tokencustody.schema.tables import entries, failures, stored_payload
from tokencustody.states import FailureKind
from tokencustody.txn.fence import RolloutKey, of_call, of_rollout

_CALL = entries.c
_STORED = (_CALL.model_call_id, stored_payload, _CALL.payload_sha256, _CALL.stored_sha256)


def is_conflicting(model_call_id: ColumnElement[str]) -> Exists:
    """Return the condition that a call was put a second time with other bytes."""
    return exists().where(
        of_rollout(failures),
        failures.c.kind == FailureKind.CONFLICT,
        failures.c.model_call_id == model_call_id,
    )


# Whether a row of `entries` was.
IS_CONFLICTING = is_conflicting(_CALL.model_call_id)
_LINK = (_CALL.parent_call_id, _CALL.prompt_is_delta, _CALL.shared_len)
_IN_CHAIN = (*_STORED, *_LINK, IS_CONFLICTING.label("is_conflicting"))
_ONE_CALL = select(*_IN_CHAIN).where(of_call(entries))
_ALL_CALLS = (
    select(*_STORED, _CALL.parent_call_id, _CALL.prompt_is_delta)
    .where(of_rollout(entries))
    .order_by(_CALL.model_call_id)
)
_LINKS = (_CALL.model_call_id, _CALL.payload_sha256, _CALL.parent_call_id, _CALL.prompt_is_delta)
_ALL_LINKS: Select[Any] = select(*_LINKS).where(of_rollout(entries))


@built_once
def _chain(connection: Connection) -> Select[Any]:
    link = (_CALL.model_call_id, *_LINK)
    # UNION, not UNION ALL: rows that repeat end the recursion even if parents form a circle.
    chain = select(*link).where(of_call(entries)).cte("chain", recursive=True)
    is_parent = and_(
        of_rollout(entries),
        _CALL.model_call_id == chain.c.parent_call_id,
        or_(chain.c.shared_len > 0, chain.c.prompt_is_delta),
    )
    chain = chain.union(looked_up(connection, chain, entries, link, is_parent))
    is_link = and_(of_rollout(entries), _CALL.model_call_id == chain.c.model_call_id)
    return looked_up(connection, chain, entries, _IN_CHAIN, is_link)


def all_calls_txn(connection: Connection, key: RolloutKey) -> Sequence[Row[Any]]:
    """Return the rows of all calls, for `unpack_calls`; they also say whether each is a delta, and on which call."""
    return connection.execute(_ALL_CALLS, key.named()).all()


def all_links_txn(connection: Connection, key: RolloutKey) -> Sequence[Row[Any]]:
    """Return the rows of all calls without their payloads: what a freeze seals, and what it marks broken deltas by."""
    return connection.execute(_ALL_LINKS, key.named()).all()


def call_txn(connection: Connection, key: RolloutKey, model_call_id: str) -> Row[Any] | None:
    """Return the row of one call, as `chain_txn` does."""
    return connection.execute(_ONE_CALL, key.named(model_call_id)).one_or_none()


def chain_txn(connection: Connection, key: RolloutKey, model_call_id: str) -> Sequence[Row[Any]]:
    """Return the rows of a call and of those in which its prompt begins, as far as they are stored.

    They are for `unpack_chain` and `unpack_calls`, and say whether each is a delta, its parent, and whether it is
    conflicting.
    """
    return connection.execute(_chain(connection), key.named(model_call_id)).all()
