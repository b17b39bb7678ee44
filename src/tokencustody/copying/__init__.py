"""Copying rollouts from one database to another."""

from tokencustody.copying.copier import Copier
from tokencustody.copying.deciding import Outcome
from tokencustody.copying.report import CopiedRollout, CopyReport

__all__ = ["CopiedRollout", "Copier", "CopyReport", "Outcome"]
