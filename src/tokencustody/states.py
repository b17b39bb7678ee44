"""Every word that a column, an option of a command or an answer may be, where there are only a few."""

from __future__ import annotations

from enum import StrEnum


class FenceState(StrEnum):
    """The state of a rollout's fence."""

    OPEN = "open"
    FROZEN = "frozen"
    RETIRED = "retired"


class Isolation(StrEnum):
    """At which level of PostgreSQL the transactions run. On SQLite each is serializable, whatever is asked for."""

    READ_COMMITTED = "read committed"
    SERIALIZABLE = "serializable"


class VersionEvent(StrEnum):
    """What made a version of a rollout."""

    OPEN = "open"
    CONFLICT = "conflict"
    MARK = "mark"
    REFUSAL = "refusal"
    FREEZE = "freeze"
    DROP = "drop"
    RETIRE = "retire"
    # Behind a freeze: ledger rows, and calls that were staged.
    LATE_LEDGER = "late_ledger"
    LATE_STAGE = "late_stage"


class FailureKind(StrEnum):
    """Why a rollout is incomplete."""

    MARK = "mark"
    CONFLICT = "conflict"
    REFUSAL_CONFLICT = "refusal_conflict"


class AttachmentKind(StrEnum):
    """What an attachment was when it was staged, so that it comes back as the same."""

    BYTES = "bytes"
    TEXT = "text"
    JSON = "json"
    BUFFER = "buffer"


class Role(StrEnum):
    """Who somebody is to a database, besides its owner."""

    WORKER = "worker"
    TRAINER = "trainer"
    AUDITOR = "auditor"


class Format(StrEnum):
    """What the files are."""

    PARQUET = "parquet"
    GYM = "gym"
    CALLS = "calls"


class SharedCalls(StrEnum):
    """Which chains train the calls that several of them begin with."""

    FIRST = "first"
    EVERY = "every"


class OnBreak(StrEnum):
    """What becomes of a rollout where a prompt does not continue the sequence of the call before.

    `split`: a new row begins there. `mask`: the rollout is left out. `first`: only what lies before is exported.
    """

    SPLIT = "split"
    MASK = "mask"
    FIRST = "first"


class Siblings(StrEnum):
    """What several answers to one question are.

    `settle`: retries, of which the agent received one. `keep`: samples that were asked for, each of them trained.
    """

    SETTLE = "settle"
    KEEP = "keep"
