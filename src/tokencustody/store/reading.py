"""The rows from which calls are read back: one with those that its prompt begins in, or all of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, exists, or_, select

from tokencustody.sql.dialects import looked_up
from tokencustody.sql.tables import FailureKind, entries, failures, stored_payload
from tokencustody.store.fence import RolloutKey

_CALL = entries.c
_STORED = (_CALL.model_call_id, stored_payload, _CALL.payload_sha256, _CALL.stored_sha256)


def is_conflicting(key: RolloutKey) -> ColumnElement[bool]:
    """Return the condition that a row of `entries` was put a second time with other bytes."""
    return exists().where(
        key.of(failures),
        failures.c.kind == FailureKind.CONFLICT,
        failures.c.model_call_id == _CALL.model_call_id,
    )


def all_calls_txn(connection: Connection, key: RolloutKey) -> Sequence[Row[Any]]:
    """Return the rows of all calls, for `unpack_calls`."""
    return connection.execute(select(*_STORED).where(key.of(entries)).order_by(_CALL.model_call_id)).all()


def chain_txn(connection: Connection, key: RolloutKey, model_call_id: str) -> Sequence[Row[Any]]:
    """Return the rows of a call and of those in which its prompt begins, as far as they are stored.

    They are for `unpack_chain` and `unpack_calls`, and say whether each is a delta, its parent, and whether it is
    conflicting.
    """
    link = (_CALL.model_call_id, _CALL.parent_call_id, _CALL.prompt_is_delta, _CALL.shared_len)
    # UNION, not UNION ALL: rows that repeat end the recursion even if parents form a circle.
    chain = (
        select(*link)
        .where(key.of(entries), _CALL.model_call_id == model_call_id)
        .cte("chain", recursive=True)
    )
    is_parent = and_(
        key.of(entries),
        _CALL.model_call_id == chain.c.parent_call_id,
        or_(chain.c.shared_len > 0, chain.c.prompt_is_delta),
    )
    chain = chain.union(looked_up(connection, chain, entries, link, is_parent))
    is_link = and_(key.of(entries), _CALL.model_call_id == chain.c.model_call_id)
    columns = (*_STORED, *link[1:], is_conflicting(key).label("is_conflicting"))
    return connection.execute(looked_up(connection, chain, entries, columns, is_link)).all()
