"""Decides whether a history of a store is one that the contract allows.

Each rollout is judged by itself, with what was staged under its id, and each staged call. There must be an order of its
operations, each at one moment between its invocation and its return, in which every answer is the one that
`campaigns.model` gives. An operation of unknown outcome may take effect at any moment after its invocation, or never. A
mark that was spilled takes effect at some moment after its invocation, and before the campaign's last reads (worker
"final"). When there is no such order, `campaigns.rules` says in words what went wrong.

The store repeats a transaction whose commit was not acknowledged, and the contract calls that no second write. Where
somebody removed the rollout in between, the first try has left nothing by which the second could know it. Only then,
and only if a history fits in no other way, these are allowed, and counted in `Report.allowed`:

- A put, begin or freeze that overlaps a retire or a drop, and answers that the rollout is retired, may have taken
  effect before.
- A write that overlaps a delete may have taken effect before the delete too, and a delete that removed something may
  have done so twice. The same for what is staged and unstaged.
- A retire or delete that overlaps another removal may say that it removed the records, though the other one did; an
  unstage likewise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from campaigns.audit import audit
from campaigns.history import Operation, Outcome
from campaigns.model import (
    ABSENT,
    ERRORS,
    READS,
    REMOVED,
    RETIRED_ERROR,
    STAGING,
    Answer,
    RolloutState,
    StagedState,
    State,
)
from campaigns.rules import Violation, explain
from campaigns.search import DEFAULT_LIMIT, Event, Found, Verdict, find_order

__all__ = ["Report", "Violation", "audit", "check"]

FINAL = "final"
_REMOVALS = frozenset({"drop", "retire", "delete"})
_LOOK_LIKE_REMOVAL = {
    "retire": (Answer(REMOVED), Answer(ABSENT)),
    "delete": (Answer(REMOVED), Answer(ABSENT)),
    "unstage": (Answer(True), Answer(False)),
}


@dataclass
class Report:
    """What a history came to. `undecided` names the rollouts for which the search was given up."""

    operations: int = 0
    unknown: int = 0
    rollouts: int = 0
    staged_calls: int = 0
    allowed: int = 0
    visited: int = 0
    undecided: list[str] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the history is legal as a whole."""
        return not self.violations and not self.undecided


