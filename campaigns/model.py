"""The behaviour of a store as a state machine: what each operation answers and changes, one at a time.

One state per rollout, for its records, its fence and its ledger together, and one per staged call. A rollout knows too
what is staged under its id, for that makes a version behind a freeze. States are immutable
and hashable. `step` is exact: an operation has one effect and one answer in a state. It leaves open only two things
that a caller cannot know in advance, and takes both from the answer that was given: the id of a new snapshot, and
whether the tokens of a parent are given for a row of the ledger, which has none.

A rollout that nobody used behaves like an open one at version 0 without records, so that is how a rollout begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

Value = TypeVar("Value")

OPEN, FROZEN, RETIRED = "open", "frozen", "retired"
FROZEN_ERROR, RETIRED_ERROR = "TokenCaptureFrozenError", "TokenCaptureRetiredError"
CONFLICT_ERROR, LINEAGE_ERROR = "PayloadConflictError", "LineageError"
LEDGER_RETIRED_ERROR = "RolloutRetiredError"
STAGED_CONFLICT_ERROR, STAGED_MISSING_ERROR = "StagedConflict", "StagedCallMissingError"
REMOVED, ABSENT = "removed", "absent"


class FrozenMap(dict[str, Value]):
    """A dictionary that nobody changes, so that it can be part of a state."""

    __slots__ = ("_hash",)
    _hash: int

    def __hash__(self) -> int:  # type: ignore[override]
        try:
            return self._hash
        except AttributeError:
            self._hash = hash(frozenset(self.items()))
            return self._hash

    def plus(self, key: str, value: Value) -> FrozenMap[Value]:
        """Return a map with one entry more, or another one under its key."""
        return FrozenMap({**self, key: value})


class Call(NamedTuple):
    """What a state remembers of a call: its content, and what makes it a parent.

    `is_delta` is None where the history does not say; `continues` are the tokens that a delta prompt continues.
    """

    payload: str
    conversation: str
    tokens: str
    parent: str | None = None
    is_delta: bool | None = None
    continues: str | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Call:
        """Return the call that `put` or `record` was asked to store."""
        return cls(
            arguments["payload"],
            arguments["conversation"],
            arguments["tokens"],
            arguments.get("parent"),
            arguments.get("delta"),
            arguments.get("continues"),
        )


class RolloutState(NamedTuple):
    """A rollout between two operations.

    `snapshot_id` is None also when a freeze whose answer nobody got raised the fence. `intents` are the refusal codes
    by call, None where it dangles, without those that make no difference: where an entry has come or the rollout is
    marked; a frozen rollout has one dangling intent for all. `records` and `failures` are the ledger, in commit order.
    `doubts` are the conversations of both payloads of calls that conflict. `snapshot_ids` are all that were ever handed
    out: they survive a delete.
    """

    fence: str = OPEN
    version: int = 0
    snapshot_id: str | None = None
    is_marked: bool = False
    calls: FrozenMap[Call] = FrozenMap()
    conflicting: frozenset[str] = frozenset()
    doubts: frozenset[tuple[str, str]] = frozenset()
    intents: FrozenMap[str | None] = FrozenMap()
    records: tuple[tuple[str, Call], ...] = ()
    failures: tuple[tuple[str, str], ...] = ()
    snapshot_ids: frozenset[str] = frozenset()
    staged: FrozenMap[str] = FrozenMap()

    @property
    def is_incomplete(self) -> bool:
        """Whether the rollout was marked, or an intent has neither entry nor refusal."""
        return self.is_marked or None in self.intents.values()

    @property
    def refusals(self) -> FrozenMap[str | None]:
        """The intents that do not dangle."""
        return FrozenMap({call: code for call, code in self.intents.items() if code is not None})

    @property
    def has_records(self) -> bool:
        """Whether there is anything for a removal to remove."""
        return bool(self.calls or self.intents or self.is_marked or self.records or self.failures)

    def advanced(self, **changes: Any) -> RolloutState:
        """Return the state at the next version."""
        return self._replace(version=self.version + 1, **changes)

    def marked(self, **changes: Any) -> RolloutState:
        """Return the state at the next version, incomplete."""
        return self.advanced(is_marked=True, intents=self.refusals, **changes)

    def emptied(self, **changes: Any) -> RolloutState:
        """Return the state without its records."""
        kept = RolloutState(version=self.version, snapshot_ids=self.snapshot_ids, staged=self.staged)
        return kept._replace(**changes)


class StagedState(NamedTuple):
    """What is staged under one key between two operations."""

    payload: str | None = None


class Answer(NamedTuple):
    """What an operation answers: a value, or the name of an error."""

    value: Any = None
    error: str | None = None


State = RolloutState | StagedState
Arguments = Mapping[str, Any]
_Rule = Callable[[Any, Arguments, Answer | None], tuple[Any, Answer]]
_DONE = Answer()
_CONFLICT = Answer(error=CONFLICT_ERROR)


def step(state: State, name: str, arguments: Arguments, given: Answer | None) -> tuple[State, Answer]:
    """Return the state after an operation, and its answer; the same object when the operation changes nothing.

    `given` is the answer that a caller got, None when nobody got one.
    """
    return OPERATIONS[name](state, arguments, given)


def _late(state: RolloutState) -> Answer | None:
    if state.fence == OPEN:
        return None
    return Answer(error=FROZEN_ERROR if state.fence == FROZEN else RETIRED_ERROR)


def _put(state: RolloutState, arguments: Arguments, _: Answer | None) -> tuple[RolloutState, Answer]:
    if late := _late(state):
        return state, late
    call = arguments["call"]
    held = state.calls.get(call)
    if held is None:
        intents = state.intents
        if intents.get(call, "") is None:
            intents = FrozenMap({other: code for other, code in intents.items() if other != call})
        return state._replace(calls=state.calls.plus(call, Call.of(arguments)), intents=intents), _DONE
    if held.payload == arguments["payload"]:
        return state, _DONE
    doubts = {(call, held.conversation), (call, arguments["conversation"])}
    return state.marked(conflicting=state.conflicting | {call}, doubts=state.doubts | doubts), _CONFLICT


def _begin(state: RolloutState, arguments: Arguments, _: Answer | None) -> tuple[RolloutState, Answer]:
    if late := _late(state):
        return state, late
    call = arguments["call"]
    if call in state.intents or call in state.calls or state.is_marked:
        return state, _DONE
    return state._replace(intents=state.intents.plus(call, None)), _DONE


def _refuse(state: RolloutState, arguments: Arguments, _: Answer | None) -> tuple[RolloutState, Answer]:
    if late := _late(state):
        return state, late
    call, code = arguments["call"], arguments["code"]
    held = state.intents.get(call)
    if held is None:
        return state.advanced(intents=state.intents.plus(call, code)), _DONE
    return state, _DONE if held == code else _CONFLICT


def _mark(state: RolloutState, _: Arguments, __: Answer | None) -> tuple[RolloutState, Answer]:
    if state.fence == RETIRED:
        return state, Answer(error=RETIRED_ERROR)
    return state.marked(), _DONE


def _freeze(state: RolloutState, __: Arguments, given: Answer | None) -> tuple[RolloutState, Answer]:
    if state.fence == RETIRED:
        return state, Answer(error=RETIRED_ERROR)
    if state.fence == OPEN:
        for _ in range(_broken_deltas(state.calls)):
            state = state.marked()
        dangling = {"": None} if None in state.intents.values() else {}
        state = state.advanced(fence=FROZEN, intents=FrozenMap({**state.refusals, **dangling}))
    if state.snapshot_id is None and given is not None and given.error is None:
        # New to everybody: what this answer says, unless that is the id of another snapshot.
        minted = given.value["snapshot_id"]
        if minted not in state.snapshot_ids:
            state = state._replace(snapshot_id=minted, snapshot_ids=state.snapshot_ids | {minted})
    return state, Answer(
        {
            "snapshot_id": state.snapshot_id,
            "version": state.version,
            "incomplete": state.is_incomplete,
            "calls": {call: held.payload for call, held in state.calls.items()},
            "refusals": state.refusals,
        }
    )


def _broken_deltas(calls: Mapping[str, Call]) -> int:
    """Return how many deltas have lost their parent or are in a circle of deltas: a freeze marks for each."""
    broken = 0
    for call, held in calls.items():
        if not held.is_delta:
            continue
        passed: set[str] = set()
        above = held.parent or ""
        while above in calls and calls[above].is_delta and above not in passed:
            passed.add(above)
            above = calls[above].parent or ""
        broken += held.parent not in calls or call in passed
    return broken


def _drop(state: RolloutState, arguments: Arguments, _: Answer | None) -> tuple[RolloutState, Answer]:
    # Retirement is the last version of a rollout, so it retired the one before.
    version = state.version - 1 if state.fence == RETIRED else state.version
    is_that = (state.snapshot_id, version) == (arguments["snapshot_id"], arguments["version"])
    if state.fence == OPEN or not is_that:
        return state, Answer(False)
    return (state if state.fence == RETIRED else _retired(state)), Answer(True)


def _retire(state: RolloutState, _: Arguments, __: Answer | None) -> tuple[RolloutState, Answer]:
    if state.fence == RETIRED:
        return state, Answer(ABSENT)
    return _retired(state), Answer(REMOVED if state.has_records else ABSENT)


def _delete(state: RolloutState, _: Arguments, __: Answer | None) -> tuple[RolloutState, Answer]:
    new = state.emptied(version=0)
    return (state if new == state else new), Answer(REMOVED if state.has_records else ABSENT)


def _retired(state: RolloutState) -> RolloutState:
    return state.emptied(fence=RETIRED, version=state.version + 1, snapshot_id=state.snapshot_id)


def _record(state: RolloutState, arguments: Arguments, _: Answer | None) -> tuple[RolloutState, Answer]:
    if state.fence == RETIRED:
        return state, _DONE
    call = arguments["call"]
    held = next((held for recorded, held in state.records if recorded == call), None)
    if held is not None:
        return state, _DONE if held.payload == arguments["payload"] else _CONFLICT
    if any(failed == call for failed, _ in state.failures):
        return state, _CONFLICT
    return _recorded(state, records=(*state.records, (call, Call.of(arguments)))), _DONE


def _record_failure(
    state: RolloutState, arguments: Arguments, _: Answer | None
) -> tuple[RolloutState, Answer]:
    if state.fence == RETIRED:
        return state, _DONE
    call, reason = arguments["call"], arguments["reason"]
    if (call, reason) in state.failures:
        return state, _DONE
    return _recorded(state, failures=(*state.failures, (call, reason))), _DONE


def _recorded(state: RolloutState, **changes: Any) -> RolloutState:
    """Return the state with another row in the ledger, which is a version where it comes behind a freeze."""
    return state.advanced(**changes) if state.fence == FROZEN else state._replace(**changes)


def _manifest(state: RolloutState, _: Arguments, __: Answer | None) -> tuple[RolloutState, Answer]:
    if state.fence == RETIRED:
        return state, Answer(error=LEDGER_RETIRED_ERROR)
    return state, Answer(
        {
            "records": [[call, held.payload] for call, held in state.records],
            "failures": [[call, reason] for call, reason in state.failures],
        }
    )


def _resolve(state: RolloutState, arguments: Arguments, given: Answer | None) -> tuple[RolloutState, Answer]:
    if not arguments["conversations"]:
        return state, _resolution("root")
    # The shorter ones open the request too, but were answered since.
    continued = arguments["conversations"][-1]
    complete = {
        call: held
        for call, held in state.calls.items()
        if held.conversation == continued and call not in state.conflicting
    }
    recorded = {call: held for call, held in state.records if held.conversation == continued}
    candidates, kind = (complete, "complete") if complete else (recorded, "ledger")
    # A call that conflicts is no parent, and by either of its payloads it leaves no other one as the only one.
    doubtful = {call for call, conversation in state.doubts if conversation == continued}
    if len(candidates.keys() | doubtful) > 1 and (
        doubtful or len({held.tokens for held in candidates.values()}) > 1
    ):
        return state, _resolution("unresolved", "ambiguous")
    parents = candidates.keys() - state.conflicting
    if not parents:
        return state, _resolution("unresolved", "no_match")
    parent = min(parents)
    tokens = candidates[parent].tokens
    if kind == "ledger":
        is_given = given is not None and given.value and given.value["tokens"] is not None
        return state, _resolution("resolved", parent=parent, tokens=tokens if is_given else None, kind=kind)
    proof = _is_proven(state, parent)
    if proof is False or (proof is None and given is not None and given.error == LINEAGE_ERROR):
        return state, Answer(error=LINEAGE_ERROR)
    return state, _resolution("resolved", parent=parent, tokens=tokens, kind=kind)


def _is_proven(state: RolloutState, call: str) -> bool | None:
    """Return whether a call's whole sequence can be proven; None when the history does not tell."""
    held = state.calls[call]
    seen = {call}
    is_known = True
    while held.parent is not None and held.is_delta is not False:
        is_known = is_known and held.is_delta is not None
        parent = state.calls.get(held.parent)
        if parent is None or held.parent in seen or held.parent in state.conflicting:
            return False if is_known else None
        if held.continues not in (None, parent.tokens):
            return False
        seen.add(held.parent)
        held = parent
    return True if is_known else None


