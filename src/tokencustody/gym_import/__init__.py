"""Folders of NeMo Gym's file store brought into a database, every line proven."""

from typing import TYPE_CHECKING

from tokencustody.lazy import names

if TYPE_CHECKING:
    from tokencustody.gym_import.importing import GymImporter
    from tokencustody.gym_import.report import (
        FindingKind,
        ImportedRollout,
        ImportFinding,
        ImportOutcome,
        ImportReport,
    )

__all__ = [
    "FindingKind",
    "GymImporter",
    "ImportFinding",
    "ImportOutcome",
    "ImportReport",
    "ImportedRollout",
]

__getattr__ = names(
    __name__,
    ImportFinding="gym_import.report",
    FindingKind="gym_import.report",
    GymImporter="gym_import.importing",
    ImportReport="gym_import.report",
    ImportedRollout="gym_import.report",
    ImportOutcome="gym_import.report",
)
