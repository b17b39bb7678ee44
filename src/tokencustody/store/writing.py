"""The two ways of a call into its table: together with others, or settled alone where that did not store it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tokencustody.database.transactions import Doors
from tokencustody.states import FenceState
from tokencustody.txn.fence import refusal
from tokencustody.txn.inserting import TOGETHER
from tokencustody.txn.settling import Call, Differing, Settled, settle_txn


async def write_call(doors: Doors, call: Call, *, size: int, alone: bool = False) -> Sequence[str]:
    """Return once a call of `size` bytes is durable, or the fields in which the one with its id differs, which stays.

    Raises TokenCaptureFrozenError or TokenCaptureRetiredError after the fence.
    """
    new, rollout = call.new, call.new.rollout
    together = not alone and doors.gathers and not doors.has_turn(rollout)
    if together and await doors.write_together(TOGETHER[call.kind], new, size=size):
        return ()
    settled = await doors.write(partial(settle_txn, call=call), rollout=rollout)
    match settled:
        case Differing(fields):
            return fields
        case Settled.FROZEN | Settled.RETIRED:
            raise refusal(FenceState(settled), rollout, f"{call.kind.name} {new.key[2]}")
    return ()
