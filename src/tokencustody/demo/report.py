"""What the demo found in the store once every rollout was frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from tokencustody.demo.rollouts import PlayedRollout
from tokencustody.protocols import TokenCaptureSnapshot
from tokencustody.records import ParentResolutionStatus, TokenEntry


@dataclass(frozen=True)
class CallRow:
    """One captured call. `extends_parent` is None for a call without a proven parent."""

    model_call_id: str
    parent_call_id: str | None
    parent_resolution: str
    prompt_tokens: int
    generated_tokens: int
    extends_parent: bool | None
    mean_log_prob: float
    text: str


@dataclass(frozen=True)
class Report:
    """Counts over all frozen rollouts, read back from the store where it can know.

    The players know the announced calls, the retries, the time, and `altered_by_text`: the continuations
    whose prompt would have had other ids if its history had been tokenised from text again. `masked` maps
    each incomplete rollout to its calls that were announced and have neither entry nor refusal.
    """

    rollouts: int
    calls_announced: int
    calls_stored: int
    calls_refused: dict[str, str]
    prompt_tokens: int
    generated_tokens: int
    roots: int
    resolved: int
    unresolved: int
    extending_parent: int
    masked: dict[str, list[str]]
    retries_absorbed: int
    altered_by_text: int
    seconds: float
    calls_per_second: float
    shown_rollout: str
    shown_calls: list[CallRow] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain JSON data."""
        return asdict(self)


def make_report(
    snapshots: Sequence[TokenCaptureSnapshot], played: Sequence[PlayedRollout], seconds: float
) -> Report:
    """Return the report on all `snapshots`; `seconds` is how long the rollouts were played."""
    entries = [entry for snapshot in snapshots for entry in snapshot.entries]
    rows = {snapshot.rollout_id: _call_rows(snapshot.entries) for snapshot in snapshots}
    announced = {rollout.rollout_id: rollout.announced for rollout in played}
    total = sum(len(calls) for calls in announced.values())
    altered = {call_id for rollout in played for call_id in rollout.altered_by_text}
    resolutions = [entry.parent_resolution for entry in entries]
    shown = max(snapshots, key=lambda snapshot: (not snapshot.incomplete, len(snapshot.entries)))
    return Report(
        rollouts=len(snapshots),
        calls_announced=total,
        calls_stored=len(entries),
        calls_refused={
            refusal.model_call_id: refusal.code or "" for s in snapshots for refusal in s.refusals
        },
        prompt_tokens=sum(len(entry.prompt_token_ids) for entry in entries),
        generated_tokens=sum(len(entry.generation_token_ids) for entry in entries),
        roots=resolutions.count(ParentResolutionStatus.ROOT),
        resolved=resolutions.count(ParentResolutionStatus.RESOLVED),
        unresolved=resolutions.count(ParentResolutionStatus.UNRESOLVED),
        extending_parent=sum(row.extends_parent is True for calls in rows.values() for row in calls),
        masked={s.rollout_id: _dangling(s, announced[s.rollout_id]) for s in snapshots if s.incomplete},
        retries_absorbed=sum(rollout.retries for rollout in played),
        altered_by_text=len(altered & {entry.model_call_id for entry in entries}),
        seconds=round(seconds, 2),
        calls_per_second=round(total / seconds, 2),
        shown_rollout=shown.rollout_id,
        shown_calls=rows[shown.rollout_id],
    )


def totals_table(report: Report) -> Table:
    """Return the counts as a table for a person."""
    table = Table("what", "how many", "remark", title="Captured, frozen and read back")
    table.columns[1].justify = "right"
    refusals = "; ".join(f"{call}: {code}" for call, code in report.calls_refused.items())
    masks = "; ".join(
        f"{rollout_id}: {', '.join(calls)} announced and never stored"
        for rollout_id, calls in report.masked.items()
    )
    for what, count, remark in (
        ("rollouts", report.rollouts, ""),
        (
            "calls announced",
            report.calls_announced,
            f"{report.calls_per_second} a second, {report.seconds:.1f} s",
        ),
        ("calls stored", report.calls_stored, ""),
        ("calls refused by the engine", len(report.calls_refused), refusals),
        ("prompt tokens", report.prompt_tokens, ""),
        ("generated tokens", report.generated_tokens, "each with its log probability"),
        ("parents: root", report.roots, "the first call of a conversation"),
        (
            "parents: resolved",
            report.resolved,
            f"{report.extending_parent} prompts begin with all of the parent's tokens",
        ),
        (
            "parents: unresolved",
            report.unresolved,
            "the parent is the lost call: no guess" if report.unresolved else "",
        ),
        ("retries absorbed", report.retries_absorbed, "the same bytes again"),
        (
            "altered by text",
            report.altered_by_text,
            "prompts that would have other ids if their history had been tokenised again",
        ),
        ("rollouts masked", len(report.masked), masks),
    ):
        table.add_row(what, f"{count:,}", remark)
    return table


def calls_table(report: Report) -> Table:
    """Return the shown rollout, call by call, as a table for a person."""
    table = Table(
        "call",
        "parent",
        "prompt",
        "new",
        "extends\nparent",
        "mean\nlog prob",
        "first words",
        title=report.shown_rollout,
    )
    for row in report.shown_calls:
        extends = {True: "yes", False: "no", None: "-"}[row.extends_parent]
        table.add_row(
            row.model_call_id.removeprefix(f"{report.shown_rollout}-"),
            (row.parent_call_id or row.parent_resolution).removeprefix(f"{report.shown_rollout}-"),
            str(row.prompt_tokens),
            str(row.generated_tokens),
            extends,
            f"{row.mean_log_prob:.3f}",
            " ".join(row.text.split()[:8]),
        )
    return table


def _call_rows(entries: Sequence[TokenEntry]) -> list[CallRow]:
    known = {entry.model_call_id: entry for entry in entries}
    return [
        _call_row(entry, known.get(entry.parent_call_id or ""))
        for entry in sorted(entries, key=lambda entry: (entry.created_at, entry.model_call_id))
    ]


def _call_row(entry: TokenEntry, parent: TokenEntry | None) -> CallRow:
    extends = None
    if parent is not None:
        sequence = parent.prompt_token_ids + parent.generation_token_ids
        extends = entry.prompt_token_ids[: len(sequence)] == sequence
    return CallRow(
        model_call_id=entry.model_call_id,
        parent_call_id=entry.parent_call_id,
        parent_resolution=str(entry.parent_resolution),
        prompt_tokens=len(entry.prompt_token_ids),
        generated_tokens=len(entry.generation_token_ids),
        extends_parent=extends,
        mean_log_prob=sum(entry.generation_log_probs) / max(1, len(entry.generation_log_probs)),
        text=entry.output_items[0]["content"][0]["text"],
    )


def _dangling(snapshot: TokenCaptureSnapshot, announced: Sequence[str]) -> list[str]:
    settled = {entry.model_call_id for entry in snapshot.entries} | {
        r.model_call_id for r in snapshot.refusals
    }
    return [call_id for call_id in announced if call_id not in settled]
