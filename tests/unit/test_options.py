"""Every store takes the same options, by name, and says what they are."""

from __future__ import annotations

import inspect
import sys

import pytest

from tokencustody import (
    CaptureStore,
    SqlLineageStore,
    SqlStagingStore,
    SqlTokenSink,
    SqlTokenSource,
    open_store,
)
from tokencustody.store.base import Options

pytestmark = pytest.mark.quick

STORES = (CaptureStore, SqlTokenSink, SqlTokenSource, SqlLineageStore, SqlStagingStore)


@pytest.mark.parametrize("store", STORES)
def test_each_store_takes_the_options_of_open_store_with_their_defaults_and_types(store: type) -> None:
    wanted = inspect.signature(open_store, eval_str=True).parameters
    given = inspect.signature(
        store, eval_str=True, globals=vars(sys.modules[store.__init__.__module__])
    ).parameters
    assert list(given.values()) == list(wanted.values())
    assert all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in wanted.values())


def test_open_store_explains_each_of_its_options() -> None:
    options = list(inspect.signature(open_store).parameters)[1:]
    assert options == list(Options.__annotations__)
    assert [name for name in options if f"- `{name}`: " not in (open_store.__doc__ or "")] == []


def test_an_option_that_does_not_exist_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="pool"):
        open_store("captures.db", pool=4)  # type: ignore[call-arg]
