"""Our conformance kit on Gym's own file store: it names what differs on purpose, and nothing else."""

from __future__ import annotations

from pathlib import Path

from nemo_gym.token_id_capture import TokenCaptureStore
from nemo_gym.token_id_capture.lineage import FileLineageStore

from tokencustody.conformance import check_conformance
from tokencustody.conformance.report import CheckStatus

LATER_ERRORS = "release 0.7.0 has no error of its own for a late write"
LONG_IDS = "a rollout id is a file's name there, which is shorter than 255 characters"
DELIBERATE = {
    "rollout_isolation": LONG_IDS,
    "invalid_ids_refused": LONG_IDS,
    "ledger_invalid_ids": LONG_IDS,
    "freeze_unknown_rollout": LATER_ERRORS,
    "post_freeze_write": LATER_ERRORS,
    "post_freeze_intent": LATER_ERRORS,
    "conditional_retirement": LATER_ERRORS,
    "strict_fence": LATER_ERRORS,
    "exact_log_probs": "NaN and infinities do not come back from its JSON",
    "lineage_prev_len": "a match of a complete record does not say its length",
    "lineage_conflicting_call": "a conflict is left to whoever reads the records",
    "lineage_conflicting_twin": "a conflict is left to whoever reads the records",
    "complete_records_first": "complete records and the ledger are two stores there",
    "late_rows_make_a_version": "complete records and the ledger are two stores there",
    "lineage_empty_answer": "an empty answer is the parent of its own request there",
    "ledger_empty_answer": "an empty answer is the parent of its own request there",
    "lineage_odd_arguments": "content that is an object is refused there",
    "ledger_capture_key": "release 0.7.0 does not know the field",
    "ledger_equal_twins": "twin rows of its ledger have no parent between them",
    "ledger_ambiguous_twins": "twin rows of its ledger have no parent between them",
}


async def test_the_kit_names_only_what_differs_on_purpose(tmp_path: Path) -> None:
    report = await check_conformance(
        lambda: TokenCaptureStore(tmp_path),
        lambda: TokenCaptureStore(tmp_path),
        lambda: FileLineageStore(tmp_path),
        ledger_factory=lambda: FileLineageStore(tmp_path),
    )
    assert {result.name for result in report.failed} == DELIBERATE.keys(), report.summary()
    assert sum(result.status is CheckStatus.PASSED for result in report.results) >= 50
