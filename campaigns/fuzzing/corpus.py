"""Calls of every form that a store holds, made from a seed, and what each of them must come back as."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tokencustody.codec.calls import pack_entry, validated, without_prefix
from tokencustody.codec.staged import CALL_COLUMNS, pack_call
from tokencustody.fingerprint import FINGERPRINT_VERSION, assistant_fingerprint
from tokencustody.lineage import stamp_continuation
from tokencustody.records import (
    TOKEN_FIELDS,
    ParentResolutionStatus,
    TokenEntry,
    compute_digest,
    stamp_lineage,
)
from tokencustody.staging.digest import compute_chain_hash, compute_extras_digest, hash_token_ids
from tokencustody.staging.records import CallRecord, CaptureLedgerCommit, StagedCallRecord

# What ids are drawn from: the narrowest width that holds them is 2, 4 or 8 bytes. Long enough to be told from any
# other number in a message.
_RANGES = ((60_000, 2**16), (2**31, 2**32), (2**63, 2**64))


@dataclass(frozen=True)
class Call:
    """A complete record, the request that it answered, and its whole sequence."""

    entry: TokenEntry
    request: list[dict[str, Any]]
    tokens: list[int]

    def next_request(self) -> list[dict[str, Any]]:
        """Return a request that continues this call."""
        return [*self.request, *self.entry.output_items, {"role": "user", "content": "and then?"}]


def calls(rng: random.Random, rollout_id: str, turns: int, *, deltas: bool = True) -> list[Call]:
    """Return calls that continue one another, of all token widths, some of them deltas, with branches."""
    made: list[Call] = []
    for number in range(turns):
        parent = rng.choice((made[-1], made[-1], rng.choice(made))) if made else None
        made.append(_call(rng, rollout_id, f"call-{number}", parent, deltas))
    return made


def _call(rng: random.Random, rollout_id: str, call_id: str, parent: Call | None, deltas: bool) -> Call:
    low, high = rng.choice(_RANGES)
    suffix = [rng.randrange(low, high) for _ in range(rng.randint(1, 5))]
    sampled = [rng.randrange(low, high) for _ in range(rng.randint(1, 5))]
    before = parent.tokens if parent else []
    is_delta = deltas and parent is not None and rng.random() < 0.3
    parent_id = parent.entry.model_call_id if parent else None
    resolution = ParentResolutionStatus.RESOLVED if parent else ParentResolutionStatus.ROOT
    tokens = [*before, *suffix, *sampled]
    request = parent.next_request() if parent else [{"role": "user", "content": f"task {rng.random()}"}]
    entry = TokenEntry(
        rollout_id=rollout_id,
        model_call_id=call_id,
        model=rng.choice(("", "m", "ü\0\U0001f600")),
        prompt_token_ids=suffix if is_delta else [*before, *suffix],
        generation_token_ids=sampled,
        generation_log_probs=[_log_prob(rng) for _ in sampled],
        output_items=[{"role": "assistant", "content": f"answer {rng.random()}"}],
        created_at=rng.choice((1.7e9 + rng.random(), float("nan"))),
        parent_call_id=parent_id,
        parent_resolution=resolution,
        prompt_is_delta=is_delta,
        routed_experts=rng.choice((None, [[1, 2], [3]], "nrlre1:int8:1x1x1:AA==")),
        **rng.choice(({}, {"seed": 2**70}, {"note": "x" * 6000, "scores": [0.5, -0.0, {"k": None}]})),
    )
    stamp_lineage(entry, parent_id, parent_resolution=resolution, cumulative=tokens)
    return Call(stamp_continuation(entry, request), request, tokens)


def put_anew(call: Call) -> Call:
    """Return a call of the same id and lengths with another last token, as after a deletion."""
    *before, last = call.tokens
    tokens = [*before, last - 1]
    generation = [*call.entry.generation_token_ids[:-1], last - 1]
    changed = {"generation_token_ids": generation, "digest": compute_digest(tokens)}
    return Call(call.entry.model_copy(update=changed), call.request, tokens)


def _log_prob(rng: random.Random) -> float:
    nan: float = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0000 | rng.getrandbits(20)))[0]
    return rng.choice((-rng.random(), -rng.random(), -0.0, float("-inf"), nan))


def in_bits(entry: TokenEntry) -> tuple[bytes, str]:
    """Return what two entries have in common exactly if every bit of them is the same."""
    log_probs = entry.generation_log_probs
    fields = {**entry.__dict__, **(entry.model_extra or {})}
    del fields[TOKEN_FIELDS[2]]
    return struct.pack(f"<{len(log_probs)}d", *log_probs), repr(_plain(fields))


def _plain(value: Any) -> Any:
    """Return a value of JSON's types without subclasses, which JSON does not bring back."""
    match value:
        case dict():
            return sorted((str.__str__(key), _plain(each)) for key, each in value.items())
        case list():
            return [_plain(each) for each in value]
        case str():
            return str.__str__(value)
        case bool() | None:
            return value
        case int():
            return int(value)
        case float():
            return float(value)
    return value


