"""One call per line as JSON, with everything that is known of it, for jq and scripts."""

from __future__ import annotations

import json
import math
from typing import Any

import orjson

from tokencustody.chains.chains import count_not_finite, shape_of
from tokencustody.chains.reading import FrozenRollout, making_sense
from tokencustody.chains.reasons import LeftOut, Why
from tokencustody.codec.exact_json import encode_json
from tokencustody.codec.staged import unpack_call
from tokencustody.export.folder import ExportFolder
from tokencustody.export.report import Exported
from tokencustody.schema.tables import ledger_calls

_LEDGER_COLUMNS = [
    column.name
    for column in ledger_calls.columns
    if column.name not in ("run", "rollout_id", "model_call_id")
]


class CallsPart:
    """One JSONL file in the making; it holds one rollout in memory.

    JSON has no NaN and no infinity: they are written as the strings "NaN", "Infinity" and "-Infinity".
    """

    def __init__(self, folder: ExportFolder, number: int) -> None:
        self.rows = 0
        self.size = 0
        self._folder = folder
        self._name = f"part-{number:05}.jsonl"
        self._stream = folder.open_temporary()

    def add(self, rollout: FrozenRollout) -> tuple[Exported | None, list[LeftOut]]:
        """Add the calls of a rollout; return what the file now holds of it, and what it does not.

        Raises CorruptEntryError, with nothing added, for rows that are not what was written.
        """
        with making_sense(rollout.key):
            lines, tokens, sampled = self._lines(rollout)
            left_out = [
                LeftOut.of(rollout.key, Why.STAGED_CALL_MISSING, call)
                for call in rollout.only_in_ledger
                if call not in rollout.staged
            ]
            left_out += [LeftOut.of(rollout.key, row.reason, row.model_call_id) for row in rollout.lost]
            shape = shape_of(rollout, lines, left_out)
        if not lines:
            return None, left_out or [LeftOut.of(rollout.key, Why.NO_CALLS)]
        for line in lines.values():
            self._stream.write(line)
            self.size += len(line)
        self.rows += len(lines)
        exported = Exported.of(
            rollout,
            shape,
            calls=len(lines),
            rows=len(lines),
            tokens=tokens,
            trained_tokens=sampled,
            not_finite_log_probs=sum(count_not_finite(call.log_probs) for call in rollout.entries.values()),
        )
        return exported, left_out

    def finish(self) -> None:
        """Close the file, to be published."""
        self._folder.close_temporary(self._stream, self._name, rows=self.rows)

    def abandon(self) -> None:
        """Let go of the file, which stays unfinished."""
        self._folder.discard(self._stream)

    def _lines(self, rollout: FrozenRollout) -> tuple[dict[str, bytes], int, int]:
        """Return the line of each call, and how many tokens they hold and how many of these were sampled."""
        lines = {}
        tokens = sampled = 0
        for entry in rollout.records():
            facts = rollout.calls[entry.model_call_id]
            about = {
                "committed_at": facts.committed_at.isoformat(),
                "written_by": facts.written_by,
                "payload_sha256": facts.payload_sha256,
                "conflicting": facts.is_conflicting,
            }
            lines[entry.model_call_id] = self._line(
                rollout, entry.model_call_id, "records", about, "entry", dict(entry)
            )
            tokens += len(entry.prompt_token_ids) + len(entry.generation_token_ids)
            sampled += len(entry.generation_token_ids)
        for call in rollout.only_in_ledger:
            if call not in rollout.staged:
                continue
            staged = unpack_call(rollout.staged[call])
            about = {"payload_sha256": rollout.staged[call].payload_sha256}
            lines[call] = self._line(rollout, call, "ledger", about, "staged", staged.model_dump())
            tokens += staged.delta_len
            sampled += int(sum(staged.token_mask_delta))
        return lines, tokens, sampled

    def _line(
        self,
        rollout: FrozenRollout,
        model_call_id: str,
        source: str,
        about: dict[str, Any],
        name: str,
        fields: dict[str, Any],
    ) -> bytes:
        row = rollout.ledger.get(model_call_id)
        ledger = None if row is None else {column: getattr(row, column) for column in _LEDGER_COLUMNS}
        if ledger is not None:
            ledger["committed_at"] = ledger["committed_at"].isoformat()
            ledger["staging_chain"] = json.loads(ledger["staging_chain"])
        document = {
            "run": rollout.key.run,
            "rollout_id": rollout.key.rollout_id,
            "model_call_id": model_call_id,
            "source": source,
            "snapshot_id": rollout.snapshot_id,
            "version": rollout.version,
            "incomplete": rollout.incomplete,
            **about,
            "ledger": ledger,
            name: fields,
        }
        return _json(document) + b"\n"


def _json(document: dict[str, Any]) -> bytes:
    is_strict, data = strict_json(document)
    if is_strict:
        return data
    return json.dumps(_finite(document), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def strict_json(document: dict[str, Any]) -> tuple[bool, bytes]:
    """Return whether strict JSON carries every value, with integers within 64 bits, and the text if so."""
    dialect, data = encode_json(document)
    return dialect == 0, data


def sorted_json(document: dict[str, Any]) -> bytes:
    """Return a document that `strict_json` carries, its keys sorted at every level."""
    return orjson.dumps(document, option=orjson.OPT_SORT_KEYS)


def _finite(value: Any) -> Any:
    match value:
        case float() if math.isnan(value):
            return "NaN"
        case float() if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        case dict():
            return {key: _finite(each) for key, each in value.items()}
        case list():
            return [_finite(each) for each in value]
        case _:
            return value
