"""Rules on complete records: payloads, prefix sharing, digests and parents."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from tokencustody.circles import circles
from tokencustody.codec.calls import StoredCall, first_problem, read_call
from tokencustody.errors import CorruptEntryError
from tokencustody.records import TOKEN_FIELDS, ParentResolutionStatus, TokenEntry
from tokencustody.txn.fence import RolloutKey
from tokencustody.txn.putting import audit_text
from tokencustody.verify.findings import Found, Rule
from tokencustody.verify.sequences import TokenSequence, walk, why_not_reached

_TEXTS = (
    "model",
    "response_id",
    "digest",
    "parent_call_id",
    "parent_resolution_reason",
    "continuation_fingerprint",
    "continuation_context_digest",
)
_VALUES = (
    "cum_len",
    "parent_resolution",
    "prompt_is_delta",
    "continuation_context_len",
    "fingerprint_version",
)


@dataclass(slots=True)
class ProvenCall:
    """A call whose whole sequence was rebuilt: its fields without tokens, and the length and hashes of the sequence.

    `staging_hash` is None unless it was asked for.
    """

    fields: dict[str, Any]
    length: int
    digest: str
    staging_hash: str | None


def check_calls(
    key: RolloutKey,
    rows: Sequence[Any],
    malformed: Collection[str],
    elsewhere: Collection[str],
    hashed: Collection[str],
    found: Found,
) -> dict[str, ProvenCall]:
    """Check the complete records of a rollout; return those whose sequence is proven.

    `malformed` are calls with rows that make no sense; `elsewhere` those that the ledger or the staging knows. `hashed`
    are the calls whose staging hash is wanted.
    """
    return _Checker(key, malformed, elsewhere, hashed, found).check(rows)


class _Checker:
    def __init__(
        self,
        key: RolloutKey,
        malformed: Collection[str],
        elsewhere: Collection[str],
        hashed: Collection[str],
        found: Found,
    ) -> None:
        self._key = key
        self._bad = set(malformed)
        self._elsewhere = elsewhere
        self._hashed = hashed
        self._found = found
        self._calls: dict[str, tuple[Any, StoredCall]] = {}
        self._proven: dict[str, ProvenCall] = {}
        self._sequence = TokenSequence()

    def check(self, rows: Sequence[Any]) -> dict[str, ProvenCall]:
        for row in rows:
            stored = self._read(row)
            if stored is not None:
                self._calls[row.model_call_id] = (row, stored)
        below: defaultdict[str, list[str]] = defaultdict(list)
        roots = []
        for call_id, (_, stored) in self._calls.items():
            if _begins_in_parent(stored):
                below[stored.parent_call_id or ""].append(call_id)
            else:
                roots.append(call_id)
        walk(roots, lambda call_id: below.get(call_id, ()), self._sequence, self._visit)
        parents = {call_id: stored.parent_call_id for call_id, (_, stored) in self._calls.items()}
        in_circle = {call for circle in circles(parents) for call in circle}
        for call_id in sorted(in_circle):
            self._say(
                Rule.PARENT_CIRCLE,
                call_id,
                "is its own ancestor, through others or directly; restore the rollout from a backup",
            )
        self._name_lost(in_circle)
        self._check_parents()
        return self._proven

    def _say(self, rule: Rule, call_id: str, text: str) -> None:
        self._found.add(self._key, rule, text, call_id)

    def _read(self, row: Any) -> StoredCall | None:
        """Return a stored payload whose hash, form and columns are right; whatever can be read of one all the same."""
        call_id = row.model_call_id
        self._found.counts.calls += 1
        self._found.counts.bytes += len(row.payload)
        sha256 = row.stored_sha256 or row.payload_sha256
        try:
            stored = read_call(row.payload, sha256, rollout_id=self._key.rollout_id, model_call_id=call_id)
            if (stored.shared_len is None) != (row.stored_sha256 is None):
                raise CorruptEntryError("the row does not say in which form its payload is stored")
            if stored.is_delta and stored.shared_len is not None:
                raise CorruptEntryError("a delta prompt is stored without a beginning that it does not have")
            TokenEntry.model_validate({**stored.fields, **dict.fromkeys(TOKEN_FIELDS, ())})
        except CorruptEntryError as exc:
            self._bad.add(call_id)
            if hashlib.sha256(row.payload).hexdigest() != sha256:
                name = "payload_sha256" if row.stored_sha256 is None else "stored_sha256"
                self._say(
                    Rule.PAYLOAD_HASH,
                    call_id,
                    f"the stored payload does not have the SHA-256 in {name}; restore the row from a backup",
                )
            else:
                said = str(exc).rpartition(f"of rollout {self._key.rollout_id}: ")[2]
                self._say(Rule.PAYLOAD_FORM, call_id, f"{said}; restore the row from a backup")
            return None
        except ValidationError as exc:
            self._bad.add(call_id)
            self._say(
                Rule.PAYLOAD_FORM,
                call_id,
                f"the payload is no valid record ({first_problem(exc)}), though it has its SHA-256: its writer is at "
                "fault; mask the rollout",
            )
            return None
        differing = _differing_columns(row, stored)
        if differing:
            self._say(
                Rule.ENTRY_COLUMNS,
                call_id,
                f"{', '.join(differing)} differ from the payload, which is sound; set them right from it or restore "
                "the row from a backup",
            )
        return stored

    def _visit(self, call_id: str) -> bool:
        row, stored = self._calls[call_id]
        if stored.shared_len is not None and not self._is_whole(row, stored):
            self._bad.add(call_id)
            return False
        self._sequence.extend(stored.own_ids(), stored.token_width)
        length, digest = len(self._sequence), self._sequence.digest()
        wanted = self._sequence.staging_hash() if call_id in self._hashed else None
        self._proven[call_id] = ProvenCall(stored.fields, length, digest, wanted)
        recorded = stored.fields
        if recorded["cum_len"] is not None and recorded["cum_len"] != length:
            self._say(
                Rule.CUM_LEN,
                call_id,
                f"cum_len is {recorded['cum_len']}, but the whole sequence has {length} tokens; do not train on it",
            )
        if recorded["digest"] and recorded["digest"] != digest:
            self._say(
                Rule.DIGEST,
                call_id,
                "the digest is not that of the whole sequence, so its parent chain is another or its writer was at "
                "fault; do not train on it",
            )
        return True

    def _is_whole(self, row: Any, stored: StoredCall) -> bool:
        """Return whether the sequence at hand is the beginning that the payload was stored without."""
        parent = stored.parent_call_id
        if stored.shared_len != len(self._sequence):
            self._say(
                Rule.WHOLE_HASH,
                row.model_call_id,
                f"its payload leaves out {stored.shared_len} prompt ids, but the sequence of its parent, model call "
                f"{parent!s:.512}, has {len(self._sequence)}; restore both from a backup",
            )
            return False
        try:
            is_whole: bool = (
                stored.whole_sha256(self._sequence.at_width(stored.token_width)) == row.payload_sha256
            )
        except OverflowError:
            is_whole = False
        if not is_whole:
            self._say(
                Rule.WHOLE_HASH,
                row.model_call_id,
                f"with the sequence of its parent, model call {parent!s:.512}, its payload does not have the SHA-256 "
                "in payload_sha256; restore both from a backup",
            )
        return is_whole

    def _name_lost(self, in_circle: Collection[str]) -> None:
        parents = {
            call_id: stored.parent_call_id if _begins_in_parent(stored) else None
            for call_id, (_, stored) in self._calls.items()
        }
        for call_id in self._calls:
            if call_id in self._proven or call_id in self._bad or call_id in in_circle:
                continue
            culprit, problem = why_not_reached(call_id, parents, self._bad)
            self._say(
                Rule.PROMPT_LOST,
                call_id,
                f"cannot be rebuilt because of model call {culprit:.512}, in which its prompt begins and which "
                f"{problem}; restore that one from a backup",
            )

    def _check_parents(self) -> None:
        for call_id, (_, stored) in self._calls.items():
            parent = stored.parent_call_id
            resolved = stored.fields["parent_resolution"] == ParentResolutionStatus.RESOLVED
            self._found.counts.parents_not_recorded += stored.fields["parent_resolution"] is None
            if not resolved or parent is None or _begins_in_parent(stored):
                continue
            if parent in self._proven:
                self._check_beginning(call_id, stored, self._proven[parent])
            elif parent not in self._calls and parent not in self._bad and parent not in self._elsewhere:
                self._say(
                    Rule.PARENT_MISSING,
                    call_id,
                    f"its resolved parent, model call {parent:.512}, is neither stored nor in the ledger nor staged; "
                    "do not train on a chain through it",
                )

    def _check_beginning(self, call_id: str, stored: StoredCall, parent: ProvenCall) -> None:
        """Look whether a prompt that was stored whole begins with its parent's sequence."""
        if stored.own_prompt_len >= parent.length:
            beginning = TokenSequence()
            beginning.extend(stored.body[: parent.length * stored.token_width], stored.token_width)
            if beginning.digest() == parent.digest:
                return
        if not stored.fields["prefix_supplied"]:
            self._found.counts.retokenized += 1
            return
        self._say(
            Rule.PARENT_SEQUENCE,
            call_id,
            f"the engine was given the sequence of model call {stored.parent_call_id!s:.512}, but the prompt does not "
            "begin with it; do not train on a chain through it",
        )


def _begins_in_parent(stored: StoredCall) -> bool:
    return stored.shared_len is not None or stored.is_delta


def _differing_columns(row: Any, stored: StoredCall) -> list[str]:
    fields = stored.fields
    shared_len = stored.shared_len or 0
    created_at = fields["created_at"]
    expected = {
        **{name: audit_text(fields[name]) for name in _TEXTS},
        **{name: fields[name] for name in _VALUES},
        "prompt_len": shared_len + stored.own_prompt_len,
        "generation_len": stored.generation_len,
        "token_width": stored.token_width,
        "shared_len": shared_len,
        "created_at": created_at if created_at == created_at else None,
    }
    return [name for name, value in expected.items() if getattr(row, name) != value]
