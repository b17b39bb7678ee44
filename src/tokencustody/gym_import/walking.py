"""One walk through the files of a rollout, inside a transaction, which adds what the database lacks.

The walk is the same whether it writes or only looks. It holds of each call its id and hash, the sequences of the calls
that were read last, and the rows of one batch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, insert

from tokencustody.codec.calls import PackedEntry, differing_fields, pack_entry
from tokencustody.codec.id_columns import wide_ids
from tokencustody.errors import InvalidRecordError
from tokencustody.gym_import.files import Line, RolloutFiles, State, lines, names, text_at
from tokencustody.gym_import.findings import Findings
from tokencustody.gym_import.held import Held
from tokencustody.gym_import.ledger import new_ledger_rows
from tokencustody.gym_import.records import UnreadableLineError, digest_problem, read_entry
from tokencustody.gym_import.report import FindingKind, ImportedRollout, ImportOutcome
from tokencustody.gym_import.verdict import Verdict
from tokencustody.ids import is_call_id
from tokencustody.lineage import FINGERPRINT_VERSIONS
from tokencustody.records import TokenEntry
from tokencustody.schema.tables import entries
from tokencustody.states import FenceState
from tokencustody.txn.fence import Fence, RolloutKey, Stamp
from tokencustody.txn.putting import conflict_evidence, new_call, read_base, read_call_txn
from tokencustody.txn.reading import chain_txn
from tokencustody.txn.sequences import KnownSequence, KnownSequences

_BATCH_ROWS = 64
_BATCH_BYTES = 4 * 2**20

_LOST, _NOTE, _CONFLICT = FindingKind.LOST, FindingKind.NOTE, FindingKind.CONFLICT


class RefusedError(Exception):
    """The rollout is in the database with something else; whatever this transaction wrote is to be undone."""

    def __init__(self, found: ImportedRollout) -> None:
        super().__init__(found.rollout_id)
        self.found = found


@dataclass(frozen=True, slots=True)
class _First:
    """The first line of a call."""

    line: Line
    sha256: str


class Walk:
    """A walk through `files`, which signs what it writes with `stamp`."""

    def __init__(
        self, key: RolloutKey, files: RolloutFiles, stamp: Stamp, *, writes: bool, max_entry_bytes: int
    ) -> None:
        self._key = key
        self._files = files
        self._stamp = stamp
        self._writes = writes
        self._max_entry_bytes = max_entry_bytes
        self._found = Findings(key.rollout_id)
        self._held = Held()
        self._verdict = Verdict(key, stamp)
        self._seen: dict[str, _First] = {}
        self._new_intents: list[str] = []
        # By call and second payload: what `Verdict.conflict_txn` takes.
        self._evidence: dict[tuple[str, str], dict[str, Any]] = {}
        self._conflicting: set[str] = set()
        self._sequences = KnownSequences()
        self._rows: list[dict[str, Any]] = []
        self._row_bytes = 0
        self._changes = 0

    def run_txn(self, connection: Connection | None) -> ImportedRollout:
        """Return what was found, and add it in the caller's transaction if this walk writes.

        None stands for a database without tables. Raises RefusedError where the transaction must be undone,
        UnreadableFileError, CorruptEntryError.
        """
        is_new = False
        if connection is not None and self._writes:
            # Before anything is read: what another import of the folder did while this one waited is already there.
            is_new = self._verdict.lock_txn(connection)
        if connection is not None:
            self._held = Held.read_txn(connection, self._key)
        is_new = is_new or self._held.fence is None
        self._conflicting = {call for call, _ in self._held.conflicts}
        state = self._state()
        if state is not None:
            self._found.rollout.state = "retired" if state.retired else "frozen" if state.frozen else "open"
        self._settle(connection, state, None if is_new and self._is_untouched() else self._held.fence)
        if self._found.rollout.has(_CONFLICT):
            self._found.rollout.outcome = ImportOutcome.CONFLICT
            self._found.rollout.added = 0
            if self._writes:
                raise RefusedError(self._found.rollout)
        elif is_new:
            self._found.rollout.outcome = ImportOutcome.IMPORTED
        elif self._changes:
            self._found.rollout.outcome = ImportOutcome.ADDED
        return self._found.rollout

    def _settle(self, connection: Connection | None, state: State | None, held: Fence | None) -> None:
        retired = state is not None and state.retired
        same_snapshot = held is not None and state is not None and held.snapshot_id == state.snapshot_id
        if held is not None and held.state is FenceState.RETIRED:
            if not same_snapshot:
                self._found.conflict(None, "the rollout is retired in the database")
            return
        if retired and held is not None:
            if held.state is not FenceState.FROZEN or not same_snapshot:
                self._found.conflict(
                    self._files.state, "the rollout is retired in the files, and not in the database"
                )
            return
        if retired:
            self._left_out()
        else:
            self._walk_calls(connection, state)
            self._walk_intents()
            self._walk_ledger(connection)
        self._add_verdict(connection, state, same_snapshot=same_snapshot)

    def _state(self) -> State | None:
        try:
            return self._files.read_state()
        except (ValueError, RecursionError) as exc:
            reason = str(exc) if type(exc) in (ValueError, InvalidRecordError) else "it is no JSON"
            self._found.lose(
                self._files.state,
                None,
                "",
                f"the state cannot be read, so the rollout counts as open: {reason}",
            )
            return None

    def _left_out(self) -> None:
        for path in (self._files.tokens, self._files.ledger):
            if any(not line.is_blank for line in lines(path)):
                self._found.find(_NOTE, path, None, None, "it is left out, for the rollout is retired")

    def _walk_calls(self, connection: Connection | None, state: State | None) -> None:
        recorded = {} if state is None else state.line_sha256
        for line in lines(self._files.tokens):
            if line.is_blank:
                continue
            try:
                entry, packed = self._read(line)
            except UnreadableLineError as exc:
                self._found.lose_line(self._files.tokens, line, exc)
                continue
            call = entry.model_call_id
            first = self._seen.setdefault(call, _First(replace(line, text=None), packed.sha256))
            if first.line.number != line.number:
                self._compare_lines(first, line, entry, packed)
                continue
            self._found.rollout.calls += 1
            if call in recorded and recorded[call] != hashlib.sha256(line.text or b"").hexdigest():
                self._found.lose(
                    self._files.tokens,
                    line,
                    call,
                    "the line is not the one whose SHA-256 the state has; it was changed",
                )
            self._check(connection, line, entry, packed)
            self._take(connection, line, entry, packed)
        self._flush(connection)
        for call in recorded.keys() - self._seen.keys() - self._found.lost.keys():
            self._found.lose(
                self._files.state,
                None,
                call if is_call_id(call) else "",
                "the state has the call, but no line holds it",
            )

    def _read(self, line: Line) -> tuple[TokenEntry, PackedEntry]:
        entry = read_entry(self._key.rollout_id, line.text)
        try:
            packed = pack_entry(entry)
        except InvalidRecordError as exc:
            raise UnreadableLineError(str(exc), entry.model_call_id) from None
        if len(packed.payload) > self._max_entry_bytes:
            raise UnreadableLineError(
                f"the call takes {len(packed.payload)} bytes, more than the {self._max_entry_bytes} that are accepted",
                entry.model_call_id,
            )
        return entry, packed

    def _compare_lines(self, first: _First, line: Line, entry: TokenEntry, packed: PackedEntry) -> None:
        call, path = entry.model_call_id, self._files.tokens
        fields: list[str] = []
        if first.sha256 != packed.sha256 and path is not None:
            # Read again, so that no call is held for the case that another one has its id.
            before = read_entry(self._key.rollout_id, text_at(path, first.line.offset))
            fields = differing_fields(before, entry)
        if not fields:
            self._found.find(_NOTE, path, line, call, f"the call is the same as in line {first.line.number}")
            return
        self._found.find(
            _LOST,
            path,
            line,
            call,
            f"the call has other content than in line {first.line.number} (differing: {', '.join(fields)}); that one "
            "stays, and the conflict is kept as evidence",
        )
        evidence = conflict_evidence(first.sha256, packed.sha256, entry, fields)
        self._evidence.setdefault((call, packed.sha256), evidence)
        self._conflicting.add(call)

    def _check(
        self, connection: Connection | None, line: Line, entry: TokenEntry, packed: PackedEntry
    ) -> None:
        """Check the digest of a record, and keep its sequence for those that continue it."""
        call, path = entry.model_call_id, self._files.tokens
        sequence = packed.sequence()
        if packed.is_delta:
            base = self._base(connection, entry)
            if base is None:
                self._found.lose(
                    path, line, call, "the call is a delta on one that is not before it in the file"
                )
                return
            sequence = base.ids.followed_by(sequence)
        self._sequences.keep(
            self._key, call, KnownSequence(packed.sha256, sequence, is_delta=packed.is_delta)
        )
        if problem := digest_problem(entry, wide_ids(sequence.data, sequence.width)):
            self._found.lose(path, line, call, problem)
        elif entry.digest is None and entry.parent_resolution is None:
            self._found.find(
                _NOTE, path, line, call, "a legacy record without lineage: it has no digest to check"
            )
        if entry.fingerprint_version not in (None, *FINGERPRINT_VERSIONS):
            self._found.find(
                _NOTE,
                path,
                line,
                call,
                f"its fingerprint has version {entry.fingerprint_version}, which is not among "
                f"{FINGERPRINT_VERSIONS}: no request resolves to it",
            )

    def _base(self, connection: Connection | None, entry: TokenEntry) -> KnownSequence | None:
        """Return the sequence of the parent, if the parent is there and has one content only."""
        parent = entry.parent_call_id
        if parent is None or parent == entry.model_call_id or parent in self._conflicting:
            return None
        known = self._sequences.find(self._key, parent)
        is_stored = parent in self._held.calls or (self._writes and parent in self._seen)
        if known is None and connection is not None and is_stored:
            self._flush(connection)
            known = read_base(self._key, chain_txn(connection, self._key, parent), parent)
            if known is not None:
                self._sequences.keep(self._key, parent, known)
        return known

    def _take(
        self, connection: Connection | None, line: Line, entry: TokenEntry, packed: PackedEntry
    ) -> None:
        call, path = entry.model_call_id, self._files.tokens
        held = self._held.calls.get(call)
        if held is not None:
            if held != packed.sha256 and connection is not None:
                fields = differing_fields(read_call_txn(connection, self._key, call), entry)
                if fields:
                    self._found.conflict(
                        path,
                        f"the database holds the call with other content (differing: {', '.join(fields)})",
                        line,
                        call,
                    )
            return
        if not self._is_open():
            self._found.conflict(path, "the rollout is frozen in the database without this call", line, call)
            return
        self._found.rollout.added += 1
        self._changes += 1
        if not self._writes:
            return
        base = None if packed.is_delta else self._base(connection, entry)
        if base is not None and (base.is_delta or not base.ids or not packed.begins_with(base.ids)):
            base = None
        row = new_call(self._key, entry, packed, self._stamp, base).row
        self._rows.append(row)
        self._row_bytes += len(row["payload"])
        if len(self._rows) >= _BATCH_ROWS or self._row_bytes >= _BATCH_BYTES:
            self._flush(connection)

    def _flush(self, connection: Connection | None) -> None:
        if self._rows and connection is not None:
            connection.execute(insert(entries), self._rows)
        self._rows, self._row_bytes = [], 0

    def _walk_intents(self) -> None:
        known = set(self._held.intents)
        for number, call in names(self._files.intents):
            if not call or call in known:
                continue
            known.add(call)
            if not is_call_id(call):
                self._found.lose(
                    self._files.intents, None, "", f"line {number} is no call id that can be kept"
                )
            elif self._is_open():
                self._new_intents.append(call)
            elif call not in self._seen and call not in self._held.calls:
                self._found.conflict(
                    self._files.intents,
                    "the rollout is frozen in the database without this intent",
                    None,
                    call,
                )
        self._changes += len(self._new_intents)

    def _marks(self, state: State | None, *, same_snapshot: bool) -> list[str]:
        """Return the calls for which the rollout is to be marked, of which some may be marked already."""
        named = [call if is_call_id(call) else "" for _, call in names(self._files.marks)]
        # What the database holds is not lost because a file was damaged since.
        damaged = [] if same_snapshot else [call for call in self._found.lost if call not in self._held.calls]
        is_held = self._held.fence is not None and self._held.fence.incomplete
        if state is not None and state.incomplete and not (named or self._evidence or damaged or is_held):
            named = [""]  # as after a conflict, of which Gym's files keep nothing else
        return list(dict.fromkeys([*named, *damaged]))

    def _walk_ledger(self, connection: Connection | None) -> None:
        new = new_ledger_rows(connection, self._key, self._files.ledger, self._held, self._found)
        self._changes += len(new)
        if self._writes and connection is not None:
            self._verdict.record_txn(connection, new)

    def _add_verdict(
        self, connection: Connection | None, state: State | None, *, same_snapshot: bool
    ) -> None:
        """Add intents, marks and evidence, and then the fence of the files."""
        all_marks = self._marks(state, same_snapshot=same_snapshot)
        marks = [call for call in all_marks if call not in self._held.failed]
        evidence = [
            (known[0], each) for known, each in self._evidence.items() if known not in self._held.conflicts
        ]
        self._changes += len(marks) + len(evidence)
        announced = {*self._held.intents, *self._new_intents}
        dangling = announced - self._held.refused - self._held.calls.keys() - self._seen.keys()
        held = self._held.fence
        incomplete = bool(all_marks or self._evidence or (held is not None and held.incomplete))
        freezes = state is not None and (state.frozen or state.retired)
        if state is not None and state.retired:
            incomplete = incomplete or state.incomplete
        elif freezes:
            incomplete = incomplete or bool(dangling)
        self._found.rollout.incomplete = incomplete
        if freezes and held is not None:
            if held.state is FenceState.FROZEN:
                freezes = False
                if not same_snapshot:
                    self._found.conflict(
                        self._files.state, "the rollout is frozen in the database as another snapshot"
                    )
            elif extra := self._held.calls.keys() - self._seen.keys():
                self._found.conflict(
                    self._files.state,
                    f"the rollout is frozen in the files without {len(extra)} of the calls in the database",
                )
        self._changes += freezes
        if not self._writes or connection is None or self._found.rollout.has(_CONFLICT):
            return
        self._verdict.announce_txn(connection, self._new_intents)
        for call in marks:
            self._verdict.mark_txn(connection, call)
        for each in evidence:
            self._verdict.conflict_txn(connection, *each)
        if freezes and state is not None:
            # What was lost since makes another version, so that nobody drops it as what Gym's snapshot was.
            version = state.version + self._found.rollout.has(_LOST)
            self._verdict.freeze_txn(connection, state, version, incomplete=incomplete)

    def _is_untouched(self) -> bool:
        """Return whether nothing happened to the rollout yet; after a commit whose answer was lost, something did."""
        return self._held.fence is None or self._held.fence.version == 0

    def _is_open(self) -> bool:
        return self._held.fence is None or self._held.fence.state is FenceState.OPEN
