"""Calls read back along their parents.

A prompt may be stored without its beginning (codec version 2) when that is the whole sequence of the parent call: the
parent's full prompt and its generated ids. The whole sequence of a writer's own delta record is that of its parent,
then its own prompt and generated ids.

Rows are those of the table `entries`, with the attributes `model_call_id`, `payload`, `payload_sha256` and
`stored_sha256`. The stored bytes are proven first, so that an error names the call whose bytes are wrong; then each
whole payload is proven, so that no other sequence passes for the parent's.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from tokencustody.codec.calls import StoredCall, call_name, read_call
from tokencustody.codec.hashing import Hashers
from tokencustody.codec.id_columns import (
    PackedIds,
    digest_of_ids,
    little_endian,
    pack_ids,
    resized,
)
from tokencustody.codec.proven import ProvenCall
from tokencustody.columns import TYPECODES
from tokencustody.errors import CorruptEntryError, LineageError
from tokencustody.lineage import check_recorded
from tokencustody.records import TokenEntry

# The prefixes that may wait for their hashes.
_MOST_PENDING = 8

Made = TypeVar("Made", TokenEntry, ProvenCall)


def unpack_calls(rollout_id: str, rows: Iterable[Any]) -> list[TokenEntry]:
    """Return the entries of all calls of one rollout, in the order of their rows.

    A prompt shares the integers of the one that it continues. Beside the result, no more is held than the rows stored
    without the beginning of their prompt, and one sequence: rows that an iterator gives are let go one by one. Raises
    CorruptEntryError naming a call that is not what was written, or the parent that is missing.
    """
    calls = [_Call.read(rollout_id, row, lambda stored: stored.entry([])) for row in rows]
    return _made(rollout_id, calls, _rebuild_below)


def prove_calls(rollout_id: str, rows: Iterable[Any]) -> list[ProvenCall]:
    """Return all calls of one rollout as columns, in the order of their rows, proven as by `unpack_calls`.

    Each holds its own ids only, so that what is held grows as what is stored. Raises as `unpack_calls` does.
    """
    calls = [_Call.read(rollout_id, row, ProvenCall.of) for row in rows]
    return _made(rollout_id, calls, _prove_below)


def unpack_chain(
    rollout_id: str, rows: Iterable[Any], model_call_id: str, *, prove: bool = True
) -> tuple[TokenEntry, list[int]]:
    """Return the entry of one call and its whole sequence, given the rows of its chain in any order.

    The chain runs from a call whose whole prompt is stored down to the call that is asked for; each call after the
    first was stored without the beginning of its prompt, or is a delta on the one before it. Raises CorruptEntryError
    as `unpack_calls` does, LineageError for a delta without its parents; with `prove`, also for one without a digest,
    and when the sequence does not have the digest or the length that the call records.
    """
    chain = _chain_up(rollout_id, {row.model_call_id: row for row in rows}, model_call_id)
    (row, call), above = chain[0], chain[:0:-1]
    ids: list[int] = []
    for _, ancestor in above:
        ids += ancestor.own_prompt()
        ids += ancestor.generation()
    try:
        entry = _rebuilt(call, row.payload_sha256, ids)
        ids += entry.prompt_token_ids[call.shared_len or 0 :]
        ids += entry.generation_token_ids
        if prove:
            check_recorded(entry, ids, digest_of_ids)
    except (CorruptEntryError, LineageError):
        unpack_calls(rollout_id, [row for row, _ in above])  # names an ancestor, if that is the wrong one
        raise
    return entry, ids


def unpack_sequence_on(rollout_id: str, row: Any, beginning: PackedIds) -> PackedIds | None:
    """Return the whole sequence of a call stored without `beginning`, or None when it begins with something else.

    Raises CorruptEntryError when the stored bytes are not those that were written.
    """
    call = _read(rollout_id, row)
    if call.shared_len != len(beginning) or call.token_width < beginning.width:
        return None
    shared = beginning.at_width(call.token_width)
    if call.whole_sha256(shared) != row.payload_sha256:
        return None
    return PackedIds(call.token_width, shared.tobytes() + call.own_ids())


@dataclass(slots=True)
class _Call(Generic[Made]):
    """A call with what is made of it, or with what was stored until the beginning of its prompt is proven."""

    model_call_id: str
    parent_call_id: str | None
    is_delta: bool
    token_width: int
    payload_sha256: str
    stored: StoredCall | None = None
    made: Made | None = None

    @classmethod
    def read(cls, rollout_id: str, row: Any, make: Callable[[StoredCall], Made]) -> Self:
        stored = _read(rollout_id, row)
        call = cls(
            row.model_call_id, stored.parent_call_id, stored.is_delta, stored.token_width, row.payload_sha256
        )
        if stored.shared_len is None:
            call.made = make(stored)
        else:
            call.stored = stored
        return call

    @property
    def is_whole(self) -> bool:
        return self.made is not None and not self.is_delta


_Children = dict[str, list[_Call[Made]]]


def _made(
    rollout_id: str,
    calls: list[_Call[Made]],
    below: Callable[[_Call[Made], _Children[Made], _Prover], None],
) -> list[Made]:
    """Return what is made of each call, once `below` has proven and made those below each whole one."""
    children = _children_to_rebuild(calls)
    with _Prover() as prover:
        for whole in [call for call in calls if call.is_whole and call.model_call_id in children]:
            below(whole, children, prover)
    made = [call.made for call in calls if call.made is not None]
    if len(made) < len(calls):
        raise _unreached(rollout_id, calls)
    return made


def _read(rollout_id: str, row: Any) -> StoredCall:
    # A whole payload is proven by its own hash only, whatever the other column says.
    is_whole = row.stored_sha256 is None
    call = read_call(
        row.payload,
        row.payload_sha256 if is_whole else row.stored_sha256,
        rollout_id=rollout_id,
        model_call_id=row.model_call_id,
    )
    if is_whole != (call.shared_len is None):
        raise CorruptEntryError(
            f"{call_name(rollout_id, row.model_call_id)}: the row does not say in which form its payload is stored; "
            "it was edited"
        )
    return call


def _children_to_rebuild(calls: list[_Call[Made]]) -> _Children[Made]:
    """Return, by parent, the calls to be rebuilt and the deltas between them and a whole call."""
    by_id = {call.model_call_id: call for call in calls}
    children: _Children[Made] = {}
    linked = set()
    for stored in calls:
        if stored.made is not None:
            continue
        call: _Call[Made] | None = stored
        while call is not None and not call.is_whole and call.model_call_id not in linked:
            linked.add(call.model_call_id)
            parent = call.parent_call_id or ""
            children.setdefault(parent, []).append(call)
            call = by_id.get(parent)
    return children


class _Prover:
    """Proves whole payloads by their hash, beside what goes on where they are long.

    Whatever was not what was written is an error by the time the context ends.
    """

    def __init__(self) -> None:
        self._hashers = Hashers()
        self._pending: deque[tuple[Future[str], StoredCall, str]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        with self._hashers:
            while self._pending and failed is None:
                self._check()

    def prove(self, call: StoredCall, payload_sha256: str, packed: array[int]) -> None:
        """Prove that a call's shared prefix is the ids that `packed` holds at some width."""
        if call.shared_len != len(packed):
            raise _not_rebuilt(call)
        try:
            shared = _resized(packed, call.token_width)
        except OverflowError:
            raise _not_rebuilt(call) from None
        # The sequence goes on to grow while it is hashed.
        copy = shared[:] if shared is packed else shared
        size = len(copy) * copy.itemsize
        self._pending.append((self._hashers.start(size, call.whole_sha256, copy), call, payload_sha256))
        if len(self._pending) > _MOST_PENDING:
            self._check()

    def _check(self) -> None:
        found, call, payload_sha256 = self._pending.popleft()
        if found.result() != payload_sha256:
            raise _not_rebuilt(call)


