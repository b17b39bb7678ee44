"""Calls that are their own ancestors are found, each once."""

from __future__ import annotations

import pytest

from tokencustody.circles import circles

pytestmark = pytest.mark.quick


def test_each_circle_is_found_once_from_where_it_is_entered() -> None:
    parents = {
        "below": "b",
        "root": None,
        "child": "root",
        "orphan": "gone",
        "a": "b",
        "b": "c",
        "c": "a",
        "itself": "itself",
        "below itself": "itself",
    }
    assert circles(parents) == [["b", "c", "a"], ["itself"]]
    assert circles({}) == []
