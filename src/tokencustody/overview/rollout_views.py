"""How `tokencustody rollouts` and `tokencustody show` print what was read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from tokencustody.overview.forest import CallForest, call_forest
from tokencustody.overview.summaries import (
    CallSummary,
    Intent,
    LedgerCall,
    LedgerFailure,
    Reason,
    ReasonKind,
    RolloutDetail,
    RolloutPage,
    RolloutSummary,
    Totals,
    Version,
)
from tokencustody.states import FenceState
from tokencustody.terminal.printing import literal, moment, plural, printable

_NAMED_CALLS = 5
_STYLES = {FenceState.OPEN: "cyan", FenceState.FROZEN: "green", FenceState.RETIRED: "dim"}
_NUMBERS = ("calls", "tokens", "ledger", "version", "prev_len", "cum_len", "weights")
_COLUMNS = ("run", "rollout", "state", "calls", "tokens", "ledger", "version")


def rollouts_table(found: Sequence[RolloutSummary]) -> Table:
    """Return one line for each rollout with everything about it, for a pipe."""
    table = _table((*_COLUMNS, "opened", "frozen", "retired", "incomplete"))
    for rollout in found:
        times = (moment(rollout.opened_at), moment(rollout.frozen_at), _retirement(rollout))
        table.add_row(*_cells(rollout), *times, _verdict(rollout))
    return table


def narrow_table(found: Sequence[RolloutSummary]) -> Table:
    """Return a table that fits a terminal: only the time of the last change of state, and not why.

    Without a call in any ledger there is no column for them; failures are counted after a plus sign.
    """
    ledger = any(rollout.ledger_calls or rollout.ledger_failures for rollout in found)
    columns = [name for name in _COLUMNS if ledger or name != "ledger"]
    table = _table((*columns, "since (UTC)", "incomplete"))
    for rollout in found:
        cells = dict(zip(_COLUMNS, _cells(rollout), strict=True))
        failures = f" + {rollout.ledger_failures:,}" if rollout.ledger_failures else ""
        cells["ledger"] = f"{rollout.ledger_calls:,}{failures}"
        since = rollout.retired_at or rollout.frozen_at or rollout.opened_at
        table.add_row(
            *(cells[name] for name in columns), f"{since.astimezone(UTC):%m-%d %H:%M}", _yes_or_no(rollout)
        )
    return table


def _table(columns: Iterable[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, overflow="fold")
        table.columns[-1].justify = "right" if name in _NUMBERS else "left"
        # The ids give way where a terminal is too narrow; nothing is ever cut.
        table.columns[-1].no_wrap = name not in ("run", "rollout")
    return table


def _cells(rollout: RolloutSummary) -> list[Text | str]:
    return [
        literal(rollout.run),
        literal(rollout.rollout_id, "bold"),
        Text(rollout.state, _STYLES[rollout.state]),
        f"{rollout.calls:,}",
        f"{rollout.prompt_tokens:,} + {rollout.generated_tokens:,}",
        f"{rollout.ledger_calls:,}"
        + (f" + {rollout.ledger_failures:,} failed" if rollout.ledger_failures else ""),
        str(rollout.version),
    ]


def whys(found: Sequence[RolloutSummary]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for rollout in found:
        if rollout.reasons or rollout.not_yet_captured or rollout.parents_not_recorded:
            table.add_row(literal(rollout.run), literal(rollout.rollout_id, "bold"), _why_of(rollout))
    return table


def footer(page: RolloutPage) -> str:
    totals = page.totals
    if not totals.rollouts:
        return "no rollout matches"
    states = ", ".join(
        f"{getattr(totals, state):,} {state}" for state in FenceState if getattr(totals, state)
    )
    hidden = totals.rollouts - len(page.rollouts)
    return (
        f"{plural(totals.rollouts, 'rollout')} ({states}; {totals.incomplete:,} incomplete), {_sizes(totals)}"
        + (f"; the newest {len(page.rollouts):,} are shown, see --limit" if hidden else "")
    )


def _sizes(counted: RolloutSummary | Totals) -> str:
    tokens = f"{counted.prompt_tokens:,} prompt + {counted.generated_tokens:,} generated tokens"
    ledger = ""
    if counted.ledger_calls or counted.ledger_failures:
        ledger = f"; in the ledger {plural(counted.ledger_calls, 'call')}"
        ledger += f" and {plural(counted.ledger_failures, 'failure')}" if counted.ledger_failures else ""
    stray = (
        f" ({counted.parents_not_recorded:,} without a recorded parent)"
        if counted.parents_not_recorded
        else ""
    )
    return f"{plural(counted.calls, 'call')}{stray}, {tokens}{ledger}"


def _retirement(rollout: RolloutSummary) -> str:
    return f"{moment(rollout.retired_at)} by {rollout.retired_by}" if rollout.retired_by else ""


def _verdict(rollout: RolloutSummary) -> Text:
    why = _why_of(rollout)
    return _yes_or_no(rollout).append(": " if why else "", "").append_text(why)


def _yes_or_no(rollout: RolloutSummary) -> Text:
    return Text("yes", "bold red") if rollout.incomplete else Text("no")


def _why_of(rollout: RolloutSummary) -> Text:
    why = Text(_why(rollout.reasons), "red")
    if rollout.not_yet_captured:
        pending = plural(len(rollout.not_yet_captured), "call")
        why.append("; " if rollout.reasons else "")
        why.append(f"{pending} not yet captured: {_some(map(printable, rollout.not_yet_captured))}", "yellow")
    if rollout.parents_not_recorded:
        why.append("; " if why else "")
        why.append(f"{plural(rollout.parents_not_recorded, 'call')} without a recorded parent", "yellow")
    return why


def _why(reasons: Sequence[Reason]) -> str:
    parts = []
    for kind, one, several in (
        (ReasonKind.MARK, "1 mark: ", "marks: "),
        (ReasonKind.CONFLICT, "conflict on ", "conflicts: "),
        (ReasonKind.REFUSAL_CONFLICT, "refusal conflict on ", "refusal conflicts: "),
        (ReasonKind.DANGLING_INTENT, "1 dangling intent: ", "dangling intents: "),
    ):
        of_kind = [reason for reason in reasons if reason.kind is kind]
        times = sum(reason.times for reason in of_kind)
        if of_kind == [Reason(ReasonKind.DANGLING_INTENT, "")]:
            parts.append("dangling intents, removed with the records")
        elif of_kind:
            parts.append((one if times == 1 else f"{times:,} {several}") + _some(map(_reason, of_kind)))
    return "; ".join(parts)


def _reason(reason: Reason) -> str:
    return (printable(reason.model_call_id) or "(unnamed)") + _evidence_of(reason)


def _evidence_of(reason: Reason) -> str:
    times = f" {reason.times:,} times" if reason.times > 1 else ""
    if not reason.differing_fields:
        return times
    what = "" if reason.kind is ReasonKind.MARK else "differing: "
    return f"{times} ({what}{_fields(reason.differing_fields)})"


def _fields(differing: str) -> str:
    return printable(differing).replace(",", ", ")


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - _NAMED_CALLS
    return ", ".join(listed[:_NAMED_CALLS]) + (f" and {more:,} more" if more > 0 else "")


def shown(detail: RolloutDetail) -> list[RenderableType]:
    """Return the parts that tell all of one rollout."""
    parts: list[RenderableType] = [_header(detail), _calls_tree(detail)]
    if detail.ledger_calls:
        parts += [Text("in the ledger, in commit order", "dim"), _ledger_table(detail.ledger_calls)]
    if detail.ledger_failures:
        parts += [Text("not captured, says the ledger", "dim"), _failures_table(detail.ledger_failures)]
    return [*parts, _versions_table(detail.versions)]


def _header(detail: RolloutDetail) -> Group:
    rollout = detail.summary
    facts = Table.grid(padding=(0, 2))
    refused = sum(intent.refused_at is not None for intent in detail.intents)
    for name, value in (
        ("state", Text(rollout.state, _STYLES[rollout.state])),
        ("incomplete", _verdict(rollout)),
        ("version", Text(str(rollout.version))),
        ("snapshot", literal(rollout.snapshot_id or "none yet")),
        ("stored", Text(_sizes(rollout) + (f"; {plural(refused, 'refusal')}" if refused else ""))),
        ("opened", Text(moment(rollout.opened_at))),
        ("frozen", Text(moment(rollout.frozen_at))),
        ("retired", Text(_retirement(rollout))),
    ):
        if value.plain:
            facts.add_row(Text(name, "dim"), value)
    title = Text.assemble(
        "rollout ", literal(rollout.rollout_id, "bold"), " of run ", literal(rollout.run, "bold")
    )
    return Group(title, facts)


def _calls_tree(detail: RolloutDetail) -> Tree:
    """Return a tree that branches where calls do; an only child stands below its parent, not deeper."""
    forest = call_forest(detail.calls)
    marks = _marks(detail)
    tree = Tree(Text(_calls_title(detail), "dim"))
    _grow(tree, forest.roots, forest, marks)
    for parent, calls in forest.orphans.items():
        branch = tree.add(
            Text.assemble(("the parent is not in this rollout: ", "bold yellow"), literal(parent))
        )
        _grow(branch, calls, forest, marks)
    for top in forest.loops:
        cycle = ("the parents go in a circle; this one names ", "bold yellow")
        branch = tree.add(Text.assemble(cycle, literal(top.parent_call_id or "")))
        _grow(branch, [top], forest, marks)
    absent = [intent for intent in detail.intents if not intent.stored]
    waiting = (
        "announced, not yet captured"
        if detail.summary.state is FenceState.OPEN
        else "announced, neither stored nor refused"
    )
    for title, intents in (
        ("refused by the engine", [intent for intent in absent if intent.refused_at is not None]),
        (waiting, [intent for intent in absent if intent.refused_at is None]),
    ):
        if intents:
            branch = tree.add(Text(title, "bold yellow"))
            for intent in intents:
                branch.add(_intent_line(intent))
    return tree


def _calls_title(detail: RolloutDetail) -> str:
    if detail.calls or detail.intents:
        return "calls, in commit order; ↳ continues the call above"
    if detail.summary.state is FenceState.RETIRED:
        return "no calls: retirement removed them"
    if detail.ledger_calls or detail.ledger_failures:
        return "no complete records"
    return "no calls"


def _grow(
    top: Tree, calls: Sequence[CallSummary], forest: CallForest, marks: Mapping[str, Sequence[str]]
) -> None:
    # A stack, for a rollout may be deeper than Python recurses.
    waiting = [(top, call) for call in reversed(calls)]
    while waiting:
        branch, call = waiting.pop()
        lines = [_call_line(call, marks.get(call.model_call_id, ()))]
        while len(below := forest.children.get(call.model_call_id, ())) == 1:
            call = below[0]
            lines.append(Text("↳ ").append_text(_call_line(call, marks.get(call.model_call_id, ()))))
        grown = branch.add(Group(*lines))
        waiting.extend((grown, child) for child in reversed(below))


def _call_line(call: CallSummary, marks: Sequence[str]) -> Text:
    line = Text.assemble(literal(call.model_call_id, "bold"), " · ", _resolution(call))
    prompt = "prompt after its parent" if call.prompt_is_delta else "prompt"
    total = "" if call.cum_len is None else f", cum_len {call.cum_len:,}"
    line.append(f" · {call.prompt_len:,} {prompt} + {call.generation_len:,} generated{total}")
    if call.model:
        line.append(" · model ").append_text(literal(call.model))
    if call.response_id is not None:
        line.append(" · response ").append_text(literal(call.response_id))
    line.append(f" · committed {moment(call.committed_at, 'milliseconds')} by ", "dim").append_text(
        literal(call.written_by, "dim")
    )
    for mark in marks:
        line.append(" · ").append(mark, "dim" if mark == "announced" else "red")
    return line


def _resolution(call: CallSummary) -> Text:
    match call.parent_resolution:
        case None:
            return Text("parent not decided", "yellow")
        case "unresolved":
            return Text("unresolved: ", "yellow").append_text(
                literal(call.parent_resolution_reason or "no reason given")
            )
        case resolution:
            return literal(resolution, "green")


def _marks(detail: RolloutDetail) -> dict[str, list[str]]:
    """Return, for each call id, what is on record about the call besides its entry."""
    marks = defaultdict(list)
    for intent in detail.intents:
        refused = intent.refused_at is not None
        marks[intent.model_call_id].append(
            f"refused: {printable(intent.refusal_code or 'without a code')}" if refused else "announced"
        )
    for reason in detail.summary.reasons:
        marks[reason.model_call_id].append(f"{reason.kind.replace('_', ' ')}{_evidence_of(reason)}")
    return marks


def _intent_line(intent: Intent) -> Text:
    line = Text.assemble(literal(intent.model_call_id, "bold"))
    line.append(f" · announced {moment(intent.begun_at, 'milliseconds')} by ", "dim")
    line.append_text(literal(intent.written_by, "dim"))
    if intent.refused_at is not None:
        line.append(" · refused: ").append_text(literal(intent.refusal_code or "without a code", "red"))
        line.append(f" at {moment(intent.refused_at, 'milliseconds')}", "dim")
    return line


def _ledger_table(calls: Sequence[LedgerCall]) -> Table:
    columns = ("call", "parent", "mode", "prev_len", "cum_len", "weights", "staging key", "response")
    table = _table((*columns, "committed", "by", "missing"))
    for call in calls:
        missing = [("response id", call.response_id), ("chain hash", call.chain_hash)]
        table.add_row(
            literal(call.model_call_id, "bold"),
            literal(call.parent_call_id or ""),
            call.mode,
            f"{call.prev_len:,}",
            f"{call.cum_len:,}",
            str(call.weight_version),
            literal(call.staging_key),
            literal(call.response_id or ""),
            moment(call.committed_at, "milliseconds"),
            literal(call.written_by),
            Text(" and ".join(name for name, value in missing if not value), "red"),
        )
    return table


def _failures_table(failures: Sequence[LedgerFailure]) -> Table:
    table = _table(("call", "reason", "recorded", "by"))
    for failure in failures:
        table.add_row(
            literal(failure.model_call_id, "bold"),
            literal(failure.reason, "red"),
            moment(failure.recorded_at, "milliseconds"),
            literal(failure.written_by),
        )
    return table


def _versions_table(versions: Sequence[Version]) -> Table:
    table = _table(("version", "event", "call", "at", "by", "evidence"))
    for version in versions:
        table.add_row(
            str(version.version),
            (version.failure_kind or version.event).replace("_", " "),
            literal(version.model_call_id),
            moment(version.recorded_at, "milliseconds"),
            literal(version.written_by),
            _evidence(version),
        )
    return table


def _evidence(version: Version) -> str:
    parts = []
    if version.differing_fields:
        what = "" if version.failure_kind == ReasonKind.MARK else "differing: "
        parts.append(f"{what}{_fields(version.differing_fields)}")
    if version.first_payload_sha256 and version.second_payload_sha256:
        parts.append(f"payloads {version.first_payload_sha256[:12]} and {version.second_payload_sha256[:12]}")
    return "; ".join(parts)
