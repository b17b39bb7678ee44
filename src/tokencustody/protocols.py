"""The capture protocols, and the clients installed for this process.

A serving path awaits `TokenSink.put` before it answers a model call, a trainer reads through `TokenSource`, and a
`LineageResolver` names the parent of a request. Names and signatures are those of NeMo Gym's token-capture
protocols. This module imports no database driver and no server.

`begin_call(rollout_id, model_call_id)` and `refuse_call(rollout_id, *, model_call_id, code)` are optional methods of
a sink and therefore no part of `TokenSink`: an intent that is announced before dispatch and has neither an entry nor a
refusal at freeze masks the rollout, which closes the window in which a last call is lost without a trace.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypedDict, runtime_checkable

from tokencustody.errors import RolloutRetiredError, TokenCaptureFrozenError, TokenCaptureRetiredError
from tokencustody.records import ParentResolutionStatus, TokenEntry

if TYPE_CHECKING:
    from tokencustody.staging.records import CaptureLedgerCommit

__all__ = [
    "CallRefusal",
    "CaptureLedger",
    "LineageMatch",
    "LineageResolution",
    "LineageResolver",
    "RolloutRemovalPayload",
    "RolloutRetiredError",
    "TokenCaptureFrozenError",
    "TokenCaptureRetiredError",
    "TokenCaptureSnapshot",
    "TokenSink",
    "TokenSource",
    "install_lineage_store",
    "install_token_sink",
    "install_token_source",
    "installed_lineage_store",
    "installed_token_sink",
    "installed_token_source",
]


class CallRefusal(NamedTuple):
    """A call that the engine refused, so that its intent does not dangle. `code` is the engine's, if it gave one."""

    model_call_id: str
    code: str | None


@dataclass(frozen=True)
class TokenCaptureSnapshot:
    """An immutable view of one frozen rollout.

    `entries` are unique by model call id; their order carries no meaning. `incomplete` is true when the rollout was
    marked, or an intent has neither an entry nor a refusal. `version` counts what changed the rollout's verdict.
    """

    rollout_id: str
    entries: tuple[TokenEntry, ...]
    incomplete: bool
    snapshot_id: str
    version: int
    refusals: tuple[CallRefusal, ...] = ()


class RolloutRemovalPayload(TypedDict):
    """What retiring or deleting rollouts did: `removed` had records, `absent` had none, both in input order."""

    absent: list[str]
    removed: list[str]


@dataclass(frozen=True)
class LineageMatch:
    """The one proven parent of a request.

    For a complete record `cumulative_token_ids` is the parent's prompt plus generation, `digest` its hash and
    `prev_len` its length. For a ledger row the ids are empty and `staging_chain`, `prev_len` and `chain_hash` are set.
    """

    model_call_id: str
    cumulative_token_ids: tuple[int, ...]
    digest: str
    staging_chain: tuple[str, ...] = ()
    prev_len: int = 0
    chain_hash: str = ""


@dataclass(frozen=True)
class LineageResolution:
    """One parent decision: RESOLVED with a match, ROOT or UNRESOLVED without. `reason` says why it is unresolved."""

    status: ParentResolutionStatus
    match: LineageMatch | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if self.status == ParentResolutionStatus.RESOLVED and self.match is None:
            raise ValueError("a resolved parent needs its match")
        if self.status != ParentResolutionStatus.RESOLVED and self.match is not None:
            raise ValueError(f"a parent that is {self.status} cannot carry a match")


