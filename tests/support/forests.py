"""Rollouts of every kind of call, made up by a seeded chance."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.support.entries import make_entry
from tokencustody import TokenEntry
from tokencustody.chains.reading import CallFacts, FrozenRollout
from tokencustody.codec.calls import pack_entry, read_call
from tokencustody.codec.proven import ProvenCall
from tokencustody.txn.fence import RolloutKey


@dataclass
class Forests:
    """Rollouts of calls that were made up by a seeded chance, and the prompt after which each one was sampled."""

    seed: int
    rollout_id: str = "forest"
    entries: list[TokenEntry] = field(default_factory=list)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    requests: dict[str, str] = field(default_factory=dict)
    without_request: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        token = iter(range(1_000, 10**9))
        for number in range(rng.randint(1, 14)):
            name = f"call-{rng.randrange(1000):03}-{number}"
            parent = rng.choice(self.entries) if self.entries and rng.random() < 0.8 else None
            # Ids that no other call has, so that what is trained tells which call sampled it.
            sampled = [next(token) for _ in range(rng.choice([0, 1, 1, 2, 3]))]
            added = [next(token) for _ in range(rng.randint(0, 2))]
            kind = rng.choice(
                ["full"] * 6 + ["delta"] * 2 + ["retokenized", "compacted", "unresolved", "unstamped", "lost"]
            )
            if parent is None:
                kind = rng.choice(["full", "full", "unresolved", "unstamped", "lost"])
            before = self.sequence(parent) if parent is not None else [1, 2]
            prompt = [*before, *added]
            if kind == "retokenized":
                prompt[rng.randrange(len(prompt))] = next(token)
            elif kind == "compacted":
                prompt = [next(token), *added]
            request = name
            retried = [entry for entry in self.entries if not entry.prompt_is_delta]
            if retried and rng.random() < 0.25:
                # Asked again, with the same prompt below the same parent.
                twin = rng.choice(retried)
                prompt, kind = self.prompts[twin.model_call_id], "twin"
                fields: dict[str, Any] = {
                    "parent": twin.parent_call_id,
                    "parent_resolution": twin.parent_resolution,
                }
                if rng.random() < 0.6:
                    # The same request, perhaps with a clock in its prompt, and perhaps with a parent that is not known.
                    request = self.requests[twin.model_call_id]
                    if rng.random() < 0.5:
                        prompt = [next(token), *prompt[1:]]
                    if rng.random() < 0.3:
                        fields = {"parent": None, "parent_resolution": "unresolved"}
            else:
                fields = {"parent": parent.model_call_id if parent is not None else None}
                if kind in ("unresolved", "unstamped"):
                    fields = {"parent_resolution": "unresolved" if kind == "unresolved" else None}
                elif kind == "lost":
                    fields = {"parent": "never-stored"}
            self.prompts[name] = prompt
            self.requests[name] = request
            resolution = fields.pop("parent_resolution", "stamped")
            entry = make_entry(
                self.rollout_id,
                name,
                prompt=added if kind == "delta" else prompt,
                generation=sampled,
                request=[{"role": "user", "content": request}],
                prompt_is_delta=kind == "delta",
                cumulative=[*prompt, *sampled] if kind == "delta" else None,
                **fields,
            )
            if rng.random() < 0.2:
                entry.continuation_context_digest = entry.continuation_fingerprint = ""
                self.without_request.add(name)
            if resolution != "stamped":
                entry = entry.model_copy(update={"parent_resolution": resolution})
            self.entries.append(entry)

    def sequence(self, entry: TokenEntry) -> list[int]:
        return [*self.prompts[entry.model_call_id], *entry.generation_token_ids]

    def sequence_of(self, name: str) -> list[int]:
        return next(self.sequence(entry) for entry in self.entries if entry.model_call_id == name)

    def rollout(self) -> FrozenRollout:
        facts = {
            entry.model_call_id: CallFacts("0" * 64, None, "", is_conflicting=False) for entry in self.entries
        }
        key = RolloutKey("run", self.rollout_id)
        calls = {entry.model_call_id: proven(entry) for entry in self.entries}
        return FrozenRollout(key, "s", 1, False, calls, facts, (), (), {}, (), {})


def proven(entry: TokenEntry) -> ProvenCall:
    """Return the call as it is read, where it was stored whole."""
    packed = pack_entry(entry)
    ids = {"rollout_id": entry.rollout_id, "model_call_id": entry.model_call_id}
    return ProvenCall.of(read_call(packed.payload, packed.sha256, **ids))
