"""The capture ledger of the transport in memory."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.conformance.memory import Memory, Rollout, copied
from tokencustody.errors import RolloutRetiredError
from tokencustody.fingerprint import FINGERPRINT_VERSION, conversation_digest
from tokencustody.lineage import (
    NO_MATCH,
    Candidate,
    Continuation,
    Request,
    choose_parent,
    continuation_of,
    unresolved,
)
from tokencustody.protocols import LineageMatch, LineageResolution
from tokencustody.records import ParentResolutionStatus
from tokencustody.staging.records import CallRecord, CaptureLedgerCommit, ManifestFailure, RolloutManifest


class MemoryLedger(Memory):
    """A ledger in one client. A broken one overrides one method."""

    # What broken ledgers like to get wrong.

    def same_call(self, known: CaptureLedgerCommit, commit: CaptureLedgerCommit) -> bool:
        return (
            known.record == commit.record
            and known.staging_chain == commit.staging_chain
            and _continuation(known) == _continuation(commit)
        )

    def stored_call(self, commit: CaptureLedgerCommit) -> CaptureLedgerCommit:
        return copied(commit)

    def is_candidate(self, row: CallRecord) -> bool:
        return row.fingerprint_version == FINGERPRINT_VERSION

    def context(self, commit: CaptureLedgerCommit) -> tuple[int, str]:
        return len(commit.request_items), conversation_digest(commit.request_items)

    def fingerprint(self, commit: CaptureLedgerCommit) -> str | None:
        return _continuation(commit).fingerprint

    def has_new_row(self, rollout: Rollout) -> None:
        # So that no snapshot from before takes the row along.
        rollout.version += rollout.state == "frozen"

    def match(self, commit: CaptureLedgerCommit) -> LineageMatch:
        row = commit.record
        return LineageMatch(
            model_call_id=row.model_call_id,
            cumulative_token_ids=(),
            digest=row.cumulative_hash,
            staging_chain=commit.staging_chain,
            prev_len=row.cum_len,
            chain_hash=row.chain_hash,
        )

    def refuse_reading(self, rollout: Rollout) -> None:
        if rollout.state == "retired":
            raise RolloutRetiredError

    # The ledger.

    async def record(self, commit: CaptureLedgerCommit) -> None:
        # So that tasks interleave as they do when a transport waits for a network.
        await asyncio.sleep(0)
        call = commit.record.model_call_id
        self.check_call_id(call)
        with self.backend.lock:
            rollout = self.rollout(commit.rollout_id)
            if rollout.state == "retired":
                return
            known = rollout.calls.get(call)
            if known is None and not rollout.has_failed(call):
                rollout.calls[call] = self.stored_call(commit)
                self.has_new_row(rollout)
            elif known is None or not self.same_call(known, commit):
                raise ValueError("conflicting ledger record")

    async def record_failure(self, rollout_id: str, model_call_id: str, reason: str) -> None:
        await asyncio.sleep(0)
        self.check_call_id(model_call_id)
        with self.backend.lock:
            rollout = self.rollout(rollout_id)
            if rollout.state == "retired":
                return
            if (model_call_id, reason) not in rollout.failures:
                rollout.failures.append((model_call_id, reason))
                self.has_new_row(rollout)

    async def manifest(self, rollout_id: str) -> dict[str, Any]:
        with self.backend.lock:
            rollout = self.rollout(rollout_id)
            self.refuse_reading(rollout)
            failures = [ManifestFailure(model_call_id=c, reason=r) for c, r in rollout.failures]
            records = [commit.record for commit in rollout.calls.values()]
            manifest = RolloutManifest(rollout_id=rollout_id, records=records, failures=failures)
        return manifest.model_dump(mode="json")

    async def has_rows(self, rollout_id: str) -> bool:
        with self.backend.lock:
            rollout = self.rollout(rollout_id)
            self.refuse_reading(rollout)
            return bool(rollout.calls or rollout.failures)

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        resolution = await super().resolve(rollout_id, request_items)
        if resolution.reason != NO_MATCH:
            return resolution
        return self.resolve_rows(self.rollout(rollout_id), request_items)

    def resolve_rows(self, rollout: Rollout, request_items: list[dict[str, Any]]) -> LineageResolution:
        request = Request(request_items)
        candidates = [
            Candidate(
                call,
                *self.context(commit),
                commit.record.cumulative_hash,
                commit.record.cum_len,
                self.fingerprint(commit) or "",
                FINGERPRINT_VERSION,
            )
            for call, commit in rollout.calls.items()
            if self.is_candidate(commit.record)
        ]
        choice = choose_parent(candidates, request)
        if isinstance(choice, str):
            return unresolved(choice)
        match = self.match(rollout.calls[choice.model_call_id])
        return LineageResolution(ParentResolutionStatus.RESOLVED, match)


def _continuation(commit: CaptureLedgerCommit) -> Continuation:
    return continuation_of(commit.request_items, commit.response_items)
