"""Frozen rollouts as files for training: Parquet chains, Gym's token files, or one call a line."""

from tokencustody.chains.rules import OnBreak, SharedCalls, Siblings
from tokencustody.export.exporting import export
from tokencustody.export.options import ExportOptions, Format
from tokencustody.export.report import ExportError, ExportReport, Kept, LeftOut, Why, WhyKept

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
