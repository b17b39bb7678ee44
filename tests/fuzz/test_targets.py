"""Short, seeded runs of every target of scripts/fuzz."""

from __future__ import annotations

import hashlib
import logging
import random
import struct
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from campaigns.fuzzing import codec, commands, files, records, rows, spills
from campaigns.fuzzing.cases import Summary, Target, Violation, attempt, bounded, run
from campaigns.fuzzing.values import nested
from tests.support.entries import make_entry
from tokencustody.codec.calls import pack_entry, read_call
from tokencustody.codec.exact_json import encode_json
from tokencustody.errors import CorruptEntryError, InvalidRecordError

_PURE = {target.name: target for target in (*codec.TARGETS, *records.TARGETS)}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The stores say at length what they refuse; and marks must not wait on this host."""
    monkeypatch.setenv("TOKENCUSTODY_SPILL", str(tmp_path / "spill"))
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        # Pydantic warns when it prints a model to which a test assigned a wrong value.
        warnings.filterwarnings("ignore", "Pydantic serializer warnings", UserWarning)
        yield
    logging.disable(logging.NOTSET)


def _holds(target: Target, cases: int, *, seed: int = 0) -> Summary:
    summary = run(target, seed, lambda number: number < cases, most_violations=1)
    for violation in summary.violations:
        pytest.fail(f"case {violation.number} of {violation.target}, seed {seed}: {violation.text}")
    return summary


@pytest.mark.parametrize("name", _PURE)
def test_what_went_wrong_is_refused_by_name_or_comes_back_as_it_was(name: str) -> None:
    summary = _holds(_PURE[name], 150)
    assert summary.cases == sum(summary.ends.values()) == 150


@pytest.mark.parametrize(
    ("target", "case"), [(_PURE["receipts"], 67), (_PURE["receipts"], 3857), (files.TARGETS[0], 26)]
)
def test_a_case_that_once_broke_a_promise_breaks_none(target: Target, case: int) -> None:
    summary = run(target, 20261130, lambda number: number < 1, first=case)
    assert [violation.text for violation in summary.violations] == []


@pytest.mark.parametrize("name", ["payloads", "staged-payloads", "entries", "conversations"])
def test_hypothesis_finds_no_case_that_breaks_a_promise(name: str) -> None:
    with _PURE[name].opened("0") as case:

        @given(rng=st.randoms(use_true_random=False))
        @settings(max_examples=40, suppress_health_check=list(HealthCheck))
        def holds(rng: random.Random) -> None:
            case(rng)

        holds()


def test_what_put_and_its_like_refuse_leaves_no_row(store_url: str) -> None:
    summary = _holds(Target("put", rows.putting(store_url)), 30)
    assert summary.ends["InvalidRecordError"] > 10


def test_an_edited_row_is_an_error_by_name_or_changes_no_bit_of_what_is_read(store_url: str) -> None:
    summary = _holds(Target("rows", rows.edited(store_url)), 6)
    assert any(end.startswith("edited") for end in summary.ends)


def test_a_damaged_sqlite_file_is_an_error_by_name_and_no_changed_call_is_read() -> None:
    summary = _holds(files.TARGETS[0], 12)
    assert any("Error" in end for end in summary.ends)


def test_no_file_of_the_spill_becomes_a_mark_that_nobody_made() -> None:
    summary = _holds(spills.TARGETS[0], 15)
    assert any(end.endswith("2 of 3 stored") for end in summary.ends)


def test_no_command_line_ends_in_a_traceback() -> None:
    summary = _holds(commands.TARGETS[0], 35)
    assert sum(count for end, count in summary.ends.items() if end.endswith("exit code 0")) > 2


def test_a_case_that_takes_too_much_memory_or_an_error_without_a_name_is_a_violation() -> None:
    with pytest.raises(Violation, match="MiB of memory"), bounded():
        bytearray(2**34)
    with pytest.raises(Violation, match="without a name: KeyError"):
        attempt(lambda: {}["a"], (ValueError,))
    with pytest.raises(Violation, match="repeats 12345678"):
        attempt(lambda: int("a12345678"), (ValueError,), ("12345678",))


def test_a_wrong_answer_is_a_violation_that_can_be_made_again() -> None:
    def wrong(_seed: str) -> Any:
        def case(rng: random.Random) -> str:
            if rng.random() < 0.1:
                raise Violation("wrong")
            return "right"

        return nullcontext(case)

    target = Target("wrong", wrong)
    summary = run(target, 3, lambda number: number < 200)
    assert summary.violations
    for found in summary.violations:
        again = run(target, 3, lambda number: number < 1, first=found.number)
        assert [each.number for each in again.violations] == [found.number]
    assert summary.cases == 200 or len(summary.violations) == 20


@pytest.mark.parametrize("width", [1, 10**6])
def test_what_is_refused_deep_inside_costs_no_more_memory_than_it_has(width: int) -> None:
    wide = {"k" * 70_000: [*[0] * width, b"no JSON"]}
    with bounded(), pytest.raises(InvalidRecordError, match=r"x\.kkk.*…: bytes would not come back"):
        encode_json({"x": wide})


def test_values_that_never_end_are_refused_by_name() -> None:
    own: list[Any] = []
    own += [own, own]
    for endless in (own, {"a": [own]}, nested(100_000, lambda value: [value])):
        with bounded(), pytest.raises(InvalidRecordError, match="nested too deeply"):
            encode_json({"x": endless})


def test_a_header_that_claims_more_tokens_than_there_are_is_refused_before_memory_is_taken() -> None:
    payload = pack_entry(make_entry()).payload
    for at in (4, 12):
        for count in (2**60, 2**64 - 1, 2**40):
            forged = payload[:at] + struct.pack("<Q", count) + payload[at + 8 :]
            with bounded(), pytest.raises(CorruptEntryError, match="call-1 of rollout rollout-1"):
                read_call(
                    forged,
                    hashlib.sha256(forged).hexdigest(),
                    rollout_id="rollout-1",
                    model_call_id="call-1",
                ).generation()
