"""The conformance kit: does a transport keep the promises of the token-capture protocols?

It runs against any sink, source, lineage resolver, capture ledger and staging store, from a program
(`run_conformance`, `check_conformance`) or for the SQL stores from the command line
(`tokencustody conformance --url URL`).
"""

from tokencustody.conformance.registry import Check, registered_checks
from tokencustody.conformance.report import (
    Capability,
    CheckResult,
    CheckStatus,
    ConformanceError,
    ConformanceReport,
)
from tokencustody.conformance.runner import Written, check_conformance, run_conformance

__all__ = [
    "Capability",
    "Check",
    "CheckResult",
    "CheckStatus",
    "ConformanceError",
    "ConformanceReport",
    "Written",
    "check_conformance",
    "registered_checks",
    "run_conformance",
]