def _resolution(
    status: str,
    reason: str = "",
    *,
    parent: str | None = None,
    tokens: str | None = None,
    kind: str | None = None,
) -> Answer:
    return Answer({"status": status, "reason": reason, "parent": parent, "tokens": tokens, "kind": kind})


def _stage(state: Any, arguments: Arguments, _: Answer | None) -> tuple[Any, Answer]:
    if isinstance(state, RolloutState):
        call, payload = arguments["call"], arguments["payload"]
        held = state.staged.get(call)
        if held is None:
            return _recorded(state, staged=state.staged.plus(call, payload)), _DONE
        return state, _DONE if held == payload else Answer(error=STAGED_CONFLICT_ERROR)
    if state.payload is None:
        return StagedState(arguments["payload"]), _DONE
    is_same = state.payload == arguments["payload"]
    return state, _DONE if is_same else Answer(error=STAGED_CONFLICT_ERROR)


def _fetch(state: StagedState, _: Arguments, __: Answer | None) -> tuple[StagedState, Answer]:
    return state, Answer(state.payload) if state.payload is not None else Answer(error=STAGED_MISSING_ERROR)


def _unstage(state: Any, arguments: Arguments, _: Answer | None) -> tuple[Any, Answer]:
    if isinstance(state, RolloutState):
        call = arguments["call"]
        if call not in state.staged:
            return state, Answer(False)
        left = FrozenMap({other: payload for other, payload in state.staged.items() if other != call})
        return state._replace(staged=left), Answer(True)
    return (state, Answer(False)) if state.payload is None else (StagedState(), Answer(True))


