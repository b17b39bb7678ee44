"""Frozen rollouts as files (Parquet rows, Gym's token files, or one call a line), and their hand-over to a trainer."""

from typing import TYPE_CHECKING

from tokencustody.lazy import names

if TYPE_CHECKING:
    from tokencustody.chains.reasons import LeftOut, Why
    from tokencustody.errors import ExportError
    from tokencustody.export.exporting import export
    from tokencustody.export.options import ExportOptions
    from tokencustody.export.report import ExportReport, Kept, WhyKept
    from tokencustody.states import Format, OnBreak, SharedCalls, Siblings

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

__getattr__ = names(
    __name__,
    ExportError="errors",
    ExportOptions="export.options",
    ExportReport="export.report",
    Format="states",
    Kept="export.report",
    LeftOut="chains.reasons",
    OnBreak="states",
    SharedCalls="states",
    Siblings="states",
    Why="chains.reasons",
    WhyKept="export.report",
    export="export.exporting",
)