def _resized(packed: array[int], width: int) -> array[int]:
    if packed.itemsize == width:
        return packed
    column = array(TYPECODES[width])
    column.frombytes(resized(packed.tobytes(), packed.itemsize, width))
    return column


def _prove_below(whole: _Call[ProvenCall], children: _Children[ProvenCall], prover: _Prover) -> None:
    # As below, but the sequence is only held as it is hashed.
    pending = [(whole, 0, array("H"))]
    while pending:
        call, length, packed = pending.pop()
        del packed[length:]
        if call.stored is not None:
            prover.prove(call.stored, call.payload_sha256, packed)
            call.made = ProvenCall.of(call.stored)
            call.stored = None
        below = children.get(call.model_call_id)
        if below and call.made is not None:
            packed = _resized(packed, max(packed.itemsize, call.token_width))
            for own in (call.made.prompt, call.made.generation):
                packed.frombytes(resized(little_endian(own), 8, packed.itemsize))
            pending += [(child, len(packed), packed) for child in below]


def _rebuild_below(whole: _Call[TokenEntry], children: _Children[TokenEntry], prover: _Prover) -> None:
    # Depth first, so that a single list holds the sequence of the parent at hand: below a call it only grows.
    ids: list[int] = []
    pending = [(whole, 0, array("H"))]
    while pending:
        call, length, packed = pending.pop()
        del ids[length:], packed[length:]
        if call.stored is not None:
            prover.prove(call.stored, call.payload_sha256, packed)
            call.made = call.stored.entry(ids)
            call.stored = None
        below = children.get(call.model_call_id)
        if below and call.made is not None:
            prompt = call.made.prompt_token_ids
            own = (prompt if call.is_delta else prompt[length:]) + call.made.generation_token_ids
            ids += own
            if call.token_width > packed.itemsize:
                packed = pack_ids(ids, call.token_width)
            else:
                packed.extend(pack_ids(own, packed.itemsize))
            pending += [(child, len(ids), packed) for child in below]


