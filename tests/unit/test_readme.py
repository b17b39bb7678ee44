"""The first program of the README, run as it stands."""

from __future__ import annotations

import asyncio
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokencustody.errors import TokenCaptureRetiredError
from tokencustody.store import open_store

pytestmark = pytest.mark.quick

README = Path(__file__).parents[2] / "README.md"


def _first_program() -> str:
    section = README.read_text().split("## In a dozen lines", 1)[1]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    names = re.search(r"`(from tokencustody import [^`]*)`", section)
    assert block is not None
    assert names is not None
    return f"{names[1]}\nasync def program():\n{textwrap.indent(block[1], '    ')}"


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
    exec(compile(_first_program(), README.name, "exec"), given)  # noqa: S102 - the README's own
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
