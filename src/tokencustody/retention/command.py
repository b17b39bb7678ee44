"""`tokencustody retire`, `delete` and `gc`: letting go of what nobody needs any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from tokencustody.retention.removal import Removal, ask, ask_name, told, told_of_run
from tokencustody.schema.command import Url
from tokencustody.states import FenceState
from tokencustody.terminal.ages import AGE_HELP, moment_of
from tokencustody.terminal.printing import as_json, plural

if TYPE_CHECKING:
    from tokencustody.retention.retention import Extent, Retention
    from tokencustody.txn.selection import RolloutFilter

# How many ids go into one statement, of which the databases take about 32,766 parameters.
_NAMES_AT_ONCE = 1000
_SAY_WHICH = (
    "say which rollouts: name them, or give --run, --state, --older-than, --incomplete, --exported, "
    "--partly-exported or --prefix"
)


class Retirable(StrEnum):
    """The states in which a rollout can be retired."""

    OPEN = "open"
    FROZEN = "frozen"


Rollouts = Annotated[list[str] | None, typer.Argument(metavar="ROLLOUT...", help="Only these rollouts.")]
Run = Annotated[str | None, typer.Option(help="Only this run; without it, all runs.")]
OlderThan = Annotated[
    str | None,
    typer.Option(
        metavar="AGE",
        help="Only rollouts that came into their present state (opened, frozen, retired) longer ago than this: "
        f"{AGE_HELP}.",
    ),
]
Incomplete = Annotated[
    bool | None, typer.Option("--incomplete/--complete", help="Only rollouts with this verdict.")
]
Exported = Annotated[
    bool | None,
    typer.Option(
        "--exported/--not-exported",
        help="Only rollouts of which one export holds every sampled token at their present snapshot, or which none "
        "marked at it.",
    ),
]
PartlyExported = Annotated[
    bool,
    typer.Option(
        "--partly-exported",
        help="Only rollouts that an export marked at their present snapshot, but of which a sampled token may be in no "
        "file: calls were left out, or the mark is older than what says so.",
    ),
]
Prefix = Annotated[str | None, typer.Option(help="Only rollouts whose id begins with this.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def retire(
    url: Url,
    rollout: Rollouts = None,
    run: Run = None,
    state: Annotated[
        Retirable | None, typer.Option(help="Rollouts in this state; unless given, frozen ones.")
    ] = None,
    older_than: OlderThan = None,
    incomplete: Incomplete = None,
    exported: Exported = None,
    partly_exported: PartlyExported = False,
    prefix: Prefix = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Retire rollouts: their records go, their fences and histories stay, and no write ever opens them again.

    Asks first, and says how much would go. Each rollout goes in one transaction, however large it is, and only if it
    is still what was asked for: one that was frozen, marked or exported meanwhile is left. Run it again to go on where
    it was interrupted. Staged calls stay: see gc. Exit code 1 if a rollout that was asked for is left.
    """
    if (
        not (rollout or partly_exported)
        and (run, state, older_than, incomplete, exported, prefix) == (None,) * 6
    ):
        raise typer.BadParameter(_SAY_WHICH)
    wanted = _filters(
        rollout, [state or Retirable.FROZEN], run, older_than, incomplete, exported, partly_exported, prefix
    )
    _remove(Removal("retire", "retired", url, json), wanted, rollout, run, dry_run=dry_run, yes=yes)


