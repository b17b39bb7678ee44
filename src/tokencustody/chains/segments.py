"""The segments of a rollout: trees of calls in which each prompt begins with the whole sequence of the call above it.

A call continues its parent when it was resolved and its prompt begins with the parent's whole sequence, id by id. Where
it does not, it begins a segment of its own: its tokens were sampled after exactly its prompt, whatever lies before. A
length or digest that a call records must be that of its sequence.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Container, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from tokencustody.chains.reading import FrozenRollout
from tokencustody.chains.reasons import LeftOut, Why
from tokencustody.chains.retries import Settled, settle
from tokencustody.chains.rules import RowRules
from tokencustody.circles import circles
from tokencustody.codec.hashing import Hashers
from tokencustody.codec.id_columns import big_endian, digest_of_big_endian, is_beyond_int64
from tokencustody.codec.proven import ProvenCall
from tokencustody.errors import LineageError
from tokencustody.lineage import check_recorded
from tokencustody.records import ParentResolutionStatus, TokenEntry
from tokencustody.states import OnBreak, Siblings

# Columns that may wait for the digests of what they begin with.
_MOST_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class Placed:
    """A call that a row may hold: the one above it in its segment, and where its tokens begin and end.

    `prompt` is what it adds there before what it sampled. `top` is the call with which the segment begins.
    """

    call: ProvenCall
    prompt: array[int]
    parent: str | None
    top: str
    start: int
    end: int
    digest: str


@dataclass(slots=True)
class _Step:
    """A call on the way down a segment, and the digest of its whole sequence; one without `prompt` does not continue
    the call above.
    """

    name: str
    parent: str | None
    prompt: array[int] | None
    start: int
    end: int = 0
    digest: Future[str] = field(default_factory=Future)


class Segments:
    """The segments of a rollout. `left_out` says why the other calls are in none.

    `placed` has the calls by id, `breaks` the first call of each segment, in commit order, and why it does not continue
    another one; None for a root.
    """

    def __init__(self, rollout: FrozenRollout, rules: RowRules) -> None:
        self._rollout = rollout
        self._cuts = rules.on_break is OnBreak.FIRST
        self._settled = settle(rollout) if rules.siblings is Siblings.SETTLE else Settled()
        self._children: dict[str, list[str]] = {}
        self._tops: deque[tuple[str, Why | None]] = deque()
        self._why_out: dict[str, tuple[Why, str]] = {}
        self._breaks: dict[str, Why | None] = {}
        self.placed: dict[str, Placed] = {}
        self._sort_by_parent()
        while self._tops:
            self._grow(*self._tops.popleft())
        self.breaks: Mapping[str, Why | None] = {
            call: self._breaks[call] for call in rollout.entries if call in self._breaks
        }

    @property
    def left_out(self) -> list[LeftOut]:
        """The calls that are in no segment, in commit order."""
        return [
            LeftOut.of(self._rollout.key, why, call, detail)
            for call in self._rollout.entries
            for why, detail in [self._why_out.get(call, (None, ""))]
            if why is not None
        ]

    def _sort_by_parent(self) -> None:
        parents = {
            name: self._settled.stands_for.get(call.record.parent_call_id, call.record.parent_call_id)
            for name, call in self._rollout.entries.items()
            if call.record.parent_call_id is not None
        }
        in_circle = {call for circle in circles(parents) for call in circle}
        out: dict[str, Why] = dict(self._settled.dropped)
        for name, facts in self._rollout.calls.items():
            if facts.is_conflicting:
                out[name] = Why.CONFLICTING_CALL
        tops = []
        for name, call in self._rollout.entries.items():
            parent = parents.get(name)
            why_apart = _why_apart(call.record, parent, self._rollout.entries, in_circle)
            if parent is not None and why_apart is None:
                self._children.setdefault(parent, []).append(name)
            else:
                tops.append((name, why_apart))
        self._why_out = {call: (why, "") for call, why in out.items()}
        # First what was not decided, for that goes all the way down.
        for name in sorted(out, key=lambda name: out[name] is not Why.AMBIGUOUS_RETRY):
            self._strand(name, undecided=out[name] is Why.AMBIGUOUS_RETRY)
        for name, why_apart in tops:
            self._begin(name, why_apart)

    def _begin(self, call: str, why: Why | None) -> None:
        """Let a segment begin with the call, if it can and may."""
        if call in self._why_out:
            return
        if why is not None and (self._is_delta(call) or self._cuts):
            self._leave_out(call, why)
        else:
            self._tops.append((call, why))

    def _is_delta(self, call: str) -> bool:
        return self._rollout.entries[call].record.prompt_is_delta

    def _leave_out(self, model_call_id: str, why: Why, detail: str = "") -> None:
        self._why_out[model_call_id] = why, detail
        self._strand(model_call_id)

    def _strand(self, model_call_id: str, *, undecided: bool = False) -> None:
        """Let what continues a call that is left out stand alone; where it was not decided, nothing below it can."""
        waiting = [model_call_id]
        while waiting:
            for child in self._children.pop(waiting.pop(), ()):
                if undecided or self._is_delta(child) or self._cuts:
                    self._why_out.setdefault(child, (Why.PARENT_LEFT_OUT, ""))
                    waiting.append(child)
                else:
                    self._begin(child, Why.PARENT_LEFT_OUT)

    def _grow(self, top: str, why: Why | None) -> None:
        with Hashers() as hashers:
            for step in self._walk(top, hashers):
                name, call = step.name, self._rollout.entries[step.name]
                if step.parent is not None and step.parent not in self.placed:
                    continue  # what is below a call that is left out was begun anew
                if step.prompt is None:
                    self._begin(name, Why.NOT_A_CONTINUATION)
                    continue
                problem = _problem(call, step)
                if problem is not None:
                    self._leave_out(name, *problem)
                    continue
                if step.parent is None:
                    self._breaks[name] = why
                self.placed[name] = Placed(
                    call, step.prompt, step.parent, top, step.start, step.end, step.digest.result()
                )
                self._children.pop(name, None)

    def _walk(self, top: str, hashers: Hashers) -> list[_Step]:
        """Return the calls of a segment from its first on, each above those that continue it.

        That is if none of them is left out, which is told by their digests. Each call has one of its whole sequence,
        so that they make up most of the work.
        """
        # Depth first, so that a single column holds the sequence of the parent at hand: below a call it only grows. Its
        # bytes are those that a digest reads.
        ids = array("Q")
        steps: list[_Step] = []
        unhashed: list[_Step] = []
        on_the_way: deque[Future[str]] = deque()
        waiting: list[tuple[str, str | None, int]] = [(top, None, 0)]
        while waiting:
            name, parent, start = waiting.pop()
            call = self._rollout.entries[name]
            del ids[start:]
            prompt = self._added(call, ids)
            step = _Step(name, parent, prompt, start)
            steps.append(step)
            below: list[str] = []
            if prompt is not None:
                ids += big_endian(prompt)
                ids += big_endian(call.generation)
                step.end = len(ids)
                unhashed.append(step)
                below = [each for each in self._children.get(name, ()) if each not in self._why_out]
            waiting += [(child, name, len(ids)) for child in below]
            if unhashed and not below:
                # All of them are above this call: they begin its column, which others will not have below them.
                column = memoryview(ids[: unhashed[-1].end])
                for each in unhashed:
                    each.digest = hashers.start(8 * each.end, digest_of_big_endian, column[: each.end])
                on_the_way.append(unhashed[-1].digest)
                unhashed = []
            if len(on_the_way) > _MOST_COLUMNS:
                on_the_way.popleft().result()
        return steps

    def _added(self, call: ProvenCall, above: array[int]) -> array[int] | None:
        """Return the prompt ids behind the sequence of the call above, or None where they do not continue it."""
        # A prompt that was stored without that sequence was proven to begin with it when it was read.
        if call.record.prompt_is_delta or call.shared_len == len(above):
            return call.prompt
        prompt = self._rollout.prompt(call)
        return prompt[len(above) :] if big_endian(prompt[: len(above)]) == above else None


def _why_apart(
    entry: TokenEntry, parent: str | None, present: Container[str], in_circle: set[str]
) -> Why | None:
    """Return why the record of a call gives it no parent that is there, or None for a root or where it does."""
    if entry.parent_resolution is None:
        return Why.PARENT_NOT_RECORDED
    if entry.parent_resolution == ParentResolutionStatus.UNRESOLVED:
        return Why.UNRESOLVED_PARENT
    if parent is not None and parent not in present:
        return Why.PARENT_MISSING
    return Why.PARENT_CYCLE if entry.model_call_id in in_circle else None


def _problem(call: ProvenCall, step: _Step) -> tuple[Why, str] | None:
    try:
        check_recorded(call.record, range(step.end), lambda _: step.digest.result())
    except LineageError as exc:
        return Why.NOT_PROVEN, str(exc)
    if is_beyond_int64(step.prompt or array("Q")) or is_beyond_int64(call.generation):
        return Why.BEYOND_INT64, ""
    return None
