"""The stores in NeMo Gym's own types and errors, to be named in its configuration:

    token_id_capture:
      enabled: true
      sink: tokencustody.integrations.nemo_gym:SqlTokenSink
      sink_kwargs: {url: "postgresql://trainer@db/captures", run: run-42}
      lineage_store: tokencustody.integrations.nemo_gym:SqlLineageStore
      lineage_store_kwargs: {url: "postgresql://trainer@db/captures", run: run-42}

A trainer reads with `SqlTokenSource` of the same `url` and `run`. Inference workers stage with `SqlStagingStore`, from
which a trainer fetches. What the stores promise, and their other options, are those of `tokencustody.store`; token
lists are handed over, not copied.
"""

# nemo-gym ships no type information.
# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from tokencustody import errors, records, store
from tokencustody import protocols as protocols_of_ours
from tokencustody.codec.calls import construct, first_problem
from tokencustody.database.portal import BackgroundLoop
from tokencustody.staging import records as staging_records
from tokencustody.txn.ledger_rows import flat

if TYPE_CHECKING:
    from typing_extensions import Buffer

try:
    from nemo_gym.token_id_capture import (
        CaptureLedgerCommit,
        LineageMatch,
        LineageResolution,
        ParentResolutionStatus,
        TokenCaptureSnapshot,
        TokenEntry,
        protocols,
    )
    from nemo_gym.token_id_capture.staging import StagedCallBaseSnapshot
except ModuleNotFoundError as exc:
    if exc.name is None or exc.name.partition(".")[0] != "nemo_gym":
        raise
    raise ImportError(
        "tokencustody.integrations.nemo_gym needs nemo-gym, with its package nemo_gym.token_id_capture: "
        "pip install nemo-gym (its Python is 3.12 or newer; on 3.11 its capture package works after "
        "pip install --no-deps --ignore-requires-python nemo-gym)",
        name=exc.name,
    ) from exc

__all__ = [
    "RolloutRetiredError",
    "SqlLineageStore",
    "SqlStagingStore",
    "SqlTokenSink",
    "SqlTokenSource",
    "TokenCaptureFrozenError",
    "TokenCaptureRetiredError",
]


Result = TypeVar("Result")

# A release that has a place for them in a snapshot, and perhaps a type.
_TAKES_REFUSALS = "refusals" in {field.name for field in fields(TokenCaptureSnapshot)}
_REFUSAL: Callable[..., Any] = getattr(protocols, "CallRefusal", protocols_of_ours.CallRefusal)


def _joined(
    own: type[Exception], peer: ModuleType, otherwise: type[Exception] | None = None
) -> type[Exception]:
    """Return a class that is both `own` and the peer's error of that name; where the peer has none, `otherwise`."""
    theirs = getattr(peer, own.__name__, otherwise)
    if theirs is None:
        return own
    return type(own.__name__, (own, theirs), {"__module__": __name__, "__doc__": own.__doc__})


# Module attributes under their own names, so that an instance can be pickled.
TokenCaptureFrozenError = _joined(errors.TokenCaptureFrozenError, protocols)
TokenCaptureRetiredError = _joined(errors.TokenCaptureRetiredError, protocols)
# The manifest route of a release without that error answers a ValueError with its words, and others by a 500.
RolloutRetiredError = _joined(errors.RolloutRetiredError, protocols, otherwise=ValueError)


@contextmanager
def _gym_errors() -> Iterator[None]:
    """Raise a late write's error as an instance of Gym's class too."""
    try:
        yield
    except errors.RolloutRetiredError as exc:
        if isinstance(exc, RolloutRetiredError):
            raise
        raise RolloutRetiredError(*exc.args) from exc
    except errors.TokenCaptureFrozenError as exc:
        retired = isinstance(exc, errors.TokenCaptureRetiredError)
        joined = TokenCaptureRetiredError if retired else TokenCaptureFrozenError
        if isinstance(exc, joined):
            raise
        raise joined(*exc.args) from exc


def _own_entry(entry: TokenEntry) -> records.TokenEntry:
    if not isinstance(entry, TokenEntry):
        raise errors.InvalidRecordError(f"entry must be nemo_gym's TokenEntry, not {type(entry).__name__}")
    # Nothing is checked here: the store validates what it is given.
    return construct(records.TokenEntry, dict(entry))


class SqlTokenSink(store.SqlTokenSink):
    """A Gym `TokenSink` with the optional `begin_call`, and with `refuse_call`."""

    async def put(self, entry: TokenEntry) -> None:
        """Store one call. Errors as for `tokencustody.store.SqlTokenSink.put`."""
        with _gym_errors():
            await super().put(_own_entry(entry))

    async def put_continuation(self, entry: TokenEntry, prompt_suffix: Sequence[int] | Buffer) -> None:
        """Store one call whose prompt follows its parent's sequence, as
        `tokencustody.store.SqlTokenSink.put_continuation` does.
        """
        with _gym_errors():
            await super().put_continuation(_own_entry(entry), prompt_suffix)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        with _gym_errors():
            await super().begin_call(rollout_id, model_call_id)

    async def refuse_call(self, rollout_id: str, *, model_call_id: str, code: str | None) -> None:
        with _gym_errors():
            await super().refuse_call(rollout_id, model_call_id=model_call_id, code=code)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        with _gym_errors():
            await super().mark_incomplete(rollout_id, model_call_id)


