"""The programs of the README that store and read calls, run as they stand."""

from __future__ import annotations

import asyncio
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.rollouts import linear_rollout
from tokencustody.errors import TokenCaptureRetiredError
from tokencustody.store import open_store

pytestmark = pytest.mark.quick

README = Path(__file__).parents[2] / "README.md"


def _program(number: int) -> str:
    section = README.read_text().split("## In a dozen lines", 1)[1].split("\n## ", 1)[0]
    block = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[number]
    names = re.findall(r"`(from tokencustody[a-z.]* import [^`]*)`", section)[number]
    return f"{names}\nasync def program():\n{textwrap.indent(block, '    ')}"


def test_the_first_program_stores_freezes_and_drops_a_call_without_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained: list[Any] = []

    async def my_engine(request: dict[str, Any]) -> Any:
        assert request["messages"]
        tokens = {
            "prompt_token_ids": [1, 2, 3],
            "generation_token_ids": [4, 5],
            "generation_log_probs": [-0.25, -0.5],
            "output_items": [{"role": "assistant", "content": "4"}],
        }
        return SimpleNamespace(exact_tokens=tokens)

    given: dict[str, Any] = {
        "rollout_id": "task-7.attempt-1",
        "call_id": "call-1",
        "request": {"messages": [{"role": "user", "content": "2 + 2?"}]},
        "my_engine": my_engine,
        "train_on": lambda entries, masked: trained.append((entries, masked)),
    }
    exec(compile(_program(0), README.name, "exec"), given)  # noqa: S102 - the README's own
    asyncio.run(given["program"]())

    ((entries, masked),) = trained
    assert [(entry.generation_token_ids, entry.parent_resolution, masked) for entry in entries] == [
        ([4, 5], "root", False)
    ]

    async def late() -> None:
        async with open_store("captures.db", run="run-42") as store:
            with pytest.raises(TokenCaptureRetiredError):
                await store.sink.put(entries[0])

    asyncio.run(late())


def test_the_program_of_a_trainer_trains_each_sampled_token_and_drops_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained: list[Any] = []

    async def put() -> None:
        async with open_store("captures.db", run="run-42") as store:
            for entry in linear_rollout(3, rollout_id="whole"):
                await store.sink.put(entry.entry)
            await store.sink.begin_call("lost", "call-1")

    asyncio.run(put())
    given: dict[str, Any] = {"rollout_ids": ["whole", "lost"], "train_on": lambda *row: trained.append(row)}
    exec(compile(_program(1), README.name, "exec"), given)  # noqa: S102 - the README's own
    asyncio.run(given["program"]())

    ((token_ids, loss_mask, log_probs),) = trained
    last = linear_rollout(3, rollout_id="whole")[-1]
    assert tuple(token_ids.tolist()) == last.tokens
    assert (log_probs < 0).tolist() == (loss_mask == 1).tolist()

    async def states() -> list[bool]:
        async with open_store("captures.db", run="run-42") as store:
            with pytest.raises(TokenCaptureRetiredError):
                await store.source.freeze("whole")
            return [(await store.source.freeze("lost")).incomplete]

    assert asyncio.run(states()) == [True]