def secrets_of(made: Sequence[Call]) -> tuple[str, ...]:
    """Return the numbers of calls that no message may repeat."""
    ids = (str(token) for call in made for token in call.tokens if token >= 10**7)
    log_probs = (repr(value) for call in made for value in call.entry.generation_log_probs if -1 < value < 0)
    return (*ids, *log_probs)


def stored_rows(made: Sequence[Call], *, shares: bool = True) -> list[SimpleNamespace]:
    """Return the rows of calls as the store keeps them: without the prefix that the parent holds, if it `shares`."""
    sequences = {call.entry.model_call_id: call.tokens for call in made}
    rows = []
    for call in made:
        packed = pack_entry(validated(call.entry))
        parent, shared = call.entry.parent_call_id, None
        if shares and parent is not None and not call.entry.prompt_is_delta:
            shared = without_prefix(packed, len(sequences[parent]))
        rows.append(
            SimpleNamespace(
                model_call_id=call.entry.model_call_id,
                payload=packed.payload if shared is None else shared.payload,
                payload_sha256=packed.sha256,
                stored_sha256=None if shared is None else shared.sha256,
            )
        )
    return rows


def staged(rng: random.Random, rollout_id: str, turns: int) -> list[StagedCallRecord]:
    """Return staged calls that form one chain."""
    made: list[StagedCallRecord] = []
    token_ids: list[int] = []
    for number in range(turns):
        parent = made[-1] if made else None
        low, high = rng.choice(_RANGES)
        carried, sampled = rng.randint(1, 4), rng.randint(1, 4)
        delta = [rng.randrange(low, high) for _ in range(carried + sampled)]
        start = len(token_ids)
        token_ids += delta
        extras = rng.choice((None, {}, {"a": [1, -0.0, "ü", None, True], "b": {"c": -(2**63)}}))
        made.append(
            StagedCallRecord.from_components(
                rollout_id=rollout_id,
                model_call_id=f"call-{number}",
                parent_call_id=parent.model_call_id if parent else None,
                mode="token_in" if parent else "text",
                prev_len=start,
                delta_len=len(delta),
                cum_len=len(token_ids),
                weight_version=number,
                token_ids_delta=delta,
                token_mask_delta=[0.0] * carried + [1.0] * sampled,
                generation_log_probs_delta=[0.0] * carried + [-rng.random() for _ in range(sampled)],
                extras=extras,
                extras_digest=compute_extras_digest(extras),
                chain_hash=compute_chain_hash(parent.chain_hash if parent else None, delta),
                cumulative_hash=hash_token_ids(token_ids),
            )
        )
    return made


def staged_row(record: StagedCallRecord) -> SimpleNamespace:
    """Return the row of a staged call as the store keeps it."""
    packed = pack_call(record)
    return SimpleNamespace(
        **{name: getattr(record, name) for name in CALL_COLUMNS},
        payload=packed.payload,
        payload_sha256=packed.sha256,
        extras=packed.extras,
    )


def commits(made: Sequence[StagedCallRecord]) -> list[CaptureLedgerCommit]:
    """Return the ledger's commits of staged calls that form one chain."""
    request: list[dict[str, Any]] = [{"role": "user", "content": "task"}]
    found = []
    keys = [record.staging_key for record in made]
    for number, record in enumerate(made):
        answer = [{"role": "assistant", "content": f"answer {number}"}]
        shared = record.model_dump(include=set(CallRecord.model_fields))
        row = CallRecord(**shared, staging_key=keys[number], response_id=f"resp-{number}")
        found.append(
            CaptureLedgerCommit(
                rollout_id=record.rollout_id,
                record=_stamped(row, [*request, *answer]),
                staging_chain=tuple(keys[: number + 1]),
                request_items=list(request),
                response_items=answer,
            )
        )
        request += [*answer, {"role": "user", "content": "and then?"}]
    return found


def _stamped(row: CallRecord, conversation: list[dict[str, Any]]) -> CallRecord:
    return row.model_copy(
        update={
            "continuation_fingerprint": assistant_fingerprint(conversation),
            "fingerprint_version": FINGERPRINT_VERSION,
        }
    )
