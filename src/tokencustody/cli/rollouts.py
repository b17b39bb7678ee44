"""`tokencustody rollouts` and `tokencustody show`: a look at what a database holds, which changes nothing."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from tokencustody.audit import (
    CallForest,
    CallSummary,
    Intent,
    Reason,
    ReasonKind,
    RolloutDetail,
    RolloutFilter,
    RolloutPage,
    RolloutReader,
    RolloutSummary,
    Totals,
    Version,
    call_forest,
)
from tokencustody.cli.db import Url
from tokencustody.cli.printing import as_json, console, literal, moment, plural, print_json, printable
from tokencustody.sql.tables import FenceState

DEADLINE = 10.0
_ROWS_FOR_A_PERSON = 50
_NAMED_CALLS = 5

_STYLES = {FenceState.OPEN: "cyan", FenceState.FROZEN: "green", FenceState.RETIRED: "dim"}
_NUMBERS = ("calls", "tokens", "version")
_COLUMNS = ("run", "rollout", "state", *_NUMBERS)


def rollouts(
    url: Url,
    run: Annotated[str | None, typer.Option(help="Only this run; without it, all runs.")] = None,
    state: Annotated[FenceState | None, typer.Option(help="Only rollouts in this state.")] = None,
    incomplete: Annotated[
        bool | None, typer.Option("--incomplete/--complete", help="Only rollouts with this verdict.")
    ] = None,
    prefix: Annotated[str | None, typer.Option(help="Only rollouts whose id begins with this.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help=f"The newest N. Default: {_ROWS_FOR_A_PERSON} in the table, all in JSON."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON list with an object for each rollout.")
    ] = False,
) -> None:
    """List rollouts, newest first: state, calls, tokens, version, why incomplete. Changes nothing."""
    wanted = RolloutFilter(run=run, state=state, incomplete=incomplete, prefix=prefix)
    if limit is None and not json:
        limit = _ROWS_FOR_A_PERSON
    page = asyncio.run(_read_rollouts(url, wanted, limit))
    if json:
        print_json([as_json(rollout) for rollout in page.rollouts])
        return
    out = console(folds=True)
    if page.rollouts and out.is_terminal:
        out.print(_narrow_table(page.rollouts), _whys(page.rollouts), sep="\n")
    elif page.rollouts:
        out.print(_rollouts_table(page.rollouts))
    out.print(_footer(page))


def show(
    rollout: Annotated[str, typer.Argument(help="The rollout's id.")],
    url: Url,
    run: Annotated[
        str | None, typer.Option(help="Its run; needed only when several runs have the id.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: summary, calls, intents, versions.")
    ] = False,
) -> None:
    """Show one rollout: its calls as a tree by parent, and what made each version. Changes nothing."""
    detail = asyncio.run(_read_rollout(url, rollout, run))
    if json:
        print_json(as_json(detail))
        return
    out = console(folds=False)
    out.print(_header(detail), _calls_tree(detail), _versions_table(detail.versions), sep="\n")


async def _read_rollouts(url: str, wanted: RolloutFilter, limit: int | None) -> RolloutPage:
    async with RolloutReader(url, deadline=DEADLINE) as reader:
        return await reader.rollouts(wanted, limit=limit)


async def _read_rollout(url: str, rollout_id: str, run: str | None) -> RolloutDetail:
    async with RolloutReader(url, deadline=DEADLINE) as reader:
        return await reader.rollout(rollout_id, run)


def _rollouts_table(found: Sequence[RolloutSummary]) -> Table:
    """Return one line for each rollout with everything about it, for a pipe."""
    table = _table((*_COLUMNS, "opened", "frozen", "retired", "incomplete"))
    for rollout in found:
        times = (moment(rollout.opened_at), moment(rollout.frozen_at), _retirement(rollout))
        table.add_row(*_cells(rollout), *times, _verdict(rollout))
    return table


def _narrow_table(found: Sequence[RolloutSummary]) -> Table:
    """Return a table that fits a terminal: only the time of the last change of state, and not why."""
    table = _table((*_COLUMNS, "since (UTC)", "incomplete"))
    for rollout in found:
        since = rollout.retired_at or rollout.frozen_at or rollout.opened_at
        table.add_row(*_cells(rollout), f"{since.astimezone(UTC):%m-%d %H:%M}", _yes_or_no(rollout))
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
        str(rollout.version),
    ]


def _whys(found: Sequence[RolloutSummary]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for rollout in found:
        if rollout.reasons or rollout.not_yet_captured:
            table.add_row(literal(rollout.run), literal(rollout.rollout_id, "bold"), _why_of(rollout))
    return table


def _footer(page: RolloutPage) -> str:
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
    return f"{plural(counted.calls, 'call')}, {tokens}"


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
    differing = f" (differing: {_fields(reason.differing_fields)})" if reason.differing_fields else ""
    return times + differing


def _fields(differing: str) -> str:
    return printable(differing).replace(",", ", ")


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - _NAMED_CALLS
    return ", ".join(listed[:_NAMED_CALLS]) + (f" and {more:,} more" if more > 0 else "")


def _header(detail: RolloutDetail) -> Group:
    rollout = detail.summary
    facts = Table.grid(padding=(0, 2))
    refused = sum(intent.refusal_code is not None for intent in detail.intents)
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
        ("refused by the engine", [intent for intent in absent if intent.refusal_code is not None]),
        (waiting, [intent for intent in absent if intent.refusal_code is None]),
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
        refused = intent.refusal_code is not None
        marks[intent.model_call_id].append(
            f"refused: {printable(intent.refusal_code or '')}" if refused else "announced"
        )
    for reason in detail.summary.reasons:
        marks[reason.model_call_id].append(f"{reason.kind.replace('_', ' ')}{_evidence_of(reason)}")
    return marks


def _intent_line(intent: Intent) -> Text:
    line = Text.assemble(literal(intent.model_call_id, "bold"))
    line.append(f" · announced {moment(intent.begun_at, 'milliseconds')} by ", "dim")
    line.append_text(literal(intent.written_by, "dim"))
    if intent.refusal_code is not None:
        line.append(" · refused: ").append_text(literal(intent.refusal_code, "red"))
        line.append(f" at {moment(intent.refused_at, 'milliseconds')}", "dim")
    return line


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
        parts.append(f"differing: {_fields(version.differing_fields)}")
    if version.first_payload_sha256 and version.second_payload_sha256:
        parts.append(f"payloads {version.first_payload_sha256[:12]} and {version.second_payload_sha256[:12]}")
    return "; ".join(parts)