_ON_ROLLOUTS: dict[str, _Rule] = {
    "put": _put,
    "begin": _begin,
    "refuse": _refuse,
    "mark": _mark,
    "freeze": _freeze,
    "drop": _drop,
    "retire": _retire,
    "delete": _delete,
    "record": _record,
    "record_failure": _record_failure,
    "manifest": _manifest,
    "resolve": _resolve,
}
_ON_STAGED_CALLS: dict[str, _Rule] = {"stage": _stage, "fetch": _fetch, "unstage": _unstage}

OPERATIONS = _ON_ROLLOUTS | _ON_STAGED_CALLS
STAGING = frozenset(_ON_STAGED_CALLS)
READS = frozenset({"manifest", "resolve", "fetch"})
ERRORS: dict[str, frozenset[str]] = {
    "put": frozenset({FROZEN_ERROR, RETIRED_ERROR, CONFLICT_ERROR}),
    "begin": frozenset({FROZEN_ERROR, RETIRED_ERROR}),
    "refuse": frozenset({FROZEN_ERROR, RETIRED_ERROR, CONFLICT_ERROR}),
    "mark": frozenset({RETIRED_ERROR}),
    "freeze": frozenset({RETIRED_ERROR}),
    "drop": frozenset(),
    "retire": frozenset(),
    "delete": frozenset(),
    "record": frozenset({CONFLICT_ERROR}),
    "record_failure": frozenset(),
    "manifest": frozenset({LEDGER_RETIRED_ERROR}),
    "resolve": frozenset({LINEAGE_ERROR}),
    "stage": frozenset({STAGED_CONFLICT_ERROR}),
    "fetch": frozenset({STAGED_MISSING_ERROR}),
    "unstage": frozenset(),
}
"""The errors by which an operation may answer; any other name is a fault by itself."""
