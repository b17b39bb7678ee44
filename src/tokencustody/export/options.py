"""What an export is asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from tokencustody.chains.rules import RowRules, one_of
from tokencustody.errors import InvalidRecordError
from tokencustody.export.rewards import Rewards
from tokencustody.records import shown
from tokencustody.states import Format, OnBreak, SharedCalls, Siblings
from tokencustody.txn.selection import RolloutFilter

DEFAULT_ROWS_PER_FILE = 50_000
DEFAULT_MAX_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What an export holds, which a second run on the same folder must repeat.

    `unexported` asks only for rollouts that no export marked at their present snapshot. A file ends with the rollout
    in which it reaches `rows_per_file` rows or `max_bytes` bytes before compression. `shared_calls`, `on_break` and
    `siblings` say how Parquet's rows are made. Raises InvalidRecordError that names an option of no sense.
    """

    format: Format = Format.PARQUET
    run: str | None = None
    rollout_ids: tuple[str, ...] | None = None
    prefix: str | None = None
    before: datetime | None = None
    unexported: bool = False
    include_incomplete: bool = False
    shared_calls: SharedCalls = SharedCalls.FIRST
    on_break: OnBreak = OnBreak.SPLIT
    siblings: Siblings = Siblings.SETTLE
    rows_per_file: int = DEFAULT_ROWS_PER_FILE
    max_bytes: int = DEFAULT_MAX_BYTES

    def __post_init__(self) -> None:
        for name, kind in (
            ("format", Format),
            ("shared_calls", SharedCalls),
            ("on_break", OnBreak),
            ("siblings", Siblings),
        ):
            object.__setattr__(self, name, one_of(kind, getattr(self, name), name))
        for name in ("rows_per_file", "max_bytes"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidRecordError(f"{name} must be an integer of at least 1, not {shown(value)}")
        if self.before is not None and self.before.tzinfo is None:
            raise InvalidRecordError("before must have a time zone")
        if self.format is not Format.PARQUET and self.rules() != RowRules():
            raise InvalidRecordError(
                f"shared_calls, on_break and siblings make rows of parquet, and {self.format} holds every call as it is"
            )
        self.filter()

    def rules(self) -> RowRules:
        """Return how rows are made of calls."""
        return RowRules(self.shared_calls, self.on_break, self.siblings)

    def filter(self) -> RolloutFilter:
        """Return which rollouts are looked at, in whichever state."""
        return RolloutFilter(
            run=self.run,
            prefix=self.prefix,
            rollout_ids=self.rollout_ids,
            before=self.before,
            exported=False if self.unexported else None,
        )

    def document(self, rewards: Rewards) -> dict[str, Any]:
        """Return the options as plain data."""
        plain = asdict(self)
        plain["before"] = self.before and self.before.isoformat()
        plain["rollout_ids"] = self.rollout_ids and sorted(set(self.rollout_ids))
        return {**plain, "rewards_sha256": rewards.sha256}
