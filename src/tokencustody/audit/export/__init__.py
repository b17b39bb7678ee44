"""Frozen rollouts as files for training: Parquet chains, Gym's token files, or one call a line."""

from tokencustody.audit.export.chains import SharedCalls
from tokencustody.audit.export.exporting import export
from tokencustody.audit.export.options import ExportOptions, Format
from tokencustody.audit.export.report import ExportError, ExportReport, Kept, Why, WhyKept

__all__ = [
    "ExportError",
    "ExportOptions",
    "ExportReport",
    "Format",
    "Kept",
    "SharedCalls",
    "Why",
    "WhyKept",
    "export",
]
