"""Verification: everything that a database recorded is computed again and compared, and nothing is written.

What each rule demands stands in `findings.RULES`.
"""

from typing import TYPE_CHECKING

from tokencustody.lazy import names

if TYPE_CHECKING:
    from tokencustody.verify.findings import RULES, Counts, Finding, Rule, VerifyReport
    from tokencustody.verify.running import verify

__all__ = ["RULES", "Counts", "Finding", "Rule", "VerifyReport", "verify"]

__getattr__ = names(
    __name__,
    Counts="verify.findings",
    Finding="verify.findings",
    RULES="verify.findings",
    Rule="verify.findings",
    VerifyReport="verify.findings",
    verify="verify.running",
)