def delete(
    url: Url,
    rollout: Rollouts = None,
    run: Run = None,
    state: Annotated[
        FenceState | None, typer.Option(help="Rollouts in this state; unless given, frozen and retired ones.")
    ] = None,
    older_than: OlderThan = None,
    incomplete: Incomplete = None,
    exported: Exported = None,
    partly_exported: PartlyExported = False,
    prefix: Prefix = None,
    confirm: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="The run's name again, where the whole run goes: do not ask for it."
        ),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Delete rollouts with their fences, histories and export marks: their ids read as unused after.

    A write that comes late then opens a rollout anew; to keep it out, retire. With --run alone the whole run goes: its
    rollouts in every state and its staged calls; its name must be typed, or given by --confirm. Asks first; otherwise
    like retire.
    """
    removal = Removal("delete", "deleted", url, json)
    if not (rollout or partly_exported) and (state, older_than, incomplete, exported, prefix) == (None,) * 5:
        if run is None:
            raise typer.BadParameter(_SAY_WHICH)
        _delete_run(removal, run, confirm, dry_run=dry_run)
        return
    if confirm is not None:
        raise typer.BadParameter("it is for a whole run: give --run and nothing else", param_hint="--confirm")
    # In this order, so that a rollout which is retired meanwhile is not met twice.
    states = [state] if state else [FenceState.RETIRED, FenceState.FROZEN]
    wanted = _filters(rollout, states, run, older_than, incomplete, exported, partly_exported, prefix)
    _remove(removal, wanted, rollout, run, dry_run=dry_run, yes=yes)


def gc(
    url: Url,
    staged_older_than: Annotated[
        str | None,
        typer.Option(
            metavar="AGE",
            help="Remove staged calls that nobody will read, with their attachments, staged longer ago than this "
            f"({AGE_HELP}): no ledger names them, and their rollout is frozen, retired or has no fence. Choose it "
            "longer than a worker may take from staging a call to having it recorded. A call stays for as long as one "
            "that stays continues it.",
        ),
    ] = None,
    fences_older_than: Annotated[
        str | None,
        typer.Option(
            metavar="AGE",
            help="Remove the fences of rollouts retired longer ago than this, with their histories and export marks. "
            "A late write of such an id would then open the rollout anew: choose it longer than any writer lives.",
        ),
    ] = None,
    run: Run = None,
    vacuum: Annotated[
        bool,
        typer.Option(
            "--vacuum",
            help="Then give the free space of a SQLite file back to the file system; nobody else may be in the file. "
            "PostgreSQL does that by itself (autovacuum).",
        ),
    ] = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Collect garbage: staged calls that nobody will read, and fences of rollouts that were retired long ago.

    Does not ask, for nothing that a rollout needs goes. Each rollout goes in one transaction; run it again to go on
    where it was interrupted. Exit code 1 if a rollout that was asked for is left.
    """
    from tokencustody.database.url import parse_url
    from tokencustody.retention.vacuum import vacuum as shrink
    from tokencustody.txn.selection import RolloutFilter

    if staged_older_than is None and fences_older_than is None and not vacuum:
        raise typer.BadParameter(
            "say what to collect: give --staged-older-than, --fences-older-than or --vacuum"
        )
    if vacuum and not parse_url(url).is_sqlite:
        raise typer.BadParameter("is for SQLite: PostgreSQL's autovacuum does it", param_hint="--vacuum")
    staged = None if staged_older_than is None else moment_of(staged_older_than, "--staged-older-than")
    fenced = None if fences_older_than is None else moment_of(fences_older_than, "--fences-older-than")
    retired = RolloutFilter(run=run, state=FenceState.RETIRED, before=fenced)
    removal = Removal("collect", "collected", url, json, noun="fence")

    async def count(retention: Retention) -> dict[str, int]:
        if not dry_run:
            return {}
        orphans = 0 if staged is None else await retention.orphans(staged, run)
        fences = 0 if fenced is None else (await retention.extent(retired)).rollouts
        return {"staged_calls": orphans, "fences": fences}

    async def collect(retention: Retention) -> None:
        if staged is not None:
            await retention.collect(staged, removal.staged, run)
        if fenced is not None:
            await retention.delete(retired, removal.settled)

    found = removal.look(run, count)
    if dry_run:
        removal.say(
            found, f"{plural(found['staged_calls'], 'staged call')} and {plural(found['fences'], 'fence')}"
        )
        return
    removal.run(collect, None)
    removal.done(lambda: shrink(url) if vacuum else None)


