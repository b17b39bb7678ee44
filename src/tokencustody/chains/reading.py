"""One rollout as rows are made of it, read in one transaction that writes nothing."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from tokencustody.codec.chains import prove_calls
from tokencustody.codec.proven import ProvenCall
from tokencustody.errors import CorruptEntryError
from tokencustody.records import TokenEntry
from tokencustody.schema.tables import entries, failures, fences, staged_calls, stored_payload
from tokencustody.states import FenceState
from tokencustody.store.ledger import ledger_rows_txn
from tokencustody.txn.fence import RolloutKey, of_rollout
from tokencustody.txn.reading import IS_CONFLICTING
from tokencustody.txn.seal import check_seal_txn, held_txn
from tokencustody.txn.staged_calls import staged_calls_txn

_FENCE = select(fences.c.state, fences.c.snapshot_id, fences.c.version, fences.c.incomplete).where(
    of_rollout(fences)
)
_CALLS = select(
    entries.c.model_call_id,
    stored_payload,
    entries.c.payload_sha256,
    entries.c.stored_sha256,
    entries.c.committed_at,
    entries.c.written_by,
    IS_CONFLICTING.label("is_conflicting"),
).where(of_rollout(entries))
_FAILURES = select(failures.c.model_call_id).where(of_rollout(failures)).order_by(failures.c.version)


@contextmanager
def making_sense(key: RolloutKey) -> Iterator[None]:
    """Raise CorruptEntryError where rows of the rollout say what this library does not write."""
    try:
        yield
    except (ValueError, TypeError, LookupError) as exc:
        # Not its words, which may quote values.
        raise CorruptEntryError(
            f"rollout {key.rollout_id} of run {key.run} holds what this library does not write "
            f"({type(exc).__name__}); look with tokencustody verify, and restore it from a backup"
        ) from exc


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What the row of a call says beside its payload."""

    payload_sha256: str
    committed_at: Any
    written_by: str
    is_conflicting: bool


@dataclass(frozen=True, slots=True)
class FrozenRollout:
    """A frozen rollout at one snapshot and version.

    `entries` are its complete records by call id, in commit order, and `calls` what their rows say. `intents` are the
    calls that were announced and not refused, `failed` those of the marks and conflicts, in the order of their
    versions. `ledger` has the rows of calls in commit order, `ledger_failures` the other ones, and `staged` the staged
    calls of those rows that have no complete record, by call id.
    """

    key: RolloutKey
    snapshot_id: str
    version: int
    incomplete: bool
    entries: Mapping[str, ProvenCall]
    calls: Mapping[str, CallFacts]
    intents: Sequence[str]
    failed: Sequence[str]
    ledger: Mapping[str, Any]
    ledger_failures: Sequence[Any]
    staged: Mapping[str, Any]

    def above(self, call: ProvenCall) -> Iterator[ProvenCall]:
        """Yield the calls that hold the beginning of a call's prompt, the nearest first.

        Raises LookupError where the beginning of a delta is not there.
        """
        while call.begins_in_parent:
            call = self.entries[str(call.record.parent_call_id)]
            yield call

    def prompt(self, call: ProvenCall) -> array[int]:
        """Return the whole prompt of a call. Raises LookupError as `above` does."""
        parts = [call.prompt]
        for each in self.above(call):
            parts += [each.generation, each.prompt]
        whole = array("Q")
        for part in reversed(parts):
            whole += part
        return whole

    def records(self) -> Iterator[TokenEntry]:
        """Yield the complete records as they were written, in commit order; each is made when it is asked for."""
        for call in self.entries.values():
            yield call.entry(call.prompt if call.record.prompt_is_delta else self.prompt(call))

    @property
    def is_staged_only(self) -> bool:
        """Whether its token data is only where workers staged it: complete records are asked first."""
        return not self.entries and bool(self.ledger or self.ledger_failures)

    @property
    def only_in_ledger(self) -> list[str]:
        """The calls of which the ledger has a row and nobody a complete record, in commit order."""
        return [call for call in self.ledger if call not in self.calls]

    @property
    def lost(self) -> list[Any]:
        """The failures of calls without a complete record: what they sampled was never stored."""
        return [row for row in self.ledger_failures if row.model_call_id not in self.calls]


@dataclass(slots=True)
class RolloutRows:
    """The rows of a rollout, as one transaction read them. `calls` is empty unless it is frozen and wanted."""

    key: RolloutKey
    state: FenceState
    snapshot_id: str
    version: int
    incomplete: bool
    calls: list[Any]
    intents: Sequence[str]
    failed: Sequence[str]
    ledger: Sequence[Any]
    ledger_failures: Sequence[Any]
    staged: Sequence[Any]

    def unpack(self) -> FrozenRollout:
        """Return the rollout, each call proven by its hash. May be called once.

        Raises CorruptEntryError that names the call.
        """
        self.calls.sort(key=lambda row: (row.committed_at, row.model_call_id))
        facts = {
            row.model_call_id: CallFacts(
                row.payload_sha256, row.committed_at, row.written_by, bool(row.is_conflicting)
            )
            for row in self.calls
        }
        return FrozenRollout(
            key=self.key,
            snapshot_id=self.snapshot_id,
            version=self.version,
            incomplete=self.incomplete,
            entries={
                call.record.model_call_id: call for call in prove_calls(self.key.rollout_id, self.calls)
            },
            calls=facts,
            intents=self.intents,
            failed=self.failed,
            ledger={row.model_call_id: row for row in self.ledger},
            ledger_failures=self.ledger_failures,
            staged={row.model_call_id: row for row in self.staged},
        )


def rollout_txn(connection: Connection, key: RolloutKey, *, include_incomplete: bool) -> RolloutRows | None:
    """Return the rows of a rollout, or None when it has no fence.

    Unless it is frozen, and complete if only such are wanted, that is its fence alone.
    """
    fence = connection.execute(_FENCE, key.named()).one_or_none()
    if fence is None:
        return None
    state = FenceState(fence.state)
    rows = RolloutRows(
        key, state, fence.snapshot_id or "", fence.version, bool(fence.incomplete), [], (), (), (), (), ()
    )
    if state is not FenceState.FROZEN or (fence.incomplete and not include_incomplete):
        return rows
    rows.calls = list(connection.execute(_CALLS, key.named()))
    held = held_txn(connection, key, rows.calls)
    check_seal_txn(connection, key, held)
    rows.intents = sorted(row.model_call_id for row in held.announced if row.refused_at is None)
    rows.failed = list(connection.scalars(_FAILURES, key.named()))
    rows.ledger, rows.ledger_failures = ledger_rows_txn(connection, key)
    present = {row.model_call_id for row in rows.calls}
    # A row that a checkpoint brought in was staged by another rollout.
    keys = [
        (row.capture_key or key.rollout_id, row.model_call_id)
        for row in rows.ledger
        if row.model_call_id not in present
    ]
    rows.staged = list(staged_calls_txn(connection, key.run, keys, tuple(staged_calls.c)).values())
    return rows
