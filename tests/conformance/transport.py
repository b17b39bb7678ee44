"""The kit's arguments for the transport in memory, with one of its clients replaced."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.conformance.ledger import MemoryLedger
from tests.conformance.memory import Backend, Memory
from tests.conformance.staging import MemoryStaging

Client = Memory | MemoryStaging


def factories(client: type[Client] = Memory) -> dict[str, Any]:
    """Return factories over one new backend, of which those that make such a client make `client`."""
    backend = Backend()
    records: Any = Memory if issubclass(client, MemoryLedger | MemoryStaging) else client
    ledger = client if issubclass(client, MemoryLedger) else MemoryLedger
    staging = client if issubclass(client, MemoryStaging) else MemoryStaging
    here, there = partial(records, backend), partial(records, backend, "other")
    return {
        "sink_factory": here,
        "source_factory": here,
        "lineage_factory": here,
        "other_namespace": (there, there),
        "ledger_factory": partial(ledger, backend),
        "staging_factory": partial(staging, backend),
    }
