"""What a person does with a database of captured rollouts: looking at it, and taking rollouts out of it."""

from tokencustody.audit.export import ExportError, ExportOptions, ExportReport, export
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
from tokencustody.audit.verify import Finding, VerifyReport, verify

__all__ = [
    "CallForest",
    "CallSummary",
    "ExportError",
    "ExportOptions",
    "ExportReport",
    "Finding",
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
    "VerifyReport",
    "Version",
    "call_forest",
    "export",
    "verify",
]
