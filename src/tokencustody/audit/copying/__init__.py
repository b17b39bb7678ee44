"""Copying rollouts from one database to another."""

from tokencustody.audit.copying.copier import Copier
from tokencustody.audit.copying.deciding import Outcome
from tokencustody.audit.copying.report import CopiedRollout, CopyReport

__all__ = ["CopiedRollout", "Copier", "CopyReport", "Outcome"]
