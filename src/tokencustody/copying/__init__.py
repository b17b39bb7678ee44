"""Rollouts copied from one database to another, every row as it is, and nothing overwritten."""

from typing import TYPE_CHECKING

from tokencustody.lazy import names

if TYPE_CHECKING:
    from tokencustody.copying.copier import Copier
    from tokencustody.copying.deciding import CopyOutcome
    from tokencustody.copying.report import CopiedRollout, CopyReport

__all__ = [
    "CopiedRollout",
    "Copier",
    "CopyOutcome",
    "CopyReport",
]

__getattr__ = names(
    __name__,
    CopiedRollout="copying.report",
    Copier="copying.copier",
    CopyReport="copying.report",
    CopyOutcome="copying.deciding",
)
