"""Gym's own capture path and trajectory builder, on our stores beside Gym's file store."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from nemo_gym.token_id_capture import (
    CaptureContext,
    FileLineageStore,
    TokenCaptureStore,
    capture_tokens,
    register_call_intent,
    reset_token_sink,
    resolve_parent,
    set_token_sink,
    trajectories_from_source,
)

from tokencustody.errors import TokenCaptureFrozenError

from .conftest import GymStores

QUESTIONS = ["What is the capital of France?", "And of Italy?", "Which one is larger?"]


def served_response(turn: int, prompt: list[int]) -> dict[str, Any]:
    """Return what a model server answers: one message that carries its tokens."""
    message = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": f"answer {turn}"}],
        "prompt_token_ids": prompt,
        "generation_token_ids": [100 + turn, 200 + turn],
        "generation_log_probs": [-0.5 * turn, -1 / 3],
    }
    return {"id": f"resp-{turn}", "object": "response", "model": "policy", "output": [message]}


async def serve_rollout(
    rollout_id: str, sink: Any, lineage: Any, *, delta_records: bool, lost_turn: int | None = None
) -> list[CaptureContext]:
    """Serve a conversation as Gym's model server does; call `lost_turn` is announced and never captured."""
    served: list[CaptureContext] = []
    request: list[dict[str, Any]] = []
    prompt = [1, 2, 3]
    for turn, question in enumerate(QUESTIONS):
        request = [*request, {"role": "user", "content": question}]
        context = CaptureContext(
            rollout_id=rollout_id,
            model_call_id=f"call-{turn}",
            token_sink=sink,
            lineage_store=lineage,
            model="policy",
            delta_records=delta_records,
        )
        token = set_token_sink(context)
        try:
            await register_call_intent()
            await resolve_parent(request)
            response = served_response(turn, prompt)
            if turn != lost_turn:
                await capture_tokens(response, request)
        finally:
            reset_token_sink(token)
        served.append(context)
        (message,) = response["output"]
        prompt = [*prompt, *message["generation_token_ids"], 7, 8]
        request = [*request, {name: message[name] for name in ("type", "role", "content")}]
    return served


def decision(context: CaptureContext) -> tuple[Any, ...]:
    resolution = context.parent_resolution
    match = resolution.match
    # Not prev_len: Gym's file lineage leaves it 0 for complete records, its matcher and ours fill it.
    parent = match and (match.model_call_id, match.cumulative_token_ids, match.digest)
    return context.committed, resolution.status, parent, resolution.reason


def comparable(trajectories: dict[str, Any] | None) -> dict[str, Any]:
    """Return Gym's result without the name and version of the snapshot, which each store chooses itself."""
    assert trajectories is not None
    snapshot = trajectories.pop("_capture_snapshot")
    assert snapshot.keys() == {"snapshot_id", "version"}
    return trajectories


@pytest.fixture
def gym_file_lineage(gym_files: TokenCaptureStore, tmp_path: Path) -> FileLineageStore:
    return FileLineageStore(tmp_path / "gym-files")


@pytest.mark.parametrize("delta_records", [False, True], ids=["full-prompts", "delta-prompts"])
@pytest.mark.parametrize("lost_turn", [None, 0, 2], ids=["complete", "first-call-lost", "last-call-lost"])
async def test_gym_builds_the_same_trajectories_from_our_store_as_from_its_own(
    gym: GymStores,
    gym_files: TokenCaptureStore,
    gym_file_lineage: FileLineageStore,
    delta_records: bool,
    lost_turn: int | None,
) -> None:
    options: dict[str, Any] = {"delta_records": delta_records, "lost_turn": lost_turn}
    ours = await serve_rollout("rollout-1", gym.sink, gym.lineage, **options)
    theirs = await serve_rollout("rollout-1", gym_files, gym_file_lineage, **options)
    await gym_file_lineage.close()

    assert [decision(context) for context in ours] == [decision(context) for context in theirs]
    assert [context.committed for context in ours] == [turn != lost_turn for turn in range(len(QUESTIONS))]
    from_ours = comparable(await trajectories_from_source("rollout-1", gym.source))
    assert from_ours == comparable(await trajectories_from_source("rollout-1", gym_files))
    assert from_ours["mask_sample"] is (lost_turn is not None)
    if lost_turn is None:
        last = from_ours["rebuilt_response"]["output"][-1]
        assert last["prompt_token_ids"] == [1, 2, 3, 100, 200, 7, 8, 101, 201, 7, 8]
        assert last["generation_log_probs"] == [-1.0, -1 / 3]


