"""Which rollouts an export is about, asked before it makes its folder."""

from __future__ import annotations

from collections import Counter

from sqlalchemy import Connection, func, select

from tokencustody.chains.reasons import Why, why_not
from tokencustody.database.transactions import Database
from tokencustody.errors import ExportError
from tokencustody.export.folder import ExportFolder
from tokencustody.export.options import ExportOptions
from tokencustody.export.report import ExportReport
from tokencustody.export.rewards import Rewards
from tokencustody.states import FenceState, Format
from tokencustody.txn.selection import select_fences


async def check_runs(database: Database, options: ExportOptions, rewards: Rewards) -> None:
    """Refuse several runs where a rollout id alone must name a rollout."""
    statement = select(select_fences(options.filter()).subquery("matching").c.run).distinct().limit(2)

    def look(connection: Connection) -> int:
        return len(connection.execute(statement).all())

    several = await database.read(look) > 1
    if several and options.format is Format.GYM:
        raise ExportError("Gym's files know no runs, and the database has several: choose one with --run")
    if several and not rewards.has_runs:
        raise ExportError(
            "the rewards have no column run, and the database has several runs: add it, or choose one with --run"
        )


async def report_of_nothing(
    database: Database, folder: ExportFolder, options: ExportOptions
) -> ExportReport | None:
    """Return the report of an export that has nothing to write, or None where it has."""
    matching = select_fences(options.filter()).subquery("matching").c
    kinds = select(matching.state, matching.incomplete, func.count()).group_by(
        matching.state, matching.incomplete
    )

    def look(connection: Connection) -> ExportReport | None:
        left_out: Counter[str] = Counter()
        for state, incomplete, rollouts in connection.execute(kinds):
            why = why_not(FenceState(state), bool(incomplete) and not options.include_incomplete)
            if why is None:
                return None
            if why is not Why.RETIRED or options.rollout_ids is not None:
                left_out[why] += rollouts
        named = set(options.rollout_ids or ())
        unknown = sorted(named - set(connection.scalars(select(matching.rollout_id)))) if named else []
        left_out += Counter({Why.UNKNOWN: len(unknown)})
        return ExportReport(folder.path, "", options.format, left_out=left_out, unknown=tuple(unknown))

    return await database.read(look)
