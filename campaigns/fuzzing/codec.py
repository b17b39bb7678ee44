"""Stored calls whose bytes, hashes or places went wrong: an error that names the call, or what was written."""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from types import SimpleNamespace
from typing import Any

import orjson

from campaigns.fuzzing import corpus
from campaigns.fuzzing.cases import Case, Target, Violation, attempt, end_of
from campaigns.fuzzing.mutations import flipped, mutated
from campaigns.fuzzing.values import hostile
from tokencustody.codec.attachments import pack_attachments, unpack_attachment
from tokencustody.codec.chains import unpack_calls, unpack_chain
from tokencustody.codec.staged import unpack_call, unpack_extras, unpack_token_ids
from tokencustody.errors import CorruptEntryError, LineageError
from tokencustody.records import TokenEntry

_ROLLOUTS = ("fuzz-a", "fuzz-b")
_READ_ERRORS: tuple[type[Exception], ...] = (CorruptEntryError, LineageError)

Rows = list[SimpleNamespace]


class _Stored:
    """Two rollouts of every form, whole and shared."""

    def __init__(self, seed: str) -> None:
        rng = random.Random(seed)
        self.calls = {name: corpus.calls(rng, name, 8) for name in _ROLLOUTS}
        self.rows = {name: corpus.stored_rows(made) for name, made in self.calls.items()}
        self.payloads = [row.payload for rows in self.rows.values() for row in rows]
        # What each call was when it was put first, and after it was deleted and put anew.
        self.written: defaultdict[tuple[str, str], list[tuple[bytes, str]]] = defaultdict(list)
        self.sequences: defaultdict[tuple[str, str], list[list[int]]] = defaultdict(list)
        self.anew: dict[str, Rows] = {}
        for name, made in self.calls.items():
            again = [corpus.put_anew(call) for call in made]
            self.anew[name] = [
                corpus.stored_rows([*made[:index], call, *made[index + 1 :]])[index]
                for index, call in enumerate(again)
            ]
            for call in (*made, *again):
                key = (name, call.entry.model_call_id)
                self.written[key].append(corpus.in_bits(call.entry))
                self.sequences[key].append(call.tokens)
        self.secrets = corpus.secrets_of([call for made in self.calls.values() for call in made])

    def check(self, rollout: str, entries: Sequence[TokenEntry]) -> None:
        """Raise Violation unless each entry is the one that was written under its id, once."""
        ids = [entry.model_call_id for entry in entries]
        if len(set(ids)) != len(ids):
            raise Violation(f"a call came back twice: {ids}")
        for entry in entries:
            if corpus.in_bits(entry) not in self.written[rollout, entry.model_call_id]:
                raise Violation(f"call {entry.model_call_id} came back with other content")


@contextmanager
def _payloads(seed: str) -> Iterator[Case]:
    stored = _Stored(seed)

    def case(rng: random.Random) -> str:
        rollout = rng.choice(_ROLLOUTS)
        rows = [copy(row) for row in stored.rows[rollout]]
        row = rng.choice(rows)
        original = row.payload
        row.payload = mutated(rng, original, stored.payloads)
        entries, exc = attempt(lambda: unpack_calls(rollout, rows), _READ_ERRORS, stored.secrets)
        if entries is not None:
            if row.payload != original:
                raise Violation(f"call {row.model_call_id} was read although its bytes are others")
            stored.check(rollout, entries)
        elif row.model_call_id not in str(exc) or rollout not in str(exc):
            raise Violation(f"the error does not name call {row.model_call_id}: {exc}")
        return end_of(exc, "same value")

    yield case


def _rehash(row: SimpleNamespace) -> None:
    digest = hashlib.sha256(row.payload).hexdigest()
    if row.stored_sha256 is None:
        row.payload_sha256 = digest
    else:
        row.stored_sha256 = digest


def _edited_json(rng: random.Random, payload: bytes) -> bytes:
    """Return a payload in whose JSON one field was taken away or has another value."""
    start = payload.find(b'{"schema_version"')
    try:
        fields = orjson.loads(payload[start:])
    except ValueError:
        return mutated(rng, payload)
    name = rng.choice([*fields, "parent_call_id", "prompt_is_delta", "model_call_id", "prompt_token_ids"])
    if rng.random() < 0.3:
        fields.pop(name, None)
    else:
        fields[name] = hostile(rng, plain=True)
    try:
        return payload[:start] + orjson.dumps(fields)
    except TypeError:
        return mutated(rng, payload)


