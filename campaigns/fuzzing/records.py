"""Values that are no records: refused by name, or packed so that they come back as they were."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from pydantic import BaseModel

from campaigns.fuzzing import corpus
from campaigns.fuzzing.cases import OF_VALUES, Case, Target, Violation, attempt, end_of
from campaigns.fuzzing.values import hostile, messages
from tokencustody.codec.attachments import pack_attachments
from tokencustody.codec.calls import differing_fields, pack_entry, unpack_entry, validated
from tokencustody.codec.staged import pack_call, unpack_call, unpack_extras, validated_call
from tokencustody.errors import InvalidRecordError, LineageError
from tokencustody.fingerprint import assistant_fingerprint, canonicalize_tool_arguments, conversation_digest
from tokencustody.lineage import RolloutLineage, stamp_continuation
from tokencustody.records import (
    TokenEntry,
    compute_digest,
    extract_token_fields,
    response_to_output_items,
    stamp_lineage,
    strip_token_fields,
)
from tokencustody.staging import digest, rebuild, records, routes, terminal

_MODELS: tuple[type[BaseModel], ...] = (
    records.GenerationCutContinuation,
    records.CaptureAdmission,
    records.StagedCallRecord,
    records.StagedCallSnapshot,
    records.StageResult,
    records.CommitCoords,
    records.CallRecord,
    records.CaptureLedgerCommit,
    records.ManifestFailure,
    records.RolloutManifest,
    records.RolloutReceipt,
    records.RolloutRemoval,
)
_UNKNOWN_FIELDS = (
    "note",
    "cls",
    "self",
    "model_config",
    "model_fields_set",
    "__class__",
    "__dict__",
    "run",
    "",
)


@contextmanager
def _entries(seed: str) -> Iterator[Case]:
    """Complete records: what is accepted comes back from its payload; what is not is a ValueError."""
    made = corpus.calls(random.Random(seed), "fuzz", 6)

    def case(rng: random.Random) -> str:
        fields = rng.choice(made).entry.model_dump()
        entry = damaged_entry(rng, fields)
        if entry is None:
            return "ValidationError"
        packed, exc = attempt(lambda: pack_entry(validated(entry)), (InvalidRecordError,))
        if packed is None:
            return end_of(exc, "")
        # Ids are the store's to check; those of the payload are what was given.
        back = unpack_entry(
            packed.payload,
            packed.sha256,
            rollout_id=entry.rollout_id,
            model_call_id=entry.model_call_id,
        )
        given = validated(entry)
        # An id True, which an assignment brings in, is stored as the 1 that it equals.
        for name in ("prompt_token_ids", "generation_token_ids"):
            setattr(given, name, list(map(int, getattr(given, name))))
        if corpus.in_bits(back) != corpus.in_bits(given):
            raise Violation("what was read is not what was written")
        if differing := differing_fields(back, given):
            raise Violation(f"what was read is taken for a conflict with what was written: {differing}")
        return "same value"

    yield case


def damaged_entry(rng: random.Random, fields: dict[str, Any]) -> TokenEntry | None:
    """Return an entry in which one to three fields have other values, or None when it cannot be made."""
    changed = {rng.choice([*fields, *_UNKNOWN_FIELDS]): hostile(rng) for _ in range(rng.randint(1, 3))}
    if rng.random() < 0.4:
        column = rng.choice(("prompt_token_ids", "generation_token_ids", "generation_log_probs"))
        changed[column] = [hostile(rng, depth=1), *fields[column][1:]]
    if rng.random() < 0.5:
        entry, _ = attempt(lambda: TokenEntry.model_validate({**fields, **changed}), (ValueError,))
        return entry
    # Assigned after it was made, which nothing checks until it is put.
    entry = TokenEntry.model_validate(fields)
    for name, value in changed.items():
        if name in TokenEntry.model_fields:
            setattr(entry, name, value)
        elif entry.model_extra is not None:
            entry.model_extra[name] = value
    return entry


@contextmanager
def _wire_models(seed: str) -> Iterator[Case]:
    """Wire models of staging: made, or a ValueError; what was made can be printed and read again."""
    rng = random.Random(seed)
    staged = corpus.staged(rng, "fuzz", 4)
    commits = corpus.commits(staged)
    rows = [commit.record for commit in commits]
    right: dict[type[BaseModel], dict[str, Any]] = {
        records.StagedCallRecord: staged[-1].model_dump(),
        records.StagedCallSnapshot: staged[0].model_dump(),
        records.CallRecord: rows[-1].model_dump(),
        records.CaptureLedgerCommit: commits[-1].model_dump(),
        records.RolloutManifest: {"rollout_id": "fuzz", "records": [row.model_dump() for row in rows]},
        records.CaptureAdmission: {"rollout_id": "r", "model_call_id": "c", "mode": "text"},
        records.StageResult: {"ok": True, "staging_key": "r/c"},
        records.RolloutReceipt: {
            "rollout_id": "fuzz",
            "manifest": [row.model_dump() for row in rows],
            "terminal_model_call_id": rows[-1].model_call_id,
            "terminal_selection": "heuristic",
        },
    }

    def case(rng: random.Random) -> str:
        model = rng.choice(_MODELS)
        fields = dict(right.get(model, {}))
        for _ in range(rng.randint(1, 3)):
            fields[rng.choice([*model.model_fields, "unknown"])] = hostile(rng)
        made, exc = attempt(lambda: model.model_validate(fields), (ValueError,))
        if made is not None and isinstance(made, records.StagedCallRecord):
            return _packs_exactly(made)
        return end_of(exc, "made")

    yield case


def _packs_exactly(record: records.StagedCallRecord) -> str:
    packed, exc = attempt(lambda: pack_call(validated_call(record)), (InvalidRecordError,))
    if packed is not None:
        row = corpus.staged_row(record)
        back = unpack_call(row).model_dump(exclude={"extras"}) | {"extras": unpack_extras(row)}
        if repr(sorted(back.items())) != repr(sorted(record.model_dump().items())):
            raise Violation("a staged call came back with other content")
    return end_of(exc, "same value")


@contextmanager
def _conversations(seed: str) -> Iterator[Case]:
    """Fingerprints, shapes of responses, and the matcher: a hash, or a ValueError."""
    entry = corpus.calls(random.Random(seed), "fuzz", 1)[0].entry

    def case(rng: random.Random) -> str:
        items: Any = messages(rng)
        response = {
            rng.choice(("output", "choices", "content", "type", "role", "id")): hostile(rng) for _ in range(3)
        }
        response |= rng.choice(
            (
                {},
                {"output": items},
                {"choices": [{"message": each} for each in items]},
                {"type": "message", "role": "assistant", "content": items},
            )
        )
        of_items: tuple[Callable[[], Any], ...] = (
            lambda: assistant_fingerprint(items),
            lambda: conversation_digest(items),
            lambda: stamp_continuation(entry.model_copy(), items),
            lambda: RolloutLineage().resolve(items),
            lambda: canonicalize_tool_arguments(hostile(rng)),
            lambda: response_to_output_items(response),
            lambda: extract_token_fields(response),
            lambda: strip_token_fields([each for each in items if isinstance(each, dict)]),
        )
        found, exc = attempt(rng.choice(of_items), (ValueError,))
        return end_of(exc, "hashed" if isinstance(found, str) else "read")

    yield case


@contextmanager
def _matching(seed: str) -> Iterator[Case]:
    """The matcher over calls whose fields are not those of their tokens: never another call's prefix."""
    made = corpus.calls(random.Random(seed), "fuzz", 6)
    tokens = {tuple(call.tokens) for call in made}

    def case(rng: random.Random) -> str:
        lineage = RolloutLineage()
        for call in rng.sample(made, rng.randint(1, len(made))):
            entry = call.entry.model_copy()
            if rng.random() < 0.4:
                name = rng.choice(("parent_call_id", "digest", "cum_len", "continuation_context_len"))
                others: tuple[Any, ...] = (
                    (0, 7) if name.endswith("len") else ("call-1", entry.model_call_id, "0" * 64)
                )
                setattr(entry, name, rng.choice(others))
            attempt(partial(lineage.add_entry, entry), (ValueError,))
        request = rng.choice(made).next_request()
        found, exc = attempt(lambda: lineage.resolve(request), (ValueError, LineageError))
        if found is not None and found.match is not None:
            if tuple(found.match.cumulative_token_ids) not in tokens:
                raise Violation(f"a prefix that no call has, of {found.match.prev_len} tokens")
            return "resolved"
        return end_of(exc, "no match")

    yield case


