"""The conformance kit: does a transport keep the promises of the token-capture protocols?

It runs against any sink, source, lineage resolver, capture ledger and staging store, from a program
(`run_conformance`, `check_conformance`) or for the SQL stores from the command line
(`tokencustody conformance --url URL`).
"""

from typing import TYPE_CHECKING

from tokencustody.lazy import names

if TYPE_CHECKING:
    from tokencustody.conformance.registry import Check, registered_checks
    from tokencustody.conformance.report import (
        Capability,
        CheckResult,
        CheckStatus,
        ConformanceError,
        ConformanceReport,
    )
    from tokencustody.conformance.runner import check_conformance, run_conformance

__all__ = [
    "Capability",
    "Check",
    "CheckResult",
    "CheckStatus",
    "ConformanceError",
    "ConformanceReport",
    "check_conformance",
    "registered_checks",
    "run_conformance",
]

__getattr__ = names(
    __name__,
    Capability="conformance.report",
    Check="conformance.registry",
    CheckResult="conformance.report",
    CheckStatus="conformance.report",
    ConformanceError="conformance.report",
    ConformanceReport="conformance.report",
    check_conformance="conformance.runner",
    registered_checks="conformance.registry",
    run_conformance="conformance.runner",
)
