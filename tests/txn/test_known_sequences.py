"""What a process remembers of the calls it wrote and resolved: bounded, and never taken for another call's."""

from __future__ import annotations

import threading

import pytest

from tokencustody.codec.id_columns import PackedIds
from tokencustody.txn import sequences
from tokencustody.txn.fence import RolloutKey
from tokencustody.txn.sequences import KnownSequence, KnownSequences

KEY = RolloutKey("run", "rollout")


@pytest.fixture(autouse=True)
def _room_for_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "_MOST_BYTES", 4 * sequences._size(sequence(100)))


def sequence(length: int, sha256: str = "0" * 64) -> KnownSequence:
    return KnownSequence(sha256, PackedIds.of([7] * length))


def held(known: KnownSequences, *calls: str) -> list[str]:
    return [call for call in calls if known.find(KEY, call) is not None]


def test_what_was_not_used_for_longest_goes_first() -> None:
    known = KnownSequences()
    for call in "abcd":
        known.keep(KEY, call, sequence(100))
    known.find(KEY, "a")
    known.keep(KEY, "e", sequence(100))
    assert held(known, *"abcde") == ["a", "c", "d", "e"]


def test_a_call_is_known_by_its_run_its_rollout_and_its_id() -> None:
    known = KnownSequences()
    known.keep(KEY, "a", sequence(1))
    for other in (RolloutKey("run", "other"), RolloutKey("other", "rollout")):
        assert known.find(other, "a") is None
    assert known.find(KEY, "b") is None


def test_the_last_that_was_seen_of_a_call_takes_the_place_of_the_one_before() -> None:
    known = KnownSequences()
    for number in range(100):
        known.keep(KEY, "a", sequence(100, f"{number:064}"))
        known.keep(KEY, "b", sequence(100))
    found = known.find(KEY, "a")
    assert found is not None
    assert found.payload_sha256 == f"{99:064}"
    for call in "cd":
        known.keep(KEY, call, sequence(100))
    assert held(known, *"abcd") == ["a", "b", "c", "d"]  # nothing was counted twice


def test_a_sequence_that_is_larger_than_the_bound_is_not_kept_and_leaves_room_for_others() -> None:
    known = KnownSequences()
    known.keep(KEY, "huge", sequence(100_000))
    assert held(known, "huge") == []
    for call in "abcd":
        known.keep(KEY, call, sequence(100))
    assert held(known, *"abcd") == ["a", "b", "c", "d"]


def test_many_short_sequences_are_bounded_too() -> None:
    known = KnownSequences()
    for number in range(10_000):
        known.keep(KEY, f"call-{number}", sequence(0))
    assert len(known._held) < 10


def test_any_thread_may_use_it() -> None:
    known = KnownSequences()
    problems: list[str] = []

    def use(name: str) -> None:
        for number in range(2000):
            sha256 = f"{name}{number % 7}"
            known.keep(KEY, sha256, sequence(number % 100, sha256))
            found = known.find(KEY, sha256)
            if found is not None and found.payload_sha256 != sha256:
                problems.append(sha256)

    threads = [threading.Thread(target=use, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert known._bytes == sum(map(sequences._size, known._held.values()))
