"""The calls that the stores are given: random tokens, stamped as a serving process stamps them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.support.ledger import make_commit
from tokencustody import ParentResolutionStatus, TokenEntry, stamp_continuation, stamp_lineage
from tokencustody.staging.digest import compute_chain_hash, compute_extras_digest, hash_token_ids
from tokencustody.staging.records import CaptureLedgerCommit, StagedCallRecord

CALLS = 10  # of a rollout, unless its workload says otherwise
NEW_IDS, SAMPLED_IDS = 250, 500  # of each call of a growing rollout
# One object for each token: a list of tokens then costs eight bytes a token, whatever it holds.
_VOCABULARY = list(range(151_936))

Request = list[dict[str, Any]]


def independent_rollouts(count: int, prompt: int, generated: int) -> list[list[TokenEntry]]:
    """Return `count` rollouts of ten calls, each a root with tokens of its own."""
    rng = random.Random(0)
    return [
        [
            _entry(
                rng,
                rollout_name(number),
                call,
                request=[{"role": "user", "content": f"task {number}, question {call}"}],
                prompt=rng.choices(_VOCABULARY, k=prompt),
                generated=generated,
            )
            for call in range(CALLS)
        ]
        for number in range(count)
    ]


def rollout_name(number: int) -> str:
    """Return the name of a rollout. Names of neighbours lie far apart, as those of real ones do."""
    return f"{number * 2_654_435_761 % 2**32:08x}"


@dataclass(frozen=True)
class GrowingRollout:
    """A rollout whose every call goes on from the one before. `requests` has one more: that of the next call."""

    entries: list[TokenEntry]
    requests: list[Request]

    @property
    def tokens(self) -> list[int]:
        """The whole sequence."""
        return self.entries[-1].prompt_token_ids + self.entries[-1].generation_token_ids


def growing_rollout(calls: int, rollout_id: str = "growing") -> GrowingRollout:
    """Return a rollout whose prompts hold the whole sequence of the call before and about 200 new ids."""
    rng = random.Random(calls)
    entries: list[TokenEntry] = []
    requests: list[Request] = [[{"role": "user", "content": "task"}]]
    tokens: list[int] = []
    for call in range(calls):
        prompt = tokens + rng.choices(_VOCABULARY, k=rng.randint(NEW_IDS - 20, NEW_IDS + 20))
        entry = _entry(
            rng,
            rollout_id,
            call,
            request=requests[-1],
            prompt=prompt,
            generated=rng.randint(SAMPLED_IDS - 20, SAMPLED_IDS + 20),
            parent=entries[-1].model_call_id if entries else None,
        )
        entries.append(entry)
        tokens = prompt + entry.generation_token_ids
        requests.append([*requests[-1], *entry.output_items, {"role": "user", "content": f"step {call}"}])
    return GrowingRollout(entries, requests)


def _entry(
    rng: random.Random,
    rollout_id: str,
    call: int,
    *,
    request: Request,
    prompt: list[int],
    generated: int,
    parent: str | None = None,
) -> TokenEntry:
    entry = TokenEntry(
        rollout_id=rollout_id,
        model_call_id=f"call-{call:03}",
        model="policy",
        prompt_token_ids=prompt,
        generation_token_ids=rng.choices(_VOCABULARY, k=generated),
        generation_log_probs=[-rng.expovariate(1) for _ in range(generated)],
        output_items=[
            {"type": "message", "role": "assistant", "content": f"answer {call} " + "word " * generated}
        ],
        token_item_index=0,
        response_id=f"resp-{rollout_id}-{call}",
        created_at=1_700_000_000.0 + call,
    )
    status = ParentResolutionStatus.RESOLVED if parent else ParentResolutionStatus.ROOT
    return stamp_continuation(stamp_lineage(entry, parent, parent_resolution=status), request)


def staged_rollout(
    rollout_id: str, added: int = NEW_IDS, sampled: int = SAMPLED_IDS
) -> list[StagedCallRecord]:
    """Return the records of ten staged calls in a line, as an inference worker makes them."""
    rng = random.Random(rollout_id)
    records: list[StagedCallRecord] = []
    tokens: list[int] = []
    for call in range(CALLS):
        delta = rng.choices(_VOCABULARY, k=added + sampled)
        parent = records[-1] if records else None
        tokens += delta
        records.append(
            StagedCallRecord.from_components(
                rollout_id=rollout_id,
                model_call_id=f"call-{call:03}",
                parent_call_id=parent.model_call_id if parent else None,
                mode="token_in" if parent else "text",
                prev_len=len(tokens) - len(delta),
                delta_len=len(delta),
                cum_len=len(tokens),
                weight_version=1,
                token_ids_delta=delta,
                token_mask_delta=[0.0] * added + [1.0] * sampled,
                generation_log_probs_delta=[0.0] * added + [-rng.expovariate(1) for _ in range(sampled)],
                extras=None,
                extras_digest=compute_extras_digest(None),
                chain_hash=compute_chain_hash(parent.chain_hash if parent else None, delta),
                cumulative_hash=hash_token_ids(tokens),
            )
        )
    return records


def ledger_line(calls: int, rollout_id: str = "ledger") -> Iterator[CaptureLedgerCommit]:
    """Yield the ledger commits of a rollout whose every call goes on from the one before."""
    request: Request = [{"role": "user", "content": "task"}]
    parent = None
    for call in range(calls):
        text = f"answer {call}"
        commit = make_commit(rollout_id, f"call-{call:03}", request=request, text=text, parent=parent)
        yield commit
        parent = commit
        request = [
            *request,
            {"role": "assistant", "content": text},
            {"role": "user", "content": f"step {call}"},
        ]
