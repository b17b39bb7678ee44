"""The protocols between an inference worker, its staging store and its engine. Names and signatures are NeMo Gym's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from tokencustody.staging.records import StagedCallBaseSnapshot, StagedCallRecord, StageResult


@runtime_checkable
class StagingSink(Protocol):
    """Where a worker stages token deltas. Any thread may call it, several at once."""

    def stage(self, record: StagedCallRecord, *, attachments: Mapping[str, Any] | None = None) -> StageResult:
        """Make the record and its attachments durable, all or nothing, and only then return success.

        The same record again is a success; another under the same key is a failed result. `attachments` are opaque
        payloads that no digest covers.
        """
        ...


@runtime_checkable
class StagingSource(Protocol):
    """Where a trainer reads staged token deltas."""

    def fetch(self, staging_keys: list[str]) -> list[StagedCallBaseSnapshot]:
        """Return one verified snapshot per key, in the order of the keys. A key without a record is an error."""
        ...


@runtime_checkable
class WeightVersionProvider(Protocol):
    """Names the version of the weights that the worker serves now."""

    def __call__(self) -> int:
        """Return the weight version, 0 or more."""
        ...


@runtime_checkable
class CaptureAdapter(Protocol):
    """Reads token material from one engine's requests and responses. A malformed payload is a ValueError."""

    def enter_prefix(self, request_payload: dict[str, Any], prefix_ids: list[int]) -> dict[str, Any]:
        """Return the request with `prefix_ids` as the exact beginning of its prompt."""
        ...

    def extract_prompt_ids(self, response_payload: Any) -> list[int]:
        """Return the ids of the whole prompt, prefix included."""
        ...

    def extract_generation(self, response_payload: Any) -> tuple[list[int], list[float]]:
        """Return the sampled ids and their log probabilities (natural logarithms), of equal length."""
        ...

    def extract_extras(self, response_payload: Any) -> dict[str, Any] | None:
        """Return what the trainer needs besides the tokens, as JSON-compatible values, or None."""
        ...
