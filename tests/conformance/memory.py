"""A transport in this process's memory that keeps every promise: what the kit itself is tested with.

Here are its backend and the clients of complete records; `ledger.py` and `staging.py` have the others.
"""

from __future__ import annotations

import asyncio
import pickle
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

from tokencustody.errors import TokenCaptureFrozenError, TokenCaptureRetiredError
from tokencustody.lineage import NO_MATCH, RolloutLineage, unresolved
from tokencustody.protocols import CallRefusal, LineageResolution, RolloutRemovalPayload, TokenCaptureSnapshot
from tokencustody.records import TokenEntry
from tokencustody.staging.records import CaptureLedgerCommit, StagedCallRecord

Copied = TypeVar("Copied")


def copied(value: Copied) -> Copied:
    """Return a deep copy, of long lists in a tenth of the time that `copy` takes."""
    again: Copied = pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))  # noqa: S301 - written just now
    return again


@dataclass
class Rollout:
    """Everything about one rollout."""

    state: str = "open"
    version: int = 0
    snapshot_id: str = ""
    incomplete: bool = False
    entries: dict[str, TokenEntry] = field(default_factory=dict)
    conflicting: set[str] = field(default_factory=set)
    intents: set[str] = field(default_factory=set)
    refusals: dict[str, str | None] = field(default_factory=dict)
    calls: dict[str, CaptureLedgerCommit] = field(default_factory=dict)
    failures: list[tuple[str, str]] = field(default_factory=list)

    def has_records(self) -> bool:
        """Return whether there is anything that a removal would remove."""
        return bool(self.entries or self.calls or self.failures)

    def has_failed(self, call: str) -> bool:
        """Return whether a reason was given why the call was not captured."""
        return any(failed == call for failed, _ in self.failures)

    def clear(self) -> None:
        """Forget the records."""
        for part in (
            self.entries,
            self.conflicting,
            self.intents,
            self.refusals,
            self.calls,
            self.failures,
        ):
            part.clear()


@dataclass
class Backend:
    """What all clients share. Its lock cannot be pickled, so the kit races threads."""

    rollouts: dict[tuple[str, str], Rollout] = field(default_factory=dict)
    staged: dict[tuple[str, str], tuple[StagedCallRecord, dict[str, Any]]] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)


