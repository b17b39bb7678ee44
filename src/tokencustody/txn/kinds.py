"""The kinds of calls that workers write: complete records, intents and staged calls; and one of them as a row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sqlalchemy import Select, Table, select

from tokencustody.schema.tables import entries, intents, staged_calls
from tokencustody.txn.fence import RolloutKey, Stamp, of_call

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Kind:
    """The rows of `table`, whose time of writing stands in `written_at`; `name` is what errors call one.

    Rows that are not `is_fenced` go in whatever the fence says and open none. A row is known again by its `identity`
    columns, and where a fence may have closed since by that time and its writer too: that is how a write whose answer
    was lost is found to have succeeded.
    """

    name: str
    table: Table
    written_at: str
    identity: tuple[str, ...] = ()
    is_fenced: bool = True

    @cached_property
    def held(self) -> Select[Any]:
        """The query for who wrote the call of `RolloutKey.named`, when, and with which identity if that says all."""
        columns = self.table.c
        identity = self.identity if self.is_fenced else ()
        names = (self.written_at, "written_by", *identity)
        held = select(*(columns[name] for name in names)).where(of_call(self.table))
        # What has no fence is locked itself, so that nobody removes half of it meanwhile.
        return held if self.is_fenced else held.with_for_update(read=True)


ENTRIES = Kind("call", entries, "committed_at", ("payload_sha256",))
INTENTS = Kind("the intent of call", intents, "begun_at")
STAGED_CALLS = Kind("staged call", staged_calls, "staged_at", ("digest", "payload"), is_fenced=False)


@dataclass(frozen=True, slots=True)
class NewCall:
    """One row to be stored, and the stamp with which it is written.

    `base_sha256` is the payload hash that the call named by the row's `parent_call_id` must have, when the row leaves
    out a prefix that is that call's sequence.
    """

    row: dict[str, Any]
    stamp: Stamp
    base_sha256: str | None = None

    @property
    def key(self) -> Key:
        """The primary key of the row."""
        return self.row["run"], self.row["rollout_id"], self.row["model_call_id"]

    @property
    def rollout(self) -> RolloutKey:
        """The rollout of the row."""
        return RolloutKey(self.row["run"], self.row["rollout_id"])
