"""Small rollouts whose every token is known, for tests of lineage."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tokencustody.lineage import stamp_continuation
from tokencustody.records import ParentResolutionStatus, TokenEntry, stamp_lineage


@dataclass(frozen=True)
class Turn:
    """One call: its request, its complete record, and its whole token sequence."""

    request: list[dict[str, Any]]
    entry: TokenEntry
    tokens: tuple[int, ...]

    def next_request(self, text: str = "and then?") -> list[dict[str, Any]]:
        """Return a request that continues this call."""
        return [*self.request, *self.entry.output_items, {"role": "user", "content": text}]


def linear_rollout(
    turns: int,
    *,
    deltas: Collection[int] = (),
    seed: int = 0,
    rollout_id: str = "rollout",
    stem: str = "call",
) -> list[Turn]:
    """Return `turns` calls, each continuing the one before; those in `deltas` have a delta prompt."""
    rng = random.Random(f"{seed} {rollout_id} {stem}")
    made: list[Turn] = []
    request: list[dict[str, Any]] = [{"role": "user", "content": f"task {rng.random()}"}]
    for number in range(turns):
        parent = made[-1] if made else None
        suffix = [rng.randrange(150_000) for _ in range(rng.randint(1, 5))]
        sampled = [rng.randrange(150_000) for _ in range(rng.randint(1, 5))]
        before = parent.tokens if parent else ()
        is_delta = parent is not None and number in deltas
        entry = TokenEntry(
            rollout_id=rollout_id,
            model_call_id=f"{stem}-{number}",
            prompt_token_ids=suffix if is_delta else [*before, *suffix],
            generation_token_ids=sampled,
            generation_log_probs=[-rng.random() for _ in sampled],
            output_items=[{"type": "message", "role": "assistant", "content": f"answer {rng.random()}"}],
            token_item_index=0,
            created_at=1_700_000_000.0 + number,
            prompt_is_delta=is_delta,
            parent_resolution=ParentResolutionStatus.RESOLVED if is_delta else None,
            parent_call_id=parent.entry.model_call_id if parent and is_delta else None,
        )
        tokens = (*before, *suffix, *sampled)
        stamp_lineage(
            entry,
            parent.entry.model_call_id if parent else None,
            parent_resolution=ParentResolutionStatus.RESOLVED if parent else ParentResolutionStatus.ROOT,
            cumulative=list(tokens),
        )
        stamp_continuation(entry, request)
        made.append(Turn(request, entry, tokens))
        request = made[-1].next_request(f"step {number}")
    return made
