"""The wire contract's recorded inputs and results, in `tests/vectors/`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_FOLDER = Path(__file__).resolve().parents[1] / "vectors"


def load(name: str) -> Any:
    """Return the content of one file of vectors."""
    return json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def check(recorded: dict[str, Any], compute: Callable[[], Any]) -> None:
    """Compare a computed value with the recorded one, or demand the recorded error."""
    if "error" in recorded:
        assert recorded == {"error": "ValueError"}
        with pytest.raises(ValueError, match=r"\S"):
            compute()
    else:
        assert compute() == recorded["ok"]
