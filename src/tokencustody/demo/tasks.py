"""The conversations of the demo: which rollouts there are, and what their users say."""

from __future__ import annotations

import random
from dataclasses import dataclass

OPENINGS = (
    "I have half an hour and one pan. What could I cook with eggs, rice and spinach?",
    "Write two lines of a poem about a lighthouse in fog.",
    "Explain to a ten-year-old why the sky is blue.",
    "Suggest a name for a small bakery next to a railway station.",
    "My bicycle squeaks when I pedal. What should I look at first?",
    "Give me three questions to ask before renting a flat.",
    "How do I keep basil alive on a north-facing window sill?",
    "Tell me a very short story about a fox and a broken clock.",
    "What is the difference between weather and climate?",
    "Plan a quiet Sunday in a town with a river and a library.",
    "How many minutes are there in three and a half hours?",
    "Describe the taste of a lemon without using the word sour.",
)
FOLLOW_UPS = (
    "Could you say that in one short sentence?",
    "Why that, and not something else?",
    "Give me an example, please.",
    "What would you change if it had to cost nothing?",
    "Now the opposite view, briefly.",
    "Which part of that matters most?",
    "I did not follow the last point. Can you put it another way?",
    "What should I do next?",
    "Is there anything that I should avoid?",
    "Rewrite it for a friend who is in a hurry.",
)
MAX_TURNS = 1 + len(FOLLOW_UPS)


@dataclass(frozen=True)
class RolloutPlan:
    """What happens in one rollout: its user turns, and the accidents that the demo arranges.

    `lost_turn` is the turn whose answer never reaches the store, `retried_turns` are put twice, and with
    `too_long` the user first sends a text that exceeds the model's context.
    """

    rollout_id: str
    user_turns: tuple[str, ...]
    retried_turns: frozenset[int]
    lost_turn: int | None = None
    too_long: bool = False


def plan_rollouts(count: int, max_turns: int, seed: int) -> list[RolloutPlan]:
    """Return `count` rollouts of two to `max_turns` turns each. The same arguments give the same plans.

    Exactly one loses a call, exactly one is refused a call, and about one call in five is retried.
    """
    plans = []
    for index in range(count):
        chance = random.Random(f"{seed}/{index}")  # noqa: S311 - a repeatable conversation, no secret
        turns = chance.randint(min(2, max_turns), max_turns)
        lost_turn = (turns - 1) // 2 if index == 1 % count else None
        retried = {turn for turn in range(turns) if chance.random() < 0.2} | ({0} if index == 0 else set())
        plans.append(
            RolloutPlan(
                rollout_id=f"rollout-{index:03}",
                user_turns=(chance.choice(OPENINGS), *chance.sample(FOLLOW_UPS, turns - 1)),
                retried_turns=frozenset(retried - {lost_turn}),
                lost_turn=lost_turn,
                too_long=index == 2 % count,
            )
        )
    return plans
