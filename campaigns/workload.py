"""What the workers of a campaign do: rollouts that every process plans alike, and the next step with one of them.

A rollout follows from the campaign's seed and the rollout's number alone, so that a process which repeats a call that
another one has stored sends the same bytes.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from random import Random
from typing import Any

from tokencustody.fingerprint import FINGERPRINT_VERSION, assistant_fingerprint
from tokencustody.lineage import stamp_continuation
from tokencustody.records import ParentResolutionStatus, TokenEntry, stamp_lineage
from tokencustody.staging.digest import compute_chain_hash, compute_extras_digest, hash_token_ids
from tokencustody.staging.records import CallRecord, CaptureLedgerCommit, StagedCallRecord, staging_key

_ODD_TEXTS = (
    "",
    "plain",
    "\u0000 inside",
    "cafe\u0301 and caf\u00e9",
    "\u202eright to left",
    "\U0001f9ea\u200d\U0001f52c",
    "\ufeffmark \uffff",
    'quote " back \\ slash \r\n\t',
    "\U0010ffff",
)
_ODD_IDS = ("", "-e\u0301", "-\u00e9", "-\U0001f9ea", "-a/b", "-%_'\"", "-\u202e", "-Z")
_ODD_FLOATS = tuple(
    struct.unpack("<d", struct.pack("<Q", bits))[0]
    for bits in (
        0x7FF8000000000000,  # NaN
        0xFFF8000000000001,  # NaN of other bits
        0x7FF0000000000000,  # infinity
        0xFFF0000000000000,
        0x8000000000000000,  # -0.0
        0x0000000000000001,  # the smallest number
        0x7FEFFFFFFFFFFFFF,
    )
)
# A moment is kept as text, in which every NaN reads alike.
_ODD_TIMES = (1_700_000_000.25, *(value for value in _ODD_FLOATS if value == value))
_LARGEST_IDS = (50_000, 200_000, 2**32, 2**64)
REFUSAL_CODES = ("content_filter", "overloaded")
FAILURE_REASONS = ("unresolved_parent", "request_finished_without_staged_coordinates")

# Chances of each step, and what is added to them as a rollout comes to its end.
_EARLY = {
    "put": 30.0,
    "begin": 8.0,
    "refuse": 3.0,
    "mark": 1.5,
    "resolve": 14.0,
    "record": 9.0,
    "record_failure": 1.5,
    "manifest": 3.0,
    "stage": 6.0,
    "fetch": 5.0,
    "unstage": 1.0,
    "freeze": 0.4,
    "drop": 0.2,
    "retire": 0.1,
    "delete": 0.1,
}
_LATE = {"mark": 3.0, "freeze": 12.0, "drop": 9.0, "retire": 2.0, "delete": 3.0}
_LATE_FROM = 0.6
# Some rollouts are deleted now and then, and what comes after is often another variant of the same calls.
_RECYCLED = 0.2
_RECYCLING = {"delete": 2.0}
_VARIANTS = (94, 3, 3)
_RECYCLED_VARIANTS = (60, 10, 30)


def content_id(value: Any) -> str:
    """Return a SHA-256 of plain data in which every bit counts: types, signs of zero, the bits of a NaN."""
    hasher = hashlib.sha256()
    _add(hasher, value)
    return hasher.hexdigest()


def _add(hasher: Any, value: Any) -> None:
    match value:
        case None | bool():
            hasher.update(f"{value};".encode())
        case int():
            hasher.update(f"i{value};".encode())
        case float():
            hasher.update(b"f" + struct.pack("<d", value))
        case str():
            text = value.encode()
            hasher.update(b"s%d:" % len(text) + text)
        case list() | tuple():
            if (column := _column(value)) is not None:
                hasher.update(b"%b%d:" % (column.typecode.encode(), len(column)) + column.tobytes())
                return
            hasher.update(b"l%d:" % len(value))
            for item in value:
                _add(hasher, item)
        case Mapping():
            hasher.update(b"m%d:" % len(value))
            for key in sorted(value):
                _add(hasher, key)
                _add(hasher, value[key])
        case _:
            raise TypeError(f"{type(value).__name__} is not plain data")


def _column(values: Sequence[Any]) -> array[int] | array[float] | None:
    """Return a list of token ids or of floats as an array, which is hashed faster."""
    types = set(map(type, values))
    if types == {float}:
        return array("d", values)
    if types != {int}:
        return None
    try:
        return array("Q", values)
    except OverflowError:
        return None


def entry_id(entry: TokenEntry) -> str:
    """Return the content id of a complete record."""
    return content_id(entry.model_dump())


def staged_id(snapshot: Any) -> str:
    """Return the content id of a staged call without its extras, for which its extras digest stands."""
    return content_id(snapshot.model_dump(exclude={"extras"}))


def record_id(record: Mapping[str, Any]) -> str:
    """Return the content id of a row of a manifest."""
    return content_id({name: value for name, value in record.items() if value is not None})


@dataclass(frozen=True, eq=False)
class Call:
    """One model call of a planned rollout. `prompt` is whole, and begins with the whole sequence of `parent`.

    A call has several variants under its one id. 0 is the right one; 1 has another log probability, 2 other tokens.
    """

    rollout: str
    id: str
    parent: Call | None
    request: list[dict[str, Any]]
    answer: dict[str, Any]
    prompt: list[int]
    generated: list[int]
    is_delta: bool
    is_resolved: bool
    seed: str

    @cached_property
    def sequence(self) -> list[int]:
        """The whole prompt and what was generated."""
        return self.prompt + self.generated

    @cached_property
    def conversation(self) -> str:
        """The id of the conversation, this call's answer included."""
        return content_id([*self.request, self.answer])

    @cached_property
    def line(self) -> list[Call]:
        """The calls that the request continues, root first."""
        return [] if self.parent is None else [*self.parent.line, self.parent]

    def tokens(self, variant: int) -> list[int]:
        """Return the whole sequence of a variant."""
        return self.prompt + self._generated(variant)

    def entry(self, variant: int = 0) -> TokenEntry:
        """Return the complete record."""
        rng = Random(self.seed)
        generated = self._generated(variant)
        start = len(self.parent.sequence) if self.is_delta and self.parent else 0
        log_probs = _log_probs(rng, len(generated), odd=0.05)
        if variant == 1:
            log_probs[-1] = 0.0 if str(log_probs[-1]) == "-0.0" else -0.0
        entry = TokenEntry(
            rollout_id=self.rollout,
            model_call_id=self.id,
            model=rng.choice(_ODD_TEXTS),
            prompt_token_ids=self.prompt[start:],
            generation_token_ids=generated,
            generation_log_probs=log_probs,
            routed_experts=rng.choice((None, [[rng.randrange(64)] for _ in range(3)])),
            output_items=[self.answer],
            token_item_index=0,
            response_id=f"response-{self.id}",
            created_at=rng.choice(_ODD_TIMES),
            parent_call_id=self.parent.id if self.parent and self.is_resolved else None,
            parent_resolution=self._resolution,
            prompt_is_delta=self.is_delta,
            attempt={
                "number": 2**70 + rng.randrange(9),
                "note": rng.choice(_ODD_TEXTS),
                "of": [None, True, -0.0],
            },
        )
        stamp_lineage(
            entry,
            entry.parent_call_id,
            parent_resolution=self._resolution,
            cumulative=self.prompt + generated,
        )
        return stamp_continuation(entry, self.request)

    def staged(self, variant: int = 0) -> StagedCallRecord:
        """Return the record that an inference worker stages."""
        rng = Random(self.seed)
        generated = self._generated(variant)
        ids = self.prompt[self._start :] + generated
        mask = [0.0] * (len(ids) - len(generated)) + [1.0] * len(generated)
        log_probs = [value and -rng.random() for value in mask]
        extras = rng.choice((None, {"routes": [[1, 2]], "note": rng.choice(_ODD_TEXTS)}))
        return StagedCallRecord.from_components(
            rollout_id=self.rollout,
            model_call_id=self.id,
            parent_call_id=self.parent.id if self.parent else None,
            mode="token_in" if self.parent else "text",
            prev_len=self._start,
            delta_len=len(ids),
            cum_len=self._start + len(ids),
            weight_version=variant,
            token_ids_delta=ids,
            token_mask_delta=mask,
            generation_log_probs_delta=log_probs,
            extras=extras,
            extras_digest=compute_extras_digest(extras),
            chain_hash=self._chain_hash(variant),
            cumulative_hash=hash_token_ids(self.prompt + generated),
        )

    def commit(self, variant: int = 0) -> CaptureLedgerCommit:
        """Return the row of the ledger, for the call as it is staged."""
        staged = self.staged(variant)
        record = CallRecord(
            **staged.model_dump(include=set(CallRecord.model_fields)),
            staging_key=staged.staging_key,
            response_id=f"response-{self.id}",
            admitted_at=1_700_000_000.5,
            output_fingerprint=assistant_fingerprint([self.answer]),
            continuation_fingerprint=assistant_fingerprint([*self.request, self.answer]),
            fingerprint_version=FINGERPRINT_VERSION,
        )
        return CaptureLedgerCommit(
            rollout_id=self.rollout,
            record=record,
            staging_chain=tuple(staging_key(self.rollout, call.id) for call in [*self.line, self]),
            request_items=self.request,
            response_items=[self.answer],
        )

    @property
    def _start(self) -> int:
        return len(self.parent.sequence) if self.parent else 0

    @property
    def _resolution(self) -> ParentResolutionStatus:
        if self.parent is None:
            return ParentResolutionStatus.ROOT
        return ParentResolutionStatus.RESOLVED if self.is_resolved else ParentResolutionStatus.UNRESOLVED

    def _generated(self, variant: int) -> list[int]:
        return [self.generated[0] ^ 1, *self.generated[1:]] if variant == 2 else self.generated

    def _chain_hash(self, variant: int) -> str:
        parent = self.parent._chain_hash(0) if self.parent else None
        return compute_chain_hash(parent, self.prompt[self._start :] + self._generated(variant))


