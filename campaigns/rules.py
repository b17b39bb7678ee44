"""Says in words what is wrong with a history for which there is no legal order.

Each rule compares operations of which one had returned before the other began, where nothing that overlaps them could
explain the difference. That finds what is clearly wrong; the search finds the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import inf

from campaigns.history import Operation, Outcome
from campaigns.model import (
    CONFLICT_ERROR,
    LEDGER_RETIRED_ERROR,
    RETIRED_ERROR,
    STAGED_CONFLICT_ERROR,
    STAGED_MISSING_ERROR,
)


@dataclass(frozen=True)
class Violation:
    """A broken rule, by its name, with the operations that show it."""

    rule: str
    rollout: str
    text: str
    operations: tuple[Operation, ...] = ()

    def __str__(self) -> str:
        return "\n  ".join(
            [f"{self.rule} ({self.rollout}): {self.text}", *(str(operation) for operation in self.operations)]
        )


Broken = Iterator[tuple[str, tuple[Operation, ...]]]

# What an operation is about beside the call: two that differ in it conflict, but for the reasons of a failed call.
_CONTENTS = {
    "put": "payload",
    "record": "payload",
    "stage": "payload",
    "refuse": "code",
    "record_failure": "reason",
}
_UNIQUE = [name for name in _CONTENTS if name != "record_failure"]


def explain(rollout: str, operations: Sequence[Operation]) -> list[Violation]:
    """Return every rule that the operations on one rollout, or on one staged call, clearly break.

    Each rule once, with the first operations that show it.
    """
    history = _History(operations)
    violations = []
    for name, rule in RULES.items():
        for text, shown in rule(history):
            violations.append(Violation(name, rollout, text, shown))
            break
    return violations


class _History:
    def __init__(self, operations: Sequence[Operation]) -> None:
        self._operations = operations
        self._deletes = self._possible("delete", "unstage")
        self._removals = self._possible("delete", "retire", "drop", "unstage")

    def ok(self, *names: str) -> list[Operation]:
        """Return the operations of these names that succeeded; not marks that were spilled."""
        return [op for op in self.named(*names) if op.outcome is Outcome.OK and not _is_spilled(op)]

    def failed(self, error: str, *names: str) -> list[Operation]:
        return [op for op in self.named(*names) if op.outcome is Outcome.ERROR and op.error == error]

    def named(self, *names: str) -> list[Operation]:
        return [op for op in self._operations if not names or op.name in names]

    def pairs(
        self, earlier: Sequence[Operation], later: Sequence[Operation], *, kept: bool = False
    ) -> Iterator[tuple[Operation, Operation]]:
        """Yield those of which one had returned before the other began, with no delete around them.

        With `kept`, no retirement either.
        """
        between = self._removals if kept else self._deletes
        for first in earlier:
            for second in later:
                if _end(first) < second.invoked_at and not any(
                    op.invoked_at < _end(second) and _end(op) > first.invoked_at
                    for op in between
                    if op is not first and op is not second
                ):
                    yield first, second

    def stored(self, *names: str) -> list[Operation]:
        """Return what was stored for sure: a record that came after a retirement was discarded."""
        return [
            op
            for op in self.ok(*names)
            if not op.name.startswith("record")
            or all(other.invoked_at > _end(op) for other in self._removals)
        ]

    def contents(self, name: str, call: str) -> set[str]:
        """Return what was ever sent under a call id."""
        return {op.arguments[_CONTENTS[name]] for op in self.named(name) if op.arguments["call"] == call}

    def _possible(self, *names: str) -> list[Operation]:
        return [op for op in self.named(*names) if op.outcome is not Outcome.ERROR and op.value is not False]


def _end(operation: Operation) -> float:
    is_known = operation.outcome is not Outcome.UNKNOWN and operation.returned_at is not None
    return operation.returned_at if is_known and operation.returned_at is not None else inf


def _is_spilled(operation: Operation) -> bool:
    return operation.name == "mark" and bool(operation.value and operation.value["spilled"])


def _lost(history: _History) -> Broken:
    frozen, manifests = history.ok("freeze"), history.ok("manifest")
    for write, read in history.pairs(history.ok("put"), frozen):
        if read.value["calls"].get(write.arguments["call"]) != write.arguments["payload"]:
            yield (
                f"call {write.arguments['call']} was stored, but the snapshot has not this payload",
                (write, read),
            )
    for write, read in history.pairs(history.ok("refuse"), frozen):
        if read.value["refusals"].get(write.arguments["call"]) != write.arguments["code"]:
            yield f"the refusal of call {write.arguments['call']} is missing in the snapshot", (write, read)
    for name, shown in (("record", "records"), ("record_failure", "failures")):
        for write, read in history.pairs(history.ok(name), manifests):
            if [write.arguments["call"], write.arguments[_CONTENTS[name]]] not in read.value[shown]:
                yield f"call {write.arguments['call']} is missing among the manifest's {shown}", (write, read)
    for write, read in history.pairs(history.ok("stage"), history.failed(STAGED_MISSING_ERROR, "fetch")):
        yield f"call {write.arguments['call']} was staged, but is not there", (write, read)


def _late(history: _History) -> Broken:
    closing = history.ok("freeze", "retire", "drop")
    for fence, write in history.pairs(_true(closing), history.ok("put", "begin", "refuse")):
        yield f"{write.name} succeeded after the fence", (fence, write)


def _version(history: _History) -> Broken:
    frozen = history.ok("freeze")
    for first, second in history.pairs(frozen, frozen):
        if second.value["version"] < first.value["version"]:
            yield f"version {second.value['version']} came after {first.value['version']}", (first, second)
    changes = [
        *history.ok("mark"),
        *history.failed(CONFLICT_ERROR, "put"),
        *_new_rows(history),
    ]
    for first, change in history.pairs(frozen, changes):
        for _, second in history.pairs([change], frozen):
            if second.value["version"] == first.value["version"]:
                text = f"version {second.value['version']} stands for the rollout before and after a change"
                yield text, (first, change, second)
        for _, drop in history.pairs([change], _true(history.ok("drop"))):
            if drop.arguments["version"] == first.value["version"]:
                text = f"version {first.value['version']} was dropped after it had changed"
                yield text, (first, change, drop)


def _new_rows(history: _History) -> Iterator[Operation]:
    """Yield what added a row to the ledger for sure: it was tried once, and nobody retired the rollout before."""
    for name in ("record", "record_failure"):
        tried = Counter((op.arguments["call"], op.arguments[_CONTENTS[name]]) for op in history.named(name))
        for op in history.stored(name):
            if tried[op.arguments["call"], op.arguments[_CONTENTS[name]]] == 1:
                yield op


def _snapshot(history: _History) -> Broken:
    frozen = history.ok("freeze")
    for first, second in combinations(frozen, 2):
        is_same = all(first.value[name] == second.value[name] for name in ("snapshot_id", "version"))
        if is_same and first.value != second.value:
            yield "two snapshots differ under one id and version", (first, second)
    for first, second in history.pairs(frozen, frozen):
        names = ("calls", "refusals", "snapshot_id")
        if any(first.value[name] != second.value[name] for name in names):
            yield "a frozen rollout shows something else than before", (first, second)


def _parent(history: _History) -> Broken:
    written, stored = history.named("put", "record"), history.stored("put", "record")
    for read in history.ok("resolve"):
        asked = read.arguments["conversations"]
        answer = read.value
        if (answer["status"] == "root") != (not asked):
            yield "a request is a root exactly if it continues nothing", (read,)
            continue
        if not asked:
            continue
        fitting = [op for op in written if op.arguments["conversation"] == asked[-1]]
        parent = answer["parent"]
        proven = [op for op in fitting if op.arguments["call"] == parent]
        if parent is not None and not proven:
            yield f"call {parent} is no call that the request continues", (read,)
        elif answer["kind"] == "complete" and not any(
            op.name == "put" and op.arguments["tokens"] == answer["tokens"] for op in proven
        ):
            yield f"the tokens of parent {parent} are not those that were put", (read,)
        committed = [
            op
            for op, _ in history.pairs([op for op in fitting if op in stored], [read], kept=True)
            if len(history.contents(op.name, op.arguments["call"])) == 1
            and len(history.contents("put", op.arguments["call"])) <= 1
        ]
        complete = [op for op in committed if op.name == "put"]
        if answer["reason"] == "no_match" and committed:
            yield "there was a parent that the request continues", (committed[0], read)
        if answer["kind"] == "ledger" and complete:
            yield "a complete record is asked before the ledger", (complete[0], read)
        candidates = complete if answer["kind"] == "complete" else committed
        tokens = {op.arguments["tokens"] for op in candidates}
        if parent is not None and len(tokens) > 1:
            yield "the parent was guessed: calls with other tokens fit as well", (*candidates, read)
        if parent is not None and any(op.arguments["call"] < parent for op in candidates):
            yield "a smaller call id with the same tokens stands for them all", (*candidates, read)
        refused = [
            op
            for op in history.failed(CONFLICT_ERROR, "put")
            if op.arguments["conversation"] == asked[-1] and op.arguments["call"] != parent
        ]
        for conflict, _ in history.pairs(refused, [read], kept=True):
            if parent is not None:
                yield "the parent was guessed: a call with two payloads fits as well", (conflict, read)
        if answer["reason"] == "ambiguous" and not _could_be_ambiguous(history, fitting):
            yield "all calls that fit have the same tokens", (read,)


def _could_be_ambiguous(history: _History, fitting: Sequence[Operation]) -> bool:
    """Return whether several calls fit, of which some have other tokens or two payloads."""
    calls = {op.arguments["call"] for op in fitting}
    differ = any(
        len({op.arguments["tokens"] for op in fitting if op.name == name}) > 1 for name in ("put", "record")
    )
    # Complete records and the ledger name tokens in two ways.
    return len(calls) > 1 and (differ or any(len(history.contents("put", call)) > 1 for call in calls))


def _false_conflict(history: _History) -> Broken:
    for name in _UNIQUE:
        error = STAGED_CONFLICT_ERROR if name == "stage" else CONFLICT_ERROR
        for refused in history.failed(error, name):
            call = refused.arguments["call"]
            is_failed = name == "record" and any(
                op.arguments["call"] == call for op in history.named("record_failure")
            )
            if len(history.contents(name, call)) == 1 and not is_failed:
                yield f"nothing else was ever sent under call {call}", (refused,)


def _swallowed_conflict(history: _History) -> Broken:
    for name in _UNIQUE:
        content = _CONTENTS[name]
        written = history.stored(name)
        for first, second in history.pairs(written, written):
            if (
                first.arguments["call"] == second.arguments["call"]
                and first.arguments[content] != second.arguments[content]
            ):
                yield (
                    f"both of two {content}s under call {first.arguments['call']} succeeded",
                    (first, second),
                )


def _hidden(history: _History) -> Broken:
    complete = [read for read in history.ok("freeze") if not read.value["incomplete"]]
    for begun, read in history.pairs(history.ok("begin"), complete):
        call = begun.arguments["call"]
        if call not in read.value["calls"] and call not in read.value["refusals"]:
            yield f"the intent of call {call} dangles, but the rollout counts as complete", (begun, read)
    for conflict, read in history.pairs(history.failed(CONFLICT_ERROR, "put"), complete):
        yield "a conflict does not show in the snapshot", (conflict, read)
    for mark, read in history.pairs(history.ok("mark"), complete):
        yield "a mark does not show in the snapshot", (mark, read)


def _manifest(history: _History) -> Broken:
    manifests = history.ok("manifest")
    for first, second in history.pairs(manifests, manifests):
        for shown in ("records", "failures"):
            before = first.value[shown]
            if second.value[shown][: len(before)] != before:
                yield f"the {shown} of a manifest are no longer those of an earlier one", (first, second)
    recorded = history.ok("record")
    tried = Counter(op.arguments["call"] for op in history.named("record"))
    # Of a call that was recorded several times it may have been another one that stored it.
    once = [op for op in recorded if tried[op.arguments["call"]] == 1]
    for first, second in history.pairs(recorded, once):
        for _, read in history.pairs([second], manifests):
            rows = [call for call, _ in read.value["records"]]
            calls = [first.arguments["call"], second.arguments["call"]]
            if set(calls) <= set(rows) and rows.index(calls[0]) > rows.index(calls[1]):
                yield "the manifest is not in commit order", (first, second, read)


def _staging(history: _History) -> Broken:
    fetched = history.ok("fetch")
    sent = {op.arguments["payload"] for op in history.named("stage")}
    for read in fetched:
        if read.value not in sent:
            yield "this was never staged", (read,)
    for first, second in history.pairs(fetched, fetched):
        if first.value != second.value:
            yield "two fetches differ", (first, second)
    for write, read in history.pairs(history.ok("stage"), fetched):
        if write.arguments["payload"] != read.value:
            yield "something else was staged", (write, read)
    for write, gone in history.pairs(history.ok("stage"), history.ok("unstage")):
        if gone.value is False:
            yield "what was staged is said to have been absent", (write, gone)
    staged = history.named("stage")
    for first, second in pairwise(history.named("unstage", "fetch")):
        is_gone = first.name == "unstage" and first.outcome is Outcome.OK
        if is_gone and _end(first) < second.invoked_at and second.outcome is Outcome.OK:
            between = [op for op in staged if _end(op) > first.invoked_at and op.invoked_at < _end(second)]
            if not between and second.value not in (False, None):
                yield "what was unstaged is there again", (first, second)


def _came_back(history: _History) -> Broken:
    retired = [*_true(history.ok("retire", "drop")), *history.failed(LEDGER_RETIRED_ERROR, "manifest")]
    retired += history.failed(RETIRED_ERROR, "put", "begin", "refuse", "mark", "freeze")
    alive = history.ok("put", "begin", "refuse", "mark", "freeze", "manifest")
    for gone, back in history.pairs(retired, alive):
        yield f"{back.name} succeeded on a retired rollout", (gone, back)


def _spilled(history: _History) -> Broken:
    final = [op for op in history.ok("freeze") if op.worker == "final" and not op.value["incomplete"]]
    for mark, read in history.pairs(
        [op for op in history.named("mark") if _is_spilled(op)], final, kept=True
    ):
        yield "a mark that was spilled never showed", (mark, read)


def _invented(history: _History) -> Broken:
    for read in history.ok("freeze"):
        for call, payload in read.value["calls"].items():
            if payload not in history.contents("put", call):
                yield f"this payload was never put under call {call}", (read,)
        for call, code in read.value["refusals"].items():
            if code not in history.contents("refuse", call):
                yield f"this refusal was never sent for call {call}", (read,)
    for read in history.ok("manifest"):
        for name, shown in (("record", "records"), ("record_failure", "failures")):
            for call, content in read.value[shown]:
                if content not in history.contents(name, call):
                    yield f"this was never recorded under call {call}", (read,)


def _true(operations: Sequence[Operation]) -> list[Operation]:
    return [operation for operation in operations if operation.value is not False]


RULES: dict[str, Callable[[_History], Broken]] = {
    "lost write": _lost,
    "write after the fence": _late,
    "version reused": _version,
    "snapshot changed": _snapshot,
    "wrong parent": _parent,
    "false conflict": _false_conflict,
    "swallowed conflict": _swallowed_conflict,
    "hidden incompleteness": _hidden,
    "manifest changed": _manifest,
    "staging contradiction": _staging,
    "retired rollout came back": _came_back,
    "spilled mark lost": _spilled,
    "made-up content": _invented,
}
"""The rules by their names. "unnamed error" and "no legal order" are the checker's own."""