def _rebuilt(call: StoredCall, payload_sha256: str, ids: list[int]) -> TokenEntry:
    """Return the entry of a call whose parent's whole sequence is `ids`."""
    if call.shared_len is None:
        return call.entry([])
    if call.whole_sha256(_at_width_of(call, ids)) != payload_sha256:
        raise _not_rebuilt(call)
    return call.entry(ids)


def _at_width_of(call: StoredCall, ids: list[int]) -> array[int]:
    if call.shared_len != len(ids):
        raise _not_rebuilt(call)
    try:
        return pack_ids(ids, call.token_width)
    except OverflowError:
        raise _not_rebuilt(call) from None


def _not_rebuilt(call: StoredCall) -> CorruptEntryError:
    return CorruptEntryError(
        f"{call_name(call.fields['rollout_id'], call.fields['model_call_id'])}: its prompt cannot be rebuilt, for the "
        f"sequence of model call {call.parent_call_id!s:.512} is not the one with which it began; restore "
        "both from a backup"
    )


def _unreached(rollout_id: str, calls: list[_Call[Made]]) -> CorruptEntryError:
    by_id = {call.model_call_id: call for call in calls}
    first = next(call for call in calls if call.made is None)
    passed: set[str] = set()
    wanted = first.model_call_id
    while wanted in by_id and wanted not in passed:
        passed.add(wanted)
        wanted = by_id[wanted].parent_call_id or ""
    return _without_beginning(rollout_id, first.model_call_id, wanted, is_circle=wanted in passed)


def _without_beginning(
    rollout_id: str, model_call_id: str, parent_call_id: str, *, is_circle: bool
) -> CorruptEntryError:
    problem = "is its own parent, through others or directly" if is_circle else "is missing"
    return CorruptEntryError(
        f"{call_name(rollout_id, model_call_id)}: its prompt cannot be rebuilt, for model call {parent_call_id:.512}, "
        f"in which it began, {problem}; restore the rollout from a backup"
    )


def _chain_up(rollout_id: str, rows: dict[str, Any], model_call_id: str) -> list[tuple[Any, StoredCall]]:
    """Return the rows from the call up to the first whose whole prompt is stored."""
    chain: list[tuple[Any, StoredCall]] = []
    passed: set[str] = set()
    wanted = model_call_id
    while wanted in rows and wanted not in passed:
        passed.add(wanted)
        call = _read(rollout_id, rows[wanted])
        chain.append((rows[wanted], call))
        if call.shared_len is None and not call.is_delta:
            return chain
        wanted = call.parent_call_id or ""
    if not chain:
        raise CorruptEntryError(f"{call_name(rollout_id, model_call_id)}: its row is missing")
    for row, call in reversed(chain):
        if call.shared_len is not None:
            raise _without_beginning(rollout_id, row.model_call_id, wanted, is_circle=wanted in passed)
    raise LineageError(f"{call_name(rollout_id, chain[-1][0].model_call_id)}: its parent chain is broken")
