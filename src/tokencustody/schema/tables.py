"""The tables, as the newest migration leaves them. A test holds that the two agree on both databases.

Every primary key begins with (run, rollout_id), so the tables can be distributed by rollout, and no key needs a
sequence that rollouts would share.
"""

from __future__ import annotations

from enum import StrEnum

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKeyConstraint,
    Index,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    cast,
    text,
)

from tokencustody.database.utc_time import UtcTime
from tokencustody.states import AttachmentKind, FailureKind, FenceState, VersionEvent

metadata = MetaData()


def _one_of(column: str, values: type[StrEnum], name: str) -> CheckConstraint:
    return CheckConstraint(f"{column} IN ({', '.join(repr(str(value)) for value in values)})", name=name)


def _rollout_key() -> list[Column[str]]:
    return [Column("run", Text, nullable=False), Column("rollout_id", Text, nullable=False)]


def _belongs_to_fence(table: str) -> ForeignKeyConstraint:
    return ForeignKeyConstraint(
        ["run", "rollout_id"], ["fences.run", "fences.rollout_id"], name=f"fk_{table}_fence"
    )


fences = Table(
    "fences",
    metadata,
    *_rollout_key(),
    Column("state", Text, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("snapshot_id", Text),
    Column("incomplete", Boolean, nullable=False),
    Column("opened_at", UtcTime, nullable=False),
    Column("frozen_at", UtcTime),
    Column("retired_at", UtcTime),
    PrimaryKeyConstraint("run", "rollout_id", name="pk_fences"),
    _one_of("state", FenceState, "ck_fences_state"),
    CheckConstraint("version >= 0", name="ck_fences_version"),
    CheckConstraint("state <> 'frozen' OR snapshot_id IS NOT NULL", name="ck_fences_frozen_has_snapshot"),
)

entries = Table(
    "entries",
    metadata,
    *_rollout_key(),
    Column("model_call_id", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("response_id", Text),
    Column("prompt_len", BigInteger, nullable=False),
    Column("generation_len", BigInteger, nullable=False),
    Column("cum_len", BigInteger),
    Column("token_width", SmallInteger, nullable=False),
    Column("digest", Text),
    Column("parent_call_id", Text),
    Column("parent_resolution", Text),
    Column("parent_resolution_reason", Text, nullable=False),
    Column("prompt_is_delta", Boolean, nullable=False),
    Column("continuation_fingerprint", Text, nullable=False),
    Column("continuation_context_len", BigInteger, nullable=False),
    Column("continuation_context_digest", Text, nullable=False),
    Column("fingerprint_version", BigInteger),
    Column("created_at", Double),
    Column("committed_at", UtcTime, nullable=False),
    Column("written_by", Text, nullable=False),
    # The SHA-256 of the whole payload, whatever of it is stored.
    Column("payload_sha256", Text, nullable=False),
    # How many prompt ids the payload leaves out: the whole sequence of the call `parent_call_id`, or none.
    Column("shared_len", BigInteger, server_default=text("0"), nullable=False),
    # The SHA-256 of the bytes in `payload` where they are not the whole payload.
    Column("stored_sha256", Text),
    # Last, because SQLite walks through a long value to what stands behind it.
    Column("payload", LargeBinary, nullable=False),
    PrimaryKeyConstraint("run", "rollout_id", "model_call_id", name="pk_entries"),
    _belongs_to_fence("entries"),
    CheckConstraint("prompt_len >= 0", name="ck_entries_prompt_len"),
    CheckConstraint("generation_len >= 0", name="ck_entries_generation_len"),
    CheckConstraint("cum_len >= 0", name="ck_entries_cum_len"),
    CheckConstraint("continuation_context_len >= 0", name="ck_entries_continuation_context_len"),
    CheckConstraint("token_width IN (2, 4, 8)", name="ck_entries_token_width"),
    CheckConstraint(
        "parent_resolution IN ('root', 'resolved', 'unresolved')", name="ck_entries_parent_resolution"
    ),
    CheckConstraint("length(payload_sha256) = 64", name="ck_entries_payload_sha256"),
    CheckConstraint("shared_len >= 0", name="ck_entries_shared_len"),
    CheckConstraint("shared_len <= prompt_len", name="ck_entries_shared_len_in_prompt"),
    CheckConstraint("shared_len = 0 OR parent_call_id IS NOT NULL", name="ck_entries_shared_has_parent"),
    CheckConstraint("(shared_len = 0) = (stored_sha256 IS NULL)", name="ck_entries_shared_has_stored_sha256"),
    CheckConstraint("length(stored_sha256) = 64", name="ck_entries_stored_sha256"),
    Index("ix_entries_continuation_fingerprint", "run", "rollout_id", "continuation_fingerprint"),
)

intents = Table(
    "intents",
    metadata,
    *_rollout_key(),
    Column("model_call_id", Text, nullable=False),
    Column("refusal_code", Text),
    Column("begun_at", UtcTime, nullable=False),
    Column("refused_at", UtcTime),
    Column("written_by", Text, nullable=False),
    PrimaryKeyConstraint("run", "rollout_id", "model_call_id", name="pk_intents"),
    _belongs_to_fence("intents"),
    # An engine may refuse without a code.
    CheckConstraint("refusal_code IS NULL OR refused_at IS NOT NULL", name="ck_intents_refusal"),
)

failures = Table(
    "failures",
    metadata,
    *_rollout_key(),
    Column("version", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("model_call_id", Text, nullable=False),
    Column("first_payload_sha256", Text),
    Column("second_payload_sha256", Text),
    Column("differing_fields", Text, nullable=False),
    Column("recorded_at", UtcTime, nullable=False),
    Column("written_by", Text, nullable=False),
    # By what a request is known that continues the second payload. Conflicts before revision 0005 have none.
    Column("second_fingerprint", Text),
    Column("second_fingerprint_version", BigInteger),
    Column("second_context_len", BigInteger),
    Column("second_context_digest", Text),
    PrimaryKeyConstraint("run", "rollout_id", "version", name="pk_failures"),
    _belongs_to_fence("failures"),
    _one_of("kind", FailureKind, "ck_failures_kind"),
    CheckConstraint("version >= 1", name="ck_failures_version"),
)

snapshot_versions = Table(
    "snapshot_versions",
    metadata,
    *_rollout_key(),
    Column("version", BigInteger, nullable=False),
    Column("event", Text, nullable=False),
    Column("event_id", Text, nullable=False),
    Column("model_call_id", Text, nullable=False),
    Column("snapshot_id", Text),
    Column("recorded_at", UtcTime, nullable=False),
    Column("written_by", Text, nullable=False),
    # The hash of what the rollout held (see `txn.seal`), and which hash it is: none is the one of revision 0004.
    # Freezes before that have no seal.
    Column("sealed_sha256", Text),
    Column("seal_version", BigInteger),
    PrimaryKeyConstraint("run", "rollout_id", "version", name="pk_snapshot_versions"),
    UniqueConstraint("run", "rollout_id", "event_id", name="uq_snapshot_versions_event_id"),
    _belongs_to_fence("snapshot_versions"),
    _one_of("event", VersionEvent, "ck_snapshot_versions_event"),
    CheckConstraint("version >= 0", name="ck_snapshot_versions_version"),
    CheckConstraint("length(sealed_sha256) = 64", name="ck_snapshot_versions_sealed_sha256"),
)

# What was handed over in files. It stays when the rollout is retired, so that a person finds the files.
exports = Table(
    "exports",
    metadata,
    *_rollout_key(),
    Column("export_id", Text, nullable=False),
    Column("snapshot_id", Text, nullable=False),
    Column("version", BigInteger, nullable=False),
    # The name of the folder, and the SHA-256 of the manifest in it.
    Column("destination", Text, nullable=False),
    Column("manifest_sha256", Text, nullable=False),
    Column("exported_at", UtcTime, nullable=False),
    Column("written_by", Text, nullable=False),
    # Whether every token that was sampled in the snapshot is in the files. Marks from before revision 0005 do not say.
    Column("is_held", Boolean),
    PrimaryKeyConstraint("run", "rollout_id", "export_id", name="pk_exports"),
    _belongs_to_fence("exports"),
    CheckConstraint("version >= 1", name="ck_exports_version"),
    CheckConstraint("length(manifest_sha256) = 64", name="ck_exports_manifest_sha256"),
)

wire_schema = Table(
    "wire_schema",
    metadata,
    Column("name", Text, nullable=False),
    Column("version", BigInteger, nullable=False),
    PrimaryKeyConstraint("name", name="pk_wire_schema"),
    CheckConstraint("version >= 1", name="ck_wire_schema_version"),
)

ledger_calls = Table(
    "ledger_calls",
    metadata,
    *_rollout_key(),
    Column("model_call_id", Text, nullable=False),
    Column("position", BigInteger, nullable=False),
    Column("staging_key", Text, nullable=False),
    Column("capture_key", Text),
    Column("response_id", Text),
    Column("parent_call_id", Text),
    Column("mode", Text, nullable=False),
    Column("prev_len", BigInteger, nullable=False),
    Column("delta_len", BigInteger, nullable=False),
    Column("cum_len", BigInteger, nullable=False),
    Column("weight_version", BigInteger, nullable=False),
    Column("digest", Text, nullable=False),
    Column("extras_digest", Text, nullable=False),
    Column("chain_hash", Text),
    Column("cumulative_hash", Text, nullable=False),
    Column("output_fingerprint", Text),
    Column("continuation_fingerprint", Text),
    Column("fingerprint_version", BigInteger, nullable=False),
    Column("continuation_context_len", BigInteger, nullable=False),
    Column("continuation_context_digest", Text, nullable=False),
    Column("staging_chain", Text, nullable=False),
    Column("admitted_at", Double),
    Column("committed_at", UtcTime, nullable=False),
    Column("written_by", Text, nullable=False),
    Column("payload_sha256", Text, nullable=False),
    # The hash of the other columns: see `codec.row_hash`. Rows that are older than revision 0004 have none.
    Column("row_sha256", Text),
    # What the record said, where the columns without `recorded_` hold what the store derived from the conversation.
    # Rows that are older than revision 0005 have none: theirs hold what their record said.
    Column("recorded_fingerprint", Text),
    Column("recorded_fingerprint_version", BigInteger),
    PrimaryKeyConstraint("run", "rollout_id", "model_call_id", name="pk_ledger_calls"),
    UniqueConstraint("run", "rollout_id", "position", name="uq_ledger_calls_position"),
    _belongs_to_fence("ledger_calls"),
    CheckConstraint("mode IN ('text', 'token_in')", name="ck_ledger_calls_mode"),
    CheckConstraint("position >= 1", name="ck_ledger_calls_position"),
    CheckConstraint("prev_len >= 0", name="ck_ledger_calls_prev_len"),
    CheckConstraint("delta_len >= 0", name="ck_ledger_calls_delta_len"),
    CheckConstraint("cum_len = prev_len + delta_len", name="ck_ledger_calls_cum_len"),
    CheckConstraint("weight_version >= 0", name="ck_ledger_calls_weight_version"),
    CheckConstraint("continuation_context_len >= 0", name="ck_ledger_calls_continuation_context_len"),
    CheckConstraint("length(payload_sha256) = 64", name="ck_ledger_calls_payload_sha256"),
    CheckConstraint("length(row_sha256) = 64", name="ck_ledger_calls_row_sha256"),
    Index("ix_ledger_calls_continuation_fingerprint", "run", "rollout_id", "continuation_fingerprint"),
)

ledger_failures = Table(
    "ledger_failures",
    metadata,
    *_rollout_key(),
    Column("model_call_id", Text, nullable=False),
    Column("position", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("recorded_at", UtcTime, nullable=False),
    Column("written_by", Text, nullable=False),
    Column("row_sha256", Text),
    # By its position, for a call may have failed for several reasons, which may be longer than an index holds.
    PrimaryKeyConstraint("run", "rollout_id", "position", name="pk_ledger_failures"),
    _belongs_to_fence("ledger_failures"),
    CheckConstraint("position >= 1", name="ck_ledger_failures_position"),
    CheckConstraint("length(reason) >= 1", name="ck_ledger_failures_reason"),
    CheckConstraint("length(row_sha256) = 64", name="ck_ledger_failures_row_sha256"),
    Index("ix_ledger_failures_model_call_id", "run", "rollout_id", "model_call_id"),
)

# No fence: what a worker staged outlives the rollout's records until its framework deletes it.
staged_calls = Table(
    "staged_calls",
    metadata,
    *_rollout_key(),
    Column("model_call_id", Text, nullable=False),
    Column("parent_call_id", Text),
    Column("mode", Text, nullable=False),
    Column("prev_len", BigInteger, nullable=False),
    Column("delta_len", BigInteger, nullable=False),
    Column("cum_len", BigInteger, nullable=False),
    Column("weight_version", BigInteger, nullable=False),
    Column("digest", Text, nullable=False),
    Column("extras_digest", Text, nullable=False),
    Column("chain_hash", Text, nullable=False),
    Column("cumulative_hash", Text, nullable=False),
    Column("token_width", SmallInteger, nullable=False),
    Column("staged_at", UtcTime, nullable=False),
    Column("written_by", Text, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("payload_sha256", Text, nullable=False),
    Column("extras", LargeBinary),
    # Which attachments it was staged with: see `codec.attachments`. Calls from before revision 0005 do not say.
    Column("attachments_sha256", Text),
    PrimaryKeyConstraint("run", "rollout_id", "model_call_id", name="pk_staged_calls"),
    CheckConstraint("mode IN ('text', 'token_in')", name="ck_staged_calls_mode"),
    CheckConstraint("prev_len >= 0", name="ck_staged_calls_prev_len"),
    CheckConstraint("delta_len >= 1", name="ck_staged_calls_delta_len"),
    CheckConstraint("cum_len = prev_len + delta_len", name="ck_staged_calls_cum_len"),
    CheckConstraint("weight_version >= 0", name="ck_staged_calls_weight_version"),
    CheckConstraint("token_width IN (2, 4, 8)", name="ck_staged_calls_token_width"),
    CheckConstraint("length(payload_sha256) = 64", name="ck_staged_calls_payload_sha256"),
    CheckConstraint("length(attachments_sha256) = 64", name="ck_staged_calls_attachments_sha256"),
)

staged_attachments = Table(
    "staged_attachments",
    metadata,
    *_rollout_key(),
    Column("model_call_id", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("dtype", Text),
    Column("shape", Text),
    Column("data", LargeBinary, nullable=False),
    Column("data_sha256", Text, nullable=False),
    Column("row_sha256", Text),
    PrimaryKeyConstraint("run", "rollout_id", "model_call_id", "name", name="pk_staged_attachments"),
    ForeignKeyConstraint(
        ["run", "rollout_id", "model_call_id"],
        ["staged_calls.run", "staged_calls.rollout_id", "staged_calls.model_call_id"],
        name="fk_staged_attachments_call",
    ),
    _one_of("kind", AttachmentKind, "ck_staged_attachments_kind"),
    CheckConstraint("(kind = 'buffer') = (dtype IS NOT NULL)", name="ck_staged_attachments_dtype"),
    CheckConstraint("(kind = 'buffer') = (shape IS NOT NULL)", name="ck_staged_attachments_shape"),
    CheckConstraint("length(data_sha256) = 64", name="ck_staged_attachments_data_sha256"),
    CheckConstraint("length(row_sha256) = 64", name="ck_staged_attachments_row_sha256"),
)

# Every table that belongs to rollouts, each after those it refers to.
OF_ROLLOUTS = tuple(table for table in metadata.sorted_tables if "run" in table.c)

# As bytes even when somebody's UPDATE, or a flipped bit, turned SQLite's BLOB into TEXT: its hash then tells.
stored_payload = cast(entries.c.payload, LargeBinary).label("payload")