def check(
    operations: Iterable[Operation],
    *,
    limit: int = DEFAULT_LIMIT,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Judge a whole history. `limit` bounds the states that are visited for one rollout.

    `progress` is told, after each rollout or staged call, how many of how many operations are judged.
    """
    report = Report()
    objects: dict[tuple[str, str | None], list[Operation]] = {}
    for operation in operations:
        report.operations += 1
        report.unknown += operation.outcome is Outcome.UNKNOWN
        call = operation.arguments["call"] if operation.name in STAGING else None
        objects.setdefault((operation.rollout, call), []).append(operation)
    alone = {key: list(its) for key, its in objects.items()}
    for (rollout, call), its in alone.items():
        if call is not None and (rollout, None) in objects:
            objects[rollout, None] += [operation for operation in its if operation.name not in READS]
    done = 0
    for (rollout, call), its in objects.items():
        if call is None:
            report.rollouts += 1
        else:
            report.staged_calls += 1
        _judge(report, rollout, RolloutState() if call is None else StagedState(), its, limit)
        done += len(alone[rollout, call])
        if progress is not None:
            progress(done, report.operations)
    return report


def _judge(report: Report, rollout: str, initial: State, operations: Sequence[Operation], limit: int) -> None:
    # What was staged under a rollout's id is told of by itself.
    is_rollout = isinstance(initial, RolloutState)
    own = [op for op in operations if op.name not in STAGING] if is_rollout else operations
    unnamed = [operation for operation in own if _is_unnamed(operation)]
    for operation in unnamed:
        text = f"{operation.name} answered {operation.error}, which is no error of the contract"
        report.violations.append(Violation("unnamed error", rollout, text, (operation,)))
    events = _events(operations)
    found = find_order(events, initial, limit=limit)
    report.visited += found.visited
    if found.verdict is Verdict.ILLEGAL and (others := _with_allowances(events)) is not None:
        allowed = find_order(others, initial, limit=limit)
        report.visited += allowed.visited
        if allowed.verdict is Verdict.LEGAL:
            report.allowed += 1
            return
        if allowed.verdict is Verdict.UNDECIDED:
            found = allowed
    if found.verdict is Verdict.LEGAL:
        return
    if found.verdict is Verdict.UNDECIDED:
        report.undecided.append(rollout)
        return
    explained = explain(rollout, own)
    report.violations += [*explained, _no_order(rollout, operations, events, found)]


def _is_unnamed(operation: Operation) -> bool:
    return operation.outcome is Outcome.ERROR and operation.error not in ERRORS[operation.name]


def _events(operations: Sequence[Operation]) -> list[Event]:
    """Return what the search needs to know of the operations, one for each, except for reads that nobody heard of."""
    last_reads = min((op.invoked_at for op in operations if op.worker == FINAL), default=inf)
    return [_event(operation, last_reads) for operation in operations if _matters(operation)]


def _matters(operation: Operation) -> bool:
    return operation.name not in READS or not _has_unknown_effect(operation)


def _has_unknown_effect(operation: Operation) -> bool:
    return operation.outcome is Outcome.UNKNOWN or _is_unnamed(operation)


def _event(operation: Operation, last_reads: float) -> Event:
    name, arguments, start = operation.name, operation.arguments, operation.invoked_at
    if _has_unknown_effect(operation):
        alike = (name, json.dumps(dict(arguments), sort_keys=True))
        return Event(name, arguments, start, is_optional=True, alike=alike)
    value = operation.value
    if name == "mark" and operation.outcome is Outcome.OK:
        if value and value["spilled"]:
            return Event(name, arguments, start, last_reads)
        value = None
    elif name == "resolve" and operation.outcome is Outcome.OK:
        value = value | {"reason": value["reason"] or ""}
    end = inf if operation.returned_at is None else operation.returned_at
    return Event(name, arguments, start, end, (Answer(value, operation.error),))


def _with_allowances(events: Sequence[Event]) -> list[Event] | None:
    """Return the events with what the module's docstring allows, None when nothing is."""
    lenient = [_lenient(event, events) for event in events]
    echoes = [
        Event(
            event.name,
            event.arguments,
            event.start,
            is_optional=True,
            echoes=None if event.is_optional else position,
            alike=("echo", position),
        )
        for position, event in enumerate(events)
        if _may_echo(event, events)
    ]
    return [*lenient, *echoes] if echoes or lenient != list(events) else None


def _overlapping(event: Event, events: Sequence[Event], names: frozenset[str]) -> Iterator[Event]:
    return (
        other
        for other in events
        if other is not event and other.name in names and other.start < event.end and event.start < other.end
    )


def _may_echo(event: Event, events: Sequence[Event]) -> bool:
    if event.name in READS or event.answers in ((Answer(ABSENT),), (Answer(False),)):
        return event.name == "drop" and any(_overlapping(event, events, frozenset({"delete"})))
    if event.name in ("delete", "unstage"):
        return True
    deletes = frozenset({"unstage"} if event.name == "stage" else {"delete"})
    if any(_overlapping(event, events, deletes)):
        return True
    return (
        event.name in ("put", "begin", "freeze")
        and event.answers == (Answer(error=RETIRED_ERROR),)
        and any(_overlapping(event, events, _REMOVALS))
    )


def _lenient(event: Event, events: Sequence[Event]) -> Event:
    answers = _LOOK_LIKE_REMOVAL.get(event.name)
    if answers is None or event.answers != answers[:1]:
        return event
    others = frozenset({"unstage"}) if event.name == "unstage" else _REMOVALS
    if not any(_overlapping(event, events, others)):
        return event
    return Event(event.name, event.arguments, event.start, event.end, answers)


def _no_order(
    rollout: str, operations: Sequence[Operation], events: Sequence[Event], found: Found
) -> Violation:
    mattering: list[Any] = [operation for operation in operations if _matters(operation)]
    stuck = tuple(mattering[position] for position in found.stuck)
    before = [mattering[position] for position in found.order if position < len(mattering)]
    text = "\n  ".join(
        [
            f"no legal order: after {len(before)} of {len(events)} operations none of these fits",
            *(str(operation) for operation in stuck),
            f"into {found.state}",
            "after, among others",
            *(str(operation) for operation in before[-5:]),
        ]
    )
    return Violation("no legal order", rollout, text, stuck)
