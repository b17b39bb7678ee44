"""`scripts/test --quick` tries every promise on both databases, and runs every test of this folder."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

TESTS = Path(__file__).parents[1]
RELIABILITY = TESTS.parent / "docs" / "reliability.md"
README = TESTS.parent / "README.md"
_SECTION = RELIABILITY.read_text().partition("## What each promise rests on")[2].partition("##")[0]
PROMISES = re.findall(r"^\| \*\*(.+?)\*\* ", _SECTION, re.MULTILINE)
# Which databases a test runs on, by the fixtures that it asks for.
BOTH = {"sqlite", "postgresql"}
DATABASES = {
    "store_url": BOTH,
    "store": BOTH,
    "outage": BOTH,
    "url": BOTH,
    "sqlite_url": {"sqlite"},
    "postgres_url": {"postgresql"},
    "server": {"postgresql"},
}


@cache
def quick_tests() -> list[tuple[str, set[str]]]:
    return list(_quick_tests())


def _quick_tests() -> Iterator[tuple[str, set[str]]]:
    """Yield a promise and the databases on which a test holds it, for each promise that a quick test names."""
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text()
        if "mark.quick" not in text:
            continue
        module = ast.parse(text)
        of_all = [
            promise
            for node in module.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
            for promise in promises(node.value)
        ]
        for node in module.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                asked = {each.arg for each in node.args.args}
                databases = set[str]().union(*(DATABASES.get(name, set()) for name in asked))
                for promise in [*of_all, *(each for mark in node.decorator_list for each in promises(mark))]:
                    yield promise, databases


def promises(tree: ast.expr) -> list[str]:
    """Return what a mark names, if it is `quick`."""
    return [
        argument.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.quick"
        for argument in node.args
        if isinstance(argument, ast.Constant)
    ]


def test_every_promise_of_the_readme_is_among_those_that_the_page_on_reliability_proves() -> None:
    promised = set(re.findall(r"^\| \*\*(.+?)\.\*\* ", README.read_text(), re.MULTILINE))
    assert promised
    assert promised <= set(PROMISES)


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_is_tried_on_both_databases(promise: str) -> None:
    assert set[str]().union(*(databases for named, databases in quick_tests() if named == promise)) == BOTH


def test_a_quick_test_names_no_promise_that_nobody_made() -> None:
    assert {named for named, _ in quick_tests()} == set(PROMISES)


def test_every_unit_test_is_quick() -> None:
    assert not [
        path.name
        for path in Path(__file__).parent.glob("test_*.py")
        if not re.search(r"^pytestmark = .*pytest\.mark\.quick\b", path.read_text(), re.MULTILINE)
    ]