class SqlTokenSource(store.SqlTokenSource):
    """A Gym `TokenSource` with a strict fence, and with `retire` and `delete`."""

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Raise the fence and return Gym's snapshot, with the refusals where its class has a place for them.

        Errors as for `tokencustody.store.SqlTokenSource.freeze`.
        """
        with _gym_errors():
            snapshot = await super().freeze(rollout_id)
        refusals = tuple(_REFUSAL(*refusal) for refusal in snapshot.refusals)
        return TokenCaptureSnapshot(
            rollout_id=snapshot.rollout_id,
            entries=tuple(_gym_entry(entry) for entry in snapshot.entries),
            incomplete=snapshot.incomplete,
            snapshot_id=snapshot.snapshot_id,
            version=snapshot.version,
            **({"refusals": refusals} if _TAKES_REFUSALS else {}),
        )


class SqlLineageStore(store.SqlLineageStore):
    """A Gym `CaptureLedger` and `LineageResolver` over the calls that any process has committed.

    Options as for `tokencustody.store.SqlLineageStore`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # For callers in threads, which have no event loop.
        self._background = BackgroundLoop(f"the ledger on {self._database.url.display}", self._database.close)

    async def close(self) -> None:
        """Release resources, after the calls that run in other threads. Idempotent."""
        await asyncio.to_thread(self._background.close)
        await super().close()

    # Gym calls both in threads; where a loop runs, they are awaited like the rest.

    def export_rows(self, rollout_id: str) -> Any:
        """Return every row in commit order as plain data, the fields of its record beside the others.

        In a thread with a running event loop, return an awaitable for it. Errors as for
        `tokencustody.store.SqlLineageStore.export_rows`.
        """
        return self._now_or_awaited(partial(self._export_flat, rollout_id))

    def import_rows(self, rollout_id: str, rows: Sequence[Mapping[str, Any]]) -> Any:
        """Add exported rows, all or none. In a thread with a running event loop, return an awaitable for it.

        Errors as for `tokencustody.store.SqlLineageStore.import_rows`.
        """
        return self._now_or_awaited(partial(self._import_flat, rollout_id, rows))

    async def _export_flat(self, rollout_id: str) -> list[dict[str, Any]]:
        with _gym_errors():
            return [flat(row) for row in await super().export_rows(rollout_id)]

    async def _import_flat(self, rollout_id: str, rows: Sequence[Mapping[str, Any]]) -> None:
        with _gym_errors():
            await super().import_rows(rollout_id, rows)

    def _now_or_awaited(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._background.run(work)
        return work()

    async def record(self, commit: CaptureLedgerCommit) -> None:
        """Publish a staged call. Errors as for `tokencustody.store.SqlLineageStore.record`."""
        if not isinstance(commit, CaptureLedgerCommit):
            raise errors.InvalidRecordError(
                f"commit must be nemo_gym's CaptureLedgerCommit, not {type(commit).__name__}"
            )
        try:
            own = staging_records.CaptureLedgerCommit.model_validate(commit.model_dump())
        except ValidationError as exc:
            raise errors.InvalidRecordError(first_problem(exc)) from None
        await super().record(own)

    async def manifest(self, rollout_id: str) -> dict[str, Any]:
        with _gym_errors():
            return await super().manifest(rollout_id)

    async def has_rows(self, rollout_id: str) -> bool:
        with _gym_errors():
            return await super().has_rows(rollout_id)

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        """Return Gym's decision. Errors as for `tokencustody.store.SqlLineageStore.resolve`."""
        decision = await super().resolve(rollout_id, request_items)
        match = decision.match
        return LineageResolution(
            status=ParentResolutionStatus(decision.status),
            match=None if match is None else LineageMatch(**vars(match)),
            reason=decision.reason,
        )


class SqlStagingStore(store.SqlStagingStore):
    """A Gym `StagingSink` and `StagingSource`."""

    def fetch(self, staging_keys: Sequence[str]) -> list[StagedCallBaseSnapshot]:
        """Return Gym's snapshots, verified. Errors as for `tokencustody.store.SqlStagingStore.fetch`."""
        return [construct(StagedCallBaseSnapshot, dict(snapshot)) for snapshot in super().fetch(staging_keys)]


def _gym_entry(entry: records.TokenEntry) -> TokenEntry:
    resolution = entry.parent_resolution
    fields = {
        **dict(entry),
        "parent_resolution": None if resolution is None else ParentResolutionStatus(resolution),
    }
    return construct(TokenEntry, fields)
