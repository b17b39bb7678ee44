"""Sequences that grow along a tree of calls, and the order in which such a tree is walked."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from tokencustody.codec.id_columns import big_endian, resized, wide_ids
from tokencustody.columns import TYPECODES
from tokencustody.records import digest_of_uint64s
from tokencustody.staging.digest import PREFIX_DOMAIN

Call = TypeVar("Call")


class TokenSequence:
    """The token ids of a call and of those before it, kept encoded, so that each call costs only its own ids."""

    def __init__(self) -> None:
        self._encoded = bytearray()  # big-endian, 64 bits each
        self._packed: dict[int, array[int]] = {}

    def __len__(self) -> int:
        return len(self._encoded) // 8

    def cut(self, length: int) -> None:
        """Keep only the first `length` ids."""
        del self._encoded[8 * length :]
        for packed in self._packed.values():
            del packed[length:]

    def extend(self, packed: bytes, width: int) -> None:
        """Append ids as a payload holds them, little-endian, `width` bytes each."""
        self._encoded += big_endian(wide_ids(packed, width))

    def at_width(self, width: int) -> array[int]:
        """Return the ids as a payload holds them at `width`, valid until the next change.

        Raises OverflowError for an id that does not fit.
        """
        packed = self._packed.setdefault(width, array(TYPECODES[width]))
        if len(packed) < len(self):
            more = array("Q")
            more.frombytes(self._encoded[8 * len(packed) :])
            more.byteswap()  # into the order of a payload, whatever that of this machine is
            packed.frombytes(resized(more.tobytes(), 8, width))
        return packed

    def digest(self) -> str:
        """Return what `compute_digest` returns for the ids."""
        with memoryview(self._encoded) as encoded:
            return digest_of_uint64s(encoded)

    def staging_hash(self) -> str:
        """Return what `hash_token_ids` returns for the ids."""
        hasher = hashlib.sha256(PREFIX_DOMAIN + len(self).to_bytes(8, "big"))
        hasher.update(self._encoded)
        return hasher.hexdigest()


def walk(
    roots: Sequence[Call],
    children: Callable[[Call], Sequence[Call]],
    sequence: TokenSequence,
    visit: Callable[[Call], bool],
) -> None:
    """Visit the roots and what lies below them, each when `sequence` holds what stands before it.

    `visit` appends the call's own ids, or returns False: then nothing below it is visited.
    """
    pending = [(root, 0) for root in reversed(roots)]
    while pending:
        call, length = pending.pop()
        sequence.cut(length)
        if visit(call):
            pending += [(child, len(sequence)) for child in reversed(children(call))]


def why_not_reached(call_id: str, parents: Mapping[str, str | None], bad: Collection[str]) -> tuple[str, str]:
    """Return the nearest ancestor because of which a call was not visited, and what is wrong with it.

    `parents` names the parent of every call that is there, None for one that begins a sequence.
    """
    passed = {call_id}
    wanted = parents[call_id]
    while wanted is not None and wanted in parents and wanted not in bad and wanted not in passed:
        passed.add(wanted)
        wanted = parents[wanted]
    if wanted in bad:
        return str(wanted), "is not what was written"
    return str(wanted), "is its own ancestor" if wanted in passed else "is missing"
