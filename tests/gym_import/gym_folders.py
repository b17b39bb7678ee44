"""Folders in the layout of NeMo Gym's file store, written by hand so that they can be wrong."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokencustody.gym_import import GymImporter, ImportedRollout, ImportReport
from tokencustody.protocols import TokenCaptureSnapshot
from tokencustody.records import TokenEntry
from tokencustody.store import SqlTokenSource
from tokencustody.txn.selection import RolloutFilter
from tokencustody.verify import Rule, verify

_OF_FENCES = {
    rule
    for rule in Rule
    if rule.startswith(("fence_", "conflict_")) or rule.endswith(("history", "_records"))
}


def line_of(entry: TokenEntry, **changes: Any) -> bytes:
    """Return the line of a record without its end; `changes` replace fields, those that are `...` are left out."""
    fields = {**dict(entry), **(entry.model_extra or {}), **changes}
    kept = {name: value for name, value in fields.items() if value is not ...}
    return json.dumps(kept, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()


def write_rollout(
    folder: Path,
    lines: Iterable[bytes],
    *,
    rollout_id: str = "rollout",
    intents: Iterable[str] = (),
    marks: Iterable[str] = (),
    ledger: bytes = b"",
    last_line: bytes = b"",
    state: dict[str, Any] | None = None,
) -> None:
    """Write the files of one rollout; `last_line` has no end."""
    folder.mkdir(exist_ok=True)
    stem = folder / rollout_id
    Path(f"{stem}.tokens.lock").touch()
    Path(f"{stem}.tokens.jsonl").write_bytes(b"".join(line + b"\n" for line in lines) + last_line)
    for suffix, names in (("intents", list(intents)), ("incomplete", list(marks))):
        if names:
            Path(f"{stem}.tokens.{suffix}").write_text("".join(f"{name}\n" for name in names))
    if ledger:
        Path(f"{stem}.lineage.jsonl").write_bytes(ledger)
    if state is not None:
        Path(f"{stem}.tokens.state.json").write_text(json.dumps(state))


def state_of(lines: dict[str, bytes], **changes: Any) -> dict[str, Any]:
    """Return what Gym's state file says of lines by call; `changes` replace fields."""
    digests = {call: hashlib.sha256(line).hexdigest() for call, line in lines.items()}
    state = {
        "entry_digests": digests,
        "frozen": False,
        "incomplete": False,
        "indexed_size": sum(len(line) + 1 for line in lines.values()),
        "retired": False,
        "snapshot_id": "",
        "version": len(lines),
    }
    return state | changes


async def import_folder(url: str, folder: Path, run: str = "default", **options: Any) -> ImportReport:
    """Import a folder; whatever its files say, what the database then says of the rollouts can have happened."""
    async with GymImporter(url, run=run) as importer:
        report = await importer.import_folder(folder, **options)
    if report.rollouts and not options.get("dry_run"):
        verified = await asyncio.to_thread(verify, url, RolloutFilter(run=run), jobs=1)
        assert not [each for each in verified.findings if each.rule in _OF_FENCES]
    return report


async def import_one(url: str, folder: Path, **options: Any) -> ImportedRollout:
    """Import a folder of one rollout."""
    (imported,) = (await import_folder(url, folder, **options)).rollouts
    return imported


async def freeze(url: str, rollout_id: str = "rollout", run: str = "default") -> TokenCaptureSnapshot:
    """Freeze a rollout."""
    async with SqlTokenSource(url, run=run) as source:
        return await source.freeze(rollout_id)


def found(imported: ImportedRollout) -> list[tuple[str, str, int | None, str | None]]:
    """Return the kind, the kind of file, the line and the call of each finding."""
    return [
        (each.kind.value, each.file.rpartition(".")[2], each.line, each.model_call_id)
        for each in imported.findings
    ]
