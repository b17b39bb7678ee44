"""Whole sequences of calls that this process wrote or resolved: what children share, and what resolution returns.

Nothing is taken from here unless the database still holds the call with the same payload hash, asked in the same
transaction; so a rollout that another process retired or deleted is never served.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock

from tokencustody.codec.id_columns import PackedIds
from tokencustody.txn.fence import RolloutKey

_MOST_BYTES = 64 * 2**20
# About what an item takes beside its ids.
_OVERHEAD = 600


@dataclass(frozen=True, slots=True)
class KnownSequence:
    """The prompt and generated ids of a call, as they were in the payload whose identity is `payload_sha256`.

    `digest` is `compute_digest` of them, once it is known to be what the call records, if it records one. The identity
    of a writer's delta (`is_delta`) does not cover the ids that it continues.
    """

    payload_sha256: str
    ids: PackedIds
    digest: str | None = None
    is_delta: bool = False


class KnownSequences:
    """The sequences that were used last, within a bound of memory. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._held: OrderedDict[tuple[RolloutKey, str], KnownSequence] = OrderedDict()
        self._bytes = 0

    def find(self, key: RolloutKey, model_call_id: str) -> KnownSequence | None:
        """Return the sequence of a call as it was last seen."""
        with self._lock:
            known = self._held.get((key, model_call_id))
            if known is not None:
                self._held.move_to_end((key, model_call_id))
            return known

    def keep(self, key: RolloutKey, model_call_id: str, sequence: KnownSequence) -> None:
        """Keep a sequence, in place of those that were not used for longest if need be."""
        with self._lock:
            replaced = self._held.pop((key, model_call_id), None)
            self._held[key, model_call_id] = sequence
            self._bytes += _size(sequence) - (_size(replaced) if replaced is not None else 0)
            while self._bytes > _MOST_BYTES:
                _, oldest = self._held.popitem(last=False)
                self._bytes -= _size(oldest)


def _size(sequence: KnownSequence) -> int:
    return len(sequence.ids.data) + _OVERHEAD
