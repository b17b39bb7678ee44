"""The manifest of an export: what its files hold, and what was left out; and the report that is read from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokencustody.chains.reasons import LeftOut, Why, remedy
from tokencustody.export.options import ExportOptions
from tokencustody.export.report import Exported, ExportReport, Part
from tokencustody.export.rewards import Rewards
from tokencustody.states import Format
from tokencustody.store.base import now

# 2: rows are cut into segments and retries are settled. 3: `is_held` counts staged calls and masked rollouts.
MANIFEST_VERSION = 3
_SUMS = (
    "rows",
    "calls",
    "tokens",
    "trained_tokens",
    "calls_left_out",
    "not_finite_log_probs",
    "routes_left_out",
)


def holds_rows(rollout: Exported, options: ExportOptions) -> bool:
    """Return whether the files have anything of the rollout; one that sampled nothing has no row in Parquet."""
    return bool(rollout.rows) or options.format is not Format.PARQUET


def holds_anything(parts: Sequence[Part], options: ExportOptions) -> bool:
    """Return whether the files have anything."""
    return any(holds_rows(rollout, options) for part in parts for rollout in part.rollouts)


def report_of_none(folder: Path, parts: Sequence[Part], options: ExportOptions) -> ExportReport:
    """Return the report of an export of which everything was left out."""
    left_out = _left_out(parts, options)
    return ExportReport(
        folder,
        "",
        options.format,
        left_out=Counter(left.reason for left in left_out),
        all_left_out=True,
        listed=tuple(left_out),
        unknown=tuple(left.rollout_id for left in left_out if left.reason == Why.UNKNOWN),
    )


def make_manifest(
    header: dict[str, Any], parts: Sequence[Part], options: ExportOptions, rewards: Rewards
) -> dict[str, Any]:
    """Return the manifest of an export of which all parts are finished."""
    left_out = _left_out(parts, options)
    rollouts = [rollout for part in parts for rollout in part.rollouts]
    files = [file for part in parts for file in part.files]
    breaks: Counter[str] = Counter()
    for rollout in rollouts:
        breaks.update(rollout.breaks)
    return {
        "manifest_version": MANIFEST_VERSION,
        **header,
        "finished_at": now().isoformat(),
        "counts": {
            "files": len(files),
            "bytes": sum(file.bytes for file in files),
            "rollouts": len(rollouts),
            **{name: sum(getattr(rollout, name) for rollout in rollouts) for name in _SUMS},
            "breaks": dict(sorted(breaks.items())),
            "left_out": dict(sorted(Counter(left.reason for left in left_out).items())),
        },
        "rewards": rewards.summary(rollout.key for rollout in rollouts) if rewards.sha256 else None,
        "parts": [
            {
                "files": [asdict(file) for file in part.files],
                "rollouts": [asdict(rollout) for rollout in part.rollouts],
            }
            for part in parts
            if part.rollouts
        ],
        "what_to_do": {reason: remedy(reason) for reason in sorted({left.reason for left in left_out})},
        "left_out": [asdict(left) for left in left_out],
    }


def read_manifest(
    folder: Path,
    manifest: dict[str, Any],
    sha256: str,
    *,
    already_finished: bool = False,
    resumed: bool = False,
) -> tuple[ExportReport, list[Exported]]:
    """Return the report of a finished export, and the rollouts that its files hold."""
    counts = dict(manifest["counts"])
    report = ExportReport(
        destination=folder,
        export_id=manifest["export_id"],
        format=manifest["options"]["format"],
        already_finished=already_finished,
        resumed=resumed,
        breaks=Counter(counts.pop("breaks")),
        left_out=Counter(counts.pop("left_out")),
        rewards=manifest["rewards"],
        manifest_sha256=sha256,
        unknown=tuple(left["rollout_id"] for left in manifest["left_out"] if left["reason"] == Why.UNKNOWN),
        **counts,
    )
    return report, [Exported(**each) for part in manifest["parts"] for each in part["rollouts"]]


def _left_out(parts: Sequence[Part], options: ExportOptions) -> list[LeftOut]:
    left_out = [left for part in parts for left in part.left_out]
    met = {rollout.rollout_id for part in parts for rollout in part.rollouts}
    met.update(left.rollout_id for left in left_out)
    return left_out + [
        LeftOut(options.run or "", rollout_id, Why.UNKNOWN)
        for rollout_id in sorted(set(options.rollout_ids or ()) - met)
    ]
