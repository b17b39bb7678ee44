"""The benchmark of moving rollouts runs, and finds every form equal. No test asserts a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import transfer
from tests.support.postgres import URL_VARIABLE, Server


def test_a_quick_run_moves_every_rollout_through_every_form(
    postgres: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(URL_VARIABLE, postgres.url)
    # What this process took before counts as taken by each child that it starts.
    monkeypatch.setattr(transfer, "MOST_MEGABYTES", 10_000)
    figures = tmp_path / "figures.json"
    assert transfer.main(["--quick", "--rollouts", "3", "--json", str(figures)]) == 0
    assert "30 calls are equal everywhere" in capsys.readouterr().out
    steps = json.loads(figures.read_text())["steps"]
    assert len(steps) == 9
    assert all(step["seconds"] > 0 and step["peak_megabytes"] > 10 for step in steps)
