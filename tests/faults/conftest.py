from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from campaigns.relay import ChaosRelay


def relay_before(url: str) -> ChaosRelay:
    """Return a relay, to be entered, before the server of a URL."""
    server = urlsplit(url)
    assert server.hostname is not None
    return ChaosRelay(server.hostname, server.port or 5432)


@pytest.fixture
def relay(postgres_url: str) -> Iterator[ChaosRelay]:
    """A relay before the server of `postgres_url`."""
    with relay_before(postgres_url) as relay:
        yield relay