@contextmanager
def _forged(seed: str) -> Iterator[Case]:
    """Bytes with the right hash, as a faulty writer would store: anything may come back, but only named errors."""
    stored = _Stored(seed)

    def case(rng: random.Random) -> str:
        rollout = rng.choice(_ROLLOUTS)
        rows = [copy(row) for row in stored.rows[rollout]]
        for row in rng.sample(rows, rng.randint(1, 2)):
            edit = rng.choice((_edited_json, lambda r, data: mutated(r, data, stored.payloads)))
            row.payload = edit(rng, row.payload)
            _rehash(row)
        _, exc = attempt(lambda: unpack_calls(rollout, rows), _READ_ERRORS)
        wanted = rng.choice(rows).model_call_id
        _, of_chain = attempt(lambda: unpack_chain(rollout, rows, wanted), _READ_ERRORS)
        return end_of(exc or of_chain, "decoded")

    yield case


@contextmanager
def _rows(seed: str) -> Iterator[Case]:
    """Right bytes in the wrong place: rows that are missing, repeated, exchanged or in a circle."""
    stored = _Stored(seed)
    edits: tuple[Callable[[random.Random, Rows, Rows], None], ...] = (_drop, _exchange, _foreign, _columns)

    def case(rng: random.Random) -> str:
        rollout, other = rng.sample(_ROLLOUTS, 2)
        rows = [copy(row) for row in stored.rows[rollout]]
        if rng.random() < 0.3:
            index = rng.randrange(len(rows))
            rows[index] = copy(stored.anew[rollout][index])
        for _ in range(rng.randint(0, 2)):
            rng.choice(edits)(rng, rows, stored.rows[other])
        entries, exc = attempt(lambda: unpack_calls(rollout, rows), _READ_ERRORS, stored.secrets)
        if entries is not None:
            stored.check(rollout, entries)
        wanted = rng.choice(stored.rows[rollout]).model_call_id
        found, of_chain = attempt(lambda: unpack_chain(rollout, rows, wanted), _READ_ERRORS, stored.secrets)
        if found is not None:
            entry, ids = found
            stored.check(rollout, [entry])
            if ids not in stored.sequences[rollout, wanted]:
                raise Violation(f"call {wanted} came back with another sequence")
        return end_of(exc or of_chain, "same value")

    yield case


def _drop(rng: random.Random, rows: Rows, _others: Rows) -> None:
    if len(rows) > 1:
        rows.pop(rng.randrange(len(rows)))


def _exchange(rng: random.Random, rows: Rows, _others: Rows) -> None:
    """Put all that is stored of one call, or one column of it, under another call's id."""
    to, from_ = rng.choice(rows), rng.choice(rows)
    names = rng.choice((("payload",), ("payload", "payload_sha256", "stored_sha256"), ("payload_sha256",)))
    for name in names:
        setattr(to, name, getattr(from_, name))


def _foreign(rng: random.Random, rows: Rows, others: Rows) -> None:
    """Put the call that another rollout has under an id in the place of this one's."""
    to = rng.choice(rows)
    from_ = next((row for row in others if row.model_call_id == to.model_call_id), rng.choice(others))
    to.payload, to.payload_sha256, to.stored_sha256 = from_.payload, from_.payload_sha256, from_.stored_sha256


def _columns(rng: random.Random, rows: Rows, _others: Rows) -> None:
    row = rng.choice(rows)
    name = rng.choice(("payload", "payload_sha256", "stored_sha256"))
    value = getattr(row, name)
    if name == "payload" or value is None:
        setattr(row, name, None)
    else:
        setattr(row, name, rng.choice((None, "", "0" * 64, value.upper(), value[:-1], row.payload_sha256)))


