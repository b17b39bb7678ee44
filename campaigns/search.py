"""Looks for an order of overlapping operations that a state machine could have gone through, one at a time.

An operation takes effect at one moment between its invocation and its end, the moment of its return. One that may or
may not have happened (`is_optional`) has no end. The search is that of Wing and Gong with Lowe's memory of what was
tried: which operations are done, and the state they led to. It is exact; three things keep it short, and none of them
loses an order:

- An operation that fits and changes nothing is taken at once, unless it could have an effect after a delete: where an
  order takes it later, it can be taken now too.
- Optional ones are only taken right before an operation that would have fared otherwise without any of them. Where one
  of them can as well come after it, that order is tried instead.
- Of optional operations that are alike, the one that began first stands for all.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from math import inf
from typing import NamedTuple

from campaigns.model import CONFLICT_ERROR, OPERATIONS, READS, Answer, Arguments, RolloutState, State
from campaigns.outlook import can_still_answer

DEFAULT_LIMIT = 1_000_000

_WIPES = frozenset({"delete", "unstage"})


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """An operation as the search sees it.

    `answers` are those that the operation may have given; without one every answer fits. `echoes`: the event, by its
    position, before which an optional one must happen if at all.
    """

    name: str
    arguments: Arguments
    start: float
    end: float = inf
    answers: tuple[Answer, ...] = ()
    is_optional: bool = False
    echoes: int | None = None
    alike: Hashable = None

    @property
    def never_has_effect(self) -> bool:
        """Whether an operation of this name that answers like this changes no state whatever."""
        if self.name in READS:
            return True
        value, error = self.answers[0] if self.answers else (None, None)
        if error == CONFLICT_ERROR:
            return self.name != "put"
        return error is not None or value is False

    def is_out_of_reach(self, state: State) -> bool:
        """Return whether the operation cannot answer as it did any more, unless the rollout is deleted first."""
        if len(self.answers) != 1 or not isinstance(state, RolloutState):
            return False
        return not can_still_answer(state, self.name, self.arguments, self.answers[0])

    def after(self, state: State) -> State | None:
        """Return the state after the operation, or None when it would have answered otherwise."""
        given = self.answers[0] if self.answers else None
        new, answer = OPERATIONS[self.name](state, self.arguments, given)
        return new if given is None or answer in self.answers else None


class Verdict(Enum):
    """What a search came to."""

    LEGAL = "an order was found"
    ILLEGAL = "there is no order"
    UNDECIDED = "the search was given up"


@dataclass(frozen=True)
class Found:
    """A verdict, how many states were visited, and where the longest order that was tried ended.

    `order` are positions of events; `stuck` those of the events one of which had to come next and did not fit.
    """

    verdict: Verdict
    visited: int
    order: tuple[int, ...]
    stuck: tuple[int, ...]
    state: State


class _Node(NamedTuple):
    done: int
    state: State
    # The optional events that were taken since the last required one, and the state before them.
    waiting: tuple[int, ...] = ()
    before: State | None = None


def find_order(events: Sequence[Event], initial: State, *, limit: int = DEFAULT_LIMIT) -> Found:
    """Return whether there is an order of all events that are not optional, each try given up after `limit` states."""
    optional = [event.name for event in events if event.is_optional]
    # Most often few of the optional ones are needed at once, and no delete, which could explain whatever is missing.
    tries = [
        (together, with_deletes)
        for together in (*(few for few in (1, 3) if few < len(optional)), max(1, len(optional)))
        for with_deletes in ((False, True) if set(optional) & _WIPES else (True,))
    ]
    visited = 0
    for patience in (limit // 50, limit):
        undecided = []
        for together, with_deletes in tries:
            search = _Search(events, patience, together, with_deletes=with_deletes)
            found = search.run(initial)
            visited += found.visited
            if found.verdict is Verdict.LEGAL:
                return replace(found, visited=visited)
            if found.verdict is Verdict.UNDECIDED:
                undecided.append((together, with_deletes))
        # The last try leaves nothing out, so its word is the last one.
        if tries[-1] not in undecided:
            break
        tries = undecided
    return replace(found, visited=visited)


class _Search:
    def __init__(self, events: Sequence[Event], limit: int, together: int, *, with_deletes: bool) -> None:
        self._events = events
        self._together = together
        self._limit = limit
        # By their beginning; bit n of `done` is the n-th required one, then the optional ones follow.
        self._required = sorted(
            (n for n, event in enumerate(events) if not event.is_optional), key=lambda n: events[n].start
        )
        self._optional = sorted(
            (
                n
                for n, event in enumerate(events)
                if event.is_optional and (with_deletes or event.name not in _WIPES)
            ),
            key=lambda n: events[n].start,
        )
        self._in_order = [events[n] for n in (*self._required, *self._optional)]
        self._places = {n: place for place, n in enumerate((*self._required, *self._optional))}
        self._all = (1 << len(self._required)) - 1
        self._echoed = [
            -1 if event.echoes is None else self._places[event.echoes] for event in self._in_order
        ]

        wipes = [
            (1 << place, event.start) for place, event in enumerate(self._in_order) if event.name in _WIPES
        ]
        # What could come before an event and change what it can do, itself included.
        self._wipes = [sum(bit for bit, start in wipes if start < event.end) for event in self._in_order]
        self._shown = [
            place
            for place in range(len(self._required))
            if self._in_order[place].name in ("freeze", "manifest")
        ]

    def run(self, initial: State) -> Found:
        root = _Node(0, initial)
        seen = {root}
        path = [root]
        longest = list(path)
        successors = [self._successors(root)]
        verdict = Verdict.ILLEGAL
        if self._is_complete(root):
            verdict, successors = Verdict.LEGAL, []
        while successors:
            node = next(successors[-1], None)
            if node is None:
                successors.pop()
                path.pop()
            elif self._is_complete(node):
                verdict = Verdict.LEGAL
                longest = [*path, node]
                break
            elif node not in seen:
                if len(seen) >= self._limit:
                    verdict = Verdict.UNDECIDED
                    break
                seen.add(node)
                path.append(node)
                successors.append(self._successors(node))
                if len(path) > len(longest):
                    longest = list(path)
        return self._found(verdict, len(seen), longest)

    def _is_complete(self, node: _Node) -> bool:
        return node.done & self._all == self._all

    def _successors(self, node: _Node) -> Iterator[_Node]:
        done, state = node.done, node.state
        places, latest = self._candidates(done)
        fitting = []
        for place in places:
            new = self._in_order[place].after(state)
            if new is None:
                continue
            is_idle = new is state and (
                self._in_order[place].never_has_effect or not self._wipes[place] & ~done
            )
            if node.waiting and self._could_come_earlier(place, node, new):
                if is_idle:
                    return  # the order that takes it first is tried for itself
                continue
            if is_idle:
                yield _Node(done | 1 << place, state)
                return
            fitting.append((self._in_order[place].end, place, new))
        for _, place, new in sorted(fitting, key=lambda fit: fit[:2]):
            if new is state or self._is_hopeful(done | 1 << place, new, places):
                yield _Node(done | 1 << place, new)
        yield from self._optional_successors(node, places, latest)

    def _is_hopeful(self, done: int, state: State, places: Sequence[int]) -> bool:
        """Return False when a state rules out an answer that is still to come."""
        coming = [place for place in places if not done >> place & 1]
        names = {"freeze", "manifest"}
        for place in self._shown:
            if not done >> place & 1 and self._in_order[place].name in names:
                names.discard(self._in_order[place].name)
                coming.append(place)
        return not any(
            not self._wipes[place] & ~done and self._in_order[place].is_out_of_reach(state)
            for place in coming
        )

    def _optional_successors(self, node: _Node, places: Sequence[int], latest: float) -> Iterator[_Node]:
        if len(node.waiting) == self._together:
            return
        alike = set()
        for place in range(len(self._required), len(self._in_order)):
            event = self._in_order[place]
            if event.start >= latest:
                return
            echoed = self._echoed[place]
            if node.done >> place & 1 or event.alike in alike or (echoed >= 0 and node.done >> echoed & 1):
                continue
            alike.add(event.alike)
            new = event.after(node.state)
            if new is None or new is node.state:
                continue
            # Two optional ones that can change places are taken in one order.
            if node.waiting and node.waiting[-1] > place and self._could_come_first(place, node, new):
                continue
            if self._is_hopeful(node.done | 1 << place, new, places):
                before = node.state if node.before is None else node.before
                yield _Node(node.done | 1 << place, new, (*node.waiting, place), before)

    def _candidates(self, done: int) -> tuple[list[int], float]:
        """Return the required events that may come next, and when the first of them must have happened."""
        places = []
        latest = inf
        open_ones = ~done & self._all
        place = (open_ones & -open_ones).bit_length() - 1
        while place < len(self._required):
            event = self._in_order[place]
            if event.start >= latest:
                break
            if not done >> place & 1:
                places.append(place)
                latest = min(latest, event.end)
            place += 1
        return places, latest

    def _could_come_earlier(self, place: int, node: _Node, new: State) -> bool:
        """Return whether a required event that led to `new` does not need one of the optional ones before it."""
        for optional in node.waiting:
            others = (other for other in node.waiting if other != optional)
            without = self._replayed(node.before, (*others, place))
            if without == new:
                return True  # nothing is left of the optional one
            if self._echoed[optional] != place and self._replayed(without, (optional,)) == new:
                return True
        return False

    def _could_come_first(self, place: int, node: _Node, new: State) -> bool:
        """Return whether an optional event that led to `new` could change places with the one before it."""
        return self._replayed(node.before, (*node.waiting[:-1], place, node.waiting[-1])) == new

    def _replayed(self, state: State | None, places: Sequence[int]) -> State | None:
        for place in places:
            if state is not None:
                state = self._in_order[place].after(state)
        return state

    def _found(self, verdict: Verdict, visited: int, path: list[_Node]) -> Found:
        events = (*self._required, *self._optional)
        order = [events[(after.done ^ before.done).bit_length() - 1] for before, after in pairwise(path)]
        last = path[-1]
        stuck = [] if self._is_complete(last) else self._candidates(last.done)[0]
        return Found(verdict, visited, tuple(order), tuple(events[place] for place in stuck), last.state)
