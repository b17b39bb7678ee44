"""The staging store of the transport in memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from tests.conformance.memory import Backend
from tokencustody.staging.digest import hash_token_ids
from tokencustody.staging.records import StagedCallBaseSnapshot, StagedCallRecord, StageResult

JSON_TYPES = (str, int, float, bool, type(None))


class MemoryStaging:
    """A staging store in one client, which any thread may call. A broken one overrides one method."""

    def __init__(self, backend: Backend, run: str = "run") -> None:
        self.backend = backend
        self.run = run

    # What broken staging stores like to get wrong.

    def key(self, staging_key: str) -> tuple[str, str]:
        return self.run, staging_key

    def proven(self, record: StagedCallRecord) -> StagedCallRecord:
        return StagedCallRecord.model_validate(record.model_dump())

    def kept(self, value: Any) -> Any:
        if type(value) is list:
            return [self.kept(item) for item in value]
        if type(value) is dict and all(type(key) is str for key in value):
            return {key: self.kept(item) for key, item in value.items()}
        if type(value) is bytes or type(value) in JSON_TYPES:
            return value
        view = memoryview(value)
        copied = memoryview(view.tobytes())
        return copied.cast(view.format, view.shape) if len(view) else copied.cast(view.format)

    def same(self, known: tuple[Any, Any], given: tuple[Any, Any]) -> bool:
        # By text: 1 equals 1.0, and True both.
        (record, kept), (other, others) = known, given
        return repr((record, _plain(kept))) == repr((other, _plain(others)))

    def store(self, key: tuple[str, str], call: tuple[Any, Any]) -> tuple[Any, Any]:
        with self.backend.lock:
            return self.backend.staged.setdefault(key, call)

    def found(self, staging_key: str) -> tuple[Any, Any]:
        return self.backend.staged[self.key(staging_key)]

    # The staging store.

    def stage(self, record: StagedCallRecord, *, attachments: Mapping[str, Any] | None = None) -> StageResult:
        try:
            proven = self.proven(record)
            kept = {name: self.kept(value) for name, value in (attachments or {}).items()}
        except (ValueError, TypeError) as exc:
            return StageResult(ok=False, error=str(exc))
        first = self.store(self.key(proven.staging_key), (proven, kept))
        if not self.same(first, (proven, kept)):
            return StageResult(ok=False, error="another record was staged under this key")
        return StageResult(ok=True, staging_key=proven.staging_key)

    def fetch(self, staging_keys: list[str]) -> list[StagedCallBaseSnapshot]:
        return [self.found(key)[0] for key in staging_keys]

    def fetch_extras(self, staging_keys: list[str]) -> list[dict[str, Any] | None]:
        return [copy.deepcopy(self.found(key)[0].extras) for key in staging_keys]

    def fetch_attachments(self, staging_key: str) -> dict[str, Any]:
        return dict(self.found(staging_key)[1])

    def fetch_prefix_token_ids(self, staging_chain: list[str]) -> list[int]:
        token_ids: list[int] = []
        last = None
        for record in self.fetch(staging_chain):
            if record.prev_len != len(token_ids):
                raise ValueError("the keys are no chain")
            token_ids += record.token_ids_delta
            last = record
        self.prove_prefix(token_ids, last)
        return token_ids

    def prove_prefix(self, token_ids: list[int], last: StagedCallBaseSnapshot | None) -> None:
        if last is not None and hash_token_ids(token_ids) != last.cumulative_hash:
            raise ValueError("the keys are no chain")

    def delete(self, staging_keys: list[str]) -> None:
        with self.backend.lock:
            for key in staging_keys:
                self.backend.staged.pop(self.key(key), None)


def _plain(attachments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: (value.format, value.shape, value.tobytes()) if isinstance(value, memoryview) else value
        for name, value in sorted(attachments.items())
    }
