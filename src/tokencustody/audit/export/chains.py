"""Rows for a trainer: paths from the first call of a segment to a leaf, with the tokens that each of them trains."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tokencustody.audit.export.engine_fields import EngineFields, engine_fields
from tokencustody.audit.export.reading import FrozenRollout
from tokencustody.audit.export.report import LeftOut, Why
from tokencustody.audit.export.rules import OnBreak, RowRules, SharedCalls
from tokencustody.audit.export.segments import Placed, Segments


@dataclass(frozen=True, slots=True)
class Link:
    """One call of a chain: the tokens `start` up to the next call's `start`, of which those from `generation_start` on
    were sampled."""

    model_call_id: str
    start: int
    generation_start: int
    generation_len: int
    engine: EngineFields
    model: str
    parent_resolution: str | None
    response_id: str | None
    payload_sha256: str


@dataclass(frozen=True, slots=True)
class Chain:
    """One row for a trainer; the three columns have one value for each token.

    `loss_mask` is 1 where a sampled token is to be trained here; `log_probs` (natural logarithms) are 0.0 elsewhere.
    `digest` is `compute_digest` of `token_ids`. `segment` numbers the segments of the rollout from 0, and `broke` says
    why this one does not continue another, None for a root.
    """

    source: str
    token_ids: array[int]
    loss_mask: array[int]
    log_probs: array[float]
    links: tuple[Link, ...]
    digest: str
    segment: int = 0
    broke: str | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """How much of a rollout its rows are.

    `breaks` counts the segments that do not begin with a root, by reason. `calls_left_out` are in no row. `whole`: the
    rollout lost nothing, for all that it left out are retries that the agent never received, and calls that sampled
    nothing. `is_held`: every token that was sampled in it is in the rows.
    """

    segments: int
    breaks: dict[str, int] = field(default_factory=dict)
    calls_left_out: int = 0
    whole: bool = True
    is_held: bool = True


def count_not_finite(log_probs: Sequence[float]) -> int:
    """Return how many are a NaN or an infinity."""
    # A sum with one of them in it is no finite number; nearly always there is none.
    return 0 if math.isfinite(sum(log_probs)) else sum(not math.isfinite(each) for each in log_probs)


class Forest:
    """The rows of a rollout, and what is in none of them, each call with its reason and in commit order."""

    def __init__(self, rollout: FrozenRollout, rules: RowRules) -> None:
        self._rollout = rollout
        self._rules = rules
        self._segments = Segments(rollout, rules)
        self._paths = self._trained_paths()
        in_rows = {call.entry.model_call_id for path, _ in self._paths for call in path}
        silent = [
            LeftOut.of(rollout.key, Why.NO_GENERATED_TOKENS, call)
            for call in self._segments.placed
            if call not in in_rows
        ]
        self.left_out = silent + self._segments.left_out
        broken = Counter(why for why in self._segments.breaks.values() if why is not None)
        self.shape = Shape(
            segments=len(self._segments.breaks),
            breaks={why.value: times for why, times in sorted(broken.items())},
            calls_left_out=len(rollout.entries) - len(in_rows),
            whole=not (
                rollout.incomplete
                or broken[Why.PARENT_MISSING]
                or broken[Why.PARENT_CYCLE]
                or any(not Why(left.reason).is_harmless for left in self.left_out)
            ),
            is_held=all(left.reason == Why.NO_GENERATED_TOKENS for left in self.left_out),
        )
        order = {entry.model_call_id: index for index, entry in enumerate(rollout.entries)}
        self.left_out.sort(key=lambda left: order[left.model_call_id])
        if rules.on_break is OnBreak.MASK:
            self._mask(order)

    def chains(self) -> Iterator[Chain]:
        """Yield one chain for each leaf, in the order in which the leaves were committed, then by call id."""
        numbers = {top: number for number, top in enumerate(self._segments.breaks)}
        for path, trained in self._paths:
            top = path[0].top
            yield self._chain(path, trained, numbers[top], self._segments.breaks[top])

    def _trained_paths(self) -> list[tuple[list[Placed], frozenset[str]]]:
        """Return the path to each leaf, and the calls that are trained in an earlier one."""
        placed = self._segments.placed
        parents = {call.parent for call in placed.values()}
        paths = []
        seen: set[str] = set()
        # In commit order, as the entries are.
        for entry in self._rollout.entries:
            if entry.model_call_id not in placed or entry.model_call_id in parents:
                continue
            path = self._path_to(entry.model_call_id)
            before = seen if self._rules.shared_calls is SharedCalls.FIRST else set()
            calls = [call.entry.model_call_id for call in path]
            if any(
                call.entry.generation_token_ids and call.entry.model_call_id not in before for call in path
            ):
                paths.append((path, frozenset(before.intersection(calls))))
                seen.update(calls)
        return paths

    def _path_to(self, leaf: str) -> list[Placed]:
        path = []
        call: str | None = leaf
        while call is not None:
            path.append(self._segments.placed[call])
            call = path[-1].parent
        return path[::-1]

    def _mask(self, order: Mapping[str, int]) -> None:
        """Leave out a rollout that is broken, or of which something is lost."""
        broken = {call: why for call, why in self._segments.breaks.items() if why is not None}
        broken |= {
            left.model_call_id: Why(left.reason) for left in self.left_out if not Why(left.reason).is_harmless
        }
        if broken:
            first = min(broken, key=order.__getitem__)
            self._paths = []
            self.left_out.append(LeftOut.of(self._rollout.key, Why.BROKEN, first, broken[first]))

    def _chain(
        self, path: Sequence[Placed], trained: frozenset[str], segment: int, broke: str | None
    ) -> Chain:
        ids, mask, log_probs = array("q"), array("b"), array("d")
        links = []
        for call in path:
            entry = call.entry
            generated = len(entry.generation_token_ids)
            own_prompt = entry.prompt_token_ids[0 if entry.prompt_is_delta else call.start :]
            ids.extend(own_prompt)
            ids.extend(entry.generation_token_ids)
            mask.frombytes(bytes(len(own_prompt)))
            log_probs.frombytes(bytes(8 * len(own_prompt)))
            if entry.model_call_id in trained:
                mask.frombytes(bytes(generated))
                log_probs.frombytes(bytes(8 * generated))
            else:
                mask.frombytes(b"\1" * generated)
                log_probs.extend(entry.generation_log_probs)
            links.append(self._link(call, generated))
        return Chain("records", ids, mask, log_probs, tuple(links), path[-1].digest, segment, broke)

    def _link(self, call: Placed, generated: int) -> Link:
        entry = call.entry
        return Link(
            model_call_id=entry.model_call_id,
            start=call.start,
            generation_start=call.end - generated,
            generation_len=generated,
            engine=engine_fields(entry, self._rollout.ledger.get(entry.model_call_id)),
            model=entry.model,
            parent_resolution=entry.parent_resolution,
            response_id=entry.response_id,
            payload_sha256=self._rollout.calls[entry.model_call_id].payload_sha256,
        )
