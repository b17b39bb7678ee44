"""Every method that writes, each on a rollout of its own, and what must be true once it has happened exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

from campaigns.relay import Request
from tests.support.entries import make_entry
from tests.support.ledger import make_commit
from tests.support.staged import stage
from tokencustody import CaptureStore
from tokencustody.errors import PayloadConflictError, TokenCaptureFrozenError

Step = Callable[[CaptureStore, str], Awaitable[Any]]


@dataclass(frozen=True)
class Method:
    """A call on a rollout.

    `prepare` is done before, and has opened the fence. `request` is what makes the call durable; `versions` how many
    the call adds, None where none stays; `answer` what it returns, or the class of the error that it raises; `after`
    what a second look finds. One that is `soft` answers False, instead of raising, when the database is out of reach.
    """

    prepare: Step
    call: Step
    request: Request = Request.COMMIT
    versions: int | None = 0
    answer: Any = None
    after: Callable[[CaptureStore, str], Awaitable[bool]] | None = None
    soft: bool = False

    async def run(self, store: CaptureStore, rollout: str) -> Any:
        """Return the answer, or the class of the error where that is the answer."""
        try:
            return await self.call(store, rollout)
        except (PayloadConflictError, TokenCaptureFrozenError) as exc:
            if type(exc) is not self.answer:
                raise
            return type(exc)


def _put(call: str = "call-1", **fields: Any) -> Step:
    return lambda store, rollout: store.sink.put(make_entry(rollout, call, **fields))


def _continue(parent: str, call: str) -> Step:
    def run(store: CaptureStore, rollout: str) -> Awaitable[None]:
        entry = make_entry(rollout, call, prompt=[], parent=parent)
        return store.sink.put_continuation(
            entry.model_copy(update={"digest": None, "cum_len": None}), prompt_suffix=[7, 8]
        )

    return run


def _record(call: str = "call-1", **fields: Any) -> Step:
    return lambda store, rollout: store.lineage.record(make_commit(rollout, call, **fields))


def _stage(call: str = "call-1", attachments: dict[str, Any] | None = None, **fields: Any) -> Step:
    async def run(store: CaptureStore, rollout: str) -> bool:
        record = stage(call, rollout=rollout, **fields).snapshot
        # In a thread, for it is synchronous.
        result = await asyncio.to_thread(store.staging.stage, record, attachments=attachments)
        return bool(result.ok)

    return run


def _unstage(store: CaptureStore, rollout: str) -> Awaitable[list[str]]:
    return asyncio.to_thread(store.staging.delete, [f"{rollout}/call-1"])


def _both(*steps: Step) -> Step:
    async def run(store: CaptureStore, rollout: str) -> Any:
        return [await step(store, rollout) for step in steps][-1]

    return run


async def _freeze(store: CaptureStore, rollout: str) -> Any:
    return await store.source.freeze(rollout)


# What `prepare` found out for `call`, by rollout.
_known: dict[str, Any] = {}


async def _freeze_to_drop(store: CaptureStore, rollout: str) -> None:
    _known[rollout] = await store.source.freeze(rollout)


async def _drop(store: CaptureStore, rollout: str) -> bool:
    return await store.source.drop(rollout, _known[rollout].snapshot_id, _known[rollout].version)


async def _export(store: CaptureStore, rollout: str) -> None:
    await store.lineage.record(make_commit(f"{rollout}-exported"))
    _known[rollout] = await store.lineage.export_rows(f"{rollout}-exported")


async def _import(store: CaptureStore, rollout: str) -> None:
    await store.lineage.import_rows(rollout, _known[rollout])


def _holds(*calls: str, incomplete: bool) -> Callable[[CaptureStore, str], Awaitable[bool]]:
    async def look(store: CaptureStore, rollout: str) -> bool:
        snapshot = await store.source.freeze(rollout)
        return (sorted(entry.model_call_id for entry in snapshot.entries), snapshot.incomplete) == (
            sorted(calls),
            incomplete,
        )

    return look


def _ledger(records: list[str], failures: list[str]) -> Callable[[CaptureStore, str], Awaitable[bool]]:
    async def look(store: CaptureStore, rollout: str) -> bool:
        manifest = await store.lineage.manifest(rollout)
        found = [[row["model_call_id"] for row in manifest[kind]] for kind in ("records", "failures")]
        return found == [records, failures]

    return look


async def _is_staged(store: CaptureStore, rollout: str) -> bool:
    (snapshot,) = await asyncio.to_thread(store.staging.fetch, [f"{rollout}/call-1"])
    return snapshot.token_ids_delta == [1, 2, 3]


_OPEN = _put("call-0")

METHODS: dict[str, Method] = {
    "put": Method(_OPEN, _put(), Request.STATEMENT, after=_holds("call-0", "call-1", incomplete=False)),
    "put_continuation": Method(
        _OPEN,
        _continue("call-0", "call-1"),
        Request.STATEMENT,
        after=_holds("call-0", "call-1", incomplete=False),
    ),
    "put again": Method(
        _both(_OPEN, _put()), _put(), Request.STATEMENT, after=_holds("call-0", "call-1", incomplete=False)
    ),
    "conflicting put, statement": Method(
        _put(),
        _put(model="other"),
        Request.STATEMENT,
        versions=1,
        answer=PayloadConflictError,
        after=_holds("call-1", incomplete=True),
    ),
    "conflicting put": Method(
        _put(),
        _put(model="other"),
        versions=1,
        answer=PayloadConflictError,
        after=_holds("call-1", incomplete=True),
    ),
    "late put": Method(
        _both(_OPEN, _freeze),
        _put(),
        Request.STATEMENT,
        answer=TokenCaptureFrozenError,
        after=_holds("call-0", incomplete=False),
    ),
    "begin_call": Method(
        _OPEN,
        lambda store, rollout: store.sink.begin_call(rollout, "call-1"),
        Request.STATEMENT,
        after=_holds("call-0", incomplete=True),
    ),
    "refuse_call": Method(
        _OPEN,
        lambda store, rollout: store.sink.refuse_call(rollout, model_call_id="call-1", code="busy"),
        versions=1,
        after=_holds("call-0", incomplete=False),
    ),
    "mark_incomplete": Method(
        _OPEN,
        lambda store, rollout: store.sink.mark_incomplete(rollout, "call-1"),
        versions=1,
        after=_holds("call-0", incomplete=True),
    ),
    "freeze": Method(_OPEN, _freeze, versions=1, answer=..., after=_holds("call-0", incomplete=False)),
    "drop": Method(_both(_OPEN, _freeze_to_drop), _drop, versions=1, answer=True),
    "retire": Method(
        _OPEN, lambda store, rollout: store.source.retire([rollout]), versions=1, answer="removed"
    ),
    "delete": Method(
        _OPEN,
        lambda store, rollout: store.source.delete([rollout]),
        versions=None,
        answer="removed",
    ),
    "record": Method(_OPEN, _record(), after=_ledger(["call-1"], [])),
    "record_failure": Method(
        _OPEN,
        lambda store, rollout: store.lineage.record_failure(rollout, "call-1", "lost"),
        after=_ledger([], ["call-1"]),
    ),
    "import_rows": Method(_both(_OPEN, _export), _import, after=_ledger(["call-1"], [])),
    "late record": Method(_both(_OPEN, _freeze), _record(), versions=1, after=_ledger(["call-1"], [])),
    "late record_failure": Method(
        _both(_OPEN, _freeze),
        lambda store, rollout: store.lineage.record_failure(rollout, "call-1", "lost"),
        versions=1,
        after=_ledger([], ["call-1"]),
    ),
    "late import_rows": Method(
        _both(_both(_OPEN, _freeze), _export), _import, versions=1, after=_ledger(["call-1"], [])
    ),
    "stage": Method(
        _stage("call-0"), _stage(), Request.STATEMENT, versions=None, answer=True, after=_is_staged, soft=True
    ),
    "stage with attachments": Method(
        _stage("call-0"),
        _stage(attachments={"a": b"1"}),
        versions=None,
        answer=True,
        after=_is_staged,
        soft=True,
    ),
    "late stage": Method(
        # Once the staging store has a connection of its own.
        _both(_stage("call-0"), _both(_OPEN, _freeze)),
        _stage(),
        versions=1,
        answer=True,
        after=_is_staged,
        soft=True,
    ),
    "conflicting stage": Method(
        _stage(), _stage(added=[9]), versions=None, answer=False, after=_is_staged, soft=True
    ),
    "unstage": Method(_stage(), _unstage, versions=None, answer="the key"),
}


def right_answer(method: Method, rollout: str, answer: Any) -> bool:
    """Return whether a call that happened exactly once answered so."""
    match method.answer:
        case "removed":
            return bool(answer == {"removed": [rollout], "absent": []})
        case "the key":
            return bool(answer == [f"{rollout}/call-1"])
        case EllipsisType():
            return answer is not None
    return bool(answer == method.answer)