@contextmanager
def _staged(seed: str) -> Iterator[Case]:
    """Staged calls, their extras and attachments, with bytes or columns that went wrong."""
    rng = random.Random(seed)
    records = corpus.staged(rng, "fuzz-s", 8)
    rows = [corpus.staged_row(record) for record in records]
    payloads = [row.payload for row in rows]
    columns = [name for name in vars(rows[0]) if name not in ("rollout_id", "model_call_id")]
    ids = {str(token) for record in records for token in record.token_ids_delta if token >= 10**7}
    secrets = (*ids, *(repr(each) for r in records for each in r.generation_log_probs_delta if each < 0))
    attachments = pack_attachments(
        {
            "b": b"\0\1",
            "t": "tü",
            "j": {"a": [1, None, 2**70, float("nan")]},
            "a": memoryview(b"\1\2\3\4").cast("H"),
        }
    )

    def case(rng: random.Random) -> str:
        index = rng.randrange(len(rows))
        row, record = copy(rows[index]), records[index]
        kind = rng.choice(("payload", "payload", "rehashed", "column", "extras", "attachment"))
        if kind == "attachment":
            return _attachment(rng, attachments, row)
        if kind == "extras":
            row.extras = mutated(rng, row.extras or b"null")
        elif kind == "column":
            name = rng.choice(columns)
            value = getattr(row, name)
            setattr(row, name, hostile(rng, plain=True) if rng.random() < 0.5 else _near(rng, value))
        else:
            row.payload = mutated(rng, row.payload, payloads)
            if kind == "rehashed":
                row.payload_sha256 = hashlib.sha256(row.payload).hexdigest()
        call, exc = attempt(lambda: unpack_call(row), (CorruptEntryError,), secrets)
        if call is not None:
            # The digest covers log probabilities as float32; of a right hash over other bytes, that is all it can tell.
            unproven = {"extras", "generation_log_probs_delta"} if kind == "rehashed" else {"extras"}
            if repr(call.model_dump(exclude=unproven)) != repr(record.model_dump(exclude=unproven)):
                raise Violation(f"{kind}: staged call {row.model_call_id} came back with other content")
        elif row.model_call_id not in str(exc):
            raise Violation(f"the error does not name the call: {exc}")
        extras, of_extras = attempt(lambda: unpack_extras(row), (CorruptEntryError,), secrets)
        if (
            of_extras is None
            and repr(extras) != repr(record.extras)
            and row.extras_digest == record.extras_digest
        ):
            raise Violation("extras came back with other content")
        attempt(lambda: unpack_token_ids(row), (CorruptEntryError,), secrets)
        return end_of(exc or of_extras, "same value")

    yield case


def _near(rng: random.Random, value: Any) -> Any:
    if isinstance(value, int):
        return value + rng.choice((-1, 1, 1 << 32, 1 << 60))
    if isinstance(value, bytes):
        return flipped(rng, value)
    return None if value is None else rng.choice((value[:-1], value.upper(), value + "\n", "é" * 64, ""))


def _attachment(rng: random.Random, packed: Sequence[dict[str, Any]], call: SimpleNamespace) -> str:
    row = SimpleNamespace(
        rollout_id=call.rollout_id, model_call_id=call.model_call_id, **copy(rng.choice(packed))
    )
    value = unpack_attachment(row)
    column = rng.choice(("data", "data", "kind", "shape", "dtype", "data_sha256"))
    value_of = getattr(row, column)
    edited = (
        mutated(rng, row.data) if column == "data" else rng.choice((_near(rng, value_of), "json", "text"))
    )
    same = edited == getattr(row, column)
    setattr(row, column, edited)
    if column == "data" and rng.random() < 0.3:
        row.data_sha256 = hashlib.sha256(row.data).hexdigest()
        same = True
    found, exc = attempt(lambda: unpack_attachment(row), (CorruptEntryError,))
    if exc is None and column == "data" and not same:
        raise Violation(f"attachment {row.name} was read although its bytes are others")
    if exc is not None and repr(row.name) not in str(exc):
        raise Violation(f"the error does not name the attachment: {exc}")
    return end_of(exc, "same value" if repr(found) == repr(value) else "decoded")


TARGETS = (
    Target("payloads", _payloads),
    Target("forged-payloads", _forged),
    Target("rows-in-wrong-places", _rows),
    Target("staged-payloads", _staged),
)
