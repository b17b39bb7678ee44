"""The wire models of worker staging: admissions, staged calls, coordinates, ledger rows and receipts.

Wire format: staging schema 2 of the NeMo Gym token-capture protocols. Every model refuses unknown fields; integers
are strict (a bool is refused), digests are SHA-256 in lowercase hex.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationInfo,
    model_validator,
)

from tokencustody.columns import ColumnModel, Floats, Ids, floats_of, ids_of
from tokencustody.staging.digest import (
    EMPTY_EXTRAS_DIGEST,
    EXTRAS_DIGEST_VERSION,
    STAGING_DIGEST_VERSION,
    STAGING_SCHEMA_VERSION,
    check_exact_floats,
    check_lengths,
    check_position,
    compute_extras_digest,
    compute_staging_digest,
    hash_token_ids,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

CaptureMode = Literal["token_in", "text"]
CaptureDisposition = Literal["staged", "capture_failed"]
DigestHex = Annotated[StrictStr, Field(pattern="^[0-9a-f]{64}$")]
Identifier = Annotated[StrictStr, Field(min_length=1)]
NonNegativeInt = Annotated[StrictInt, Field(ge=0)]
PositiveInt = Annotated[StrictInt, Field(ge=1)]

_COMPUTE_DIGEST = object()


def staging_key(rollout_id: str, model_call_id: str) -> str:
    """Return the key that a call is staged under: "rollout_id/model_call_id". Raises ValueError for an empty id."""
    if not rollout_id or not model_call_id:
        raise ValueError("rollout_id and model_call_id must not be empty")
    return f"{rollout_id}/{model_call_id}"


class _WireModel(BaseModel):
    # Hidden inputs: an error is logged, and token ids do not belong into logs.
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    schema_version: Literal[2] = STAGING_SCHEMA_VERSION


class _DigestWireModel(_WireModel):
    digest_version: Literal[2] = STAGING_DIGEST_VERSION
    extras_digest_version: Literal[1] = EXTRAS_DIGEST_VERSION


class GenerationCutContinuation(_WireModel):
    """What a checkpoint saved of a call that was being generated, for the attempt that issues the call again.

    The worker reads the staged prefix, checks it with `check_prefix`, and generates the rest within
    `effective_output_limit` tokens. With a `terminal_finish_reason` the saved generation was finished, and the worker
    returns it as it is.
    """

    source_model_call_id: Identifier
    source_capture_key: Identifier
    staging_keys: tuple[Identifier, ...] = Field(min_length=1)
    prefix_token_count: NonNegativeInt
    prefix_digest: DigestHex
    effective_output_limit: PositiveInt
    terminal_finish_reason: Literal["stop", "length"] | None = None
    terminal_stop_reason: str | int | None = None

    @model_validator(mode="after")
    def _validate_staging_keys(self) -> Self:
        if len(set(self.staging_keys)) != len(self.staging_keys):
            raise ValueError("staging_keys: a key is named twice")
        if self.terminal_stop_reason is not None and self.terminal_finish_reason is None:
            raise ValueError("a terminal_stop_reason needs the terminal_finish_reason")
        return self

    def check_prefix(self, prefix_token_ids: list[int] | Buffer) -> None:
        """Raise ValueError unless these ids are the saved prefix: as many, and with its cumulative hash."""
        prefix = ids_of(prefix_token_ids, "prefix_token_ids")
        if len(prefix) != self.prefix_token_count:
            raise ValueError(
                f"the staged prefix of model call {self.source_model_call_id} has {len(prefix)} tokens, "
                f"not {self.prefix_token_count}"
            )
        if hash_token_ids(prefix) != self.prefix_digest:
            raise ValueError(
                f"the staged prefix of model call {self.source_model_call_id} does not have its digest"
            )


class CaptureAdmission(_WireModel, ColumnModel):
    """What the gate tells a worker about one call: its identity, and the exact prefix its prompt must begin with.

    A `token_in` call names its prefix inline (`required_prefix_token_ids`, exactly `prev_len` ids, a list or an array
    as for `TokenEntry`) or as the staged records whose deltas form it (`staging_chain`, oldest first). A `text` call
    is a root without a prefix.
    """

    rollout_id: Identifier
    model_call_id: Identifier
    parent_call_id: Identifier | None = None
    prev_len: NonNegativeInt = 0
    mode: CaptureMode
    required_prefix_token_ids: Ids = Field(default_factory=list)
    staging_chain: list[str] = Field(default_factory=list)
    parent_chain_hash: DigestHex | None = None
    generation_cut: GenerationCutContinuation | None = None

    @model_validator(mode="after")
    def _validate_prefix_contract(self) -> Self:
        check_position(self.parent_call_id, self.prev_len, self.mode)
        if self.mode == "text":
            if self.required_prefix_token_ids or self.staging_chain or self.parent_chain_hash is not None:
                raise ValueError("a text admission has no prefix and no parent_chain_hash")
            return self
        if self.parent_chain_hash is None:
            raise ValueError("a token_in admission needs the parent_chain_hash")
        if not self.staging_chain and len(self.required_prefix_token_ids) != self.prev_len:
            raise ValueError(
                f"required_prefix_token_ids has {len(self.required_prefix_token_ids)} ids, not prev_len "
                f"{self.prev_len}, and there is no staging_chain"
            )
        if min(self.required_prefix_token_ids, default=0) < 0:
            raise ValueError("required_prefix_token_ids: an id is negative")
        return self


class StagedCallBaseSnapshot(_DigestWireModel, ColumnModel):
    """Token columns and metadata of one staged call, without its extras.

    `token_ids_delta`, `token_mask_delta` (1.0 for a sampled token, 0.0 for a prompt token) and
    `generation_log_probs_delta` (natural logarithms, 0.0 where the mask is 0.0) have `delta_len` values each, and
    follow the `prev_len` tokens of the parent. They are lists, or arrays as for `TokenEntry`; what a store returns has
    lists. The digest is verified over them and over `extras_digest`; extras that are read from elsewhere must be
    compared to `extras_digest` with `compute_extras_digest`.
    """

    rollout_id: Identifier
    model_call_id: Identifier
    parent_call_id: Identifier | None = None
    mode: CaptureMode
    prev_len: NonNegativeInt
    delta_len: NonNegativeInt
    cum_len: NonNegativeInt
    weight_version: NonNegativeInt
    digest: DigestHex
    token_ids_delta: Ids
    token_mask_delta: Floats
    generation_log_probs_delta: Floats
    extras_digest: DigestHex = EMPTY_EXTRAS_DIGEST
    chain_hash: DigestHex
    cumulative_hash: DigestHex

    @property
    def staging_key(self) -> str:
        """The key that this call is staged under."""
        return staging_key(self.rollout_id, self.model_call_id)

    @model_validator(mode="after")
    def _validate_base_integrity(self, info: ValidationInfo) -> Self:
        covered = [name for name in StagedCallBaseSnapshot.model_fields if name != "digest"]
        digest = compute_staging_digest(**{name: getattr(self, name) for name in covered})
        if info.context is _COMPUTE_DIGEST:
            self.digest = digest
        elif digest != self.digest:
            raise ValueError(f"staged call {self.staging_key}: digest does not match the contents")
        return self


class StagedCallRecord(StagedCallBaseSnapshot):
    """One staged call with its extras, as a worker hands it to a staging sink."""

    extras: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _validate_extras_integrity(self) -> Self:
        try:
            digest = compute_extras_digest(self.extras)
        except TypeError as error:
            raise ValueError(str(error)) from None
        if digest != self.extras_digest:
            raise ValueError(f"staged call {self.staging_key}: extras_digest does not match the extras")
        return self

    @classmethod
    def from_components(
        cls,
        *,
        rollout_id: str,
        model_call_id: str,
        parent_call_id: str | None,
        mode: CaptureMode,
        prev_len: int,
        delta_len: int,
        cum_len: int,
        weight_version: int,
        token_ids_delta: list[int] | Buffer,
        token_mask_delta: list[float] | Buffer,
        generation_log_probs_delta: list[float] | Buffer,
        extras: dict[str, Any] | None,
        extras_digest: str,
        chain_hash: str,
        cumulative_hash: str,
    ) -> Self:
        """Return the validated record of these components, computing its digest once.

        Raises ValueError for a mask value or log probability that is not an exact Python float or one of an array, and
        pydantic's ValidationError (a ValueError) for any other component that the constructor would refuse.
        """
        mask = floats_of(token_mask_delta, "token_mask_delta")
        log_probs = floats_of(generation_log_probs_delta, "generation_log_probs_delta")
        # Validation turns an integer into a float; here it must not pass, since nothing came over the wire.
        check_exact_floats(mask, "token_mask_delta")
        check_exact_floats(log_probs, "generation_log_probs_delta")
        components = {
            "rollout_id": rollout_id,
            "model_call_id": model_call_id,
            "parent_call_id": parent_call_id,
            "mode": mode,
            "prev_len": prev_len,
            "delta_len": delta_len,
            "cum_len": cum_len,
            "weight_version": weight_version,
            "digest": "0" * 64,
            "token_ids_delta": token_ids_delta,
            "token_mask_delta": mask,
            "generation_log_probs_delta": log_probs,
            "extras": extras,
            "extras_digest": extras_digest,
            "chain_hash": chain_hash,
            "cumulative_hash": cumulative_hash,
        }
        return cls.model_validate(components, context=_COMPUTE_DIGEST)


class StagedCallSnapshot(StagedCallRecord):
    """One staged call with its extras, as a staging source returns it."""


class StageResult(_WireModel):
    """What a staging sink says about one record: durable under `staging_key`, or not, with the `error`."""

    ok: bool
    staging_key: Identifier | None = None
    error: str | None = None

    @model_validator(mode="after")
    def _validate_result(self) -> Self:
        if self.ok and self.staging_key is None:
            raise ValueError("a successful stage result needs the staging_key")
        if not self.ok and not self.error:
            raise ValueError("a failed stage result needs an error")
        return self


class CommitCoords(_DigestWireModel):
    """What a worker returns beside its response: where and under which digests the call is staged, without tokens.

    With disposition `capture_failed` nothing is staged, and the five payload fields are None.
    """

    rollout_id: Identifier
    model_call_id: Identifier
    parent_call_id: Identifier | None = None
    prev_len: NonNegativeInt
    delta_len: NonNegativeInt
    cum_len: NonNegativeInt
    weight_version: NonNegativeInt
    disposition: CaptureDisposition = "staged"
    digest: DigestHex | None = None
    extras_digest: DigestHex | None = None
    staging_key: Identifier | None = None
    chain_hash: DigestHex | None = None
    cumulative_hash: DigestHex | None = None

    @model_validator(mode="after")
    def _validate_disposition(self) -> Self:
        check_position(self.parent_call_id, self.prev_len)
        payload = (self.digest, self.extras_digest, self.staging_key, self.chain_hash, self.cumulative_hash)
        if self.disposition == "staged":
            check_lengths(self.prev_len, self.delta_len, self.cum_len)
            if None in payload:
                raise ValueError(
                    "staged coordinates need digest, extras_digest, staging_key, chain_hash and cumulative_hash"
                )
        elif self.delta_len != 0 or self.cum_len != self.prev_len or payload != (None,) * 5:
            raise ValueError("capture_failed coordinates have no delta, no digests and no staging_key")
        return self


class CallRecord(_DigestWireModel):
    """One row of a rollout's manifest in the capture ledger. It has no tokens.

    `admitted_at` is in seconds since the epoch. `capture_key` names the rollout that staged the call when that is
    not the rollout of the ledger: rows that a checkpoint brought in keep it.
    """

    model_call_id: Identifier
    parent_call_id: Identifier | None = None
    prev_len: NonNegativeInt
    delta_len: NonNegativeInt
    cum_len: NonNegativeInt
    weight_version: NonNegativeInt
    digest: DigestHex
    extras_digest: DigestHex
    staging_key: Identifier
    mode: CaptureMode = "token_in"
    chain_hash: DigestHex
    cumulative_hash: DigestHex
    response_id: Identifier
    admitted_at: StrictFloat | None = None
    output_fingerprint: DigestHex | None = None
    continuation_fingerprint: DigestHex | None = None
    fingerprint_version: NonNegativeInt = 0
    capture_key: Identifier | None = None

    @model_validator(mode="after")
    def _validate_lengths(self) -> Self:
        check_position(self.parent_call_id, self.prev_len, self.mode)
        check_lengths(self.prev_len, self.delta_len, self.cum_len)
        return self


class CaptureLedgerCommit(_WireModel):
    """One staged call for `CaptureLedger.record`: the manifest row, and what parent resolution needs besides.

    `staging_chain` names the staged records from the root to this call, itself included. `request_items` and
    `response_items` are the conversation of the call.
    """

    rollout_id: Identifier
    record: CallRecord
    staging_chain: tuple[Identifier, ...] = ()
    request_items: list[dict[str, Any]]
    response_items: list[dict[str, Any]]


class ManifestFailure(_WireModel):
    """A call whose tokens were not captured, and why."""

    model_call_id: Identifier
    reason: Identifier


class RolloutManifest(_WireModel):
    """A rollout's ledger as it is read over HTTP: rows in commit order, and the calls that failed."""

    rollout_id: Identifier
    records: list[CallRecord] = Field(default_factory=list)
    failures: list[ManifestFailure] = Field(default_factory=list)


