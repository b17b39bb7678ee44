"""Rules on a rollout's fence, its history, and the rows that the history speaks of."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Table

from tokencustody.schema.tables import (
    entries,
    exports,
    failures,
    fences,
    intents,
    ledger_calls,
    ledger_failures,
    snapshot_versions,
)
from tokencustody.states import FailureKind, FenceState, VersionEvent
from tokencustody.txn.fence import RolloutKey
from tokencustody.txn.seal import SEAL_VERSIONS, Held, is_sealed, last_seal
from tokencustody.verify.findings import Found, Rule
from tokencustody.verify.rows import Rows

_OF_RECORDS = (entries, intents, failures, ledger_calls, ledger_failures)
_OF_FENCE = (snapshot_versions, *_OF_RECORDS, exports)
_ENDS = (VersionEvent.DROP, VersionEvent.RETIRE)
_LATE = (VersionEvent.LATE_LEDGER, VersionEvent.LATE_STAGE)
_OF_CALLS = (VersionEvent.CONFLICT, VersionEvent.MARK, VersionEvent.REFUSAL, *_LATE)
_SEALED = (entries, intents, ledger_calls, ledger_failures)
_EVENT_OF = {
    FailureKind.MARK: VersionEvent.MARK,
    FailureKind.CONFLICT: VersionEvent.CONFLICT,
    FailureKind.REFUSAL_CONFLICT: VersionEvent.CONFLICT,
}
_RESTORE = "restore the rollout from a backup"
_MASK = "do not trust its verdict: mask the rollout, or restore it from a backup"

Broken = Iterator[tuple[Rule, str, str]]


def check_fence(
    key: RolloutKey, rows: Rows, malformed: Mapping[Table, Collection[str]], found: Found
) -> None:
    """Check the fence of a rollout against everything that belongs to it.

    `rows` are those of sound form, `malformed` the calls of the others. Where the fence itself or a version of its
    history makes no sense, nothing is said about them.
    """
    if malformed[fences] or malformed[snapshot_versions]:
        return
    fence = rows[fences][0] if rows[fences] else None
    if fence is None:
        for table in _OF_FENCE:
            for row in rows[table]:
                found.add(
                    key,
                    Rule.FENCE_MISSING,
                    f"a row of {table.name} belongs to a rollout that has no fence; {_RESTORE}",
                    getattr(row, "model_call_id", ""),
                )
        return
    book = _Book(fence, rows[snapshot_versions], rows, malformed)
    for rule in (_history, _fence, _incomplete, _times, _seal, _records, _failures, _refusals, _exports):
        for name, call_id, text in rule(book):
            found.add(key, name, text, call_id)


@dataclass(frozen=True)
class _Book:
    fence: Any
    history: Sequence[Any]
    rows: Rows
    malformed: Mapping[Table, Collection[str]]

    def first(self, *events: str) -> Any:
        """The first version that one of these events made."""
        return next((row for row in self.history if row.event in events), None)

    @property
    def is_retired(self) -> bool:
        return bool(self.fence.state == FenceState.RETIRED)


def _history(book: _Book) -> Broken:
    expected = 0
    for row in book.history:
        # An import keeps the version at which another store froze, which counted its writes too.
        if row.version != expected and not (row.event == VersionEvent.FREEZE and row.version > expected):
            yield Rule.HISTORY, "", f"its history has no version {expected} before {row.version}; {_RESTORE}"
        expected = row.version + 1
    if not book.history:
        yield Rule.HISTORY, "", f"it has no history; {_RESTORE}"
    allowed: tuple[str, ...] = tuple(
        event for event in VersionEvent if event not in (VersionEvent.DROP, *_LATE)
    )
    snapshot_id = None
    for row in book.history:
        if row.event not in allowed or (row.event == VersionEvent.OPEN) != (row.version == 0):
            text = f"version {row.version} is by the event {row.event}, which cannot happen there; {_RESTORE}"
            yield Rule.HISTORY, row.model_call_id, text
        if row.model_call_id and row.event not in _OF_CALLS:
            text = f"version {row.version} is by the event {row.event}, which is of no call; {_RESTORE}"
            yield Rule.HISTORY, row.model_call_id, text
        if row.seal_version not in SEAL_VERSIONS or (row.seal_version and row.sealed_sha256 is None):
            text = f"version {row.version} has a seal of version {row.seal_version}, which nobody makes; {_RESTORE}"
            yield Rule.HISTORY, row.model_call_id, text
        if row.event == VersionEvent.FREEZE:
            # A conflict only by an import, which keeps what the files say of a call that was frozen.
            allowed = (VersionEvent.MARK, VersionEvent.CONFLICT, *_LATE, *_ENDS)
            snapshot_id = row.snapshot_id
            if snapshot_id is None:
                yield (
                    Rule.FENCE_SNAPSHOT,
                    "",
                    f"version {row.version} froze it without a snapshot; {_RESTORE}",
                )
        elif row.event in _ENDS:
            allowed = ()
        if row.snapshot_id != snapshot_id:
            text = (
                f"version {row.version} names another snapshot than its freeze, or none was made; {_RESTORE}"
            )
            yield Rule.FENCE_SNAPSHOT, row.model_call_id, text


def _fence(book: _Book) -> Broken:
    fence = book.fence
    if not book.history:
        return
    last = max(row.version for row in book.history)
    if fence.version != last:
        text = f"the fence is at version {fence.version}, its history ends with version {last}; {_RESTORE}"
        yield Rule.FENCE_VERSION, "", text
    freeze = book.first(VersionEvent.FREEZE)
    state = FenceState.OPEN if freeze is None else FenceState.FROZEN
    if book.first(*_ENDS) is not None:
        state = FenceState.RETIRED
    if fence.state != state:
        yield Rule.FENCE_STATE, "", f"the fence is {fence.state}, its history says {state}; {_RESTORE}"
    if fence.snapshot_id != (freeze and freeze.snapshot_id):
        yield Rule.FENCE_SNAPSHOT, "", f"the fence does not name the snapshot of its freeze; {_RESTORE}"


def _incomplete(book: _Book) -> Broken:
    fence = book.fence
    marked = book.first(VersionEvent.MARK, VersionEvent.CONFLICT) is not None
    stored = {row.model_call_id for row in book.rows[entries]}.union(book.malformed[entries])
    # What a freeze saw is what is there: nothing is announced, put or refused after it.
    dangling = [
        row.model_call_id
        for row in book.rows[intents]
        if row.refused_at is None and row.model_call_id not in stored
    ]
    if book.malformed[intents]:
        return
    if fence.incomplete:
        frozen_before_retired = book.is_retired and book.first(VersionEvent.FREEZE) is not None
        if not marked and not frozen_before_retired and not (fence.state == FenceState.FROZEN and dangling):
            text = "the fence is incomplete, but no mark, conflict or dangling intent made it so; " + _RESTORE
            yield Rule.FENCE_INCOMPLETE, "", text
    elif marked:
        yield (
            Rule.FENCE_INCOMPLETE,
            "",
            f"its history has a mark or a conflict, its fence is complete; {_MASK}",
        )
    elif fence.state == FenceState.FROZEN:
        for call_id in dangling:
            text = f"was announced and neither stored nor refused, but the fence is complete; {_MASK}"
            yield Rule.FENCE_INCOMPLETE, call_id, text


def _times(book: _Book) -> Broken:
    ends, freeze = book.first(*_ENDS), book.first(VersionEvent.FREEZE)
    for name, version in (
        ("opened_at", book.first(VersionEvent.OPEN)),
        ("frozen_at", freeze),
        ("retired_at", ends),
    ):
        if getattr(book.fence, name) != (version and version.recorded_at):
            text = f"{name} of the fence is not the time of that event in its history; {_RESTORE}"
            yield Rule.FENCE_TIMES, "", text


def _seal(book: _Book) -> Broken:
    seal = last_seal(book.history)
    if seal is None or book.is_retired or any(book.malformed[table] for table in _SEALED):
        return
    if not is_sealed(seal, Held(*(book.rows[table] for table in _SEALED))):
        text = "it does not hold the calls, intents and ledger rows that it was sealed with: some are gone, new or "
        yield Rule.SEAL, "", f"{text}changed; {_RESTORE}"


def _records(book: _Book) -> Broken:
    if not book.is_retired:
        return
    for table in _OF_RECORDS:
        for row in book.rows[table]:
            text = f"the rollout is retired, but {table.name} has a row of it; delete the rollout"
            yield Rule.RETIRED_RECORDS, row.model_call_id, text


def _failures(book: _Book) -> Broken:
    by_version = {row.version: row for row in book.history}
    stored = {row.model_call_id: row.payload_sha256 for row in book.rows[entries]}
    refused = {row.model_call_id for row in book.rows[intents] if row.refused_at is not None}
    for failure in book.rows[failures]:
        call_id, version = failure.model_call_id, by_version.pop(failure.version, None)
        said = (_EVENT_OF[failure.kind], call_id, failure.recorded_at, failure.written_by)
        if version is None or said != (
            version.event,
            version.model_call_id,
            version.recorded_at,
            version.written_by,
        ):
            text = f"the {failure.kind} of version {failure.version} is not what its history says; {_RESTORE}"
            yield Rule.FAILURE_HISTORY, call_id, text
        hashes = (failure.first_payload_sha256, failure.second_payload_sha256)
        if failure.kind == FailureKind.CONFLICT:
            held = stored.get(call_id, hashes[0] if call_id in book.malformed[entries] else None)
            if hashes[0] != held or hashes[1] in (None, hashes[0]) or not failure.differing_fields:
                text = (
                    f"the conflict of version {failure.version} does not name the SHA-256 of the stored payload, or "
                    f"no other one, or no field that differs; {_RESTORE}"
                )
                yield Rule.CONFLICT_HASH, call_id, text
        elif hashes != (None, None):
            text = f"the {failure.kind} of version {failure.version} names payloads; {_RESTORE}"
            yield Rule.CONFLICT_HASH, call_id, text
        elif failure.kind == FailureKind.REFUSAL_CONFLICT and call_id not in refused:
            text = f"two refusals of it conflict in version {failure.version}, but it was not refused; {_RESTORE}"
            yield Rule.CONFLICT_HASH, call_id, text
    if book.is_retired or book.malformed[failures]:
        return
    for version in by_version.values():
        if version.event in (VersionEvent.MARK, VersionEvent.CONFLICT):
            text = f"the {version.event} of version {version.version} has no row in failures; {_MASK}"
            yield Rule.FAILURE_HISTORY, version.model_call_id, text


def _refusals(book: _Book) -> Broken:
    said = {(row.model_call_id, row.recorded_at) for row in book.history if row.event == VersionEvent.REFUSAL}
    held = {(row.model_call_id, row.refused_at) for row in book.rows[intents] if row.refused_at is not None}
    for call_id, _ in sorted(held - said):
        yield Rule.REFUSAL_HISTORY, call_id, f"its refusal is not in the history at that time; {_MASK}"
    if not book.is_retired and not book.malformed[intents]:
        for call_id, _ in sorted(said - held):
            yield Rule.REFUSAL_HISTORY, call_id, f"its refusal is in the history only; {_MASK}"


def _exports(book: _Book) -> Broken:
    freeze = book.first(VersionEvent.FREEZE)
    for row in book.rows[exports]:
        if (
            freeze is None
            or row.snapshot_id != freeze.snapshot_id
            or not freeze.version <= row.version <= book.fence.version
        ):
            text = f"export {row.export_id:.80} names a snapshot or version that the rollout does not have"
            yield Rule.EXPORT_MARK, "", f"{text}; do not retire by it, export the rollout again"
