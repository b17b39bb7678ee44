"""docs/audit.md says what the views are: its columns are theirs, and its queries give the output that it shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.audited import ask, fill
from tokencustody.cli import main
from tokencustody.schema.migrations import views_0005

PAGE = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
EXAMPLES = re.findall(r"```sql\n(.*?)\n```\n\n```text\n(.*?)\n```", PAGE, re.DOTALL)


def test_the_page_names_each_view_with_its_columns(store_url: str) -> None:
    fill(store_url)
    documented = {
        view: re.findall(r"`(\w+)`", columns)
        for view, columns in re.findall(r"### (audit_\w+)\n.*?\nColumns: (.*?)\.\n", PAGE, re.DOTALL)
    }
    assert documented.keys() == views_0005.views("sqlite").keys()
    for view, columns in documented.items():
        assert [*ask(store_url, f"SELECT * FROM {view} LIMIT 1")[0]] == columns


def test_each_documented_query_gives_the_output_that_the_page_shows(
    store_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(store_url)
    assert len(EXAMPLES) >= len(views_0005.views("sqlite"))
    for query, expected in EXAMPLES:
        monkeypatch.setattr(sys, "argv", ["tokencustody", "sql", "--url", store_url, query])
        with pytest.raises(SystemExit) as exited:
            main()
        out, err = capsys.readouterr()
        assert (exited.value.code, err) == (0, "")
        assert cells(out) == cells(expected)


def cells(table: str) -> list[list[str]]:
    """Return what stands in a table; SQLite shows true and false as numbers, and the columns are as wide."""
    truths = {"True": "1", "False": "0"}
    return [[truths.get(cell, cell) for cell in line.split()] for line in table.splitlines()]
