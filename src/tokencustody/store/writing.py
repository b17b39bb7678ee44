"""The two ways of a call into its table: together with others, or settled alone where that did not store it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tokencustody.database.transactions import Doors
from tokencustody.states import FenceState
from tokencustody.txn.fence import Stamp, refusal
from tokencustody.txn.inserting import TOGETHER
from tokencustody.txn.settling import Call, Differing, Settled, settle_txn


async def write_call(doors: Doors, call: Call, *, size: int, alone: bool = False) -> Sequence[str]:
    """Return once a call of `size` bytes is durable, or the fields in which the one with its id differs, which stays.

    A stamp that has no event id, which the first way does not need where it opens no fence, gets one for the second.
    Raises TokenCaptureFrozenError or TokenCaptureRetiredError after the fence.
    """
    new, rollout = call.new, call.new.rollout
    together = not alone and doors.gathers and not doors.has_turn(rollout)
    if together and await doors.write_together(TOGETHER[call.kind], new, size=size):
        return ()
    if not new.stamp.event_id:
        stamp = Stamp.make(new.stamp.at, new.stamp.by)
        call = replace(call, new=replace(new, stamp=stamp))
    settled = await doors.write(partial(settle_txn, call=call), rollout=rollout)
    match settled:
        case Differing(fields):
            return fields
        case Settled.FROZEN | Settled.RETIRED:
            raise refusal(FenceState(settled), rollout, f"{call.kind.name} {new.key[2]}")
    return ()
