"""tokencustody: transactional custody of the exact training tokens of reinforcement-learning rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokencustody.lazy import names

if TYPE_CHECKING:
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

# The command line loads no record types, and an inference worker that needs them no database driver.
__getattr__ = names(
    __name__,
    "bodies",
    "errors",
    "fingerprint",
    "lineage",
    "protocols",
    "records",
    "staging",
    AttachedBuffer="store",
    CallRecord="staging.records",
    CallRefusal="protocols",
    CaptureLedger="protocols",
    CaptureLedgerCommit="staging.records",
    CaptureStore="store",
    LineageMatch="protocols",
    LineageResolution="protocols",
    LineageResolver="protocols",
    ParentResolutionStatus="records",
    RolloutLineage="lineage",
    RolloutRemovalPayload="protocols",
    RolloutRetiredError="protocols",
    SqlLineageStore="store",
    SqlStagingStore="store",
    SqlTokenSink="store",
    SqlTokenSource="store",
    TokenCaptureFrozenError="protocols",
    TokenCaptureRetiredError="protocols",
    TokenCaptureSnapshot="protocols",
    TokenEntry="records",
    TokenSink="protocols",
    TokenSource="protocols",
    assistant_fingerprint="fingerprint",
    compute_digest="records",
    conversation_digest="fingerprint",
    cumulative_tokens="records",
    install_lineage_store="protocols",
    install_token_sink="protocols",
    install_token_source="protocols",
    installed_lineage_store="protocols",
    installed_token_sink="protocols",
    installed_token_source="protocols",
    open_store="store",
    request_items="bodies",
    stamp_continuation="lineage",
    stamp_lineage="records",
)


def __dir__() -> list[str]:
    return __all__