@contextmanager
def _receipts(seed: str) -> Iterator[Case]:
    """Receipts and staged calls that do not fit: a code, never another row than the right one."""
    rng = random.Random(seed)
    staged = [records.StagedCallSnapshot(**each.model_dump()) for each in corpus.staged(rng, "fuzz", 5)]
    rows = [commit.record for commit in corpus.commits(corpus.staged(random.Random(seed), "fuzz", 5))]
    token_ids = [token for each in staged for token in each.token_ids_delta]

    def case(rng: random.Random) -> str:
        manifest, snapshots = list(rows), list(staged)
        for _ in range(rng.randint(1, 2)):
            listed: list[Any] = rng.choice((manifest, snapshots))
            index = rng.randrange(len(listed))
            if rng.random() < 0.2:
                del listed[index]
                break
            name = rng.choice(list(type(listed[index]).model_fields))
            value = rng.choice((hostile(rng), None, "call-0", 1, "0" * 64, getattr(rng.choice(listed), name)))
            changed = {**dict(listed[index]), name: value}
            if listed is manifest:
                made, _ = attempt(partial(records.CallRecord.model_validate, changed), (ValueError,))
                listed[index] = made or listed[index]
            else:
                # Not validated, as when another implementation made it.
                listed[index] = listed[index].model_copy(update={name: value})
        hint = rng.choice((rows[-1].model_call_id, rows[0].model_call_id, "no call", None))
        row, exc = attempt(
            lambda: rebuild.linearize("fuzz", snapshots, manifest, terminal_hint=hint), OF_VALUES
        )
        if row is not None and row.token_ids != token_ids[: len(row.token_ids)]:
            raise Violation("a row of other tokens")
        response = rng.choice((None, {"id": hostile(rng), "output": messages(rng)}))
        attempt(
            lambda: terminal.assemble_receipt(
                {"rollout_id": "fuzz", "records": [each.model_dump() for each in manifest], "failures": []},
                scored_response=response,
                reward=rng.choice((None, 0.5, hostile(rng))),
            ),
            OF_VALUES,
        )
        attempt(lambda: terminal.select_terminal_call(manifest), OF_VALUES)
        return getattr(exc, "code", end_of(exc, "right row"))

    yield case


