"""What stores count in a process, by name: their work, and the trouble they had with it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from tokencustody.database.faults import Cause


class Kind(StrEnum):
    """How a figure behaves."""

    COUNTER = "counter"  # only grows
    GAUGE = "gauge"  # says how it is now


@dataclass(frozen=True, slots=True)
class Stat:
    """One figure. `cause` is set for those that together tell one thing by its cause."""

    name: str
    kind: Kind
    text: str
    cause: str | None = None


STATS = (
    Stat("transactions", Kind.COUNTER, "Transactions that ended."),
    Stat("shared_calls", Kind.COUNTER, "Calls written in a transaction that several calls may share."),
    Stat("shared_transactions", Kind.COUNTER, "Transactions that several calls may share."),
    Stat("retries", Kind.COUNTER, "Tries of a transaction after a fault of the database."),
    *(Stat(f"retries_{cause}", Kind.COUNTER, cause.text, cause) for cause in Cause),
    Stat("unknown_commits", Kind.COUNTER, "Commits whose answer was lost."),
    Stat(
        "unknown_commits_settled", Kind.COUNTER, "Commits whose answer was lost, and which looking settled."
    ),
    Stat("unavailable", Kind.COUNTER, "Transactions given up because the database was not available."),
    Stat("conflicts", Kind.COUNTER, "Calls refused because other bytes were stored under their id."),
    Stat("late_writes_refused", Kind.COUNTER, "Writes refused by a fence."),
    Stat("spilled_marks", Kind.COUNTER, "Marks kept on this host because the database was not available."),
    Stat("replayed_marks", Kind.COUNTER, "Marks brought from this host into the database."),
    Stat("queue_depth", Kind.GAUGE, "Calls that wait for a transaction."),
    Stat("queued_bytes", Kind.GAUGE, "Bytes of the calls that wait for a transaction or are being written."),
    Stat("log_bytes", Kind.GAUGE, "Bytes of the write-ahead log beside a SQLite file."),
)


def none_counted() -> Counter[str]:
    """Return a counter with every name, so that counting never resizes it under another thread's eyes."""
    return Counter({stat.name: 0 for stat in STATS})
