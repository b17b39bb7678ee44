"""Histories for the tests of the checker: written by hand, or made by overlapping clients of the model itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

from campaigns.history import Operation, Outcome
from campaigns.model import STAGING, Answer, RolloutState, StagedState, State, step

ROLLOUT = "rollout-1"


class Story:
    """Writes a history line by line: `begin` invokes an operation, `end` answers it, `do` is both."""

    def __init__(self, rollout: str = ROLLOUT) -> None:
        self._rollout = rollout
        self._clock = count(1)
        self.operations: list[Operation] = []

    def begin(self, name: str, *, worker: str = "", **arguments: Any) -> int:
        number = len(self.operations)
        self.operations.append(
            Operation(worker or f"w{number}", number, name, self._rollout, arguments, next(self._clock))
        )
        return number

    def end(self, number: int, value: Any = None, *, error: str | None = None) -> None:
        self.operations[number] = replace(
            self.operations[number],
            outcome=Outcome.OK if error is None else Outcome.ERROR,
            returned_at=next(self._clock),
            value=value,
            error=error,
        )

    def lose(self, number: int) -> None:
        """Let the store say that it could not tell."""
        lost = replace(self.operations[number], returned_at=next(self._clock), error="StoreUnavailableError")
        self.operations[number] = lost

    def do(
        self, name: str, value: Any = None, *, error: str | None = None, worker: str = "", **arguments: Any
    ) -> None:
        self.end(self.begin(name, worker=worker, **arguments), value, error=error)


def put(call: str, payload: str = "p", **fields: Any) -> dict[str, Any]:
    """Return the arguments of a put or a record; the conversation and the tokens follow from call and payload."""
    return {
        "call": call,
        "payload": payload,
        "parent": None,
        "conversation": f"said by {call}",
        "tokens": f"tokens of {call} {payload}",
        **fields,
    }


def snapshot(
    calls: dict[str, str] | None = None,
    *,
    version: int = 1,
    incomplete: bool = False,
    refusals: dict[str, str] | None = None,
    snapshot_id: str = "snapshot-1",
) -> dict[str, Any]:
    """Return the answer of a freeze."""
    return {
        "snapshot_id": snapshot_id,
        "version": version,
        "incomplete": incomplete,
        "calls": calls or {},
        "refusals": refusals or {},
    }


def resolution(
    status: str,
    reason: str | None = "",
    *,
    parent: str | None = None,
    tokens: str | None = None,
    kind: str | None = None,
) -> dict[str, Any]:
    """Return the answer of a resolve."""
    return {"status": status, "reason": reason, "parent": parent, "tokens": tokens, "kind": kind}


_WEIGHTS = {
    "put": 10,
    "begin": 4,
    "refuse": 3,
    "mark": 2,
    "freeze": 3,
    "drop": 2,
    "retire": 1,
    "delete": 1,
    "record": 5,
    "record_failure": 2,
    "manifest": 3,
    "resolve": 8,
}
_STAGING_WEIGHTS = {"stage": 3, "fetch": 3, "unstage": 1}


def random_history(
    rng: Random,
    length: int,
    *,
    clients: int = 4,
    calls: int = 6,
    cut: float = 0.05,
    staging: bool = False,
    final: bool = True,
) -> list[Operation]:
    """Return a legal history: clients whose operations overlap, some of them cut off, on the model itself."""
    simulation = _Simulation(rng, calls, cut, StagedState() if staging else RolloutState())
    weights = _STAGING_WEIGHTS if staging else _WEIGHTS
    while len(simulation.operations) < length:
        simulation.advance(weights, clients)
    simulation.finish()
    if final:
        for name in ("fetch",) if staging else ("manifest", "freeze"):
            simulation.call(name)
    return simulation.operations


class _Simulation:
    def __init__(self, rng: Random, calls: int, cut: float, state: State) -> None:
        self._rng = rng
        self._calls = [f"c{n}" for n in range(calls)]
        self._cut = cut
        self._state = state
        self._clock = count(1)
        self._snapshots = count(1)
        self._seen = ("never-made", 1)
        self.operations: list[Operation] = []
        self._waiting: list[int] = []
        self._done: dict[int, Answer] = {}
        self._lost: list[int] = []

    def advance(self, weights: dict[str, int], clients: int) -> None:
        rng = self._rng
        busy = len(self._waiting) + len(self._done)
        if self._lost and rng.random() < 0.1:
            # What was cut off takes effect late, or never.
            number = self._lost.pop(rng.randrange(len(self._lost)))
            if rng.random() < 0.7:
                self._take_effect(number)
        elif busy < clients and rng.random() < 0.5:
            (name,) = rng.choices(list(weights), list(weights.values()))
            self._invoke(name)
        elif self._waiting and rng.random() < 0.5:
            number = self._waiting.pop(rng.randrange(len(self._waiting)))
            if self._is_cut():
                self._lost.append(number)
            else:
                self._done[number] = self._take_effect(number)
        elif self._done:
            number = rng.choice(list(self._done))
            answer = self._done.pop(number)
            if not self._is_cut():
                self._answer(number, answer)

    def finish(self) -> None:
        for number in [*self._waiting, *self._done]:
            answer = self._done.get(number) or self._take_effect(number)
            self._answer(number, answer)
        self._waiting, self._done = [], {}

    def call(self, name: str) -> None:
        self._invoke(name, worker="final")
        number = self._waiting.pop()
        self._answer(number, self._take_effect(number))

    def _is_cut(self) -> bool:
        return self._rng.random() < self._cut

    def _invoke(self, name: str, worker: str = "") -> None:
        number = len(self.operations)
        arguments = self._arguments(name)
        self.operations.append(
            Operation(worker or f"w{number}", number, name, ROLLOUT, arguments, next(self._clock))
        )
        self._waiting.append(number)

    def _arguments(self, name: str) -> dict[str, Any]:
        rng = self._rng
        call = "c0" if name in STAGING else rng.choice(self._calls)
        if name in ("put", "record", "stage"):
            variant = rng.choices("pq", (9, 1))[0]
            parent = rng.choice([None, *self._calls])
            return put(
                call,
                variant,
                # Twins: two calls answer alike, every second pair with the same tokens.
                conversation=f"said by {int(call[1:]) // 2}",
                tokens=f"tokens of {int(call[1:]) // 4} {variant}",
                parent=parent,
                delta=parent is not None and rng.random() < 0.5,
            )
        if name == "refuse":
            return {"call": call, "code": rng.choices("ab", (9, 1))[0]}
        if name == "record_failure":
            return {"call": call, "reason": rng.choices("ab", (9, 1))[0]}
        if name == "drop":
            return {"snapshot_id": self._seen[0], "version": self._seen[1] + (rng.random() < 0.1)}
        if name == "resolve":
            shown = rng.randrange(len(self._calls) // 2 + 1)
            return {"conversations": [f"said by {n}" for n in range(shown)]}
        return {} if name in ("freeze", "retire", "delete", "manifest") else {"call": call}

    def _take_effect(self, number: int) -> Answer:
        operation = self.operations[number]
        given = None
        if operation.name == "freeze":
            given = Answer({"snapshot_id": f"snapshot-{next(self._snapshots)}"})
        self._state, answer = step(self._state, operation.name, operation.arguments, given)
        return answer

    def _answer(self, number: int, answer: Answer) -> None:
        operation = self.operations[number]
        if operation.name == "freeze" and answer.error is None:
            self._seen = (answer.value["snapshot_id"], answer.value["version"])
        value = {"spilled": False} if operation.name == "mark" and answer.error is None else answer.value
        self.operations[number] = replace(
            operation,
            outcome=Outcome.OK if answer.error is None else Outcome.ERROR,
            returned_at=next(self._clock),
            value=value,
            error=answer.error,
        )


def is_legal_by_enumeration(operations: Sequence[Operation]) -> bool:
    """Decide by trying every order, with every choice of what happened among operations of unknown outcome."""
    initial: State = StagedState() if operations[0].name in STAGING else RolloutState()

    def follow(state: State, left: tuple[Operation, ...]) -> bool:
        if all(operation.outcome is Outcome.UNKNOWN for operation in left):
            return True
        for operation in left:
            if any(
                other.returned_at is not None and other.returned_at < operation.invoked_at for other in left
            ):
                continue
            known = operation.outcome is not Outcome.UNKNOWN
            value = None if operation.name == "mark" else operation.value
            given = Answer(value, operation.error) if known else None
            new, answer = step(state, operation.name, operation.arguments, given)
            if given not in (None, answer):
                continue
            if follow(new, tuple(other for other in left if other is not operation)):
                return True
        return False

    return follow(initial, tuple(operations))


def mutate(rng: Random, operations: Sequence[Operation]) -> list[Operation]:
    """Return the history with one answer changed to another that such an operation could give."""
    answered = [n for n, operation in enumerate(operations) if operation.outcome is not Outcome.UNKNOWN]
    number = rng.choice(answered)
    operation = operations[number]
    changes = _CHANGES.get(operation.name, _other_error)
    value, error = changes(rng, operation)
    outcome = Outcome.OK if error is None else Outcome.ERROR
    return [
        *operations[:number],
        replace(operation, outcome=outcome, value=value, error=error),
        *operations[number + 1 :],
    ]


_Change = tuple[Any, str | None]


def _other_error(rng: Random, operation: Operation) -> _Change:
    errors = [None, "TokenCaptureFrozenError", "TokenCaptureRetiredError", "PayloadConflictError"]
    if operation.name in ("begin", "mark"):
        errors.remove("PayloadConflictError")
    if operation.name in ("record", "record_failure"):
        errors = [None, "PayloadConflictError"]
    if operation.name == "mark":
        errors.remove("TokenCaptureFrozenError")
    errors.remove(operation.error)
    error = rng.choice(errors)
    return ({"spilled": False} if operation.name == "mark" and error is None else None), error


def _other_snapshot(rng: Random, operation: Operation) -> _Change:
    if operation.error is not None:
        return snapshot(snapshot_id="made-up"), None
    value = dict(operation.value)
    what = rng.choice(["version", "incomplete", "calls", "refusals", "error"])
    if what == "error":
        return None, "TokenCaptureRetiredError"
    if what == "version":
        value["version"] += rng.choice([-1, 1])
    elif what == "incomplete":
        value["incomplete"] = not value["incomplete"]
    else:
        value[what] = _without_one(rng, value[what]) or {"c0": "p"}
    return value, None


def _without_one(rng: Random, values: dict[str, str]) -> dict[str, str]:
    left_out = rng.choice([*values, "nothing"])
    return {key: value for key, value in values.items() if key != left_out}


def _other_manifest(rng: Random, operation: Operation) -> _Change:
    if operation.error is not None:
        return {"records": [], "failures": []}, None
    value = dict(operation.value)
    if len(value["records"]) > 1 and rng.random() < 0.5:
        value["records"] = value["records"][::-1]
    elif value["records"]:
        value["records"] = value["records"][1:]
    else:
        value["records"] = [["c0", "p"]]
    return value, None


def _other_resolution(rng: Random, operation: Operation) -> _Change:
    answers = [
        resolution("root"),
        resolution("unresolved", "no_match"),
        resolution("unresolved", "ambiguous"),
        resolution("resolved", parent="c1", tokens="tokens of 0 p", kind="complete"),
    ]
    return rng.choice([answer for answer in answers if answer != operation.value]), None


_CHANGES: dict[str, Callable[[Random, Operation], _Change]] = {
    "freeze": _other_snapshot,
    "drop": lambda rng, operation: (not operation.value, None),
    "retire": lambda rng, operation: ("absent" if operation.value == "removed" else "removed", None),
    "delete": lambda rng, operation: ("absent" if operation.value == "removed" else "removed", None),
    "manifest": _other_manifest,
    "resolve": _other_resolution,
    "stage": lambda rng, operation: (None, None if operation.error else "StagedConflict"),
    "fetch": lambda rng, operation: ("p", None) if operation.error else (None, "StagedCallMissingError"),
    "unstage": lambda rng, operation: (not operation.value, None),
}