def _log_probs(rng: Random, count: int, *, odd: float) -> list[float]:
    return [rng.choice(_ODD_FLOATS) if rng.random() < odd else -rng.expovariate(1) for _ in range(count)]


@dataclass(frozen=True, eq=False)
class Rollout:
    """A planned rollout: a forest of calls, parents before their children.

    Some calls are twins: they answer the same request alike, with the same tokens (interchangeable parents) or with
    others (ambiguous ones).
    """

    id: str
    calls: list[Call]
    is_recycled: bool


@lru_cache(maxsize=32)
def plan_rollout(seed: int, number: int) -> Rollout:
    """Return the rollout of this number, the same in every process."""
    rng = Random(f"{seed}/{number}")
    rollout = f"rollout-{number}"
    largest = rng.choice(_LARGEST_IDS)
    prompt = 20_000 if rng.random() < 0.02 else rng.randint(20, 200)
    calls: list[Call] = []
    for index in range(rng.randint(14, 26)):
        call_id = f"{index:02}{rng.choice(_ODD_IDS)}"
        call_seed = f"{seed}/{number}/{index}"
        kind = rng.random()
        if calls and kind < 0.15:
            twin = calls[rng.randrange(len(calls))]
            generated = twin.generated if rng.random() < 0.5 else _ids(rng, len(twin.generated), largest)
            calls.append(_twin(twin, call_id, generated, call_seed))
            continue
        parent = (
            None if not calls or kind < 0.25 else calls[-1 - min(int(rng.expovariate(0.7)), len(calls) - 1)]
        )
        question = f"question {index} {rng.choice(_ODD_TEXTS)}"
        answer: dict[str, Any] = {
            "role": "assistant",
            "content": f"answer {number}/{index} {rng.choice(_ODD_TEXTS)}",
        }
        if rng.random() < 0.2:
            function = {"name": "look", "arguments": f'{{"at": {index}}}'}
            answer["tool_calls"] = [{"id": f"tool-{index}", "type": "function", "function": function}]
        is_resolved = parent is not None and rng.random() < 0.95
        calls.append(
            Call(
                rollout=rollout,
                id=call_id,
                parent=parent,
                request=[*_continued(parent), {"role": "user", "content": question}],
                answer=answer,
                prompt=(parent.sequence if parent else _ids(rng, prompt, largest))
                + _ids(rng, rng.randint(1, 40), largest),
                generated=_ids(rng, rng.randint(1, 60), largest),
                is_delta=is_resolved and rng.random() < 0.12,
                is_resolved=is_resolved,
                seed=call_seed,
            )
        )
    return Rollout(rollout, calls, rng.random() < _RECYCLED)


