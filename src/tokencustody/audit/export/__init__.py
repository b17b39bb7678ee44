"""Frozen rollouts as files for training: Parquet chains, Gym's token files, or one call a line."""

from tokencustody.audit.export.exporting import export
from tokencustody.audit.export.options import ExportOptions, Format
from tokencustody.audit.export.report import ExportError, ExportReport, Kept, LeftOut, Why, WhyKept
from tokencustody.audit.export.rules import OnBreak, SharedCalls, Siblings

__all__ = [
    "ExportError",
    "ExportOptions",
    "ExportReport",
    "Format",
    "Kept",
    "LeftOut",
    "OnBreak",
    "SharedCalls",
    "Siblings",
    "Why",
    "WhyKept",
    "export",
]
