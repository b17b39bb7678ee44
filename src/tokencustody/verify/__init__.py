"""Verification: everything that a database recorded is computed again and compared, and nothing is written.

What each rule demands stands in `findings.RULES`.
"""

from tokencustody.verify.findings import RULES, Counts, Finding, Rule, VerifyReport
from tokencustody.verify.running import verify

__all__ = ["RULES", "Counts", "Finding", "Rule", "VerifyReport", "verify"]
