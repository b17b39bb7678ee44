"""The way of a rollout from a real model to its trainer, by the commands that the README names."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tokencustody import TokenCaptureRetiredError, TokenCaptureSnapshot, open_store
from tokencustody.cli import main

RUN = "walk"
ROLLOUT = "rollout-000"


@pytest.fixture
def shell(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """Runs a command of tokencustody on one database, as a person does, with `--json`."""
    monkeypatch.setenv("TOKENCUSTODY_URL", store_url)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["tokencustody", *arguments, "--json"])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert not ended.value.code, err
        return json.loads(out)

    return run


async def frozen(url: str) -> TokenCaptureSnapshot:
    """Return the snapshot that a trainer gets."""
    async with open_store(url, run=RUN) as store:
        return await store.source.freeze(ROLLOUT)


def test_a_rollout_of_the_real_model_is_found_verified_exported_loaded_and_retired(
    store_url: str, tmp_path: Path, shell: Callable[..., Any]
) -> None:
    played = shell("demo", "--run", RUN, "--rollouts", "2", "--turns", "3", "--workers", "2")
    snapshot = asyncio.run(frozen(store_url))
    by_id = {entry.model_call_id: entry for entry in snapshot.entries}
    calls = sorted(by_id)
    assert len(calls) == 3

    # Found, and the one that was masked is told from it.
    first, second = shell("sql", f"SELECT * FROM audit_rollouts WHERE run = '{RUN}' ORDER BY rollout_id")
    assert (first["rollout_id"], first["state"], first["calls"], first["why"]) == (ROLLOUT, "frozen", 3, "")
    assert first["generated_tokens"] == sum(len(entry.generation_token_ids) for entry in snapshot.entries)
    assert list(played["masked"]) == [second["rollout_id"]]
    assert second["why"]

    # The prompt as the engine got it, of which the table holds a part.
    asked = f"SELECT audit_prompt_token_ids('{RUN}', '{ROLLOUT}', '{calls[2]}') AS prompt"
    (row,) = shell("sql", asked)
    prompt = json.loads(row["prompt"]) if isinstance(row["prompt"], str) else row["prompt"]
    assert list(map(int, prompt)) == by_id[calls[2]].prompt_token_ids

    # Verified.
    verified = shell("verify", "--run", RUN)
    assert verified["ok"] is True
    assert (verified["rollouts"], verified["calls"]) == (2, played["calls_stored"])

    # Exported, and left out with a reason.
    (tmp_path / "rewards.csv").write_text(f"rollout_id,reward\n{ROLLOUT},0.5\n")
    export = ("export", "batch-1", "--run", RUN, "--rewards", "rewards.csv")
    shell(*export)
    manifest = json.loads((tmp_path / "batch-1" / "_manifest.json").read_text())
    assert manifest["counts"]["rollouts"] == 1
    assert manifest["counts"]["left_out"] == {"incomplete": 1}
    (marked,) = shell("sql", f"SELECT rollout_id, destination FROM audit_exports WHERE run = '{RUN}'")
    assert marked["rollout_id"] == ROLLOUT

    # Loaded, every number as the engine sampled it.
    (chain,) = pyarrow.parquet.read_table(tmp_path / "batch-1" / "part-00000.parquet").to_pylist()
    last = by_id[calls[2]]
    assert chain["call_ids"] == calls
    assert chain["reward"] == 0.5
    assert (chain["whole"], chain["segments"], chain["breaks"], chain["calls_left_out"]) == (True, 1, None, 0)
    assert chain["token_ids"] == last.prompt_token_ids + last.generation_token_ids
    sampled: dict[int, float] = {}
    for entry in snapshot.entries:
        at = len(entry.prompt_token_ids)
        sampled |= dict(enumerate(entry.generation_log_probs, at))
        assert chain["token_ids"][at : at + len(entry.generation_token_ids)] == entry.generation_token_ids
    assert {at for at, mask in enumerate(chain["loss_mask"]) if mask} == sampled.keys()
    assert {at: chain["log_probs"][at] for at in sampled} == sampled

    # Retired, only what the file holds.
    shell(*export, "--retire")
    with pytest.raises(TokenCaptureRetiredError):
        asyncio.run(frozen(store_url))
    states = {each["rollout_id"]: each["state"] for each in shell("rollouts", "--run", RUN)}
    assert states == {ROLLOUT: "retired", second["rollout_id"]: "frozen"}
    (run,) = shell("runs")["runs"]
    assert (run["retired"], run["exported"]) == (1, 1)
    assert shell("verify")["ok"] is True
