"""What a person asks a capture store, answered without a write and without reading a payload."""

from tokencustody.audit.forest import CallForest, call_forest
from tokencustody.audit.reading import RolloutNotFoundError, RolloutReader
from tokencustody.audit.selection import RolloutFilter
from tokencustody.audit.summaries import (
    CallSummary,
    Intent,
    LedgerCall,
    LedgerFailure,
    Reason,
    ReasonKind,
    RolloutDetail,
    RolloutPage,
    RolloutSummary,
    Totals,
    Version,
)

__all__ = [
    "CallForest",
    "CallSummary",
    "Intent",
    "LedgerCall",
    "LedgerFailure",
    "Reason",
    "ReasonKind",
    "RolloutDetail",
    "RolloutFilter",
    "RolloutNotFoundError",
    "RolloutPage",
    "RolloutReader",
    "RolloutSummary",
    "Totals",
    "Version",
    "call_forest",
]
