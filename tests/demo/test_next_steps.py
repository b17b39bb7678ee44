"""The commands that the demo names at its end are the ones that a person can run in that shell."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tokencustody.terminal.printing import program

SCRIPT = Path(sys.executable).with_name("tokencustody")


def test_the_commands_named_by_the_demo_run_without_its_environment_on_the_path(tmp_path: Path) -> None:
    shell = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    demo = [str(SCRIPT), "demo", "--url", "it's.db", "--run", "named", "--rollouts", "1", "--turns", "1"]
    played = subprocess.run(demo, cwd=tmp_path, env=shell, capture_output=True, text=True, check=True)
    named = re.findall(r"^  (\S.* --url .*)$", played.stdout, re.MULTILINE)
    assert len(named) == 4
    for command in named:
        subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, env=shell, capture_output=True, check=True)


def test_on_the_path_it_is_called_by_its_name_and_beside_the_folder_by_a_short_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "a folder" / "bin" / "python"))
    script = tmp_path / "a folder" / "bin" / "tokencustody"
    assert program() == f"'{sys.executable}' -m tokencustody"
    script.parent.mkdir(parents=True)
    script.touch(0o755)
    monkeypatch.chdir("/")
    assert program().strip("'") == str(script).lstrip("/")
    monkeypatch.chdir(tmp_path)
    assert program() == "'a folder/bin/tokencustody'"
    monkeypatch.setenv("PATH", str(script.parent))
    assert shutil.which("tokencustody") == str(script)
    assert program() == "tokencustody"
