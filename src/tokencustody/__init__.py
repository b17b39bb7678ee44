"""tokencustody: transactional custody of the exact training tokens of reinforcement-learning rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokencustody.bodies import request_items
from tokencustody.fingerprint import assistant_fingerprint, conversation_digest
from tokencustody.lineage import RolloutLineage, stamp_continuation
from tokencustody.protocols import (
    CallRefusal,
    CaptureLedger,
    LineageMatch,
    LineageResolution,
    LineageResolver,
    RolloutRemovalPayload,
    RolloutRetiredError,
    TokenCaptureFrozenError,
    TokenCaptureRetiredError,
    TokenCaptureSnapshot,
    TokenSink,
    TokenSource,
    install_lineage_store,
    install_token_sink,
    install_token_source,
    installed_lineage_store,
    installed_token_sink,
    installed_token_source,
)
from tokencustody.records import (
    ParentResolutionStatus,
    TokenEntry,
    compute_digest,
    cumulative_tokens,
    stamp_lineage,
)
from tokencustody.staging.records import CallRecord, CaptureLedgerCommit

if TYPE_CHECKING:
    from tokencustody.store import (
        AttachedBuffer,
        CaptureStore,
        SqlLineageStore,
        SqlStagingStore,
        SqlTokenSink,
        SqlTokenSource,
        open_store,
    )

__all__ = [
    "AttachedBuffer",
    "CallRecord",
    "CallRefusal",
    "CaptureLedger",
    "CaptureLedgerCommit",
    "CaptureStore",
    "LineageMatch",
    "LineageResolution",
    "LineageResolver",
    "ParentResolutionStatus",
    "RolloutLineage",
    "RolloutRemovalPayload",
    "RolloutRetiredError",
    "SqlLineageStore",
    "SqlStagingStore",
    "SqlTokenSink",
    "SqlTokenSource",
    "TokenCaptureFrozenError",
    "TokenCaptureRetiredError",
    "TokenCaptureSnapshot",
    "TokenEntry",
    "TokenSink",
    "TokenSource",
    "assistant_fingerprint",
    "compute_digest",
    "conversation_digest",
    "cumulative_tokens",
    "install_lineage_store",
    "install_token_sink",
    "install_token_source",
    "installed_lineage_store",
    "installed_token_sink",
    "installed_token_source",
    "open_store",
    "request_items",
    "stamp_continuation",
    "stamp_lineage",
]

_STORE_NAMES = {
    "AttachedBuffer",
    "CaptureStore",
    "SqlLineageStore",
    "SqlStagingStore",
    "SqlTokenSink",
    "SqlTokenSource",
    "open_store",
}


def __getattr__(name: str) -> Any:
    # Lazy: an inference worker that only needs the record types loads no database driver.
    if name not in _STORE_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tokencustody import store

    return getattr(store, name)