@runtime_checkable
class TokenSink(Protocol):
    """Receives captured records. Methods may be called from many tasks at once."""

    async def put(self, entry: TokenEntry) -> None:
        """Store one record; durable and visible to every resolver before it returns.

        The same call id with the same bytes is a no-op, with other bytes an error. Writing to a frozen rollout
        raises `TokenCaptureFrozenError`. After any error the caller marks the rollout incomplete (unless it was
        frozen) and lets the model call succeed.
        """
        ...

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Durably record that a call was not captured. Works after a freeze too, and changes the version."""
        ...

    async def close(self) -> None:
        """Release resources. Idempotent; there is never anything left to flush."""
        ...


@runtime_checkable
class TokenSource(Protocol):
    """Where a trainer freezes, reads and retires rollouts."""

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Raise the fence and return one atomic snapshot. Idempotent."""
        ...

    async def drop(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        """Retire exactly the snapshot that was consumed; False, with nothing lost, if the rollout changed since."""
        ...

    async def retire(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        """Remove the records of rollouts in any state and keep their fences. Repeating it is a no-op."""
        ...

    async def delete(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        """Remove records and fences, after which the ids read as unused. Repeating it is a no-op."""
        ...

    async def close(self) -> None:
        """Release resources. Idempotent."""
        ...


@runtime_checkable
class LineageResolver(Protocol):
    """Names the parent of a request among the committed calls of its rollout. It only reads, and never guesses."""

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        """Return the decision for the unmodified request items. Calls with conflicting payloads are no candidates."""
        ...

    def is_process_shared(self) -> bool:
        """Return whether separate serving processes see the same committed calls."""
        ...

    async def close(self) -> None:
        """Release resources. Idempotent."""
        ...


@runtime_checkable
class CaptureLedger(LineageResolver, Protocol):
    """The token-free ledger of calls whose token data is staged by inference workers."""

    async def record(self, commit: CaptureLedgerCommit) -> None:
        """Publish a completed call; visible to every worker before it returns.

        An identical repeat is a no-op; other data under the same call id is an error.
        """
        ...

    async def record_failure(self, rollout_id: str, model_call_id: str, reason: str) -> None:
        """Record a call whose capture did not complete. It never becomes a parent."""
        ...

    async def manifest(self, rollout_id: str) -> dict[str, Any]:
        """Return the rollout's ledger as plain wire data. A retired rollout raises `RolloutRetiredError`."""
        ...

    async def has_rows(self, rollout_id: str) -> bool:
        """Return whether any row exists. A retired rollout raises `RolloutRetiredError`."""
        ...

    async def retire(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        """Remove the ledgers of rollouts and keep their fences. Repeating it is a no-op."""
        ...

    async def delete(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        """Remove the ledgers and fences of rollouts. Repeating it is a no-op."""
        ...


_INSTALLED_SINK: TokenSink | None = None
_INSTALLED_SOURCE: TokenSource | None = None
_INSTALLED_LINEAGE_STORE: LineageResolver | None = None


def install_token_sink(sink: TokenSink | None) -> None:
    """Set the sink of this process, or clear it with None. Raises TypeError for one that lacks a method."""
    global _INSTALLED_SINK
    _require_methods(sink, TokenSink, "token sink")
    _INSTALLED_SINK = sink


def installed_token_sink() -> TokenSink | None:
    """Return the sink of this process."""
    return _INSTALLED_SINK


def install_token_source(source: TokenSource | None) -> None:
    """Set the source of this process, or clear it with None; its owner closes it.

    Raises TypeError for one that lacks a method.
    """
    global _INSTALLED_SOURCE
    _require_methods(source, TokenSource, "token source")
    _INSTALLED_SOURCE = source


def installed_token_source() -> TokenSource | None:
    """Return the source of this process."""
    return _INSTALLED_SOURCE


def install_lineage_store(store: LineageResolver | None) -> None:
    """Set the request-time lineage store of this process, or clear it with None.

    Raises TypeError for one that lacks a method.
    """
    global _INSTALLED_LINEAGE_STORE
    _require_methods(store, LineageResolver, "lineage store")
    _INSTALLED_LINEAGE_STORE = store


def installed_lineage_store() -> LineageResolver | None:
    """Return the request-time lineage store of this process."""
    return _INSTALLED_LINEAGE_STORE


def _require_methods(client: object, protocol: type, what: str) -> None:
    if client is None:
        return
    if inspect.isclass(client):
        raise TypeError(f"the {what} must be an instance, not the class {client.__name__}")
    required = [
        name
        for name, member in vars(protocol).items()
        if inspect.isfunction(member) and not name.startswith("_")
    ]
    missing = [name for name in required if not callable(getattr(client, name, None))]
    if missing:
        raise TypeError(f"the {what} {type(client).__name__} lacks {', '.join(missing)}")
