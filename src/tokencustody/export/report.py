"""What an export says of itself: the errors, the rollouts that it holds, and what it left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from tokencustody.chains.reading import FrozenRollout
from tokencustody.chains.reasons import LeftOut, Shape, Why
from tokencustody.errors import ExportError
from tokencustody.txn.fence import RolloutKey


@dataclass(frozen=True, slots=True)
class Exported:
    """A rollout in the files, exactly at that snapshot and version.

    `segments`, `breaks`, `calls_left_out`, `whole` and `is_held` as in `Shape`. `not_finite_log_probs` are tokens to
    train whose log probability is a NaN or an infinity, `routes_left_out` calls whose routed experts were too large.
    """

    run: str
    rollout_id: str
    snapshot_id: str
    version: int
    incomplete: bool
    source: str
    calls: int
    rows: int
    tokens: int
    trained_tokens: int
    segments: int
    breaks: dict[str, int]
    calls_left_out: int
    whole: bool
    is_held: bool
    not_finite_log_probs: int = 0
    routes_left_out: int = 0

    @classmethod
    def of(cls, rollout: FrozenRollout, shape: Shape, **counts: Any) -> Exported:
        """Return what the files hold of a rollout; `counts` are the fields that count."""
        return cls(
            run=rollout.key.run,
            rollout_id=rollout.key.rollout_id,
            snapshot_id=rollout.snapshot_id,
            version=rollout.version,
            incomplete=rollout.incomplete,
            source="ledger" if rollout.is_staged_only else "records",
            **asdict(shape),
            **counts,
        )

    @property
    def key(self) -> RolloutKey:
        """The rollout."""
        return RolloutKey(self.run, self.rollout_id)


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A finished file, by its name in the folder; `sha256` is that of its bytes."""

    name: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Part:
    """What was finished together: files, the rollouts that they hold, what was left out beside them.

    `after` is the (run, rollout id) up to which all rollouts are dealt with.
    """

    files: tuple[WrittenFile, ...]
    rollouts: tuple[Exported, ...]
    left_out: tuple[LeftOut, ...]
    after: tuple[str, str]

    @classmethod
    def read(cls, document: dict[str, Any]) -> Part:
        """Return the part that `dataclasses.asdict` made a document of.

        Raises ExportError for one of another version of this library.
        """
        try:
            rollouts = tuple(Exported(**each) for each in document["rollouts"])
        except TypeError:
            raise ExportError(
                "the export was begun by another version of tokencustody; finish it with that, or name a new folder"
            ) from None
        return cls(
            tuple(WrittenFile(**each) for each in document["files"]),
            rollouts,
            tuple(LeftOut(**each) for each in document["left_out"]),
            (document["after"][0], document["after"][1]),
        )


class WhyKept(StrEnum):
    """Why a rollout that was exported is not retired, or is no longer what the files hold."""

    DELETED = "deleted_since"
    MADE_ANEW = "made_anew_since"
    CHANGED = "changed_since"
    RETIRED = "retired_since"
    EXPORTED = "exported_since"
    PARTLY_EXPORTED = "partly_exported"
    DAMAGED_MARK = "damaged_mark"

    @property
    def is_marked(self) -> bool:
        """Whether the rollout is marked as exported all the same: it is still there, and nobody else's."""
        return self in (WhyKept.CHANGED, WhyKept.PARTLY_EXPORTED)


@dataclass(frozen=True, slots=True)
class Kept:
    """An exported rollout that a person should look at, and why. `detail` has no token in it."""

    run: str
    rollout_id: str
    why: WhyKept
    detail: str = ""


@dataclass(slots=True)
class ExportReport:
    """What an export did. `left_out` counts by reason; the manifest lists each. `unknown` are ids without a rollout.

    Without an `export_id` nothing was written, for there was nothing to export, or, when `all_left_out`, no call of
    what there was can be; `listed` then says of each why. `breaks` counts by reason where rows begin that continue no
    other call, `not_finite_log_probs` the tokens to train whose log probability is a NaN or an infinity.

    `marked` and `retired` count the rollouts that are so now, through this call or an earlier one on the same folder.
    """

    destination: Path
    export_id: str
    format: str
    already_finished: bool = False
    resumed: bool = False
    files: int = 0
    bytes: int = 0
    rollouts: int = 0
    rows: int = 0
    calls: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    calls_left_out: int = 0
    not_finite_log_probs: int = 0
    routes_left_out: int = 0
    breaks: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    all_left_out: bool = False
    listed: tuple[LeftOut, ...] = ()
    rewards: dict[str, Any] | None = None
    manifest_sha256: str = ""
    unknown: tuple[str, ...] = ()
    marked: int = 0
    retired: int = 0
    kept: list[Kept] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing asks for a person.

        No rollout is corrupt or unknown, changed since, or stays unwanted, and not everything was left out.
        """
        return not (
            self.kept or self.all_left_out or self.left_out[Why.CORRUPT] or self.left_out[Why.UNKNOWN]
        )
