from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from campaigns.relay import ChaosRelay


@pytest.fixture
def relay(postgres_url: str) -> Iterator[ChaosRelay]:
    """A relay before the server of `postgres_url`."""
    server = urlsplit(postgres_url)
    assert server.hostname is not None
    with ChaosRelay(server.hostname, server.port or 5432) as relay:
        yield relay
