"""Folders of NeMo Gym's file store brought into a database, every line proven."""

from typing import TYPE_CHECKING

from tokencustody.lazy import names

if TYPE_CHECKING:
    from tokencustody.gym_import.importing import GymImporter
    from tokencustody.gym_import.report import Finding, FindingKind, ImportedRollout, ImportReport, Outcome

__all__ = [
    "Finding",
    "FindingKind",
    "GymImporter",
    "ImportReport",
    "ImportedRollout",
    "Outcome",
]

__getattr__ = names(
    __name__,
    Finding="gym_import.report",
    FindingKind="gym_import.report",
    GymImporter="gym_import.importing",
    ImportReport="gym_import.report",
    ImportedRollout="gym_import.report",
    Outcome="gym_import.report",
)
