"""What runs within a transaction may run twice, and neither begins nor ends it: the rules of ARCHITECTURE.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "tokencustody"
# A clock that is read, or an id that is drawn, would be another at the second try.
NOT_WITHIN = {
    "now",
    "time",
    "monotonic",
    "uuid4",
    "token_hex",
    "make",
    "sleep",
    "begin",
    "commit",
    "rollback",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(body: list[ast.stmt], within: str) -> Iterator[tuple[str, Function, bool]]:
    """Yield each `*_txn`, by the name that a person finds it by, and whether it is a method."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            for name, function, _ in functions(node.body, f"{within}::{node.name}"):
                yield name, function, True
        elif isinstance(node, Function) and node.name.endswith("_txn"):
            yield f"{within}::{node.name}", node, False


FOUND = [
    pytest.param(function, is_method, id=name)
    for path in sorted(SOURCE.rglob("*.py"))
    for name, function, is_method in functions(
        ast.parse(path.read_text()).body, str(path.relative_to(SOURCE))
    )
]


@pytest.mark.parametrize(("function", "is_method"), FOUND)
def test_a_transaction_function_may_run_twice_and_leaves_begin_and_commit_to_others(
    function: Function, is_method: bool
) -> None:
    assert isinstance(function, ast.FunctionDef)
    called = {
        ast.unparse(node.func).rpartition(".")[2] for node in ast.walk(function) if isinstance(node, ast.Call)
    }
    assert not called & NOT_WITHIN
    # A method may have it from its object.
    assert is_method or function.args.args[0].arg == "connection"


def test_there_are_transaction_functions() -> None:
    assert len(FOUND) > 20