@contextmanager
def _functions(seed: str) -> Iterator[Case]:
    """The pure functions of the wire contract with values of any type."""
    record = corpus.staged(random.Random(seed), "fuzz", 2)[1]
    call = {
        name: getattr(record, name) for name in type(record).model_fields if name not in ("digest", "extras")
    }

    def case(rng: random.Random) -> str:
        ids = [hostile(rng, depth=1) for _ in range(rng.randint(0, 3))]
        envelope = ":".join(
            (
                rng.choice(("nrlre1", "nrlre2")),
                rng.choice(("int8", "int16", "int64", "")),
                rng.choice(
                    (
                        "1x1x1",
                        "9999999999999999999x9999999999999999999x9999999999999999999",
                        "2x1x1",
                        "0x1x1",
                        "1x1",
                    )
                ),
                rng.choice(("AA==", "AA", "AB==", "é===", "", "AAAA")),
            )
        )
        changed = dict(call) | {rng.choice(list(call)): hostile(rng)}
        entry = TokenEntry(
            rollout_id="r",
            model_call_id="c",
            prompt_token_ids=[1],
            generation_token_ids=[],
            generation_log_probs=[],
        )
        calls: tuple[Callable[[], Any], ...] = (
            lambda: compute_digest(ids),
            lambda: digest.hash_token_ids(ids),
            lambda: digest.compute_chain_hash(hostile(rng), ids),
            lambda: digest.compute_extras_digest(hostile(rng)),
            lambda: digest.compute_staging_digest(**changed),
            lambda: digest.build_staging_delta(
                prompt_token_ids=ids,
                generated_token_ids=ids,
                generated_log_probs=ids,
                prev_len=rng.randint(-1, 4),
            ),
            lambda: routes.decode_routed_experts(rng.choice((envelope, hostile(rng)))),
            lambda: routes.routed_experts_token_count(rng.choice((envelope, hostile(rng)))),
            lambda: routes.encode_routed_experts(hostile(rng), dtype=rng.choice(("int8", "x"))),
            lambda: stamp_lineage(entry, hostile(rng), cumulative=rng.choice((None, [1], [2]))),
            lambda: pack_attachments(
                {hostile(rng): hostile(rng)} if rng.random() < 0.5 else {"a": hostile(rng)}
            ),
        )
        _, exc = attempt(rng.choice(calls), OF_VALUES)
        return end_of(exc, "taken")

    yield case


TARGETS = (
    Target("entries", _entries),
    Target("wire-models", _wire_models),
    Target("conversations", _conversations),
    Target("matching", _matching),
    Target("receipts", _receipts),
    Target("functions", _functions),
)
