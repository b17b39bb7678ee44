"""Rules on what inference workers staged: payloads, digests, extras, chains and attachments."""

from __future__ import annotations

import hashlib
import re
import struct
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

from tokencustody.codec.attachments import AttachedBuffer, attachments_sha256, unpack_attachment
from tokencustody.codec.id_columns import PackedIds
from tokencustody.codec.row_hash import is_proven
from tokencustody.codec.staged import unpack_call, unpack_extras
from tokencustody.errors import CorruptEntryError
from tokencustody.schema.tables import staged_attachments
from tokencustody.staging.digest import compute_chain_hash
from tokencustody.staging.records import StagedCallBaseSnapshot
from tokencustody.states import AttachmentKind
from tokencustody.txn.fence import RolloutKey
from tokencustody.verify.findings import Found, Rule
from tokencustody.verify.sequences import TokenSequence, walk, why_not_reached

_RESTORE = "restore the row from a backup"
# NumPy's type string ends with the size of an element, a date's with its unit.
_NUMPY_TYPE = re.compile(r"[<>|=]([a-zA-Z])(\d+)(\[.*\])?")


def check_staged(
    key: RolloutKey,
    rows: Sequence[Any],
    malformed: Collection[str],
    recorded: Mapping[str, Any],
    found: Found,
) -> None:
    """Check the staged calls of a rollout. `recorded` are its ledger rows, `malformed` calls that make no sense.

    A parent that is not staged any more is no fault: its framework deletes what it has read. Where the ledger still
    has its row, the chain is checked against that.
    """
    _Checker(key, malformed, recorded, found).check(rows)


class _Checker:
    def __init__(
        self, key: RolloutKey, malformed: Collection[str], recorded: Mapping[str, Any], found: Found
    ) -> None:
        self._key = key
        self._bad = set(malformed)
        self._recorded = recorded
        self._found = found
        self._calls: dict[str, StagedCallBaseSnapshot] = {}
        self._visited: set[str] = set()
        self._sequence = TokenSequence()

    def check(self, rows: Sequence[Any]) -> None:
        for row in rows:
            call = self._read(row)
            if call is not None:
                self._calls[call.model_call_id] = call
        below: defaultdict[str, list[str]] = defaultdict(list)
        for call_id, call in self._calls.items():
            if call.parent_call_id is not None:
                below[call.parent_call_id].append(call_id)
        roots = [call_id for call_id, call in self._calls.items() if call.parent_call_id is None]
        walk(roots, lambda call_id: below.get(call_id, ()), self._sequence, self._visit)
        parents = {call_id: call.parent_call_id for call_id, call in self._calls.items()}
        for call_id in self._calls:
            if call_id not in self._visited:
                self._check_cut_off(call_id, parents)

    def _say(self, rule: Rule, call_id: str, text: str) -> None:
        self._found.add(self._key, rule, text, call_id)

    def _read(self, row: Any) -> StagedCallBaseSnapshot | None:
        call_id = row.model_call_id
        counts = self._found.counts
        counts.staged_calls += 1
        counts.bytes += len(row.payload) + len(row.extras or b"")
        try:
            unpack_extras(row)
        except CorruptEntryError as exc:
            self._say(Rule.STAGED_EXTRAS, call_id, f"{_after_name(exc)}; {_RESTORE}")
        if hashlib.sha256(row.payload).hexdigest() != row.payload_sha256:
            text = "the stored payload does not have the SHA-256 in payload_sha256"
            self._say(Rule.STAGED_HASH, call_id, f"{text}; {_RESTORE}")
            self._bad.add(call_id)
            return None
        try:
            call = unpack_call(row)
            if row.payload[1] != row.token_width:
                raise CorruptEntryError(f"token_width is {row.token_width}, that of its ids {row.payload[1]}")
        except CorruptEntryError as exc:
            self._say(Rule.STAGED_CALL, call_id, f"{_after_name(exc)}; {_RESTORE}")
            self._bad.add(call_id)
            return None
        return call

    def _visit(self, call_id: str) -> bool:
        self._visited.add(call_id)
        call = self._calls[call_id]
        parent = self._calls.get(call.parent_call_id or "")
        if not self._continues(call, len(self._sequence), None if parent is None else parent.chain_hash):
            self._bad.add(call_id)
            return False
        ids = PackedIds.of(call.token_ids_delta)
        self._sequence.extend(ids.data, ids.width)
        if self._sequence.staging_hash() != call.cumulative_hash:
            text = (
                "the cumulative hash is not that of the tokens from its root to its end; do not train on it"
            )
            self._say(Rule.STAGED_CHAIN, call_id, text)
        return True

    def _continues(self, call: StagedCallBaseSnapshot, length: int, chain_hash: str | None) -> bool:
        after = f"its parent, staged call {call.parent_call_id:.512}," if call.parent_call_id else "nothing"
        if call.prev_len != length:
            text = f"it follows {call.prev_len} tokens, but {after} has {length}; do not train on it"
            self._say(Rule.STAGED_CHAIN, call.model_call_id, text)
            return False
        if compute_chain_hash(chain_hash, call.token_ids_delta) != call.chain_hash:
            text = f"its chain hash is not that of its tokens after {after}; do not train on it"
            self._say(Rule.STAGED_CHAIN, call.model_call_id, text.replace(",;", ";"))
            return False
        return True

    def _check_cut_off(self, call_id: str, parents: Mapping[str, str | None]) -> None:
        """Check a call whose beginning is not staged, or not sound."""
        culprit, problem = why_not_reached(call_id, parents, self._bad)
        call = self._calls[call_id]
        if problem != "is missing":
            text = f"cannot be rebuilt because of staged call {culprit:.512}, in which it begins and which {problem}"
            self._say(Rule.STAGED_LOST, call_id, f"{text}; restore that one from a backup")
            return
        parent = self._calls.get(call.parent_call_id or "") or self._recorded.get(call.parent_call_id or "")
        if parent is not None and parent.chain_hash is not None:
            self._continues(call, parent.cum_len, parent.chain_hash)


