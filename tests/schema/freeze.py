"""Writes the frozen database of the newest revision: `python -m tests.schema.freeze`.

Run it once, with the release that brings a new revision, and commit the two files. A frozen database is never written
again: later releases must read what this one wrote.
"""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
import tempfile
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import insert

from tests.support.ledger import make_commit
from tokencustody import (
    ParentResolutionStatus,
    TokenCaptureSnapshot,
    TokenEntry,
    open_store,
    stamp_continuation,
    stamp_lineage,
)
from tokencustody.database.url import parse_url
from tokencustody.errors import PayloadConflictError
from tokencustody.schema import migrate
from tokencustody.schema.tables import exports
from tokencustody.staging.digest import compute_chain_hash, compute_extras_digest, hash_token_ids
from tokencustody.staging.records import StagedCallRecord
from tokencustody.store import SqlStagingStore

FROZEN = Path(__file__).parent / "frozen"
OTHER_RUN = "another-run"

REQUEST = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Paris."}]}]
NEXT_REQUEST = [*REQUEST, *ANSWER, {"role": "user", "content": "And of Italy?"}]


def plain(entry: TokenEntry) -> dict[str, Any]:
    """Return an entry as JSON of Python's own dialect can carry it, exact in every bit."""
    return entry.model_dump(mode="json") | {
        "generation_log_probs": list(map(repr, entry.generation_log_probs))
    }


def entry(call: str, rollout: str = "open", **fields: Any) -> TokenEntry:
    """Return a root call of three prompt ids and two sampled ones, with `fields` changed."""
    made = TokenEntry(
        **{
            "rollout_id": rollout,
            "model_call_id": call,
            "model": "a-model",
            "prompt_token_ids": [1, 2, 3],
            "generation_token_ids": [4, 5],
            "generation_log_probs": [-0.25, -1e-300],
            "output_items": ANSWER,
            "response_id": f"response-{call}",
            "created_at": 1767323045.678901,
        }
        | fields
    )
    stamp_continuation(made, REQUEST)
    return stamp_lineage(made, None, parent_resolution=ParentResolutionStatus.ROOT)


def child(call: str, parent: TokenEntry, **fields: Any) -> TokenEntry:
    """Return a continuation of `parent` that holds only what came after it."""
    sequence = [*parent.prompt_token_ids, *parent.generation_token_ids]
    made = TokenEntry(
        rollout_id=parent.rollout_id,
        model_call_id=call,
        prompt_token_ids=[70_000, 7],
        generation_token_ids=[8],
        generation_log_probs=[-0.5],
        output_items=ANSWER,
        parent_call_id=parent.model_call_id,
        parent_resolution=ParentResolutionStatus.RESOLVED,
        prompt_is_delta=True,
        prefix_requested=True,
        prefix_supplied=True,
        **fields,
    )
    stamp_continuation(made, [*REQUEST, *ANSWER, {"role": "user", "content": "And of Italy?"}])
    return stamp_lineage(
        made,
        parent.model_call_id,
        parent_resolution=ParentResolutionStatus.RESOLVED,
        cumulative=[*sequence, *made.prompt_token_ids, *made.generation_token_ids],
    )


def whole_child(call: str, parent: TokenEntry) -> TokenEntry:
    """Return a continuation of `parent` that holds its whole prompt."""
    prompt = [*parent.prompt_token_ids, *parent.generation_token_ids, 70_000, 7]
    made = TokenEntry(
        rollout_id=parent.rollout_id,
        model_call_id=call,
        prompt_token_ids=prompt,
        generation_token_ids=[8],
        generation_log_probs=[-0.5],
        output_items=ANSWER,
    )
    stamp_continuation(made, NEXT_REQUEST)
    return stamp_lineage(
        made,
        parent.model_call_id,
        parent_resolution=ParentResolutionStatus.RESOLVED,
        cumulative=[*prompt, *made.generation_token_ids],
    )


def staged_calls() -> list[tuple[StagedCallRecord, dict[str, Any] | None]]:
    """Return the staged calls of the frozen database with their attachments."""
    calls: list[tuple[StagedCallRecord, dict[str, Any] | None]] = []
    extras: dict[str, Any] | None
    for number, (ids, extras) in enumerate((([1, 2**16, 2**64 - 1], None), ([5, 6], {"k": [0, 1.5, "é"]}))):
        record = StagedCallRecord.from_components(
            rollout_id="staged",
            model_call_id=f"call-{number}",
            parent_call_id=None,
            mode="text",
            prev_len=0,
            delta_len=len(ids),
            cum_len=len(ids),
            weight_version=number,
            token_ids_delta=ids,
            token_mask_delta=[0.0] + [1.0] * (len(ids) - 1),
            generation_log_probs_delta=[0.0] + [-0.25] * (len(ids) - 1),
            extras=extras,
            extras_digest=compute_extras_digest(extras),
            chain_hash=compute_chain_hash(None, ids),
            cumulative_hash=hash_token_ids(ids),
        )
        attachments = {"raw": b"\0\1", "note": "text", "json": {"a": [1, None]}} if number else None
        calls.append((record, attachments))
    return calls


