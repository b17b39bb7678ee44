"""NeMo Gym's token files: a folder that release 0.7.0 of its file store and file lineage reads as its own.

For each rollout: `ID.tokens.jsonl` (one complete record a line), `ID.tokens.state.json` (the frozen snapshot),
`ID.tokens.intents` and `ID.tokens.incomplete` (call ids, a line each) and `ID.lineage.jsonl` (ledger rows).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from tokencustody.chains.chains import count_not_finite, shape_of
from tokencustody.chains.reading import FrozenRollout, making_sense
from tokencustody.chains.reasons import LeftOut, Why
from tokencustody.chains.staged import staged_left_out
from tokencustody.codec.proven import ProvenCall
from tokencustody.export.calls import sorted_json, strict_json
from tokencustody.export.folder import ExportFolder
from tokencustody.export.report import Exported
from tokencustody.txn.ledger_rows import manifest_of, record_of

# As long as a file name may be, and the longest ending.
_LONGEST_ROLLOUT_ID = 255 - len(".tokens.state.json")

# A ledger row in the file, and the column that it comes from where the two have other names.
_LINEAGE_FIELDS = {
    name: name
    for name in (
        "admitted_at",
        "chain_hash",
        "cum_len",
        "delta_len",
        "extras_digest",
        "mode",
        "model_call_id",
        "output_fingerprint",
        "parent_call_id",
        "prev_len",
        "response_id",
        "staging_key",
        "weight_version",
    )
} | {
    "context_digest": "continuation_context_digest",
    "context_len": "continuation_context_len",
    "fingerprint": "continuation_fingerprint",
    "staging_digest": "digest",
}

# The prompt ids that a call holds itself, and those that it sampled, as a list in JSON has them between its brackets.
_Texts = tuple[bytes, bytes]


class GymPart:
    """The files of some rollouts in the making; each is written at once."""

    def __init__(self, folder: ExportFolder) -> None:
        self.rows = 0
        self.size = 0
        self._folder = folder

    def add(self, rollout: FrozenRollout) -> tuple[Exported | None, list[LeftOut]]:
        """Add a rollout, or nothing of it; return what the files now hold of it, and what they do not.

        Of a staged call they hold its row of the ledger, without a token.
        """
        key = rollout.key
        if not rollout.calls and not rollout.ledger and not rollout.ledger_failures:
            return None, [LeftOut.of(key, Why.NO_CALLS)]
        problem = _name_problem(rollout)
        lines: dict[str, bytes] = {}
        prompts = generated = 0
        texts: dict[str, _Texts] = {}
        for call_id, call in rollout.entries.items():
            fields = dict(call.record)
            is_strict, _ = strict_json(fields)
            if not is_strict or count_not_finite(call.log_probs):
                problem = problem or (call_id, "a NaN, an infinity or an integer beyond 64 bits")
                break
            above = [] if call.record.prompt_is_delta else list(rollout.above(call))
            lines[call_id] = _line(fields, call, above, texts)
            prompts += len(call.prompt) + sum(len(each.prompt) + len(each.generation) for each in above)
            generated += len(call.generation)
        if problem is not None:
            return None, [LeftOut.of(key, Why.GYM_CANNOT_CARRY, *problem)]
        with making_sense(key):
            # Gym reads no line of which this is an error.
            manifest_of(key.rollout_id, list(rollout.ledger.values()), rollout.ledger_failures)
            ledger = [_lineage_line(row) for row in rollout.ledger.values()]
            left_out = staged_left_out(rollout, Why.ONLY_STAGED)
            left_out += [LeftOut.of(key, row.reason, row.model_call_id) for row in rollout.lost]
            shape = shape_of(rollout, lines, left_out)
        self._write(rollout, lines, ledger)
        self.rows += len(lines)
        exported = Exported.of(
            rollout,
            shape,
            calls=len(lines),
            rows=len(lines),
            tokens=prompts + generated,
            trained_tokens=generated,
        )
        return exported, left_out

    def finish(self) -> None:
        """Nothing: each file was closed when it was written."""

    def abandon(self) -> None:
        """Nothing: each file was closed when it was written."""

    def _write(self, rollout: FrozenRollout, lines: dict[str, bytes], ledger: list[dict[str, Any]]) -> None:
        records = b"".join(line + b"\n" for line in lines.values())
        stem = rollout.key.rollout_id
        failures = [
            {"failure_reason": row.reason, "model_call_id": row.model_call_id}
            for row in rollout.ledger_failures
        ]
        state = {
            "entry_digests": {call: hashlib.sha256(line).hexdigest() for call, line in lines.items()},
            "frozen": True,
            "incomplete": rollout.incomplete,
            "indexed_size": len(records),
            "retired": False,
            "snapshot_id": rollout.snapshot_id,
            "version": rollout.version,
        }
        self._file(f"{stem}.tokens.jsonl", records, rows=len(lines))
        if rollout.intents:
            self._file(f"{stem}.tokens.intents", _one_a_line(rollout.intents))
        if rollout.failed:
            self._file(f"{stem}.tokens.incomplete", _one_a_line(rollout.failed))
        if ledger or failures:
            self._file(
                f"{stem}.lineage.jsonl", b"".join(sorted_json(row) + b"\n" for row in [*ledger, *failures])
            )
        # Last, so that it is renamed last.
        self._file(f"{stem}.tokens.state.json", sorted_json(state) + b"\n")

    def _file(self, name: str, data: bytes, *, rows: int = 0) -> None:
        with self._folder.writing(name, rows=rows) as stream:
            stream.write(data)
        self.size += len(data)


def _line(
    fields: dict[str, Any], call: ProvenCall, above: Sequence[ProvenCall], texts: dict[str, _Texts]
) -> bytes:
    """Return a record in JSON, its keys sorted; `texts` has the ids of each call as text, which is made once."""
    columns = [_texts(call, texts)[0]]
    for each in above:
        columns += reversed(_texts(each, texts))
    return sorted_json(
        fields
        | {
            "prompt_token_ids": _list(reversed(columns)),
            "generation_token_ids": _list(texts[call.record.model_call_id][1:]),
            "generation_log_probs": call.log_probs.tolist(),
        }
    )


def _texts(call: ProvenCall, known: dict[str, _Texts]) -> _Texts:
    name = call.record.model_call_id
    if name not in known:
        prompt, generation = (orjson.dumps(ids.tolist())[1:-1] for ids in (call.prompt, call.generation))
        known[name] = prompt, generation
    return known[name]


def _list(columns: Iterable[bytes]) -> orjson.Fragment:
    return orjson.Fragment(b"[%b]" % b",".join(filter(None, columns)))


def _name_problem(rollout: FrozenRollout) -> tuple[str, str] | None:
    if len(rollout.key.rollout_id) > _LONGEST_ROLLOUT_ID:
        return "", f"file names for a rollout id of more than {_LONGEST_ROLLOUT_ID} characters"
    for call in (*rollout.intents, *rollout.failed):
        # As Gym reads its lines, which are bytes to it.
        line = call.encode()
        if line != line.strip() or len(line.splitlines()) > 1:
            return call, "a call id that ends in white space, or has a line break in it, in a file of lines"
    return None


def _one_a_line(calls: Any) -> bytes:
    return "".join(f"{call}\n" for call in calls).encode()


def _lineage_line(row: Any) -> dict[str, Any]:
    line = {name: getattr(row, column) for name, column in _LINEAGE_FIELDS.items()}
    # What the record claimed; `fingerprint` is what the store derived.
    record = record_of(row)
    line |= {name: record[name] for name in ("continuation_fingerprint", "fingerprint_version")}
    line["cumulative_hash"] = line["digest"] = row.cumulative_hash or None
    line["staging_chain"] = json.loads(row.staging_chain)
    if row.capture_key is not None:
        line["capture_key"] = row.capture_key
    return line