def check_attachments(
    key: RolloutKey,
    rows: Sequence[Any],
    staged: Collection[str],
    hashes: Mapping[str, str | None],
    found: Found,
) -> None:
    """Check the attachments of a rollout's staged calls, which are those in `staged`.

    `hashes` say, for those of them that make sense, which attachments they were staged with.
    """
    attached: defaultdict[str, list[tuple[str, str | None]]] = defaultdict(list)
    for row in rows:
        attached[row.model_call_id].append((row.name, row.row_sha256))
    for call_id, sha256 in hashes.items():
        if sha256 not in (None, attachments_sha256(attached[call_id])):
            text = f"it has not the attachments that it was staged with: some are gone, new or changed; {_RESTORE}"
            found.add(key, Rule.ATTACHMENT, text, call_id)
    for row in rows:
        found.counts.attachments += 1
        found.counts.bytes += len(row.data)
        problem = _problem(row, staged)
        if problem:
            text = f"attachment {row.name!r:.200} {problem}; {_RESTORE}"
            found.add(key, Rule.ATTACHMENT, text, row.model_call_id)


def _problem(row: Any, staged: Collection[str]) -> str:
    if row.model_call_id not in staged:
        return "belongs to a call that is not staged"
    if (row.kind == AttachmentKind.BUFFER) != (row.dtype is not None) or (row.dtype is None) != (
        row.shape is None
    ):
        return "has a dtype and a shape that do not belong to its kind"
    if hashlib.sha256(row.data).hexdigest() != row.data_sha256:
        return "does not have its SHA-256"
    if not is_proven(staged_attachments, row):
        return (
            "does not have the SHA-256 in row_sha256: it was attached to another call or under another name"
        )
    try:
        value = unpack_attachment(row)
    except CorruptEntryError:
        return f"does not decode as {row.kind}"
    if isinstance(value, AttachedBuffer):
        size = _size_of(value.dtype)
        if size is None or size * prod(value.shape) != len(value.data):
            return "is of another size than its dtype and shape say"
    return ""


def _size_of(dtype: str) -> int | None:
    """Return the bytes of an element, or None when the type is unknown."""
    numpy = _NUMPY_TYPE.fullmatch(dtype)
    if numpy is not None:
        return int(numpy[2]) * (4 if numpy[1] == "U" else 1)
    try:
        return struct.calcsize(dtype)
    except struct.error:
        return None


def _after_name(exc: CorruptEntryError) -> str:
    return str(exc).partition(" of rollout ")[2].partition(": ")[2] or str(exc)