def _remove(
    removal: Removal,
    wanted: Sequence[RolloutFilter],
    names: Sequence[str] | None,
    run: str | None,
    *,
    dry_run: bool,
    yes: bool,
) -> None:
    from tokencustody.retention.retention import merged

    async def look(retention: Retention) -> tuple[Extent, int]:
        """Return what would go, and how many stay only because they are exported in part."""
        if dry_run and names:
            going = [key.rollout_id for each in wanted for key in await retention.states(each)]
            removal.missed = await _missed(retention, names, run, removal.verb, set(going))
        beside = [replace(each, exported=None, partly_exported=True) for each in wanted if each.exported]
        extent, stay = [merged([await retention.extent(each) for each in some]) for some in (wanted, beside)]
        return extent, stay.rollouts

    async def work(retention: Retention) -> None:
        remove = retention.retire if removal.verb == "retire" else retention.delete
        for each in wanted:
            await remove(each, removal.settled)
        left = {settled.key.rollout_id for settled in removal.left}
        removal.missed = await _missed(retention, names or (), run, removal.verb, left)

    extent, stay = removal.look(run, look)
    if stay:
        told_beside = f"{plural(stay, 'rollout')} left, exported in part: --partly-exported asks for such"
        typer.echo(told_beside, err=True)
    if names and run is None and len(extent.runs) > 1:
        raise typer.BadParameter(
            f"the ids are in the runs {', '.join(extent.runs)}: name one", param_hint="--run"
        )
    amount = told(extent)
    if dry_run:
        removal.say(as_json(extent), amount)
        return
    if extent.rollouts and not yes:
        ask(f"{removal.verb.capitalize()} {amount} in {removal.shown}?", "--yes")
    removal.run(work, extent.rollouts)
    removal.done()


def _delete_run(removal: Removal, run: str, confirm: str | None, *, dry_run: bool) -> None:
    if confirm is not None and confirm != run:
        raise typer.BadParameter(f"{confirm!r} is not the run that would go", param_hint="--confirm")
    summary = removal.look(run, lambda retention: retention.run_summary(run))
    amount = f"run {run}: {told_of_run(summary)}"
    if dry_run:
        removal.say(as_json(summary), amount)
        return
    if summary.rollouts + summary.staged_calls and confirm is None:
        ask_name(f"This deletes {amount}, in {removal.shown}. Type the run's name to go on", run)

    async def work(retention: Retention) -> None:
        await retention.delete_run(run, removal.settled, removal.staged)
        left = await retention.run_summary(run)
        if left.rollouts + left.staged_calls:
            removal.missed[run] = f"{told_of_run(left)} are in it; whoever writes to it goes on"

    removal.run(work, summary.rollouts)
    removal.done()


def _filters(
    names: Sequence[str] | None,
    states: Sequence[str],
    run: str | None,
    older_than: str | None,
    incomplete: bool | None,
    exported: bool | None,
    partly_exported: bool,
    prefix: str | None,
) -> list[RolloutFilter]:
    from tokencustody.txn.selection import RolloutFilter

    if partly_exported and exported is not None:
        raise typer.BadParameter(
            "no rollout is both that and what --exported or --not-exported asks for",
            param_hint="--partly-exported",
        )
    before = None if older_than is None else moment_of(older_than, "--older-than")
    if not names:
        # What comes to match after a person was asked is not what the answer was about.
        before = before or datetime.now(UTC)
    return [
        RolloutFilter(
            run=run,
            state=FenceState(state),
            incomplete=incomplete,
            prefix=prefix,
            rollout_ids=some,
            before=before,
            exported=exported,
            partly_exported=partly_exported,
        )
        for state in states
        for some in _some_at_once(names)
    ]


def _some_at_once(names: Sequence[str] | None) -> list[tuple[str, ...] | None]:
    if not names:
        return [None]
    each_once = tuple(dict.fromkeys(names))
    return [each_once[at : at + _NAMES_AT_ONCE] for at in range(0, len(each_once), _NAMES_AT_ONCE)]


async def _missed(
    retention: Retention, names: Sequence[str], run: str | None, verb: str, settled: set[str]
) -> dict[str, str]:
    """Return which of the named rollouts, besides those that are `settled`, are not retired or deleted, and why."""
    from tokencustody.txn.selection import RolloutFilter

    missed = {}
    for some in _some_at_once(names) if names else ():
        found = await retention.states(RolloutFilter(run=run, rollout_ids=some))
        present = {key.rollout_id: state for key, state in found.items()}
        for name in (name for name in some or () if name not in settled):
            match present.get(name):
                case None if verb == "retire":
                    missed[name] = "there is no such rollout"
                case None:
                    pass
                case FenceState.RETIRED if verb == "retire":
                    pass
                case FenceState.OPEN:
                    missed[name] = "it is open, and such a one goes only by --state open"
                case state:
                    missed[name] = f"it is {state}, and something else was asked for"
    return missed
