"""What an export says of itself: the errors, the rollouts that it holds, and what it left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from tokencustody.chains.reading import FrozenRollout
from tokencustody.txn.fence import RolloutKey


class ExportError(RuntimeError):
    """An export cannot begin or go on. The message says why and what to do; nothing that was finished is lost."""


class Why(StrEnum):
    """Why a rollout or a call is not in the files; for staged calls the receipt gives further reasons."""

    # The whole rollout
    NOT_FROZEN = "not_frozen"
    RETIRED = "retired"
    UNKNOWN = "unknown"
    INCOMPLETE = "incomplete"
    CORRUPT = "corrupt"
    NO_CALLS = "no_calls"
    GYM_CANNOT_CARRY = "gym_cannot_carry"
    BROKEN = "broken"
    # A call that is no continuation: it begins a row of its own, or is left out
    UNRESOLVED_PARENT = "unresolved_parent"
    PARENT_NOT_RECORDED = "parent_not_recorded"
    PARENT_MISSING = "parent_missing"
    PARENT_CYCLE = "parent_cycle"
    PARENT_LEFT_OUT = "parent_left_out"
    NOT_A_CONTINUATION = "prompt_does_not_begin_with_parent"
    # A call that is in no row
    AMBIGUOUS_RETRY = "ambiguous_retry"
    SUPERSEDED_RETRY = "superseded_retry"
    CONFLICTING_CALL = "conflicting_call"
    NOT_PROVEN = "digest_or_length_mismatch"
    BEYOND_INT64 = "ids_beyond_int64"
    NO_GENERATED_TOKENS = "no_generated_tokens"
    # Calls of the ledger
    STAGED_BESIDE_RECORDS = "staged_beside_records"
    NOT_ON_TERMINAL_CHAIN = "not_on_terminal_chain"
    ONLY_STAGED = "only_staged"
    STAGED_CALL_MISSING = "staged_call_missing"


# The conversation lost nothing by these.
HARMLESS = {Why.SUPERSEDED_RETRY, Why.NO_GENERATED_TOKENS}

# What a person can do about each, in one line.
REMEDIES: dict[str, str] = {
    Why.NOT_FROZEN: "freeze it, then export again with --unexported",
    Why.RETIRED: "its records are gone; look for the export that holds it in the view audit_exports",
    Why.UNKNOWN: "look for the name with tokencustody rollouts",
    Why.INCOMPLETE: "tokencustody show says what it lost; --include-incomplete exports the rest",
    Why.CORRUPT: "tokencustody verify names what is damaged; restore it from a backup",
    Why.NO_CALLS: "nothing was ever written to it; tokencustody retire lets it go",
    Why.GYM_CANNOT_CARRY: "export it with --format calls",
    Why.BROKEN: "--on-break split makes a row of each part",
    Why.UNRESOLVED_PARENT: "--on-break split makes a row of the call alone",
    Why.PARENT_NOT_RECORDED: "stamp_lineage records the parent; --on-break split makes a row of the call alone",
    Why.PARENT_MISSING: "its parent was never stored: a full prompt is a row by itself, a delta cannot be read",
    Why.PARENT_CYCLE: "tokencustody verify names the circle; a delta in it cannot be read",
    Why.PARENT_LEFT_OUT: "see why the call above it was left out",
    Why.NOT_A_CONTINUATION: "--on-break split begins a new row there",
    Why.AMBIGUOUS_RETRY: "if one prompt was sampled several times on purpose, --siblings keep trains each answer",
    Why.SUPERSEDED_RETRY: "nothing: the agent went on from another answer to the same request; --format calls holds it",
    Why.CONFLICTING_CALL: "two writers used its id; tokencustody show names them",
    Why.NOT_PROVEN: "its writer stamped another sequence; tokencustody verify names the call",
    Why.BEYOND_INT64: "export it with --format calls",
    Why.NO_GENERATED_TOKENS: "nothing: no token was sampled",
    Why.STAGED_BESIDE_RECORDS: "nothing, if the complete records are all that is to be trained",
    Why.NOT_ON_TERMINAL_CHAIN: "nothing, if the chain that ends in the terminal call is the one",
    Why.ONLY_STAGED: "Gym's files hold its row of the ledger; --format calls holds its tokens",
    Why.STAGED_CALL_MISSING: "the worker never staged it, or it was deleted; --format calls holds the others",
}
_ANY_OTHER_REMEDY = "the receipt or the ledger says so; --format calls holds what was captured"


def remedy(reason: str) -> str:
    """Return what a person can do about what was left out for a reason."""
    return REMEDIES.get(reason, _ANY_OTHER_REMEDY)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A rollout, or a call of it, that is not in the files, and why. `detail` has no token in it."""

    run: str
    rollout_id: str
    reason: str
    model_call_id: str = ""
    detail: str = ""

    @classmethod
    def of(cls, key: RolloutKey, reason: str, model_call_id: str = "", detail: str = "") -> LeftOut:
        """Return what is said of a call of the rollout, or of all of it."""
        return cls(key.run, key.rollout_id, reason, model_call_id, detail)


@dataclass(frozen=True, slots=True)
class Shape:
    """How a rollout comes apart into rows, and how much of it is in the files.

    `breaks` counts the segments that do not begin with a root, by reason. `calls_left_out` are in no file. `whole`: the
    rollout lost nothing, for all that it left out are retries that the agent never received, and calls that sampled
    nothing. `is_held`: every token that was sampled in its complete records, and in the staged calls that its ledger
    names, is in the files.
    """

    segments: int
    breaks: dict[str, int]
    calls_left_out: int
    whole: bool
    is_held: bool


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
