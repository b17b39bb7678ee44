"""Importing folders of NeMo Gym's file store."""

from tokencustody.gym_import.importing import GymImporter
from tokencustody.gym_import.report import Finding, FindingKind, ImportedRollout, ImportReport, Outcome

__all__ = ["Finding", "FindingKind", "GymImporter", "ImportReport", "ImportedRollout", "Outcome"]
