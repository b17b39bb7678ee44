"""Playing the rollouts: a model call is announced, made, and put into the store before its answer is used."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokencustody.bodies import request_items
from tokencustody.demo.model import MODEL_NAME, ChatModel, Completion, ModelRefusedError
from tokencustody.lineage import stamp_continuation
from tokencustody.records import TokenEntry, stamp_lineage

if TYPE_CHECKING:
    from tokencustody.demo.tasks import RolloutPlan
    from tokencustody.protocols import LineageResolution
    from tokencustody.store import CaptureStore


@dataclass
class PlayedRollout:
    """What a player knows of its rollout without asking the store.

    `announced` holds the call ids in the order of their intents, `altered_by_text` those of the calls whose
    prompt would have had other ids if its history had been tokenised from text again.
    """

    rollout_id: str
    announced: list[str] = field(default_factory=list)
    retries: int = 0
    altered_by_text: list[str] = field(default_factory=list)


@dataclass
class RolloutPlayer:
    """Plays rollouts against `model` and captures them in `store`. `on_call` hears of each call that ends."""

    model: ChatModel
    store: CaptureStore
    max_tokens: int
    seed: int
    on_call: Callable[[], object] = lambda: None

    async def play_all(self, plans: list[RolloutPlan], workers: int) -> list[PlayedRollout]:
        """Play every plan, `workers` at a time. The first error stops all of them and is raised."""
        waiting = list(reversed(plans))
        played = {plan.rollout_id: PlayedRollout(plan.rollout_id) for plan in plans}

        async def work() -> None:
            while waiting:
                plan = waiting.pop()
                await self._play(plan, played[plan.rollout_id])

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(work())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return list(played.values())

    async def _play(self, plan: RolloutPlan, played: PlayedRollout) -> None:
        messages: list[dict[str, Any]] = []
        if plan.too_long:
            await self._call(
                plan, played, [_user("Proofread my notes: " + "one more line. " * (self.model.context // 3))]
            )
        for turn, text in enumerate(plan.user_turns):
            messages.append(_user(text))
            completion = await self._call(plan, played, messages, turn)
            if completion is not None:
                messages.append({"role": "assistant", "content": completion.text})

    async def _call(
        self,
        plan: RolloutPlan,
        played: PlayedRollout,
        messages: list[dict[str, Any]],
        turn: int | None = None,
    ) -> Completion | None:
        # The body of a Chat request; instructions and tools would be in its items too.
        items = request_items({"messages": list(messages)})
        call_id = f"{plan.rollout_id}-call-{len(played.announced)}"
        parent = await self.store.lineage.resolve(plan.rollout_id, items)
        prompt = rendered = await self.model.render(messages)
        if parent.match is not None:
            prompt = await self.model.extend(parent.match.cumulative_token_ids, messages[-1]["content"])
        await self.store.sink.begin_call(plan.rollout_id, call_id)
        played.announced.append(call_id)
        if prompt != rendered:
            played.altered_by_text.append(call_id)
        call_seed = zlib.crc32(f"{self.seed}/{call_id}".encode())
        try:
            completion = await self.model.complete(prompt, max_tokens=self.max_tokens, seed=call_seed)
        except ModelRefusedError as refusal:
            await self.store.sink.refuse_call(plan.rollout_id, model_call_id=call_id, code=refusal.code)
            self.on_call()
            return None
        if turn is None or turn != plan.lost_turn:
            # Made once: a retry must send the same bytes, its time of creation included.
            entry = _entry(plan.rollout_id, call_id, items, completion, parent)
            await self.store.sink.put(entry)
            if turn in plan.retried_turns:
                await self.store.sink.put(entry)
                played.retries += 1
        self.on_call()
        return completion


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _entry(
    rollout_id: str,
    call_id: str,
    items: list[dict[str, Any]],
    completion: Completion,
    parent: LineageResolution,
) -> TokenEntry:
    entry = TokenEntry(
        rollout_id=rollout_id,
        model_call_id=call_id,
        model=MODEL_NAME,
        prompt_token_ids=completion.prompt_token_ids,
        generation_token_ids=completion.token_ids,
        generation_log_probs=completion.log_probs,
        output_items=[
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": completion.text}],
            }
        ],
        token_item_index=0,
        response_id=completion.response_id,
        created_at=time.time(),
        parent_resolution_reason=parent.reason,
    )
    stamp_lineage(
        entry, parent.match.model_call_id if parent.match else None, parent_resolution=parent.status
    )
    return stamp_continuation(entry, items)