async def test_the_same_entries_frozen_by_both_stores_are_equal(
    gym: GymStores, gym_files: TokenCaptureStore
) -> None:
    await serve_rollout("rollout-1", gym.sink, gym.lineage, delta_records=True)
    entries = (await gym.source.freeze("rollout-1")).entries
    for entry in entries:
        await gym_files.put(entry)
    by_id = {entry.model_call_id: entry for entry in (await gym_files.freeze("rollout-1")).entries}
    assert by_id == {entry.model_call_id: entry for entry in entries}
    assert len(by_id) == len(QUESTIONS)


async def test_a_rollout_marked_incomplete_is_masked(gym: GymStores) -> None:
    await serve_rollout("rollout-1", gym.sink, gym.lineage, delta_records=False)
    await gym.sink.mark_incomplete("rollout-1", "call-9")
    trajectories = await trajectories_from_source("rollout-1", gym.source)
    assert trajectories is not None
    assert trajectories["mask_sample"] is True


async def test_gyms_snapshot_reference_drops_exactly_what_was_consumed(gym: GymStores) -> None:
    await serve_rollout("rollout-1", gym.sink, gym.lineage, delta_records=False)
    trajectories = await trajectories_from_source("rollout-1", gym.source)
    assert trajectories is not None
    consumed = trajectories["_capture_snapshot"]
    await gym.sink.mark_incomplete("rollout-1")
    assert not await gym.source.drop("rollout-1", **consumed)
    again = await gym.source.freeze("rollout-1")
    assert len(again.entries) == len(QUESTIONS)
    assert await gym.source.drop("rollout-1", again.snapshot_id, again.version)


async def test_a_call_that_finishes_after_the_freeze_is_not_committed(gym: GymStores) -> None:
    context = CaptureContext(rollout_id="rollout-1", model_call_id="call-0", token_sink=gym.sink)
    token = set_token_sink(context)
    try:
        await register_call_intent()
        snapshot = await gym.source.freeze("rollout-1")
        await capture_tokens(served_response(0, [1, 2, 3]), [{"role": "user", "content": QUESTIONS[0]}])
    finally:
        reset_token_sink(token)
    assert not context.committed
    assert snapshot.incomplete
    assert (await gym.source.freeze("rollout-1")).entries == ()


async def test_an_announcement_after_the_freeze_fails_the_call_before_any_compute(gym: GymStores) -> None:
    await gym.source.freeze("rollout-1")
    token = set_token_sink(
        CaptureContext(rollout_id="rollout-1", model_call_id="call-0", token_sink=gym.sink)
    )
    try:
        with pytest.raises(TokenCaptureFrozenError):
            await register_call_intent()
    finally:
        reset_token_sink(token)


async def test_concurrent_rollouts_are_captured_apart(gym: GymStores) -> None:
    names = [f"rollout-{number}" for number in range(8)]
    await asyncio.gather(
        *(
            serve_rollout(name, gym.sink, gym.lineage, delta_records=bool(n % 2))
            for n, name in enumerate(names)
        )
    )
    outputs = []
    for name in names:
        trajectories = comparable(await trajectories_from_source(name, gym.source))
        assert trajectories["mask_sample"] is False
        outputs.append(trajectories["rebuilt_response"]["output"])
    assert all(output == outputs[0] for output in outputs)


async def test_a_record_of_gyms_may_leave_its_parents_sequence_to_the_store(gym: GymStores) -> None:
    await serve_rollout("rollout-1", gym.sink, gym.lineage, delta_records=False)
    entries = {entry.model_call_id: entry for entry in (await gym.source.freeze("rollout-1")).entries}
    for entry in entries.values():
        entry.rollout_id = "rollout-2"
    await gym.sink.put(entries["call-0"])
    for parent, call in (("call-0", "call-1"), ("call-1", "call-2")):
        suffix = entries[call].prompt_token_ids[entries[parent].cum_len :]
        rest = entries[call].model_copy(update={"prompt_token_ids": [], "digest": None, "cum_len": None})
        await gym.sink.put_continuation(rest, suffix)
    assert {entry.model_call_id: entry for entry in (await gym.source.freeze("rollout-2")).entries} == entries
