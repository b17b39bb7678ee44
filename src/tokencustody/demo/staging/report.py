"""What came of a run of the demo with worker staging, as the trainer saw it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from tokencustody.demo.staging.trainer import Span
from tokencustody.staging.reasons import (
    TERMINAL_AMBIGUOUS,
    UNRESOLVED_PARENT_REASON,
    WORKER_CAPTURE_FAILED_REASON,
)
from tokencustody.staging.terminal import DECLARED_NOT_CAPTURED, WITNESS_DISAGREEMENT

_REMARKS = {
    WORKER_CAPTURE_FAILED_REASON: "the worker could not stage a call (lost on purpose)",
    UNRESOLVED_PARENT_REASON: "the call continues one that was never recorded: no guess",
    TERMINAL_AMBIGUOUS: "two answers to one question, and nobody said which one counts",
    DECLARED_NOT_CAPTURED: "the agent declared a response id that no call has",
    WITNESS_DISAGREEMENT: "what the agent declared and what was scored are different calls",
}


@dataclass(frozen=True)
class StagingReport:
    """Counts over all rollouts.

    `masked` maps each rollout that cannot be trained on to the reason, `failures` each call that was not captured,
    `calls_refused` each call for which the engine sampled nothing to its code. `terminals` counts how the trainable
    rollouts' last calls were found, `weight_versions` the staged calls in their rows. `staged_calls_left` are those
    that no manifest names once the rollouts are retired. The shown rollout is the trainable one with the most weight
    versions.
    """

    rollouts: int
    calls: int
    calls_recorded: int
    calls_refused: dict[str, str]
    failures: dict[str, str]
    roots: int
    resolved: int
    unresolved: int
    retries_absorbed: int
    altered_by_text: int
    trainable: int
    masked: dict[str, str]
    terminals: dict[str, int]
    tokens: int
    trained_tokens: int
    weight_versions: dict[int, int]
    rows_across_versions: int
    retired: int
    staged_calls_left: int
    seconds: float
    calls_per_second: float
    shown_rollout: str
    shown_spans: list[Span]

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain JSON data."""
        return asdict(self)


def make_report(
    verdicts: Sequence[dict[str, Any]], tally: dict[str, Any], ending: dict[str, Any], seconds: float
) -> StagingReport:
    """Return the report on what the trainer (`verdicts`, `ending`) and the serving process (`tally`) reported.

    `seconds` is how long the rollouts were played.
    """
    rows = {
        verdict["rollout_id"]: [Span(**span) for span in verdict["spans"]]
        for verdict in verdicts
        if not verdict["reason"]
    }
    spans = [span for row in rows.values() for span in row]
    across = {rollout_id: len({span.weight_version for span in row}) for rollout_id, row in rows.items()}
    shown = max(rows, key=lambda rollout_id: (across[rollout_id], len(rows[rollout_id])), default="")
    return StagingReport(
        rollouts=len(verdicts),
        calls=tally["calls"],
        calls_recorded=sum(verdict["calls"] for verdict in verdicts),
        calls_refused=tally["refused"],
        failures={call: why for verdict in verdicts for call, why in verdict["failures"].items()},
        roots=tally["by_parent"]["root"],
        resolved=tally["by_parent"]["resolved"],
        unresolved=tally["by_parent"]["unresolved"],
        retries_absorbed=tally["retries"],
        altered_by_text=tally["altered_by_text"],
        trainable=len(rows),
        masked={verdict["rollout_id"]: verdict["reason"] for verdict in verdicts if verdict["reason"]},
        terminals=_count(v["terminal_selection"] for v in verdicts if not v["reason"]),
        tokens=sum(span.end - span.start for span in spans),
        trained_tokens=sum(span.generated_tokens for span in spans),
        weight_versions=_count(span.weight_version for span in spans),
        rows_across_versions=sum(count > 1 for count in across.values()),
        retired=ending["retired"],
        staged_calls_left=ending["staged_calls_left"],
        seconds=round(seconds, 2),
        calls_per_second=round(tally["calls"] / seconds, 2),
        shown_rollout=shown,
        shown_spans=rows.get(shown, []),
    )


def totals_table(report: StagingReport) -> Table:
    """Return the counts as a table for a person."""
    table = Table("what", "how many", "remark", title="Staged, recorded, read over HTTP and verified")
    table.columns[1].justify = "right"
    pace = f"{report.calls_per_second} a second, {report.seconds:.1f} s"
    for what, count, remark in (
        ("rollouts", report.rollouts, ""),
        ("model calls", report.calls, pace),
        ("calls recorded", report.calls_recorded, "staged by the worker, then named in the ledger"),
        ("calls refused by the engine", len(report.calls_refused), _listed(report.calls_refused)),
        ("calls not captured", len(report.failures), _listed(report.failures)),
        ("parents: root", report.roots, "text admissions"),
        (
            "parents: resolved",
            report.resolved,
            "token_in admissions: the prefix is read from the staged calls",
        ),
        ("parents: unresolved", report.unresolved, "served, and not captured" if report.unresolved else ""),
        ("retries absorbed", report.retries_absorbed, "staged and recorded again with the same bytes"),
        (
            "altered by text",
            report.altered_by_text,
            "prompts that would have other ids if their history had been tokenised again",
        ),
        ("rollouts trainable", report.trainable, _counted("terminal", report.terminals)),
        (
            "tokens in their rows",
            report.tokens,
            f"{report.trained_tokens:,} sampled, each with its log probability",
        ),
        (
            "rows across weight versions",
            report.rows_across_versions,
            _counted("calls of version", report.weight_versions),
        ),
        ("rollouts masked", len(report.masked), ""),
        *((f"  {rollout_id}", 1, _why(reason)) for rollout_id, reason in report.masked.items()),
        (
            "rollouts retired over HTTP",
            report.retired,
            f"{report.staged_calls_left} staged calls stay behind",
        ),
    ):
        table.add_row(what, f"{count:,}", remark)
    return table


def spans_table(report: StagingReport) -> Table:
    """Return the shown training row, call by call, as a table for a person."""
    table = Table(
        "call",
        "tokens",
        "prompt",
        "generated",
        "weight\nversion",
        "mean\nlog prob",
        title=f"The training row of {report.shown_rollout}",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for span in report.shown_spans:
        table.add_row(
            span.model_call_id.removeprefix(f"{report.shown_rollout}-"),
            f"{span.start} to {span.end}",
            str(span.prompt_tokens),
            str(span.generated_tokens),
            str(span.weight_version),
            f"{span.mean_log_prob:.3f}",
        )
    return table


def _count(values: Iterable[Any]) -> dict[Any, int]:
    # A plain dict: `asdict` cannot copy a Counter.
    return dict(sorted(Counter(values).items()))


def _why(reason: str) -> str:
    remark = _REMARKS.get(reason)
    return f"{reason}: {remark}" if remark else reason


def _listed(found: dict[str, str]) -> str:
    return "; ".join(f"{call}: {why}" for call, why in found.items())


def _counted(what: str, counts: dict[Any, int]) -> str:
    return ", ".join(f"{what} {name}: {count}" for name, count in counts.items())