def _twin(call: Call, call_id: str, generated: list[int], seed: str) -> Call:
    return Call(
        rollout=call.rollout,
        id=call_id,
        parent=call.parent,
        request=call.request,
        answer=call.answer,
        prompt=call.prompt,
        generated=generated,
        is_delta=call.is_delta,
        is_resolved=call.is_resolved,
        seed=seed,
    )


def _continued(parent: Call | None) -> Iterable[dict[str, Any]]:
    if parent is None:
        return []
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "seen"}
        for call in parent.answer.get("tool_calls", ())
    ]
    return [*parent.request, parent.answer, *results]


def _ids(rng: Random, count: int, largest: int) -> list[int]:
    return [rng.randrange(largest) for _ in range(count)]


@dataclass(frozen=True)
class Step:
    """The next operation: its name as in the history, and what it is about."""

    name: str
    call: Call
    variant: int
    second_choice: bool  # the other refusal code, failure reason or snapshot


def choose_step(rng: Random, rollout: Rollout, age: float) -> Step:
    """Return what to do next with a rollout whose age grows from 0.0 to 1.0.

    Calls come up about in the order of the plan, most of them several times.
    """
    late = max(0.0, (age - _LATE_FROM) / (1 - _LATE_FROM)) ** 2
    added = _RECYCLING if rollout.is_recycled else {}
    weights = [weight + late * _LATE.get(name, 0.0) + added.get(name, 0.0) for name, weight in _EARLY.items()]
    (name,) = rng.choices(list(_EARLY), weights)
    front = int(rng.gauss(1.3 * age * len(rollout.calls), 2.5))
    return Step(
        name,
        rollout.calls[min(max(front, 0), len(rollout.calls) - 1)],
        rng.choices((0, 1, 2), _RECYCLED_VARIANTS if rollout.is_recycled else _VARIANTS)[0],
        rng.random() < 0.15,
    )
