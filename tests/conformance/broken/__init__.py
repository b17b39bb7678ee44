"""Transports that each break one promise. `BROKEN` lists each with exactly the checks that must fail on it."""

from tests.conformance.broken import exactness, fence, ledger, lineage, records, retirement, staging
from tests.conformance.broken.registry import BROKEN

__all__ = ["BROKEN", "exactness", "fence", "ledger", "lineage", "records", "retirement", "staging"]
