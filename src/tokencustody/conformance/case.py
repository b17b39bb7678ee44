"""What a check works with: the transport under test, and clients and rollout ids of its own."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tokencustody.conformance.report import Capability
from tokencustody.conformance.threads import in_thread

Factory = Callable[[], Any]

RECORDS = "records"
SINK_METHODS = ("begin_call", "refuse_call")
SOURCE_METHODS = ("retire", "delete")
# Optional methods of a ledger and a staging store, by the capability that they are.
LEDGER_METHODS = {"ledger_retire": "retire", "ledger_delete": "delete"}
STAGING_METHODS = {
    "fetch_extras": "fetch_extras",
    "fetch_attachments": "fetch_attachments",
    "fetch_prefix": "fetch_prefix_token_ids",
    "staging_delete": "delete",
}
ATTACHMENTS = "attachments"
PROCESSES = "processes"
CLOSE_TIMEOUT = 10.0


@dataclass
class Transport:
    """The factories of one transport and what is known about it. `suffix` sets this run's rollouts apart."""

    sink_factory: Factory
    source_factory: Factory
    lineage_factory: Factory | None
    other_namespace: tuple[Factory, Factory] | None
    ledger_factory: Factory | None
    staging_factory: Factory | None
    rollout_id: str
    suffix: str
    capabilities: dict[str, Capability] = field(default_factory=dict)
    rollout_ids: list[str] = field(default_factory=list)
    staging_keys: list[str] = field(default_factory=list)

    def note(self, name: str, present: bool, detected: str) -> None:
        """Record a capability. A later note of the same name wins."""
        self.capabilities[name] = Capability(name, present, detected)

    def offers(self, name: str) -> bool:
        """Return whether a capability was detected."""
        return name in self.capabilities and self.capabilities[name].present


async def detect(transport: Transport) -> None:
    """Note the capabilities that show in the clients' methods and in which factories were given."""
    async with Case(transport, "detect") as case:
        sink, source = case.sink(), case.source()
        transport.note(RECORDS, True, "every sink and source")
        for client, methods in ((sink, SINK_METHODS), (source, SOURCE_METHODS)):
            for method in methods:
                present = _has(client, method)
                verb = "has" if present else "has no"
                transport.note(method, present, f"{type(client).__name__} {verb} method {method}")
    for name, given in (("lineage", transport.lineage_factory), ("namespaces", transport.other_namespace)):
        argument = "lineage_factory" if name == "lineage" else "other_namespace"
        transport.note(name, given is not None, f"{argument} {'given' if given is not None else 'not given'}")
    transport.note(PROCESSES, False, "not tried: the strict fence was not checked")
    for name, factory, optional in (
        ("ledger", transport.ledger_factory, LEDGER_METHODS),
        ("staging", transport.staging_factory, STAGING_METHODS),
    ):
        transport.note(name, factory is not None, f"{name}_factory {'not ' * (factory is None)}given")
        if factory is not None:
            await _detect_optional(transport, name, optional)


async def _detect_optional(transport: Transport, name: str, methods: dict[str, str]) -> None:
    async with Case(transport, "detect") as case:
        client = case.ledger() if name == "ledger" else case.staging()
        for capability, method in methods.items():
            present = callable(getattr(client, method, None))
            verb = "has" if present else "has no"
            transport.note(capability, present, f"{type(client).__name__} {verb} method {method}")
        if name == "staging":
            takes = _takes_attachments(client.stage)
            transport.note(ATTACHMENTS, takes, f"stage {'takes' if takes else 'does not take'} attachments")


def _has(client: Any, name: str) -> bool:
    method = getattr(client, name, None)
    if name not in SOURCE_METHODS or not callable(method):
        return callable(method)
    try:
        # A method for one rollout by that name is another one than that for batches.
        return "rollout_id" not in inspect.signature(method).parameters
    except ValueError:  # a function without a signature, such as one written in C
        return True


def _takes_attachments(stage: Callable[..., Any]) -> bool:
    try:
        inspect.signature(stage).bind(None, attachments=None)
    except TypeError:
        return False
    except ValueError:  # a function without a signature, such as one written in C
        return True
    return True


class Case:
    """One run of one check. Every client made through it is closed when the check ends."""

    def __init__(self, transport: Transport, name: str) -> None:
        self.transport = transport
        self.name = name
        self.random = random.Random(name)  # noqa: S311 - repeatable test data
        self._closers: list[Callable[[], Awaitable[object]]] = []
        self._rollouts = 0

    async def __aenter__(self) -> Case:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        errors = []
        for close in reversed(self._closers):
            try:
                await close()
            except Exception as exc:
                errors.append(exc)
        if errors and exc_info[1] is None:
            raise errors[0]

    def rollout(self, length: int = 0) -> str:
        """Return a rollout id that nobody has used, padded to `length` characters if it is shorter."""
        self._rollouts += 1
        rollout_id = (
            f"{self.transport.rollout_id}-{self.transport.suffix}-{self.name}-{self._rollouts}".ljust(
                length, "x"
            )
        )
        return self.claim(rollout_id)

    def claim(self, rollout_id: str) -> str:
        """Note that the check writes to `rollout_id`, and return it."""
        self.transport.rollout_ids.append(rollout_id)
        return rollout_id

    def claim_key(self, staging_key: str) -> None:
        """Note that the check stages a call under `staging_key`."""
        self.transport.staging_keys.append(staging_key)

    def sink(self) -> Any:
        """Return a fresh sink."""
        return self._open(self.transport.sink_factory)

    def source(self) -> Any:
        """Return a fresh source."""
        return self._open(self.transport.source_factory)

    def lineage(self) -> Any:
        """Return a fresh lineage resolver."""
        return self._open(self.transport.lineage_factory)

    def ledger(self) -> Any:
        """Return a fresh capture ledger."""
        return self._open(self.transport.ledger_factory)

    def staging(self) -> Any:
        """Return a fresh staging store."""
        client = self._made(self.transport.staging_factory)
        if hasattr(client, "close"):
            # Bounded: it may wait for a call that hangs in another thread.
            self._closers.append(lambda: asyncio.wait_for(in_thread(client.close), CLOSE_TIMEOUT))
        return client

    def other_sink(self) -> Any:
        """Return a fresh sink of the other namespace."""
        return self._open(self.transport.other_namespace and self.transport.other_namespace[0])

    def other_source(self) -> Any:
        """Return a fresh source of the other namespace."""
        return self._open(self.transport.other_namespace and self.transport.other_namespace[1])

    def offers(self, capability: str) -> bool:
        """Return whether the transport has a capability."""
        return self.transport.offers(capability)

    def _open(self, factory: Factory | None) -> Any:
        client = self._made(factory)
        self._closers.append(lambda: client.close())
        return client

    def _made(self, factory: Factory | None) -> Any:
        if factory is None:
            raise LookupError(f"check {self.name} asks for a client that it does not list among its needs")
        return factory()
