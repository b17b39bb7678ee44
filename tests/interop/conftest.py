from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from nemo_gym.token_id_capture import LineageResolver, TokenCaptureStore, TokenSink

from tokencustody.integrations.nemo_gym import SqlLineageStore, SqlTokenSink, SqlTokenSource


@dataclass(frozen=True)
class GymStores:
    """Our three stores in Gym's types, on one database."""

    sink: SqlTokenSink
    source: SqlTokenSource
    lineage: SqlLineageStore


@pytest.fixture
async def gym(store_url: str) -> AsyncIterator[GymStores]:
    """Open stores on a new database, once on SQLite and once on PostgreSQL."""
    async with (
        SqlTokenSink(store_url) as sink,
        SqlTokenSource(store_url) as source,
        SqlLineageStore(store_url) as lineage,
    ):
        yield GymStores(sink, source, lineage)


@pytest.fixture
async def gym_files(tmp_path: Path) -> AsyncIterator[TokenCaptureStore]:
    """Gym's own file store, sink and source in one."""
    store = TokenCaptureStore(tmp_path / "gym-files")
    yield store
    await store.close()


@pytest.fixture
def gym_configuration_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Python 3.11, give protocol classes the attribute of 3.12 that Gym's configuration reads."""
    if sys.version_info < (3, 12):

        def public_methods(protocol: type) -> set[str]:
            return {name for name in vars(protocol) if not name.startswith("_")}

        # On the metaclass: an attribute of the class itself would count as a member of the protocol.
        for metaclass in {type(TokenSink), type(LineageResolver)}:
            monkeypatch.setattr(metaclass, "__protocol_attrs__", property(public_methods), raising=False)