def mark_exported(url: str, snapshot: TokenCaptureSnapshot) -> None:
    """Mark a frozen rollout as written to files."""
    mark = insert(exports).values(
        run="default",
        rollout_id=snapshot.rollout_id,
        export_id="an-export",
        snapshot_id=snapshot.snapshot_id,
        version=snapshot.version,
        destination="exported/é",
        manifest_sha256="e" * 64,
        exported_at=datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
        written_by="freezer",
        is_held=True,
    )
    migrate.in_transaction(parse_url(url), lambda connection: connection.execute(mark))


async def write(url: str) -> dict[str, Any]:
    """Fill a database with rollouts in every state, and return what each must read as."""
    root = entry("root")
    whole = whole_child("whole-child", root)
    open_entries = [
        root,
        child("child", root),
        whole,
        whole_child("whole-grandchild", whole),
        entry(
            "odd",
            prompt_token_ids=[],
            generation_token_ids=[0, 2**16, 2**32, 2**63, 2**64 - 1],
            generation_log_probs=[-0.0, math.nan, math.inf, -math.inf, 5e-324],
            response_id="nul \0 and 🜚",
            routed_experts=[[[1, 2]], None, {"layer": 1.5}],
            unknown_field={"deep": [2**70, 1.0, "x"]},
        ),
    ]
    frozen_entries = [entry("only", "frozen")]
    marked_entries = [entry("first", "marked")]
    async with open_store(url, writer="freezer") as store:
        for call in ("root", "child", "odd"):
            await store.sink.begin_call("open", call)
        for each in [*open_entries, *frozen_entries, *marked_entries, entry("gone", "dropped")]:
            await store.sink.put(each)
        await store.sink.begin_call("open", "refused")
        await store.sink.refuse_call("open", model_call_id="refused", code="context_length_exceeded")
        await store.sink.begin_call("marked", "dangling")
        await store.sink.mark_incomplete("marked", "lost")
        with suppress(PayloadConflictError):
            await store.sink.put(entry("first", "marked", generation_log_probs=[-0.25, -0.5]))
        await store.sink.refuse_call("marked", model_call_id="refused", code="one")
        frozen = await store.source.freeze("frozen")
        dropped = await store.source.freeze("dropped")
        mark_exported(url, frozen)
        await store.source.drop("dropped", dropped.snapshot_id, dropped.version)
        await store.source.retire(["retired"])
    async with open_store(url, writer="freezer") as store:
        root_commit = make_commit("ledger")
        await store.lineage.record(root_commit)
        await store.lineage.record_failure("ledger", "lost", "worker_capture_failed")
        await store.lineage.record(
            make_commit(
                "ledger", "call-2", request=NEXT_REQUEST, text="Rome.", tokens=[70_000, 7], parent=root_commit
            )
        )
        manifest = await store.lineage.manifest("ledger")
    staged = staged_calls()
    with SqlStagingStore(url, writer="freezer") as staging:
        for record, attachments in staged:
            assert staging.stage(record, attachments=attachments).ok
    async with open_store(url, run=OTHER_RUN, writer="freezer") as store:
        await store.sink.put(entry("root", model="another-model"))
    return {
        "open": {"entries": list(map(plain, open_entries)), "incomplete": False, "refused": ["refused"]},
        "frozen": {
            "entries": list(map(plain, frozen_entries)),
            "incomplete": False,
            "refused": [],
            "snapshot_id": frozen.snapshot_id,
            "version": frozen.version,
        },
        "marked": {"entries": list(map(plain, marked_entries)), "incomplete": True, "refused": ["refused"]},
        "manifest": manifest,
        "staged": [
            {"record": record.model_dump(mode="json"), "extras": record.extras} for record, _ in staged
        ],
    }


def main() -> None:
    """Write the two files of the newest revision."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "frozen.db"
        expected = asyncio.run(write(str(path)))
        with closing(sqlite3.connect(path)) as connection:
            dump = "\n".join(connection.iterdump())
    (FROZEN / f"{migrate.HEAD}.sqlite.sql").write_text(f"{dump}\n")
    (FROZEN / f"{migrate.HEAD}.json").write_text(f"{json.dumps(expected, indent=1)}\n")


if __name__ == "__main__":
    main()