class RolloutReceipt(_DigestWireModel):
    """What a trainer verifies: the manifest of a finished rollout and the call its answer came from.

    A receipt is in one of three states: trainable (a terminal and the method that chose it, not poisoned); poisoned
    without attribution (no method, no terminal, a reason); or poisoned after attribution, with or without a terminal.
    """

    rollout_id: Identifier
    reward: float | None = None
    terminal_model_call_id: Identifier | None = None
    manifest: list[CallRecord] = Field(default_factory=list)
    capture_poisoned: bool = False
    failure_reason: str | None = None
    terminal_selection: Literal["declared", "response_id", "content", "heuristic"] | None = None
    terminal_attribution_reason: str | None = None

    @model_validator(mode="after")
    def _validate_attribution_state(self) -> Self:
        if self.terminal_selection is None:
            if self.terminal_model_call_id is not None:
                raise ValueError("terminal_model_call_id needs the terminal_selection that chose it")
            if not self.capture_poisoned or self.failure_reason is None:
                raise ValueError("a receipt without terminal_selection is poisoned and has a failure_reason")
        if not self.capture_poisoned:
            if self.terminal_model_call_id is None:
                raise ValueError("a receipt that is not poisoned names its terminal_model_call_id")
            if self.failure_reason is not None:
                raise ValueError("a receipt that is not poisoned has no failure_reason")
        return self

    @model_validator(mode="after")
    def _validate_manifest(self) -> Self:
        calls = [record.model_call_id for record in self.manifest]
        if len(set(calls)) != len(calls):
            raise ValueError("the manifest names a model call twice")
        if self.terminal_model_call_id is not None and self.terminal_model_call_id not in calls:
            raise ValueError(f"terminal model call {self.terminal_model_call_id} is not in the manifest")
        return self


class RolloutRemoval(_WireModel):
    """What `retire` or `delete` did: the rollouts that had records, and those that had none, in input order."""

    removed: list[Identifier] = Field(default_factory=list)
    absent: list[Identifier] = Field(default_factory=list)
