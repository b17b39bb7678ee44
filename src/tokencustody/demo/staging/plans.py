"""What happens in the rollouts of the demo with worker staging, accidents included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokencustody.demo.tasks import RolloutPlan, plan_rollouts

# What the trainer is told about the answer that was rewarded, from the strongest witness to none.
Witness = Literal["declared", "response_id", "content", "none"]

_WITNESSES: tuple[Witness, ...] = ("declared", "response_id", "content", "none")
MISTAKEN_RESPONSE_ID = "a-response-of-no-call"


@dataclass(frozen=True)
class StagedPlan:
    """A rollout, and what its agent will say about its last answer.

    `forked`: the agent asks for its last answer twice and does not say which of the two it kept. `mistaken`: it
    declares a response id that no call has.
    """

    rollout: RolloutPlan
    witness: Witness
    forked: bool = False
    mistaken: bool = False

    @property
    def calls(self) -> int:
        """How many model calls there are, those that the engine refuses included."""
        return len(self.rollout.user_turns) + self.rollout.too_long + self.forked

    def call_id(self, number: int) -> str:
        """Return the id of the rollout's call of that number, counted from 0."""
        return f"{self.rollout.rollout_id}-call-{number}"

    def call_id_of_turn(self, turn: int) -> str:
        """Return the id of the call that answers a user turn; the fork has the turn after the last."""
        return self.call_id(turn + self.rollout.too_long)

    @property
    def lost_call(self) -> str | None:
        """The call whose staging fails, if one does."""
        turn = self.rollout.lost_turn
        return None if turn is None else self.call_id_of_turn(turn)

    @property
    def retried_calls(self) -> list[str]:
        """The calls that are staged and recorded twice, with identical bytes."""
        return [self.call_id_of_turn(turn) for turn in sorted(self.rollout.retried_turns)]


def plan_staged_rollouts(count: int, max_turns: int, seed: int) -> list[StagedPlan]:
    """Return the rollouts of `plan_rollouts`, one of them forked and one mistaken; from five rollouts on, all differ.

    A fork needs two turns: two first calls are two roots, of which the first admitted is the rollout's.
    """
    plans = []
    for index, rollout in enumerate(plan_rollouts(count, max_turns, seed)):
        forked = index == 3 % count and len(rollout.user_turns) > 1
        mistaken = index == 4 % count
        witness: Witness = "none" if forked else "declared" if mistaken else _WITNESSES[index % 4]
        plans.append(StagedPlan(rollout, witness, forked, mistaken and not forked))
    return plans
