"""Rows that somebody edited with SQL: named errors, and of what is read as valid every bit as it was written."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from sqlalchemy import BigInteger, Boolean, Connection, Double, LargeBinary, SmallInteger, text
from sqlalchemy.exc import DBAPIError

from campaigns.fuzzing import corpus
from campaigns.fuzzing.cases import NAMED, Case, Violation, check_message
from campaigns.fuzzing.mutations import mutated
from campaigns.fuzzing.records import damaged_entry
from campaigns.fuzzing.values import hostile, messages
from tokencustody.database.utc_time import UtcTime
from tokencustody.overview.reading import RolloutReader
from tokencustody.schema import tables
from tokencustody.store import CaptureStore, open_store

ROLLOUT = "fuzz"
_TURNS = 4
_TABLES = (
    tables.fences,
    tables.entries,
    tables.intents,
    tables.failures,
    tables.snapshot_versions,
    tables.ledger_calls,
    tables.ledger_failures,
    tables.staged_calls,
    tables.staged_attachments,
)
NAMED_OR_TYPE: tuple[type[Exception], ...] = (*NAMED, TypeError)
Operation = Callable[[], Awaitable[str]]


class Written:
    """One rollout with something in every table, and what reading it must give."""

    def __init__(self, rng: random.Random, rollout: str = ROLLOUT) -> None:
        self.rollout = rollout
        self.calls = corpus.calls(rng, rollout, _TURNS)
        self.staged = corpus.staged(rng, rollout, _TURNS)
        self.commits = corpus.commits(self.staged)
        self.in_bits = {call.entry.model_call_id: corpus.in_bits(call.entry) for call in self.calls}
        self.sequences = {tuple(call.tokens) for call in self.calls}
        self.secrets = corpus.secrets_of(self.calls)
        self.keys = [record.staging_key for record in self.staged]
        self.attachment = rng.randbytes(9000)
        # Those of other calls that may be read in place of it: no digest binds an attachment to its call.
        self.mistakable: tuple[bytes, ...] = ()

    async def write(self, store: CaptureStore) -> None:
        """Put everything into a store."""
        for call in self.calls:
            await store.sink.begin_call(self.rollout, call.entry.model_call_id)
            await store.sink.put(call.entry)
        await store.sink.refuse_call(self.rollout, model_call_id="refused", code="too_long")
        await store.sink.mark_incomplete(self.rollout, "lost")
        for record, commit in zip(self.staged, self.commits, strict=True):
            store.staging.stage(record, attachments={"a": self.attachment, "j": {"x": [1, None]}})
            await store.lineage.record(commit)
        await store.lineage.record_failure(self.rollout, "failed", "worker_capture_failed")

    def reads(self, store: CaptureStore, url: str) -> dict[str, Operation]:
        """Return what reads the rollout; each says what it found, or raises Violation for a wrong answer."""

        async def freeze() -> str:
            snapshot = await store.source.freeze(self.rollout)
            for entry in snapshot.entries:
                if corpus.in_bits(entry) != self.in_bits.get(entry.model_call_id):
                    raise Violation(f"call {entry.model_call_id} was read with other content")
            return "same values" if len(snapshot.entries) == len(self.calls) else "calls missing"

        async def resolve() -> str:
            for call in self.calls:
                match = (await store.lineage.resolve(self.rollout, call.next_request())).match
                if match is not None and tuple(match.cumulative_token_ids or ()) not in self.sequences | {()}:
                    raise Violation(f"a prefix that no call has, of {match.prev_len} tokens")
            return "resolved"

        async def resolve_ledger() -> str:
            request = [*self.commits[-1].request_items, *self.commits[-1].response_items]
            await store.lineage.resolve(self.rollout, request)
            return "resolved"

        async def manifest() -> str:
            await store.lineage.manifest(self.rollout)
            await store.lineage.export_rows(self.rollout)
            return "read"

        async def fetch() -> str:
            found = await asyncio.to_thread(store.staging.fetch, self.keys)
            for snapshot, record in zip(found, self.staged, strict=True):
                if repr(snapshot.model_dump()) != repr(record.model_dump(exclude={"extras"})):
                    raise Violation(f"staged call {record.model_call_id} was read with other content")
            return "same values"

        async def extras() -> str:
            found = await asyncio.to_thread(store.staging.fetch_extras, self.keys)
            if repr(found) != repr([record.extras for record in self.staged]):
                raise Violation("extras were read with other content")
            return "same values"

        async def attachments() -> str:
            found = await asyncio.to_thread(store.staging.fetch_attachments, self.keys[0])
            if (
                "a" in found
                and found["a"] not in (self.attachment, *self.mistakable)
                and isinstance(found["a"], bytes)
            ):
                raise Violation("an attachment was read with other content")
            return "same values"

        async def prefix() -> str:
            found = await asyncio.to_thread(store.staging.fetch_prefix_token_ids, self.keys)
            if found != [token for record in self.staged for token in record.token_ids_delta]:
                raise Violation("a prefix was read with other content")
            return "same values"

        async def audit() -> str:
            async with RolloutReader(url, deadline=5) as reader:
                await reader.rollouts()
                await reader.rollout(self.rollout, store.run)
            return "read"

        reading: tuple[Operation, ...] = (
            resolve,
            resolve_ledger,
            manifest,
            fetch,
            extras,
            attachments,
            prefix,
            audit,
            freeze,
        )
        return {operation.__name__: operation for operation in reading}

    def writes(self, store: CaptureStore) -> dict[str, Operation]:
        """Return what changes the rollout."""
        sink, source = store.sink, store.source
        again = self.calls[-1].entry

        async def put() -> str:
            await sink.put(again)
            return "done"

        async def begin() -> str:
            await sink.begin_call(self.rollout, "another")
            return "done"

        async def mark() -> str:
            await sink.mark_incomplete(self.rollout, "another")
            return "done"

        async def record() -> str:
            await store.lineage.record(self.commits[0])
            await store.lineage.record_failure(self.rollout, "another", "worker_capture_failed")
            return "done"

        async def stage() -> str:
            answer = await asyncio.to_thread(store.staging.stage, self.staged[0])
            return "done" if answer.ok else "StageResult(ok=False)"

        async def retire() -> str:
            await source.retire([self.rollout])
            return "done"

        async def delete() -> str:
            await source.delete([self.rollout])
            await asyncio.to_thread(store.staging.delete, self.keys)
            return "done"

        changing: tuple[Operation, ...] = (put, begin, mark, record, stage, retire, delete)
        return {operation.__name__: operation for operation in changing}

    async def attempt_all(self, operations: dict[str, Operation]) -> list[str]:
        """Return what became of each operation. Raises Violation for a wrong answer or an error without a name."""
        ends = []
        for name, operation in operations.items():
            try:
                ends.append(await operation())
            except NAMED as exc:
                check_message(exc, self.secrets)
                ends.append(type(exc).__name__)
            except Violation as exc:
                raise Violation(f"{name}: {exc}") from exc
            except Exception as exc:
                raise Violation(
                    f"{name}: an error without a name: {type(exc).__name__}: {str(exc)[:500]}"
                ) from exc
        return ends


def edited(url: str) -> Callable[[str], AbstractContextManager[Case]]:
    """Return what prepares the target of edited rows for a database on the newest revision."""
    return _in_each_case(url, _edited)


def putting(url: str) -> Callable[[str], AbstractContextManager[Case]]:
    """Return what prepares the target of malformed arguments: nothing of what is refused is stored."""
    return _in_each_case(url, _refused)


def _in_each_case(
    url: str, work: Callable[[CaptureStore, str, str, random.Random], Awaitable[str]]
) -> Callable[[str], AbstractContextManager[Case]]:
    async def in_store(seed: str, rng: random.Random) -> str:
        run = f"fuzz-{rng.getrandbits(64):x}"
        async with open_store(url, run=run, deadline=5, spill=None) as store:
            return await work(store, url, seed, rng)

    @contextmanager
    def prepared(seed: str) -> Iterator[Case]:
        yield lambda rng: asyncio.run(in_store(seed, rng))

    return prepared


async def _refused(store: CaptureStore, _url: str, seed: str, rng: random.Random) -> str:
    call = corpus.calls(random.Random(seed), ROLLOUT, 1)[0]
    entry = damaged_entry(rng, call.entry.model_dump())
    sink, source, lineage = store.sink, store.source, store.lineage
    in_thread: Any = store.staging
    ids = ("", "\ud800", "a\0", "x" * 600, "a/b", "é" * 513)
    value: Any = rng.choice((hostile(rng), rng.choice(ids)))
    items = messages(rng)
    calls: tuple[Callable[[], Awaitable[Any]], ...] = (
        lambda: sink.put(entry or value),
        lambda: sink.put(entry or value),
        lambda: sink.put(entry or value),
        lambda: sink.begin_call(value, "call"),
        lambda: sink.begin_call(ROLLOUT, value),
        lambda: sink.refuse_call(ROLLOUT, model_call_id="call", code=value),
        lambda: sink.mark_incomplete(ROLLOUT, value),
        lambda: source.drop(ROLLOUT, value, value),
        lambda: source.retire(value),
        lambda: source.delete([value]),
        lambda: lineage.resolve(ROLLOUT, items),
        lambda: lineage.resolve(ROLLOUT, value),
        lambda: lineage.record(value),
        lambda: lineage.record_failure(ROLLOUT, "call", value),
        lambda: lineage.import_rows(ROLLOUT, [value]),
        lambda: lineage.manifest(value),
        lambda: asyncio.to_thread(in_thread.stage, value),
        lambda: asyncio.to_thread(in_thread.fetch, value),
        lambda: asyncio.to_thread(in_thread.delete, value),
    )
    chosen = rng.choice(calls)
    try:
        await chosen()
    except NAMED_OR_TYPE as exc:
        check_message(exc, corpus.secrets_of([call]))
        if stored := await store.source._database.read(_count_rows(store.run)):
            raise Violation(f"{type(exc).__name__}, and yet stored: {stored}") from exc
        return type(exc).__name__
    except Exception as exc:
        raise Violation(f"an error without a name: {type(exc).__name__}: {str(exc)[:500]}") from exc
    return "taken"


def _count_rows(run: str) -> Callable[[Connection], dict[str, int]]:
    def count(connection: Connection) -> dict[str, int]:
        counts = {
            table.name: connection.scalar(
                text(f"SELECT count(*) FROM {table.name} WHERE run = :run"), {"run": run}
            )
            for table in _TABLES
        }
        return {name: rows for name, rows in counts.items() if rows}

    return count


async def _edited(store: CaptureStore, url: str, seed: str, rng: random.Random) -> str:
    written = Written(random.Random(seed))
    await written.write(store)
    edited = await _edit(store, rng)
    ends = await written.attempt_all(written.reads(store, url))
    ends += await written.attempt_all(written.writes(store))
    errors = {"CorruptEntryError", "LineageError", "calls missing"} & set(ends)
    return f"{edited}: {', '.join(sorted(errors)) or 'same values'}"


async def _edit(store: CaptureStore, rng: random.Random) -> str:
    """Change one column of one row, or of all rows, of this run; say what the database thought of it."""
    table = rng.choice(_TABLES)
    column = rng.choice(table.columns)

    def edit(connection: Connection) -> None:
        name = column.name
        rows = connection.execute(
            text(f"SELECT {name} FROM {table.name} WHERE run = :run"), {"run": store.run}
        ).scalars()
        old = rng.choice(sorted(rows.all(), key=repr))
        where = " AND model_call_id = 'call-1'" if "model_call_id" in table.c and rng.random() < 0.5 else ""
        statement = text(f"UPDATE {table.name} SET {name} = :value WHERE run = :run{where}")
        connection.execute(statement, {"run": store.run, "value": _other(rng, column, old)})

    try:
        await store.source._database.write(edit)
    except NAMED:
        return "unavailable"
    except (DBAPIError, OverflowError):
        return "refused by a constraint"
    return "edited"


def _other(rng: random.Random, column: Any, old: Any) -> Any:
    match column.type:
        case Boolean():
            return not old
        case BigInteger() | SmallInteger():
            return rng.choice((0, 1, 2, 3, (old or 0) + 1, 2**31, 2**62, -1, None))
        case Double():
            return rng.choice((0.0, 1e308, None))
        case LargeBinary():
            return rng.choice((None, b"", mutated(rng, bytes(old or b"null"))))
        case UtcTime():
            return rng.choice(("2026-11/30", "", "0001-01-01 00:00:00.000000", None))
    texts = (
        "",
        "0" * 64,
        "open",
        "frozen",
        "retired",
        "call-0",
        "call-3",
        "[",
        "[1]",
        '{"a":1}',
        "null",
        "[" * 2000,
        "x" * 300,
        str(old)[:-1],
        str(old).upper(),
        None,
    )
    return rng.choice(texts)