class Memory:
    """Sink, source and resolver in one client. A broken transport overrides one method."""

    def __init__(self, backend: Backend, run: str = "run") -> None:
        self.backend = backend
        self.run = run

    # What broken transports like to get wrong.

    def key(self, rollout_id: str) -> tuple[str, str]:
        return self.run, rollout_id

    def rollout(self, rollout_id: str) -> Rollout:
        self.check_rollout_id(rollout_id)
        return self.backend.rollouts.setdefault(self.key(rollout_id), Rollout())

    def check_rollout_id(self, rollout_id: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,255}", rollout_id):
            raise ValueError("rollout_id is outside the rules")

    def check_call_id(self, call_id: str) -> None:
        call_id.encode()
        if not 1 <= len(call_id) <= 512 or "\0" in call_id:
            raise ValueError("model_call_id is outside the rules")

    def refuse_late(self, rollout: Rollout) -> None:
        self.refuse_retired(rollout)
        if rollout.state == "frozen":
            raise TokenCaptureFrozenError

    def refuse_retired(self, rollout: Rollout) -> None:
        if rollout.state == "retired":
            raise TokenCaptureRetiredError

    def stored(self, entry: TokenEntry) -> TokenEntry:
        return copied(entry)

    def same(self, known: TokenEntry, entry: TokenEntry) -> bool:
        return repr(known) == repr(entry)

    def conflict(self, rollout: Rollout, entry: TokenEntry) -> None:
        rollout.conflicting.add(entry.model_call_id)
        rollout.incomplete = True
        rollout.version += 1
        raise ValueError("the call was stored before with other bytes")

    def dangling(self, rollout: Rollout) -> set[str]:
        return rollout.intents - rollout.entries.keys() - rollout.refusals.keys()

    def new_snapshot_id(self, rollout_id: str) -> str:
        return uuid4().hex

    def batch(self, rollout_ids: Sequence[str]) -> list[str]:
        if isinstance(rollout_ids, str):
            raise TypeError("a batch is a sequence of rollout ids")
        for rollout_id in rollout_ids:
            self.check_rollout_id(rollout_id)
        return list(dict.fromkeys(rollout_ids))

    # The sink.

    async def put(self, entry: TokenEntry) -> None:
        # So that tasks interleave as they do when a transport waits for a network.
        await asyncio.sleep(0)
        self.check_call_id(entry.model_call_id)
        with self.backend.lock:
            rollout = self.rollout(entry.rollout_id)
            self.refuse_late(rollout)
            stored = self.stored(entry)
            known = rollout.entries.setdefault(entry.model_call_id, stored)
            if known is not stored and not self.same(known, stored):
                self.conflict(rollout, entry)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        await asyncio.sleep(0)
        self.check_call_id(model_call_id)
        with self.backend.lock:
            rollout = self.rollout(rollout_id)
            self.refuse_late(rollout)
            rollout.intents.add(model_call_id)

    async def refuse_call(self, rollout_id: str, *, model_call_id: str, code: str | None) -> None:
        await asyncio.sleep(0)
        self.check_call_id(model_call_id)
        with self.backend.lock:
            rollout = self.rollout(rollout_id)
            self.refuse_late(rollout)
            if rollout.refusals.setdefault(model_call_id, code) != code and code is not None:
                raise ValueError("the call was refused before with another code")

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        with self.backend.lock:
            rollout = self.rollout(rollout_id)
            self.refuse_retired(rollout)
            rollout.incomplete = True
            rollout.version += 1

    async def close(self) -> None:
        pass

    # The source.

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        await asyncio.sleep(0)
        with self.backend.lock:
            rollout = self.rollout(rollout_id)
            self.refuse_retired(rollout)
            if rollout.state == "open":
                rollout.state = "frozen"
                rollout.version += 1
                rollout.snapshot_id = self.new_snapshot_id(rollout_id)
                rollout.incomplete = rollout.incomplete or bool(self.dangling(rollout))
            return self.snapshot(rollout_id, rollout)

    def snapshot(self, rollout_id: str, rollout: Rollout) -> TokenCaptureSnapshot:
        return TokenCaptureSnapshot(
            rollout_id=rollout_id,
            entries=tuple(copied(entry) for entry in rollout.entries.values()),
            incomplete=rollout.incomplete,
            snapshot_id=rollout.snapshot_id,
            version=rollout.version,
            refusals=tuple(CallRefusal(*refusal) for refusal in rollout.refusals.items()),
        )

    async def drop(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        with self.backend.lock:
            rollout = self.rollout(rollout_id)
            if rollout.state == "open" or (rollout.snapshot_id, rollout.version) != (snapshot_id, version):
                return False
            rollout.state = "retired"
            rollout.clear()
            return True

    async def retire(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        result = RolloutRemovalPayload(absent=[], removed=[])
        with self.backend.lock:
            for rollout_id in self.batch(rollout_ids):
                rollout = self.rollout(rollout_id)
                result["removed" if rollout.has_records() else "absent"].append(rollout_id)
                rollout.state = "retired"
                rollout.clear()
        return result

    async def delete(self, rollout_ids: Sequence[str]) -> RolloutRemovalPayload:
        result = RolloutRemovalPayload(absent=[], removed=[])
        with self.backend.lock:
            for rollout_id in self.batch(rollout_ids):
                rollout = self.backend.rollouts.pop(self.key(rollout_id), None)
                result["removed" if rollout and rollout.has_records() else "absent"].append(rollout_id)
        return result

    # The resolver.

    def is_process_shared(self) -> bool:
        return False

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        with self.backend.lock:
            return self.lineage(rollout_id).resolve(request_items)

    def lineage(self, rollout_id: str) -> RolloutLineage:
        rollout = self.rollout(rollout_id)
        return RolloutLineage(dict(rollout.entries), set(rollout.conflicting))


NO_PARENT = unresolved(NO_MATCH)
