"""Rows for a trainer: paths from the first call of a segment to a leaf, with the tokens that each of them trains."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tokencustody.chains.engine_fields import EngineFields, engine_fields
from tokencustody.chains.reading import FrozenRollout
from tokencustody.chains.reasons import HARMLESS, LeftOut, Shape, Why
from tokencustody.chains.rules import RowRules
from tokencustody.chains.segments import Placed, Segments
from tokencustody.states import OnBreak, SharedCalls

_LOST_PARENTS = {Why.PARENT_MISSING, Why.PARENT_CYCLE}


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


def count_not_finite(log_probs: Sequence[float]) -> int:
    """Return how many are a NaN or an infinity."""
    # A sum with one of them in it is no finite number; nearly always there is none.
    return 0 if math.isfinite(sum(log_probs)) else sum(not math.isfinite(each) for each in log_probs)


class Forest:
    """The rows of a rollout, the calls in them, and what is in none of them, each with its reason and in commit order.

    `breaks` counts why segments do not begin with a root. Of a rollout that is masked no call is in a row.
    """

    def __init__(self, rollout: FrozenRollout, rules: RowRules) -> None:
        self._rollout = rollout
        self._rules = rules
        self._segments = Segments(rollout, rules)
        self._paths = self._trained_paths()
        self.calls = {placed.call.record.model_call_id for path, _ in self._paths for placed in path}
        silent = [
            LeftOut.of(rollout.key, Why.NO_GENERATED_TOKENS, call)
            for call in self._segments.placed
            if call not in self.calls
        ]
        self.left_out = silent + self._segments.left_out
        broken = Counter(why for why in self._segments.breaks.values() if why is not None)
        self.segments = len(self._segments.breaks)
        self.breaks = {why.value: times for why, times in sorted(broken.items())}
        self.is_masked = False
        order = {call: index for index, call in enumerate(rollout.entries)}
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
        for leaf in self._rollout.entries:
            if leaf not in placed or leaf in parents:
                continue
            path = self._path_to(leaf)
            before = seen if self._rules.shared_calls is SharedCalls.FIRST else set()
            calls = [each.call.record.model_call_id for each in path]
            if any(placed[call].call.generation and call not in before for call in calls):
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
            left.model_call_id: Why(left.reason) for left in self.left_out if left.reason not in HARMLESS
        }
        if broken:
            first = min(broken, key=order.__getitem__)
            self.is_masked = True
            self._paths = []
            self.calls = set()
            self.left_out.append(LeftOut.of(self._rollout.key, Why.BROKEN, first, broken[first]))

    def _chain(
        self, path: Sequence[Placed], trained: frozenset[str], segment: int, broke: str | None
    ) -> Chain:
        ids, mask, log_probs = array("q"), array("b"), array("d")
        links = []
        for placed in path:
            call = placed.call
            generated = len(call.generation)
            # By their bytes, which are the same without a sign: none of them is beyond 63 bits.
            ids.frombytes(memoryview(placed.prompt).cast("B"))
            ids.frombytes(memoryview(call.generation).cast("B"))
            mask.frombytes(bytes(len(placed.prompt)))
            log_probs.frombytes(bytes(8 * len(placed.prompt)))
            if call.record.model_call_id in trained:
                mask.frombytes(bytes(generated))
                log_probs.frombytes(bytes(8 * generated))
            else:
                mask.frombytes(b"\1" * generated)
                log_probs += call.log_probs
            links.append(self._link(placed, generated))
        return Chain("records", ids, mask, log_probs, tuple(links), path[-1].digest, segment, broke)

    def _link(self, placed: Placed, generated: int) -> Link:
        entry = placed.call.record
        return Link(
            model_call_id=entry.model_call_id,
            start=placed.start,
            generation_start=placed.end - generated,
            generation_len=generated,
            engine=engine_fields(entry, self._rollout.ledger.get(entry.model_call_id)),
            model=entry.model,
            parent_resolution=entry.parent_resolution,
            response_id=entry.response_id,
            payload_sha256=self._rollout.calls[entry.model_call_id].payload_sha256,
        )


def shape_of(
    rollout: FrozenRollout, held: Collection[str], left_out: Sequence[LeftOut], forest: Forest | None = None
) -> Shape:
    """Return the shape of a rollout of which these calls are in the files, each whole.

    Without a forest, which is that of its rows, it is how the rollout would come apart by the default rules.
    """
    forest = forest or Forest(rollout, RowRules())
    calls = {*rollout.calls, *rollout.ledger, *(row.model_call_id for row in rollout.lost)}
    sampled = {name for name, call in rollout.entries.items() if call.generation}
    sampled.update(rollout.only_in_ledger)
    reasons = {*forest.breaks, *(left.reason for left in forest.left_out)}
    return Shape(
        segments=1 if rollout.is_staged_only else forest.segments,
        breaks=forest.breaks,
        calls_left_out=len(calls.difference(held)),
        whole=not (
            rollout.incomplete
            or rollout.lost
            or reasons & _LOST_PARENTS
            or any(left.reason not in HARMLESS for left in left_out)
        ),
        is_held=sampled.issubset(held),
    )
