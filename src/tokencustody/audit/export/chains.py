"""Trainable chains of a rollout: paths from a root call to a leaf call over parents that are proven, and only those.

A parent is proven when it was resolved, is itself proven, and its whole sequence is what the child's prompt begins
with, id by id; a length or digest that a call records must be that of its sequence.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tokencustody.audit.export.reading import FrozenRollout
from tokencustody.audit.export.report import LeftOut, Why
from tokencustody.errors import LineageError
from tokencustody.lineage import check_recorded
from tokencustody.records import ParentResolutionStatus, TokenEntry
from tokencustody.sql.id_columns import digest_of_ids

_MAX_INT64 = 2**63 - 1


class SharedCalls(StrEnum):
    """Which chains train the calls that several of them begin with."""

    FIRST = "first"
    EVERY = "every"


@dataclass(frozen=True, slots=True)
class Link:
    """One call of a chain: the tokens `start` up to the next call's `start`, of which those from `generation_start` on
    were sampled."""

    model_call_id: str
    start: int
    generation_start: int
    generation_len: int
    weight_version: int | None
    model: str
    parent_resolution: str
    response_id: str | None
    payload_sha256: str


@dataclass(frozen=True, slots=True)
class Chain:
    """One row for a trainer; the three columns have one value for each token.

    `loss_mask` is 1 where a sampled token is to be trained here; `log_probs` (natural logarithms) are 0.0 elsewhere.
    `digest` is `compute_digest` of `token_ids`.
    """

    source: str
    token_ids: array[int]
    loss_mask: array[int]
    log_probs: array[float]
    links: tuple[Link, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class _Proven:
    """A call that a chain may hold, and the lengths of its parent's sequence and of its own."""

    entry: TokenEntry
    parent: str | None
    start: int
    end: int
    digest: str


class Forest:
    """The proven calls of a rollout. `left_out` says why the others are not among them."""

    def __init__(self, rollout: FrozenRollout) -> None:
        self._rollout = rollout
        self.left_out: list[LeftOut] = []
        self._children: dict[str | None, list[TokenEntry]] = {}
        self._proven: dict[str, _Proven] = {}
        self._sort_by_parent()
        for root in self._children.get(None, ()):
            self._prove_below(root)
        self._name_unreached()

    def chains(self, shared: SharedCalls) -> Iterator[Chain]:
        """Yield one chain for each leaf, in the order in which the leaves were committed, then by call id.

        A chain without a token to train is left out; iterate to the end before reading `left_out`.
        """
        parents = {call.parent for call in self._proven.values()}
        # In commit order, as the entries are.
        leaves = [
            entry.model_call_id
            for entry in self._rollout.entries
            if entry.model_call_id in self._proven and entry.model_call_id not in parents
        ]
        trained: set[str] = set()
        for leaf in leaves:
            path = self._path_to(leaf)
            once = trained if shared is SharedCalls.FIRST else set()
            if all(not call.entry.generation_token_ids or call.entry.model_call_id in once for call in path):
                self._leave_out(leaf, Why.NO_GENERATED_TOKENS)
                continue
            yield self._chain(path, once)
            trained.update(call.entry.model_call_id for call in path)

    def _sort_by_parent(self) -> None:
        present = {entry.model_call_id for entry in self._rollout.entries}
        for entry in self._rollout.entries:
            why = self._why_not_linked(entry, present)
            if why is None:
                self._children.setdefault(entry.parent_call_id, []).append(entry)
            else:
                self._leave_out(entry.model_call_id, why)

    def _why_not_linked(self, entry: TokenEntry, present: set[str]) -> Why | None:
        if self._rollout.calls[entry.model_call_id].is_conflicting:
            return Why.CONFLICTING_CALL
        if entry.parent_resolution is None:
            return Why.PARENT_NOT_RECORDED
        if entry.parent_resolution == ParentResolutionStatus.UNRESOLVED:
            return Why.UNRESOLVED_PARENT
        if entry.parent_call_id is not None and entry.parent_call_id not in present:
            return Why.PARENT_MISSING
        return None

    def _prove_below(self, root: TokenEntry) -> None:
        # Depth first, so that a single list holds the sequence of the parent at hand: below a call it only grows.
        ids: list[int] = []
        waiting: list[tuple[TokenEntry, int]] = [(root, 0)]
        while waiting:
            entry, start = waiting.pop()
            del ids[start:]
            why, detail = self._continue(entry, ids)
            if why is not None:
                self._leave_out(entry.model_call_id, why, detail)
                continue
            digest = entry.digest or digest_of_ids(ids)
            call = _Proven(entry, entry.parent_call_id, start, len(ids), digest)
            self._proven[entry.model_call_id] = call
            waiting += [(child, len(ids)) for child in self._children.get(entry.model_call_id, ())]

    def _continue(self, entry: TokenEntry, ids: list[int]) -> tuple[Why | None, str]:
        """Make the parent's sequence that of the call; return why that cannot be done, if it cannot."""
        prompt, start = entry.prompt_token_ids, len(ids)
        if not entry.prompt_is_delta and prompt[:start] != ids:
            return Why.NOT_A_CONTINUATION, ""
        ids += prompt if entry.prompt_is_delta else prompt[start:]
        ids += entry.generation_token_ids
        try:
            check_recorded(entry, ids, digest_of_ids)
        except LineageError as exc:
            return Why.NOT_PROVEN, str(exc)
        if max(ids[start:], default=0) > _MAX_INT64:
            return Why.BEYOND_INT64, ""
        return None, ""

    def _name_unreached(self) -> None:
        """Say of each call that no root leads to whether that is its own fault or that of what lies above it."""
        told = {left.model_call_id for left in self.left_out}
        by_id = {entry.model_call_id: entry for entry in self._rollout.entries}
        for entry in self._rollout.entries:
            if entry.model_call_id in self._proven or entry.model_call_id in told:
                continue
            above: set[str] = set()
            call = entry.model_call_id
            while call not in above and call not in told:
                above.add(call)
                call = str(by_id[call].parent_call_id)
            is_circle = call == entry.model_call_id
            self._leave_out(entry.model_call_id, Why.PARENT_CYCLE if is_circle else Why.PARENT_LEFT_OUT)
            told.add(entry.model_call_id)

    def _leave_out(self, model_call_id: str, why: Why, detail: str = "") -> None:
        self.left_out.append(LeftOut.of(self._rollout.key, why, model_call_id, detail))

    def _path_to(self, leaf: str) -> list[_Proven]:
        path = []
        call: str | None = leaf
        while call is not None:
            path.append(self._proven[call])
            call = path[-1].parent
        return path[::-1]

    def _chain(self, path: Sequence[_Proven], trained: set[str]) -> Chain:
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
        return Chain("records", ids, mask, log_probs, tuple(links), path[-1].digest)

    def _link(self, call: _Proven, generated: int) -> Link:
        entry = call.entry
        return Link(
            model_call_id=entry.model_call_id,
            start=call.start,
            generation_start=call.end - generated,
            generation_len=generated,
            weight_version=_weight_version(self._rollout, entry),
            model=entry.model,
            parent_resolution=str(entry.parent_resolution),
            response_id=entry.response_id,
            payload_sha256=self._rollout.calls[entry.model_call_id].payload_sha256,
        )


def _weight_version(rollout: FrozenRollout, entry: TokenEntry) -> int | None:
    ledger = rollout.ledger.get(entry.model_call_id)
    if ledger is not None:
        return int(ledger.weight_version)
    recorded: Any = (entry.model_extra or {}).get("weight_version")
    return recorded if type(recorded) is int and abs(recorded) <= _MAX_INT64 else None
